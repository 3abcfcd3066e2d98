"""From names to rows of results: runs, ranges of them, sweeps and cells, or all that a store holds.

A run knows the attempt that it is, and an attempt its run, so that there is one row for each attempt. Of a cell's
attempts those have a row that stand for it; attempts that only looked for the largest micro-batch are told of where a
cell has no others. Nothing is written here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.base.files import entry_kind
from flopwise.store.cells import ENDED, Attempt, Cell, SweepRecord, standing_attempts
from flopwise.store.results import Result, cell_values, result_of_cell, values_of
from flopwise.store.rows import UNREADABLE, RunRow, read_row, run_rows
from flopwise.store.runs import LAST, RECORD, RUN_NAME, find_run, process_is_gone, run_names
from flopwise.store.sweeps import (
    CELL_NAME,
    CELLS,
    GONE,
    SWEEPS,
    Problem,
    cell_names,
    read_attempts,
    read_cell,
    read_sweep,
    read_told,
    skipped_cells,
    sweep_names,
)

RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """Rows in the order of their names, and whatever of the store could not be read."""

    rows: list[Result]
    problems: list[Problem]
    sweeps: list[SweepRecord] = field(default_factory=list)
    """Those that were named."""


@dataclass(frozen=True)
class _HeldCell:
    """A cell with its attempts: each with its run, and as that ended where nobody has written down how it did."""

    cell: Cell
    attempts: tuple[Attempt, ...]
    is_whole: bool
    """Whether every attempt could be read."""

    @cached_property
    def standing(self) -> list[Attempt]:
        return standing_attempts(self.attempts)


def collect(store: Path, names: Sequence[str] = ()) -> Collected:
    """Results of what is named; of the whole store where nothing is.

    A name is a run's number, a range of numbers (`3-17`), `last`, the path of a run's folder, a sweep or a cell's id.
    """
    view = _Store(store)
    rows = view.everything() if not names else (row for name in names for row in view.rows_named(name))
    unique: dict[tuple[object, ...], Result] = {}
    for row in rows:
        # Two names may stand for the same run; those of two stores may have the same number.
        unique.setdefault((row.cell, row.attempt, row.run, row.started, row.step_s), row)
    return Collected(rows=list(unique.values()), problems=list(dict.fromkeys(view.problems)), sweeps=view.sweeps)


class _Store:
    """A store while rows are collected from it: what is needed of it is read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []
        self.sweeps: list[SweepRecord] = []
        self._cells: dict[str, _HeldCell | Problem] = {}
        self._runs: dict[str, RunRow] = {}

    # -- what is read --------------------------------------------------------------------------------------------

    def run(self, name: str) -> RunRow | None:
        """A run, where it is there."""
        # A file of the store may say anything; nothing but a run's number is looked for.
        if name not in self._runs and RUN_NAME.fullmatch(name) and entry_kind(self.folder / name) == "folder":
            self._keep(read_row(self.folder / name))
        return self._runs.get(name)

    @cached_property
    def all_runs(self) -> dict[str, RunRow]:
        for run in run_rows(self.folder):
            self._keep(run)
        return self._runs

    def _keep(self, run: RunRow) -> None:
        if run.problem and run.name not in self._runs:
            self.problems.append(Problem(self.folder / run.name, run.problem))
        self._runs[run.name] = run

    def cell(self, name: str) -> _HeldCell | Problem:
        if name not in self._cells:
            self._cells[name] = self._read_cell(name)
        return self._cells[name]

    def _read_cell(self, name: str) -> _HeldCell | Problem:
        if not CELL_NAME.fullmatch(name):
            return Problem(self.folder / CELLS, f"{shown(name)} is no cell")
        try:
            cell = read_cell(self.folder, name)
            attempts, problems = read_attempts(self.folder, name)
        except FlopwiseError as error:
            problem = Problem(
                self.folder / CELLS / name, error.what if error.why is None else f"{error.what}: {error.why}"
            )
            self.problems.append(problem)
            return problem
        self.problems += problems
        return _HeldCell(cell, tuple(map(self._as_its_run, attempts)), is_whole=not problems)

    def _as_its_run(self, attempt: Attempt) -> Attempt:
        """An attempt whose end nobody has written down yet is as its run is: it goes on, or its process is gone."""
        if attempt.state in ENDED and not (attempt.state == "failed" and attempt.ended is None):
            return attempt
        name = attempt.run or read_told(self.folder, attempt.cell, attempt.number).run
        run = self.run(name) if name else None
        if run is None:
            return attempt
        if run.state == "done" and run.result.step_s is not None:
            return replace(attempt, run=name, state="ok", reason=None, ended=run.ended)
        return replace(attempt, run=name)

    @cached_property
    def all_cells(self) -> list[_HeldCell]:
        found = (self.cell(name) for name in cell_names(self.folder))
        return [held for held in found if isinstance(held, _HeldCell)]

    def attempt_of(self, run: RunRow) -> tuple[_HeldCell, Attempt] | None:
        """The attempt that a run is; of one that cannot tell, the attempt that names it."""
        if run.problem is not None:
            return self._attempts_by_run.get(run.name)
        if run.result.cell is None or run.result.attempt is None:
            return None
        held = self.cell(run.result.cell) if entry_kind(self.folder / CELLS / run.result.cell) == "folder" else None
        if not isinstance(held, _HeldCell):
            return None
        own = (attempt for attempt in held.attempts if attempt.number == run.result.attempt)
        return next(((held, replace(attempt, run=run.name)) for attempt in own), None)

    @cached_property
    def _attempts_by_run(self) -> dict[str, tuple[_HeldCell, Attempt]]:
        return {
            attempt.run: (held, attempt)
            for held in self.all_cells
            for attempt in held.attempts
            if attempt.run is not None
        }

    # -- rows ----------------------------------------------------------------------------------------------------

    def everything(self) -> Iterator[Result]:
        """Every run that counts, then what cells came to without one, then those that are planned."""
        told: set[tuple[str, int]] = set()
        for run in list(self.all_runs.values()):
            found = self.attempt_of(run)
            if found is None:
                yield self._plain_row(run)
                continue
            held, attempt = found
            told.add((attempt.cell, attempt.number))
            if any(attempt.number == other.number for other in held.standing):
                # A run stays in the store when another one has taken its place.
                yield self.attempt_row(held.cell, attempt)
        for held in self.all_cells:
            for attempt in held.standing:
                if (attempt.cell, attempt.number) not in told:
                    yield self.attempt_row(held.cell, attempt)
        yield from self._rows_planned()

    def _rows_planned(self) -> Iterator[Result]:
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
                if isinstance(held, _HeldCell) and held.is_whole and not held.standing:
                    row = _row_untried(held.cell, left_out.get(cell))
                    if cell not in found or row.state == "planned":
                        found[cell] = row
        yield from found.values()

    def run_row(self, name: str) -> Result:
        """A run by itself, or as the cell that it has measured."""
        run = self.run(name)
        if run is None:
            return Result(cell=None, run=name, state=UNREADABLE, reason="it is not a run's folder")
        found = self.attempt_of(run)
        return self._plain_row(run) if found is None else self.attempt_row(found[0].cell, found[1])

    def _plain_row(self, run: RunRow) -> Result:
        """A run that no process holds any more has been interrupted."""
        row = run.result
        if row.state == "running" and process_is_gone(self.folder / run.name):
            return replace(row, state="interrupted", reason=row.reason or GONE)
        return row

    def cell_rows(self, name: str, left_out: str | None = None) -> Iterator[Result]:
        """Of a cell; `left_out`: why the sweep that is asked for does not try it."""
        held = self.cell(name)
        if isinstance(held, Problem):
            yield Result(cell=name, state=UNREADABLE, reason=held.why)
            return
        for attempt in held.standing:
            yield self.attempt_row(held.cell, attempt)
        if not held.standing:
            yield _row_untried(held.cell, left_out)

    def attempt_row(self, cell: Cell, attempt: Attempt) -> Result:
        """As the attempt ended, with what its run has measured."""
        if attempt.run is None:
            return result_of_cell(cell, attempt)
        run = self.run(attempt.run)
        if run is not None and run.problem is None:
            values = cell_values(cell, attempt, values_of(run.result))
            if values["state"] != "ok":
                values["reason"] = values["reason"] or run.result.reason
            return Result(**values)
        row = replace(result_of_cell(cell, attempt), run=attempt.run)
        if run is None:
            lost = f"its run {attempt.run} is no longer in the store"
            row = replace(row, reason=f"{row.reason}; {lost}" if row.reason else lost)
        # What has ended badly may have done so before its record was written; what went well has lost it.
        return replace(row, state=UNREADABLE, reason=run.problem if run else row.reason) if row.state == "ok" else row

    # -- names ---------------------------------------------------------------------------------------------------

    def rows_named(self, name: str) -> Iterator[Result]:
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
            left_out = skipped_cells(sweep, {})
            for cell in sweep.cells:
                yield from self.cell_rows(cell, left_out.get(cell))
        elif CELL_NAME.fullmatch(name) and entry_kind(self.folder / CELLS / name) == "folder":
            yield from self.cell_rows(name)
        elif numbers:
            for run in self._between(int(numbers[1]), int(numbers[2])):
                yield self.run_row(run)
        else:
            runs = run_names(self.folder)
            known = [*sweep_names(self.folder), *runs, *([LAST] if runs else ())]
            other = f"--store FOLDER names another store than {self.folder}"
            if not known:
                raise FlopwiseError(
                    f"no run, sweep or cell is called {shown(name)}", why=f"there are none in {self.folder}", hint=other
                )
            hint = f"runs (142, 3-17, `{LAST}`), sweeps or cells; {other}"
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
        other = _Store(folder.parent)
        row = other.run_row(folder.name)
        self.problems += other.problems
        return row


def _row_untried(cell: Cell, left_out: str | None) -> Result:
    row = result_of_cell(cell, None)
    return row if left_out is None else replace(row, state="skipped", reason=left_out)
