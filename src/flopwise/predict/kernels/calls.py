"""A step's kernels: the operators' forward, backward and recompute as calls whose sizes are linear in the batch.

One list serves a single prediction and a grid of thousands, because the sequences of a micro-batch are the only
thing that changes: a side of a matrix product is `constant + slope · sequences`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flopwise.predict.kernels.attention import KERNELS
from flopwise.setup.setup import SettledSetup
from flopwise.setup.words import Fusion
from flopwise.work.attention_ops import GATING
from flopwise.work.describe import describe
from flopwise.work.formats import WIDTH_BYTES, Formats
from flopwise.work.fusion import is_activation, sums_for_activations
from flopwise.work.layout import WHOLE, Layout
from flopwise.work.lengths import Lengths
from flopwise.work.model import Model
from flopwise.work.op import (
    Attention,
    AttentionKernel,
    Gemm,
    Op,
    Scan,
    Streaming,
    attention_flops,
    kind_of,
    product_flops,
)
from flopwise.work.optimizers import NEWTON_SCHULZ_FORMAT, Optimizer, UpdateProduct, update_work
from flopwise.work.plain import NOTHING, Passes, plain_dequantised, plain_lengths, plain_passes, plain_update
from flopwise.work.state_ops import CONVOLUTION, GATED_NORM
from flopwise.work.traffic import (
    Traffic,
    backward_traffic,
    cast_back_bytes,
    cast_bytes,
    dequantise_bytes,
    forward_traffic,
    scale_traffic,
    softmax_traffic,
)
from flopwise.work.work import Recompute, Work

Floats = NDArray[np.float64]


PLAIN_WIDTH = WIDTH_BYTES["fp32"]
"""Plain kernels compute in fp32."""


class Phase(IntEnum):
    """When a call runs."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    UPDATE = 3
    """Once a step, not once a micro-batch."""


@dataclass(frozen=True, slots=True)
class GemmCall:
    """(rows × depth)·(depth × columns); each side is constant + slope · sequences."""

    op: int
    phase: Phase
    count: int
    rows: tuple[float, float]
    depth: tuple[float, float]
    columns: float
    groups: int
    number_format: str
    output_bytes: int
    accumulate: bool = False
    """Whether it is added to what earlier micro-batches gave, where there are any."""
    adds: bool = False
    """Whether it is added to what another product made, always."""
    uneven: bool = False
    """Whether groups have other rows than each other."""
    near_bytes: float | None = None
    """What it moves to and from the main memory for each sequence, where its operands are mostly in caches; `groups`
    are then those of one sequence, and its sides do not grow."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Flash attention over one sequence and its copies."""

    op: int
    phase: Phase
    count: int
    flops: float
    bytes: float
    tokens: float
    heads: int
    head_dim: int
    area_share: float
    """Part of the tokens × tokens square that is computed."""
    number_format: str
    packed: bool = False
    """Over sequences of uneven length; `tokens` are those of a typical one."""
    value_share: float = 1.0
    """Of the FLOPs, in which values are as wide as keys, those that are left where they stay as narrow as they are."""


@dataclass(frozen=True, slots=True)
class StreamingCall:
    """Kernels bound by bytes: constant + slope · sequences."""

    op: int
    phase: Phase
    count: int
    bytes: tuple[float, float]
    kernels: int = 1
    passes: Passes = NOTHING
    """What a device that fuses nothing does beside moving those bytes, for each sequence."""
    rowwise_cast: bool = False
    """Whether operands of a product are brought into fp8 with a scale for each row."""
    of_weights: bool = False
    """Whether `passes` are over weights: in all, and not for each sequence."""


@dataclass(frozen=True, slots=True)
class StepCalls:
    """Every kernel of a micro-batch, and of the update that ends the step."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    gemms: tuple[GemmCall, ...]
    attentions: tuple[AttentionCall, ...]
    streams: tuple[StreamingCall, ...]


@lru_cache(maxsize=512)
def calls_for(
    model: Model,
    *,
    sequence_tokens: int,
    kernel: AttentionKernel,
    formats: Formats,
    policy: Recompute,
    fusion: Fusion,
    optimizer: Optimizer,
    layout: Layout = WHOLE,
    lengths: Lengths | None = None,
    plain: bool = False,
    own: bool = False,
) -> StepCalls:
    """`step_calls`, remembered."""
    work = describe(model, sequence_tokens, kernel, layout, lengths)
    return step_calls(work, formats, policy, fusion, optimizer, plain=plain, own=own)


def step_calls(
    work: Work,
    formats: Formats,
    policy: Recompute,
    fusion: Fusion,
    optimizer: Optimizer,
    *,
    plain: bool = False,
    own: bool = False,
) -> StepCalls:
    """List the kernels of a micro-batch, operators first in the model's order and the optimizer's update last.

    `plain`: with what flopwise's plain kernels call beside products and attention; `own`: what carries states as its
    trainer runs it on a GPU too, which is plain.
    """
    lister = _Lister(work, formats, fusion, work.recomputed(policy), plain=plain, own=own)
    for index, op in enumerate(work.ops):
        lister.add(index, op)
    whole = update_work(work, optimizer, formats)
    update = StreamingCall(
        len(work.ops),
        Phase.UPDATE,
        1,
        (float(whole.moved_bytes), 0.0),
        passes=plain_update(work.trained_parameters, update_pieces(work)),
    )
    return StepCalls(
        names=(*(op.name for op in work.ops), "optimizer"),
        kinds=(*(kind_of(op) for op in work.ops), "optimizer"),
        gemms=(*lister.gemms, *update_calls(len(work.ops), whole.products)),
        attentions=tuple(lister.attentions),
        streams=(*lister.streams, update),
    )


def update_calls(op: int, products: Sequence[UpdateProduct]) -> list[GemmCall]:
    """The products of an update, which do not grow with the batch."""
    return [
        GemmCall(
            op,
            Phase.UPDATE,
            product.copies,
            (product.rows, 0),
            (product.depth, 0),
            product.columns,
            1,
            NEWTON_SCHULZ_FORMAT,
            WIDTH_BYTES[NEWTON_SCHULZ_FORMAT],
        )
        for product in products
    ]


def kernels_of(calls: StepCalls) -> Floats:
    """Kernels that a host starts for a micro-batch, by operator; the last are the update's, which ends a step."""
    found = np.zeros(len(calls.names))
    for gemm in calls.gemms:
        found[gemm.op] += gemm.count
    for attention in calls.attentions:
        found[attention.op] += attention.count * KERNELS["backward" if attention.phase == Phase.BACKWARD else "forward"]
    for stream in calls.streams:
        found[stream.op] += stream.count * stream.kernels
    return found


def update_pieces(work: Work) -> int:
    """Pieces that an optimizer updates one after another: each layer, and what is around them."""
    return 1 + max((op.layers for op in work.ops if op.in_block), default=0)


def calls_of(setup: SettledSetup) -> StepCalls:
    """The kernels of a device's micro-batch; its size and that of the batch do not change them."""
    return calls_for(
        setup.model,
        sequence_tokens=setup.width,
        kernel=setup.attention,
        formats=setup.formats,
        policy=setup.recompute,
        fusion=setup.fusion,
        optimizer=setup.optimizer,
        layout=setup.parallel.layout,
        lengths=setup.packed,
        plain=setup.hardware.efficiency.plain is not None,
    )


def kernels_key(setup: SettledSetup) -> tuple[object, ...]:
    """Everything that changes a step's kernels, but for the hardware and the micro-batch."""
    return (
        setup.model,
        setup.width,
        setup.attention,
        setup.flash_kernels,
        setup.fusion,
        setup.optimizer,
        setup.formats,
        setup.recompute,
        setup.parallel.layout,
        setup.packed,
    )


OWN_SQUARES, OWN_CHANNELS, OWN_KERNELS = 10, 24, 60
"""What the plain scan reads and writes beside its products, for each pair of a chunk's tokens and for each channel, and
how many kernels it is: counted in its calls, `engine/kernels/scan.py`."""
OWN_PLAIN = (CONVOLUTION, GATED_NORM, GATING)
"""Operators beside it that are plain as well."""
SCAN_PASSES = 4
"""Of unfused code over each square of a chunk's tokens: differences of decays, mask, exponential, and a product."""

TILE_QUERIES = 128
"""Of one unit: a kernel that takes many sequences at once computes a whole tile for one that is shorter."""


def typical_square(op: Attention, least: int) -> tuple[float, int, float]:
    """Tokens of a typical sequence, twice the pairs that kernels compute, and their share of the squares.

    Those of an even one are as they are described: how well kernels do at its length is what was measured. Of uneven
    ones none is shorter than `least` for a kernel.
    """
    if not op.lengths:
        return op.tokens, op.twice_pairs("mask"), op.twice_pairs("mask") / op.twice_pairs("square")
    tiled = [(replace(one, tokens=max(one.tokens, least)), count) for one, count in op.each()]
    pairs = [count * one.twice_pairs("mask") for one, count in tiled]
    squares = sum(count * one.twice_pairs("square") for one, count in tiled)
    # By where the work is: a few long sequences may have most of it.
    tokens = sum(some * one.tokens for some, (one, _) in zip(pairs, tiled, strict=True)) / sum(pairs)
    return tokens, sum(pairs), sum(pairs) / squares


def _scan_products(op: Scan, phase: Phase) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Sides and number of a scan's products over all its chunks."""
    for product in op.products:
        rows, depth, columns = product.rows, product.depth, product.columns
        groups = op.chunks * product.heads
        if phase != Phase.BACKWARD or product.again:
            yield (rows, depth, columns), groups
        if phase == Phase.BACKWARD:
            yield (rows, columns, depth), groups
            yield (depth, rows, columns), groups


def _own_products(op: Scan, phase: Phase) -> Iterator[tuple[tuple[int, int, int], int]]:
    """The same of the plain scan: the delta rule goes from chunk to chunk by products of two chunks' factors."""
    keys, values, listed = op.key_dim, op.head_dim, list(_scan_products(op, Phase.FORWARD))
    if op.rule == "gated_delta":
        each = op.chunks * op.heads
        listed += [((keys, op.chunk, keys), each), ((keys, keys, keys), each), *(2 * [((keys, keys, values), each)])]
    for (rows, depth, columns), groups in listed:
        yield (rows, depth, columns), groups
        if phase == Phase.BACKWARD:
            yield (rows, columns, depth), groups
            yield (depth, rows, columns), groups


class _Lister:
    def __init__(
        self, work: Work, formats: Formats, fusion: Fusion, again: dict[str, Fraction], *, plain: bool, own: bool
    ) -> None:
        self.work, self.plain, self.own = work, plain, own
        self.formats = formats
        self.fused = fusion == "fused"
        self.again = again
        sums = sums_for_activations(work.ops) if own and not plain else {}
        self.summed = {each.name for added in sums.values() for each in added}
        """Products whose results the activation behind them adds to what it reads anyway."""
        self.gemms: list[GemmCall] = []
        self.attentions: list[AttentionCall] = []
        self.streams: list[StreamingCall] = []

    def add(self, index: int, op: Op) -> None:
        again = self.again.get(op.name, Fraction(0))
        if isinstance(op, Gemm):
            self._gemm(index, op, again)
        elif isinstance(op, Attention) and self.work.kernel == "flash":
            for kind in op.by_kind():
                self._flash(index, op, kind, again)
        elif isinstance(op, Attention):
            self._eager_attention(index, op, again)
        elif isinstance(op, Scan) and self.own and not self.plain:
            self._own_scan(index, op, again)
        elif isinstance(op, Scan):
            self._scan(index, op, again)
        else:
            self._streaming(index, op, again)
        if self.plain and not isinstance(op, Streaming):
            self._beside(index, op, again)

    def _beside(self, index: int, op: Op, again: Fraction) -> None:
        """What plain kernels call beside a product or attention."""
        forward, backward = plain_passes(self.work, op)
        phases = [
            (Phase.FORWARD, forward),
            (Phase.BACKWARD, backward),
            *([(Phase.RECOMPUTE, forward)] if again else []),
        ]
        for phase, passes in phases if op.reached else phases[:1]:
            copies, moved = (op.layers if phase == Phase.FORWARD else op.reached), (0.0, PLAIN_WIDTH * passes.moved)
            self.streams.append(StreamingCall(index, phase, copies * op.calls, moved, 0, passes))

    def _gemm(self, index: int, op: Gemm, again: Fraction) -> None:
        rows, depth, columns = op.rows / op.groups / self.work.sequences, op.depth, op.columns
        number_format = self.formats.matrix if op.in_block else self.formats.sensitive
        width = self.formats.compute_bytes
        reads = op.adds and op.name not in self.summed

        def call(phase: Phase, copies: int, inner: float, outer: float, *, adds: bool = False) -> None:
            count, sides = copies * op.calls, ((0.0, rows), (inner, 0.0))
            if count:
                self.gemms.append(
                    GemmCall(
                        index,
                        phase,
                        count,
                        *sides,
                        outer,
                        op.groups,
                        number_format,
                        width,
                        adds=adds,
                        uneven=op.uneven,
                    )
                )

        call(Phase.FORWARD, op.layers, depth, columns, adds=reads)
        call(Phase.BACKWARD, op.reached, columns, depth)
        # The weight gradient sums over all calls of a layer: one product over the time steps of a recurrent cell.
        trained = [op.layers - op.frozen] if op.frozen < op.layers else []
        self.gemms += [
            GemmCall(
                index,
                Phase.BACKWARD,
                copies,
                (columns, 0.0),
                (0.0, rows * op.calls),
                depth,
                op.groups,
                number_format,
                WIDTH_BYTES[self.formats.gradients],
                accumulate=True,
            )
            for copies in trained
        ]
        if again:
            call(Phase.RECOMPUTE, op.reached, depth, columns * float(again), adds=reads)
        self._casts(index, op, again)

    def _casts(self, index: int, op: Gemm, again: Fraction) -> None:
        """Operands into the products' format: weights once a layer, and for fp8 what goes in and comes back."""
        dequantised = float(dequantise_bytes(op, self.formats))
        if dequantised:
            uses = [(Phase.FORWARD, op.layers, 1.0), (Phase.BACKWARD, op.reached, 1.0)]
            for phase, copies, share in [*uses, *([(Phase.RECOMPUTE, op.reached, float(again))] if again else [])]:
                passes = plain_dequantised(op, self.formats).times(share)
                self.streams.append(
                    StreamingCall(index, phase, copies, (share * dequantised, 0.0), passes=passes, of_weights=True)
                )
        cast = cast_bytes(op, self.formats)
        rowwise = cast.per_sequence > 0 and self.formats.scaled_by == "rowwise"
        if cast.fixed:
            once = Passes(1, cast.fixed / PLAIN_WIDTH)
            self.streams.append(
                StreamingCall(
                    index,
                    Phase.FORWARD,
                    op.layers,
                    (float(cast.fixed), 0.0),
                    passes=once,
                    rowwise_cast=rowwise,
                    of_weights=True,
                )
            )
        if cast.per_sequence:
            count, back = op.layers * op.calls, cast_back_bytes(op, self.formats)
            calls = [(Phase.FORWARD, Traffic(cast.per_sequence)), (Phase.BACKWARD, back)]
            if again:
                calls.append((Phase.RECOMPUTE, cast))
            for phase, moved in calls:
                line = (float(moved.fixed), moved.per_sequence / self.work.sequences)
                self.streams.append(StreamingCall(index, phase, count, line, rowwise_cast=rowwise))

    def _flash(self, index: int, op: Attention, kind: Attention, again: Fraction) -> None:
        """The copies of one kind, which move what all do and see what theirs sees."""
        copies, sequences = kind.layers * kind.calls, self.work.sequences
        # On a CPU each sequence has a call of its own.
        tokens, twice_pairs, area = typical_square(kind, 1 if self.plain else TILE_QUERIES)
        # Values narrower than keys are widened for kernels that need it; what the operators count is without that.
        forward, backward = (
            attention_flops(way, twice_pairs, op.heads, op.head_dim) / sequences for way in ("forward", "backward")
        )
        narrow = [
            attention_flops(way, 1, 1, op.head_dim, op.value_dim) / attention_flops(way, 1, 1, op.head_dim)
            for way in ("forward", "backward")
        ]
        read = forward_traffic(self.work, op, self.formats, fused=self.fused).per_sequence / sequences
        gradients = backward_traffic(self.work, op, self.formats, fused=self.fused).per_sequence / sequences
        calls = [(Phase.FORWARD, forward, read), (Phase.BACKWARD, backward, gradients)]
        if again:
            calls.append((Phase.RECOMPUTE, forward, read))
        reached = kind.reached * kind.calls
        for phase, flops, moved in calls if reached else calls[:1]:
            self.attentions.append(
                AttentionCall(
                    index,
                    phase,
                    copies if phase == Phase.FORWARD else reached,
                    flops,
                    moved,
                    tokens,
                    op.heads,
                    op.head_dim,
                    area,
                    self.formats.sensitive,
                    packed=bool(op.lengths),
                    value_share=narrow[phase == Phase.BACKWARD],
                )
            )

    def _eager_attention(self, index: int, op: Attention, again: Fraction) -> None:
        """Scores, a masked softmax over the whole square, and the weighted sum; each a kernel of its own."""
        tokens, dim, width = float(op.tokens), float(op.head_dim), self.formats.compute_bytes
        keys = tokens * op.parts
        softmax, softmax_back = softmax_traffic(op, self.formats)
        value = float(op.value_dim or op.head_dim)
        scores, summed = (dim, keys), (keys, value)
        back = [scores, summed, (value, keys), (keys, dim)]
        phases = [(Phase.FORWARD, [scores, summed], softmax), (Phase.BACKWARD, back, softmax_back)]
        if again:
            phases.append((Phase.RECOMPUTE, [scores] if again < 1 else [scores, summed], softmax))
        for phase, products, moved in phases if op.reached else phases[:1]:
            copies = (op.layers if phase == Phase.FORWARD else op.reached) * op.calls
            for depth, columns in products:
                # The heads of all sequences are groups of one batched product: rows grow, groups stay.
                self.gemms.append(
                    GemmCall(
                        index,
                        phase,
                        copies,
                        (0.0, tokens),
                        (depth, 0.0),
                        columns,
                        op.heads,
                        self.formats.sensitive,
                        width,
                    )
                )
            passes = Passes(4, moved / PLAIN_WIDTH, moved / PLAIN_WIDTH / 4)
            self.streams.append(StreamingCall(index, phase, copies, (0.0, float(moved)), 2, passes))

    def _scan(self, index: int, op: Scan, again: Fraction) -> None:
        """The products of all chunks at once, as kernels that hand on what `op.handed_elements` counts.

        Decays and masks are applied where a product reads or writes; unfused they are kernels of their own.
        """
        width, share = self.formats.compute_bytes, 1 / self.work.sequences
        read, written = (
            each(self.work, op, self.formats, fused=self.fused) for each in (forward_traffic, backward_traffic)
        )
        handed = 2.0 * width * op.handed_elements
        # Backward makes again what it needs of it, and writes and reads the gradients of all.
        phases = [(Phase.FORWARD, 1, op.layers, read.per_sequence + handed)]
        phases += [(Phase.BACKWARD, 2, op.reached, written.per_sequence + 3 * handed)] if op.reached else []
        phases += [(Phase.RECOMPUTE, 1, op.reached, read.per_sequence + handed)] if again else []
        for phase, times, copies, moved in phases:
            products = list(_scan_products(op, phase))
            whole = sum(product_flops(*sides) * groups for sides, groups in products)
            for (rows, depth, columns), groups in products:
                self.gemms.append(
                    GemmCall(
                        index,
                        phase,
                        copies,
                        (float(rows), 0.0),
                        (float(depth), 0.0),
                        float(columns),
                        round(groups * share),
                        self.formats.sensitive,
                        0,
                        near_bytes=moved * share * product_flops(rows, depth, columns) * groups / whole,
                    )
                )
            if not self.fused:
                decayed = times * SCAN_PASSES * WIDTH_BYTES["fp32"] * op.square_elements * share
                self.streams.append(StreamingCall(index, phase, copies, (0.0, decayed), times * SCAN_PASSES))

    def _own_scan(self, index: int, op: Scan, again: Fraction) -> None:
        """The same as flopwise's trainer runs it: plain products in fp32, by units that round to ten bits where the
        numbers have eight, with everything between them a kernel of its own. Backward begins with forward."""
        fp32, share = WIDTH_BYTES["fp32"], 1 / self.work.sequences
        number_format = "tf32" if self.formats.compute in ("bf16", "fp16") else self.formats.sensitive
        channels = op.tokens * op.heads * (op.key_dim + op.head_dim)
        moved = fp32 * share * (OWN_SQUARES * op.square_elements + OWN_CHANNELS * channels)
        phases = [(Phase.FORWARD, op.layers, 1)]
        phases += [(Phase.BACKWARD, op.reached, 3)] if op.reached else []
        phases += [(Phase.RECOMPUTE, op.reached, 1)] if again else []
        for phase, copies, times in phases:
            for (rows, depth, columns), groups in _own_products(op, phase):
                each = rows * depth + depth * columns + rows * columns
                self.gemms.append(
                    GemmCall(
                        index,
                        phase,
                        copies,
                        (float(rows), 0.0),
                        (float(depth), 0.0),
                        float(columns),
                        round(groups * share),
                        number_format,
                        0,
                        near_bytes=float(fp32 * each * groups * share),
                    )
                )
            self.streams.append(StreamingCall(index, phase, copies, (0.0, times * moved), times * OWN_KERNELS))

    def _passes_again(self, op: Streaming, forward: Passes, again: Fraction) -> Passes:
        """Plain kernels make norms and activations again in their backward, whatever the policy."""
        products = any(isinstance(other, Gemm) and other.name in self.again for other in self.work.ops)
        within = is_activation(op) or (op.kind == "norm" and not products)
        return NOTHING if within else forward.times(float(again))

    def _streaming(self, index: int, op: Op, again: Fraction) -> None:
        assert isinstance(op, Streaming)
        fused = self.fused and not (self.own and op.name in OWN_PLAIN)
        kernels = 1 if fused else op.eager_kernels
        forward, backward = plain_passes(self.work, op)
        phases: list[tuple[Phase, Traffic, Passes]] = [
            (Phase.FORWARD, forward_traffic(self.work, op, self.formats, fused=fused), forward),
            (Phase.BACKWARD, backward_traffic(self.work, op, self.formats, fused=fused), backward),
        ]
        if again:
            made = frozenset(self.again)
            recomputed = forward_traffic(self.work, op, self.formats, fused=fused, after=made)
            phases.append((Phase.RECOMPUTE, scale_traffic(recomputed, again), self._passes_again(op, forward, again)))
        for phase, traffic, passes in phases if op.reached else phases[:1]:
            self.streams.append(
                StreamingCall(
                    index,
                    phase,
                    (op.layers if phase == Phase.FORWARD else op.reached) * op.calls,
                    (float(traffic.fixed), traffic.per_sequence / self.work.sequences),
                    kernels,
                    passes,
                )
            )
        lengths = plain_lengths(op) if self.plain else NOTHING
        if lengths.calls:
            self.streams += [
                StreamingCall(index, phase, copies, (0.0, 0.0), 0, lengths, of_weights=True)
                for phase, copies in ((Phase.FORWARD, op.layers), (Phase.BACKWARD, op.reached))
                if copies
            ]
