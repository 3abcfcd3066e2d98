"""A sweep: cells, each a set-up with nothing left open; what was predicted and tried of each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from flopwise.base.units import Auto
from flopwise.setup.training import Task

CellState = Literal["planned", "running", "ok", "oom", "timeout", "failed", "skipped"]
ENDED: frozenset[CellState] = frozenset({"ok", "oom", "timeout", "failed", "skipped"})
"""States that no process is needed for any more."""
FINISHED: frozenset[CellState] = frozenset({"ok", "oom"})
"""States that trying again would not change; only `--force` does."""
Failure = Literal["does-not-fit", "out-of-memory", "refused", "crashed"]
"""does-not-fit: no plan was found; out-of-memory: there was less than planned; refused: what was asked for is wrong."""
MEMORY_FAILURES: frozenset[Failure] = frozenset({"does-not-fit", "out-of-memory"})

NOT_IDENTITY = ("name", "title", "source")
"""Fields of a model's table that say nothing of its shape: the same one under two names is one cell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One point of a grid. What two sweeps have in common has the same settings in both, and so the same cell."""

    model: dict[str, Any]
    """The whole table of its description: a shape, not only a name."""
    hardware: str
    """Catalogue name, or the whole path of the file that was named."""
    devices: int
    sequence_tokens: int
    batch_sequences: int | Auto
    """auto: devices times the largest micro-batch that fits, which is looked for."""
    micro_batch_sequences: int | Auto
    """auto: what the plan chooses; with a batch that is auto, the largest that fits."""
    precision: str
    optimizer: str = "adamw"
    task: Task = "language"
    device_memory_bytes: int | None = None
    """Cap; None: all of the device but a reserve."""
    host_memory_bytes: int | None = None

    @property
    def model_name(self) -> str:
        return str(self.model.get("name") or "-")

    @property
    def hardware_name(self) -> str:
        """As people are told it: of a file its name alone, not where it lies."""
        return self.hardware.rpartition("/")[2] or self.hardware


def cell_id(settings: Settings) -> str:
    """Twelve hexadecimal digits of the settings' hash, the same in every process and version of Python."""
    table = msgspec.to_builtins(settings)
    table["model"] = {key: value for key, value in table["model"].items() if key not in NOT_IDENTITY}
    return hashlib.sha256(msgspec.json.encode(table, order="sorted")).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreseen:
    """A cell's prediction, under the names that `Prediction` and `Measurement` have."""

    fits: bool
    method: Literal["plan", "predict"]
    """plan: the plan that would run, simulated; predict: all state on the devices, as `flopwise predict` has it."""
    batch_sequences: int | None = None
    micro_batch_sequences: int | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    device_bytes: int | None = None
    """Of the fullest device; where nothing fits, the least that would be needed."""
    host_bytes: int | None = None
    recompute: str | None = None
    bound: str | None = None
    attempt_s: float | None = None
    """Of one attempt of so many steps, its start included."""
    reason: str | None = None
    """Why it does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """`cell.json`: settings under their hash, with the newest prediction of them."""

    id: str
    settings: Settings
    foreseen: Foreseen | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One process that tried a cell: a file of its own, written whole when it starts and again when it has ended."""

    number: int
    """Within its cell, from 1."""
    cell: str
    repeat: int
    """Which of a cell's measurements it is, from 1; 0: it only looked for the largest micro-batch."""
    state: CellState
    started: str
    """Local time with its offset, ISO 8601."""
    ended: str | None = None
    sweep: str | None = None
    """The name of the sweep that asked for it."""
    steps: int
    time_limit_s: float | None = None
    batch_sequences: int | None = None
    """That was tried; None: what the plan chose."""
    micro_batch_sequences: int | None = None
    run: str | None = None
    """The folder of its run in the store, where it came as far as having one."""
    reason: str | None = None
    """Why it is not ok, in a line."""
    interrupted: bool = False
    """Whether it was ended before it could say anything of its cell."""
    exit_code: int | None = None
    """Negative: the signal that ended it."""
    host: str | None = None
    pid: int | None = None
    job: str | None = None
    """Of a cluster's scheduler."""
    ended_by_job: bool = False
    """Whether its end is the one that the scheduler has told of its job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What the process of an attempt says of itself, in a file beside the attempt's, which the sweep alone writes."""

    run: str | None = None
    """The folder of its run in the store, as soon as it has one."""
    failure: Failure | None = None
    reason: str | None = None
    """Why it has failed, in a line."""


def says_nothing(attempt: Attempt) -> bool:
    """Whether an attempt that is over tells nothing of its cell: it was interrupted, or its process is gone."""
    if attempt.state != "failed":
        return False
    return attempt.ended is None or attempt.interrupted


def standing(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Those that stand for a cell, one for each repeat: the newest one that says anything, else the newest.

    Where it was never measured, the last one that looked for a micro-batch, unless that went well.
    """
    found: dict[int, Attempt] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.number):
        if attempt.repeat not in found or not says_nothing(attempt) or says_nothing(found[attempt.repeat]):
            found[attempt.repeat] = attempt
    searched = found.pop(0, None)
    if not found and searched is not None and searched.state != "ok":
        return [searched]
    return [found[repeat] for repeat in sorted(found)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRecord:
    """`sweep.json`: what was asked for, and the cells that it came to, in their order."""

    name: str
    created: str
    cells: tuple[str, ...]
    steps: int
    repeats: int = 1
    time_limit_s: float | None = None
    profile: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data: tuple[str, ...] = ()
    tokenizer: str | None = None
    seed: int = 0
    request: dict[str, Any] = field(default_factory=dict)
    """The grid as it was asked for: axis → its words."""
