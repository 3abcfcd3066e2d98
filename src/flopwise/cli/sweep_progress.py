"""A sweep while it goes on, on stderr: one line that is renewed on a terminal, else a line for each attempt."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from flopwise.base.units import AUTO, show_bytes, show_seconds
from flopwise.cli.output import say
from flopwise.report.words import clock_words, printable
from flopwise.store.cells import ENDED, Attempt, Cell
from flopwise.sweep.predicting import Share, alone, attempt_seconds, beside_each_other, cell_seconds
from flopwise.sweep.running import AttemptEnded, CellBegun, CellEnded, CellSkipped, Event, Noticed, SweepEnded

REFRESHES_PER_S = 4
LONGEST_REASON = 120
"""Characters of a reason that a line has; its attempt's file has more."""


@contextmanager
def watching(
    cells: Sequence[Cell], *, steps: int = 1, repeats: int = 1, share: Share = alone
) -> Iterator[Callable[[Event], None]]:
    """A callback for `run_sweep` that shows it to whoever looks at stderr; `cells` are all that it was asked for."""
    left = TimeLeft(cells, repeats, steps=steps, share=share)
    if not sys.stderr.isatty():
        yield PlainProgress(left)
        return
    live = LiveProgress(Console(stderr=True, highlight=False, markup=False, emoji=False), left)
    try:
        yield live
    finally:
        live.close()


LONGEST_NAME = 28


def cell_words(cell: Cell, micro: int | None = None) -> str:
    """`mpt-125m · sequence 2,048 · batch 32`."""
    settings = cell.settings
    name = printable(settings.model_name)
    words = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"]
    words.append(f"sequence {settings.sequence_tokens:,}")
    if settings.devices > 1:
        words.insert(1, f"{settings.devices:,} devices")
    batch = settings.batch_sequences
    words.append(
        f"batch {batch if batch == AUTO else format(batch, ',')}" if micro is None else f"micro-batch {micro:,}"
    )
    if settings.device_memory_bytes is not None:
        words.append(f"cap {show_bytes(settings.device_memory_bytes)}")
    return " · ".join(words)


def words_of_end(event: AttemptEnded) -> str:
    """An attempt and how it ended, in a line."""
    attempt = event.attempt
    looked = attempt.repeat == 0
    words = [f"{attempt.state:<7}", cell_words(event.cell, attempt.micro_batch_sequences)]
    if event.seconds:
        words.append(show_seconds(event.seconds))
    if attempt.state == "ok" and not looked and attempt.run:
        words.append(f"run {attempt.run}")
    if looked:
        words.append("looking for the largest micro-batch")
    if attempt.reason:
        reason = printable(attempt.reason)
        words.append(reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}…")
    return "  ".join(words)


class TimeLeft:
    """What is still to come by the predictions, as far off as those of the attempts that have ended."""

    def __init__(self, cells: Sequence[Cell], repeats: int = 1, *, steps: int = 1, share: Share = alone) -> None:
        self.total = len(cells)
        self.steps = steps
        self.open = {cell.id: cell_seconds(cell, steps=steps, repeats=repeats) for cell in cells}
        self.shares = {cell.id: share(cell.settings) for cell in cells}
        self.predicted_s = 0.0
        self.measured_s = 0.0

    def ended(self, cell: Cell, attempt: Attempt, seconds: float) -> None:
        """Learn from an attempt that was measured, which is one of a cell's less to come."""
        expected = attempt_seconds(cell, steps=self.steps, looking=attempt.repeat == 0)
        if attempt.state == "ok" and attempt.repeat and expected and seconds:
            self.predicted_s += expected
            self.measured_s += seconds
        still = self.open.get(cell.id)
        if still is not None and expected is not None:
            self.open[cell.id] = max(0.0, still - expected)

    def closed(self, cell: str) -> None:
        self.open.pop(cell, None)

    @property
    def done(self) -> int:
        return self.total - len(self.open)

    def seconds(self) -> float | None:
        """None where too little is known: cells without a prediction are taken for average ones."""
        if not self.open:
            return 0.0
        known = [(seconds, self.shares[cell]) for cell, seconds in self.open.items() if seconds is not None]
        if not known:
            return None
        factor = self.measured_s / self.predicted_s if self.predicted_s else 1.0
        return factor * beside_each_other(known) * len(self.open) / len(known)


class _Shown:
    """What both ways of showing have in common; `say` brings a line to stderr."""

    def __init__(self, left: TimeLeft) -> None:
        self.left = left
        self.skipped = 0

    def say(self, line: str) -> None:
        raise NotImplementedError

    def renew(self) -> None:
        """Something that is shown all the time has changed."""

    def begun(self, event: CellBegun) -> None:
        del event

    def __call__(self, event: Event) -> None:
        """Take an event of a sweep."""
        match event:
            case CellBegun():
                self.begun(event)
            case AttemptEnded():
                self.left.ended(event.cell, event.attempt, event.seconds)
                self.say(words_of_end(event))
            case CellEnded():
                self.left.closed(event.cell.id)
            case CellSkipped():
                # One that another machine may still be at is left to it.
                self.skipped += all(attempt.state in ENDED for attempt in event.attempts)
                self.left.closed(event.cell.id)
            case Noticed():
                self.say(f"note: cell {event.cell}: {printable(event.words)}")
            case SweepEnded():
                self.end(event)
        self.renew()

    def end(self, event: SweepEnded) -> None:
        if self.skipped:
            said = "cell was" if self.skipped == 1 else "cells were"
            self.say(f"{self.skipped:,} {said} there already")
        if event.stopped_by:
            self.say(f"stopped by {event.stopped_by} after {self.left.done:,} of {self.left.total:,} cells")


LEAST_ROOM, BESIDE = 16, 52
"""Columns for what runs, and for what stands beside it."""


class PlainProgress(_Shown):
    """For a file or a pipe: a line for each attempt that has ended."""

    def say(self, line: str) -> None:
        # A reader that has left is no reason to end a sweep.
        with suppress(OSError):
            say(line)


class _Words(ProgressColumn):
    """A column whose words are asked for each time that it is drawn."""

    def __init__(self, words: Callable[[], str]) -> None:
        super().__init__()
        self.words = words

    def render(self, task: Task) -> Text:
        del task
        return Text(self.words())


class LiveProgress(_Shown):
    """For a terminal: cells done, what runs, and the time that is left, below the attempts that have ended."""

    def __init__(self, console: Console, left: TimeLeft, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(left)
        self.console, self.clock = console, clock
        self.running: dict[str, str] = {}
        self.bar = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.completed:,}/{task.total:,} cells"),
            _Words(self.words_of_left),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            refresh_per_second=REFRESHES_PER_S,
        )
        self.renewed_s = clock()
        self.task = self.bar.add_task("", total=left.total)
        self.bar.start()

    def say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)

    def begun(self, event: CellBegun) -> None:
        self.running[event.cell.id] = cell_words(event.cell, event.micro_batch_sequences)

    def __call__(self, event: Event) -> None:
        if isinstance(event, AttemptEnded):
            self.running.pop(event.cell.id, None)
        super().__call__(event)

    def renew(self) -> None:
        words = list(self.running.values())
        told = words[0] + (f" and {len(words) - 1} more" if len(words) > 1 else "") if words else ""
        # The bar, the count and the time that is left come first.
        room = max(LEAST_ROOM, self.console.width - BESIDE)
        told = told if len(told) <= room else f"{told[: room - 1]}…"
        self.renewed_s = self.clock()
        self.bar.update(self.task, completed=self.left.done, description=told)

    def words_of_left(self) -> str:
        """The time that is left, which goes by between events too."""
        seconds = self.left.seconds()
        if seconds is None:
            return ""
        return f"{clock_words(max(0.0, seconds - (self.clock() - self.renewed_s)))} left"

    def end(self, event: SweepEnded) -> None:
        self.close()
        super().end(event)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.bar.stop()
