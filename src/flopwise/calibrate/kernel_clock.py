"""Seconds of a kernel on a warm device: by the device's own events on a GPU, by the host's clock on a CPU.

On a GPU every round begins with large products: the card stays as hot, and its clock as low, as in training, and the
host has queued what is timed before it runs, so that short kernels follow one another without a gap.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, Protocol

import torch

from flopwise.profile.measure.nvml import NvmlDevice, open_nvml, visible_device
from flopwise.records.calibration import Sample
from flopwise.work.op import product_flops

Calls = Sequence[Callable[[], object]]

ROUNDS = 5
LOAD_SIDE = 8192
LEAST_LOAD_S = 0.004
LONGEST_LEAD_S = 0.05
"""Of products before a round, while the host queues what is timed."""
HEAT_S = 0.08
"""Of products while the tensors of the next row are made."""
MOST_QUEUED = 256
"""Calls of a round: the driver's queue holds about a thousand kernels."""
KEPT_UP_S = 1.0
"""Of products, whose rate is that of a settled clock."""
SETTLED = 0.015
"""A clock has settled when four readings, a quarter of a second apart, lie within this share."""
MOST_ROUNDS_CPU = 25
LEAST_SPAN_S = 1e-3
"""That a CPU's round takes, so that its clock's steps do not matter."""


class Clock(Protocol):
    """Times calls; those of one kernel may take turns, over buffers that together exceed the caches."""

    samples: list[Sample]

    def settle(self, least_s: float, most_s: float) -> float | None: ...
    def heat(self) -> None: ...
    def seconds(self, calls: Calls, budget_s: float) -> float: ...


class CpuClock:
    """The first quartile of as many rounds as the budget has room for, at least four: a CPU is shared with others."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def settle(self, least_s: float, most_s: float) -> float | None:
        """Products for so long, so that the threads are there and the clock is up."""
        left, right = torch.randn(512, 512), torch.randn(512, 512)
        began = time.perf_counter()
        while time.perf_counter() - began < min(least_s, most_s):
            torch.mm(left, right)
        return None

    def heat(self) -> None:
        """A CPU is as warm as it was."""

    def seconds(self, calls: Calls, budget_s: float) -> float:
        """Of one call."""
        for call in calls:
            call()
        began = time.perf_counter()
        calls[0]()
        times = max(1, ceil(LEAST_SPAN_S / max(time.perf_counter() - began, 1e-8)))
        found: list[float] = []
        began = time.perf_counter()
        while len(found) < 4 or (time.perf_counter() - began < budget_s and len(found) < MOST_ROUNDS_CPU):
            start = time.perf_counter()
            for index in range(times):
                calls[(index + len(found)) % len(calls)]()
            found.append((time.perf_counter() - start) / times)
        return sorted(found)[len(found) // 4]


class CudaClock:
    """Events of the device round queued calls, behind products that keep it hot."""

    def __init__(self, number_format: torch.dtype, sensors: NvmlDevice | None, *, device: str = "cuda") -> None:
        self.samples: list[Sample] = []
        self._sensors = sensors
        side = LOAD_SIDE
        self._load = tuple(torch.randn(side, side, device=device, dtype=number_format) for _ in range(3))
        self._load_s = product_flops(side, side, side) / 1e14
        for _ in range(3):
            self._multiply(1)
        torch.cuda.synchronize()
        self._load_s = self._time(lambda: self._multiply(8)) / 8

    def settle(self, least_s: float, most_s: float) -> float | None:
        """Products back to back until the clock no longer falls; their FLOP/s over one more second."""
        began = time.perf_counter()
        clocks: list[float] = []
        while (passed := time.perf_counter() - began) < most_s:
            last = clocks[-4:]
            if passed >= least_s and (len(last) < 4 or max(last) - min(last) <= SETTLED * max(last)):
                break
            self._multiply(max(1, ceil(0.25 / self._load_s)))
            clock = self.sample()
            clocks += [] if clock is None else [clock]
            torch.cuda.synchronize()
        times = max(4, ceil(KEPT_UP_S / self._load_s))
        self._load_s = self._time(lambda: self._multiply(times)) / times
        return product_flops(LOAD_SIDE, LOAD_SIDE, LOAD_SIDE) / self._load_s

    def heat(self) -> None:
        """Queue products for the time that making tensors takes."""
        self._multiply(max(1, ceil(HEAT_S / self._load_s)))

    def seconds(self, calls: Calls, budget_s: float) -> float:
        """Of one call, the median of five rounds."""
        for call in calls:
            call()
        torch.cuda.synchronize()
        few = calls[:4]
        submitted = [0.0]

        def run_few() -> None:
            began = time.perf_counter()
            for call in few:
                call()
            submitted[0] = (time.perf_counter() - began) / len(few)

        # Without a lead this may be the host's time; it only says how many calls a round has.
        rough_s = self._time(run_few) / len(few)
        count = min(max(1, int(budget_s / ROUNDS / max(rough_s, 1e-7))), MOST_QUEUED)
        lead_s = min(max(LEAST_LOAD_S, 1.5 * count * submitted[0]), LONGEST_LEAD_S)
        found: list[float] = []
        for turn in range(ROUNDS):
            self._multiply(ceil(lead_s / self._load_s))
            start, end = _event(), _event()
            start.record()
            for index in range(count):
                calls[(turn * count + index) % len(calls)]()
            end.record()
            if turn == ROUNDS // 2:
                self.sample()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3 / count)
        return statistics.median(found)

    def submit_seconds(self, call: Callable[[], object], count: int = 400) -> float:
        """The host's time for one call while the device is busy with something else."""
        call()
        torch.cuda.synchronize()
        self._multiply(ceil(2 * LONGEST_LEAD_S / self._load_s))
        began = time.perf_counter()
        for _ in range(count):
            call()
        passed = time.perf_counter() - began
        torch.cuda.synchronize()
        return passed / count

    def sample(self) -> float | None:
        """Read the sensors, while work is queued; the clock."""
        if self._sensors is None:
            return None
        taken = Sample(
            clock_hz=self._sensors.clock_hz(),
            power_w=self._sensors.power_w(),
            temperature_c=self._sensors.temperature_c(),
        )
        self.samples.append(taken)
        return taken.clock_hz

    def _multiply(self, times: int) -> None:
        left, right, out = self._load
        for _ in range(times):
            torch.mm(left, right, out=out)

    def _time(self, run: Callable[[], object]) -> float:
        start, end = _event(), _event()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _event() -> Any:  # noqa: ANN401 - torch does not say what an event's methods take
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def sensors() -> NvmlDevice | None:
    """Those of the current CUDA device; None where the driver's library cannot be had. It stays open."""
    nvml = open_nvml()
    which = visible_device(torch.cuda.current_device())
    return None if nvml is None or which is None else nvml.device(which)
