"""Arithmetic of half-open intervals [start, end) in whole nanoseconds, as arrays of starts and ends.

Every result is merged: sorted, apart from each other, none of them empty. Intervals that end where or before they
begin count for nothing. All in O(n log n) without a loop over rows, and so is the thinning of points over time.
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


def join(left: Intervals, right: Intervals) -> Intervals:
    """The time covered by either."""
    return union(np.concatenate([left[0], right[0]]), np.concatenate([left[1], right[1]]))


def clip(starts: Numbers, ends: Numbers, window: tuple[int, int]) -> Intervals:
    """Each interval cut to the window, in the same order; those outside become empty."""
    cut_starts = np.clip(starts, *window)
    return cut_starts, np.maximum(cut_starts, np.clip(ends, *window))


def complement(merged: Intervals, window: tuple[int, int]) -> Intervals:
    """The window's time that a merged set leaves free."""
    starts, ends = clip(*merged, window)
    starts, ends = union(starts, ends)
    free_starts = np.concatenate([np.array([window[0]], np.int64), ends])
    free_ends = np.concatenate([starts, np.array([window[1]], np.int64)])
    real = free_ends > free_starts
    return free_starts[real], free_ends[real]


def charge(starts: Numbers, ends: Numbers, classes: Numbers, count: int) -> Numbers:
    """Nanoseconds of each of `count` classes when time in which several run is the lowest number's alone.

    They add up to the length of the union exactly.
    """
    covered: Intervals = NONE
    sums = np.zeros(count + 1, np.int64)
    for number in range(count):
        chosen = classes == number
        if chosen.any():
            covered = join(covered, union(starts[chosen], ends[chosen]))
        sums[number + 1] = total(covered)
    return np.diff(sums)


def highest_points(time_ns: Numbers, values: NDArray[np.generic], most: int) -> tuple[tuple[float, float], ...]:
    """(seconds since the first, value) of at most so many of the points, by time.

    Kept are the first, the last and the highest of each of `most` - 2 stretches of equally many points.
    """
    assert most > 2
    order = np.argsort(time_ns, kind="stable")
    ordered = values[order].astype(np.float64)
    count = len(order)
    kept: Numbers = np.arange(count)
    if count > most:
        begins = np.linspace(0, count, most - 1).astype(np.int64)[:-1]
        highest = np.repeat(np.maximum.reduceat(ordered, begins), np.diff(begins, append=count))
        peaks = np.flatnonzero(ordered == highest)
        # Of several as high in one stretch, the first.
        kept = np.unique(np.concatenate([[0, count - 1], peaks[np.searchsorted(peaks, begins)]]))
    since_ns = time_ns[order[kept]] - time_ns[order[:1]]
    return tuple(zip((since_ns / 1e9).tolist(), ordered[kept].tolist(), strict=True))
