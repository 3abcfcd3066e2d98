"""`flopwise ls runs` and `flopwise show RUN` as a user types them, over stores in any state."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from flopwise.store.runs import VARIABLE, StepLog, new_run, write_record
from tests.cli.test_cli_fuzz import answered
from tests.report.test_training_report import BLOCK, a_record, a_step


@pytest.fixture
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To work in, on a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def store(empty_folder: None) -> Path:
    """A run that is done, one that runs, a half-written one, a damaged one, and something that is none."""
    del empty_folder
    folder = Path("runs")
    done, running, empty, damaged = (new_run(folder) for _ in range(4))
    write_record(done, a_record(id="0001"))
    write_record(running, a_record(id="0002", state="running", measurement=None, metrics={}, steps_done=0, ended=None))
    for run, count in ((done, 20), (running, 3)):
        with StepLog(run) as log:
            for number in range(1, count + 1):
                log.append(a_step(number, loss=10.0 / number))
    assert not any(empty.iterdir())
    (damaged / "record.json").write_text('{"id": "0004", "sta')
    (folder / "notes").mkdir()
    return folder


def test_runs_are_listed_whatever_state_they_are_in(store: Path) -> None:
    code, out, err = answered(["ls", "runs"])
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == [*("run", "state", "model", "task", "steps", "loss", "tok/s", "MFU", "error", "started")]
    assert [line.split()[:2] for line in lines[1:]] == [
        *(["0001", "done"], ["0002", "running"], ["0003", "unreadable"], ["0004", "unreadable"]),
    ]
    assert lines[2].split()[4:6] == ["3/20", "3.333"]
    assert f"note: 0003: {store / '0003'} holds no record.json" in err
    assert "note: 0004: " in err
    assert "damaged" in err


def test_runs_in_other_forms(store: Path) -> None:
    entries = json.loads(answered(["ls", "runs", "-o", "json"])[1])["rows"]
    assert [entry["state"] for entry in entries] == ["done", "running", "unreadable", "unreadable"]
    assert entries[0]["prediction_error"] == pytest.approx(11_300 / 11_230 - 1)
    assert entries[0]["folder"] == str(store / "0001")
    assert "damaged" in entries[3]["problem"]
    rows = list(csv.DictReader(io.StringIO(answered(["ls", "runs", "-o", "csv"])[1])))
    assert [row["run"] for row in rows] == ["0001", "0002", "0003", "0004"]
    assert set(rows[0]) == set(entries[0])
    table = answered(["ls", "runs", "-o", "md"])[1].splitlines()
    assert len(table) == 6
    assert len({cell_len(line) for line in table}) == 1


@pytest.mark.usefixtures("empty_folder")
def test_a_store_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = '{\n  "schema": "flopwise.run-entry-list/1",\n  "rows": []\n}\n'
    for words, out in (([], ""), (["-o", "json"], none)):
        code, found, err = answered(["ls", "runs", *words])
        assert (code, found) == (0, out)
        assert "there are no runs in runs" in err
    assert answered(["ls", "runs", "-o", "csv"])[1].startswith("run,state,model,")
    assert answered(["ls", "runs", "-o", "md"])[1].count("\n") == 2
    other = tmp_path / "other"
    write_record(new_run(other), a_record())
    assert "0001" in answered(["ls", "runs", "--store", str(other)])[1]
    monkeypatch.setenv(VARIABLE, str(other))
    assert "0001" in answered(["ls", "runs"])[1]
    (tmp_path / "file").write_text("")
    code, _, err = answered(["ls", "runs", "--store", str(tmp_path / "file")])
    assert (code, "cannot be listed" in err) == (2, True)


@pytest.mark.parametrize("name", ["0001", "1", "runs/0001", "./runs/0001"])
def test_a_run_is_shown_by_number_or_folder(store: Path, name: str) -> None:
    del store
    code, out, err = answered(["show", name])
    assert (code, err) == (0, "")
    assert out.startswith("run 0001 · ")
    assert "10.00 → 0.5000  █▄" in out
    assert out.rstrip("\n").endswith(BLOCK)


def test_the_last_run_and_other_forms(store: Path) -> None:
    (store / "0004" / "record.json").unlink()
    assert answered(["show", "last"])[1].startswith("run 0002 · language")
    assert json.loads(answered(["show", "1", "-o", "json"])[1])["id"] == "0001"
    assert answered(["show", "1", "-o", "table"])[1] == answered(["show", "1"])[1]
    steps = store / "0002" / "steps.jsonl"
    steps.write_text("{}\n" + steps.read_text())
    code, out, err = answered(["show", "2"])
    assert (code, "line 1 is damaged" in err) == (0, True)
    assert out.startswith("run 0002")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("show 3", "holds no record.json"),
        ("show 4", "is damaged"),
        ("show 9", "there is no run 9 in runs"),
        ("show 1 -o toml", "--output cannot be 'toml'"),
        ("show 1 -w x.json", "--write beside the run 0001"),
        ("show gpt2 --store runs", "--store beside `flopwise show gpt2`"),
        ("show gpt2 -o table", "--output cannot be 'table'"),
        ("ls models --store runs", "--store beside `flopwise ls models`"),
        ("ls run", "flopwise ls cannot be 'run'"),
        ("show nothing --store runs", "no run is called 'nothing'"),
        ("show runs/0003", "error: "),
    ],
)
def test_mistakes_with_runs(store: Path, line: str, words: str) -> None:
    del store
    code, out, err = answered(line.split())
    assert (code, out) == (2, "")
    assert words in err
    assert "\nhint: " in err


def test_the_catalogue_comes_first(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del store
    assert answered(["show", "gpt2"])[1].startswith("architecture = ")
    from flopwise.catalog import load as catalog

    looked: Callable[[], tuple[str, ...]] = catalog.model_names
    monkeypatch.setattr(catalog, "model_names", lambda: (*looked(), "last"))
    code, _, err = answered(["show", "last"])
    assert "run 0002" not in err
    assert code == 2
