"""What a step's kernels cost on a device: seconds by cause, for any number of micro-batch sizes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.predict.kernels.attention import CAUSES as ATTENTION_CAUSES
from flopwise.predict.kernels.attention import Direction, attention_times
from flopwise.predict.kernels.bandwidth import CAUSES as STREAMING_CAUSES
from flopwise.predict.kernels.bandwidth import streaming_times
from flopwise.predict.kernels.calls import AttentionCall, Floats, GemmCall, Phase, StepCalls, StreamingCall, calls_of
from flopwise.predict.kernels.gemm import CAUSES as GEMM_CAUSES
from flopwise.predict.kernels.gemm import gemm_times
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import SettledSetup
from flopwise.work.formats import WIDTH_BYTES

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
        policies = {"bf16": "bf16", "fp16": "fp16-mixed", "tf32": "tf32", "fp32": "fp32"}
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


def gemm_costs(calls: Sequence[GemmCall], hardware: Hardware, sequences: Floats) -> Costs:
    """Matrix products; with fewer tokens than experts, as many experts work as there are tokens, on one each."""
    peaks = {name: product_peak_flops(hardware, name) for name in {call.number_format for call in calls}}
    rows = _linear([call.rows for call in calls], sequences)
    depth = _linear([call.depth for call in calls], sequences)
    times = gemm_times(
        hardware.device,
        hardware.efficiency,
        np.maximum(rows, 1.0),
        np.maximum(depth, 1.0),
        _column([call.columns for call in calls]),
        peak_flops=_column([peaks[call.number_format] for call in calls]),
        groups=_column([call.groups for call in calls]) * np.minimum(np.minimum(rows, depth), 1.0),
        operand_bytes=_column([WIDTH_BYTES[call.number_format] for call in calls]),
        output_bytes=_column([call.output_bytes for call in calls]),
        accumulate=_column([call.accumulate for call in calls]),
    )
    return _costs(calls, times.seconds, times.dram_bytes, times.bound(), GEMM_CAUSES)


def attention_costs(calls: Sequence[AttentionCall], hardware: Hardware, sequences: Floats) -> Costs:
    """Flash attention; its curves differ by direction, so each direction is timed at once."""
    groups: dict[Direction, list[AttentionCall]] = {
        "forward": [call for call in calls if call.phase != Phase.BACKWARD],
        "backward": [call for call in calls if call.phase == Phase.BACKWARD],
    }
    parts = []
    for direction, group in groups.items():
        moved = _column([call.bytes for call in group]) * sequences
        times = attention_times(
            hardware.device,
            hardware.efficiency,
            direction,
            flops=_column([call.flops for call in group]) * sequences,
            moved_bytes=moved,
            heads=_column([call.heads for call in group]) * sequences,
            tokens=_column([call.tokens for call in group]),
            head_dim=_column([call.head_dim for call in group]),
            peak_flops=_column([peak_flops(hardware, call.number_format) for call in group]),
            area_share=_column([call.area_share for call in group]),
        )
        parts.append(_costs(group, times.seconds, moved, times.bound(), ATTENTION_CAUSES))
    return joined(parts)


def streaming_costs(calls: Sequence[StreamingCall], hardware: Hardware, sequences: Floats) -> Costs:
    """Kernels bound by bytes."""
    moved = _linear([call.bytes for call in calls], sequences)
    times = streaming_times(
        hardware.device, hardware.efficiency, moved, kernels=_column([call.kernels for call in calls])
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


def step_costs(calls: StepCalls, hardware: Hardware, sequences: Floats) -> Costs:
    """Cost of each kernel for micro-batches of `sequences` sequences."""
    parts = [gemm_costs(calls.gemms, hardware, sequences), streaming_costs(calls.streams, hardware, sequences)]
    if calls.attentions:
        parts.append(attention_costs(calls.attentions, hardware, sequences))
    return joined(parts)


def setup_costs(setup: SettledSetup) -> Costs:
    """Cost of each kernel over a whole step, one column for each size of micro-batch.

    A micro-batch's kernels run once for each; the update runs once a step, whatever the micro-batches.
    """
    sizes = setup.micro_batches()
    costs = step_costs(calls_of(setup), setup.hardware, np.array([float(sequences) for sequences, _ in sizes]))
    repeats = np.array([float(count) for _, count in sizes])
    once = np.zeros_like(repeats)
    once[0] = 1.0
    weights = np.where((costs.phase == Phase.UPDATE)[:, None], once, repeats)
    return replace(costs, seconds=costs.seconds * weights, bytes=costs.bytes * weights)
