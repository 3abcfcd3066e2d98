"""Traces: valid, in rows that do not overlap, with the durations and the peaks of the simulation."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.predict.simulate.simulator import memory_points, simulate
from flopwise.records.program import STREAMS, Buffer, Kind, Program, Stream, Task, Use, Value, task_name
from flopwise.records.simulation import MemoryPoint, Simulation
from flopwise.report.trace import MOST_POINTS, chrome_trace
from tests.predict.test_simulator import LINK, link
from tests.records.test_program_check import program, right_programs, round_trip, task

ROWS = {"compute": "compute", "copy-in": "copy in", "copy-out": "copy out", "host": "host"}


def events(simulation: Simulation, points: list[MemoryPoint] | None = None) -> list[dict[str, Any]]:
    text = chrome_trace(simulation, memory_points(simulation) if points is None else points, "a step")
    trace = json.loads(text)
    assert trace["displayTimeUnit"] == "ms"
    found = trace["traceEvents"]
    assert isinstance(found, list)
    return found


def nanoseconds(microseconds: float) -> int:
    """As Perfetto reads a number."""
    return int(microseconds * 1000.0)


def layer_task(stream: Stream, kind: Kind, **given: Any) -> Task:
    return task(stream)._replace(kind=kind, **given)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("forward 3.1", layer_task("compute", "forward", layer=3, chunk=1)),
        ("forward 3.1", layer_task("compute", "forward", layer=3, chunk=1, level="attention")),
        ("backward 3.1 (attention)", layer_task("compute", "backward", layer=3, chunk=1, level="attention")),
        ("backward-after 0.0 (input)", layer_task("compute", "backward-after", layer=0, chunk=0, level="input")),
        ("attention-backward 2.0", layer_task("compute", "attention-backward", layer=2, chunk=0)),
        ("load weights 3", layer_task("copy-in", "load", layer=3, what="weights")),
        ("load weights", layer_task("copy-in", "load", what="weights")),
        ("store activations 3.1", layer_task("copy-out", "store", layer=3, chunk=1, what="activations", level="full")),
        ("optimize 3", layer_task("host", "optimize", layer=3, what="optimizer")),
        ("head 0", layer_task("compute", "head", chunk=0)),
        ("embed 1", layer_task("compute", "embed", chunk=1)),
    ],
)
def test_tasks_have_names_that_people_use(name: str, named: Task) -> None:
    assert task_name(named) == name


def test_the_rows_are_the_streams_in_their_order() -> None:
    found = [event for event in events(simulate(round_trip(), [1.0] * 7, LINK)) if event["ph"] == "M"]
    assert {event["pid"] for event in found} == {1}
    assert [event["args"]["name"] for event in found if event["name"] == "process_name"] == ["a step"]
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in found if event["name"] == "thread_sort_index"}
    assert [names[thread] for thread in sorted(order, key=order.__getitem__)] == [ROWS[stream] for stream in STREAMS]


def test_a_copy_tells_what_it_moved_and_how_fast() -> None:
    stored = layer_task("copy-out", "store", layer=3, chunk=1, what="activations", level="full", bytes=5_000_000)
    stored = stored._replace(tokens=64, round=2, writes=(Use(0, Value("activations", 3, 1, 2)),))
    one = simulate(program(stored, buffers=[Buffer("activations", "host", "home", 5_000_000, 3, 1)]), [0.0], link(50e9))
    (event,) = [event for event in events(one) if event["ph"] == "X"]
    assert event["cat"] == "store"
    assert (event["ts"], event["dur"]) == (0, 100)
    assert event["args"] == {
        "round": 2,
        "layer": 3,
        "chunk": 1,
        "level": "full",
        "tokens": 64,
        "bytes": 5_000_000,
        "value": "activations 3.1 r2",
        "GB/s": 50,
    }


def test_a_copy_of_no_bytes_has_no_rate() -> None:
    one = simulate(program(task("copy-in", what="weights")), [0.0], None)
    (event,) = [event for event in events(one) if event["ph"] == "X"]
    assert (event["dur"], event["args"]) == (0, {"round": 0})


@given(right_programs(most_tasks=12), st.data())
def test_a_trace_holds_every_task_where_the_simulation_has_it(right: Program, data: st.DataObject) -> None:
    count = len(right.tasks)
    seconds = data.draw(st.lists(st.floats(0, 3e-3), min_size=count, max_size=count))
    simulation = simulate(right, seconds, link(1e9, 0.7e9))
    points = memory_points(simulation)
    found = events(simulation, points)
    assert chrome_trace(simulation, points, "a step") == chrome_trace(simulation, points, "a step")
    tasks = [event for event in found if event["ph"] == "X"]
    assert len(tasks) == count
    for event, one, start, end in zip(tasks, right.tasks, simulation.starts, simulation.ends, strict=True):
        assert event["tid"] == STREAMS.index(one.stream) + 1
        assert event["ts"] == pytest.approx(start * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx((end - start) * 1e6, abs=2e-3)
    for thread in range(1, 1 + len(STREAMS)):
        row = [event for event in tasks if event["tid"] == thread]
        for first, second in itertools.pairwise(row):
            assert nanoseconds(first["ts"]) + nanoseconds(first["dur"]) <= nanoseconds(second["ts"])
    assert peak(found, "device") == sum(simulation.peak_device_bytes.values())
    assert peak(found, "host") == sum(simulation.peak_host_bytes.values())


def peak(found: list[dict[str, Any]], place: str) -> int:
    counters = [event for event in found if event["ph"] == "C" and event["name"].startswith(place)]
    return max((sum(event["args"].values()) for event in counters), default=0)


def test_many_changes_of_memory_are_thinned_around_the_peak() -> None:
    count = 50_001
    sizes = [(index * 7919) % 10_007 for index in range(count)]
    sizes[31_337] = 20_000
    points = [
        MemoryPoint(seconds=index * 1e-6, device={"weights": 5, "activations": size}, host={"weights": 9})
        for index, size in enumerate(sizes)
    ]
    found = events(simulate(program(), [], None), points)
    device = [event for event in found if event["name"].startswith("device")]
    assert len(device) <= MOST_POINTS + 2
    assert [event["ts"] for event in device] == sorted(event["ts"] for event in device)
    assert [event["ts"] for event in device if sum(event["args"].values()) == 20_005] == [31_337]
    assert device[0]["args"] == {"weights": 5, "activations": 0}
    assert device[-1]["args"] == {"weights": 5, "activations": sizes[-1]}
    # The host's does not change, and is told once.
    assert [event["args"] for event in found if event["name"].startswith("host")] == [{"weights": 9}]


@given(st.integers(0, 10**12))
def test_perfetto_reads_back_every_nanosecond(moment: int) -> None:
    point = MemoryPoint(seconds=moment * 1e-9, device={"weights": 1}, host={})
    (event,) = [event for event in events(simulate(program(), [], None), [point]) if event["ph"] == "C"]
    assert nanoseconds(event["ts"]) == moment
