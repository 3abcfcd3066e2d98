"""Every run of a store as a row, fast: a run that ends writes its own, `row.json`, and listings read those.

Of a run that goes on, or was killed before its row was written, the row is made from its record. A row counts while it
is as new as the record beside it, so that a record that was put back or damaged since is what is told.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import read_bounded, write_whole
from flopwise.records.measurement import RunRecord, RunState
from flopwise.records.profile import Profile
from flopwise.setup.training import Task
from flopwise.store.results import Result, result_of_run
from flopwise.store.runs import MOST_RECORD_BYTES, PROFILE, RECORD, ROW, from_text, read_record, run_names, to_text

MOST_PROFILE_BYTES = 64 * 2**20
"""A larger profile is left alone: a row needs four numbers of it."""
UNREADABLE: Literal["unreadable"] = "unreadable"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """`row.json`: a run's result, and what listings say of it beside."""

    result: Result
    state: RunState | Literal["unreadable"]
    task: Task | None = None
    steps_done: int = 0
    steps: int = 0
    """That were asked for."""
    ended: str | None = None

    @property
    def name(self) -> str:
        """The folder's."""
        return self.result.run or ""

    @property
    def problem(self) -> str | None:
        """Why its record cannot be read."""
        return self.result.reason if self.state == UNREADABLE else None


def row_of(record: RunRecord, profile: Profile | None = None) -> RunRow:
    return RunRow(
        result=result_of_run(record, profile),
        state=record.state,
        task=record.task,
        steps_done=record.steps_done,
        steps=record.training.steps,
        ended=record.ended,
    )


def write_row(folder: Path, record: RunRecord) -> None:
    """What a run leaves for listings when its record, and its profile, have been written."""
    row = row_of(record, read_profile(folder) if record.profile else None)
    write_whole(folder / ROW, to_text(row, indent=0) + "\n", own=True)


def run_rows(store: Path, names: Iterable[str] | None = None) -> list[RunRow]:
    """Runs by their number: all, or those of these names."""
    found = run_names(store) if names is None else sorted(set(names), key=int)
    return [read_row(store / name) for name in found]


def read_row(folder: Path) -> RunRow:
    """The row that a run has written, or one made of its record; of one that cannot be read, why."""
    row = _read_current(folder)
    if row is None:
        try:
            record = read_record(folder)
        except FlopwiseError as error:
            why = error.what if error.why is None else f"{error.what}: {error.why}"
            return RunRow(result=Result(cell=None, run=folder.name, state=UNREADABLE, reason=why), state=UNREADABLE)
        row = row_of(record, read_profile(folder) if record.profile else None)
    # A folder that was copied under another number has that number.
    return row if row.name == folder.name else replace(row, result=replace(row.result, run=folder.name))


def _read_current(folder: Path) -> RunRow | None:
    """The row in the folder, where there is one that is no older than the record."""
    place = os.fspath(folder)
    try:
        # A path object for each of 10,000 runs takes longer than the calls.
        record, row = os.stat(f"{place}/{RECORD}"), os.stat(f"{place}/{ROW}")  # noqa: PTH116
        if not stat.S_ISREG(record.st_mode) or row.st_mtime_ns < record.st_mtime_ns:
            return None
        found = from_text(read_bounded(f"{place}/{ROW}", MOST_RECORD_BYTES), RunRow)
    except (OSError, FlopwiseError):
        return None
    # No run writes a row without its model, or one that says it cannot be read: somebody else did.
    return None if found.result.model is None or found.state == UNREADABLE else found


def read_profile(folder: Path) -> Profile | None:
    """A run's own profile; None where there is none that can be read."""
    try:
        return from_text(read_bounded(folder / PROFILE, MOST_PROFILE_BYTES), Profile)
    except (OSError, FlopwiseError):
        return None
