"""What a device did and when, as columns from whichever trace, and summed up: busy and idle time, copies and
collectives beside computation, classes, kernels.

Idle time is what is left of the span when everything that ran is taken away, copies and collectives too. A gap is
laid to the host from its beginning until the host handed over what ends it. What then remains of the gap is laid to a
copy or a collective if that is what ran last before the gap and a computation ends it: the computation had been handed
over, and could begin only after it. What still remains has no known cause: the device's own delay between kernels.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flopwise.profile.explain import intervals
from flopwise.records.profile import KERNEL_CLASSES, KernelClass, RanTask, SourcedValue, Spent, ValueSource, known

Numbers = NDArray[np.int64]
UNKNOWN_BYTES = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """One row for everything that ran, in no particular order."""

    names: tuple[str, ...]
    """Every name once; rows point at them."""
    name: Numbers
    kind: Numbers
    """Numbers in `KERNEL_CLASSES`."""
    start_ns: Numbers
    end_ns: Numbers
    stream: Numbers
    bytes: Numbers
    """Moved by a copy or a collective; UNKNOWN_BYTES where it was not said."""
    launch_ns: Numbers
    """When the host handed it over; -1 where it was not said."""

    def __len__(self) -> int:
        return len(self.name)


class ActivityBuilder:
    """Takes rows one by one, at some fifty bytes each."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._columns = {
            name: array("q") for name in ("name", "kind", "start_ns", "end_ns", "stream", "bytes", "launch_ns")
        }

    def __len__(self) -> int:
        return len(self._columns["name"])

    def add(
        self,
        name: str,
        kind: KernelClass,
        start_ns: int,
        end_ns: int,
        *,
        stream: int = 0,
        moved_bytes: int = UNKNOWN_BYTES,
        launch_ns: int = -1,
    ) -> None:
        number = self._numbers.setdefault(name, len(self._numbers))
        row = (number, KERNEL_CLASSES.index(kind), start_ns, max(start_ns, end_ns), stream, moved_bytes, launch_ns)
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)

    def build(self) -> Activity:
        """What was taken so far."""
        columns = {name: np.array(values, dtype=np.int64) for name, values in self._columns.items()}
        return Activity(names=tuple(self._numbers), **columns)


SHOWN_KERNELS = 40
_NS = 1e-9
_COMMUNICATION = KERNEL_CLASSES.index("communication")
_COPY = KERNEL_CLASSES.index("copy")
_MATRIX = tuple(KERNEL_CLASSES.index(name) for name in ("gemm", "attention"))
_MOST_UNKNOWN_IDLE = 0.01
"""Of the idle time, how much may end with something of which nobody knows when it was handed over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Parts of a `Profile`, of one step where the number of steps was given."""

    values: dict[str, SourcedValue]
    classes: tuple[Spent, ...]
    """Those that occur, in the order of `KERNEL_CLASSES`; they add up to `device_busy_s`."""
    kernels: tuple[Spent, ...]
    """The longest first; the last stands for all that are not shown."""


def summarize(
    activity: Activity,
    *,
    window_ns: tuple[int, int] | None = None,
    steps: int | None = None,
    source: ValueSource = "ingested",
) -> Summary:
    """Sum up an activity, or what of it lies within a window, which is then the span."""
    if window_ns is not None:
        activity = within(activity, window_ns)
    busy = intervals.union(activity.start_ns, activity.end_ns)
    span = window_ns or ((int(busy[0][0]), int(busy[1][-1])) if len(busy[0]) else (0, 0))
    share = 1 / (steps or 1)
    charged = intervals.charge(activity.start_ns, activity.end_ns, activity.kind, len(KERNEL_CLASSES))
    values = known(source, _times(activity, busy, charged, span, share))
    values |= known(source, _counts(activity, share))
    values |= known(source, idle_causes(activity, busy, span, share))
    values |= known("modelled", _engines(activity, share))
    return Summary(values=values, classes=_classes(activity, charged, share), kernels=_kernels(activity, share))


def within(activity: Activity, window_ns: tuple[int, int]) -> Activity:
    """The rows that lie in a window, cut at its ends."""
    chosen = (activity.end_ns >= window_ns[0]) & (activity.start_ns <= window_ns[1])
    found = rows(activity, chosen)
    starts, ends = intervals.clip(found.start_ns, found.end_ns, window_ns)
    return replace(found, start_ns=starts, end_ns=ends)


def rows(activity: Activity, chosen: Numbers | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Activity:
    """Some rows of an activity, by a mask or by their numbers."""
    columns = ("name", "kind", "start_ns", "end_ns", "stream", "bytes", "launch_ns")
    return replace(activity, **{column: getattr(activity, column)[chosen] for column in columns})


MOST_DRAWN = 3000
"""Of a step's kernels and copies: the longest."""
_LONGEST_NAME = 60


def timeline_of(activity: Activity, steps: Sequence[tuple[int, int]] = ()) -> tuple[RanTask, ...]:
    """One step as it ran: what the host handed over in the middle one of its steps; without steps all there is."""
    begin, end = steps[len(steps) // 2] if steps else (0, 0)
    chosen = (activity.launch_ns >= begin) & (activity.launch_ns < end)
    kept = rows(activity, chosen) if chosen.any() else activity
    if not len(kept):
        return ()
    taken = kept.end_ns - kept.start_ns
    order = np.sort(np.argsort(-taken, kind="stable")[:MOST_DRAWN])
    some = rows(kept, order)
    first = int(some.start_ns.min())
    lanes = _lanes(kept)
    return tuple(
        RanTask(
            name=some.names[name][:_LONGEST_NAME],
            kind=KERNEL_CLASSES[kind],
            stream={_COMMUNICATION: "network", _COPY: "copy"}.get(kind) or lanes[stream],
            start_s=(start - first) * _NS,
            end_s=(end - first) * _NS,
        )
        for name, kind, stream, start, end in zip(
            *(column.tolist() for column in (some.name, some.kind, some.stream, some.start_ns, some.end_ns)),
            strict=True,
        )
    )


def _lanes(activity: Activity) -> dict[int, str]:
    """Streams of kernels by name, the busiest first."""
    ran = rows(activity, ~np.isin(activity.kind, (_COMMUNICATION, _COPY)))
    streams = np.unique(ran.stream).tolist()
    busy = {stream: int((ran.end_ns - ran.start_ns)[ran.stream == stream].sum()) for stream in streams}
    ordered = sorted(busy, key=lambda stream: -busy[stream])
    return {stream: f"compute {place}" if place > 1 else "compute" for place, stream in enumerate(ordered, 1)}


def thin(found: Sequence[Spent], shown: int = SHOWN_KERNELS) -> tuple[Spent, ...]:
    """The longest first, all beyond the first `shown` as one row."""
    ordered = sorted(found, key=lambda spent: (-spent.seconds, spent.name))
    rest = ordered[shown:]
    if len(rest) < 2:
        return tuple(ordered)
    others = Spent(
        name=f"({len(rest)} others)",
        kind="other",
        seconds=sum(spent.seconds for spent in rest),
        count=sum(spent.count for spent in rest),
    )
    return (*ordered[:shown], others)


def _of(activity: Activity, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> intervals.Intervals:
    return intervals.union(activity.start_ns[chosen], activity.end_ns[chosen])


def _times(
    activity: Activity, busy: intervals.Intervals, charged: Numbers, span: tuple[int, int], share: float
) -> list[tuple[str, float]]:
    """Exposed is what a copy or a collective is charged with, once: with both beside each other, the collective."""
    busy_ns = intervals.total(busy)
    found = [
        ("device_span_s", span[1] - span[0]),
        ("device_busy_s", busy_ns),
        ("idle_s", span[1] - span[0] - busy_ns),
    ]
    for name, number in (("copy", _COPY), ("comm", _COMMUNICATION)):
        chosen = activity.kind == number
        active = _of(activity, chosen)
        found += [
            (f"{name}_active_s", intervals.total(active)),
            (f"{name}_time_s", int((activity.end_ns[chosen] - activity.start_ns[chosen]).sum())),
            (f"{name}_exposed_s", int(charged[number])),
        ]
    return [(name, nanoseconds * _NS * share) for name, nanoseconds in found]


def _counts(activity: Activity, share: float) -> list[tuple[str, float | None]]:
    found: list[tuple[str, float | None]] = [
        ("kernel_count", float((activity.kind != _COPY).sum()) * share),
        ("matrix_count", float(np.isin(activity.kind, _MATRIX).sum()) * share),
    ]
    for name, number in (("copy", _COPY), ("comm", _COMMUNICATION)):
        moved = activity.bytes[activity.kind == number]
        told = moved[moved >= 0].astype(np.float64)
        # Of some alone, a sum would pass for that of all.
        complete = len(told) == len(moved)
        found.append((f"{name}_count", len(moved) * share))
        found.append((f"{name}_bytes", float(told.sum()) * share if complete else None))
        if name == "copy":
            found.append(("copy_packet_bytes", float(told.mean()) if len(told) else None))
    return found


def _engines(activity: Activity, share: float) -> list[tuple[str, float]]:
    """By kernels' names: what they are for is known, not what the units did meanwhile."""
    matrix = np.isin(activity.kind, _MATRIX)
    others = ~matrix & (activity.kind < _COMMUNICATION)
    return [
        ("matrix_active_s", intervals.total(_of(activity, matrix)) * _NS * share),
        ("vector_active_s", intervals.total(_of(activity, others)) * _NS * share),
    ]


def idle_causes(
    activity: Activity, busy: intervals.Intervals, span: tuple[int, int], share: float
) -> list[tuple[str, float | None]]:
    """Idle time by cause, as the module says; None where launches are not known. A gap at the span's end has none."""
    starts, ends = intervals.complement(busy, span)
    if not len(starts) or not len(activity):
        unknown = not len(activity) or not bool((activity.launch_ns >= 0).any())
        return [] if unknown else [("idle_host_s", 0.0), ("idle_copy_s", 0.0), ("idle_communication_s", 0.0)]
    real = activity.end_ns > activity.start_ns
    order = np.lexsort((activity.kind[real], activity.start_ns[real]))
    begun, launches, kinds = (column[real][order] for column in (activity.start_ns, activity.launch_ns, activity.kind))
    following = np.searchsorted(begun, ends, side="left")
    has_next = following < len(begun)
    starts, ends, following = starts[has_next], ends[has_next], following[has_next]
    launched = launches[following]
    lengths = ends - starts
    if lengths[launched < 0].sum() > _MOST_UNKNOWN_IDLE * max(1, int(lengths.sum())):
        return []
    host = np.where(launched < 0, 0, np.clip(launched - starts, 0, lengths))
    ended_order = np.argsort(activity.end_ns[real], kind="stable")
    ended = activity.end_ns[real][ended_order]
    before = np.searchsorted(ended, starts, side="right") - 1
    last_kind = np.where(before >= 0, activity.kind[real][ended_order][before], -1)
    waited = np.where(kinds[following] < _COMMUNICATION, lengths - host, 0)
    scale = _NS * share
    return [
        ("idle_host_s", float(host.sum()) * scale),
        ("idle_copy_s", float(waited[last_kind == _COPY].sum()) * scale),
        ("idle_communication_s", float(waited[last_kind == _COMMUNICATION].sum()) * scale),
    ]


def _classes(activity: Activity, charged: Numbers, share: float) -> tuple[Spent, ...]:
    counts = np.bincount(activity.kind, minlength=len(KERNEL_CLASSES))
    return tuple(
        Spent(name=name, kind=name, seconds=int(charged[number]) * _NS * share, count=int(counts[number]) * share)
        for number, name in enumerate(KERNEL_CLASSES)
        if counts[number]
    )


def _kernels(activity: Activity, share: float) -> tuple[Spent, ...]:
    lengths = (activity.end_ns - activity.start_ns).astype(np.float64)
    seconds = np.bincount(activity.name, weights=lengths, minlength=len(activity.names)) * (_NS * share)
    counts = np.bincount(activity.name, minlength=len(activity.names))
    kinds = np.zeros(len(activity.names), np.int64)
    kinds[activity.name] = activity.kind
    return thin(
        [
            Spent(
                name=activity.names[number],
                kind=KERNEL_CLASSES[kinds[number]],
                seconds=float(seconds[number]),
                count=int(counts[number]) * share,
            )
            for number in np.flatnonzero(counts)
        ]
    )
