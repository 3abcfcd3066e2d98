"""`flopwise sweep` as a user types it: what is shown before anything runs, what is written, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from typer.testing import CliRunner
from typer.testing import Result as Answer

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware
from flopwise.cli import app
from flopwise.store.cells import Attempt, CellState, SweepRecord
from flopwise.store.results import FIELDS
from flopwise.store.sweeps import new_attempt, read_attempts, read_cell, read_sweep

RUN = CliRunner()
MPT = ("--model", "mpt-125m,mpt-350m", "--on", "h200", "--seq", "512-2k*2")
ONE = ("--model", "mpt-125m", "--on", "h200", "--batch", "8")
SMALL = (*ONE, "--seq", "512,1k")


def answer(*words: str) -> Answer:
    return RUN.invoke(app, ["sweep", *words])


def out(*words: str) -> str:
    found = answer(*words)
    assert found.exit_code == 0, found.output
    return found.stdout


def error(*words: str) -> FlopwiseError:
    found = answer(*words)
    assert isinstance(found.exception, FlopwiseError), found.output
    return found.exception


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOPWISE_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


# -- before it runs --------------------------------------------------------------------------------------------------


def test_a_dry_run_says_how_many_fit_and_how_long_it_takes(tmp_path: Path) -> None:
    page = out(*MPT, "--dry-run")
    first = page.splitlines()[0]
    assert first.startswith("6 cells · 6 fit · about ")
    assert first.endswith(" min on NVIDIA H200 SXM 141 GB")
    assert page.count("✓ fits") == 6
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_says_what_it_needs() -> None:
    words = ("--model", "mpt-7b,mpt-30b", "--on", "h200", "--seq", "8k", "--batch", "8", "--host-mem", "none")
    page = out(*words, "--dry-run")
    assert page.startswith("2 cells · 1 fits · ")
    assert "✗ needs  214 GiB" in page
    assert "host cap none" in page


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "words",
    [
        (*SMALL, "--dry-run"),
        (*ONE, "--seq", "512", "--host-mem", "none,9GiB", "--device-mem", "40,80GiB", "--predict"),
        ("--model", "mpt-13b,mpt-30b", "--batch-tokens", "2M", "--gpus", "8,16", "--on", "h200,h100", "--predict"),
    ],
    ids=["plain", "caps", "devices"],
)
def test_a_page_keeps_to_the_terminal(columns: int, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for line in out(*words).splitlines():
        assert cell_len(line) <= columns, line


def test_predictions_alone_write_nothing(tmp_path: Path) -> None:
    page = out(
        "--model",
        "mpt-13b,mpt-30b",
        "--seq",
        "2k-16k*2",
        "--batch-tokens",
        "2M",
        "--gpus",
        "8",
        "--on",
        "h200",
        "--predict",
    )
    assert page.startswith("8 cells · 8 fit · on NVIDIA H200")
    assert "about" not in page
    assert list(tmp_path.iterdir()) == []


def test_the_same_cells_have_the_same_ids_whether_predicted_or_planned() -> None:
    ids = [
        [row["cell"] for row in json.loads(out(*SMALL, kind, "-o", "json"))["rows"]]
        for kind in ("--predict", "--dry-run")
    ]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2


def test_rows_for_programs() -> None:
    rows = list(csv.DictReader(io.StringIO(out(*SMALL, "--predict", "-o", "csv"))))
    assert tuple(rows[0]) == FIELDS
    assert [row["sequence_tokens"] for row in rows] == ["512", "1024"]
    assert all(row["state"] == "planned" and row["source"] == "predicted" for row in rows)
    assert all(float(row["predicted_tokens_per_s"]) > 1000 for row in rows)
    records = json.loads(out(*SMALL, "--predict", "-o", "json"))["rows"]
    assert records[0]["predicted_step_s"] == float(rows[0]["predicted_step_s"])
    lines = out(*SMALL, "--predict", "-o", "md").splitlines()
    assert lines[0].startswith("2 cells · 2 fit")
    assert len([line for line in lines if line.startswith("| ")]) == 4


FILE = """
[grid]
model = "mpt-125m"
on = "h200"
seq = "512-2k*2"
batch = 8
[run]
steps = 7
repeat = 2
time-limit = "10m"
profile = false
name = "from-a-file"
[[skip]]
seq = "1k"
reason = "measured last week"
"""


def test_a_file_is_read_and_flags_override_it(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(FILE)
    page = out("sweep.toml", "--dry-run")
    assert page.startswith("3 cells · 2 fit · 1 skipped · about ")
    assert "measured last week" in page
    assert out("sweep.toml", "--dry-run", "--seq", "2k").startswith("1 cell · 1 fits · about ")
    rows = json.loads(out("sweep.toml", "--predict", "-o", "json"))["rows"]
    assert [(row["state"], row["reason"]) for row in rows][1] == ("skipped", "measured last week")


def test_only_some_cells() -> None:
    ids = [row["cell"] for row in json.loads(out(*SMALL, "--predict", "-o", "json"))["rows"]]
    assert out(*SMALL, "--dry-run", "--only", ids[1]).startswith("1 cell · 1 fits")
    assert "no cell of this sweep" in error(*SMALL, "--dry-run", "--only", "0123").what


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "a sweep needs a model"),
        (("--model", "mpt-125"), "no model is called 'mpt-125'"),
        (("--model", "mpt-125m", "--on", "h201"), "no hardware is called 'h201'"),
        ((*ONE, "--seq", "8k-512*2"), "--seq: '8k-512*2' is an empty range"),
        ((*MPT, "--batch", "1-1000+1", "--micro", "1-1000+1"), "6,000,000 cells"),
        ((*SMALL, "--batch-tokens", "2M"), "--batch beside --batch-tokens"),
        ((*SMALL, "--steps", "0"), "--steps"),
        ((*SMALL, "--repeat", "x"), "--repeat"),
        ((*SMALL, "--time-limit", "soon"), "--time-limit"),
        ((*SMALL, "--seed", "-1"), "--seed"),
        ((*SMALL, "--device", "gpu"), "--device cannot be 'gpu'"),
        ((*SMALL, "--data", "nowhere"), "there is no file nowhere"),
        ((*SMALL, "--name", "a/b"), "a sweep cannot be called 'a/b'"),
        ((*SMALL, "--name", "3-17"), "a sweep cannot be called '3-17'"),
        ((*SMALL, "--name", "mine.csv"), "a sweep cannot be called 'mine.csv'"),
        ((*SMALL, "--launcher", "slurn"), "--launcher cannot be 'slurn'"),
        ((*SMALL, "--partition", "gpu"), "--partition is for slurm"),
        ((*SMALL, "--launcher", "slurm", "--spot"), "--spot is for skypilot"),
        ((*SMALL, "--predict", "--dry-run"), "--predict beside --dry-run"),
        ((*SMALL, "-o", "html"), "--output cannot be 'html'"),
        (("nowhere.toml",), "there is no file nowhere.toml"),
        (("--resume", "nothing"), "no sweep is called 'nothing'"),
        (("--resume", "nothing", "--seq", "2k"), "--seq beside --resume"),
        (("sweep.toml", "--resume", "nothing"), "the file sweep.toml beside --resume"),
        (("--model", "lstm-lm", "--on", "h200", "--dry-run"), "lstm-lm cannot be trained yet"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, tuple) else None,
)
def test_mistakes_are_told_in_words(words: tuple[str, ...], what: str) -> None:
    told = error(*words)
    assert what in told.what
    assert told.hint


@given(
    st.sampled_from(["seq", "batch", "micro", "gpus", "device-mem", "host-mem", "precision", "set", "batch-tokens"]),
    st.lists(st.sampled_from([*"0189-+*,kMGiB.=", "auto", "none", "fp32", " "]), max_size=8).map("".join),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_typed_is_answered(option: str, text: str) -> None:
    found = answer("--model", "mpt-125m", "--on", "h200", f"--{option}={text}", "--predict", "-o", "csv")
    assert found.exception is None or isinstance(found.exception, FlopwiseError | SystemExit), found.exception


def test_help_is_there_at_once_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from flopwise.cli import main; sys.argv = ['flopwise', 'sweep', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'numpy', 'torch', 'rich.progress', 'flopwise.sweep.grid'} & set(sys.modules)"
    )
    page = subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True, text=True).stdout
    for option in ("--batch-tokens", "--resume", "--dry-run", "--launcher", "--only"):
        assert option in page


# -- running, with a stand-in for it ---------------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[CellState | BaseException], list[dict[str, Any]]]:
    """Has every cell end in a state, or the sweep by an exception; tells what it was called with."""

    def ends(outcome: CellState | BaseException) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def run_sweep(store: Path, record: SweepRecord, **asked: Any) -> list[Attempt]:
            calls.append({"record": record, **asked})
            if isinstance(outcome, BaseException):
                raise outcome
            return [
                new_attempt(
                    store,
                    Attempt(
                        number=0,
                        cell=cell,
                        repeat=1,
                        state=outcome,
                        started="2026-11-15T12:00:00+00:00",
                        ended="2026-11-15T12:01:00+00:00",
                        sweep=record.name,
                        steps=record.steps,
                        reason="made up",
                    ),
                )
                for cell in record.cells
                if cell in asked["only"]
            ]

        monkeypatch.setattr("flopwise.sweep.running.run_sweep", run_sweep)
        monkeypatch.setattr("flopwise.cli.sweep_launch.check_here", lambda *_: None)
        return calls

    return ends


def test_a_sweep_writes_its_cells_and_its_record(tmp_path: Path, stand_in: Callable[..., list[dict[str, Any]]]) -> None:
    calls = stand_in("oom")
    (tmp_path / "sweep.toml").write_text(FILE)
    found = answer("sweep.toml", "--slots", "2", "--retry")
    # Out of memory is a result.
    assert found.exit_code == 0, found.output
    record = read_sweep(tmp_path / "runs", "from-a-file")
    assert (record.steps, record.repeats, record.time_limit_s, record.profile) == (7, 2, 600.0, False)
    assert record.request["seq"] == ["512-2k*2"]
    assert record.request["skip"] == [{"seq": [1024], "reason": "measured last week"}]
    (call,) = calls
    assert call["only"] == [record.cells[0], record.cells[2]]
    assert (call["slots"], call["retry"], call["force"]) == (2, True, False)
    skipped = read_attempts(tmp_path / "runs", record.cells[1])[0]
    assert [(attempt.state, attempt.reason) for attempt in skipped] == [("skipped", "measured last week")]
    foreseen = read_cell(tmp_path / "runs", record.cells[0]).foreseen
    assert foreseen is not None
    assert foreseen.method == "plan"
    assert "made up" in found.stdout
    assert "measured last week" in found.stdout


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("oom", 0), ("failed", 1), ("timeout", 1), ("running", 1)])
def test_exit_codes(state: CellState, code: int, stand_in: Callable[..., list[dict[str, Any]]]) -> None:
    stand_in(state)
    found = answer(*SMALL, "--name", "small")
    assert found.exit_code == code, found.output
    assert ("--resume small --retry" in found.stderr) == (state in ("failed", "timeout"))
    assert found.stderr.count("was left to attempt 1, which may still run on") == (2 if state == "running" else 0)


def test_an_interrupted_sweep_says_how_it_goes_on(stand_in: Callable[..., list[dict[str, Any]]]) -> None:
    stand_in(KeyboardInterrupt())
    found = answer(*SMALL, "--store", "kept")
    assert found.exit_code == 130
    assert "flopwise sweep --resume sweep-" in found.stderr
    assert found.stderr.rstrip().endswith("--store kept")


def test_a_stored_sweep_goes_on(tmp_path: Path, stand_in: Callable[..., list[dict[str, Any]]]) -> None:
    calls = stand_in("ok")
    (tmp_path / "sweep.toml").write_text(FILE)
    assert answer("sweep.toml").exit_code == 0
    assert answer("--resume", "from-a-file", "--force").exit_code == 0
    assert calls[0]["record"] == calls[1]["record"]
    # What was left out stays so.
    assert calls[0]["only"] == calls[1]["only"]
    assert (calls[0]["force"], calls[1]["force"]) == (False, True)
    assert out("--resume", "from-a-file", "--dry-run").startswith("3 cells · 2 fit · 1 skipped")


def test_a_stored_sweep_may_have_another_time_limit(
    tmp_path: Path, stand_in: Callable[..., list[dict[str, Any]]]
) -> None:
    stand_in("timeout")
    (tmp_path / "sweep.toml").write_text(FILE)
    answer("sweep.toml", "--time-limit", "1s", "--name", "slow")
    calls = stand_in("ok")
    answer("--resume", "slow", "--time-limit", "2m")
    assert calls[-1]["record"].time_limit_s == 120
    assert read_sweep(tmp_path / "runs", "slow").time_limit_s == 120


def test_slots_are_read_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(FILE)
    assert error("sweep.toml", "--slots", "0").exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_what_is_left_out_keeps_what_is_known_of_it(
    tmp_path: Path, stand_in: Callable[..., list[dict[str, Any]]]
) -> None:
    stand_in("ok")
    words = ("--model", "mpt-125m", "--on", "h200", "--seq", "1k", "--batch", "8")
    assert answer(*words, "--name", "before").exit_code == 0
    (tmp_path / "sweep.toml").write_text(FILE)
    assert answer("sweep.toml").exit_code == 0
    (cell,) = read_sweep(tmp_path / "runs", "before").cells
    assert cell in read_sweep(tmp_path / "runs", "from-a-file").cells
    assert read_cell(tmp_path / "runs", cell).foreseen is not None
    assert [attempt.state for attempt in read_attempts(tmp_path / "runs", cell)[0]] == ["ok"]
    assert out("--resume", "from-a-file", "--dry-run").startswith("3 cells · 2 fit · 1 skipped")


def test_a_rule_in_other_words_than_the_cells_still_holds(
    tmp_path: Path, stand_in: Callable[..., list[dict[str, Any]]]
) -> None:
    """A cell has the name of the hardware that `this-machine` stands for."""
    calls = stand_in("ok")
    text = FILE.replace('on = "h200"', 'on = "this-machine"').replace('seq = "1k"', 'seq = "1k"\non = "this-machine"')
    (tmp_path / "sweep.toml").write_text(text)
    assert answer("sweep.toml").exit_code == 0
    cells = calls[0]["record"].cells
    assert answer("--resume", "from-a-file").exit_code == 0
    assert calls[1]["only"] == [cells[0], cells[2]] and calls[1]["named"] == ()
    assert answer("--resume", "from-a-file", "--only", cells[1]).exit_code == 0
    assert calls[2]["only"] == calls[2]["named"] == [cells[1]]
    # A file that is asked anew decides anew.
    (tmp_path / "sweep.toml").write_text(text[: text.index("[[skip]]")])
    assert answer("sweep.toml").exit_code == 0
    assert answer("--resume", "from-a-file").exit_code == 0
    assert calls[3]["only"] == calls[4]["only"] == list(cells)


def test_a_cell_that_is_damaged_stops_no_other(
    tmp_path: Path, stand_in: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flopwise.sweep.jobs import slurm

    calls = stand_in("ok")
    assert answer(*SMALL, "--name", "small").exit_code == 0
    first, second = calls[0]["record"].cells
    (tmp_path / "runs" / "cells" / first / "cell.json").write_text("{")
    answer("--resume", "small")
    assert calls[1]["only"] == [first, second], "which tells of it, and fails"
    found = answer("--resume", "small", "--dry-run")
    assert (found.exit_code, found.stdout.startswith("1 cell · 1 fits")) == (1, True)
    assert f"note: cell {first}: " in found.stderr and "is damaged" in found.stderr
    heard: list[Any] = []

    def submit(*_: Any, cells: Any, **__: Any) -> slurm.Submission:
        heard.extend(cells)
        return slurm.Submission(folder=tmp_path, jobs=())

    monkeypatch.setattr(slurm, "submit", submit)
    assert answer("--resume", "small", "--launcher", "slurm").exit_code == 1
    assert [cell.id for cell in heard] == [second]


def test_a_name_is_that_of_the_cells(tmp_path: Path, stand_in: Callable[..., list[dict[str, Any]]]) -> None:
    calls = stand_in("ok")
    for words in (SMALL, SMALL, (*ONE, "--seq", "2k")):
        assert answer(*words).exit_code == 0
    names = [call["record"].name for call in calls]
    assert names[0] == names[1] != names[2]
    assert calls[0]["record"].created == calls[1]["record"].created
    assert len(names[0]) == len("sweep-") + 8
    assert answer(*SMALL, "--name", "mine").exit_code == 0
    before = read_sweep(tmp_path / "runs", "mine")
    other = error(*ONE, "--seq", "4k", "--name", "mine")
    assert "there is a sweep mine with other cells" in other.what
    assert "--force" in (other.hint or "")
    assert read_sweep(tmp_path / "runs", "mine") == before
    assert answer(*SMALL, "--name", "mine", "--steps", "7").exit_code == 0
    assert read_sweep(tmp_path / "runs", "mine") == replace(before, steps=7)
    assert answer(*ONE, "--seq", "4k", "--name", "mine", "--force").exit_code == 0
    assert len(read_sweep(tmp_path / "runs", "mine").cells) == 1
    assert len(list((tmp_path / "runs" / "sweeps").iterdir())) == 3


def test_hardware_that_is_not_here_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    told = error("--model", "mpt-125m", "--on", "mi300x", "--seq", "512", "--batch", "8")
    assert "mi300x" in told.what
    assert list(tmp_path.iterdir()) == []


def test_tasks_for_skypilot_are_written_beside_the_sweep(tmp_path: Path) -> None:
    page = out(*SMALL, "--name", "small", "--launcher", "skypilot", "--gpus", "1,2", "--infra", "aws")
    files = [Path(line) for line in page.split()]
    assert len(files) == 2
    for path in files:
        assert path.parent == Path("runs/sweeps")
        assert "flopwise sweep --resume small" in path.read_text()
    assert read_sweep(tmp_path / "runs", "small").cells


def test_every_file_that_a_sweep_names_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, entry in (("machine.toml", "h200"), ("model.toml", "mpt-125m")):
        assert RUN.invoke(app, ["show", entry, "-w", name]).exit_code == 0
    Path("text.txt").write_text("some text")
    words = ("--model", "model.toml", "--on", "machine.toml", "--seq", "512", "--batch", "8", "--data", "text.txt")
    out(*words, "--name", "small", "--launcher", "skypilot", "--accelerator", "H200")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    record = read_sweep(tmp_path / "runs", "small")
    cell = read_cell(tmp_path / "runs", record.cells[0])
    assert load_hardware(cell.settings.hardware).name == "h200"
    assert Path(record.data[0]).read_text() == "some text"
    page = out("--resume", "small", "--dry-run", "--store", str(tmp_path / "runs"))
    assert "1 cell · 1 fits" in page
    # Where the file lies is nobody else's business.
    assert "on machine.toml" in page
    assert str(tmp_path) not in page


def test_cells_are_handed_to_slurm_with_what_the_site_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flopwise.sweep.jobs import slurm

    heard: dict[str, Any] = {}

    def submit(
        store: Path, record: SweepRecord, site: slurm.SlurmOptions, *, cells: Any, named: Any
    ) -> slurm.Submission:
        assert named == ()
        heard.update(store=store, record=record, site=site, cells=cells)
        job = slurm.Job(id="42", script="a.sh", submitted=record.created, array=True, cells=record.cells[:1])
        return slurm.Submission(folder=store / "slurm", jobs=(job,), finished=record.cells[1:])

    monkeypatch.setattr(slurm, "submit", submit)
    words = ("--launcher", "slurm", "--partition", "gpu", "--gpus-per-node", "4", "--sbatch=--qos=high", "--retry")
    found = answer(*SMALL, "--name", "small", *words)
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("42  runs/slurm/a.sh")
    assert "cells that are finished: 1" in found.stderr
    site = heard["site"]
    assert (site.partition, site.gpus_per_node, site.extra, site.flags) == ("gpu", 4, ("--qos=high",), ("--retry",))
    assert tuple(cell.id for cell in heard["cells"]) == read_sweep(tmp_path / "runs", "small").cells
