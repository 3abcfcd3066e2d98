"""From names to rows of results: runs, ranges of them, sweeps and cells, or all that a store holds.

A run that an attempt of a cell has made is that cell's row, and there is one row for each attempt: one that does not
name its run yet is known by its log, or by its cell and its time. Of a cell's attempts those have a row that stand for
it; attempts that only looked for the largest micro-batch are told of where a cell has no others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.base.files import entry_kind, opened_file
from flopwise.store.cell_index import Held, attempt_path, indexed_cells, is_open
from flopwise.store.cells import Attempt, Cell, SweepRecord, standing
from flopwise.store.index import UNREADABLE, Indexed, Judge, indexed_runs, mark_of, process_is_gone, run_names
from flopwise.store.results import FIELDS, Result, cell_values, result_of_cell
from flopwise.store.runs import LAST, RECORD, RUN_NAME, find_run
from flopwise.store.sweeps import (
    CELL_NAME,
    CELLS,
    GONE,
    RUN_LINE,
    SWEEPS,
    Problem,
    moment,
    read_sweep,
    skipped_cells,
    sweep_names,
)

RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})", re.ASCII)
MOST_LOG_BYTES = 2**21
LATEST_RUN_S = 120.0
"""After an attempt last gave a sign of itself: a run that began later is another's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """Rows in the order of their names, and whatever of the store could not be read."""

    rows: list[Result]
    problems: list[Problem]
    sweeps: list[SweepRecord] = field(default_factory=list)
    """Those that were named."""


class Memory:
    """Rows that were made before, for who collects the same store again: where nothing changed they are the same."""

    def __init__(self) -> None:
        self._rows: dict[object, tuple[tuple[object, ...], Result]] = {}

    def row(self, key: object, made_of: tuple[object, ...], make: Callable[[], Result]) -> Result:
        """The row under a key where it was made of the very same objects, else a new one."""
        known = self._rows.get(key)
        if known is not None and all(old is new for old, new in zip(known[0], made_of, strict=True)):
            return known[1]
        row = make()
        self._rows[key] = (made_of, row)
        return row


def collect(
    store: Path, names: Sequence[str] = (), *, judge: Judge | None = None, memory: Memory | None = None
) -> Collected:
    """Results of what is named; of the whole store where nothing is. `judge` says what limits a profiled run.

    A name is a run's number, a range of numbers (`3-17`), `last`, the path of a run's folder, a sweep or a cell's id.
    """
    view = _Store(store, judge, memory)
    rows = view.everything() if not names else (row for name in names for row in view.named(name))
    unique: dict[tuple[object, ...], Result] = {}
    for row in rows:
        # Two names may stand for the same run; those of two stores may have the same number.
        unique.setdefault((row.cell, row.attempt, row.run, row.started, row.step_s), row)
    return Collected(rows=list(unique.values()), problems=list(dict.fromkeys(view.problems)), sweeps=view.sweeps)


class _Store:
    """A store while rows are collected from it: what is needed of it is read once."""

    def __init__(self, folder: Path, judge: Judge | None, memory: Memory | None = None) -> None:
        self.folder, self.judge, self.memory = folder, judge, memory
        self.problems: list[Problem] = []
        self.sweeps: list[SweepRecord] = []
        self._cells: dict[str, Held | Problem] = {}
        self._attempts: dict[str, list[Attempt]] = {}
        self._standing: dict[str, list[Attempt]] = {}
        self._runs: dict[str, Indexed] = {}

    # -- what is read --------------------------------------------------------------------------------------------

    def runs(self, names: Iterable[str]) -> dict[str, Indexed]:
        """Of these runs those that are there."""
        # A file of the store may say anything; nothing but a run's number is looked for.
        missing = [name for name in names if name not in self._runs and RUN_NAME.fullmatch(name)]
        there = [name for name in missing if entry_kind(self.folder / name) == "folder"]
        if there:
            for run in indexed_runs(self.folder, there, judge=self.judge):
                self._keep(run)
        return self._runs

    @cached_property
    def all_runs(self) -> dict[str, Indexed]:
        for run in indexed_runs(self.folder, judge=self.judge):
            self._keep(run)
        return self._runs

    def _keep(self, run: Indexed) -> None:
        if run.problem and run.name not in self._runs:
            self.problems.append(Problem(self.folder / run.name, run.problem))
        self._runs[run.name] = run

    def read_cells(self, names: Iterable[str] | None = None) -> None:
        """All cells, or those of these names, at once."""
        wanted = None if names is None else [name for name in names if name not in self._cells]
        if wanted is None or wanted:
            found, problems = indexed_cells(self.folder, wanted)
            self.problems += problems
            self._cells |= {name: cell for name, cell in found.items() if name not in self._cells}

    def _read_ahead(self, cells: Iterable[str]) -> None:
        """Many cells and their runs at once."""
        named = [name for name in cells if CELL_NAME.fullmatch(name)]
        self.read_cells(named)
        self.runs([attempt.run for name in named for attempt in self._written(name) if attempt.run])

    def cell(self, name: str) -> Held | Problem:
        if name not in self._cells and CELL_NAME.fullmatch(name):
            self.read_cells([name])
        if name not in self._cells:
            self._cells[name] = Problem(self.folder / CELLS, f"{shown(name)} is no cell")
        return self._cells[name]

    @cached_property
    def all_cells(self) -> list[Cell]:
        self.read_cells()
        return [held.cell for held in self._cells.values() if isinstance(held, Held)]

    # -- attempts and their runs ---------------------------------------------------------------------------------

    def _written(self, cell: str) -> tuple[Attempt, ...]:
        held = self.cell(cell)
        return held.attempts if isinstance(held, Held) else ()

    def attempts(self, cell: str) -> list[Attempt]:
        """Of a cell, each with its run, and as that ended where nobody has written down how the attempt did."""
        if cell not in self._attempts:
            self._attempts[cell] = [
                self._as_its_run(attempt) if is_open(attempt) else attempt for attempt in self._written(cell)
            ]
        return self._attempts[cell]

    def standing(self, cell: str) -> list[Attempt]:
        if cell not in self._standing:
            found = self.attempts(cell)
            self._standing[cell] = found if len(found) == 1 and found[0].repeat else standing(found)
        return self._standing[cell]

    def _as_its_run(self, attempt: Attempt) -> Attempt:
        name = attempt.run or named_in_log(self.folder, attempt) or self._runs_by_cell.get(_key(attempt))
        run = self.runs([name]).get(name) if name else None
        if run is None:
            return attempt
        if run.run_state == "done" and run.get("step_s") is not None:
            return replace(attempt, run=name, state="ok", reason=None, ended=run.ended)
        return replace(attempt, run=name)

    @cached_property
    def _runs_by_cell(self) -> dict[tuple[str, int], str]:
        """Runs of attempts that do not name theirs: of the same cell, begun within their time, and of no other."""
        written = [attempt for cell in self.all_cells for attempt in self._written(cell.id)]
        lonely = [attempt for attempt in written if attempt.run is None and is_open(attempt)]
        logged = {_key(attempt): named_in_log(self.folder, attempt) for attempt in lonely}
        taken = {*(attempt.run for attempt in written), *logged.values()}
        cells = {attempt.cell for attempt in lonely}
        free = [run for run in self.all_runs.values() if run.get("cell") in cells and run.name not in taken]
        found: dict[tuple[str, int], str] = {}
        # The newest first: what an older one has begun came before.
        for attempt in sorted(lonely, key=lambda attempt: attempt.started, reverse=True):
            own = [run for run in free if run.get("cell") == attempt.cell and _is_within(run, self.folder, attempt)]
            if own and logged[_key(attempt)] is None:
                free.remove(own[0])
                found[_key(attempt)] = own[0].name
        return found

    @cached_property
    def attempt_of(self) -> dict[str, tuple[Cell, Attempt]]:
        """Of each run that an attempt has made."""
        return {
            attempt.run: (cell, attempt)
            for cell in self.all_cells
            for attempt in self.attempts(cell.id)
            if attempt.run is not None
        }

    # -- rows ----------------------------------------------------------------------------------------------------

    def everything(self) -> Iterator[Result]:
        """Every run that counts, then what cells came to without one, then those that are planned."""
        told: set[tuple[str, int]] = set()
        for name in list(self.all_runs):
            found = self.attempt_of.get(name)
            if found is None:
                yield self.run_row(name)
                continue
            cell, attempt = found
            told.add(_key(attempt))
            if attempt in self.standing(cell.id):
                # A run stays in the store when another one has taken its place.
                yield self.attempt_row(cell, attempt)
        for cell in self.all_cells:
            for attempt in self.standing(cell.id):
                if _key(attempt) not in told:
                    yield self.attempt_row(cell, attempt)
        yield from self._planned()

    def _planned(self) -> Iterator[Result]:
        """Cells of the store's sweeps that nobody has tried; left out are those that every sweep leaves out."""
        found: dict[str, Result] = {}
        for name in sweep_names(self.folder):
            try:
                sweep = read_sweep(self.folder, name)
            except FlopwiseError as error:
                why = error.what if error.why is None else f"{error.what}: {error.why}"
                self.problems.append(Problem(self.folder / SWEEPS / f"{name}.json", why))
                continue
            left_out = skipped_cells(sweep, {})
            for cell in sweep.cells:
                held = self._cells.get(cell)
                if isinstance(held, Held) and held.is_whole and not self.standing(cell):
                    row = _untried(held.cell, left_out.get(cell))
                    if cell not in found or row.state == "planned":
                        found[cell] = row
        yield from found.values()

    def run_row(self, name: str) -> Result:
        """A run by itself, or as the cell that it has measured."""
        found = self.attempt_of.get(name)
        if found is not None:
            return self.attempt_row(*found)
        run = self.runs([name]).get(name)
        if run is None:
            return Result(cell=None, run=name, state=UNREADABLE, reason="it is not a run's folder")
        if self.memory is not None and run.origin is not None:
            return self.memory.row(name, (run.origin, None, None), lambda: run.result)
        return _unless_gone(run.result, self.folder / name)

    def cell_rows(self, name: str, left_out: str | None = None) -> Iterator[Result]:
        """Of a cell; `left_out`: why the sweep that is asked for does not try it."""
        held = self.cell(name)
        if isinstance(held, Problem):
            yield Result(cell=name, state=UNREADABLE, reason=held.why)
            return
        attempts = self.standing(name)
        for attempt in attempts:
            yield self.attempt_row(held.cell, attempt)
        if not attempts:
            yield _untried(held.cell, left_out)

    def attempt_row(self, cell: Cell, attempt: Attempt) -> Result:
        """As the attempt ended, with what its run has measured."""
        if attempt.run is None:
            return result_of_cell(cell, attempt)
        run = self.runs([attempt.run]).get(attempt.run)
        if run is not None and run.problem is None:
            if self.memory is not None and run.origin is not None:
                made_of = (run.origin, cell, attempt)
                return self.memory.row(_key(attempt), made_of, lambda: _measured_row(cell, attempt, run))
            return _measured_row(cell, attempt, run)
        row = replace(result_of_cell(cell, attempt), run=attempt.run)
        if run is None:
            lost = f"its run {attempt.run} is no longer in the store"
            row = replace(row, reason=f"{row.reason}; {lost}" if row.reason else lost)
        # What has ended badly may have done so before its record was written; what went well has lost it.
        return replace(row, state=UNREADABLE, reason=run.problem if run else row.reason) if row.state == "ok" else row

    # -- names ---------------------------------------------------------------------------------------------------

    def named(self, name: str) -> Iterator[Result]:
        """The rows of one name."""
        if "/" in name or name in (".", ".."):
            yield self._row_of_folder(find_run(self.folder, name))
            return
        numbers = RANGE.fullmatch(name)
        if self._is_run(name):
            yield self.run_row(find_run(self.folder, name).name)
        elif name in sweep_names(self.folder):
            sweep = read_sweep(self.folder, name)
            self.sweeps.append(sweep)
            self._read_ahead(sweep.cells)
            left_out = skipped_cells(sweep, {})
            for cell in sweep.cells:
                yield from self.cell_rows(cell, left_out.get(cell))
        elif CELL_NAME.fullmatch(name) and entry_kind(self.folder / CELLS / name) == "folder":
            yield from self.cell_rows(name)
        elif numbers:
            found = self._between(int(numbers[1]), int(numbers[2]))
            self.runs(found)
            for run in found:
                yield self.run_row(run)
        else:
            known = [*sweep_names(self.folder), *run_names(self.folder), LAST]
            hint = f"runs (142, 3-17, `{LAST}`), sweeps or cells; --store FOLDER names another store than {self.folder}"
            raise unknown_name("run, sweep or cell", name, known, hint=hint)

    def _is_run(self, name: str) -> bool:
        """Whether a number is meant; one that only a sweep is called by is that sweep."""
        if name == LAST or not (name.isascii() and name.isdecimal() and len(name) <= 9):
            return name == LAST
        return entry_kind(self.folder / f"{int(name):04d}") == "folder" or name not in sweep_names(self.folder)

    def _between(self, first: int, last: int) -> list[str]:
        found = [name for name in run_names(self.folder) if first <= int(name) <= last]
        if not found:
            why = "the first number is the larger one" if first > last else None
            hint = f"`flopwise ls runs --store {self.folder}` lists them"
            raise FlopwiseError(f"there are no runs {first} to {last} in {self.folder}", why=why, hint=hint)
        return found

    def _row_of_folder(self, folder: Path) -> Result:
        """A run's folder, of this store or of any other."""
        if folder.resolve().parent == self.folder.resolve():
            return self.run_row(folder.resolve().name)
        if entry_kind(folder / RECORD) != "file":
            raise FlopwiseError(
                f"{shown(str(folder))} is not the folder of a run", hint="the number of a run, or its folder"
            )
        other = _Store(folder.parent, self.judge)
        row = other.run_row(folder.name)
        self.problems += other.problems
        return row


def _key(attempt: Attempt) -> tuple[str, int]:
    return attempt.cell, attempt.number


def _measured_row(cell: Cell, attempt: Attempt, run: Indexed) -> Result:
    values = cell_values(cell, attempt, dict(zip(FIELDS, run.values, strict=True)))
    if values["state"] != "ok":
        values["reason"] = values["reason"] or run.get("reason")
    return Result(**values)


def named_in_log(store: Path, attempt: Attempt) -> str | None:
    """The run that the log of an attempt names, where it is in the store."""
    path = attempt_path(store, attempt).with_suffix(".log")
    try:
        with opened_file(path) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - MOST_LOG_BYTES))
            text = stream.read(MOST_LOG_BYTES).decode(errors="replace")
    except (OSError, FlopwiseError):
        return None
    names = reversed(RUN_LINE.findall(text))
    return next((name for name in names if entry_kind(store / name) == "folder"), None)


def _is_within(run: Indexed, store: Path, attempt: Attempt) -> bool:
    """Whether a run was begun while an attempt that has no end was at work."""
    begun, first = (moment(text or "") for text in (run.get("started"), attempt.started))
    last = mark_of(os.fspath(attempt_path(store, attempt)))[0] / 1e9 + LATEST_RUN_S
    if begun is None or first is None:
        return False
    return first.timestamp() - 1 <= begun.timestamp() <= max(first.timestamp(), last)


def _untried(cell: Cell, left_out: str | None) -> Result:
    row = result_of_cell(cell, None)
    return row if left_out is None else replace(row, state="skipped", reason=left_out)


def _unless_gone(row: Result, folder: Path) -> Result:
    """A run that no process holds any more has been interrupted."""
    if row.state == "running" and process_is_gone(folder):
        return replace(row, state="interrupted", reason=row.reason or GONE)
    return row
