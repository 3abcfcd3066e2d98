"""A simulated step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: a row for each stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from flopwise.records.program import STREAMS, Task, task_name
from flopwise.records.simulation import MemoryPoint, Simulation

MOST_POINTS = 4000
"""Changes of memory that a trace shows; beyond that only the largest ones of each stretch of the step."""

PROCESS = 1


def chrome_trace(simulation: Simulation, points: Sequence[MemoryPoint], title: str) -> str:
    """The step in Chrome's trace format, one event a line; `points` are the memory in use over the step."""
    events = [*_rows(title), *_tasks(simulation), *_counters(points)]
    encode = msgspec.json.encode
    lines = ",\n".join(encode(event).decode() for event in events)
    return (
        f'{{"displayTimeUnit": "ms", "otherData": {encode({"title": title}).decode()}, "traceEvents": [\n{lines}\n]}}\n'
    )


def _rows(title: str) -> list[dict[str, Any]]:
    named: list[tuple[str, int, dict[str, Any]]] = [("process_name", 0, {"name": title})]
    for number, stream in enumerate(STREAMS, 1):
        named.append(("thread_name", number, {"name": stream.replace("-", " ")}))
        named.append(("thread_sort_index", number, {"sort_index": number}))
    return [{"name": name, "ph": "M", "pid": PROCESS, "tid": thread, "args": given} for name, thread, given in named]


def _tasks(simulation: Simulation) -> list[dict[str, Any]]:
    events = []
    for task, start, end in zip(simulation.program.tasks, simulation.starts, simulation.ends, strict=True):
        # The end is rounded, not the duration: tasks that follow each other must not overlap by a nanosecond.
        start_ns, end_ns = round(start * 1e9), round(end * 1e9)
        events.append(
            {
                "name": task_name(task),
                "cat": task.kind,
                "ph": "X",
                "pid": PROCESS,
                "tid": STREAMS.index(task.stream) + 1,
                "ts": microseconds(start_ns),
                "dur": microseconds(end_ns - start_ns),
                "args": _details(task, end - start),
            }
        )
    return events


def _details(task: Task, seconds: float) -> dict[str, Any]:
    """What a click on the task shows; nothing that it does not have."""
    details: dict[str, Any] = {"round": task.round}
    if task.layer is not None:
        details["layer"] = task.layer
    if task.chunk is not None:
        details["chunk"] = task.chunk
    for name in ("level", "tokens", "parameters", "bytes"):
        if value := getattr(task, name):
            details[name] = value
    if task.stream in {"copy-in", "copy-out"}:
        if task.writes:
            details["value"] = task.writes[0].value.name
        if task.bytes and seconds > 0:
            details["GB/s"] = round(task.bytes / seconds / 1e9, 3)
    return details


def microseconds(nanoseconds: int) -> float:
    """The number that Perfetto reads as just these nanoseconds: it multiplies by 1000 and cuts off the fraction."""
    found = nanoseconds / 1000
    return found if int(found * 1000.0) == nanoseconds else math.nextafter(found, math.inf)


def _counters(points: Sequence[MemoryPoint]) -> list[dict[str, Any]]:
    places: dict[str, Callable[[MemoryPoint], dict[str, int]]] = {
        "device memory (bytes)": lambda point: point.device,
        "host memory (bytes)": lambda point: point.host,
    }
    events = []
    for name, of_place in places.items():
        before: dict[str, int] | None = None
        for point in _thinned(points, of_place):
            now = of_place(point)
            if now and now != before:
                moment = microseconds(round(point.seconds * 1e9))
                events.append({"name": name, "ph": "C", "pid": PROCESS, "ts": moment, "args": now})
                before = now
    return events


def _thinned(points: Sequence[MemoryPoint], of_place: Callable[[MemoryPoint], dict[str, int]]) -> Sequence[MemoryPoint]:
    """The first point, the last one, and of every stretch in between the one with the most bytes: the peak is kept."""
    stretch = -(-len(points) // MOST_POINTS)
    if stretch <= 1:
        return points
    most = [
        max(points[first : first + stretch], key=lambda point: sum(of_place(point).values()))
        for first in range(0, len(points), stretch)
    ]
    return [points[0], *most, points[-1]]
