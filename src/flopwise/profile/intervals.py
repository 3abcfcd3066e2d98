"""Arithmetic of half-open intervals [start, end) in whole nanoseconds, as arrays of starts and ends.

Every result is merged: sorted, apart from each other, none of them empty. Intervals that end where or before they
begin count for nothing. All in O(n log n) without a loop over rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Intervals = tuple[Numbers, Numbers]

NONE: Intervals = (np.empty(0, np.int64), np.empty(0, np.int64))


def union(starts: Numbers, ends: Numbers) -> Intervals:
    """The time covered by any of them, merged; intervals that touch become one."""
    real = ends > starts
    starts, ends = starts[real], ends[real]
    if not len(starts):
        return NONE
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.ones(len(starts), dtype=bool)
    np.greater(starts[1:], ends[:-1], out=first[1:])
    last = np.append(first[1:], True)
    return starts[first], ends[last]


def total(merged: Intervals) -> int:
    """Length of a merged set."""
    return int((merged[1] - merged[0]).sum())


def joined(left: Intervals, right: Intervals) -> Intervals:
    """The time covered by either."""
    return union(np.concatenate([left[0], right[0]]), np.concatenate([left[1], right[1]]))


def clipped(starts: Numbers, ends: Numbers, window: tuple[int, int]) -> Intervals:
    """Each interval cut to the window, in the same order; those outside become empty."""
    cut_starts = np.clip(starts, *window)
    return cut_starts, np.maximum(cut_starts, np.clip(ends, *window))


def complement(merged: Intervals, window: tuple[int, int]) -> Intervals:
    """The window's time that a merged set leaves free."""
    starts, ends = clipped(*merged, window)
    starts, ends = union(starts, ends)
    free_starts = np.concatenate([np.array([window[0]], np.int64), ends])
    free_ends = np.concatenate([starts, np.array([window[1]], np.int64)])
    real = free_ends > free_starts
    return free_starts[real], free_ends[real]


def difference(left: Intervals, right: Intervals) -> Intervals:
    """The merged set `left` without the time of the merged set `right`."""
    if not len(left[0]):
        return NONE
    return intersection(left, complement(right, (int(left[0][0]), int(left[1][-1]))))


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """The time covered by both of two merged sets."""
    if not len(left[0]) or not len(right[0]):
        return NONE
    # For every interval of `left`: the run [first, beyond) of intervals of `right` that overlap it.
    first = np.searchsorted(right[1], left[0], side="right")
    beyond = np.searchsorted(right[0], left[1], side="left")
    counts = np.maximum(beyond - first, 0)
    own = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    other = np.arange(len(own)) - before[own] + first[own]
    return np.maximum(left[0][own], right[0][other]), np.minimum(left[1][own], right[1][other])


def intersection_length(left: Intervals, right: Intervals) -> int:
    """How long two merged sets coincide."""
    return total(left) + total(right) - total(joined(left, right))


def difference_length(left: Intervals, right: Intervals) -> int:
    """How long the merged set `left` runs with nothing of the merged set `right` beside it."""
    return total(joined(left, right)) - total(right)


def charged(starts: Numbers, ends: Numbers, classes: Numbers, count: int) -> Numbers:
    """Nanoseconds of each of `count` classes when time in which several run is the lowest number's alone.

    They add up to the length of the union exactly.
    """
    covered: Intervals = NONE
    sums = np.zeros(count + 1, np.int64)
    for number in range(count):
        chosen = classes == number
        if chosen.any():
            covered = joined(covered, union(starts[chosen], ends[chosen]))
        sums[number + 1] = total(covered)
    return np.diff(sums)
