"""Traces of the PyTorch profiler (Kineto's Chrome JSON) → one profile for every device in them.

With a GPU in the trace, a profile is of that GPU: its kernels, copies and collectives, launched in whole steps where
the trace has them. Without one, it is of the host as the device: every moment belongs to the innermost operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.profile.explain.activity import Activity, rows, summarize, thin, timeline_of
from flopwise.profile.explain.intervals import highest_points
from flopwise.profile.read.json_events import EventStream
from flopwise.profile.read.kineto_columns import Columns, MemoryColumns, Window
from flopwise.profile.read.kineto_devices import named_device, number_format_of, peaks_of
from flopwise.profile.read.kineto_operators import OperatorTable, operators_of_device, operators_of_host
from flopwise.profile.read.opening import TraceFile
from flopwise.records.profile import KernelClass, MemoryUse, Peaks, Profile, Read, SourcedValue, Spent, known

_SIGNS = re.compile(rb'"traceEvents"\s*:|\{\s*"(?:ph|cat)"\s*:\s*"|"ph"\s*:\s*"[A-Za-z]"')
_SYSTEM_KEYS = {
    "schemaVersion": "trace schema",
    "host_name": "host",
    "cuda_runtime_version": "CUDA runtime",
    "cuda_driver_version": "CUDA driver",
    "hip_runtime_version": "HIP runtime",
    "hip_driver_version": "HIP driver",
}
MOST_MEMORY_POINTS = 1000
_LONGEST_TEXT = 200
_SPREAD = ("step_wall_s", "device_busy_s", "idle_s", "comm_active_s")
_Kind = TypeVar("_Kind")


def looks_like(head: bytes) -> bool:
    """Whether a file that begins so may be a trace; `read_source` has the last word."""
    text = head.lstrip()
    if not text.startswith((b"{", b"[")):
        return False
    return _SIGNS.search(text) is not None or (b'"deviceProperties"' in text and b'"schemaVersion"' in text)


def read_source(source: TraceFile, name: str) -> Read:
    """The profiles of a trace, one for every GPU in it, or that of the host."""
    stream = EventStream(source)
    columns = Columns()
    columns.gather(stream)
    metadata = stream.metadata
    if columns.devices:
        numbers = sorted(columns.devices)
        found = [
            _device_profile(columns, metadata, number, name if len(numbers) == 1 else f"{name} GPU {number}")
            for number in numbers
        ]
    elif len(columns.operators):
        found = [_host_profile(columns, name, alone=(_where(metadata)["world"] or 1) == 1)]
    else:
        raise _nothing_in(source.name, columns, stream)
    warnings = tuple(stream.warnings)
    common = {"origin": (source.name,), "warnings": warnings, **_where(metadata)}
    return Read(profiles=tuple(replace(profile, **common) for profile in found))


def ranks_together(profiles: Sequence[Profile]) -> Profile:
    """Several ranks of one run as one profile: that of a typical rank.

    Values are the mean over the ranks, for those that every rank has: they are of one device, as everywhere. Classes,
    kernels and operators are means too, over all ranks, by name. Memory is that of the fullest rank. How far the ranks
    are apart stands in the notes.
    """
    assert profiles
    first = profiles[0]
    shared = [name for name in first.values if all(name in profile.values for profile in profiles)]
    means = {
        name: SourcedValue(fmean(profile.values[name].value for profile in profiles), first.values[name].source)
        for name in shared
    }
    spreads = [_spread(name, profiles) for name in _SPREAD if name in means]
    fullest = max(profiles, key=lambda profile: profile.memory_total_bytes or 0.0)
    worlds = [profile.world for profile in profiles if profile.world is not None]
    return replace(
        fullest,
        name=f"{len(profiles)} ranks",
        origin=_distinct(name for profile in profiles for name in profile.origin),
        device=_common(profile.device for profile in profiles),
        rank=None,
        world=max(worlds, default=len(profiles)),
        precision=_common(profile.precision for profile in profiles),
        steps=_common(profile.steps for profile in profiles),
        peaks=_common(profile.peaks for profile in profiles),
        values=means,
        classes=_mean_spent([profile.classes for profile in profiles]),
        kernels=thin(_mean_spent([profile.kernels for profile in profiles])),
        operators=thin(_mean_spent([profile.operators for profile in profiles])),
        notes=(*spreads, *_distinct(note for profile in profiles for note in profile.notes)),
        warnings=_distinct(warning for profile in profiles for warning in profile.warnings),
    )


def _spread(name: str, profiles: Sequence[Profile]) -> str:
    ordered = sorted((profile.values[name].value, profile.name) for profile in profiles)
    (least, at_least), (most, at_most) = ordered[0], ordered[-1]
    return f"{name} from {least:.4g} s ({at_least}) to {most:.4g} s ({at_most})"


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _common(values: Iterable[_Kind | None]) -> _Kind | None:
    """What all agree on; None where they do not."""
    found = list(values)
    return found[0] if all(value == found[0] for value in found) else None


def _mean_spent(tables: Sequence[tuple[Spent, ...]]) -> tuple[Spent, ...]:
    together: dict[tuple[str, KernelClass], list[Spent]] = {}
    for spent in (spent for table in tables for spent in table):
        together.setdefault((spent.name, spent.kind), []).append(spent)
    return tuple(
        Spent(
            name=name,
            kind=kind,
            seconds=sum(spent.seconds for spent in found) / len(tables),
            count=sum(spent.count for spent in found) / len(tables),
            flops=_mean_work([spent.flops for spent in found], len(tables)),
            bytes=_mean_work([spent.bytes for spent in found], len(tables)),
        )
        for (name, kind), found in together.items()
    )


def _mean_work(values: list[float | None], count: int) -> float | None:
    told = [value for value in values if value is not None]
    return sum(told) / count if len(told) == len(values) else None


def _nothing_in(name: str, columns: Columns, stream: EventStream) -> FlopwiseError:
    if columns.events:
        return FlopwiseError(
            f"{name} is a Chrome trace, but not one of the PyTorch profiler",
            why=f"of its {columns.events} events none is a kernel, a copy or an operator",
            hint="`torch.profiler.profile(…)` and its `export_chrome_trace` write one",
        )
    return FlopwiseError(
        f"{name} is a trace without events",
        why="; ".join(stream.warnings) or None,
        hint="profile at least one step, and let the profiler end before the program does",
    )


def _where(metadata: dict[str, Any]) -> dict[str, Any]:
    """Rank, world and versions."""
    spread = metadata.get("distributedInfo")
    spread = spread if isinstance(spread, dict) else {}
    system = {words: _text(metadata[key]) for key, words in _SYSTEM_KEYS.items() if key in metadata}
    if "backend" in spread:
        system["communication"] = _text(spread["backend"])
    return {"rank": _count(spread.get("rank")), "world": _count(spread.get("world_size")), "system": system}


def _text(value: object) -> str:
    return str(value)[:_LONGEST_TEXT] if isinstance(value, str | float) or _count(value) is not None else "…"


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _steps(found: dict[int, Window]) -> tuple[list[Window], Window | None]:
    """Whole steps, and the time from the first one's beginning to the last one's end."""
    steps = sorted(window for window in found.values() if window[1] > window[0])
    return steps, (steps[0][0], max(end for _, end in steps)) if steps else None


def _wall(steps: list[Window], span_s: float | None) -> tuple[dict[str, SourcedValue], list[str]]:
    """A step as the host sees it, where the host waits for the device; else a note."""
    if not steps:
        return {}, []
    seconds = (steps[-1][1] - steps[0][0]) * 1e-9 / len(steps)
    if span_s is not None and seconds < span_s:
        return {}, ["the host was through with its steps before the device was: their marks are no step's wall time"]
    return known("ingested", [("step_wall_s", seconds)]), []


def _device_profile(columns: Columns, metadata: dict[str, Any], number: int, name: str) -> Profile:
    activity, external = columns.activity(number)
    steps, window = _steps(columns.host_steps or columns.device_steps)
    chosen = np.ones(len(activity), np.bool_) if window is None else _in_steps(activity, columns, window)
    notes: list[str] = []
    if not chosen.any():
        notes.append("nothing on the device belongs to the marked steps, so the whole trace is summed up")
        steps, window = [], None
        chosen[:] = True
    elif not steps:
        notes.append("no steps are marked in the trace (`profiler.step()`), so the whole of it is summed up")
    kept = rows(activity, chosen)
    summary = summarize(kept, steps=len(steps) or None)
    wall, said = _wall(steps, summary.values["device_span_s"].value if "device_span_s" in summary.values else None)
    notes += said
    table = operators_of_device(columns.operators, kept, external[chosen], steps=len(steps) or 1)
    device = named_device(metadata, number)
    number_format = number_format_of(kept, columns.operators.formats)
    peaks, why_none = peaks_of(device.name, number_format)
    notes += [why_none] if why_none else []
    return Profile(
        name=name,
        format="kineto",
        device=device.name,
        precision=number_format,
        steps=len(steps) or None,
        peaks=peaks,
        values=summary.values | wall | _flops(table, peaks, summary.values.get("device_span_s")),
        classes=summary.classes,
        kernels=summary.kernels,
        operators=table.operators,
        memory_capacity_bytes=device.memory_bytes,
        timeline=timeline_of(kept, steps),
        notes=tuple(notes),
        **_memory(columns.memory.get((True, number))),
    )


def _in_steps(activity: Activity, columns: Columns, window: Window) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """What the host launched within its steps; of what nobody knows the launch, what ran within the device's steps."""
    launched = (activity.launch_ns >= window[0]) & (activity.launch_ns <= window[1])
    _, on_device = _steps(columns.device_steps)
    begin, end = on_device or window
    ran = (activity.start_ns >= begin) & (activity.end_ns <= end)
    return np.where(activity.launch_ns >= 0, launched, ran)


def _host_profile(columns: Columns, name: str, *, alone: bool) -> Profile:
    steps, window = _steps(columns.host_steps)
    table, activity = operators_of_host(columns.operators, window=window, steps=len(steps) or 1)
    notes = ["no GPU in the trace: the device is the host's processor, busy while an operator runs"]
    if not len(activity):
        notes.append("no operator ran within the marked steps, so the whole trace is summed up")
        steps, window = [], None
        table, activity = operators_of_host(columns.operators, window=None, steps=1)
    summary = summarize(activity, window_ns=window, steps=len(steps) or None)
    values = {key: value for key, value in summary.values.items() if not key.startswith("copy_")}
    # With neither a GPU nor other ranks, only the program itself can be what operators wait for.
    idle_s = values["idle_s"].value if "idle_s" in values and alone else None
    counted = [("kernel_count", table.calls), ("matrix_count", table.matrix_calls), ("idle_host_s", idle_s)]
    values |= known("ingested", counted)
    if len(columns.operators.threads) > 1:
        notes.append(f"operators ran on {len(columns.operators.threads)} threads; busy is any of them")
    classes = tuple(replace(spent, count=table.class_calls.get(spent.kind, 0.0)) for spent in summary.classes)
    host_memory = [columns.memory[key] for key in sorted(columns.memory) if not key[0]]
    if host_memory:
        notes.append("memory counts from the profiler's start on: what was there before is not in it")
    return Profile(
        name=name,
        format="kineto",
        precision=max(columns.operators.formats, key=columns.operators.formats.__getitem__, default=None) or None,
        steps=len(steps) or None,
        values=values | _wall(steps, None)[0] | _flops(table, None, None),
        classes=classes,
        operators=table.operators,
        notes=tuple(notes),
        **_memory(host_memory[0] if host_memory else None),
    )


def _flops(table: OperatorTable, peaks: Peaks | None, span: SourcedValue | None) -> dict[str, SourcedValue]:
    hfu = None
    if table.flops is not None and peaks is not None and span is not None and span.value > 0:
        hfu = table.flops / (span.value * peaks.flops)
    return known("modelled", [("hardware_flops", table.flops), ("hfu", hfu)])


def _memory(columns: MemoryColumns | None) -> dict[str, Any]:
    """The allocator's bytes over time, thinned to the highest of each stretch; at most in use, at most reserved."""
    if columns is None:
        return {}
    time_ns, allocated = np.asarray(columns.time_ns), np.asarray(columns.allocated)
    peak, reserved = float(allocated.max()), float(max(columns.reserved))
    uses: tuple[MemoryUse, ...] = ()
    if reserved >= peak > 0:
        uses = (
            MemoryUse(owner="other", bytes=peak, name="allocated, at most"),
            MemoryUse(owner="fragmentation", bytes=reserved - peak, name="reserved beyond it"),
        )
    return {
        "memory": uses,
        "memory_total_bytes": max(reserved, peak),
        "memory_over_time": highest_points(time_ns, allocated, MOST_MEMORY_POINTS),
    }
