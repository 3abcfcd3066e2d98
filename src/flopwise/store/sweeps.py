"""Sweeps in the store: `cells/ID/cell.json` with one file for each attempt beside it, and `sweeps/NAME.json`.

A cell belongs to the store and not to a sweep, so that a second sweep finds what a first one has measured. Files are
written whole; an attempt's number is claimed by making its file, so that two processes never write the same one.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.base.files import WRITABLE_HINT, append_to, plain, read_bounded, write_whole
from flopwise.base.units import AUTO
from flopwise.records.measurement import RunRecord
from flopwise.store.cells import (
    ENDED,
    MEMORY_FAILURES,
    Attempt,
    Cell,
    SweepRecord,
    Told,
    says_nothing,
    standing_attempts,
)
from flopwise.store.runs import LAST, MOST_RECORD_BYTES, RUN_NAME, from_text, read_record, to_text

CELLS = "cells"
SWEEPS = "sweeps"
CELL = "cell.json"
LOCK = ".lock"
CELL_NAME = re.compile(r"[0-9a-f]{12}", re.ASCII)
ATTEMPT_NAME = re.compile(r"attempt-([0-9]{4,9})\.json", re.ASCII)
SWEEP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
OF_RUNS = re.compile(rf"{LAST}|[0-9]+(?:-[0-9]+)?", re.ASCII | re.IGNORECASE)
"""What stands for runs wherever results are named, so that no sweep may be called so."""
OF_FILES = (".csv", ".json", ".md", ".markdown", ".txt", ".html", ".toml")
SKIPPED = "skipped"
"""In the request of a sweep: cell → why it is left out, as its rules were when it was asked for."""
BEAT_S = 30.0
"""Between two touches of the file of an attempt that runs."""
SILENT_AFTER_S = 300.0
"""An attempt on another machine whose file nobody has touched for so long has died with it."""
ATTEMPT_VARIABLE = "FLOPWISE_ATTEMPT"
"""Tells a process which attempt it is: CELL/NUMBER."""
GONE = "its process was killed, or its machine went down"
STALE_AFTER_S = 120.0
"""An attempt on another machine that is so far beyond its time limit has died with it."""
LATEST_START_S = 60.0
"""After its attempt was written; a process under its number that is younger is another one."""

Kind = TypeVar("Kind", Cell, Attempt, SweepRecord, Told)


@dataclass(frozen=True, slots=True)
class Problem:
    """A file of the store that cannot be read, and why."""

    path: Path
    why: str


# -- cells -----------------------------------------------------------------------------------------------------------


def cell_folder(store: Path, cell: str) -> Path:
    if not CELL_NAME.fullmatch(cell):
        raise FlopwiseError(
            f"{shown(cell)} is no cell", why="its name is twelve hexadecimal digits", hint="run the sweep again"
        )
    return store / CELLS / cell


def write_cell(store: Path, cell: Cell) -> None:
    folder = cell_folder(store, cell.id)
    _make(folder)
    write_whole(folder / CELL, to_text(plain(cell), faithful=True) + "\n", own=True)


def read_cell(store: Path, cell: str) -> Cell:
    return _read(cell_folder(store, cell) / CELL, Cell)


def cell_names(store: Path) -> list[str]:
    """Of every folder that is called like a cell; none where there is no sweep."""
    return sorted(_names(store / CELLS, CELL_NAME))


def list_cells(store: Path) -> tuple[list[Cell], list[Problem]]:
    """Every cell of the store by its id, and what cannot be read; whatever else lies there is left alone."""
    cells, problems = [], []
    for name in cell_names(store):
        try:
            cells.append(read_cell(store, name))
        except FlopwiseError as error:
            problems.append(_problem(store / CELLS / name, error))
    return cells, problems


@contextmanager
def claimed(store: Path, cell: str) -> Iterator[bool]:
    """Whether this process has the cell for itself: gone with the process, however that ends."""
    folder = cell_folder(store, cell)
    _make(folder)
    try:
        opened = append_to(folder / LOCK)
    except OSError as error:
        raise _cannot_write(folder / LOCK, error) from None
    with opened as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            # The file system has no locks: then the attempts' own files tell who is at work.
            pass
        yield True


# -- attempts --------------------------------------------------------------------------------------------------------


def new_attempt(store: Path, attempt: Attempt) -> Attempt:
    """The attempt under the cell's next free number, its file made."""
    folder = cell_folder(store, attempt.cell)
    _make(folder)
    number = max(_attempt_numbers(folder), default=0)
    while True:
        number += 1
        numbered = replace(attempt, number=number)
        if _claim(_attempt_path(folder, number), to_text(numbered, faithful=True) + "\n"):
            return numbered


def _claim(path: Path, text: str) -> bool:
    """Make a file that was not there, whole; False: there is one."""
    whole = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    write_whole(whole, text, own=True)
    try:
        os.link(whole, path)
    except FileExistsError:
        return False
    except OSError:
        return _claim_without_links(path, text)
    finally:
        whole.unlink(missing_ok=True)
    return True


def _claim_without_links(path: Path, text: str) -> bool:
    """As `_claim`, where the file system has no links: for a moment the file is empty."""
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    except OSError as error:
        raise _cannot_write(path, error) from None
    write_whole(path, text, own=True)
    return True


def write_attempt(store: Path, attempt: Attempt) -> None:
    write_whole(_attempt_path(cell_folder(store, attempt.cell), attempt.number), to_text(attempt, faithful=True) + "\n")


def read_attempts(store: Path, cell: str) -> tuple[list[Attempt], list[Problem]]:
    """A cell's attempts in their order. One whose process is gone without a word is `failed`, and says so."""
    folder = cell_folder(store, cell)
    attempts, problems = [], []
    for number in sorted(_attempt_numbers(folder)):
        path = _attempt_path(folder, number)
        try:
            attempt = _read(path, Attempt)
        except FlopwiseError as error:
            problems.append(_problem(path, error))
            continue
        if attempt.state not in ENDED and is_gone(attempt, silent_s=_silent_s(path)):
            attempt = _fail_gone(attempt)
        attempts.append(attempt)
    return attempts, problems


def is_gone(attempt: Attempt, *, silent_s: float = 0.0) -> bool:
    """Whether the process of an attempt that has not ended can no longer be there.

    `silent_s`: since when its file was not touched, which tells of another machine's.
    """
    begun = moment(attempt.started)
    if begun is None:
        # Nobody of ours has written this.
        return True
    if attempt.host == socket.gethostname() and attempt.pid is not None:
        return not _lives(attempt.pid, begun.timestamp())
    if silent_s > SILENT_AFTER_S:
        return True
    if attempt.time_limit_s is None:
        return False
    return (datetime.now(tz=begun.tzinfo) - begun).total_seconds() > attempt.time_limit_s + STALE_AFTER_S


def moment(text: str) -> datetime | None:
    """A time as the store's files have it; None for what is none."""
    try:
        found = datetime.fromisoformat(text)
        return found if found.tzinfo is not None else found.astimezone()
    except (ValueError, OverflowError, OSError):
        return None


def now() -> str:
    """Local time with its offset, as the store's files have it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def beat(store: Path, attempt: Attempt) -> None:
    """Touch the file of an attempt that runs, so that other machines know; trouble with it ends nothing."""
    with suppress(OSError):
        os.utime(_attempt_path(cell_folder(store, attempt.cell), attempt.number))


def _silent_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _fail_gone(attempt: Attempt) -> Attempt:
    return replace(attempt, state="failed", reason=attempt.reason or GONE)


def _lives(pid: int, begun_s: float) -> bool:
    """Whether a process of this machine still runs, and is not another one that was given its number since."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        booted = re.search(rb"^btime ([0-9]+)", Path("/proc/stat").read_bytes(), re.MULTILINE)
    except OSError:
        return True
    if fields[0] in (b"Z", b"X"):
        return False
    if booted is None:
        return True
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return int(booted[1]) + since_boot_s <= begun_s + LATEST_START_S


def _attempt_path(folder: Path, number: int) -> Path:
    return folder / f"attempt-{number:04d}.json"


def _attempt_numbers(folder: Path) -> list[int]:
    found = (ATTEMPT_NAME.fullmatch(name) for name in _names(folder, ATTEMPT_NAME))
    return [int(match[1]) for match in found if match is not None]


# -- what the process of an attempt tells its sweep ------------------------------------------------------------------


def own_attempt() -> tuple[str, int] | None:
    """The cell and the number of the attempt that this process is; None where no sweep has begun it."""
    cell, _, number = os.environ.get(ATTEMPT_VARIABLE, "").partition("/")
    return (cell, int(number)) if CELL_NAME.fullmatch(cell) and number.isdecimal() else None


def tell_sweep(store: Path, told: Told) -> None:
    """Write down what this process, where it is an attempt, has to say; trouble with it ends nothing.

    Of several ranks the first failure counts, unless a later one is of memory: the others miss the rank that had none.
    """
    own = own_attempt()
    if own is None:
        return
    before = read_told(store, *own)
    if before.failure in MEMORY_FAILURES or (before.failure and told.failure not in MEMORY_FAILURES):
        return
    whole = replace(told, run=told.run or before.run)
    with suppress(FlopwiseError):
        write_whole(_told_path(store, *own), to_text(whole) + "\n", own=True)


def read_told(store: Path, cell: str, number: int) -> Told:
    """What the process of an attempt has said so far; nothing where there is no file that can be read."""
    try:
        return _read(_told_path(store, cell, number), Told)
    except FlopwiseError:
        return Told()


def _told_path(store: Path, cell: str, number: int) -> Path:
    return cell_folder(store, cell) / f"attempt-{number:04d}.told.json"


# -- what is left to try -----------------------------------------------------------------------------------------------

Verdict = Literal["open", "finished", "failed", "skipped"]
"""open: to be tried; finished: trying again would change nothing; failed: only to be retried; skipped: left out."""


def run_record(store: Path, run: str | None) -> RunRecord | None:
    """The record of a run, where there still is one that can be read."""
    if run is None or not RUN_NAME.fullmatch(run):
        return None
    try:
        return read_record(store / run)
    except FlopwiseError:
        return None


def missing_repeats(store: Path, record: SweepRecord, attempts: Sequence[Attempt]) -> list[int]:
    """Repeats without a measurement of as many steps that can still be read."""
    there = {
        attempt.repeat
        for attempt in standing_attempts(attempts)
        if attempt.state == "ok" and attempt.steps >= record.steps and run_record(store, attempt.run) is not None
    }
    return [repeat for repeat in range(1, record.repeats + 1) if repeat not in there]


def verdict(
    store: Path, record: SweepRecord, cell: Cell, attempts: Sequence[Attempt], *, named: bool = False
) -> Verdict:
    """What a sweep has still to do for a cell, by what was tried of it; one that is `named` is not left out."""
    if not named and cell.id in skipped_cells(record, {cell.id: attempts}):
        return "skipped"
    if not missing_repeats(store, record, attempts):
        return "finished"
    told = [attempt for attempt in attempts if attempt.state in ENDED and not says_nothing(attempt)]
    if not told or told[-1].state in ("ok", "skipped"):
        return "open"
    if told[-1].state == "timeout" and _is_longer(record.time_limit_s, told[-1].time_limit_s):
        return "open"
    if told[-1].state != "oom":
        return "failed"
    # Looking for a micro-batch, that one did not fit is no end.
    return "open" if looks(cell) and told[-1].micro_batch_sequences is not None else "finished"


def _is_longer(limit_s: float | None, than_s: float | None) -> bool:
    """Of two time limits, either of which may be none."""
    return than_s is not None and (limit_s is None or limit_s > than_s)


def looks(cell: Cell) -> bool:
    """Whether the largest micro-batch is to be looked for."""
    return cell.settings.batch_sequences == AUTO and cell.settings.micro_batch_sequences == AUTO


def skipped_cells(record: SweepRecord, attempts: Mapping[str, Sequence[Attempt]]) -> dict[str, str]:
    """Cells that a sweep leaves out, and why: as it was decided, be the rules' words what they are.

    A record without that decision has it in the attempts of its cells that say so.
    """
    decided = record.request.get(SKIPPED)
    if isinstance(decided, dict):
        return {cell: str(why) for cell, why in decided.items() if cell in record.cells}
    found = {}
    for cell, tried in attempts.items():
        ours = [attempt for attempt in tried if attempt.sweep == record.name]
        if ours and ours[-1].state == "skipped":
            found[cell] = ours[-1].reason or "it is left out"
    return found


# -- sweeps ----------------------------------------------------------------------------------------------------------


def check_sweep_name(name: str) -> None:
    """Refuse a name that is no file's, or that stands for something else wherever results are named."""
    if not SWEEP_NAME.fullmatch(name):
        why = "letters, digits, dots, dashes and underscores, at most 64, the first a letter or digit"
    elif OF_RUNS.fullmatch(name):
        why = "`flopwise report` would take it for runs"
    elif CELL_NAME.fullmatch(name):
        why = "`flopwise report` would take it for a cell"
    elif name.lower().endswith(OF_FILES):
        why = "`flopwise report` would take it for a file"
    else:
        return
    raise FlopwiseError(f"a sweep cannot be called {shown(name)}", why=why, hint="--name mpt-on-h200")


def write_sweep(store: Path, record: SweepRecord) -> None:
    check_sweep_name(record.name)
    _make(store / SWEEPS)
    write_whole(store / SWEEPS / f"{record.name}.json", to_text(record, faithful=True) + "\n")


def read_sweep(store: Path, name: str) -> SweepRecord:
    known = sweep_names(store)
    if name not in known:
        raise unknown_name("sweep", name, known, hint="--store FOLDER names another store")
    return _read(store / SWEEPS / f"{name}.json", SweepRecord)


def sweep_names(store: Path) -> list[str]:
    pattern = re.compile(SWEEP_NAME.pattern + r"\.json", re.ASCII)
    return sorted(name.removesuffix(".json") for name in _names(store / SWEEPS, pattern))


# -- files -----------------------------------------------------------------------------------------------------------


def _names(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if pattern.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FlopwiseError(f"{folder} cannot be listed", why=error.strerror, hint="check its permissions") from None
    except ValueError as error:
        # A name that no folder can have, such as one with a null byte.
        raise FlopwiseError(f"{str(folder)!r} cannot be listed", why=str(error), hint="--store FOLDER") from None


def _read(path: Path, kind: type[Kind]) -> Kind:
    try:
        return from_text(read_bounded(path, MOST_RECORD_BYTES), kind)
    except FlopwiseError as error:
        why = error.what if error.why is None else f"{error.what}: {error.why}"
        raise FlopwiseError(f"{path} is damaged", why=why, hint="remove it, and run the sweep again") from None
    except OSError as error:
        raise FlopwiseError(f"{path} cannot be read", why=error.strerror, hint="run the sweep again") from None


def _problem(path: Path, error: FlopwiseError) -> Problem:
    return Problem(path, error.what if error.why is None else f"{error.what}: {error.why}")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from None


def _cannot_write(path: Path, error: OSError) -> FlopwiseError:
    return FlopwiseError(f"cannot write {path}", why=error.strerror, hint=WRITABLE_HINT)
