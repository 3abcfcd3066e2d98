"""Bytes: what an operator must move, and what backward keeps.

Counted for one sequence, like FLOPs. These are the bytes of perfect caching: each operand read once, each result
written once. A device with small caches moves more; `predict` models that.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from flopwise.work.formats import NARROW_BYTES, OPERAND_BYTES, QUANTISED_BITS, WIDTH_BYTES, Formats, quantised_bytes
from flopwise.work.op import Attention, Gemm, Op, Streaming, Tensor, Weight
from flopwise.work.work import Recompute, Work


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one call of one copy: those that grow with the batch, and the weights' that do not."""

    per_sequence: int
    fixed: int = 0


def tensor_bytes(tensor: Tensor, formats: Formats) -> int:
    """Bytes of one copy of a tensor."""
    if tensor.format == "index":
        return 4 * tensor.elements
    # Statistics are fp32, or as wide as the activations where those are wider.
    return tensor.elements * (formats.compute_bytes if tensor.format == "compute" else formats.statistics_bytes)


def forward_traffic(
    work: Work, op: Op, formats: Formats, *, fused: bool, after: frozenset[str] | None = None
) -> Traffic:
    """Bytes that one call reads and writes going forward.

    `after` names the operators that run before it when a forward is made again in part; None: all of them do.
    """
    written = _sizes(work, op.outputs, formats)
    if not isinstance(op, Streaming):
        there = written if isinstance(op, Gemm) and op.adds else 0
        return Traffic(there + written + _sizes(work, op.inputs, formats), _weight_bytes(op, formats.compute))
    if op.kind in ("embedding", "choose"):
        # One row read of each table for every row written; of what is chosen no more is read than written.
        return Traffic((1 + (len(op.weights) or 1)) * written)
    read = _sizes(work, op.inputs, formats)
    if op.kind == "cross_entropy":
        # One pass for maximum and sum; the gradient is written over the logits in backward.
        return Traffic(read * (1 if fused else 2 * op.eager_kernels))
    if not fused:
        return Traffic((read + written) * op.eager_kernels)
    # What the kernel before has just made stays in registers when both are one kernel.
    before = _streaming_before(work, op)
    if op.normed:
        return Traffic(read + written, _norm_bytes(op, formats))
    if before is not None and (after is None or before.name in after):
        read -= _sizes(work, tuple(name for name in op.inputs if name in before.outputs), formats)
    return Traffic(read + written)


def backward_traffic(work: Work, op: Op, formats: Formats, *, fused: bool) -> Traffic:
    """Bytes that one call reads and writes going backward.

    Gradients of the outputs and what was kept are read, gradients of the inputs written. A matrix product does
    this in two kernels, each reading the output's gradient; the weights' gradient is not in it, since all calls of
    a layer share one. By-products that no operator reads, such as a norm's statistics, have no gradient.
    """
    inputs, kept = _sizes(work, op.inputs, formats), _sizes(work, op.needs, formats)
    # The block's output is read by the next block, which the list of one block's operators does not show.
    used = {name for other in work.ops for name in other.inputs} | {"output"}
    outputs = _sizes(work, tuple(name for name in op.outputs if name in used), formats)
    if isinstance(op, Gemm):
        kernels = 1 if op.frozen == op.layers else 2
        return Traffic(inputs + kept + kernels * outputs, _weight_bytes(op, formats.compute))
    if not isinstance(op, Streaming):
        return Traffic(inputs + outputs + kept)
    if op.kind == "embedding":
        # Each row of the gradient is read and added to a row of the table.
        return Traffic(3 * _sizes(work, op.outputs, formats))
    if op.kind == "cross_entropy":
        return Traffic(2 * inputs if fused else 3 * inputs)
    if op.kind == "residual":
        # The gradient passes through; only its sum with the other branch's is work, part of the norm when fused.
        return Traffic(outputs if fused else 3 * outputs)
    if op.normed:
        # One kernel sums the gradient times what was scaled, another scales it.
        kept += outputs
    kept += _sizes(work, op.also_kept, formats)
    return Traffic((inputs + outputs + kept) * (1 if fused else op.eager_kernels), _norm_bytes(op, formats))


def _norm_bytes(op: Streaming, formats: Formats) -> int:
    """Bytes of taking the norms of matrices' rows with their adapters: of their squares, and of products with A.

    V = W + scale · B·A is never made: |V|² = |W|² + 2 · scale · (W·Aᵀ)·B + scale² · B·(A·Aᵀ)·B, row by row.
    """
    kept = formats.kept_as(in_block=True, matrix=True)
    found = 0
    for rows, depth in op.normed:
        found += 2 * rows * depth * formats.compute_bytes
        if kept in QUANTISED_BITS:
            found += quantised_bytes(rows, depth, kept) + rows * depth * formats.compute_bytes
    return found


def softmax_traffic(op: Attention, formats: Formats) -> tuple[int, int]:
    """Bytes of eager attention's masked softmax over the whole square, one copy: forward and backward.

    Its scale, mask, maximum-and-sum and quotient are two passes of a read and a write; its backward reads the
    probabilities and their gradient and writes that of the scores.
    """
    square = op.tokens * op.tokens * op.parts * op.heads * formats.compute_bytes
    return 4 * square, 3 * square


def key_sums_bytes(work: Work) -> int:
    """Bytes of reading and writing the gradients of a sequence's keys and values so far, which are summed in fp32."""
    return 2 * WIDTH_BYTES["fp32"] * sum(work.tensors[name].elements for name in ("key", "value"))


def least_bytes(work: Work, op: Op, formats: Formats, sequences: int, again: Fraction) -> int:
    """Bytes of one operator for `sequences` sequences at once: forward, backward and what is made again.

    Of uneven ones as many as have the mean of those that are described.

    The weights' gradient is written once for each layer.
    """
    forward = forward_traffic(work, op, formats, fused=True)
    backward = backward_traffic(work, op, formats, fused=True)
    once = work.of_batch(forward.per_sequence, sequences) + forward.fixed
    total = op.layers * once + op.reached * int(once * again)
    total += op.reached * (work.of_batch(backward.per_sequence, sequences) + backward.fixed)
    gradient = _weight_bytes(op, formats.gradients) if isinstance(op, Gemm) else 0
    return op.calls * total + (op.layers - op.frozen) * gradient


def _streaming_before(work: Work, op: Op) -> Streaming | None:
    place = next(index for index, other in enumerate(work.ops) if other is op)
    before = work.ops[place - 1] if place else None
    if not isinstance(before, Streaming) or before.normed:
        # Rows are scaled by a kernel of its own.
        return None
    return before if before.in_block == op.in_block else None


def _sizes(work: Work, names: tuple[str, ...], formats: Formats) -> int:
    return sum(tensor_bytes(work.tensors[name], formats) for name in names)


def frozen_bytes(op: Op, weight: Weight, formats: Formats) -> int:
    """Bytes of one copy of a weight that is not trained."""
    matrix = isinstance(op, Gemm) and weight.kind == "weight"
    kept = formats.kept_as(in_block=op.in_block, matrix=matrix)
    if kept in QUANTISED_BITS:
        return quantised_bytes(weight.elements // weight.shape[-1], weight.shape[-1], kept)
    return weight.elements * WIDTH_BYTES[kept]


def weights_bytes(work: Work, formats: Formats) -> int:
    """Bytes of all weights: those that are trained, and those that are not."""
    frozen = sum(
        op.frozen * frozen_bytes(op, weight, formats)
        for op in work.ops
        for weight in op.weights
        if weight.owned and not weight.buffer
    )
    return work.trained_parameters * WIDTH_BYTES[formats.weights] + frozen


def dequantise_bytes(op: Op, formats: Formats) -> int:
    """Bytes of bringing one copy of a quantised matrix into the products' format, at every use; 0: it is not."""
    quantised = op.frozen and isinstance(op, Gemm) and formats.kept_as(in_block=op.in_block, matrix=True)
    if quantised not in QUANTISED_BITS:
        return 0
    matrix = op.weights[0]
    return frozen_bytes(op, matrix, formats) + matrix.elements * formats.compute_bytes


def _weight_bytes(op: Op, number_format: str) -> int:
    """Of the matrices; a bias is added on the way out and is not worth a line of traffic."""
    return sum(weight.elements for weight in op.weights if len(weight.shape) > 1) * WIDTH_BYTES[number_format]


def saved_bytes(work: Work, policy: Recompute, formats: Formats) -> int:
    """Bytes that one sequence keeps from forward to backward, in all layers."""
    return sum(work.copies_of(tensor) * tensor_bytes(tensor, formats) for tensor in work.saved(policy))


def block_saved_bytes(work: Work, policy: Recompute, formats: Formats) -> int:
    """The same for one layer of the block alone."""
    inside = {name for op in work.ops if op.in_block for name in (*op.inputs, *op.outputs)}
    return sum(tensor_bytes(tensor, formats) for tensor in work.saved(policy) if tensor.name in inside)


def cast_bytes(op: Op, formats: Formats) -> Traffic:
    """Bytes of bringing a product's operands into the format it multiplies in, one copy, forward.

    Weights in a wider format are cast once for all calls of a layer (`fixed`); fp8 takes the activations too.
    """
    weights = sum(weight.elements for weight in op.weights)
    fixed = per_sequence = 0
    kept = formats.kept_as(in_block=op.in_block, matrix=True) if op.frozen == op.layers else formats.weights
    if WIDTH_BYTES.get(kept, 0) > formats.compute_bytes and kept not in QUANTISED_BITS:
        fixed += weights * (WIDTH_BYTES[kept] + formats.compute_bytes)
    if formats.matrix in NARROW_BYTES and op.in_block and isinstance(op, Gemm):
        moved = _cast_forward(formats)
        # What is gathered narrow was cast by those who hold a shard of it: a small part of this.
        fixed += 0 if formats.gathered else round(weights * moved)
        per_sequence += round(op.rows * op.depth * moved)
    return Traffic(per_sequence, fixed)


def _cast_forward(formats: Formats) -> float:
    """Bytes of casting a number into the products' format, where its rows are what is multiplied."""
    width, narrow = formats.compute_bytes, OPERAND_BYTES[formats.matrix]
    # The largest number of a whole tensor is looked for in a pass of its own; that of a row stays near.
    return (2 if formats.scaled_by == "tensorwise" else 1) * width + narrow


def _cast_columns(formats: Formats, *, is_cast: bool) -> float:
    """The same where its columns are, which the units want to be rows; `is_cast`: its rows are there, cast."""
    width, narrow = formats.compute_bytes, OPERAND_BYTES[formats.matrix]
    match formats.scaled_by:
        case "rowwise":
            return 2 * width + narrow
        case "blocks":
            return width + narrow
        case "delayed" if not is_cast:
            # One kernel writes both.
            return narrow
    # The same numbers, laid out anew.
    return 2 * narrow


def cast_back_bytes(op: Gemm, formats: Formats) -> Traffic:
    """Bytes of the same in backward, one copy.

    The gradient of the output is cast by rows, for the input's gradient, and by columns, for the matrix's; the input
    and the matrix (`fixed`), whose rows went forward, by columns. Products with scales for rows are made as the engine
    makes them: the matrix's gradient is read once more to be added to the sum, which is read and written.
    """
    if formats.matrix not in NARROW_BYTES or not op.in_block:
        return Traffic(0)
    again = _cast_columns(formats, is_cast=True)
    gradient = _cast_forward(formats) + _cast_columns(formats, is_cast=False)
    matrix = again
    if formats.scaled_by == "rowwise":
        matrix += formats.compute_bytes + 2 * WIDTH_BYTES[formats.gradients]
    fixed = sum(weight.elements for weight in op.weights) * matrix
    return Traffic(round(op.rows * (op.columns * gradient + op.depth * again)), round(fixed))


def scale_traffic(traffic: Traffic, share: Fraction) -> Traffic:
    """A part of an operator's traffic, for a forward that is only partly made again."""
    return Traffic(int(traffic.per_sequence * share), int(traffic.fixed * share))
