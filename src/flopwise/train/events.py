"""What a training tells while it runs."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from flopwise.base.files import append_to
from flopwise.records.measurement import RunRecord, StepRecord
from flopwise.records.outcome import Outcome
from flopwise.setup.training import Training
from flopwise.store.runs import LOG


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """All is checked and in place; the first step begins."""

    folder: Path
    run: str
    """The run's number."""
    hardware: str
    """In words: what it runs on."""
    training: Training
    first_step: int
    """Steps that are done already, by the run that this one resumes; else 0."""
    expected: Outcome
    """The set-up, and what a step of it takes as far as that is known."""
    checks: tuple[str, ...]
    """What was looked at and found in order, a few words each."""
    notes: tuple[str, ...]
    """What a reader should know."""


class Callback:
    """Does nothing; a subclass overrides what it wants to hear of."""

    def on_start(self, started: Started) -> None:
        """Before the first step."""

    def on_progress(self, what: str, done: int, of: int) -> None:
        """While something long is prepared: text that is tokenized."""

    def on_step(self, record: StepRecord) -> Literal["stop"] | None:
        """After every step, `record.evaluation` set where it was evaluated too. "stop" ends the training here, in good
        order: it is saved, and done."""

    def on_checkpoint(self, checkpoint: Path) -> None:
        """After a checkpoint is in place."""

    def on_note(self, note: str) -> None:
        """Something that a person should know now: a signal that was heard, a checkpoint that was passed over."""

    def on_end(self, record: RunRecord) -> None:
        """The run's record is written."""


class Logger(Protocol):
    """Anything with `log`: a run of trackio or wandb."""

    def log(self, data: dict[str, Any]) -> object:
        """Take one step's figures."""


class LogFile(Callback):
    """Writes what happened to a run's `log.txt`, a line each with its time; a full disk does not end the training."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG

    def _write(self, words: str) -> None:
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        with contextlib.suppress(OSError), append_to(self.path) as stream:
            stream.write(f"{now} {words}\n".encode(errors="backslashreplace"))

    def on_start(self, started: Started) -> None:
        after = f" after step {started.first_step}" if started.first_step else ""
        self._write(f"begins{after}: {started.expected.model} on {started.hardware}, {started.training.steps} steps")
        for note in started.notes:
            self._write(note)

    def on_step(self, record: StepRecord) -> None:
        if record.evaluation:
            figures = ", ".join(f"{name} {value:.6g}" for name, value in record.evaluation.items())
            self._write(f"evaluated after step {record.step}: {figures}")

    def on_checkpoint(self, checkpoint: Path) -> None:
        self._write(f"saved {checkpoint.name}")

    def on_note(self, note: str) -> None:
        self._write(note)

    def on_end(self, record: RunRecord) -> None:
        self._write(f"{record.state} after step {record.steps_done}")


class LoggerCallback(Callback):
    """Hands every step on to a logger, unknown figures left out; where it fails that is told once."""

    def __init__(self, logger: Logger, tell: Callable[[str], None]) -> None:
        self.logger, self.tell = logger, tell
        self.failed = False

    def on_step(self, record: StepRecord) -> None:
        if self.failed:
            return
        figures = asdict(record)
        evaluation = figures.pop("evaluation") or {}
        rewards = {f"rewards_{name}": value for name, value in (figures.pop("rewards") or {}).items()}
        routing = {f"routing_{name}": value for name, value in (figures.pop("routing") or {}).items()}
        try:
            self.logger.log(
                {
                    name: value
                    for name, value in {**figures, **rewards, **routing, **evaluation}.items()
                    if value is not None
                }
            )
        except Exception as error:  # whatever a tracker raises, the training is worth more
            self.failed = True
            self.tell(f"a logger failed and is not told any more: {error!r}")
