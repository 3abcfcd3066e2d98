"""The simulated step that `flopwise plan --trace` writes: its tasks, and what the device's memory holds meanwhile.

It was played by a clock and not measured: every value is `modelled`, and nothing of it is idle for a reason that only a
device has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.profile.explain.intervals import highest_points, join, total, union
from flopwise.profile.read.opening import TraceFile
from flopwise.records.profile import PLAN_OWNERS, MemoryUse, Profile, Read, TaskTime, known

MARK = "simulated step"
"""What such a trace says of itself, as `flopwise` of its `otherData`."""
MOST_BYTES = 256 * 2**20
MOST_MEMORY_POINTS = 1000
MEMORY = "device memory (bytes)"
COPIES = ("copy in", "copy out")

Event = Mapping[str, Any]


def looks_like(head: bytes) -> bool:
    """Whether it says that it is one."""
    return f'"flopwise":"{MARK}"'.encode() in head[:4096]


def read_source(source: TraceFile, name: str) -> Read:
    """One profile: what was predicted of each task."""
    try:
        found = msgspec.json.decode(source.read(MOST_BYTES))
        events: list[Event] = found["traceEvents"]
        rows = {each["tid"]: each["args"]["name"] for each in events if each.get("name") == "thread_name"}
        tasks = tuple(_tasks(events, rows))
        points = [(_nanoseconds(each["ts"]), each["args"]) for each in events if each.get("name") == MEMORY]
        title = str(found["otherData"]["title"])
        profile = _profile(name, title, tasks, points)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FlopwiseError(
            f"{source.name} is no whole trace of a simulated step",
            why=f"{type(error).__name__}: {error}",
            hint="flopwise plan … --trace step.json writes it again",
        ) from None
    return Read(profiles=(profile,))


def _nanoseconds(microseconds: float) -> int:
    return round(float(microseconds) * 1000)


def _tasks(events: list[Event], rows: Mapping[int, str]) -> Iterator[TaskTime]:
    for event in events:
        if event.get("ph") != "X":
            continue
        start = _nanoseconds(event["ts"])
        yield TaskTime(
            name=str(event["name"]),
            stream=rows[event["tid"]].replace(" ", "-"),
            predicted_start_s=start / 1e9,
            predicted_end_s=(start + _nanoseconds(event["dur"])) / 1e9,
            measured_start_s=None,
            measured_end_s=None,
        )


def _profile(
    name: str, title: str, tasks: tuple[TaskTime, ...], points: list[tuple[int, Mapping[str, int]]]
) -> Profile:
    if not tasks:
        raise ValueError("no task is in it")
    computing = _covered(tasks, ("compute",))
    copying = _covered(tasks, tuple(stream.replace(" ", "-") for stream in COPIES))
    ends = [round((task.predicted_end_s or 0.0) * 1e9) for task in tasks]
    span = max(ends)
    both = total(join(computing, copying))
    fullest = max(points, key=lambda point: sum(point[1].values()))[1] if points else {}
    sums = np.array([sum(held.values()) for _, held in points], dtype=np.float64)
    times = np.array([moment for moment, _ in points], dtype=np.int64)
    seconds = {
        "device_span_s": span,
        "device_busy_s": both,
        "idle_s": span - both,
        "copy_active_s": total(copying),
        "copy_exposed_s": both - total(computing),
    }
    return Profile(
        name=name,
        format="flopwise",
        device=title,
        values=known("modelled", [(each, spent / 1e9) for each, spent in seconds.items()]),
        memory=tuple(
            MemoryUse(owner=PLAN_OWNERS.get(owner, "runtime"), bytes=float(size), name=owner)
            for owner, size in fullest.items()
            if size
        ),
        memory_total_bytes=float(sum(fullest.values())) if fullest else None,
        memory_over_time=highest_points(times, sums, MOST_MEMORY_POINTS) if len(points) else (),
        tasks=tasks,
        notes=("a step as it was simulated: nothing of it has been measured",),
    )


def _covered(tasks: tuple[TaskTime, ...], streams: tuple[str, ...]) -> tuple[Any, Any]:
    some = [task for task in tasks if task.stream in streams]
    starts = np.array([round((task.predicted_start_s or 0.0) * 1e9) for task in some], dtype=np.int64)
    ends = np.array([round((task.predicted_end_s or 0.0) * 1e9) for task in some], dtype=np.int64)
    return union(starts, ends)
