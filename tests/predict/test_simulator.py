"""The simulator against closed forms, and against a plain one in exact fractions that moves from event to event."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.predict.simulate.simulator import (
    HOST_UPDATE,
    LAST_COPIES,
    both_ways_slowdown,
    memory_points,
    play,
    simulate,
)
from flopwise.records.program import STREAMS, Buffer, Owner, Program, Stream, Use, Value
from flopwise.records.simulation import MemoryPoint, Simulation
from flopwise.setup.hardware import Fact, Link
from tests.records.test_program_check import BUFFERS, MOVED, OLD, SIZES, program, right_programs, round_trip, task


def link(rate: float, both_ways: float | None = None) -> Link:
    both = None if both_ways is None else Fact(value=both_ways, source="test")
    return Link(name="pcie", bandwidth_bytes_per_s=Fact(value=rate, source="test"), both_ways_bytes_per_s=both)


LINK = link(100, 50)
"""A direction moves 100 bytes a second alone, 50 while the other one is busy."""


def spans(simulation: Simulation) -> list[tuple[float, float]]:
    return list(zip(simulation.starts, simulation.ends, strict=True))


def exact_spans(
    tried: Program, seconds: Sequence[float], rate: int, both_ways: int
) -> list[tuple[Fraction, Fraction]] | None:
    """Start and end of every task, by moving on to whatever ends next; None where tasks wait in a circle."""
    tasks = tried.tasks
    queues = {stream: [index for index, one in enumerate(tasks) if one.stream == stream] for stream in STREAMS}
    starts: dict[int, Fraction] = {}
    ends: dict[int, Fraction] = {}
    left: dict[Stream, Fraction] = {}
    now = Fraction(0)
    while len(ends) < len(tasks):
        begun = [
            queue[0]
            for stream, queue in queues.items()
            if queue and stream not in left and ends.keys() >= set(tasks[queue[0]].after)
        ]
        for index in begun:
            stream = tasks[index].stream
            starts[index] = now
            left[stream] = Fraction(tasks[index].bytes if stream.startswith("copy") else seconds[index])
        if not left:
            return None
        rates = dict.fromkeys(STREAMS, 1)
        shared = left.get("copy-in", 0) > 0 and left.get("copy-out", 0) > 0
        rates["copy-in"] = rates["copy-out"] = both_ways if shared else rate
        passed = min(work / rates[stream] for stream, work in left.items())
        now += passed
        left = {stream: work - passed * rates[stream] for stream, work in left.items()}
        for stream in [stream for stream, work in left.items() if not work]:
            ends[queues[stream].pop(0)] = now
            del left[stream]
    return [(starts[index], ends[index]) for index in range(len(tasks))]


seconds_of_tasks = st.integers(0, 40).map(lambda eighths: eighths / 8)
rates = st.sampled_from([(100, 100), (100, 50), (90, 70), (7, 1), (100, 120)])
streams = st.lists(st.sampled_from(STREAMS), max_size=25)


@st.composite
def waiting_programs(draw: st.DrawFn, backwards: bool = False) -> Program:
    """Tasks without buffers that wait for any others; for later ones too, which may be a circle, if `backwards`."""
    chosen = draw(streams)
    tasks = []
    for index, stream in enumerate(chosen):
        others = [other for other in range(len(chosen) if backwards else index) if chosen[other] != stream]
        waits = draw(st.sets(st.sampled_from(others), max_size=1 if backwards else 3)) if others else set()
        size = draw(st.sampled_from(SIZES[:5]))
        tasks.append(task(stream, *sorted(waits), size=size, what=draw(st.sampled_from(MOVED))))
    return program(*tasks)


def agrees(tried: Program, seconds: Sequence[float], rate: int, both_ways: int) -> Simulation | None:
    """The simulation, which must be that of the plain simulator: None if that one finds a circle."""
    expected = exact_spans(tried, seconds, rate, both_ways)
    if expected is None:
        with pytest.raises(AssertionError, match="in a circle"):
            simulate(tried, seconds, link(rate, both_ways))
        return None
    found = simulate(tried, seconds, link(rate, both_ways))
    assert found.starts == pytest.approx([float(start) for start, _ in expected], abs=1e-9)
    assert found.ends == pytest.approx([float(end) for _, end in expected], abs=1e-9)
    return found


@given(waiting_programs(), rates, st.data())
def test_random_programs_run_as_the_plain_simulator_says(
    tried: Program, pair: tuple[int, int], data: st.DataObject
) -> None:
    count = len(tried.tasks)
    seconds = data.draw(st.lists(seconds_of_tasks, min_size=count, max_size=count))
    found = agrees(tried, seconds, *pair)
    assert found is not None
    assert found.step_s == max(found.ends, default=0)
    assert found.busy.keys() == set(STREAMS)
    for stream, busy in found.busy.items():
        ran = [end - start for one, (start, end) in zip(tried.tasks, spans(found), strict=True) if one.stream == stream]
        assert busy == pytest.approx(sum(ran))
    assert found.busy["compute"] + sum(found.idle.values()) == pytest.approx(found.step_s, abs=1e-9)
    assert all(gap > 0 for gap in found.idle.values())
    copied = sum(gap for words, gap in found.idle.items() if words != HOST_UPDATE)
    assert found.exposed_copy_s == pytest.approx(copied, abs=1e-9)


@given(waiting_programs(backwards=True), rates)
def test_waits_for_later_tasks_run_or_are_found_to_be_circles(tried: Program, pair: tuple[int, int]) -> None:
    agrees(tried, [1.5] * len(tried.tasks), *pair)


@given(waiting_programs(), seconds_of_tasks)
def test_equal_rates_are_the_same_as_none_for_both_ways(tried: Program, each: float) -> None:
    seconds = [each] * len(tried.tasks)
    assert spans(simulate(tried, seconds, link(90, 90))) == spans(simulate(tried, seconds, link(90)))


def test_an_empty_program_takes_no_time() -> None:
    found = simulate(program(), [], None)
    assert (found.step_s, found.idle, found.exposed_copy_s) == (0, {}, 0)
    assert memory_points(found) == [MemoryPoint(seconds=0, device={}, host={})]


def test_a_copy_alone_takes_its_bytes_at_the_full_rate() -> None:
    found = simulate(program(task("copy-in", size=250)), [99.0], LINK)
    assert spans(found) == [(0, 2.5)]


def test_both_directions_at_once_run_at_the_rate_for_both() -> None:
    found = simulate(program(task("copy-in", size=100), task("copy-out", size=100)), [0, 0], LINK)
    assert spans(found) == [(0, 2), (0, 2)]


def test_the_longer_of_two_copies_goes_on_at_the_full_rate() -> None:
    found = simulate(program(task("copy-in", size=100), task("copy-out", size=300)), [0, 0], LINK)
    assert spans(found) == [(0, 2), (0, 4)]


def test_a_copy_slows_down_where_the_other_direction_starts_in_its_middle() -> None:
    """100 bytes in 1 s alone; 50 of the other 100 in 1 s shared, the rest after it."""
    tasks = (task("copy-in", size=200), task("compute"), task("copy-out", 1, size=50))
    found = simulate(program(*tasks), [0, 1, 0], LINK)
    assert spans(found) == [(0, 2.5), (0, 1), (1, 2)]


def test_a_copy_meets_several_others_one_after_another() -> None:
    """Loads of 50 bytes at 0 and at 3 s and a store of 400: each meeting costs the store half a second."""
    tasks = (
        task("copy-out", size=400),
        task("copy-in", size=50),
        task("compute"),
        task("copy-in", 2, size=50),
    )
    found = simulate(program(*tasks), [0, 0, 3, 0], LINK)
    assert spans(found) == [(0, 5), (0, 1), (0, 3), (3, 4)]


def test_a_copy_of_no_bytes_takes_no_time_and_slows_nobody() -> None:
    tasks = (task("copy-in", size=0), task("copy-out", size=100), task("copy-in", size=0), task("compute", 2))
    found = simulate(program(*tasks), [9, 9, 9, 1], LINK)
    assert spans(found) == [(0, 0), (0, 1), (0, 0), (0, 1)]


def test_a_chain_through_all_streams_adds_up() -> None:
    tasks = (
        task("copy-in", size=100, what="weights"),
        task("compute", 0),
        task("copy-out", 1, size=300, what="gradients"),
        task("host", 2),
        task("copy-in", 3, size=100, what="weights"),
    )
    found = simulate(program(*tasks), [0, 2, 0, 4, 0], LINK)
    assert spans(found) == [(0, 1), (1, 3), (3, 6), (6, 10), (10, 11)]
    assert found.busy == {"compute": 2, "copy-in": 2, "copy-out": 3, "host": 4}
    assert found.idle == {"weights": 1, LAST_COPIES: 8}
    assert found.exposed_copy_s == 9


@pytest.mark.parametrize(
    ("stream", "what", "words"),
    [
        ("copy-in", "weights", "weights"),
        ("copy-in", "gradients", "gradients"),
        ("copy-in", "optimizer", "optimizer state"),
        ("copy-in", "activations", "activations"),
        ("copy-in", "context", "context"),
        ("copy-out", "activations", "room for activations"),
        ("copy-out", "optimizer", "room for optimizer state"),
        ("host", "weights", HOST_UPDATE),
    ],
)
def test_idle_time_is_named_by_what_was_awaited_last(stream: Stream, what: Owner, words: str) -> None:
    """The other stream's task of half a second ends in time and is not to blame."""
    other: Stream = "copy-in" if stream == "host" else "host"
    tasks = (
        task("compute"),
        task(stream, 0, size=200, what=what),
        task(other, size=50, what="context"),
        task("compute", 0, 1, 2),
    )
    found = simulate(program(*tasks), [1, 2, 0.5, 1], LINK)
    assert found.idle == {words: 2}
    assert found.exposed_copy_s == (0 if stream == "host" else 2)
    assert found.step_s == 4


def test_what_is_left_after_the_last_kernel_is_named_by_what_ends_last() -> None:
    copies = program(task("compute"), task("host", 0), task("copy-out", 0, size=300))
    found = simulate(copies, [1, 1, 0], LINK)
    assert (found.idle, found.exposed_copy_s) == ({LAST_COPIES: 3}, 3)
    found = simulate(copies, [1, 5, 0], LINK)
    assert (found.idle, found.exposed_copy_s) == ({HOST_UPDATE: 5}, 0)


def test_copies_behind_kernels_expose_nothing() -> None:
    tasks = (task("copy-in", size=100), task("compute"), task("compute", 0))
    found = simulate(program(*tasks), [0, 3, 1], LINK)
    assert (found.idle, found.exposed_copy_s, found.step_s) == ({}, 0, 4)


def test_a_program_without_copies_needs_no_link() -> None:
    assert simulate(program(task("compute"), task("copy-in", size=0)), [2, 0], None).step_s == 2


def test_copies_without_a_link_are_refused_with_a_hint() -> None:
    with pytest.raises(FlopwiseError, match="link to host memory") as caught:
        simulate(program(task("copy-out", size=1)), [0], None)
    assert caught.value.hint is not None
    assert "[link]" in caught.value.hint


def test_mistakes_of_ours_are_assertions() -> None:
    with pytest.raises(AssertionError, match="1 durations for 0 tasks"):
        simulate(program(), [1.0], None)
    with pytest.raises(AssertionError, match="less than no time"):
        simulate(program(task("compute")), [-1.0], None)
    with pytest.raises(AssertionError, match="in a circle"):
        simulate(program(task("compute", 0)), [1.0], None)
    with pytest.raises(AssertionError, match="in a circle"):
        simulate(program(task("compute"), task("host", 2), task("copy-in", 1, size=5)), [1.0, 1.0, 1.0], LINK)


def test_play_is_the_same_over_plain_lists() -> None:
    assert both_ways_slowdown(LINK) == 2
    assert both_ways_slowdown(None) == both_ways_slowdown(link(5)) == 1
    starts, ends = play([[1], [0], [2], []], [2.0, 1.0, 0.5], [(), (), (1,)], 2.0)
    assert (starts, ends) == ([0, 0, 1], [2.5, 1, 2])


def test_memory_is_in_use_from_the_writers_start_to_the_last_users_end() -> None:
    """The round trip with copies of 1 s (weights) and 0.3 s (activations), kernels of 2 s and an update of 4 s."""
    sizes = {"copy-in": 100, "copy-out": 30, "compute": 0, "host": 0}
    whole = round_trip()
    whole = replace(whole, tasks=tuple(one._replace(bytes=sizes[one.stream]) for one in whole.tasks))
    found = simulate(whole, [0, 2, 0, 4, 0, 2, 0], link(100))
    # In 0-1, forward 1-3, out 3-3.3; update 1-5; in 5-6, forward 6-8, out 8-8.3.
    points = memory_points(found)
    device = [(point.seconds, point.device["weights"], point.device["activations"]) for point in points]
    assert [
        item for item, before in zip(device, [None, *device], strict=False) if not before or item[1:] != before[1:]
    ] == [
        (0, 100, 0),
        (1, 100, 30),
        (3, 0, 30),
        (pytest.approx(3.3), 0, 0),
        (5, 100, 0),
        (6, 100, 30),
        (8, 0, 30),
        (pytest.approx(8.3), 0, 0),
    ]
    # The update writes in place; what was saved first is never read, what is saved at the end stays.
    assert {point.host["weights"] for point in points} == {100}
    assert [point.host["activations"] for point in points if point.seconds in (0, 3, 5, 8)] == [0, 30, 0, 30]
    assert points[-1].host == {"weights": 100, "activations": 30}
    assert found.peak_device_bytes == {"weights": 100, "activations": 30}
    assert found.peak_host_bytes == {"weights": 100, "activations": 30}


def test_a_value_written_in_two_parts_is_in_use_in_between() -> None:
    context = Use(0, Value("context", 0, 0, 0))
    tasks = (task("compute", writes=[context]), task("compute"), task("compute", writes=[context]), task("compute"))
    found = simulate(program(*tasks, buffers=[Buffer("context", "device", "keys", 5, number=0)]), [1, 1, 1, 1], None)
    assert [(point.seconds, point.device) for point in memory_points(found) if not point.device["context"]] == [
        (3, {"context": 0})
    ]


def test_peaks_are_left_out_where_nobody_asks_for_them() -> None:
    found = simulate(program(buffers=BUFFERS, at_start={0: OLD}, at_end={0: OLD}), [], None, peaks=False)
    assert (found.peak_device_bytes, found.peak_host_bytes) == ({}, {})
    whole = simulate(found.program, [], None)
    assert (whole.peak_device_bytes, whole.peak_host_bytes) == ({}, {"weights": 100})


def buffers_in_use(found: Simulation, moment: float) -> set[int]:
    """What the rule says for one moment, buffer by buffer."""
    tried, users = found.program, list(zip(found.program.tasks, spans(found), strict=True))
    in_use = set()
    for buffer in range(len(tried.buffers)):
        spans_of_values: list[tuple[Value, float, float]] = []
        if buffer in tried.at_start:
            spans_of_values.append((tried.at_start[buffer], 0.0, 0.0))
        for one, (start, end) in users:
            for use in [*one.reads, *one.writes]:
                if use.buffer != buffer:
                    continue
                if spans_of_values and spans_of_values[-1][0] == use.value:
                    value, began, ended = spans_of_values[-1]
                    spans_of_values[-1] = (value, began, max(ended, end))
                else:
                    spans_of_values.append((use.value, start, end))
        if spans_of_values and tried.at_end.get(buffer) == spans_of_values[-1][0]:
            value, began, _ = spans_of_values[-1]
            spans_of_values[-1] = (value, began, math.inf)
        if any(began <= moment < ended for _, began, ended in spans_of_values):
            in_use.add(buffer)
    return in_use


@given(right_programs(most_tasks=12), st.data())
def test_memory_in_use_is_what_the_rule_says_at_every_moment(right: Program, data: st.DataObject) -> None:
    count = len(right.tasks)
    seconds = data.draw(st.lists(seconds_of_tasks, min_size=count, max_size=count))
    found = simulate(right, seconds, LINK)
    points = memory_points(found)
    moments = [point.seconds for point in points]
    assert moments == sorted(set(moments))
    assert moments[0] == 0
    borders = sorted({*moments, *found.starts, *found.ends, found.step_s + 1})
    most = {"device": 0, "host": 0}
    for first, second in itertools.pairwise(borders):
        point = next(point for point in reversed(points) if point.seconds <= first)
        in_use = [right.buffers[buffer] for buffer in buffers_in_use(found, (first + second) / 2)]
        for place, by_owner in (("device", point.device), ("host", point.host)):
            here = [buffer for buffer in in_use if buffer.place == place]
            for owner, size in by_owner.items():
                assert size == sum(buffer.bytes for buffer in here if buffer.owner == owner)
            assert sum(by_owner.values()) == sum(buffer.bytes for buffer in here)
            most[place] = max(most[place], sum(by_owner.values()))
    assert sum(found.peak_device_bytes.values()) == most["device"]
    assert sum(found.peak_host_bytes.values()) == most["host"]
    assert all(found.peak_device_bytes.values())
