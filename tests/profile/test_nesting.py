"""Calls within calls, against looking at every moment for the innermost one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.profile.explain.nesting import Nesting, nest

Call = tuple[int, int, int]
"""Thread, start, end."""


def _nested(calls: list[Call], marked: set[int]) -> Nesting:
    columns = np.array(calls, np.int64).reshape(-1, 3)
    flags = np.array([row in marked for row in range(len(calls))], np.bool_)
    return nest(columns[:, 0], columns[:, 1], columns[:, 2], flags)


def _segments(found: Nesting) -> set[tuple[int, int, int]]:
    columns = (found.segment_row, found.segment_start_ns, found.segment_end_ns)
    return set(zip(*(column.tolist() for column in columns), strict=True))


def test_a_caller_has_the_time_between_its_calls() -> None:
    found = _nested([(0, 0, 100), (0, 10, 30), (0, 15, 20), (0, 50, 60), (1, 0, 5)], {2})
    assert _segments(found) == {
        (0, 0, 10),
        (0, 30, 50),
        (0, 60, 100),
        (1, 10, 15),
        (1, 20, 30),
        (2, 15, 20),
        (3, 50, 60),
        (4, 0, 5),
    }
    assert found.calls_marked.tolist() == [True, True, False, False, False]
    assert found.worker.tolist() == [-1, -1, 2, -1, -1]


def test_what_a_marked_call_calls_is_part_of_its_work() -> None:
    found = _nested([(0, 0, 100), (0, 10, 30), (0, 15, 20)], {0})
    assert found.worker.tolist() == [0, 0, 0]
    assert not found.calls_marked.any()


def test_a_call_that_outlasts_its_caller_is_cut() -> None:
    assert _segments(_nested([(0, 0, 10), (0, 5, 11), (0, 10, 20)], set())) == {(0, 0, 5), (1, 5, 10), (2, 10, 20)}


@st.composite
def trees(draw: st.DrawFn) -> list[Call]:
    """Calls on two threads that lie in each other or apart, in any order."""
    calls: list[Call] = []

    def within(thread: int, start: int, end: int) -> None:
        while start < end and len(calls) < 15 and draw(st.booleans()):
            begin = draw(st.integers(start, end))
            finish = draw(st.integers(begin, end))
            calls.append((thread, begin, finish))
            within(thread, begin, finish)
            start = finish + 1

    for thread in range(2):
        within(thread, 0, 40)
    return draw(st.permutations(calls))


@given(trees())
@settings(max_examples=50, deadline=None)
def test_every_moment_belongs_to_the_innermost_call(calls: list[Call]) -> None:
    found = _nested(calls, set())
    owners: dict[tuple[int, int], int] = {}
    for row, start, end in _segments(found):
        for moment in range(start, end):
            place = (calls[row][0], moment)
            assert place not in owners
            owners[place] = row
    for thread in range(2):
        for moment in range(41):
            covering = [end - start for on, start, end in calls if on == thread and start <= moment < end]
            assert ((thread, moment) in owners) == bool(covering)
            if covering:
                _, start, end = calls[owners[thread, moment]]
                assert start <= moment < end
                assert end - start == min(covering)
