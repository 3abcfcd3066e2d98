"""Nsight Compute's CSV: counters of every kernel, as `ncu --csv` prints them.

Two shapes: long (a row for each kernel and metric) and wide (`--page raw`: a column for each metric, units in the
second line). Kernels are run again and again for their counters, one at a time and with locked clocks, so what they
take here is not what they take in a step: FLOPs and bytes are what this file is for.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import show_bytes
from flopwise.profile.explain.activity import thin
from flopwise.profile.explain.kernel_classes import class_of
from flopwise.profile.read.kineto_devices import peaks_of
from flopwise.profile.read.opening import TraceFile
from flopwise.records.profile import KERNEL_CLASSES, KernelClass, Profile, Read, SourcedValue, Spent

LONGEST_LINE = 2**20
MOST_NAMES = 200_000
MOST_DEVICES = 64

REPLAY_NOTE = (
    "times are those of kernels replayed one by one with locked clocks, not of the step: use FLOPs and bytes "
    "(ncu --clock-control none keeps the clocks)"
)

_DURATION = ("gpu__time_duration.sum", "Duration")
_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_MOVED = "dram__bytes.sum"
_TENSOR_ACTIVE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
_OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
_DEVICE_NAME = "device__attribute_display_name"
_LOCAL = ("l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum", "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum")
_TENSOR = re.compile(r"sm__ops_path_tensor_src_(?!int)\w+\.sum")
_SCALAR = re.compile(r"sm(?:sp)?__sass_thread_inst_executed_op_[fhd](add|mul|fma)_pred_on\.sum")
_TAKEN = {*_DURATION, _READ, _WRITTEN, _MOVED, _TENSOR_ACTIVE, _OCCUPANCY, *_LOCAL}

_SCALES = {
    **{f"{prefix}byte": 1000.0**power for power, prefix in enumerate(("", "k", "m", "g", "t", "p"))},
    **dict.fromkeys(("ns", "nsecond"), 1e-9),
    **dict.fromkeys(("us", "usecond"), 1e-6),
    **dict.fromkeys(("ms", "msecond"), 1e-3),
    **dict.fromkeys(("s", "second"), 1.0),
    **dict.fromkeys(("", "inst", "op", "ops", "1", "n/a"), 1.0),
    "%": 0.01,
}
"""By the unit in small letters. ncu's prefixes are powers of 1000."""


def looks_like(head: bytes) -> bool:
    """Whether a file that begins so may be ncu's CSV."""
    return b"==PROF==" in head or (b"Kernel Name" in head and (b"Metric Name" in head or b"__" in head))


def read_source(source: TraceFile, name: str) -> Read:
    """A profile for each device; sums over all kernels that were profiled."""
    table = _Table(source.name)
    table.read(_rows(source, table.warnings))
    if not table.devices:
        raise FlopwiseError(
            f"{source.name} holds no kernels of Nsight Compute",
            why="; ".join(table.warnings) or "no line with `Kernel Name` and metrics is in it",
            hint="ncu --csv --page raw --metrics dram__bytes_read.sum,… program > file.csv",
        )
    several = len(table.devices) > 1
    warnings = (*source.warnings, *table.warnings)
    return Read(
        profiles=tuple(
            _profile(f"{name} device {device}" if several else name, sums, origin=source.name, warnings=warnings)
            for device, sums in sorted(table.devices.items())
        )
    )


def _rows(source: TraceFile, warnings: list[str]) -> Iterator[list[str]]:
    """The cells of every line that is a row; the tool's own messages and whatever else is no CSV are left out."""
    text = io.TextIOWrapper(source, encoding="utf-8", errors="replace", newline="")
    skipped = 0

    def lines() -> Iterator[str]:
        while line := text.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise FlopwiseError(f"{source.name} has a line of more than {LONGEST_LINE} characters")
            if not line.startswith("==") and line.strip():
                yield line.replace("\0", "")

    reader = csv.reader(lines())
    while True:
        try:
            yield next(reader)
        except StopIteration:
            break
        except csv.Error:
            skipped += 1
    if skipped:
        warnings.append(f"{skipped} lines are no CSV")


@dataclass(slots=True)
class _Launch:
    """One kernel that was profiled: what is known of it so far."""

    identity: tuple[str, ...]
    device: str
    kernel: str
    metrics: dict[str, float] = field(default_factory=dict)
    """Of those that are asked for, in base units."""
    device_name: str | None = None


@dataclass(slots=True)
class _KernelSums:
    count: int = 0
    seconds: float = 0.0
    flops: float | None = None
    bytes: float | None = None


@dataclass(slots=True)
class _Sums:
    """Over all kernels of a device."""

    launches: int = 0
    kernels: dict[str, _KernelSums] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    given: Counter[str] = field(default_factory=Counter)
    """In how many kernels each of them was given."""
    tensor_flops: float | None = None
    scalar_flops: float | None = None
    weighted: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Shares times seconds."""
    weights: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    device_name: str | None = None

    def add(self, launch: _Launch) -> None:
        metrics = launch.metrics
        self.launches += 1
        self.device_name = self.device_name or launch.device_name
        self.given.update(metrics.keys())
        for name, value in metrics.items():
            self.metrics[name] += value
        tensor, scalar = tensor_flops(metrics), scalar_flops(metrics)
        self.tensor_flops = _sum(self.tensor_flops, tensor)
        self.scalar_flops = _sum(self.scalar_flops, scalar)
        seconds = next((metrics[name] for name in _DURATION if name in metrics), None)
        kernel = self.kernels.setdefault(launch.kernel, _KernelSums())
        kernel.count += 1
        kernel.seconds += seconds or 0.0
        kernel.flops = _sum(kernel.flops, _sum(tensor, scalar))
        kernel.bytes = _sum(kernel.bytes, _sum(metrics.get(_READ), metrics.get(_WRITTEN)) or metrics.get(_MOVED))
        for name in (_TENSOR_ACTIVE, _OCCUPANCY):
            if seconds and name in metrics:
                self.weighted[name] += metrics[name] * seconds
                self.weights[name] += seconds


def _sum(left: float | None, right: float | None) -> float | None:
    """Of what is known."""
    return right if left is None else left if right is None else left + right


def tensor_flops(metrics: dict[str, float]) -> float | None:
    """Of the matrix unit. A metric that splits another one which is given too (by sparsity, say) is not added."""
    names = [name.removesuffix(".sum") for name in metrics if _TENSOR.fullmatch(name)]
    whole = [name for name in names if not any(name.startswith(f"{other}_") for other in names)]
    return sum(metrics[f"{name}.sum"] for name in whole) if whole else None


def scalar_flops(metrics: dict[str, float]) -> float | None:
    """Of the other units: instructions of threads, a fused multiply-add counting twice."""
    counted: dict[str, float] = {}
    # The same instructions may be counted by processor (sm) and by its quarters (smsp); these come last, and stand.
    for name in sorted(name for name in metrics if _SCALAR.fullmatch(name)):
        counted[name.partition("__")[2]] = (2 if "fma_" in name else 1) * metrics[name]
    return sum(counted.values()) if counted else None


class _Table:
    def __init__(self, name: str) -> None:
        self.name = name
        self.devices: dict[str, _Sums] = {}
        self.warnings: list[str] = []
        self._columns: dict[str, int] = {}
        self._width = 0
        """Cells of the header; a name that comes twice is one column."""
        self._units: list[str] | None = None
        self._launch: _Launch | None = None
        self._unreadable: Counter[str] = Counter()
        self._odd_rows = 0

    def read(self, rows: Iterator[list[str]]) -> None:
        for row in rows:
            if "Kernel Name" in row and ("Metric Name" in row or any("__" in cell for cell in row)):
                self._columns = {cell.strip(): number for number, cell in enumerate(row)}
                self._width = len(row)
                self._units = None
            elif self._columns:
                self._take(row)
        self._close()
        if self._odd_rows:
            self.warnings.append(f"{self._odd_rows} rows have not as many cells as the header; the file may be cut off")
        self.warnings.extend(
            f"{metric} is given without a number that can be read, {count} times"
            for metric, count in self._unreadable.most_common(5)
        )

    def _take(self, row: list[str]) -> None:
        if len(row) != self._width:
            self._odd_rows += 1
            return
        cells = {name: row[number] for name, number in self._columns.items()}
        if "Metric Name" in cells:
            launch = self._of(cells)
            if launch is not None:
                self._put(launch, cells["Metric Name"], cells.get("Metric Value", ""), cells.get("Metric Unit", ""))
        elif self._units is None and not cells.get("ID", "").strip():
            self._units = row
        else:
            units = self._units or [""] * len(row)
            launch = self._of(cells)
            if launch is not None:
                for name, number in self._columns.items():
                    self._put(launch, name, row[number], units[number])

    def _of(self, cells: dict[str, str]) -> _Launch | None:
        """The kernel that a row is of: the one before, or a new one."""
        kernel, device = cells["Kernel Name"].strip(), cells.get("Device", "0").strip()[:20]
        identity = (cells.get("Process ID", ""), cells.get("ID", ""), kernel, device)
        if self._launch is None or self._launch.identity != identity or "Metric Name" not in cells:
            self._close()
            if not kernel or len(self.devices) >= MOST_DEVICES:
                self._odd_rows += 1
                return None
            self._launch = _Launch(identity=identity, device=device, kernel=kernel)
        return self._launch

    def _close(self) -> None:
        launch, self._launch = self._launch, None
        if launch is None:
            return
        sums = self.devices.setdefault(launch.device, _Sums())
        if len(sums.kernels) >= MOST_NAMES and launch.kernel not in sums.kernels:
            launch.kernel = "kernels of other names"
        sums.add(launch)

    def _put(self, launch: _Launch, metric: str, text: str, unit: str) -> None:
        if not text.strip():
            return
        if metric == _DEVICE_NAME:
            launch.device_name = text.strip()[:200] or None
        elif metric in _TAKEN or _TENSOR.fullmatch(metric) or _SCALAR.fullmatch(metric):
            value, scale = number_in(text), _SCALES.get(unit.strip().lower())
            if value is None or scale is None:
                self._unreadable[metric] += 1
            else:
                launch.metrics[metric] = value * scale


_ENGLISH = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
_GERMAN = re.compile(r"\d{1,3}(\.\d{3})+(,\d+)|\d+,\d+|\d{1,3}(\.\d{3}){2,}")


def number_in(text: str) -> float | None:
    """A number as ncu prints it: `1,234.5`, and `1.234,5` where the language wants that; None: none that can be."""
    # More than one figure comes as `total (one; another; …)`.
    plain = text.partition("(")[0].strip().replace("\u202f", "").replace("\xa0", "")
    if len(plain) > 60:
        return None
    if _ENGLISH.fullmatch(plain):
        plain = plain.replace(",", "")
    elif _GERMAN.fullmatch(plain):
        plain = plain.replace(".", "").replace(",", ".")
    try:
        value = float(plain)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value < 1e30 else None


def _profile(name: str, sums: _Sums, *, origin: str, warnings: tuple[str, ...]) -> Profile:
    timed = next((metric for metric in _DURATION if sums.given[metric]), None)
    values = {"kernel_count": SourcedValue(float(sums.launches), "ingested")}
    for value_name, metric in {"hbm_read_bytes": _READ, "hbm_write_bytes": _WRITTEN}.items():
        if sums.given[metric]:
            values[value_name] = SourcedValue(sums.metrics[metric], "ingested")
    if sums.tensor_flops is not None:
        values["hardware_flops"] = SourcedValue(sums.tensor_flops, "ingested")
    if sums.weights[_TENSOR_ACTIVE]:
        values["matrix_active_s"] = SourcedValue(sums.weighted[_TENSOR_ACTIVE], "ingested")
    if sums.weights[_OCCUPANCY]:
        values["occupancy"] = SourcedValue(sums.weighted[_OCCUPANCY] / sums.weights[_OCCUPANCY], "ingested")
    notes, told = [REPLAY_NOTE], list(warnings)
    for metric in _LOCAL:
        if sums.metrics[metric]:
            # Counted at the first cache: how much of it reaches device memory, nobody knows.
            notes.append(f"local memory (spilled registers, arrays): {show_bytes(sums.metrics[metric])} in {metric}")
    if sums.tensor_flops is None and sums.scalar_flops is not None:
        notes.append("no counter of the matrix unit is in the file: FLOPs of kernels are those of the other units")
    if timed is None:
        told.append("no times are in the file, so kernels are not listed: add gpu__time_duration.sum to --metrics")
    for metric, count in sums.given.items():
        if count < sums.launches and not _TENSOR.fullmatch(metric) and not _SCALAR.fullmatch(metric):
            told.append(f"{metric} is given for {count} of {sums.launches} kernels only")
    kernels = _list_spent(sums) if timed is not None else []
    number_format = _number_format(sums)
    peaks, why_none = peaks_of(sums.device_name, number_format)
    notes += [why_none] if why_none else []
    return Profile(
        name=name,
        format="ncu",
        origin=(origin,),
        device=sums.device_name,
        precision=number_format,
        peaks=peaks,
        values=values,
        classes=_classes(kernels),
        kernels=thin(kernels),
        notes=tuple(notes),
        warnings=tuple(told),
    )


def _number_format(sums: _Sums) -> str | None:
    """What the matrix unit multiplied most."""
    flops: dict[str, float] = defaultdict(float)
    for metric, count in sums.metrics.items():
        if _TENSOR.fullmatch(metric) and count:
            flops[metric.removeprefix("sm__ops_path_tensor_src_").removesuffix(".sum").partition("_")[0]] += count
    return max(flops, key=flops.__getitem__) if flops else None


def _list_spent(sums: _Sums) -> list[Spent]:
    return [
        Spent(
            name=name,
            kind=class_of(name),
            seconds=kernel.seconds,
            count=float(kernel.count),
            flops=kernel.flops,
            bytes=kernel.bytes,
        )
        for name, kernel in sums.kernels.items()
    ]


def _classes(kernels: list[Spent]) -> tuple[Spent, ...]:
    def sum_up(kind: KernelClass, rows: list[Spent]) -> Spent:
        flops = [row.flops for row in rows if row.flops is not None]
        moved = [row.bytes for row in rows if row.bytes is not None]
        return Spent(
            name=kind,
            kind=kind,
            seconds=sum(row.seconds for row in rows),
            count=sum(row.count for row in rows),
            flops=sum(flops) if flops else None,
            bytes=sum(moved) if moved else None,
        )

    by_kind = {kind: [row for row in kernels if row.kind == kind] for kind in KERNEL_CLASSES}
    return tuple(sum_up(kind, rows) for kind, rows in by_kind.items() if rows)
