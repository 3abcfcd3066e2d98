"""`check` on programs by hand, and on random ones against a search through every order that the streams may run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.records.program import OWNERS, STREAMS, Buffer, Kind, Owner, Program, Stream, Task, Use, Value, check
from flopwise.work.parameters import Place

KIND: dict[Stream, Kind] = {"compute": "forward", "copy-in": "load", "copy-out": "store", "host": "optimize"}
PLACES: tuple[Place, ...] = get_args(Place)
MOVED: tuple[Owner, ...] = ("weights", "gradients", "optimizer", "activations", "context")
SIZES = (0, 1, 7, 123, 615, 1 << 20)


def task(
    stream: Stream,
    *after: int,
    reads: Sequence[Use] = (),
    writes: Sequence[Use] = (),
    size: int = 0,
    what: Owner | None = None,
    layer: int | None = None,
) -> Task:
    """A task of which only that matters which is given."""
    return Task(
        kind=KIND[stream],
        stream=stream,
        round=0,
        layer=layer,
        chunk=None,
        what=what,
        level="",
        tokens=0,
        parameters=0,
        bytes=size,
        operators=(),
        reads=tuple(reads),
        writes=tuple(writes),
        after=after,
    )


def program(
    *tasks: Task,
    buffers: Sequence[Buffer] = (),
    at_start: dict[int, Value] | None = None,
    at_end: dict[int, Value] | None = None,
) -> Program:
    return Program(buffers=tuple(buffers), tasks=tasks, at_start=at_start or {}, at_end=at_end or {}, rounds=1)


def needed(tasks: Sequence[Task], new: Task) -> tuple[int, ...]:
    """The tasks of other streams that a new one must wait for: all that use what it reads or writes, without thrift."""
    found = set()
    for index, old in enumerate(tasks):
        written = {use.buffer for use in old.writes}
        used = written | {use.buffer for use in old.reads}
        if used & {use.buffer for use in new.writes} or written & {use.buffer for use in new.reads}:
            found.add(index)
    return tuple(sorted(index for index in found if tasks[index].stream != new.stream))


@st.composite
def right_programs(draw: st.DrawFn, most_tasks: int = 7) -> Program:
    """Random tasks that read what is there and write new values, or the same again, and wait for all they must."""
    buffers = [
        Buffer(draw(st.sampled_from(OWNERS)), place, "home", draw(st.sampled_from(SIZES)), borrowed=draw(st.booleans()))
        for place in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=4))
    ]
    numbers = st.sets(st.sampled_from(range(len(buffers))), max_size=2)
    at_start = {index: Value("weights", index) for index in sorted(draw(numbers))}
    held = dict(at_start)
    tasks: list[Task] = []
    for version in range(1, 1 + draw(st.integers(0, most_tasks))):
        reads = [Use(index, held[index]) for index in sorted(draw(numbers)) if index in held]
        for index in sorted(written := draw(numbers)):
            if index not in held or draw(st.integers(0, 3)):
                held[index] = Value("weights", index, version=version)
        new = task(
            draw(st.sampled_from(STREAMS)),
            reads=reads,
            writes=[Use(index, held[index]) for index in sorted(written)],
            size=draw(st.sampled_from(SIZES)),
            what=draw(st.sampled_from(MOVED)),
        )
        tasks.append(new._replace(after=needed(tasks, new)))
    kept = draw(numbers)
    at_end = {index: value for index, value in held.items() if index in kept}
    return program(*tasks, buffers=buffers, at_start=at_start, at_end=at_end)


def can_go_wrong(tried: Program) -> bool:
    """Whether some order of begins and ends that the streams allow reads a wrong value, or writes what is in use."""
    tasks = tried.tasks
    queues = [[index for index, one in enumerate(tasks) if one.stream == stream] for stream in STREAMS]
    start = (frozenset[int](), frozenset[int](), frozenset(tried.at_start.items()))
    seen, to_try = {start}, [start]
    while to_try:
        ended, running, contents = to_try.pop()
        held = dict(contents)
        if len(ended) == len(tasks) and any(held.get(buffer) != value for buffer, value in tried.at_end.items()):
            return True
        following = [(ended | {index}, running - {index}, contents) for index in running]
        for queue in queues:
            index = next((index for index in queue if index not in ended), None)
            if index is None or index in running or not ended.issuperset(tasks[index].after):
                continue
            others = [tasks[other] for other in running]
            written = {use.buffer for other in others for use in other.writes}
            used = written | {use.buffer for other in others for use in other.reads}
            if any(held.get(use.buffer) != use.value or use.buffer in written for use in tasks[index].reads):
                return True
            if any(use.buffer in used for use in tasks[index].writes):
                return True
            new = held | {use.buffer: use.value for use in tasks[index].writes}
            following.append((ended, running | {index}, frozenset(new.items())))
        to_try += [state for state in following if state not in seen]
        seen.update(following)
    return False


def is_accepted(tried: Program) -> bool:
    try:
        check(tried)
    except FlopwiseError:
        return False
    return True


def with_after(tried: Program, index: int, after: Sequence[int]) -> Program:
    tasks = list(tried.tasks)
    tasks[index] = tasks[index]._replace(after=tuple(after))
    return replace(tried, tasks=tuple(tasks))


HOST, SLOT, ACTIVATIONS, SAVED = range(4)
BUFFERS = (
    Buffer("weights", "host", "home", 100, 0),
    Buffer("weights", "device", "slot", 100, number=0),
    Buffer("activations", "device", "slot", 30, number=0),
    Buffer("activations", "host", "home", 30, 0, 0),
)
OLD, NEW = Value("weights", 0), Value("weights", 0, version=1)
FIRST, SECOND = Value("activations", 0, 0, 0), Value("activations", 0, 0, 1)


def round_trip() -> Program:
    """Weights come into one slot twice, activations leave each time, the host updates the weights in between."""
    host, other_host = Use(HOST, OLD), Use(HOST, NEW)
    slot, other_slot = Use(SLOT, OLD), Use(SLOT, NEW)
    made, other_made = Use(ACTIVATIONS, FIRST), Use(ACTIVATIONS, SECOND)
    return program(
        task("copy-in", reads=[host], writes=[slot]),
        task("compute", 0, reads=[slot], writes=[made]),
        task("copy-out", 1, reads=[made], writes=[Use(SAVED, FIRST)]),
        task("host", 0, reads=[host], writes=[other_host]),
        task("copy-in", 1, 3, reads=[other_host], writes=[other_slot]),
        task("compute", 2, 4, reads=[other_slot], writes=[other_made]),
        task("copy-out", 5, reads=[other_made], writes=[Use(SAVED, SECOND)]),
        buffers=BUFFERS,
        at_start={HOST: OLD},
        at_end={HOST: NEW, SAVED: SECOND},
    )


def test_right_programs_are_accepted() -> None:
    check(program())
    check(round_trip())
    assert not can_go_wrong(round_trip())


ROUND_TRIP_EDGES = [(index, other) for index, one in enumerate(round_trip().tasks) for other in one.after]


@pytest.mark.parametrize(("index", "other"), ROUND_TRIP_EDGES)
def test_no_wait_of_the_round_trip_can_be_dropped(index: int, other: int) -> None:
    whole = round_trip()
    dropped = with_after(whole, index, [one for one in whole.tasks[index].after if one != other])
    assert can_go_wrong(dropped)
    with pytest.raises(FlopwiseError, match=r"task \d \(\w+\) is wrong"):
        check(dropped)


A, B = Use(0, OLD), Use(0, NEW)
ONE = (Buffer("weights", "device", "home", 8, 0),)
WRONG: dict[str, tuple[Program, str]] = {
    "reads what nobody wrote": (
        program(task("compute", reads=[A]), buffers=ONE),
        "reads weights 0 v0 from weights 0, which holds None",
    ),
    "reads what is written later": (
        program(task("compute", reads=[A]), task("compute", writes=[A]), buffers=ONE),
        "task 0 (forward) is wrong\nreads weights 0 v0 from weights 0, which holds None",
    ),
    "reads without waiting for the writer": (
        program(task("copy-in", writes=[A]), task("compute", reads=[A]), buffers=ONE),
        "may read weights 0 v0 before task 0 has written it",
    ),
    "reads another value": (
        program(task("compute", reads=[B]), buffers=ONE, at_start={0: OLD}),
        "reads weights 0 v1 from weights 0, which holds weights 0 v0",
    ),
    "reads what was overwritten": (
        program(task("compute", writes=[B]), task("compute", reads=[A]), buffers=ONE, at_start={0: OLD}),
        "reads weights 0 v0 from weights 0, which holds weights 0 v1",
    ),
    "overwrites what is being read": (
        program(task("compute", reads=[A]), task("copy-in", writes=[B]), buffers=ONE, at_start={0: OLD}),
        "writes weights 0 while task 0 may still use it",
    ),
    "overwrites what is being written": (
        program(task("compute", writes=[A]), task("copy-in", writes=[B]), buffers=ONE),
        "writes weights 0 while task 0 may still use it",
    ),
    "waits for the writer, not for the reader": (
        program(task("copy-in", writes=[A]), task("compute", 0, reads=[A]), task("host", 0, writes=[B]), buffers=ONE),
        "task 2 (optimize) is wrong\nwrites weights 0 while task 1 may still use it",
    ),
    "leaves nothing at the end": (
        program(buffers=ONE, at_end={0: OLD}),
        "the program ends with None in weights 0",
    ),
    "leaves another value at the end": (
        program(task("compute", writes=[B]), buffers=ONE, at_start={0: OLD}, at_end={0: OLD}),
        "the program ends with weights 0 v1 in weights 0",
    ),
    "waits for a later task": (
        program(task("compute", 1), task("copy-in")),
        "waits for task 1, which comes after it",
    ),
    "waits for itself": (
        program(task("compute", 0)),
        "waits for task 0, which comes after it",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_rejected_in_words(name: str) -> None:
    wrong, words = WRONG[name]
    with pytest.raises(FlopwiseError) as caught:
        check(wrong)
    assert words in str(caught.value)


def test_the_layer_of_a_wrong_task_is_named() -> None:
    wrong = program(task("compute", layer=3, reads=[A]), buffers=ONE)
    with pytest.raises(FlopwiseError, match=r"task 0 \(forward of layer 3\) is wrong"):
        check(wrong)


def test_waits_count_through_other_streams() -> None:
    """Task 2 waits for the writer only by way of the host's task."""
    tasks = (task("copy-in", writes=[A]), task("host", 0), task("compute", 1, reads=[A]))
    check(program(*tasks, buffers=ONE))


def test_a_task_may_replace_what_it_reads() -> None:
    check(program(task("compute", reads=[A], writes=[B]), buffers=ONE, at_start={0: OLD}, at_end={0: NEW}))


@given(right_programs())
def test_random_right_programs_are_accepted(right: Program) -> None:
    check(right)
    assert not can_go_wrong(right)


@given(right_programs())
def test_a_dropped_wait_is_caught_whenever_it_matters(right: Program) -> None:
    for index, one in enumerate(right.tasks):
        for other in one.after:
            dropped = with_after(right, index, [kept for kept in one.after if kept != other])
            assert is_accepted(dropped) == (not can_go_wrong(dropped))


@given(right_programs(), st.data())
def test_any_waits_are_judged_as_the_search_through_all_orders_does(right: Program, data: st.DataObject) -> None:
    tried = right
    for index in range(len(right.tasks)):
        waits = st.sets(st.sampled_from(range(index))) if index else st.just(set[int]())
        tried = with_after(tried, index, sorted(data.draw(waits)))
    if data.draw(st.booleans()) and right.buffers:
        tried = replace(tried, at_end={0: Value("weights", 0, version=1)})
    assert is_accepted(tried) == (not can_go_wrong(tried))
