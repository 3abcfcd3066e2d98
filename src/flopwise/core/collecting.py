"""From names to rows of results: runs, ranges of them, sweeps and cells, or all that a store holds.

A run that an attempt of a cell has made is that cell's row. Of a cell's attempts those have a row that stand for it;
attempts that only looked for the largest micro-batch are told of where a cell has no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from flopwise.core.errors import FlopwiseError, shown, unknown_name
from flopwise.core.files import entry_kind
from flopwise.core.index import UNREADABLE, Indexed, Judge, indexed_runs, process_is_gone, run_names
from flopwise.core.results import Result, result_of_cell
from flopwise.core.store import LAST, RECORD, RUN_NAME, find_run
from flopwise.core.sweep import Attempt, Cell, SweepRecord, standing
from flopwise.core.sweep_store import (
    CELL_NAME,
    CELLS,
    Problem,
    list_cells,
    read_attempts,
    read_cell,
    read_sweep,
    sweep_names,
)

RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})", re.ASCII)
GONE = "its process was killed, or its machine went down"


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """Rows in the order of their names, and whatever of the store could not be read."""

    rows: list[Result]
    problems: list[Problem]
    sweeps: list[SweepRecord] = field(default_factory=list)
    """Those that were named."""


def collect(store: Path, names: Sequence[str] = (), *, judge: Judge | None = None) -> Collected:
    """Results of what is named; of the whole store where nothing is. `judge` says what limits a profiled run.

    A name is a run's number, a range of numbers (`3-17`), `last`, the path of a run's folder, a sweep or a cell's id.
    """
    view = _Store(store, judge)
    rows = view.everything() if not names else (row for name in names for row in view.named(name))
    unique: dict[tuple[object, ...], Result] = {}
    for row in rows:
        # Two names may stand for the same run; those of two stores may have the same number.
        unique.setdefault((row.cell, row.attempt, row.run, row.started, row.step_s), row)
    return Collected(rows=list(unique.values()), problems=list(dict.fromkeys(view.problems)), sweeps=view.sweeps)


class _Store:
    """A store while rows are collected from it: what is needed of it is read once."""

    def __init__(self, folder: Path, judge: Judge | None) -> None:
        self.folder, self.judge = folder, judge
        self.problems: list[Problem] = []
        self.sweeps: list[SweepRecord] = []
        self._attempts: dict[str, list[Attempt]] = {}
        self._cells: dict[str, Cell | Problem] = {}
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

    def _read_ahead(self, cells: Iterable[str]) -> None:
        """The runs of many cells at once."""
        readable = [cell for cell in cells if isinstance(self.cell(cell), Cell)]
        self.runs([attempt.run for cell in readable for attempt in standing(self.attempts(cell)) if attempt.run])

    def _keep(self, run: Indexed) -> None:
        self._runs[run.name] = run
        if run.problem:
            self.problems.append(Problem(self.folder / run.name, run.problem))

    def attempts(self, cell: str) -> list[Attempt]:
        if cell not in self._attempts:
            self._attempts[cell], problems = read_attempts(self.folder, cell)
            self.problems += problems
        return self._attempts[cell]

    def cell(self, name: str) -> Cell | Problem:
        if name not in self._cells:
            try:
                self._cells[name] = read_cell(self.folder, name)
            except FlopwiseError as error:
                why = error.what if error.why is None else f"{error.what}: {error.why}"
                self._cells[name] = problem = Problem(self.folder / CELLS / name, why)
                self.problems.append(problem)
        return self._cells[name]

    @cached_property
    def all_cells(self) -> list[Cell]:
        cells, problems = list_cells(self.folder)
        self.problems += problems
        self._cells |= {cell.id: cell for cell in cells}
        return cells

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
        """Every run of the store, then what cells came to without one."""
        for run in indexed_runs(self.folder, judge=self.judge):
            self._keep(run)
        told: set[tuple[str, int]] = set()
        for name in list(self._runs):
            found = self.attempt_of.get(name)
            if found is None:
                yield self.run_row(name)
                continue
            cell, attempt = found
            told.add((cell.id, attempt.number))
            if attempt.repeat or attempt in standing(self.attempts(cell.id)):
                # A run stays in the store when another one has taken its place.
                yield self.attempt_row(cell, attempt)
        for cell in self.all_cells:
            for attempt in standing(self.attempts(cell.id)):
                if (cell.id, attempt.number) not in told:
                    yield self.attempt_row(cell, attempt)

    def run_row(self, name: str) -> Result:
        """A run by itself, or as the cell that it has measured."""
        found = self.attempt_of.get(name)
        if found is not None:
            return self.attempt_row(*found)
        row = self.runs([name])[name].result
        return _unless_gone(row, self.folder / name)

    def cell_rows(self, name: str) -> Iterator[Result]:
        cell = self.cell(name)
        if isinstance(cell, Problem):
            yield Result(cell=name, state=UNREADABLE, reason=cell.why)
            return
        attempts = standing(self.attempts(name))
        for attempt in attempts:
            yield self.attempt_row(cell, attempt)
        if not attempts:
            yield result_of_cell(cell, None)

    def attempt_row(self, cell: Cell, attempt: Attempt) -> Result:
        """As the attempt ended, with what its run has measured."""
        if attempt.run is None:
            return result_of_cell(cell, attempt)
        run = self.runs([attempt.run]).get(attempt.run)
        if run is None:
            row = result_of_cell(cell, attempt)
            lost = f"its run {attempt.run} is no longer in the store"
            return replace(row, run=attempt.run, reason=f"{row.reason}; {lost}" if row.reason else lost)
        if run.problem is None:
            row = result_of_cell(cell, attempt, run.result)
            return replace(row, reason=row.reason or (run.get("reason") if row.state != "ok" else None))
        row = replace(result_of_cell(cell, attempt), run=attempt.run)
        # What has ended badly may have done so before its record was written; what went well has lost it.
        return replace(row, state=UNREADABLE, reason=run.problem) if attempt.state == "ok" else row

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
            for cell in sweep.cells:
                yield from self.cell_rows(cell)
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


def _unless_gone(row: Result, folder: Path) -> Result:
    """A run that no process holds any more has been interrupted."""
    if row.state == "running" and process_is_gone(folder):
        return replace(row, state="interrupted", reason=row.reason or GONE)
    return row
