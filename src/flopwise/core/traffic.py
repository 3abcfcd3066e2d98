"""Bytes: what an operator must move, what backward keeps, and what an update touches.

Counted for one sequence, like FLOPs. These are the bytes of perfect caching: each operand read once, each result
written once. A device with small caches moves more; `predict` models that.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from flopwise.core.formats import WIDTH_BYTES, Formats
from flopwise.core.op import Gemm, Op, Streaming, Tensor
from flopwise.core.work import Recompute, Work


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one call of one copy: those that grow with the batch, and the weights' that do not."""

    per_sequence: int
    fixed: int


def tensor_bytes(tensor: Tensor, formats: Formats) -> int:
    """Bytes of one copy of a tensor."""
    width = formats.compute_bytes if tensor.format == "compute" else 4
    return tensor.elements * width


def forward_traffic(work: Work, op: Op, formats: Formats, *, fused: bool) -> Traffic:
    """Bytes that one call reads and writes going forward."""
    moved = _sizes(work, op.outputs, formats)
    if isinstance(op, Streaming):
        return _streaming_forward(work, op, formats, fused=fused, written=moved)
    return Traffic(moved + _sizes(work, op.inputs, formats), _weight_bytes(op, formats.compute))


def backward_traffic(work: Work, op: Op, formats: Formats, *, fused: bool) -> Traffic:
    """Bytes that one call reads and writes going backward.

    Gradients of the outputs and what was kept are read, gradients of the inputs written. A matrix product does
    this in two kernels, each reading the output's gradient; the weight gradient is read and written (summed).
    """
    inputs, outputs = _sizes(work, op.inputs, formats), _sizes(work, op.outputs, formats)
    kept = _sizes(work, op.needs, formats)
    if isinstance(op, Gemm):
        summed = 2 * _weight_bytes(op, formats.gradients)
        return Traffic(inputs + kept + 2 * outputs, _weight_bytes(op, formats.compute) + summed)
    if isinstance(op, Streaming):
        return _streaming_backward(work, op, formats, fused=fused)
    return Traffic(inputs + outputs + kept, 0)


def _streaming_forward(work: Work, op: Streaming, formats: Formats, *, fused: bool, written: int) -> Traffic:
    if op.kind == "embedding":
        # One row read of each table for every row written.
        return Traffic((1 + len(op.weights)) * written, 0)
    if op.kind == "cross_entropy":
        # One pass for maximum and sum; the gradient is written over the logits in backward.
        return Traffic(_sizes(work, op.inputs, formats) * (1 if fused else 2 * op.eager_kernels), 0)
    read = _sizes(work, op.inputs, formats)
    if fused:
        # What the kernel before has just made stays in registers when both are one kernel.
        before = _streaming_before(work, op)
        read -= _sizes(work, tuple(name for name in op.inputs if before and name in before.outputs), formats)
        return Traffic(read + written, 0)
    return Traffic((read + written) * op.eager_kernels, 0)


def _streaming_backward(work: Work, op: Streaming, formats: Formats, *, fused: bool) -> Traffic:
    inputs, outputs = _sizes(work, op.inputs, formats), _sizes(work, op.outputs, formats)
    kept = _sizes(work, op.needs, formats)
    if op.kind == "embedding":
        # Each row of the gradient is read and added to a row of the table.
        return Traffic(3 * outputs, 0)
    if op.kind == "cross_entropy":
        return Traffic(2 * inputs if fused else 3 * inputs, 0)
    if op.name.startswith("residual"):
        # The gradient passes through; only its sum with the other branch's is work, part of the norm when fused.
        return Traffic(outputs if fused else 3 * outputs, 0)
    return Traffic((inputs + outputs + kept) * (1 if fused else op.eager_kernels), 0)


def _streaming_before(work: Work, op: Op) -> Streaming | None:
    place = next(index for index, other in enumerate(work.ops) if other is op)
    before = work.ops[place - 1] if place else None
    return before if isinstance(before, Streaming) and before.in_block == op.in_block else None


def _sizes(work: Work, names: tuple[str, ...], formats: Formats) -> int:
    return sum(tensor_bytes(work.tensors[name], formats) for name in names)


def _weight_bytes(op: Op, number_format: str) -> int:
    return sum(weight.elements for weight in op.weights) * WIDTH_BYTES[number_format]


def saved_bytes(work: Work, policy: Recompute, formats: Formats) -> int:
    """Bytes that one sequence keeps from forward to backward, in all layers."""
    return sum(work.copies_of(tensor) * tensor_bytes(tensor, formats) for tensor in work.saved(policy))


def block_saved_bytes(work: Work, policy: Recompute, formats: Formats) -> int:
    """The same for one layer of the block alone."""
    inside = {name for op in work.ops if op.in_block for name in (*op.inputs, *op.outputs)}
    return sum(tensor_bytes(tensor, formats) for tensor in work.saved(policy) if tensor.name in inside)


def update_bytes_per_parameter(formats: Formats, moments: int) -> int:
    """Bytes that an optimizer moves: gradient read, moments and master read and written, weight written.

    The weight is read as well where there is no master copy to start from.
    """
    weight = WIDTH_BYTES[formats.weights]
    master = 2 * WIDTH_BYTES[formats.master] if formats.master else weight
    return WIDTH_BYTES[formats.gradients] + 2 * moments * WIDTH_BYTES[formats.moments] + weight + master


def scaled(traffic: Traffic, share: Fraction) -> Traffic:
    """A part of an operator's traffic, for a forward that is only partly made again."""
    return Traffic(int(traffic.per_sequence * share), int(traffic.fixed * share))
