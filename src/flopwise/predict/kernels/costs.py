"""What a step's kernels cost on a device: seconds by cause, for any number of micro-batch sizes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.predict.kernels.attention import CAUSES as ATTENTION_CAUSES
from flopwise.predict.kernels.attention import Direction, attention_times, kernels_for
from flopwise.predict.kernels.bandwidth import CAUSES as STREAMING_CAUSES
from flopwise.predict.kernels.bandwidth import dram_bytes_per_s, plain_times, streaming_times
from flopwise.predict.kernels.calls import (
    AttentionCall,
    Floats,
    GemmCall,
    Phase,
    StepCalls,
    StreamingCall,
    calls_of,
    kernels_key,
)
from flopwise.predict.kernels.gemm import CAUSES as GEMM_CAUSES
from flopwise.predict.kernels.gemm import GemmTimes, gemm_times
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import SettledSetup
from flopwise.work.formats import OPERAND_BYTES

CAUSES = ("compute", "dram", "l2", "launch")
"""What a kernel waits for: arithmetic, the device's main memory, its last cache, its own start."""

BOUND_NAMES = {"compute": "compute", "dram": "memory", "l2": "cache", "launch": "launch"}
"""The same in the words that people read."""


class Call(Protocol):
    """What every kind of call has."""

    @property
    def op(self) -> int: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of kernel calls; two-dimensional arrays are calls × micro-batch sizes, all copies together."""

    op: NDArray[np.intp]
    phase: NDArray[np.intp]
    seconds: Floats
    bytes: Floats
    cause: NDArray[np.intp]
    """Index into `CAUSES`."""


def peak_flops(hardware: Hardware, number_format: str) -> float:
    """The device's dense peak in a format, or an error that names the formats it has."""
    peaks = hardware.device.peak_flops
    if number_format not in peaks:
        policies = {"fp8": "fp8", "bf16": "bf16", "fp16": "fp16-mixed", "tf32": "tf32", "fp32": "fp32"}
        possible = [policy for name, policy in policies.items() if name in peaks]
        raise FlopwiseError(
            f"{hardware.name} has no peak for {number_format} matrix products",
            why=f"its description has {', '.join(peaks)}",
            hint=f"--precision {' or '.join(possible)}" if possible else "another device",
        )
    return peaks[number_format].value


def product_peak_flops(hardware: Hardware, number_format: str) -> float:
    """The peak that `gemm.sustained` is a share of, for products in a format that may have a share of its own."""
    gemm = hardware.efficiency.gemm
    return peak_flops(hardware, number_format) * (gemm.sustained_in(number_format) / gemm.sustained)


def _column(values: Sequence[float]) -> Floats:
    """One value per call, as a column that broadcasts over the micro-batch sizes."""
    return np.array(values, dtype=np.float64)[:, None]


def _linear(pairs: Sequence[tuple[float, float]], sequences: Floats) -> Floats:
    return _column([constant for constant, _ in pairs]) + _column([slope for _, slope in pairs]) * sequences


def _costs(
    calls: Sequence[Call], seconds: Floats, moved: Floats, bound: NDArray[np.intp], causes: Sequence[str]
) -> Costs:
    counts = _column([call.count for call in calls])
    return Costs(
        op=np.array([call.op for call in calls], dtype=np.intp),
        phase=np.array([call.phase for call in calls], dtype=np.intp),
        seconds=seconds * counts,
        bytes=moved * counts,
        cause=np.array([CAUSES.index(cause) for cause in causes], dtype=np.intp)[bound],
    )


def gemm_costs(calls: Sequence[GemmCall], hardware: Hardware, sequences: Floats, accumulate: ArrayLike = True) -> Costs:
    """Matrix products; with fewer tokens than experts, as many experts work as there are tokens, on one each."""
    calls = [_as_multiplied(call, hardware) for call in calls]
    peaks = {name: product_peak_flops(hardware, name) for name in {call.number_format for call in calls}}
    rows = _linear([call.rows for call in calls], sequences)
    depth = _linear([call.depth for call in calls], sequences)
    near = _column([np.nan if call.near_bytes is None else call.near_bytes for call in calls])
    times = gemm_times(
        hardware.device,
        hardware.efficiency,
        np.maximum(rows, 1.0),
        np.maximum(depth, 1.0),
        _column([call.columns for call in calls]),
        peak_flops=_column([peaks[call.number_format] for call in calls]),
        groups=_column([call.groups for call in calls])
        * np.minimum(np.minimum(rows, depth), 1.0)
        * np.where(np.isnan(near), 1.0, sequences),
        operand_bytes=_column([OPERAND_BYTES[call.number_format] for call in calls]),
        output_bytes=_column([call.output_bytes for call in calls]),
        accumulate=np.maximum(
            _column([call.accumulate for call in calls]) * np.asarray(accumulate),
            _column([call.adds for call in calls]),
        ),
        uneven=_column([call.uneven for call in calls]),
    )
    if not np.isnan(near).all():
        times = _with_near_operands(times, near * sequences, dram_bytes_per_s(hardware.device, hardware.efficiency))
    return _costs(calls, times.seconds, times.dram_bytes, times.bound(), GEMM_CAUSES)


def _with_near_operands(times: GemmTimes, moved: Floats, dram: float) -> GemmTimes:
    """The same where it is known what is moved to and from the main memory."""
    own = ~np.isnan(moved)
    dram_s = np.where(own, moved / dram, times.dram_s)
    slowest = np.maximum(np.maximum(times.compute_s, times.l2_s), dram_s)
    return replace(
        times,
        seconds=np.where(own, times.launch_s + slowest, times.seconds),
        dram_s=dram_s,
        dram_bytes=np.where(own, moved, times.dram_bytes),
    )


def _as_multiplied(call: GemmCall, hardware: Hardware) -> GemmCall:
    """An update's products are in bf16 whatever the device, and a plain scan's in tf32: one without units for that does
    them as in fp32."""
    fixed = call.phase == Phase.UPDATE or (call.near_bytes is not None and call.number_format == "tf32")
    if not fixed or call.number_format in hardware.device.peak_flops:
        return call
    return replace(call, number_format="fp32")


def attention_costs(
    calls: Sequence[AttentionCall], hardware: Hardware, sequences: Floats, families: Sequence[str] = ()
) -> Costs:
    """Flash attention; its curves differ by direction, so each direction is timed at once.

    `families`: whose kernels are called, where the hardware's description has them.
    """
    efficiency = hardware.efficiency
    if families:
        efficiency = replace(efficiency, attention=efficiency.attention.preferring(families))
    groups: dict[Direction, list[AttentionCall]] = {
        "forward": [call for call in calls if call.phase != Phase.BACKWARD],
        "backward": [call for call in calls if call.phase == Phase.BACKWARD],
    }
    parts = []
    for direction, group in groups.items():
        moved = _column([call.bytes for call in group]) * sequences
        times = attention_times(
            hardware.device,
            efficiency,
            direction,
            flops=_column([call.flops for call in group]) * sequences,
            moved_bytes=moved,
            heads=_column([call.heads for call in group]) * sequences,
            tokens=_column([call.tokens for call in group]),
            head_dim=_column([call.head_dim for call in group]),
            peak_flops=_column([peak_flops(hardware, call.number_format) for call in group]),
            area_share=_column([call.area_share for call in group]),
            packed=_column([call.packed for call in group]),
            value_share=_column([call.value_share for call in group]),
        )
        parts.append(_costs(group, times.seconds, moved, times.bound(), ATTENTION_CAUSES))
    return joined(parts)


def families_called(setup: SettledSetup) -> tuple[str, ...]:
    """Whose kernels a set-up's attention is costed by, as far as the hardware's description says."""
    calls = [call for call in calls_of(setup).attentions if call.phase == Phase.FORWARD]
    if not calls:
        return ()
    attention = setup.hardware.efficiency.attention.preferring(setup.flash_kernels)
    kinds = [kernels_for(attention, call.head_dim, call.area_share, packed=call.packed) for call in calls]
    return tuple(dict.fromkeys(kind.kernel for kind in kinds if kind.kernel))


def streaming_costs(calls: Sequence[StreamingCall], hardware: Hardware, sequences: Floats) -> Costs:
    """Kernels bound by bytes."""
    moved = _linear([call.bytes for call in calls], sequences)
    if hardware.efficiency.plain is None:
        kernels = _column([call.kernels for call in calls])
        times = streaming_times(hardware.device, hardware.efficiency, moved, kernels=kernels)
    else:
        # The update and what is done to weights do not grow with the sequences.
        fixed = [call.phase == Phase.UPDATE or call.of_weights for call in calls]
        count = np.where(_column(fixed), 1.0, sequences)
        passes = [call.passes for call in calls]
        times = plain_times(
            hardware.device,
            hardware.efficiency,
            moved,
            calls=_column([each.calls for each in passes]),
            numbers=_column([each.moved for each in passes]) * count,
            functions=_column([each.functions for each in passes]) * count,
        )
    return _costs(calls, times.seconds, moved, times.bound(), STREAMING_CAUSES)


def joined(parts: Sequence[Costs]) -> Costs:
    """Several lists of costs as one."""
    return Costs(
        op=np.concatenate([part.op for part in parts]),
        phase=np.concatenate([part.phase for part in parts]),
        seconds=np.concatenate([part.seconds for part in parts]),
        bytes=np.concatenate([part.bytes for part in parts]),
        cause=np.concatenate([part.cause for part in parts]),
    )


def step_costs(
    calls: StepCalls,
    hardware: Hardware,
    sequences: Floats,
    accumulate: ArrayLike = True,
    families: Sequence[str] = (),
) -> Costs:
    """Cost of each kernel for micro-batches of `sequences` sequences.

    `accumulate`: whether gradients are added to those of an earlier micro-batch, so that they are read too.
    `families`: whose kernels attention calls.
    """
    parts = [
        gemm_costs(calls.gemms, hardware, sequences, accumulate),
        streaming_costs(calls.streams, hardware, sequences),
    ]
    if calls.attentions:
        parts.append(attention_costs(calls.attentions, hardware, sequences, families))
    return joined(parts)


@dataclass(frozen=True, slots=True)
class SetupCosts:
    """The kernels of set-ups that differ in their sizes alone: arrays of set-up × call × size of micro-batch."""

    setups: tuple[SettledSetup, ...]
    calls: StepCalls
    op: NDArray[np.intp]
    """Of each call, like the next."""
    phase: NDArray[np.intp]
    seconds: Floats
    bytes: Floats
    cause: NDArray[np.intp]

    def by_op(self, values: Floats, phase: Phase | None = None) -> Floats:
        """Sums over the calls of each operator, all of them or those of a phase: set-up × operator."""
        order = np.argsort(self.op, kind="stable")
        if phase is not None:
            order = order[self.phase[order] == phase]
        ends = np.searchsorted(self.op[order], np.arange(len(self.calls.names) + 1)).tolist()
        values = np.take(values, order, axis=1)
        return np.stack([values[:, begin:end].sum(axis=(1, 2)) for begin, end in pairwise(ends)], axis=1)

    def bounds(self) -> NDArray[np.object_]:
        """What most of an operator's time waits for, in words: set-up × operator."""
        by_cause = np.stack([np.where(self.cause == cause, self.seconds, 0.0) for cause in range(len(CAUSES))], axis=-1)
        mine = (np.arange(len(self.calls.names))[:, None] == self.op).astype(np.float64)
        names = np.array([BOUND_NAMES[cause] for cause in CAUSES], dtype=np.object_)
        return np.asarray(names[np.argmax(mine @ by_cause.sum(axis=2), axis=-1)])


Kind = TypeVar("Kind", bound=np.generic)
Sizes = Sequence[tuple[int, int]]
"""Sequences of a micro-batch, and how many such."""


def cost_together(
    setups: Sequence[SettledSetup], sizes: Callable[[SettledSetup], Sizes]
) -> Iterator[tuple[list[int], SetupCosts]]:
    """Cost each kernel for all of a set-up's micro-batches, sizes of the same kernels being costed together.

    A micro-batch's kernels run once for each; the update runs once a step, whatever the micro-batches. Beside the
    costs: the places in `setups` of those that they are of.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, setup in enumerate(setups):
        # By its identity: a hardware description has no hash.
        alike.setdefault((id(setup.hardware), *kernels_key(setup)), []).append(place)
    for places in alike.values():
        first, wanted = setups[places[0]], {place: sizes(setups[place]) for place in places}
        # By the size of a micro-batch, and whether it is one of several.
        column: dict[tuple[int, bool], int] = {}
        columns = {
            place: [column.setdefault((size, setups[place].accumulation_steps > 1), len(column)) for size, _ in some]
            for place, some in wanted.items()
        }
        calls, accumulate = calls_of(first), [again for _, again in column]
        counts = np.array([float(size) for size, _ in column])
        costs = step_costs(calls, first.hardware, counts, accumulate, first.flash_kernels)
        for number in {len(some) for some in wanted.values()}:
            mine = [place for place in places if len(wanted[place]) == number]
            taken = np.array([columns[place] for place in mine])
            repeats = np.array([[float(count) for _, count in wanted[place]] for place in mine])[:, None, :]
            once = np.arange(number) == 0
            weights = np.where((costs.phase == Phase.UPDATE)[:, None], once, repeats)
            yield (
                mine,
                SetupCosts(
                    setups=tuple(setups[place] for place in mine),
                    calls=calls,
                    op=costs.op,
                    phase=costs.phase,
                    seconds=_by_setup(costs.seconds, taken) * weights,
                    bytes=_by_setup(costs.bytes, taken) * weights,
                    cause=_by_setup(costs.cause, taken),
                ),
            )


def _by_setup(values: NDArray[Kind], columns: NDArray[np.intp]) -> NDArray[Kind]:
    """Calls × sizes as set-up × call × size, `columns` being each set-up's sizes."""
    # Laid out so that a sum adds up in the same order whatever is costed beside it.
    return np.ascontiguousarray(np.moveaxis(values[:, columns], 0, 1))
