"""A sweep: cells, each a set-up with nothing left open; what was predicted and tried of each of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from flopwise.records.outcome import Outcome
from flopwise.setup.written import CellSetup

CellState = Literal["planned", "running", "ok", "oom", "timeout", "failed", "skipped"]
ENDED: frozenset[CellState] = frozenset({"ok", "oom", "timeout", "failed", "skipped"})
"""States that no process is needed for any more."""
FINISHED: frozenset[CellState] = frozenset({"ok", "oom"})
"""States that trying again would not change; only `--force` does."""
Failure = Literal["does-not-fit", "out-of-memory", "refused", "crashed"]
"""does-not-fit: no plan was found; out-of-memory: there was less than planned; refused: what was asked for is wrong."""
MEMORY_FAILURES: frozenset[Failure] = frozenset({"does-not-fit", "out-of-memory"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CellOutcome(Outcome):
    """What a cell is expected to take, before it is tried."""

    fits: bool
    method: Literal["plan", "predict"]
    """plan: the plan that would run, simulated; predict: all state on the devices, as `flopwise predict` has it."""
    device_bytes: int | None = None
    host_bytes: int | None = None
    attempt_s: float | None = None
    """Of one attempt of so many steps, its start included."""
    reason: str | None = None
    """Why it does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """`cell.json`: settings under their hash, with the newest prediction of them."""

    id: str
    settings: CellSetup
    foreseen: CellOutcome | None = None


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


def standing_attempts(attempts: Iterable[Attempt]) -> list[Attempt]:
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
