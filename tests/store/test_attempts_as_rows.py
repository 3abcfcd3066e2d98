"""One row for each attempt, whatever became of its process, and none for what has been done again."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flopwise.store.cells import Attempt, Cell, SweepRecord
from flopwise.store.collecting import collect
from flopwise.store.results import Result
from flopwise.store.runs import LOCK, read_record, write_record
from flopwise.store.sweeps import GONE, cell_folder, write_cell, write_sweep
from tests.support.run_stores import STARTED, a_cell, a_record, make_store, write_attempted, write_run

NOW = datetime.now(tz=UTC).isoformat(timespec="seconds")


def told(rows: list[Result]) -> list[tuple[str | None, int | None, str]]:
    return [(row.run, row.attempt, row.state) for row in rows]


def at_work(store: Path, *, alive: bool, log: str | None = "run {run} in a folder\n", **changes: Any) -> Attempt:
    """An attempt that has not named its run, which it names in its log."""
    record = write_run(store, started=NOW, **changes)
    pid = os.getpid() if alive else 2**22 + 7
    host = os.uname().nodename
    attempt = write_attempted(store, a_cell(record), "running", started=NOW, host=host, pid=pid)
    if log is not None:
        path = cell_folder(store, attempt.cell) / f"attempt-{attempt.number:04d}.log"
        path.write_text(f"words\n{log.format(run=record.id)}run without a number\n")
    return attempt


def as_running(store: Path, run: str) -> None:
    write_record(store / run, replace(read_record(store / run), state="running", measurement=None))


WAYS = pytest.mark.parametrize("log", ["run {run} in a folder\n", None], ids=["by its log", "by its cell and time"])


@WAYS
def test_an_attempt_at_work_is_one_row(tmp_path: Path, log: str | None) -> None:
    at_work(tmp_path, alive=True, log=log)
    as_running(tmp_path, "0001")
    assert told(collect(tmp_path).rows) == [("0001", 1, "running")]
    assert told(collect(tmp_path, ["1"]).rows) == [("0001", 1, "running")]
    assert told(collect(tmp_path, [str(a_cell().id)]).rows) == [("0001", 1, "running")]


@WAYS
def test_an_attempt_whose_sweep_was_killed_is_one_row(tmp_path: Path, log: str | None) -> None:
    at_work(tmp_path, alive=False, log=log)
    as_running(tmp_path, "0001")
    (tmp_path / "0001" / LOCK).touch()
    rows = collect(tmp_path).rows
    assert told(rows) == [("0001", 1, "failed")]
    assert rows[0].reason == GONE


@WAYS
@pytest.mark.parametrize("alive", [True, False], ids=["at work", "gone"])
def test_a_run_that_was_done_before_its_attempt_said_so(tmp_path: Path, log: str | None, alive: bool) -> None:
    at_work(tmp_path, alive=alive, log=log)
    rows = collect(tmp_path).rows
    assert told(rows) == [("0001", 1, "ok")]
    assert rows[0].step_s is not None
    assert rows[0].reason is None


def test_a_run_of_somebody_else_is_not_an_attempts(tmp_path: Path) -> None:
    """Begun long after the attempt last gave a sign of itself, or named by another one."""
    attempt = at_work(tmp_path, alive=False, log=None)
    path = cell_folder(tmp_path, attempt.cell) / "attempt-0001.json"
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))
    whole = json.loads(path.read_text()) | {"started": datetime.fromtimestamp(long_ago, tz=UTC).isoformat()}
    path.write_text(json.dumps(whole))
    os.utime(path, (long_ago, long_ago))
    assert told(collect(tmp_path).rows) == [("0001", None, "ok"), (None, 1, "failed")]


def test_a_run_is_claimed_once(tmp_path: Path) -> None:
    at_work(tmp_path, alive=False, log=None)
    write_attempted(tmp_path, a_cell(), run="0001", repeat=2)
    assert told(collect(tmp_path).rows) == [("0001", 2, "ok"), (None, 1, "failed")]


def test_a_log_leads_nowhere_else(tmp_path: Path) -> None:
    store = tmp_path / "runs"
    at_work(store, alive=False, log="run ../0001 x\nrun 9999 gone\nrun {run} here\n")
    assert told(collect(store).rows) == [("0001", 1, "ok")]
    log = cell_folder(store, a_cell().id) / "attempt-0001.log"
    log.unlink()
    os.mkfifo(log)
    assert told(collect(store).rows) == [("0001", 1, "ok")]


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
