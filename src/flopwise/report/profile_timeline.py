"""Tasks of our own runs as predicted beside as they ran: tables, and a trace that Perfetto opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flopwise.records.profile import Profile, TaskTime
from flopwise.report.document import Table
from flopwise.report.trace import Event, row_names, span, trace_text
from flopwise.report.words import UNKNOWN, change_words, safe, seconds

MOST_TASKS = 8
"""Tasks that a page lists."""
LONGEST_S = 1e9
"""No step lasts thirty years, and a trace has nanoseconds to count."""
LONGEST_TASK, SHORTEST_TASK = 40, 20
"""Signs of a task's name."""


@dataclass(frozen=True, slots=True)
class Both:
    """Seconds of tasks, as predicted and as measured; None: not known."""

    predicted_s: float | None
    measured_s: float | None

    @property
    def difference_s(self) -> float | None:
        known = self.predicted_s is not None and self.measured_s is not None
        return self.measured_s - self.predicted_s if known else None  # type: ignore[operator]


Span = tuple[float, float]
"""Start and end."""


def predicted_span(task: TaskTime) -> Span | None:
    """As it was predicted; None where that is not known, or cannot be."""
    return _span(task.predicted_start_s, task.predicted_end_s)


def measured_span(task: TaskTime) -> Span | None:
    """As it ran; None where that is not known, or cannot be."""
    return _span(task.measured_start_s, task.measured_end_s)


def _span(start: float | None, end: float | None) -> Span | None:
    if start is None or end is None or not -LONGEST_S < start <= end < LONGEST_S:
        return None
    return start, end


def durations(task: TaskTime) -> Both:
    """How long a task takes."""
    return Both(*(None if span is None else span[1] - span[0] for span in (predicted_span(task), measured_span(task))))


def kind_of(task: TaskTime) -> str:
    """`load weights` of `load weights 3`: the name without layer, chunk and level."""
    words = task.name.split()
    kept = [word for word in words if not word[0].isdigit() and not word.startswith("(")]
    return " ".join(kept) or task.name


def sums(tasks: Sequence[TaskTime], key: Callable[[TaskTime], str]) -> dict[str, tuple[int, Both]]:
    """Number and seconds of the tasks by what `key` calls them; only those that both are known of are added."""
    found: dict[str, tuple[int, Both]] = {}
    for task in tasks:
        both = durations(task)
        if both.predicted_s is None or both.measured_s is None:
            continue
        count, so_far = found.get(key(task), (0, Both(0.0, 0.0)))
        added = Both((so_far.predicted_s or 0.0) + both.predicted_s, (so_far.measured_s or 0.0) + both.measured_s)
        found[key(task)] = (count + 1, added)
    return found


def furthest(tasks: Sequence[TaskTime], most: int = MOST_TASKS) -> list[TaskTime]:
    """The tasks whose time differs most from the predicted one."""
    known = [(abs(difference), task) for task in tasks if (difference := durations(task).difference_s) is not None]
    return [task for _, task in sorted(known, key=lambda pair: -pair[0])[:most]]


def _cells(both: Both) -> list[str]:
    difference = both.difference_s
    change = difference / both.predicted_s if difference is not None and both.predicted_s else None
    return [
        *(UNKNOWN if taken is None else seconds(taken) for taken in (both.predicted_s, both.measured_s)),
        UNKNOWN if difference is None else f"{'−' if difference < 0 else '+'}{seconds(abs(difference))}",
        change_words(change) or UNKNOWN,
    ]


def task_tables(profile: Profile) -> list[Table]:
    """Sums by stream and kind, then the tasks that differ most; nothing where no task is known both ways."""
    by_stream, by_kind = sums(profile.tasks, lambda task: task.stream), sums(profile.tasks, kind_of)
    if not by_kind:
        return []
    ordered = sorted(by_kind.items(), key=lambda pair: -(pair[1][1].measured_s or 0.0))
    found = [*((f"stream {name}", both) for name, both in by_stream.items()), *ordered]
    cells = ("predicted", "measured", "difference", "change")
    return [
        Table(
            title="tasks, as predicted and as they ran",
            columns=("of", "tasks", *cells),
            rows=[[safe(name, LONGEST_TASK), f"{count:,}", *_cells(both)] for name, (count, both) in found],
            left={"of"},
            cut={"of": SHORTEST_TASK},
        ),
        Table(
            title="tasks that differ most",
            columns=("task", "stream", *cells),
            rows=[
                [safe(task.name, LONGEST_TASK), safe(task.stream, 12), *_cells(durations(task))]
                for task in furthest(profile.tasks)
            ],
            left={"task", "stream"},
            cut={"task": SHORTEST_TASK},
        ),
    ]


# -- a trace ---------------------------------------------------------------------------------------------------------

PROCESSES: dict[str, Callable[[TaskTime], Span | None]] = {"predicted": predicted_span, "measured": measured_span}


def profile_trace(profile: Profile) -> str:
    """The step in Chrome's trace format: two processes, predicted and measured, with a row for each stream."""
    return trace_text(safe(profile.name), _events(profile.tasks))


def _events(tasks: Sequence[TaskTime]) -> Iterator[Event]:
    streams = list(dict.fromkeys(task.stream for task in tasks))
    titles = [safe(stream).replace("-", " ") for stream in streams]
    for process, name in enumerate(PROCESSES, 1):
        yield from row_names(process, name, titles)
    for process, times in enumerate(PROCESSES.values(), 1):
        spans = [(task, when) for task in tasks if (when := times(task)) is not None]
        # Each begins at 0, so that the two can be laid above each other.
        begin = min((start for _, (start, _) in spans), default=0.0)
        for task, (start, end) in spans:
            row = streams.index(task.stream) + 1
            yield span(safe(task.name), safe(kind_of(task)), start - begin, end - begin, process=process, row=row)
