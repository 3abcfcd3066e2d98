"""A training while it goes on, on stderr: a row that is renewed in place on a terminal, else a row now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from flopwise.cli.output import progress_bar, say, width
from flopwise.records.measurement import RunRecord, StepRecord
from flopwise.report.tables import wrap_parts
from flopwise.report.training import StepTable, evaluation_words, step_table
from flopwise.report.words import clock_words, rate_words, seconds_words, size_words
from flopwise.train.events import Callback, Started

FIRST_ROWS = 3
"""Steps of which each has a row, before rows come now and then."""
ROW_EVERY_S = 5.0
ROW_EVERY_SHARE = 0.05
"""Of all steps. The rarer of the two counts: a log is for reading."""
REFRESHES_PER_S = 4


@contextmanager
def watching() -> Iterator[Callback]:
    """A callback that shows a training to whoever looks at stderr."""
    if not sys.stderr.isatty():
        yield PlainTraining()
        return
    live = LiveTraining(Console(stderr=True, highlight=False, markup=False, emoji=False))
    try:
        yield live
    finally:
        live.close()


def start_lines(started: Started, width: int) -> list[str]:
    """What is run and where, what was checked, what is expected."""
    expected = started.expected
    count, batch, sequence = expected.devices or 1, expected.batch_sequences or 0, expected.sequence_tokens or 0
    devices = f"{count} × " if count > 1 else ""
    lines = wrap_parts(
        [
            f"run {started.run}",
            expected.model or "",
            f"{devices}{started.hardware}",
            f"sequence {sequence:,}",
            f"batch {batch:,} = {batch * sequence:,} tokens",
            f"{started.training.steps:,} steps",
        ],
        width,
    )
    if started.checks:
        marked = [f"✓ {check}" for check in started.checks]
        lines += wrap_parts([f"checks   {marked[0]}", *marked[1:]], width, separator="   ", indent=9)
    planned = {
        "step": expected.step_s and seconds_words(expected.step_s),
        "speed": expected.tokens_per_s and f"{rate_words(expected.tokens_per_s)} tok/s",
        "device": expected.device_total and size_words(expected.device_total),
        "host": expected.host_total and size_words(expected.host_total),
    }
    known = [f"{name} {words}" for name, words in planned.items() if words]
    if known:
        lines += wrap_parts([f"planned  {known[0]}", *known[1:]], width, indent=9)
    if started.first_step:
        lines.append(f"goes on after step {started.first_step:,}")
    return lines


class _ShownTraining(Callback):
    """What both ways of showing have in common; `say` brings a line to stderr."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.table: StepTable | None = None

    def say(self, line: str) -> None:
        raise NotImplementedError

    def columns(self) -> int:
        raise NotImplementedError

    def on_start(self, started: Started) -> None:
        self.started = started
        for line in start_lines(started, self.columns()):
            self.say(line)
        for note in started.notes:
            self.on_note(note)

    def table_for(self, first: StepRecord) -> StepTable:
        """The table of this run, made for its first step."""
        assert self.started is not None
        if self.table is None:
            self.table = step_table(
                first,
                steps=self.started.training.steps,
                width=self.columns(),
                device_bytes=self.started.expected.device_total,
                host_bytes=self.started.expected.host_total,
            )
        return self.table

    def on_checkpoint(self, checkpoint: Path) -> None:
        self.say(f"saved {checkpoint}")

    def on_note(self, note: str) -> None:
        self.say(f"note: {note}")


class PlainTraining(_ShownTraining):
    """For a file or a pipe: a header, the first rows, and then a row now and then."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock = clock
        self.rows = 0
        self.row_step = 0
        self.row_s = 0.0

    def columns(self) -> int:
        return width()

    def say(self, line: str) -> None:
        # A reader that has left is no reason to end a training.
        with suppress(OSError):
            say(line)

    def on_step(self, record: StepRecord) -> None:
        table = self.table_for(record)
        if self.rows == 0:
            self.say(table.header())
        if self._is_due(record):
            self.say(table.row(record))
            self.rows, self.row_step, self.row_s = self.rows + 1, record.step, self.clock()
        if record.evaluation:
            self.say(evaluation_words(record.step, record.evaluation))

    def _is_due(self, record: StepRecord) -> bool:
        assert self.started is not None
        steps = self.started.training.steps
        if self.rows < FIRST_ROWS or record.step == steps:
            return True
        apart = record.step - self.row_step >= ROW_EVERY_SHARE * steps
        return apart and self.clock() - self.row_s >= ROW_EVERY_S


class LiveTraining(_ShownTraining):
    """For a terminal: the last step below the header, and a bar with the time that is left."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.console, self.clock = console, clock
        self.last: StepRecord | None = None
        self.first_s = 0.0
        self.bar = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,}/{task.total:,}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            expand=True,
        )
        self.live: Live | None = None
        self.before = ExitStack()
        self.tell: Callable[[str, int, int], None] | None = None

    def columns(self) -> int:
        return self.console.width

    def say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)

    def on_progress(self, what: str, done: int, of: int) -> None:
        if self.tell is None and self.started is None:
            self.tell = self.before.enter_context(progress_bar(what))
        if self.tell is not None:
            self.tell(what, done, of)

    def on_start(self, started: Started) -> None:
        self.before.close()
        self.tell = None
        super().on_start(started)
        self.bar.add_task("", total=started.training.steps, completed=started.first_step, left="")
        self.live = Live(get_renderable=self._page, console=self.console, refresh_per_second=REFRESHES_PER_S)
        self.live.start()

    def on_step(self, record: StepRecord) -> None:
        assert self.started is not None
        self.table_for(record)
        now_s = self.clock()
        if self.last is None:
            # The first step also compiles and warms up: it says nothing of those that are left.
            self.first_s, left = now_s, ""
        else:
            since = record.step - self.started.first_step - 1
            rest = self.started.training.steps - record.step
            left = f"{clock_words(rest * (now_s - self.first_s) / max(1, since))} left"
        self.last = record
        self.bar.update(self.bar.task_ids[0], completed=record.step, left=left)
        if record.evaluation:
            self.say(evaluation_words(record.step, record.evaluation))

    def on_end(self, record: RunRecord) -> None:
        del record
        self.close()

    def close(self) -> None:
        """Leave the last step on the terminal, and the terminal as it was."""
        self.before.close()
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _page(self) -> RenderableType:
        rows: list[RenderableType] = []
        if self.table is not None and self.last is not None:
            rows += [_line(self.table.header(), "bold"), _line(self.table.row(self.last))]
        return Group(*rows, self.bar.get_renderable())


def _line(words: str, style: str = "") -> Text:
    return Text(words, style=style, no_wrap=True, overflow="crop")
