"""Bytes that are held for a while within a step, beside the state and what backward keeps."""

from __future__ import annotations

from flopwise.work.formats import QUANTISED_BITS, WIDTH_BYTES, Formats
from flopwise.work.op import Attention, Gemm, Op
from flopwise.work.traffic import tensor_bytes
from flopwise.work.transformer import Transformer
from flopwise.work.work import SCORES, Recompute, Work


def logits_bytes(work: Work, formats: Formats, *, fused: bool) -> int:
    """Bytes of one sequence's logits.

    A fused loss writes the gradient over the logits, so there is one buffer. Plain code holds the logits, their
    fp32 copy and the log-softmax that backward reads.
    """
    logits = work.tensors["logits"]
    extra = 0 if fused else 2 * WIDTH_BYTES["fp32"]
    return tensor_bytes(logits, formats) + logits.elements * extra


def dropout_bytes(work: Work, policy: Recompute, formats: Formats) -> int:
    """Bytes of one sequence that dropout keeps more in one layer of a transformer.

    A mask of one byte for each number behind attention's and the feed-forward part's last product; where the scores are
    kept, a mask for them and the scores after it. By Korthikanti et al. (arXiv 2205.05198, section 4.1) 2·sbh and
    3·as²b. A block that is run again keeps none of it.
    """
    if policy not in ("none", "selective", "pointwise") or "fed" not in work.tensors:
        return 0
    masks = work.tensors["projected"].elements + work.tensors["fed"].elements
    kept = {tensor.name for tensor in work.saved(policy)}
    scores = work.tensors[SCORES].elements if SCORES in kept else 0
    return masks + scores * (1 + formats.compute_bytes)


def temporary_bytes(work: Work, policy: Recompute, formats: Formats) -> int:
    """Bytes of one sequence that live only inside one block's backward.

    The tensors that are made again (those of every time step, for a recurrent layer), the gradients of one operator's
    inputs and outputs beside the residual stream's, and flash attention's fp32 gradient of the queries.
    """
    return max(_temporary_bytes(work, ops, policy, formats) for ops in work.block_kinds)


def _temporary_bytes(work: Work, block: tuple[Op, ...], policy: Recompute, formats: Formats) -> int:
    kept = {tensor.name for tensor in work.saved(policy)}
    again = {name: op.calls for op in block for name in op.needs if name not in kept}
    made = sum(calls * tensor_bytes(work.tensors[name], formats) for name, calls in again.items())
    gradients = max(
        sum(tensor_bytes(work.tensors[name], formats) for name in (*op.inputs, *op.outputs)) for op in block
    )
    stream = next(tensor_bytes(work.tensors[name], formats) for name in ("input", "below") if name in work.tensors)
    flash = work.kernel == "flash" and any(isinstance(op, Attention) for op in block)
    return made + gradients + stream + (formats.statistics_bytes * work.tensors["query"].elements if flash else 0)


def attention_sums_bytes(model: Transformer, formats: Formats) -> int:
    """Bytes a token that the fastest attention's backward takes for itself.

    Sums in fp32 of the queries' gradients, of the keys' and values' where several heads share them, and two numbers for
    each query and head.
    """
    shared = 2 * model.kv_width if model.kv_heads != model.heads else 0
    sums = formats.statistics_bytes * (model.query_width + shared + 2 * model.heads)
    # Kernels take values as wide as keys: copies of values, results and the gradients of both.
    widened = 0 if model.latent is None else 4 * formats.compute_bytes * model.query_width
    return sums + widened


def cast_copy_bytes(work: Work, formats: Formats) -> int:
    """Bytes of the weights' copy in the products' format, kept for the step as torch.autocast caches it.

    What is quantised has none: it is dequantised wherever it is used.
    """
    elements = 0
    for op in work.ops:
        if isinstance(op, Gemm):
            kept = formats.kept_as(in_block=op.in_block, matrix=True)
            copies = op.layers - op.frozen if WIDTH_BYTES[formats.weights] > formats.compute_bytes else 0
            if kept not in QUANTISED_BITS and WIDTH_BYTES[kept] > formats.compute_bytes:
                copies += op.frozen
            elements += copies * sum(weight.elements for weight in op.weights)
    return elements * formats.compute_bytes
