"""Kernels of a step by their time: a trace of one step, summed by class and by name."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_record import append_rows
from flopwise.profile.explain.kernel_classes import class_of

LISTED = 25
"""Kernels that the file names, those with the most time."""
PRINTED = 12
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel or a copy as it ran on the device."""

    name: str
    category: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow:
    """Time of a class of kernels, of one kernel, or of all; shares are of the span from the first to the last."""

    cell: str
    level: str
    """span, gaps, class or kernel."""
    kernel_class: str
    name: str
    count: int
    total_s: float
    mean_us: float
    share_of_span: float


def traced(step: Callable[[], object], device: str) -> list[Event]:
    """What ran on the device during a step; on a CPU its operators, each with its own time alone, one after another."""
    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True) as taken:
        step()
    if not cuda:
        return _operators(taken.key_averages())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        taken.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return device_events(events)


def device_events(events: Iterable[dict[str, Any]]) -> list[Event]:
    """Kernels and copies of a trace, whose times are microseconds."""
    return [
        Event(str(event["name"]), str(event["cat"]), event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6)
        for event in events
        if event.get("ph") == "X" and event.get("cat") in DEVICE_EVENTS
    ]


def _operators(averages: Iterable[Any]) -> list[Event]:
    found, moment = [], 0.0
    for each in averages:
        seconds = each.self_cpu_time_total * 1e-6 / max(1, each.count)
        for _ in range(each.count):
            found.append(Event(each.key, "cpu_op", moment, moment + seconds))
            moment += seconds
    return found


def kernel_rows(cell: str, events: Sequence[Event]) -> list[KernelRow]:
    """The span, the time in which no kernel ran, classes by their time, and the kernels that took the most."""
    if not events:
        return []
    span_s = max(event.end_s for event in events) - min(event.begin_s for event in events)
    computing = [event for event in events if class_of(event.name, category=event.category) != "copy"]
    gaps_s = span_s - covered_s(computing)

    def row(level: str, kernel_class: str, name: str, times: Sequence[float]) -> KernelRow:
        total_s = sum(times)
        return KernelRow(
            cell=cell,
            level=level,
            kernel_class=kernel_class,
            name=name,
            count=len(times),
            total_s=total_s,
            mean_us=total_s / len(times) * 1e6,
            share_of_span=total_s / span_s if span_s else 0.0,
        )

    classes: dict[str, list[float]] = {}
    names: dict[tuple[str, str], list[float]] = {}
    for event in events:
        kind = class_of(event.name, category=event.category)
        classes.setdefault(kind, []).append(event.end_s - event.begin_s)
        names.setdefault((kind, event.name), []).append(event.end_s - event.begin_s)
    by_class = [row("class", kind, kind, times) for kind, times in classes.items()]
    by_name = [row("kernel", kind, name, times) for (kind, name), times in names.items()]
    return [
        row("span", "", "from the first to the last", [span_s]),
        row("gaps", "", "no kernel ran (copies over the link are none)", [gaps_s]),
        *sorted(by_class, key=lambda one: -one.total_s),
        *sorted(by_name, key=lambda one: -one.total_s)[:LISTED],
    ]


def covered_s(events: Sequence[Event]) -> float:
    """Time in which at least one of the events ran."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda one: one.begin_s):
        total += max(0.0, event.end_s - max(event.begin_s, until))
        until = max(until, event.end_s)
    return total


def write_kernels(folder: Path, cell: str, rows: Sequence[KernelRow]) -> Path:
    """`kernels_<cell>.csv`, instead of an earlier one."""
    path = folder / f"kernels_{cell}.csv"
    path.unlink(missing_ok=True)
    append_rows(path, [asdict(row) for row in rows])
    return path


def shown_kernels(rows: Sequence[KernelRow]) -> str:
    """The classes and the first kernels, for people."""
    kernels = [row for row in rows if row.level == "kernel"][:PRINTED]
    lines = [f"{'total s':>9} {'share':>6} {'count':>7} {'mean us':>9}  kernel"]
    for row in [*(row for row in rows if row.level != "kernel"), *kernels]:
        name = row.name if row.level != "kernel" else f"[{row.kernel_class}] {row.name}"
        lines.append(f"{row.total_s:9.4f} {row.share_of_span:6.1%} {row.count:7} {row.mean_us:9.1f}  {name[:84]}")
    return "\n".join(lines)


def profiled(cell: str, step: Callable[[], object], device: str, folder: Path) -> list[KernelRow]:
    """Trace a step, write its kernels into the folder and print them."""
    if device == "cuda":
        torch.cuda.synchronize()
    rows = kernel_rows(cell, traced(step, device))
    path = write_kernels(folder, cell, rows)
    print(f"{cell}: kernels of one step, written to {path}\n{shown_kernels(rows)}", flush=True)
    return rows
