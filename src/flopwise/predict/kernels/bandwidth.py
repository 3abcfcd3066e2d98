"""Time of kernels that are bound by bytes: norms, pointwise functions, cross-entropy, optimizer steps, casts, copies.

    time = kernels · launch + (bytes + kernels · half_bytes) / (share of the DRAM bandwidth)

`half_bytes` is the start-up and tail of a kernel as the bytes that could have been moved meanwhile: a kernel of that
size runs at half the rate. The form is Hockney's n½ (R. Hockney, "(r∞, n½, s½) measurements", 1985).

Left out: data that an earlier kernel left in L2, functions with so much arithmetic that the vector units bind, and
reductions over rows too few or too wide to spread over the device (a softmax in eager PyTorch reaches a third of
the rate of a copy for rows of 4096).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flopwise.setup.efficiency import Efficiency
from flopwise.setup.hardware import Device
from flopwise.work.formats import WIDTH_BYTES

Floats = NDArray[np.float64]

CAUSES = ("dram", "launch")


@dataclass(frozen=True, slots=True)
class StreamingTimes:
    """Seconds of each call, and of each cause had it been alone."""

    seconds: Floats
    dram_s: Floats
    launch_s: Floats

    def bound(self) -> NDArray[np.intp]:
        """Index into `CAUSES` of what takes longest."""
        return (self.launch_s > self.dram_s).astype(np.intp)


def streaming_times(
    device: Device, efficiency: Efficiency, moved_bytes: ArrayLike, *, kernels: ArrayLike = 1.0
) -> StreamingTimes:
    """Time calls that move `moved_bytes` each, in `kernels` kernels one after the other; both broadcast."""
    count = np.asarray(kernels, dtype=np.float64)
    bytes_and_start = np.asarray(moved_bytes, dtype=np.float64) + count * efficiency.memory.half_bytes
    dram_s = bytes_and_start / dram_bytes_per_s(device, efficiency)
    launch_s = np.broadcast_to(count * efficiency.launch_s, dram_s.shape)
    return StreamingTimes(seconds=launch_s + dram_s, dram_s=dram_s, launch_s=launch_s)


def plain_times(
    device: Device,
    efficiency: Efficiency,
    moved_bytes: ArrayLike,
    *,
    calls: ArrayLike,
    numbers: ArrayLike,
    functions: ArrayLike,
) -> StreamingTimes:
    """Time operators that nobody fuses: what they bring from main memory, and in the caches so many calls that read and
    write so many fp32 numbers and compute so many exponentials."""
    plain = efficiency.plain
    assert plain is not None
    launch_s = np.asarray(calls, dtype=np.float64) * plain.call_s
    dram_s = np.asarray(moved_bytes, dtype=np.float64) / dram_bytes_per_s(device, efficiency)
    dram_s = dram_s + np.asarray(numbers, dtype=np.float64) * (WIDTH_BYTES["fp32"] / plain.bytes_per_s)
    dram_s = dram_s + np.asarray(functions, dtype=np.float64) * plain.function_s
    launch_s, dram_s = np.broadcast_arrays(launch_s, dram_s)
    return StreamingTimes(seconds=launch_s + dram_s, dram_s=dram_s, launch_s=launch_s)


def dram_bytes_per_s(device: Device, efficiency: Efficiency) -> float:
    """The rate at which long kernels read and write the device's main memory."""
    bandwidth = device.dram.bandwidth_bytes_per_s
    assert bandwidth is not None  # Device refuses a `dram` level without it
    return bandwidth.value * efficiency.memory.dram
