"""A step's kernels: the operators' forward, backward and recompute as calls whose sizes are linear in the batch.

One list serves a single prediction and a grid of thousands, because the sequences of a micro-batch are the only
thing that changes: a side of a matrix product is `constant + slope · sequences`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from flopwise.core.formats import WIDTH_BYTES, Formats
from flopwise.core.op import Attention, Gemm, Op, Streaming, kind_of
from flopwise.core.traffic import Traffic, backward_traffic, forward_traffic, scaled, update_bytes_per_parameter
from flopwise.core.work import Recompute, Work
from flopwise.core.workload import MOMENTS, Fusion, Optimizer

Floats = NDArray[np.float64]


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


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Flash attention over one sequence and its copies."""

    op: int
    phase: Phase
    count: int
    flops: float
    bytes: float
    tokens: int
    heads: int
    head_dim: int
    area_share: float
    """Part of the tokens × tokens square that is computed."""
    number_format: str


@dataclass(frozen=True, slots=True)
class StreamingCall:
    """Kernels bound by bytes: constant + slope · sequences."""

    op: int
    phase: Phase
    count: int
    bytes: tuple[float, float]
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class StepCalls:
    """Every kernel of a micro-batch, and of the update that ends the step."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    gemms: tuple[GemmCall, ...]
    attentions: tuple[AttentionCall, ...]
    streams: tuple[StreamingCall, ...]


def step_calls(work: Work, formats: Formats, policy: Recompute, fusion: Fusion, optimizer: Optimizer) -> StepCalls:
    """List the kernels of a step, operators first in the model's order and the optimizer's update last."""
    lister = _Lister(work, formats, fusion)
    again = work.recomputed(policy)
    for index, op in enumerate(work.ops):
        lister.add(index, op, again.get(op.name, Fraction(0)))
    update = StreamingCall(
        len(work.ops),
        Phase.UPDATE,
        1,
        (float(work.parameters * update_bytes_per_parameter(formats, MOMENTS[optimizer])), 0.0),
    )
    return StepCalls(
        names=(*(op.name for op in work.ops), "optimizer"),
        kinds=(*(kind_of(op) for op in work.ops), "optimizer"),
        gemms=tuple(lister.gemms),
        attentions=tuple(lister.attentions),
        streams=(*lister.streams, update),
    )


class _Lister:
    def __init__(self, work: Work, formats: Formats, fusion: Fusion) -> None:
        self.work = work
        self.formats = formats
        self.fused = fusion == "fused"
        self.gemms: list[GemmCall] = []
        self.attentions: list[AttentionCall] = []
        self.streams: list[StreamingCall] = []

    def add(self, index: int, op: Op, again: Fraction) -> None:
        if isinstance(op, Gemm):
            self._gemm(index, op, again)
        elif isinstance(op, Attention) and self.work.kernel == "flash":
            self._flash(index, op, again)
        elif isinstance(op, Attention):
            self._eager_attention(index, op, again)
        else:
            self._streaming(index, op, again)

    def _gemm(self, index: int, op: Gemm, again: Fraction) -> None:
        rows, depth, columns = op.rows / op.groups, op.depth, op.columns
        count = op.layers * op.calls
        # The blocks multiply in the matrix format; embedding and head are left in that of the activations.
        number_format = self.formats.matrix if op.in_block else self.formats.compute
        width = self.formats.compute_bytes

        def call(phase: Phase, m: tuple[float, float], k: tuple[float, float], n: float, *, times: int = count) -> None:
            self.gemms.append(GemmCall(index, phase, times, m, k, n, op.groups, number_format, width))

        call(Phase.FORWARD, (0.0, rows), (depth, 0.0), columns)
        call(Phase.BACKWARD, (0.0, rows), (columns, 0.0), depth)
        # The weight gradient sums over all calls of a layer: one product over the time steps of a recurrent cell.
        self.gemms.append(
            GemmCall(
                index,
                Phase.BACKWARD,
                op.layers,
                (columns, 0.0),
                (0.0, rows * op.calls),
                depth,
                op.groups,
                number_format,
                WIDTH_BYTES[self.formats.gradients],
                accumulate=True,
            )
        )
        if again:
            call(Phase.RECOMPUTE, (0.0, rows), (depth, 0.0), columns * float(again))
        if number_format == "fp8":
            self._casts(index, op)

    def _casts(self, index: int, op: Gemm) -> None:
        """To fp8 and its scale: read in the activations' format, write one byte; input and weight, then gradient."""
        width = self.formats.compute_bytes + 1
        count = op.layers * op.calls
        weights = sum(weight.elements for weight in op.weights) * width
        self.streams.append(
            StreamingCall(index, Phase.FORWARD, count, (float(weights), float(op.rows * op.depth * width)), 2)
        )
        self.streams.append(StreamingCall(index, Phase.BACKWARD, count, (0.0, float(op.rows * op.columns * width)), 1))

    def _flash(self, index: int, op: Attention, again: Fraction) -> None:
        copies = op.layers * op.calls
        forward = op.forward_flops() / copies
        backward = op.backward_flops("flash") / copies
        read = forward_traffic(self.work, op, self.formats, fused=self.fused).per_sequence
        gradients = backward_traffic(self.work, op, self.formats, fused=self.fused).per_sequence
        area = op.twice_pairs("mask") / op.twice_pairs("full")
        calls = [(Phase.FORWARD, forward, read), (Phase.BACKWARD, backward, gradients)]
        if again:
            calls.append((Phase.RECOMPUTE, forward, read))
        for phase, flops, moved in calls:
            self.attentions.append(
                AttentionCall(
                    index,
                    phase,
                    copies,
                    flops,
                    float(moved),
                    op.tokens,
                    op.heads,
                    op.head_dim,
                    area,
                    self.formats.compute,
                )
            )

    def _eager_attention(self, index: int, op: Attention, again: Fraction) -> None:
        """Scores, a masked softmax over the whole square, and the weighted sum; each a kernel of its own."""
        tokens, dim, width = float(op.tokens), float(op.head_dim), self.formats.compute_bytes
        copies, compute = op.layers * op.calls, self.formats.compute
        square = float(op.tokens) ** 2 * op.heads * width
        phases = [(Phase.FORWARD, 1, 4), (Phase.BACKWARD, 2, 3)]
        if again:
            phases.append((Phase.RECOMPUTE, 1, 4))
        for phase, times, passes in phases:
            for depth, columns in ((dim, tokens), (tokens, dim)):
                # The heads of all sequences are groups of one batched product: rows grow, groups stay.
                self.gemms.append(
                    GemmCall(
                        index,
                        phase,
                        copies * times,
                        (0.0, tokens),
                        (depth, 0.0),
                        columns,
                        op.heads,
                        compute,
                        width,
                    )
                )
            self.streams.append(StreamingCall(index, phase, copies, (0.0, square * passes), passes))

    def _streaming(self, index: int, op: Op, again: Fraction) -> None:
        assert isinstance(op, Streaming)
        kernels = 1 if self.fused else op.eager_kernels
        forward = forward_traffic(self.work, op, self.formats, fused=self.fused)
        phases: list[tuple[Phase, Traffic]] = [
            (Phase.FORWARD, forward),
            (Phase.BACKWARD, backward_traffic(self.work, op, self.formats, fused=self.fused)),
        ]
        if again:
            phases.append((Phase.RECOMPUTE, scaled(forward, again)))
        for phase, traffic in phases:
            self.streams.append(
                StreamingCall(
                    index,
                    phase,
                    op.layers * op.calls,
                    (float(traffic.fixed), float(traffic.per_sequence)),
                    kernels,
                )
            )
