"""Interval arithmetic against counting every nanosecond."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.profile.explain import intervals

Pair = tuple[int, int]
PAIRS = st.lists(st.tuples(st.integers(-20, 30), st.integers(-20, 30)), max_size=12)


def _arrays(pairs: Iterable[Pair]) -> intervals.Intervals:
    listed = list(pairs)
    return np.array([pair[0] for pair in listed], np.int64), np.array([pair[1] for pair in listed], np.int64)


def _moments(pairs: Iterable[Pair]) -> set[int]:
    return {moment for start, end in pairs for moment in range(start, end)}


def _covered(found: intervals.Intervals) -> set[int]:
    return _moments(zip(found[0].tolist(), found[1].tolist(), strict=True))


def _assert_merged(found: intervals.Intervals) -> None:
    starts, ends = found
    assert (ends > starts).all()
    assert (starts[1:] > ends[:-1]).all()


@given(PAIRS, PAIRS)
@settings(max_examples=50, deadline=None)
def test_set_arithmetic(left_pairs: list[Pair], right_pairs: list[Pair]) -> None:
    left, right = intervals.union(*_arrays(left_pairs)), intervals.union(*_arrays(right_pairs))
    left_moments, right_moments = _moments(left_pairs), _moments(right_pairs)
    _assert_merged(left)
    assert _covered(left) == left_moments
    assert intervals.total(left) == len(left_moments)
    both = intervals.join(left, right)
    _assert_merged(both)
    assert _covered(both) == left_moments | right_moments


def test_intervals_that_touch_become_one() -> None:
    starts, ends = intervals.union(*_arrays([(5, 9), (0, 3), (3, 5), (10, 12)]))
    assert (starts.tolist(), ends.tolist()) == ([0, 10], [9, 12])


@given(PAIRS, st.integers(-25, 35), st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_a_window_and_what_is_free_in_it(pairs: list[Pair], begin: int, length: int) -> None:
    window = (begin, begin + length)
    inside = set(range(*window))
    free = intervals.complement(intervals.union(*_arrays(pairs)), window)
    _assert_merged(free)
    assert _covered(free) == inside - _moments(pairs)
    assert _covered(intervals.clip(*_arrays(pairs), window)) == inside & _moments(pairs)


@given(st.lists(st.tuples(st.integers(-20, 30), st.integers(-20, 30), st.integers(0, 3)), max_size=12))
@settings(max_examples=50, deadline=None)
def test_time_is_charged_to_the_lowest_class(rows: list[tuple[int, int, int]]) -> None:
    lowest: dict[int, int] = {}
    for start, end, number in rows:
        for moment in range(start, end):
            lowest[moment] = min(lowest.get(moment, number), number)
    starts, ends = _arrays((start, end) for start, end, _ in rows)
    charged = intervals.charge(starts, ends, np.array([row[2] for row in rows], np.int64), 4)
    assert charged.tolist() == [list(lowest.values()).count(number) for number in range(4)]
    assert int(charged.sum()) == intervals.total(intervals.union(starts, ends))


def test_a_million_rows_in_one_go() -> None:
    chance = np.random.default_rng(0)
    starts = chance.integers(0, 10**12, 10**6)
    ends = starts + chance.integers(0, 10**6, 10**6)
    classes = chance.integers(0, 8, 10**6)
    assert int(intervals.charge(starts, ends, classes, 8).sum()) == intervals.total(intervals.union(starts, ends))


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), min_size=1, max_size=60), st.integers(3, 20))
@settings(max_examples=50, deadline=None)
def test_thinned_points_keep_ends_and_peaks(points: list[Pair], most: int) -> None:
    ordered = sorted(points, key=lambda point: point[0])
    kept = intervals.highest_points(*_arrays(points), most)
    assert len(kept) <= most
    begin = ordered[0][0]
    relative = [((time - begin) / 1e9, float(value)) for time, value in ordered]
    assert (kept[0], kept[-1]) == (relative[0], relative[-1])
    assert len(kept) == len(points) or len(points) > most
    assert set(kept) <= set(relative)
    assert [time for time, _ in kept] == sorted(time for time, _ in kept)
    assert max(value for _, value in kept) == max(value for _, value in relative)


def test_the_highest_of_each_stretch_is_kept() -> None:
    values = np.array([5, 1, 9, 2, 3, 3, 0, 8, 4], np.int64)
    kept = intervals.highest_points(np.arange(9) * 10**9, values, 5)
    assert kept == ((0.0, 5.0), (2.0, 9.0), (4.0, 3.0), (7.0, 8.0), (8.0, 4.0))
