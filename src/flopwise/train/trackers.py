"""Trackers by name, as `--log` has them: wandb, trackio and tensorboard, each only where it is installed.

Nothing leaves this machine unless its environment says so: wandb stays offline unless WANDB_MODE is set.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.base.files import to_json
from flopwise.records.measurement import StepRecord
from flopwise.train.events import Callback, LoggerCallback, Started

DEFAULT_PROJECT = "flopwise"


class Tracker(Protocol):
    """A tracker's run, open."""

    def log(self, data: dict[str, Any]) -> object:
        """Take one step's figures, `step` among them."""

    def finish(self) -> None:
        """Leave nothing unwritten."""


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """What a tracker is called, what it needs, and how one of its runs is opened."""

    package: str
    opens: Callable[[Path, str, str, dict[str, Any]], Tracker]
    """From the run's folder, the project, the run's name and its configuration."""
    has_projects: bool = True


class _ByStep:
    """Trackers that have a module with `init`, `log` and `finish`."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - whatever was installed
        self.module = module

    def log(self, data: dict[str, Any]) -> object:
        figures = dict(data)
        return self.module.log(figures, step=figures.pop("step"))

    def finish(self) -> None:
        self.module.finish()


class _Board:
    """TensorBoard's event files, by torch's own writer."""

    def __init__(self, folder: Path, configuration: dict[str, Any]) -> None:
        self.writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("configuration", f"```json\n{to_json(configuration)}\n```")

    def log(self, data: dict[str, Any]) -> object:
        for name, value in data.items():
            if name != "step":
                self.writer.add_scalar(name, value, data["step"])
        return None

    def finish(self) -> None:
        self.writer.close()


def _open_wandb(folder: Path, project: str, name: str, configuration: dict[str, Any]) -> Tracker:
    module = import_module("wandb")
    module.init(
        project=project,
        name=name,
        config=configuration,
        dir=str(folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        # One that is resumed goes on with the same.
        id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12],
        resume="allow",
    )
    return _ByStep(module)


def _open_trackio(_folder: Path, project: str, name: str, configuration: dict[str, Any]) -> Tracker:
    module = import_module("trackio")
    module.init(project=project, name=name, config=configuration, resume="allow")
    return _ByStep(module)


def _open_tensorboard(folder: Path, _project: str, _name: str, configuration: dict[str, Any]) -> Tracker:
    return _Board(folder, configuration)


TRACKERS = {
    "wandb": TrackerKind("wandb", _open_wandb),
    "trackio": TrackerKind("trackio", _open_trackio),
    "tensorboard": TrackerKind("tensorboard", _open_tensorboard, has_projects=False),
}


def check_trackers(named: tuple[str, ...]) -> None:
    """Refuse trackers that are not known or not installed, before anything is trained; no torch."""
    for words in named:
        name, colon, project = words.partition(":")
        if name not in TRACKERS:
            raise unknown_name("tracker", name, TRACKERS, hint=f"--log {' | '.join(TRACKERS)}")
        kind = TRACKERS[name]
        if colon and not (kind.has_projects and project.strip()):
            why = "the project has no name" if kind.has_projects else f"{name} has no projects: it writes into the run"
            raise FlopwiseError(f"cannot read --log {words}", why=why, hint=f"--log {name}")
        if find_spec(kind.package) is None:
            raise FlopwiseError(
                f"--log {name}: {kind.package} is not installed", hint=f"pip install {kind.package}, or without --log"
            )
    names = [words.partition(":")[0] for words in named]
    if len(set(names)) < len(names):
        raise FlopwiseError("a tracker is named twice", why="it would be told everything twice", hint="each once")


class Tracking(Callback):
    """Tells a tracker of a run from its start to its end. Where the tracker fails that is told once, and no more."""

    def __init__(self, words: str, tell: Callable[[str], None]) -> None:
        self.name, _, project = words.partition(":")
        self.project, self.tell = project or DEFAULT_PROJECT, tell
        self.handed: LoggerCallback | None = None
        self.tracker: Tracker | None = None

    def on_start(self, started: Started) -> None:
        name = f"{started.folder.parent.name}-{started.run}"
        try:
            with _not_in_the_answer():
                opens = TRACKERS[self.name].opens
                self.tracker = opens(started.folder, self.project, name, configuration_of(started))
        except Exception as error:  # whatever a tracker raises, the training is worth more
            self.tell(f"{self.name} cannot be logged to, and is not told of this training: {error!r}")
            return
        self.handed = LoggerCallback(self.tracker, self.tell)

    def on_step(self, record: StepRecord) -> None:
        if self.handed is not None:
            with _not_in_the_answer():
                self.handed.on_step(record)

    def close(self) -> None:
        """However the training has ended."""
        if self.tracker is None:
            return
        try:
            with _not_in_the_answer():
                self.tracker.finish()
        except Exception as error:  # as above
            self.tell(f"{self.name} could not be closed: {error!r}")


def _not_in_the_answer() -> AbstractContextManager[object]:
    """What trackers print goes to stderr: stdout is for the record, which programs read."""
    return redirect_stdout(sys.stderr)


def configuration_of(started: Started) -> dict[str, Any]:
    """What is trained, how and on what, as plain values by name."""
    expected = started.expected
    words = {
        "run": started.run,
        "model": expected.model,
        "hardware": started.hardware,
        "devices": expected.devices,
        "sequence_tokens": expected.sequence_tokens,
        "batch_sequences": expected.batch_sequences,
        "micro_batch_sequences": expected.micro_batch_sequences,
        "precision": expected.precision,
        "optimizer": expected.optimizer,
        "predicted_step_s": expected.step_s,
        "planned_device_bytes": expected.device_total,
        "planned_host_bytes": expected.host_total,
    }
    return {name: value for name, value in {**words, **asdict(started.training)}.items() if value is not None}
