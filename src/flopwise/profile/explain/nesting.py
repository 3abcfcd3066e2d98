"""Calls within calls: which operator called which, and what time each spent by itself."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
_CHUNK_ROWS = 2**18


@dataclass(frozen=True, kw_only=True, slots=True)
class Nesting:
    """Of calls on some threads: their own time, and how known work is spread among callers and called."""

    segment_start_ns: Numbers
    segment_end_ns: Numbers
    segment_row: Numbers
    """Whose own time the segment is: that of the innermost call. On one thread, segments do not overlap."""
    worker: Numbers
    """For every row, the nearest among itself and its callers that is marked; -1: none is."""
    calls_marked: Flags
    """For every row, whether a marked one runs within it."""


def nest(thread: Numbers, start_ns: Numbers, end_ns: Numbers, marked: Flags) -> Nesting:
    """How calls lie in each other; one that outlasts its caller is cut to the caller's end."""
    count = len(start_ns)
    walk = _Walk(count)
    order = np.lexsort((-end_ns, start_ns, thread))
    for begin in range(0, count, _CHUNK_ROWS):
        chunk = order[begin : begin + _CHUNK_ROWS]
        columns = (chunk, thread[chunk], start_ns[chunk], end_ns[chunk], marked[chunk])
        for row, on, start, end, is_marked in zip(*(column.tolist() for column in columns), strict=True):
            walk.enter(row, on, start, end, is_marked)
    walk.leave_all()
    return Nesting(
        segment_start_ns=np.asarray(walk.segment_start),
        segment_end_ns=np.asarray(walk.segment_end),
        segment_row=np.asarray(walk.segment_row),
        worker=walk.worker,
        calls_marked=walk.calls_marked,
    )


class _Walk:
    """Calls that are open at a moment, the outermost first, each as [row, end, since when its time is its own]."""

    def __init__(self, count: int) -> None:
        self.segment_start, self.segment_end, self.segment_row = array("q"), array("q"), array("q")
        self.worker = np.full(count, -1, np.int64)
        self.calls_marked = np.zeros(count, np.bool_)
        self._open: list[list[int]] = []
        self._thread: int | None = None

    def enter(self, row: int, thread: int, start: int, end: int, is_marked: bool) -> None:
        if thread != self._thread:
            self.leave_all()
            self._thread = thread
        calls = self._open
        while calls and start >= calls[-1][1]:
            self._leave()
        worker = -1
        if calls:
            caller = calls[-1]
            end = min(end, caller[1])
            self._own(caller[2], start, caller[0])
            caller[2] = end
            worker = int(self.worker[caller[0]])
            if is_marked:
                for outer in reversed(calls):
                    if self.calls_marked[outer[0]]:
                        break
                    self.calls_marked[outer[0]] = True
        if is_marked or worker >= 0:
            self.worker[row] = row if is_marked else worker
        calls.append([row, end, start])

    def leave_all(self) -> None:
        while self._open:
            self._leave()

    def _leave(self) -> None:
        row, end, own_from = self._open.pop()
        self._own(own_from, end, row)

    def _own(self, start: int, end: int, row: int) -> None:
        if end > start:
            self.segment_start.append(start)
            self.segment_end.append(end)
            self.segment_row.append(row)
