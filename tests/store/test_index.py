"""The index of a store: the same rows with it and without, whatever happened to the files or to the index."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.cli import catalogue
from flopwise.records.profile import Profile
from flopwise.store import index
from flopwise.store.index import (
    INDEX,
    Indexed,
    indexed,
    indexed_runs,
    last_step,
    process_is_gone,
    read_profile,
    run_names,
)
from flopwise.store.results import FIELDS, result_of_run
from flopwise.store.runs import LOCK, PROFILE, RECORD, STEPS, RunLock, read_record, write_record
from flopwise.store.sweeps import read_sweep, write_cell, write_sweep
from tests.cli.test_cli_fuzz import answered
from tests.support.listing import list_runs
from tests.support.run_stores import a_cell, a_profile, make_store, write_attempted, write_run


@pytest.fixture(autouse=True)
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the store is."""
    monkeypatch.setattr(index, "WORTH_WRITING_BYTES", 1)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "runs", 3, profiled=True)


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose record is read from here on."""
    seen: list[str] = []

    def reading(folder: Path) -> object:
        seen.append(folder.name)
        return read_record(folder)

    monkeypatch.setattr(index, "read_record", reading)
    return seen


def first_judge(profile: Profile) -> str | None:
    return f"by {profile.get('power_w'):.0f} W"


def second_judge(profile: Profile) -> str | None:
    return profile.name


def rows(store: Path, **options: object) -> list[tuple[object, ...]]:
    return [run.values for run in indexed_runs(store, **options)]  # type: ignore[arg-type]


def test_rows_from_the_index_equal_those_from_the_records(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [result_of_run(read_record(store / name), read_profile(store / name)) for name in run_names(store)]
    fresh = indexed_runs(store)
    seen = reads(monkeypatch)
    kept = indexed_runs(store)
    assert [run.result for run in fresh] == [run.result for run in kept] == expected
    assert fresh == kept
    assert seen == []
    assert kept[0].get("power_w") == 610.0
    assert (kept[0].run_state, kept[0].task, kept[0].steps_done, kept[0].steps_asked) == ("done", "language", 40, 40)


def test_what_changed_is_read_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexed_runs(store)
    write_record(store / "0002", replace(read_record(store / "0002"), state="failed", reason="disk full"))
    (store / "0003" / PROFILE).unlink()
    new = write_run(store)
    seen = reads(monkeypatch)
    found = indexed_runs(store)
    assert seen == ["0002", "0003", new.id]
    assert [run.get("state") for run in found] == ["ok", "failed", "ok", "ok"]
    assert found[2].get("power_w") is None
    seen.clear()
    assert indexed_runs(store) == found
    assert seen == []


def test_a_rewritten_record_of_the_same_size_and_time_is_seen(store: Path) -> None:
    indexed_runs(store)
    path = store / "0001" / RECORD
    before = path.stat()
    write_record(store / "0001", replace(read_record(store / "0001"), started="2027-01-01T00:00:00+00:00"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert indexed_runs(store)[0].get("started") == "2027-01-01T00:00:00+00:00"


def test_running_runs_never_come_from_the_index(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(store / "0002", replace(read_record(store / "0002"), state="running", measurement=None))
    indexed_runs(store)
    seen = reads(monkeypatch)
    assert indexed_runs(store)[1].run_state == "running"
    assert seen == ["0002"]
    assert set(json.loads((store / INDEX).read_text())["runs"]) == {"0001", "0003"}


def test_runs_that_are_gone_are_gone(store: Path) -> None:
    indexed_runs(store)
    for path in (store / "0001").iterdir():
        path.unlink()
    (store / "0001").rmdir()
    assert [run.name for run in indexed_runs(store)] == ["0002", "0003"]


def test_each_judge_has_its_own_rows(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [run.get("bound") for run in indexed_runs(store, judge=first_judge)] == ["by 610 W"] * 3
    assert [run.get("bound") for run in indexed_runs(store, judge=second_judge)] == ["run 0001"] * 3
    assert [run.get("bound") for run in indexed_runs(store)] == [None] * 3
    # One without a name of its own is never taken for another.
    assert [run.get("bound") for run in indexed_runs(store, judge=lambda _: "a")] == ["a"] * 3
    assert [run.get("bound") for run in indexed_runs(store, judge=lambda _: "b")] == ["b"] * 3
    indexed_runs(store, judge=first_judge)
    seen = reads(monkeypatch)
    indexed_runs(store, judge=first_judge)
    # A listing that needs no profile takes what is there.
    indexed_runs(store, profiles=False)
    assert seen == []


def test_a_listing_without_profiles_does_not_hide_them(store: Path) -> None:
    assert [run.get("power_w") for run in indexed_runs(store, profiles=False)] == [None] * 3
    assert [run.get("power_w") for run in indexed_runs(store)] == [610.0] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda _: "",
        lambda text: text[: len(text) // 2],
        lambda _: "[]",
        lambda text: text.replace('"layout":1', '"layout":2'),
        lambda text: text.replace('"maker":"', '"maker":"9.'),
        lambda text: text.replace('"cell","run"', '"run","cell"'),
        lambda text: text.replace('"ok"', "17"),
        lambda text: text.replace('"ok"', "[[]]"),
        lambda _: "[" * 100_000,
    ],
    ids=["empty", "half", "a list", "layout", "maker", "fields", "a number", "lists", "deep"],
)
def test_an_index_that_is_no_good_changes_nothing(store: Path, change: object) -> None:
    expected = indexed_runs(store)
    path = store / INDEX
    assert callable(change)
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    assert indexed_runs(store) == expected
    # It is made anew.
    assert json.loads(path.read_text())["fields"] == list(FIELDS)


def test_an_index_that_leads_elsewhere_is_left_alone(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    (store / INDEX).symlink_to(target)
    assert len(indexed_runs(store)) == 3
    assert target.read_text() == "mine"
    (store / INDEX).unlink()
    os.mkfifo(store / INDEX)
    assert len(indexed_runs(store)) == 3
    (store / INDEX).unlink()
    (store / INDEX).mkdir()
    assert len(indexed_runs(store)) == 3


def test_a_store_that_cannot_be_written_to(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, text: str) -> None:
        raise FlopwiseError(f"cannot write {path}", why=text[:1])

    monkeypatch.setattr(index, "write_whole", refused)
    assert len(indexed_runs(store)) == 3
    assert not (store / INDEX).exists()


def test_small_stores_have_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "WORTH_WRITING_BYTES", 2**18)
    store = make_store(tmp_path, 3)
    indexed_runs(store)
    assert not (store / INDEX).exists()


def test_damaged_and_half_written_runs(store: Path) -> None:
    (store / "0001" / RECORD).write_text('{"id": ')
    (store / "0002" / RECORD).unlink()
    (store / "0003" / PROFILE).write_text("{")
    for _ in range(2):
        found = indexed_runs(store)
        assert [run.run_state for run in found] == ["unreadable", "unreadable", "done"]
        assert [run.problem for run in found[:2]] == [each.problem for each in list_runs(store)[:2]]
        assert found[0].result.reason == found[0].problem
        assert found[2].get("power_w") is None
        assert found[:1] == [indexed(list_runs(store)[0])]


def test_losses_that_are_no_numbers(tmp_path: Path) -> None:
    write_run(tmp_path, last_loss=float("nan"))
    write_run(tmp_path, last_loss=float("-inf"))
    for _ in range(2):
        first, second = (run.get("last_loss") for run in indexed_runs(tmp_path))
        assert isnan(first)
        assert second == float("-inf")
    assert (tmp_path / INDEX).exists()


def test_some_runs_alone(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "FEW_RUNS", 0)
    whole = indexed_runs(store)
    seen = reads(monkeypatch)
    assert indexed_runs(store, ["0003", "0001", "0003"]) == [whole[0], whole[2]]
    assert seen == []
    write_record(store / "0001", replace(read_record(store / "0001"), reason="x"))
    indexed_runs(store, ["0001"])
    assert set(json.loads((store / INDEX).read_text())["runs"]) == {"0001", "0002", "0003"}


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
    found: list[Indexed] = indexed_runs(store)
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


def test_runs_are_listed_the_same_with_an_index(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for form in ("table", "md", "csv", "json"):
        (store / INDEX).unlink(missing_ok=True)
        words = ["ls", "runs", "--store", str(store), "-o", form]
        first = answered(words)
        assert (store / INDEX).exists()
        assert answered(words) == first
    monkeypatch.setattr(catalogue, "MOST_STYLED", 1)
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
    entry = json.loads(answered([*words, "-o", "json"])[1])[0]
    assert (entry["cells"], entry["ok"], entry["oom"], entry["planned"], entry["repeats"]) == (5, 2, 1, 2, 2)
    assert answered([*words, "-o", "csv"])[1].startswith("sweep,cells,planned,running,ok,")
    (store / "sweeps" / "broken.json").write_text("{")
    code, out, err = answered(words)
    assert (code, "broken" in err, "nightly" in out) == (0, True, True)
