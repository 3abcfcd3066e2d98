"""Counters of a device while a window is open: power, energy, clock, limits, how busy its units are.

Standard library alone, since it also runs within other people's programs; the rest of flopwise is imported where a
record is read or turned into values.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal, Protocol

from .nvml import REASONS, THROTTLED, GpmSample, Nvml, NvmlDevice, open_nvml, visible_device

if TYPE_CHECKING:
    from flopwise.records.profile import SourcedValue

ENERGY_WINDOW_S = 1.0
"""The energy counter of a GPU moves in steps of tens of milliseconds: shorter windows say too little."""
GPM_WINDOW_S = 0.2
"""The maker calls counters over less than 100 ms invalid."""
SMALLEST_GAP_S = 1e-4

Window = Literal["steady", "profiled"]
"""steady: steps that ran as they always do. profiled: steps that were traced, which slows the host down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What a device did over a window; None is what nobody could tell."""

    seconds: float | None = None
    """How long the window was open."""
    energy_j: float | None = None
    """Of a GPU only where the window was at least a second long."""
    power_w: float | None = None
    """Energy over seconds; the mean of the samples where the energy is not known."""
    power_limit_w: float | None = None
    clock_mean_hz: float | None = None
    clock_boost_hz: float | None = None
    throttle_share: float | None = None
    """Samples under a limit of power or temperature."""
    throttle_loss: float | None = None
    """That share times how far below the highest clock it ran meanwhile."""
    reasons: dict[str, float] = field(default_factory=dict)
    """Why the clock was not the highest: share of the samples, in the words of `nvml.REASONS`."""
    temperature_c: float | None = None
    """The highest."""
    matrix_share: float | None = None
    dram_share: float | None = None
    unit_share: float | None = None
    occupancy: float | None = None
    resident_peak_bytes: int | None = None
    """Of the process, since it began (CPU)."""
    context_switches: int | None = None
    """Of the process, within the window (CPU)."""
    samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterRecord:
    """Counters as a file keeps them, beside the trace of the same rank."""

    rank: int
    steps: int
    """Within the window."""
    window: Window
    device: str | None = None
    """Its name, for a GPU."""
    driver: str | None = None
    counters: Counters


class Samples(Protocol):
    """What counts over a window, on whatever device."""

    device_name: str | None
    driver_version: str | None

    def start(self) -> None: ...

    def stop(self) -> Counters: ...


@dataclass(frozen=True, slots=True)
class _Sample:
    clock_hz: float | None
    power_w: float | None
    reason_bits: int | None
    temperature_c: float | None


class _Repeated:
    """Calls something now, every so often from a thread, and once more at the end."""

    def __init__(self, take: Callable[[], None], every_s: float) -> None:
        self._take = take
        self._every_s = max(every_s, SMALLEST_GAP_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flopwise-sampler", daemon=True)
        take()
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self._take()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._take()


class Sampler:
    """An NVIDIA device between `start` and `stop`; may be started again afterwards."""

    def __init__(
        self, device: NvmlDevice, every_s: float = 0.1, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device_name = device.name()
        self.driver_version = device.driver_version()
        self._device = device
        self._every_s = every_s
        self._clock = clock
        self._gpm = device.has_gpm()
        self._samples: list[_Sample] = []
        self._repeated: _Repeated | None = None
        self._first_gpm: GpmSample | None = None
        self._first_energy_j: float | None = None
        self._started = 0.0

    def start(self) -> None:
        """Open the window."""
        assert self._repeated is None, "it is open already"
        self._samples = []
        self._repeated = _Repeated(self._take, self._every_s)
        self._first_gpm = self._device.gpm_sample() if self._gpm else None
        self._first_energy_j = self._device.energy_j()
        self._started = self._clock()

    def stop(self) -> Counters:
        """Close it."""
        assert self._repeated is not None, "it was not started"
        seconds = self._clock() - self._started
        energy_j = _difference(self._first_energy_j, self._device.energy_j())
        shares = self._shares()
        if seconds < GPM_WINDOW_S:
            shares = {}
        self._repeated.end()
        self._repeated = None
        powers = _without_none(sample.power_w for sample in self._samples)
        if seconds < ENERGY_WINDOW_S:
            energy_j = None
        boost_hz = self._device.clock_boost_hz()
        throttle_share, throttle_loss = _throttling(self._samples, boost_hz)
        return Counters(
            seconds=seconds,
            energy_j=energy_j,
            power_w=_mean(powers) if energy_j is None else energy_j / seconds,
            power_limit_w=self._device.power_limit_w(),
            clock_mean_hz=_mean(_without_none(sample.clock_hz for sample in self._samples)),
            clock_boost_hz=boost_hz,
            throttle_share=throttle_share,
            throttle_loss=throttle_loss,
            reasons=_reason_shares(self._samples),
            temperature_c=max(_without_none(sample.temperature_c for sample in self._samples), default=None),
            matrix_share=shares.get("matrix_share"),
            dram_share=shares.get("dram_share"),
            unit_share=shares.get("unit_share"),
            occupancy=shares.get("occupancy"),
            samples=len(self._samples),
        )

    def _take(self) -> None:
        device = self._device
        self._samples.append(_Sample(device.clock_hz(), device.power_w(), device.reason_bits(), device.temperature_c()))

    def _shares(self) -> dict[str, float]:
        first, self._first_gpm = self._first_gpm, None
        if first is None:
            return {}
        last = self._device.gpm_sample()
        shares = {} if last is None else first.until(last)
        for sample in (first, last):
            if sample is not None:
                sample.free()
        return shares


class NoSampler:
    """Where nothing can be counted."""

    device_name: str | None = None
    driver_version: str | None = None

    def start(self) -> None:
        """Open a window in which nothing is seen."""

    def stop(self) -> Counters:
        """Nothing was."""
        return Counters()


class CpuSampler:
    """What the operating system tells of the processor and of this process.

    Energy is that of all processor packages, whoever used them; mostly only root may read it. `root` is where the
    system's own folders hang.
    """

    device_name: str | None = None
    driver_version: str | None = None

    def __init__(
        self, every_s: float = 0.1, *, root: Path = Path("/"), clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._root = root
        self._every_s = every_s
        self._clock = clock
        self._clocks: list[float] = []
        self._samples = 0
        self._packages: list[_Package] = []
        self._repeated: _Repeated | None = None
        self._started = 0.0
        self._switches = 0

    def start(self) -> None:
        """Open the window."""
        assert self._repeated is None, "it is open already"
        self._clocks, self._samples = [], 0
        self._packages = [_Package(path) for path in sorted(self._root.glob("sys/class/powercap/intel-rapl:[0-9]*"))]
        self._packages = [package for package in self._packages if package.readable and package.whole]
        self._repeated = _Repeated(self._take, self._every_s)
        self._switches = _context_switches()
        self._started = self._clock()

    def stop(self) -> Counters:
        """Close it."""
        assert self._repeated is not None, "it was not started"
        seconds = self._clock() - self._started
        switches = _context_switches() - self._switches
        self._repeated.end()
        self._repeated = None
        energy_j = sum(package.used_j for package in self._packages) if self._packages else None
        return Counters(
            seconds=seconds,
            energy_j=energy_j,
            power_w=energy_j / seconds if energy_j is not None and seconds > 0 else None,
            clock_mean_hz=_mean(self._clocks),
            clock_boost_hz=self._boost_hz(),
            resident_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            context_switches=switches,
            samples=self._samples,
        )

    def _take(self) -> None:
        self._samples += 1
        clock_hz = self._clock_hz()
        if clock_hz is not None:
            self._clocks.append(clock_hz)
        for package in self._packages:
            package.read()

    def _clock_hz(self) -> float | None:
        scaled = self._frequencies("scaling_cur_freq")
        if scaled:
            return fmean(scaled)
        try:
            lines = (self._root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            return _mean([float(line.partition(":")[2]) * 1e6 for line in lines if line.startswith("cpu MHz")])
        except (OSError, ValueError):
            return None

    def _boost_hz(self) -> float | None:
        return max(self._frequencies("cpuinfo_max_freq"), default=None)

    def _frequencies(self, name: str) -> list[float]:
        paths = self._root.glob(f"sys/devices/system/cpu/cpu[0-9]*/cpufreq/{name}")
        return [number * 1e3 for number in map(_number_in, paths) if number is not None]


class _Package:
    """The energy counter of one processor package, which begins again at 0 when it is full."""

    def __init__(self, folder: Path) -> None:
        self._counter = folder / "energy_uj"
        self._range_uj = _number_in(folder / "max_energy_range_uj")
        self._last_uj = _number_in(self._counter)
        self._used_uj = 0
        self.readable = self._last_uj is not None
        # `intel-rapl:0:1` is a part of package 0 and must not be added to it.
        self.whole = folder.name.count(":") == 1

    @property
    def used_j(self) -> float:
        return self._used_uj * 1e-6

    def read(self) -> None:
        now, last = _number_in(self._counter), self._last_uj
        if now is None or last is None:
            return
        if now >= last:
            self._used_uj += now - last
        elif self._range_uj is not None:
            self._used_uj += now + self._range_uj - last
        self._last_uj = now


def sampler_for(device_type: str, index: int | str = 0, *, every_s: float = 0.1, nvml: Nvml | None = None) -> Samples:
    """What counts on a torch device: `cuda` with its UUID or torch's index, `cpu`, or any other, of which nothing is
    known. `nvml` stands in for the library in tests."""
    if device_type == "cpu":
        return CpuSampler(every_s)
    if device_type != "cuda":
        return NoSampler()
    nvml = nvml or open_nvml()
    which = visible_device(index) if isinstance(index, int) else index
    device = nvml.device(which) if nvml is not None and which is not None else None
    return NoSampler() if device is None else Sampler(device, every_s)


def counters_values(counters: Counters, span_s: float, *, steps: int | None = None) -> dict[str, SourcedValue]:
    """Counters under the names of `METRICS`, for a profile in which a step spans `span_s` on the device.

    `steps` of the window divide its energy and its seconds, of which the counters' shares are; without them the energy
    is left out, and a step is taken to be as long as its span. Traffic is only counted as a sum of reads and writes, so
    it appears as `mbu` alone.
    """
    from flopwise.records.profile import known

    energy_j = counters.energy_j
    step_s = counters.seconds / steps if counters.seconds and steps else span_s
    in_span = step_s / span_s if span_s > 0 else 1.0
    same = ("unit_share", "occupancy", "throttle_share", "throttle_loss", "clock_mean_hz", "clock_boost_hz")
    found = {
        "matrix_active_s": None if counters.matrix_share is None else counters.matrix_share * step_s,
        "mbu": None if counters.dram_share is None else counters.dram_share * in_span,
        "energy_j": energy_j / steps if energy_j is not None and steps else None,
        **{name: getattr(counters, name) for name in (*same, "power_w", "power_limit_w", "temperature_c")},
    }
    return known("measured", found.items())


def read_counter_record(path: Path) -> CounterRecord:
    """The file that lies beside a trace, checked."""
    from flopwise.base.files import decode, read_table

    return decode(read_table(path), CounterRecord, str(path))


def _throttling(samples: Sequence[_Sample], boost_hz: float | None) -> tuple[float | None, float | None]:
    """Share of the samples under a limit, and the throughput that it took."""
    told = [sample for sample in samples if sample.reason_bits is not None]
    if not told:
        return None, None
    limited = [sample for sample in told if (sample.reason_bits or 0) & THROTTLED]
    share = len(limited) / len(told)
    if not limited:
        return share, 0.0
    clock_hz = _mean(_without_none(sample.clock_hz for sample in limited))
    if clock_hz is None or not boost_hz:
        return share, None
    return share, share * max(0.0, 1 - clock_hz / boost_hz)


def _reason_shares(samples: Sequence[_Sample]) -> dict[str, float]:
    told = [sample.reason_bits for sample in samples if sample.reason_bits is not None]
    counts = {word: sum(1 for bits in told if bits & bit) for bit, word in REASONS.items()}
    return {word: count / len(told) for word, count in counts.items() if count}


def _without_none(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _difference(first: float | None, last: float | None) -> float | None:
    # A driver that was reloaded meanwhile begins at 0.
    return None if first is None or last is None or last < first else last - first


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _context_switches() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw + usage.ru_nivcsw
