"""One row for each attempt, whatever became of its process, and none for what has been done again."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flopwise.store.cells import Attempt, Cell, SweepRecord
from flopwise.store.collecting import collect
from flopwise.store.results import Result
from flopwise.store.runs import LOCK, read_record
from flopwise.store.sweeps import GONE, cell_folder, write_attempt, write_cell, write_sweep
from tests.support.run_stores import STARTED, a_cell, a_record, keep, make_store, write_attempted, write_run

NOW = datetime.now(tz=UTC).isoformat(timespec="seconds")


def told(rows: list[Result]) -> list[tuple[str | None, int | None, str]]:
    return [(row.run, row.attempt, row.state) for row in rows]


def at_work(store: Path, *, alive: bool, named: bool) -> Attempt:
    """An attempt that has not ended; where its own file does not name its run, what its process has told does."""
    record = write_run(store, started=NOW)
    pid = os.getpid() if alive else 2**22 + 7
    host = os.uname().nodename
    attempt = write_attempted(store, a_cell(record), "running", run=record.id, started=NOW, host=host, pid=pid)
    if not named:
        write_attempt(store, replace(attempt, run=None))
        path = cell_folder(store, attempt.cell) / f"attempt-{attempt.number:04d}.told.json"
        path.write_text(json.dumps({"run": record.id}))
    return attempt


def as_running(store: Path, run: str) -> None:
    keep(store / run, replace(read_record(store / run), state="running", measurement=None))


WAYS = pytest.mark.parametrize("named", [True, False], ids=["by its file", "by what its process told"])


@WAYS
def test_an_attempt_at_work_is_one_row(tmp_path: Path, named: bool) -> None:
    at_work(tmp_path, alive=True, named=named)
    as_running(tmp_path, "0001")
    assert told(collect(tmp_path).rows) == [("0001", 1, "running")]
    assert told(collect(tmp_path, ["1"]).rows) == [("0001", 1, "running")]
    assert told(collect(tmp_path, [str(a_cell().id)]).rows) == [("0001", 1, "running")]


@WAYS
def test_an_attempt_whose_sweep_was_killed_is_one_row(tmp_path: Path, named: bool) -> None:
    at_work(tmp_path, alive=False, named=named)
    as_running(tmp_path, "0001")
    (tmp_path / "0001" / LOCK).touch()
    rows = collect(tmp_path).rows
    assert told(rows) == [("0001", 1, "failed")]
    assert rows[0].reason == GONE


@WAYS
@pytest.mark.parametrize("alive", [True, False], ids=["at work", "gone"])
def test_a_run_that_was_done_before_its_attempt_said_so(tmp_path: Path, named: bool, alive: bool) -> None:
    at_work(tmp_path, alive=alive, named=named)
    for names in ([], ["1"], [a_cell().id]):
        rows = collect(tmp_path, names).rows
        assert told(rows) == [("0001", 1, "ok")]
        assert rows[0].step_s is not None
        assert rows[0].reason is None


def test_a_run_of_the_same_cell_that_no_attempt_made_is_a_row_of_its_own(tmp_path: Path) -> None:
    """Begun by hand while the attempt was at work: a run says itself whose it is."""
    attempt = at_work(tmp_path, alive=False, named=True)
    other = write_run(tmp_path, started=NOW)
    assert other.cell == attempt.cell
    assert told(collect(tmp_path).rows) == [("0001", 1, "ok"), ("0002", None, "ok")]


def test_a_run_whose_cell_is_not_in_the_store_is_a_row_of_its_own(tmp_path: Path) -> None:
    at_work(tmp_path / "other", alive=False, named=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "other" / "0001").rename(tmp_path / "runs" / "0001")
    assert told(collect(tmp_path / "runs").rows) == [("0001", 1, "ok")]
    assert collect(tmp_path / "runs").problems == []


@pytest.mark.parametrize("text", ['{"run": "../0001"}', '{"run": "9999"}', "{", "[]", '{"run": 7}'])
def test_what_a_process_told_leads_nowhere_else(tmp_path: Path, text: str) -> None:
    store = tmp_path / "runs"
    attempt = at_work(store, alive=False, named=False)
    path = cell_folder(store, attempt.cell) / "attempt-0001.told.json"
    path.write_text(text)
    # The run says whose it is all the same.
    assert told(collect(store, ["1"]).rows) == [("0001", 1, "failed")]
    assert [(row.run, row.state) for row in collect(store).rows] == [("0001", "failed")]
    path.unlink()
    os.mkfifo(path)
    assert [row.run for row in collect(store).rows] == ["0001"]


# -- what was done again ---------------------------------------------------------------------------------------------


def test_a_run_that_another_has_replaced_is_no_repeat(tmp_path: Path) -> None:
    cell = a_cell()
    for _ in range(2):
        write_attempted(tmp_path, cell, run=write_run(tmp_path).id)
    assert told(collect(tmp_path).rows) == told(collect(tmp_path, [cell.id]).rows) == [("0002", 2, "ok")]
    # Who asks for it by its number sees it.
    assert told(collect(tmp_path, ["1"]).rows) == [("0001", 1, "ok")]


# -- what nobody has tried -------------------------------------------------------------------------------------------


def a_sweep(store: Path, name: str, cells: list[Cell], **request: Any) -> None:
    write_sweep(
        store,
        SweepRecord(name=name, created=STARTED, cells=tuple(cell.id for cell in cells), steps=5, request=request),
    )


def test_planned_cells_are_rows_without_their_sweep_being_named(tmp_path: Path) -> None:
    store = make_store(tmp_path, 1, sweep="grid", steps=6)
    planned, of_no_sweep = a_cell(sequence_tokens=64), a_cell(sequence_tokens=128)
    for cell in (planned, of_no_sweep):
        write_cell(store, cell)
    for name in ("more", "again"):
        a_sweep(store, name, [planned])
    rows = collect(store).rows
    assert told(rows) == [("0001", 1, "ok"), (None, None, "planned")]
    assert (rows[1].cell, rows[1].source) == (planned.id, "predicted")


def test_cells_that_a_sweep_leaves_out_say_why(tmp_path: Path) -> None:
    cells = [a_cell(sequence_tokens=64 * number) for number in (1, 2)]
    for cell in cells:
        write_cell(tmp_path, cell)
    a_sweep(tmp_path, "grid", cells, skipped={cells[0].id: "it does not fit"})
    for names in ([], ["grid"]):
        rows = collect(tmp_path, names).rows
        assert [(row.state, row.reason) for row in rows] == [("skipped", "it does not fit"), ("planned", None)]
    # What one sweep leaves out another may ask for.
    a_sweep(tmp_path, "other", cells[:1])
    assert [row.state for row in collect(tmp_path).rows] == ["planned", "planned"]


def test_a_damaged_sweep_is_a_problem(tmp_path: Path) -> None:
    store = make_store(tmp_path, 1, sweep="grid", steps=6)
    (store / "sweeps" / "grid.json").write_text("{")
    found = collect(store)
    assert told(found.rows) == [("0001", 1, "ok")]
    assert [problem.path.name for problem in found.problems] == ["grid.json"]


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_the_batch_that_was_tried_is_shown(tmp_path: Path) -> None:
    """Not the one that was foreseen, and the tokens are of the same batch."""
    cell = a_cell(batch_sequences="auto", micro_batch_sequences="auto")
    write_attempted(tmp_path, cell, "oom", batch_sequences=64, micro_batch_sequences=32)
    row = collect(tmp_path).rows[0]
    assert (row.batch_sequences, row.micro_batch_sequences, row.batch_tokens) == (64, 32, 64 * 1024)
    untried = a_cell(a_record(precision="fp32"), batch_sequences="auto", micro_batch_sequences="auto")
    write_cell(tmp_path, untried)
    a_sweep(tmp_path, "grid", [untried])
    row = collect(tmp_path).rows[1]
    assert (row.batch_sequences, row.micro_batch_sequences, row.batch_tokens) == (16, 8, 16 * 1024)
