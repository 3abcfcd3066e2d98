"""Time, calls and work by operator, from what the host called and, with a GPU, from the kernels that it launched."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flopwise.profile.explain.activity import UNKNOWN_BYTES, Activity, thin
from flopwise.profile.explain.intervals import union
from flopwise.profile.explain.nesting import Flags, Nesting, nest
from flopwise.profile.read.kineto_columns import Numbers, OperatorColumns, Window, kind_numbers
from flopwise.records.profile import KERNEL_CLASSES, Spent

Reals = NDArray[np.float64]
_NS = 1e-9
_MATRIX = tuple(KERNEL_CLASSES.index(name) for name in ("gemm", "attention"))
_OPTIMIZER = KERNEL_CLASSES.index("optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTable:
    """Of one step."""

    operators: tuple[Spent, ...]
    flops: float | None
    """Of all matrix products and attention; None unless every one of them noted its shapes."""
    calls: float = 0.0
    matrix_calls: float = 0.0
    class_calls: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _OperatorCalls:
    """Calls as arrays. Work is with the innermost call that has a formula, not with its callers as well."""

    names: list[str]
    name: Numbers
    kind: Numbers
    """By the call's name, but within an optimizer's step that of the optimizer, unless it is a product."""
    external: Numbers
    flops: Reals
    bytes: Reals
    nesting: Nesting
    """How they lie in each other; marked are those that have the work."""
    inside: Flags
    """Whether it began within the window."""


def _calls(operators: OperatorColumns, window: Window | None) -> _OperatorCalls:
    # Views, no copies, but for the two that are changed.
    start_ns, end_ns = np.asarray(operators.start_ns), np.asarray(operators.end_ns)
    flops, moved = np.array(operators.flops, np.float64), np.array(operators.bytes, np.float64)
    thread = np.asarray(operators.thread)
    names = list(operators.numbers)
    name = np.asarray(operators.name)
    kind = kind_numbers(names)[name] if names else name
    is_matrix = np.isin(kind, _MATRIX)
    # Without shapes nothing has known work; that a product lies within another's call is to be known all the same.
    nesting = nest(thread, start_ns, end_ns, ~np.isnan(flops) if operators.has_work else is_matrix)
    flops[nesting.calls_marked] = np.nan
    moved[nesting.calls_marked] = np.nan
    kind = np.where(_updates(operators, thread, start_ns) & ~is_matrix, _OPTIMIZER, kind)
    inside = np.ones(len(name), np.bool_)
    if window is not None:
        inside = (start_ns >= window[0]) & (start_ns < window[1])
    return _OperatorCalls(
        names=names,
        name=name,
        kind=kind,
        external=np.asarray(operators.external),
        flops=flops,
        bytes=moved,
        nesting=nesting,
        inside=inside,
    )


def _updates(operators: OperatorColumns, thread: Numbers, start_ns: Numbers) -> Flags:
    """Which calls began within an optimizer's step."""
    found = np.zeros(len(thread), np.bool_)
    for number, windows in operators.updates.items():
        starts, ends = union(*np.array(windows, np.int64).T)
        if not len(starts):
            continue
        own = np.flatnonzero(thread == number)
        begun = start_ns[own]
        place = np.searchsorted(starts, begun, side="right") - 1
        found[own] = (place >= 0) & (begun < ends[np.maximum(place, 0)])
    return found


def operators_of_host(
    operators: OperatorColumns, *, window: Window | None, steps: int
) -> tuple[OperatorTable, Activity]:
    """Operators by the time that each spent by itself; and that time as an activity, uncut at the window's ends."""
    calls = _calls(operators, window)
    owner = calls.nesting.segment_row
    chosen = calls.inside[owner]
    owner = owner[chosen]
    start_ns, end_ns = calls.nesting.segment_start_ns[chosen], calls.nesting.segment_end_ns[chosen]
    if window is not None:
        start_ns, end_ns = np.minimum(start_ns, window[1]), np.minimum(end_ns, window[1])
    unknown = np.full(len(owner), -1, np.int64)
    activity = Activity(
        names=tuple(calls.names),
        name=calls.name[owner],
        kind=calls.kind[owner],
        start_ns=start_ns,
        end_ns=end_ns,
        stream=np.zeros(len(owner), np.int64),
        bytes=np.full(len(owner), UNKNOWN_BYTES, np.int64),
        launch_ns=unknown,
    )
    seconds = _sums(owner, (end_ns - start_ns).astype(np.float64) * _NS, len(calls.name))
    share = 1 / steps
    is_matrix = calls.inside & np.isin(calls.kind, _MATRIX)
    has_work = calls.nesting.worker >= 0
    complete = bool((has_work | calls.nesting.calls_marked)[is_matrix].all())
    workers = calls.inside & ~np.isnan(calls.flops)
    kinds = np.bincount(calls.kind[calls.inside], minlength=len(KERNEL_CLASSES))
    table = OperatorTable(
        operators=_by_name(calls, calls.inside, seconds, share=share),
        flops=float(calls.flops[workers].sum()) * share if complete and workers.any() else None,
        calls=int(calls.inside.sum()) * share,
        matrix_calls=int((is_matrix & ~calls.nesting.calls_marked & _is_own_worker(calls)).sum()) * share,
        class_calls={name: int(kinds[number]) * share for number, name in enumerate(KERNEL_CLASSES)},
    )
    return table, activity


def _is_own_worker(calls: _OperatorCalls) -> Flags:
    """Calls that are no part of another one's known work."""
    own: Flags = calls.nesting.worker == np.arange(len(calls.nesting.worker))
    return own | (calls.nesting.worker < 0)


def operators_of_device(
    operators: OperatorColumns, activity: Activity, external: Numbers, *, steps: int
) -> OperatorTable:
    """Operators by the device time of the kernels that they launched, which `external` joins with them."""
    if not len(operators):
        return OperatorTable(operators=(), flops=None)
    calls = _calls(operators, None)
    row = _rows_of(external, calls.external)
    worker = np.where(row >= 0, calls.nesting.worker[row], -1)
    row = np.where(worker >= 0, worker, row)
    lengths = (activity.end_ns - activity.start_ns).astype(np.float64)
    linked = row >= 0
    seconds = _sums(row[linked], lengths[linked] * _NS, len(calls.name))
    launching = np.zeros(len(calls.name), np.bool_)
    launching[row[linked]] = True
    share = 1 / steps
    workers = launching & ~np.isnan(calls.flops)
    is_matrix = np.isin(activity.kind, _MATRIX)
    complete = bool(linked[is_matrix].all() and workers[row[is_matrix & linked]].all())
    return OperatorTable(
        operators=_by_name(calls, launching, seconds, share=share),
        flops=float(calls.flops[workers].sum()) * share if complete and is_matrix.any() else None,
    )


def _sums(number: Numbers, values: Reals, count: int) -> Reals:
    """Values added up by number."""
    return np.bincount(number, weights=values, minlength=count).astype(np.float64)


def _rows_of(wanted: Numbers, external: Numbers) -> Numbers:
    """The row of each id, -1 where there is none; of rows with one id the first."""
    order = np.argsort(external, kind="stable")
    ordered = external[order]
    place = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return np.where((ordered[place] == wanted) & (wanted > 0), order[place], -1)


def _by_name(calls: _OperatorCalls, chosen: Flags, seconds: Reals, *, share: float) -> tuple[Spent, ...]:
    """Added up by operator. Work is told where every call of the operator has it."""
    name = calls.name[chosen]
    count = len(calls.names)
    counts = np.bincount(name, minlength=count)
    times = _sums(calls.name, seconds, count)
    flops, moved = (_sums(name, column[chosen], count) for column in (calls.flops, calls.bytes))
    # One name may be called within an optimizer's step and outside it: what it mostly is says its name.
    kinds = kind_numbers(calls.names)

    def told(work: np.float64) -> float | None:
        return None if np.isnan(work) else float(work) * share

    return thin(
        [
            Spent(
                name=calls.names[number],
                kind=KERNEL_CLASSES[kinds[number]],
                seconds=float(times[number]) * share,
                count=int(counts[number]) * share,
                flops=told(flops[number]),
                bytes=told(moved[number]),
            )
            for number in np.flatnonzero(counts)
        ]
    )
