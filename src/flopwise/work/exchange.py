"""Bytes that the devices of a parallel set-up pass on to each other, counted from the description like all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from flopwise.work.formats import OPERAND_BYTES, WIDTH_BYTES, Formats
from flopwise.work.layout import WHOLE, Layout
from flopwise.work.op import Attention, Gemm, Op, is_beside
from flopwise.work.work import Recompute, Work

REDUCED = ("output", "mix_out", "down", "dense_down")
"""Products whose result is a sum over tensor ranks: those that split their depth.

What shared experts make is summed with what the others make.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What one device of a layout exchanges for one sequence, in one layer unless said otherwise."""

    stream_bytes: int
    """The residual stream of the device's tokens, whole: what a reduction over tensor ranks carries."""
    gathered_bytes: int
    """The same where a product's input is gathered: in the product's format where a tensor has one scale, which all
    ranks then know (torchao's and Transformer Engine's tensor-parallel layers)."""
    largest_bytes: int
    """Of the largest number of a tensor whose parts lie on several ranks, agreed upon before it is cast; 0: each rank
    casts what it has by itself, or by steps before."""
    reductions: float
    """Such reductions going forward, in the mean of the layers; backward has as many."""
    reductions_again: float
    """Those that a recompute repeats."""
    ring_bytes: int
    """Keys and values of the device's tokens: one message of the context ring."""
    dispatch_bytes: int
    """Tokens on their way to their experts, a copy for each; as many come back."""
    shared_bytes: int
    """Of tokens that arrived, what those who share an expert gather of each other; 0: they all sent the same."""
    dispatches_again: int
    """Dispatches that a recompute repeats, of the two."""


def exchange(
    work: Work, policy: Recompute, formats: Formats, *, hidden: int, stream_tokens: int, layout: Layout = WHOLE
) -> Exchange:
    """Count what is passed on; `stream_tokens` are the device's tokens before sequence parallelism splits them."""
    again = work.recomputed(policy)
    attention = next((op for op in work.ops if isinstance(op, Attention)), None)
    reduced = _reduced(work, layout)
    # Branches that are summed before the residual stream need one reduction for both.
    if any(op.name == "residual" for op in work.ops):
        reduced = reduced[:1]
    width = formats.compute_bytes
    ring = 2 * attention.tokens * attention.kv_heads * attention.head_dim * width if attention else 0
    dispatched = work.tensors.get("dispatched")
    arrived = dispatched.elements * width * _mixed_share(work) if dispatched else 0.0
    sharing = layout.sharing_experts
    return Exchange(
        stream_bytes=stream_tokens * hidden * width,
        largest_bytes=WIDTH_BYTES["fp32"] if formats.scaled_by == "tensorwise" else 0,
        gathered_bytes=round(stream_tokens * hidden * _gathered_width(formats)),
        reductions=_in_a_block(work, reduced),
        reductions_again=_in_a_block(work, [op for op in reduced if op.name in again]),
        ring_bytes=ring,
        dispatch_bytes=round(arrived / (sharing if layout.folded else 1)),
        shared_bytes=round(arrived) if layout.folded and sharing > 1 else 0,
        dispatches_again=sum(name in again for name in ("dispatch", "combine")),
    )


def _reduced(work: Work, layout: Layout) -> list[Op]:
    """Products whose result is a sum over tensor ranks.

    Those that hold experts of their own sum what dense blocks and shared experts make, and nothing of theirs.
    """
    names = (*REDUCED, "shared_down") if layout.folded else REDUCED
    products = [op for op in work.ops if isinstance(op, Gemm) and op.name in names]
    return [op for op in products if not (layout.folded and is_expert(op))]


def _gathered_width(formats: Formats) -> float:
    return OPERAND_BYTES[formats.matrix] if formats.scaled_by in ("tensorwise", "delayed") else formats.compute_bytes


def _mixed_share(work: Work) -> float:
    """The share of the blocks that have experts."""
    return next(op.layers / work.layers for op in work.ops if op.name == "dispatch")


def _in_a_block(work: Work, ops: Sequence[Op]) -> float:
    """How many of some operators a block has, where each has those of its kind."""
    return sum(op.layers for op in ops) / work.layers


def is_expert(op: Op) -> bool:
    """Whether an operator's weights are dealt out among expert ranks."""
    # Even where a token uses all of several experts, each has a home of its own.
    return any(weight.active != (1, 1) for weight in op.weights)


def parameters_by_part(work: Work) -> tuple[tuple[float, float, float], float]:
    """Parameters of the embedding, of one layer (experts not counted) and of the head; and of one layer's experts.

    A tied matrix stands in both the embedding and the head here: a pipeline's first and last stage each hold it. What
    a layer uses twice (Cohere's norm) it holds once; of what some layers have it is the mean.
    """
    return _by_part(work, lambda _: Fraction(1))


def trained_by_part(work: Work) -> tuple[tuple[float, float, float], float]:
    """The same of those that are trained."""
    return _by_part(work, lambda op: Fraction(op.layers - op.frozen, op.layers))


def _by_part(work: Work, share: Callable[[Op], Fraction]) -> tuple[tuple[float, float, float], float]:
    """Numbers of weights by part; `share`: of an operator's."""
    parts, experts = [0.0, 0.0, 0.0], 0.0
    for op, part in zip(work.ops, parts_of(work), strict=True):
        held = (weight for weight in op.weights if (weight.owned or not op.in_block) and not weight.buffer)
        elements = _in_the_mean(work, op, sum(weight.elements for weight in held)) * float(share(op))
        if is_expert(op):
            experts += elements
        else:
            parts[part] += elements
    return (parts[0], parts[1], parts[2]), experts


def product_parameters_by_part(work: Work) -> tuple[float, float, float]:
    """The same of the parameters that matrix products read, experts not counted: wider weights are cast for them.

    A tied matrix stands in the head alone: a look-up reads the weights as they are.
    """
    parts = [0.0, 0.0, 0.0]
    for op, part in zip(work.ops, parts_of(work), strict=True):
        if isinstance(op, Gemm) and not is_expert(op):
            parts[part] += _in_the_mean(work, op, sum(weight.elements for weight in op.weights))
    return parts[0], parts[1], parts[2]


def _in_the_mean(work: Work, op: Op, elements: int) -> float:
    """Of an operator that only some blocks have, what a block has of it."""
    return elements * op.layers / work.layers if op.block_kind or is_beside(op) else elements


def parts_of(work: Work) -> tuple[int, ...]:
    """Of each operator: 0 for what comes before the blocks, 1 for the block, 2 for what follows."""
    first = next(index for index, op in enumerate(work.ops) if op.in_block)
    return tuple(1 if op.in_block else 0 if index < first else 2 for index, op in enumerate(work.ops))


def tied_parameters(work: Work) -> int:
    """Parameters that stand twice in `parameters_by_part`, once for each use of a tied matrix."""
    return sum(weight.elements for op in work.ops if not op.in_block for weight in op.weights if not weight.owned)
