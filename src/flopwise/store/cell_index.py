"""Cells of a store with their attempts, fast: `.cells.json` keeps those of cells whose attempts have all ended.

As the index of runs it is a cache and nothing more. What is kept of a cell counts while its folder and every file of
it have the time, the size and the place that they had; an attempt that has not ended is read anew every time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import write_whole
from flopwise.store import cells as sweep
from flopwise.store import index
from flopwise.store.cells import ENDED, Attempt, Cell
from flopwise.store.index import Mark, is_ours, mark_of, read_remembered
from flopwise.store.runs import to_text
from flopwise.store.sweeps import ATTEMPT_NAME, CELL, CELL_NAME, CELLS, Problem, read_attempts, read_cell

CELLS_INDEX = ".cells.json"
LAYOUT = 1
"""Of the index; another one is made anew."""
SETTLED_NS = 2 * 10**9
"""A file that was written so lately may be written again without its time telling."""


@dataclass(frozen=True, slots=True)
class Held:
    """A cell and its attempts. Of the model's table a listing needs its name alone, and no more may be there."""

    cell: Cell
    attempts: tuple[Attempt, ...]
    is_whole: bool = True
    """Whether every attempt could be read."""


class _Entry(msgspec.Struct, array_like=True):
    marks: list[Mark]
    """Of the folder, of `cell.json`, of every attempt in its order."""
    cell: Cell
    attempts: list[Attempt]


class _Index(msgspec.Struct):
    layout: int
    maker: str
    cells: dict[str, _Entry]


def is_open(attempt: Attempt) -> bool:
    """Whether nobody has written down how an attempt ended: it goes on, or its process is gone."""
    return attempt.state not in ENDED or (attempt.state == "failed" and attempt.ended is None)


def attempt_path(store: Path, attempt: Attempt) -> Path:
    return store / CELLS / attempt.cell / f"attempt-{attempt.number:04d}.json"


def indexed_cells(store: Path, names: Iterable[str] | None = None) -> tuple[dict[str, Held | Problem], list[Problem]]:
    """Cells by their id: all, or those of these names; what cannot be read of their attempts beside them.

    A cell that cannot be read itself is a problem in its own place.
    """
    found = cell_names(store) if names is None else sorted(set(names))
    is_few = names is not None and len(found) <= index.FEW_RUNS
    kept = {} if is_few else _read_index(store)
    entries: dict[str, _Entry] = {}
    cells: dict[str, Held | Problem] = {}
    problems: list[Problem] = []
    fresh_bytes = 0
    root = f"{os.fspath(store)}/{CELLS}"
    for name in found:
        entry = kept.get(name)
        if entry is None or not _is_current(f"{root}/{name}", entry):
            cells[name], own, entry = _fresh(store, name)
            problems += own
            fresh_bytes += sum(mark[1] for mark in entry.marks[1:]) if entry else 0
        else:
            cells[name] = Held(entry.cell, tuple(entry.attempts))
        if entry is not None:
            entries[name] = entry
    if fresh_bytes >= index.WORTH_WRITING_BYTES and not is_few:
        _write_index(store, entries if names is None else kept | entries)
    return cells, problems


def cell_names(store: Path) -> list[str]:
    """Of every folder that is called like a cell; none where there is no sweep."""
    try:
        with os.scandir(store / CELLS) as entries:
            return sorted(entry.name for entry in entries if CELL_NAME.fullmatch(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        hint = "check its permissions"
        raise FlopwiseError(f"{store / CELLS} cannot be listed", why=error.strerror, hint=hint) from None


def _is_current(folder: str, entry: _Entry) -> bool:
    """While a folder's time stands no file of it was made, replaced or taken away."""
    if mark_of(folder) != entry.marks[0] or mark_of(f"{folder}/{CELL}") != entry.marks[1]:
        return False
    return all(
        mark_of(f"{folder}/attempt-{attempt.number:04d}.json") == mark
        for attempt, mark in zip(entry.attempts, entry.marks[2:], strict=True)
    )


def _fresh(store: Path, name: str) -> tuple[Held | Problem, list[Problem], _Entry | None]:
    """A cell as its files say now; an entry too where it may be kept."""
    folder = f"{os.fspath(store)}/{CELLS}/{name}"
    # What changes after it was looked at and before it is read is read again the next time.
    marks = [mark_of(folder), mark_of(f"{folder}/{CELL}")]
    attempt_marks = _attempt_marks(folder)
    try:
        cell = read_cell(store, name)
        attempts, problems = read_attempts(store, name)
    except FlopwiseError as error:
        problem = Problem(store / CELLS / name, error.what if error.why is None else f"{error.what}: {error.why}")
        return problem, [problem], None
    held = Held(cell, tuple(attempts), is_whole=not problems)
    marks += attempt_marks.values()
    has_all = [attempt.number for attempt in attempts] == list(attempt_marks)
    is_settled = max(mark[0] for mark in marks) <= time.time_ns() - SETTLED_NS
    if problems or not has_all or not is_settled or any(map(is_open, attempts)):
        return held, problems, None
    slim = replace(cell, settings=replace(cell.settings, model={"name": cell.settings.model_name}))
    return held, problems, _Entry(marks, slim, attempts)


def _attempt_marks(folder: str) -> dict[int, Mark]:
    try:
        with os.scandir(folder) as entries:
            found = [match for entry in entries if (match := ATTEMPT_NAME.fullmatch(entry.name))]
    except OSError:
        return {}
    numbers = sorted((int(match[1]), match[0]) for match in found)
    return {number: mark_of(f"{folder}/{name}") for number, name in numbers}


# -- the file --------------------------------------------------------------------------------------------------------


_REMEMBERED: dict[str, tuple[Mark, dict[str, _Entry]]] = {}
"""The index that was read last, as that of runs has it."""


def _maker() -> str:
    version = sys.modules[__name__.partition(".")[0]].__version__
    return f"{version} {mark_of(sweep.__file__)[0]} {mark_of(__file__)[0]}"


def _read_index(store: Path) -> dict[str, _Entry]:
    return read_remembered(store / CELLS_INDEX, _Index, _current, _REMEMBERED)


def _current(found: _Index) -> dict[str, _Entry]:
    """Its sound entries, if this version made them."""
    if found.layout != LAYOUT or found.maker != _maker():
        return {}
    return {name: entry for name, entry in found.cells.items() if _is_sound(name, entry)}


def _is_sound(name: str, entry: _Entry) -> bool:
    """Whether an entry is of its cell, and as long as it says."""
    is_own = entry.cell.id == name and all(attempt.cell == name for attempt in entry.attempts)
    return is_own and len(entry.marks) == len(entry.attempts) + 2


def _write_index(store: Path, entries: dict[str, _Entry]) -> None:
    path = store / CELLS_INDEX
    if (path.is_symlink() or path.exists()) and not is_ours(path):
        return
    try:
        write_whole(path, to_text(_Index(LAYOUT, _maker(), entries), indent=0))
    except FlopwiseError:
        # The cells were read all the same.
        return
