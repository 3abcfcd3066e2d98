"""From names to rows: runs, ranges, sweeps and cells, whatever state they or their files are in."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.profile.explain.verdicts import first_verdict
from flopwise.store.cells import SweepRecord
from flopwise.store.collecting import collect
from flopwise.store.results import Result, result_of_run
from flopwise.store.runs import LOCK, RECORD, read_record, to_text, write_record
from flopwise.store.sweeps import cell_folder, write_cell, write_sweep
from tests.support.run_stores import STARTED, a_cell, a_profile, a_record, make_store, write_attempted, write_run


def told(rows: list[Result]) -> list[tuple[str | None, str]]:
    return [(row.run, row.state) for row in rows]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve runs and no sweep."""
    return make_store(tmp_path_factory.mktemp("plain"), 12, steps=6)


# -- runs ------------------------------------------------------------------------------------------------------------


def test_all_runs(plain: Path) -> None:
    found = collect(plain)
    assert found.rows == [result_of_run(read_record(plain / f"{number:04d}")) for number in range(1, 13)]
    assert found.problems == []
    assert collect(plain / "nowhere").rows == []


@pytest.mark.parametrize(
    ("names", "runs"),
    [
        (["3"], ["0003"]),
        (["0003"], ["0003"]),
        (["last"], ["0012"]),
        (["3-5"], ["0003", "0004", "0005"]),
        (["0011-99"], ["0011", "0012"]),
        (["5", "2", "4-6", "last"], ["0005", "0002", "0004", "0006", "0012"]),
    ],
    ids=["number", "zeros", "last", "range", "open range", "several, each once"],
)
def test_runs_by_name(plain: Path, names: list[str], runs: list[str]) -> None:
    assert [row.run for row in collect(plain, names).rows] == runs


def test_runs_by_their_folder(plain: Path, tmp_path: Path) -> None:
    elsewhere = make_store(tmp_path / "other", 1, steps=6, seed=9)
    rows = collect(plain, [f"{plain}/0002", f"{elsewhere}/0001", "1"]).rows
    assert [row.run for row in rows] == ["0002", "0001", "0001"]
    assert rows[1].step_s != rows[2].step_s


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("13", "there is no run 13"),
        ("20-30", "there are no runs 20 to 30"),
        ("5-3", "there are no runs 5 to 3"),
        ("nightly", "no run, sweep or cell is called 'nightly'"),
        ("laste", "did you mean last"),
        ("0123456789ab", "no run, sweep or cell"),
        ("./nowhere", "is not the folder of a run"),
        ("..", "is not the folder of a run"),
        ("", "no run, sweep or cell"),
    ],
)
def test_names_of_nothing(plain: Path, name: str, words: str) -> None:
    with pytest.raises(FlopwiseError) as caught:
        collect(plain, [name])
    assert words in str(caught.value)
    assert caught.value.hint


def test_nothing_is_offered_of_a_store_without_runs(tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError) as caught:
        collect(tmp_path, ["nightly"])
    assert "last" not in str(caught.value)
    assert f"there are none in {tmp_path}" in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.text(max_size=12) | st.from_regex(r"[0-9a-f./-]{1,14}", fullmatch=True))
def test_any_word_is_answered(plain: Path, name: str) -> None:
    try:
        found = collect(plain, [name])
    except FlopwiseError:
        return
    assert found.rows


def test_runs_that_cannot_be_read_stay_rows(tmp_path: Path) -> None:
    store = make_store(tmp_path, 3, steps=6)
    (store / "0001" / RECORD).write_text("{")
    (store / "0002" / RECORD).unlink()
    found = collect(store)
    assert told(found.rows) == [("0001", "unreadable"), ("0002", "unreadable"), ("0003", "ok")]
    assert "damaged" in (found.rows[0].reason or "")
    assert [problem.path for problem in found.problems] == [store / "0001", store / "0002"]
    assert collect(store, ["1"]).rows == found.rows[:1]


def test_a_run_that_was_killed_is_interrupted(tmp_path: Path) -> None:
    store = make_store(tmp_path, 2, steps=6)
    for name in ("0001", "0002"):
        write_record(store / name, replace(read_record(store / name), state="running", measurement=None))
    (store / "0002" / LOCK).touch()
    rows = collect(store).rows
    assert told(rows) == [("0001", "running"), ("0002", "interrupted")]
    assert "killed" in (rows[1].reason or "")


def test_profiles_tell_power_and_bound(tmp_path: Path) -> None:
    row = collect(make_store(tmp_path, 1, profiled=True)).rows[0]
    assert (row.power_w, row.clock_hz, row.bound) == (610.0, 1.7e9, first_verdict(a_profile()))
    assert row.energy_j_per_token == pytest.approx(305.0 / (16 * 512))


# -- sweeps ----------------------------------------------------------------------------------------------------------


def test_a_sweep_has_its_cells_in_their_order(tmp_path: Path) -> None:
    store = make_store(tmp_path, 3, sweep="nightly", repeats=2, steps=6)
    other = write_run(store)
    rows = collect(store, ["nightly"]).rows
    assert [(row.run, row.repeat, row.attempt) for row in rows] == [
        *(("0001", 1, 1), ("0002", 2, 2), ("0003", 1, 1), ("0004", 2, 2), ("0005", 1, 1), ("0006", 2, 2)),
    ]
    assert len({row.cell for row in rows}) == 3
    assert rows[0].predicted_fits is True
    assert collect(store, ["nightly"]).sweeps[0].repeats == 2
    # As runs, or all together, they are the same rows.
    assert collect(store, ["1-6"]).rows == rows
    everything = collect(store).rows
    assert everything[:-1] == rows
    assert (everything[-1].run, everything[-1].attempt) == (other.id, None)
    cell = rows[2].cell
    assert cell is not None
    assert collect(store, [cell]).rows == rows[2:4]
    assert collect(store, ["nightly", cell, "1"]).rows == rows


def test_cells_in_every_state(tmp_path: Path) -> None:
    store = tmp_path
    cells = [a_cell(sequence_tokens=512 * number) for number in range(1, 7)]
    run = write_run(store)
    write_attempted(store, cells[0], run=run.id)
    write_attempted(store, cells[1], "oom", reason="needs 90 GiB")
    write_attempted(store, cells[2], "timeout")
    write_attempted(store, cells[3], "failed", ended=STARTED, reason="no such file")
    write_attempted(store, cells[4], "skipped")
    write_cell(store, cells[5])
    write_sweep(
        store, SweepRecord(name="all", created=STARTED, cells=tuple(cell.id for cell in reversed(cells)), steps=20)
    )
    rows = collect(store, ["all"]).rows
    assert [row.state for row in rows] == ["planned", "skipped", "failed", "timeout", "oom", "ok"]
    planned, oom = rows[0], rows[4]
    assert (planned.source, planned.predicted_tokens_per_s, planned.run) == ("predicted", 33_437.0, None)
    assert (oom.reason, oom.sequence_tokens, oom.model) == ("needs 90 GiB", 1024, "gpt2")
    everything = collect(store).rows
    assert sorted(row.state for row in everything) == ["failed", "ok", "oom", "planned", "skipped", "timeout"]
    assert (everything[0].run, everything[-1]) == (run.id, planned)


def test_attempts_that_looked_for_the_batch(tmp_path: Path) -> None:
    cell = a_cell()
    runs = [write_run(tmp_path) for _ in range(3)]
    write_attempted(tmp_path, cell, run=runs[0].id, repeat=0, micro_batch_sequences=8)
    write_attempted(tmp_path, cell, "oom", run=runs[1].id, repeat=0, micro_batch_sequences=16)
    assert [row.state for row in collect(tmp_path, [cell.id]).rows] == ["oom"]
    write_attempted(tmp_path, cell, run=runs[2].id)
    assert told(collect(tmp_path, [cell.id]).rows) == [("0003", "ok")]
    assert told(collect(tmp_path).rows) == [("0003", "ok")]
    # By its number each of them is there.
    assert [(row.run, row.repeat) for row in collect(tmp_path, ["1"]).rows] == [("0001", 0)]


def test_an_attempt_that_was_made_again(tmp_path: Path) -> None:
    cell = a_cell()
    write_attempted(tmp_path, cell, "failed", ended=STARTED)
    run = write_run(tmp_path)
    write_attempted(tmp_path, cell, run=run.id)
    assert told(collect(tmp_path, [cell.id]).rows) == told(collect(tmp_path).rows) == [("0001", "ok")]


def test_a_run_folder_that_vanished(tmp_path: Path) -> None:
    store = make_store(tmp_path, 2, sweep="s", steps=6)
    shutil.rmtree(store / "0001")
    rows = collect(store, ["s"]).rows
    assert told(rows) == [("0001", "unreadable"), ("0002", "ok")]
    assert rows[0].reason == "its run 0001 is no longer in the store"
    assert rows[0].step_s is None
    assert [row.run for row in collect(store).rows] == ["0002", "0001"]


def test_a_cells_run_that_cannot_be_read(tmp_path: Path) -> None:
    store = make_store(tmp_path, 2, sweep="s", steps=6)
    (store / "0001" / RECORD).write_text("{")
    died = write_run(store)
    (store / died.id / RECORD).unlink()
    cell = a_cell(sequence_tokens=64)
    write_attempted(store, cell, "oom", run=died.id, reason="at the first step")
    rows = collect(store).rows
    assert told(rows) == [("0001", "unreadable"), ("0002", "ok"), ("0003", "oom")]
    assert (rows[0].cell, rows[2].reason) == (a_cell(a_record(sequence_tokens=512)).id, "at the first step")
    assert len(collect(store).problems) == 2


def test_damaged_cells_and_attempts_are_problems(tmp_path: Path) -> None:
    store = make_store(tmp_path, 2, sweep="s", steps=6)
    first, second = (row.cell for row in collect(store, ["s"]).rows)
    assert first is not None
    assert second is not None
    (cell_folder(store, first) / "cell.json").write_text("{")
    (cell_folder(store, second) / "attempt-0001.json").write_text("{")
    found = collect(store, ["s"])
    assert [row.state for row in found.rows] == ["unreadable", "planned"]
    assert len(found.problems) == 2
    # The runs are there all the same.
    assert [row.run for row in collect(store).rows] == ["0001", "0002"]


def test_nothing_leads_out_of_the_store(tmp_path: Path) -> None:
    make_store(tmp_path / "other", 1, steps=6)
    store = tmp_path / "runs"
    write_attempted(store, a_cell(), run="../other/0001")
    rows = collect(store).rows
    assert rows[0].step_s is None
    assert "no longer in the store" in (rows[0].reason or "")


def test_numbers_are_runs_before_they_are_sweeps(tmp_path: Path) -> None:
    """No sweep may be called so any more; a store may have such ones."""
    store = make_store(tmp_path, 2, sweep="s", steps=6)
    for name in ("2", "1-2"):
        record = SweepRecord(name=name, created=STARTED, cells=(), steps=1)
        (store / "sweeps" / f"{name}.json").write_text(to_text(record))
    assert [row.run for row in collect(store, ["2"]).rows] == ["0002"]
    assert collect(store, ["1-2"]).rows == []
    assert collect(store, ["1-2"]).sweeps[0].name == "1-2"


def test_a_number_that_is_no_folder_is_unreadable(tmp_path: Path) -> None:
    make_store(tmp_path, runs=1)
    (tmp_path / "0098").write_text("not a run")
    (row,) = collect(tmp_path, ["98"]).rows
    assert (row.run, row.state) == ("0098", "unreadable")
