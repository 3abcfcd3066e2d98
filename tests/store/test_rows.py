"""Rows of runs: what a run wrote at its end is what its record says, whatever happened to its files since."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.cli import output
from flopwise.store import rows
from flopwise.store.results import result_of_run
from flopwise.store.rows import RunRow, read_profile, run_rows, write_row
from flopwise.store.runs import (
    LOCK,
    PROFILE,
    RECORD,
    ROW,
    STEPS,
    RunLock,
    last_step,
    process_is_gone,
    read_record,
    run_names,
    write_record,
)
from flopwise.store.sweeps import read_sweep, write_cell, write_sweep
from tests.cli.test_cli_fuzz import answered
from tests.support.listing import list_runs
from tests.support.run_stores import a_cell, a_profile, make_store, write_attempted, write_run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "runs", 3, profiled=True)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose record is read from here on."""
    seen: list[str] = []

    def reading(folder: Path) -> object:
        seen.append(folder.name)
        return read_record(folder)

    monkeypatch.setattr(rows, "read_record", reading)
    return seen


def files(store: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def test_a_row_is_what_the_record_says(store: Path, read: list[str]) -> None:
    expected = [result_of_run(read_record(store / name), read_profile(store / name)) for name in run_names(store)]
    found = run_rows(store)
    assert [run.result for run in found] == expected
    assert read == []
    assert (found[0].result.power_w, found[0].result.bound) == (610.0, read_record(store / "0001").bound)
    assert (found[0].state, found[0].task, found[0].steps_done, found[0].steps) == ("done", "language", 40, 40)
    # Without the rows the same is read from the records.
    for name in run_names(store):
        (store / name / ROW).unlink()
    assert run_rows(store) == found
    assert read == run_names(store)


def test_reading_writes_nothing(store: Path) -> None:
    make_store(store, 1, sweep="grid", steps=6)
    before = files(store)
    for words in (["ls", "runs"], ["report"], ["report", "grid"], ["show", "1"]):
        assert answered([*words, "--store", str(store)])[0] == 0
    assert files(store) == before


def test_a_record_that_is_written_again_has_no_row_until_it_ends(store: Path, read: list[str]) -> None:
    write_record(store / "0002", replace(read_record(store / "0002"), state="running", measurement=None))
    assert not (store / "0002" / ROW).exists()
    assert [run.state for run in run_rows(store)] == ["done", "running", "done"]
    assert read == ["0002"]
    ended = replace(read_record(store / "0002"), state="failed", reason="disk full")
    write_record(store / "0002", ended)
    write_row(store / "0002", ended)
    read.clear()
    assert [run.result.state for run in run_rows(store)] == ["ok", "failed", "ok"]
    assert read == []


def test_a_row_older_than_its_record_does_not_count(store: Path) -> None:
    """Somebody has put another record into its place."""
    path = store / "0001" / RECORD
    other = path.read_text().replace("2026-11-15T12:00:00", "2027-01-01T00:00:00")
    path.write_text(other)
    ahead = (store / "0001" / ROW).stat().st_mtime_ns + 10**9
    os.utime(path, ns=(ahead, ahead))
    assert run_rows(store)[0].result.started == "2027-01-01T00:00:00+00:00"


def test_runs_that_are_gone_are_gone(store: Path) -> None:
    for path in (store / "0001").iterdir():
        path.unlink()
    (store / "0001").rmdir()
    assert [run.name for run in run_rows(store)] == ["0002", "0003"]


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_text(path.read_text()[:200]),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text(path.read_text().replace('"ok"', "17")),
        lambda path: path.write_text(path.read_text().replace('"done"', '"asleep"')),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.unlink(),
        _pipe,
        _folder,
    ],
    ids=["empty", "half", "a list", "a number", "a state", "deep", "none", "a pipe", "a folder"],
)
def test_a_row_that_is_no_good_changes_nothing(store: Path, change: Callable[[Path], object]) -> None:
    expected = run_rows(store)
    change(store / "0002" / ROW)
    assert run_rows(store) == expected
    # The next end of the run writes it anew, or leaves what is not its own.
    write_record(store / "0002", read_record(store / "0002"))
    assert run_rows(store) == expected


def test_damaged_and_half_written_runs(store: Path) -> None:
    later = (store / "0001" / ROW).stat().st_mtime_ns + 10**9
    (store / "0001" / RECORD).write_text('{"id": ')
    os.utime(store / "0001" / RECORD, ns=(later, later))
    (store / "0002" / RECORD).unlink()
    (store / "0003" / PROFILE).write_text("{")
    (store / "0003" / ROW).unlink()
    found = run_rows(store)
    assert [run.state for run in found] == ["unreadable", "unreadable", "done"]
    assert [run.problem for run in found[:2]] == [each.problem for each in list_runs(store)[:2]]
    assert found[0].result.reason == found[0].problem
    assert found[2].result.power_w is None


def test_losses_that_are_no_numbers(tmp_path: Path) -> None:
    write_run(tmp_path, last_loss=float("nan"))
    write_run(tmp_path, last_loss=float("-inf"))
    first, second = (run.result.last_loss for run in run_rows(tmp_path))
    assert first is not None and isnan(first)
    assert second == float("-inf")


def test_some_runs_alone(store: Path) -> None:
    whole = run_rows(store)
    assert run_rows(store, ["0003", "0001", "0003"]) == [whole[0], whole[2]]


def test_names_of_runs(tmp_path: Path) -> None:
    for name in ("0002", "0010", "12345", "00003", "notes", "0000", "20261115120000"):
        (tmp_path / name).mkdir()
    assert run_names(tmp_path) == ["0002", "0010", "12345"]
    assert run_names(tmp_path / "nowhere") == []
    (tmp_path / "file").touch()
    with pytest.raises(FlopwiseError, match="cannot be listed"):
        run_names(tmp_path / "file")


def test_a_lock_that_nobody_holds(tmp_path: Path) -> None:
    assert not process_is_gone(tmp_path)
    with RunLock(tmp_path):
        assert not process_is_gone(tmp_path)
    assert process_is_gone(tmp_path)
    # Asking takes nothing away.
    with RunLock(tmp_path):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    (tmp_path / LOCK).touch()
    assert process_is_gone(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refused)
    assert not process_is_gone(tmp_path)


def test_the_last_step(store: Path, tmp_path: Path) -> None:
    found = last_step(store / "0001")
    assert found is not None
    assert found.step == 40
    path = store / "0001" / STEPS
    with path.open("a") as stream:
        stream.write('{"step": 41, "lo')
    assert last_step(store / "0001") == found
    with path.open("a") as stream:
        stream.write("\n")
    with pytest.raises(FlopwiseError, match="last line is damaged"):
        last_step(store / "0001")
    assert last_step(tmp_path / "nowhere") is None
    path.write_text("")
    assert last_step(store / "0001") is None


def test_a_profile_by_itself(tmp_path: Path) -> None:
    assert read_profile(tmp_path) is None
    run = write_run(tmp_path, profile=a_profile(power_w=1.0))
    found = read_profile(tmp_path / run.id)
    assert found is not None
    assert found.get("power_w") == 1.0


def test_a_run_is_known_by_its_folder(store: Path) -> None:
    """A folder that was copied under another number has that number."""
    (store / "0003").rename(store / "0007")
    found: list[RunRow] = run_rows(store)
    assert [run.result.run for run in found] == ["0001", "0002", "0007"]


# -- as it is listed -------------------------------------------------------------------------------------------------


def test_a_run_whose_process_is_gone_is_listed_as_killed(store: Path) -> None:
    for name in ("0001", "0002", "0003"):
        write_record(store / name, replace(read_record(store / name), state="running", measurement=None))
    (store / "0001" / LOCK).touch()
    with RunLock(store / "0002"):
        out = answered(["ls", "runs", "--store", str(store)])[1]
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [
        *(["0001", "killed"], ["0002", "running"], ["0003", "running"]),
    ]
    assert "40/40" in out.splitlines()[1].split()


def test_runs_are_listed_the_same_without_their_rows(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [["ls", "runs", "--store", str(store), "-o", form] for form in ("table", "md", "csv", "json")]
    first = [answered(words) for words in every]
    for name in run_names(store):
        (store / name / ROW).unlink()
    assert [answered(words) for words in every] == first
    monkeypatch.setattr(output, "MOST_STYLED", 1)
    assert answered(["ls", "runs", "--store", str(store)])[1].splitlines()[1].startswith("0001  done")


def test_sweeps_are_listed_with_their_cells_by_state(store: Path) -> None:
    words = ["ls", "sweeps", "--store", str(store)]
    assert "there are no sweeps" in answered(words)[2]
    make_store(store, 2, sweep="nightly", repeats=2, steps=6)
    oom, half, planned = (a_cell(sequence_tokens=length) for length in (64, 128, 256))
    write_attempted(store, oom, "oom")
    write_attempted(store, half, run="0001")
    write_cell(store, planned)
    sweep = read_sweep(store, "nightly")
    write_sweep(store, replace(sweep, cells=(*sweep.cells, oom.id, half.id, planned.id)))
    code, out, _ = answered(words)
    assert code == 0
    assert out.splitlines()[1].startswith("nightly      5  2 planned, 2 ok, 1 oom")
    entry = json.loads(answered([*words, "-o", "json"])[1])["rows"][0]
    assert (entry["cells"], entry["ok"], entry["oom"], entry["planned"], entry["repeats"]) == (5, 2, 1, 2, 2)
    assert answered([*words, "-o", "csv"])[1].startswith("sweep,cells,planned,running,ok,")
    (store / "sweeps" / "broken.json").write_text("{")
    code, out, err = answered(words)
    assert (code, "broken" in err, "nightly" in out) == (0, True, True)
