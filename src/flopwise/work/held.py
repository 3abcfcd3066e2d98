"""Bytes that are held for a while within a step, beside the state and what backward keeps."""

from __future__ import annotations

from dataclasses import replace

from flopwise.work.formats import QUANTISED_BITS, WIDTH_BYTES, Formats
from flopwise.work.model import Model
from flopwise.work.op import Attention, Gemm, Op
from flopwise.work.recurrence import ATTENDING, Recurrence
from flopwise.work.traffic import tensor_bytes
from flopwise.work.transformer import Transformer
from flopwise.work.work import SCORES, Recompute, Work


def with_all_logits(model: Model) -> Model:
    """The model whose logits there must be room for, where it is the mean that is described.

    A conversation may be answers all over; of hidden words the share hardly varies.
    """
    if isinstance(model, Transformer) and model.loss_share < 1 and model.head == "language":
        return replace(model, loss_share=1.0)
    return model


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
    if model.has_kinds and not model.blocks_of(ATTENDING):
        return 0
    shared = 2 * model.kv_width if model.kv_heads != model.heads else 0
    sums = formats.statistics_bytes * (model.query_width + shared + 2 * model.heads)
    # Kernels take values as wide as keys: copies of values, results and the gradients of both.
    widened = 0 if model.latent is None else 4 * formats.compute_bytes * model.query_width
    return sums + widened


MOST_CARRYING_BYTES = 2 << 30
"""What plain kernels of blocks that carry a state may take beside slabs: several sequences at once, so that the many
chunks that follow each other are few kernels, or some heads of a long one."""
SEQUENCES_CARRIED = 8
CARRIED_NUMBERS = 16
"""Numbers of autograd's for each of a convolution's, a norm's or a gate's, forward and backward."""


def carrying_room_bytes(model: Transformer, sequence_tokens: int, number_bytes: int) -> int:
    """What a block's convolution, scan, norm and gate may take for themselves; 0: a model has none of them."""
    recurrence = model.recurrence
    if recurrence is None and not model.attention_gate:
        return 0
    widest, least = model.attended_width if model.attention_gate else 0, 0
    if recurrence is not None:
        widest = max(widest, recurrence.channels)
        least = _scan_bytes(recurrence, sequence_tokens, number_bytes)
        wanted = SEQUENCES_CARRIED * recurrence.heads * least
    else:
        wanted = 0
    wanted = max(wanted, SEQUENCES_CARRIED * CARRIED_NUMBERS * number_bytes * sequence_tokens * widest)
    # A convolution is cut by its channels, the others by sequences at least.
    rows = CARRIED_NUMBERS * number_bytes * sequence_tokens * (recurrence.width if recurrence else 0)
    gates = CARRIED_NUMBERS * number_bytes * sequence_tokens * (model.attended_width if model.attention_gate else 0)
    return max(least, rows, gates, min(MOST_CARRYING_BYTES, wanted))


def heads_at_once(recurrence: Recurrence, tokens: int, room: int, number_bytes: int) -> tuple[int, int]:
    """Heads, and sequences, whose states plain kernels carry together in so much room."""
    each = _scan_bytes(recurrence, tokens, number_bytes)
    if recurrence.heads * each <= room:
        return recurrence.heads, room // (recurrence.heads * each)
    fitting, run = max(1, room // each), recurrence.heads // recurrence.key_heads
    # Heads that have a key in common stay together, or are equal parts of those that do.
    whole = [count for count in range(run, recurrence.heads + 1, run) if recurrence.heads % count == 0]
    parts = [count for count in range(1, run) if run % count == 0]
    return max(count for count in (1, *parts, *whole) if count <= fitting), 1


def _scan_bytes(recurrence: Recurrence, tokens: int, number_bytes: int) -> int:
    """Of one head of a sequence, with what autograd keeps and the gradients that it makes of it.

    So many tensors of a key's and of a value's channels, of a chunk's tokens and of its state, as
    `tests/engine/test_scan.py` counts what torch allocates.
    """
    chunk, keys, values = recurrence.chunk, recurrence.key_dim, recurrence.head_dim
    chunks = -(-tokens // chunk)
    read = 3 * values + 6 * keys * recurrence.key_heads // recurrence.heads
    if recurrence.rule == "mamba2":
        each, state = 9 * keys + 6 * values + 4 * chunk + 2 * chunks // chunk, 6 * keys * values
    else:
        each, state = 8 * keys + 11 * values + 7 * chunk, 5 * keys * (keys + values)
    return number_bytes * chunks * (chunk * (each + read + 32) + state)


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
