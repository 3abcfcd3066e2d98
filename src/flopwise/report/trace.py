"""A simulated step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: a row for each stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from flopwise.profile.read.simulated import MARK
from flopwise.records.program import STREAMS, Task, task_name
from flopwise.records.simulation import MemoryPoint, Simulation

MOST_POINTS = 4000
"""Changes of memory that a trace shows; beyond that only the largest ones of each stretch of the step."""

Event = dict[str, Any]


def trace_text(title: str, events: Iterable[Event], mark: str = "") -> str:
    """Events in Chrome's trace format, one a line; `mark`: what kind of ours it is."""
    encode = msgspec.json.encode
    other = {**({"flopwise": mark} if mark else {}), "title": title}
    lines = ",\n".join(encode(event).decode() for event in events)
    return f'{{"displayTimeUnit": "ms", "otherData": {encode(other).decode()}, "traceEvents": [\n{lines}\n]}}\n'


def row_names(process: int, name: str, streams: Sequence[str]) -> Iterator[Event]:
    """What a process and its rows, one for each stream from 1 on, are called, in the order in which they are given."""
    told = [(0, "process", name, process), *((row, "thread", each, row) for row, each in enumerate(streams, 1))]
    for thread, kind, called, place in told:
        row = {"ph": "M", "pid": process, "tid": thread}
        yield {"name": f"{kind}_name", **row, "args": {"name": called}}
        yield {"name": f"{kind}_sort_index", **row, "args": {"sort_index": place}}


def span(name: str, category: str, start_s: float, end_s: float, *, process: int, row: int) -> Event:
    """Something that lasts."""
    # The end is rounded, not the duration: tasks that follow each other must not overlap by a nanosecond.
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    times = {"ts": microseconds(start_ns), "dur": microseconds(max(0, end_ns - start_ns))}
    return {"name": name, "cat": category, "ph": "X", "pid": process, "tid": row, **times}


def chrome_trace(simulation: Simulation, points: Sequence[MemoryPoint], title: str) -> str:
    """The step in Chrome's trace format; `points` are the memory in use over the step."""
    rows = row_names(1, title, [stream.replace("-", " ") for stream in STREAMS])
    return trace_text(title, [*rows, *_tasks(simulation), *_counters(points)], MARK)


def _tasks(simulation: Simulation) -> Iterator[Event]:
    for task, start, end in zip(simulation.program.tasks, simulation.starts, simulation.ends, strict=True):
        event = span(task_name(task), task.kind, start, end, process=1, row=STREAMS.index(task.stream) + 1)
        yield {**event, "args": _details(task, end - start)}


def _details(task: Task, seconds: float) -> Event:
    """What a click on the task shows; nothing that it does not have."""
    details: Event = {"round": task.round}
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


def _counters(points: Sequence[MemoryPoint]) -> list[Event]:
    places: dict[str, Callable[[MemoryPoint], dict[str, int]]] = {
        "device memory (bytes)": lambda point: point.device,
        "host memory (bytes)": lambda point: point.host,
    }
    events = []
    for name, of_place in places.items():
        before: dict[str, int] | None = None
        for point in _thin(points, of_place):
            now = of_place(point)
            if now and now != before:
                moment = microseconds(round(point.seconds * 1e9))
                events.append({"name": name, "ph": "C", "pid": 1, "ts": moment, "args": now})
                before = now
    return events


def _thin(points: Sequence[MemoryPoint], of_place: Callable[[MemoryPoint], dict[str, int]]) -> Sequence[MemoryPoint]:
    """The first point, the last one, and of every stretch in between the one with the most bytes: the peak is kept."""
    stretch = -(-len(points) // MOST_POINTS)
    if stretch <= 1:
        return points
    most = [
        max(points[first : first + stretch], key=lambda point: sum(of_place(point).values()))
        for first in range(0, len(points), stretch)
    ]
    return [points[0], *most, points[-1]]
