"""`flopwise compare` as a user or a check types it: words, exit codes, and what stands beside the figures."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from flopwise.records.measurement import RunRecord
from flopwise.report.results_files import results_csv
from flopwise.report.run_comparison import Measured, compare_runs, quantiles_of
from flopwise.store.cells import SweepRecord
from flopwise.store.collecting import collect
from flopwise.store.runs import VARIABLE, read_record, write_record
from flopwise.store.statistics import change
from flopwise.store.sweeps import write_sweep
from tests.cli.test_cli_fuzz import answered
from tests.support.run_stores import STARTED, a_cell, make_store, noisy_steps, write_attempted, write_run


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def two_stores(slower: float, *, repeats: int = 2, sweep: str | None = "nightly") -> None:
    """The first of three cells is slower in the second store."""
    lengths = [{"sequence_tokens": 512 * number, "step_s": 0.5 * number} for number in (1, 2, 3)]
    make_store(Path("before"), lengths, sweep=sweep, repeats=repeats, seed=1)
    changed = [{**lengths[0], "step_s": 0.5 * (1 + slower)}, *lengths[1:]]
    make_store(Path("after"), changed, sweep=sweep, repeats=repeats, seed=7)


def verdicts(*words: str) -> tuple[int, dict[int, str]]:
    code, out, _ = answered(["compare", *words, "-o", "json"])
    return code, {cell["sequence_tokens"]: cell["verdict"] for cell in json.loads(out)["cells"]}


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize(
    ("slower", "code", "word"), [(0.05, 1, "slower"), (0.01, 0, "same"), (0.0, 0, "same"), (-0.08, 0, "faster")]
)
def test_a_slow_down_is_told_and_fails(slower: float, code: int, word: str, repeats: int) -> None:
    two_stores(slower, repeats=repeats)
    found, words = verdicts("before/nightly", "after/nightly")
    assert (found, words) == (code, {512: word, 1024: "same", 1536: "same"})


def test_what_is_shown() -> None:
    two_stores(0.05)
    code, out, err = answered(["compare", "before", "after"])
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == "before → after"
    assert lines[2].split()[:3] == ["cell", "model", "seq"]
    first = lines[3].split()
    assert first[1:3] == ["gpt2", "512"]
    assert first[-1] == "slower"
    assert float(first[5].removeprefix("+")) == pytest.approx(5.0, abs=1.0)
    assert "3 cells: 1 slower, 2 same" in lines
    assert "by 3 % or more" in out


@pytest.mark.parametrize("columns", [80, 120])
def test_it_is_readable_at_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    two_stores(0.05)
    monkeypatch.setenv("COLUMNS", str(columns))
    out = answered(["compare", "before", "after"])[1]
    assert max(cell_len(line) for line in out.splitlines()) <= columns
    assert "slower" in out.splitlines()[3]


def test_the_threshold() -> None:
    two_stores(0.05)
    assert verdicts("before", "after", "--threshold", "10%")[0] == 0
    assert verdicts("before", "after", "--threshold", "0.10")[0] == 0
    assert verdicts("before", "after", "--threshold", "2 %")[0] == 1
    assert verdicts("before", "before", "--threshold", "0")[0] == 0


def test_one_steady_shift_needs_no_threshold_to_be_seen() -> None:
    """At a threshold of 0 every change counts whose interval leaves 0 out."""
    two_stores(0.02, repeats=3)
    assert verdicts("before", "after", "--threshold", "0")[0] == 1


def test_other_forms() -> None:
    two_stores(0.05)
    code, out, err = answered(["compare", "before", "after", "-o", "csv"])
    rows = list(csv.DictReader(io.StringIO(out)))
    assert (code, len(rows)) == (1, 3)
    assert (rows[0]["before_runs"], rows[0]["interval_from"], rows[0]["verdict"]) == ("2", "runs", "slower")
    assert float(rows[0]["time_change_low"]) < 0.05 < float(rows[0]["time_change_high"])
    rates = [float(rows[0][f"{side}_tokens_per_s"]) for side in ("before", "after")]
    assert rates[0] / rates[1] - 1 == pytest.approx(float(rows[0]["time_change"]))
    assert "3 cells: 1 slower" in err
    code, out, _ = answered(["compare", "before", "after", "-o", "md"])
    assert code == 1
    assert out.startswith("# before → after\n\n3 cells: 1 slower, 2 same\n\n| cell")
    assert out.count("\n|") == 5
    found = json.loads(answered(["compare", "before", "after", "-o", "json"])[1])
    assert (found["worse"], found["counts"]["slower"], found["threshold"]) == (True, 1, 0.03)


# -- what the sides can be -------------------------------------------------------------------------------------------


def test_runs_sweeps_stores_and_files() -> None:
    two_stores(0.05)
    for side in ("before", "after"):
        Path(f"{side}.csv").write_text(results_csv(collect(Path(side)).rows), newline="")
    assert verdicts("before.csv", "after.csv") == (1, {512: "slower", 1024: "same", 1536: "same"})
    assert verdicts("before.csv", "after/nightly")[0] == 1
    assert verdicts("before/0001", "after/0001") == (1, {512: "slower"})
    assert verdicts("1", "2", "--store", "after") == (0, {512: "same"})
    assert verdicts("1,2", "2", "--store", "after")[0] == 0
    assert verdicts("nightly", "1-2", "--store", "after")[1] == {512: "same", 1024: "missing", 1536: "missing"}
    notes = json.loads(answered(["compare", "before.csv", "after.csv", "-o", "json"])[1])["notes"]
    assert any("p20, p80" in note for note in notes)


def test_rows_without_quantiles_are_unclear() -> None:
    two_stores(0.3, repeats=1)
    rows = [replace(row, step_s_p20=None, step_s_p80=None) for row in collect(Path("after")).rows]
    Path("after.csv").write_text(results_csv(rows), newline="")
    code, words = verdicts("before", "after.csv")
    assert (code, set(words.values())) == (0, {"unclear"})


def test_two_runs_are_compared_whatever_they_are() -> None:
    make_store(Path("runs"), [{"step_s": 0.5}, {"step_s": 0.4, "precision": "fp8"}])
    code, out, _ = answered(["compare", "1", "2"])
    assert code == 0
    assert "faster" in out
    assert "the two are different cells: precision bf16 → fp8" in out


def test_other_batches_of_the_same_cell_are_compared_by_token() -> None:
    """Where the largest batch is looked for, two sides may find different ones."""
    for store, batch, step_s in (("before", 16, 0.5), ("after", 32, 1.0)):
        write_run(Path(store), noisy_steps(30, step_s), batch_sequences=batch)
        cell = a_cell(batch_sequences="auto")
        write_attempted(Path(store), cell, run="0001")
    code, words = verdicts("before", "after")
    assert (code, words) == (0, {1024: "same"})


def test_the_same_runs_on_both_sides() -> None:
    two_stores(0.0)
    code, out, _ = answered(["compare", "before", "before/nightly"])
    assert code == 0
    assert "3 of 3 cells are the same runs on both sides" in out


# -- states ----------------------------------------------------------------------------------------------------------


def test_a_cell_that_no_longer_runs_is_worse() -> None:
    cells = [a_cell(sequence_tokens=512 * number) for number in range(1, 6)]
    outcomes = {
        "before": ("ok", "oom", "oom", "ok", None),
        "after": ("oom", "ok", "oom", "skipped", "ok"),
    }
    for side, states in outcomes.items():
        for cell, state in zip(cells, states, strict=True):
            if state == "ok":
                run = write_run(Path(side), sequence_tokens=cell.settings.sequence_tokens)
                write_attempted(Path(side), cell, run=run.id)
            elif state is not None:
                write_attempted(Path(side), cell, state)  # type: ignore[arg-type]
    code, words = verdicts("before", "after")
    assert code == 1
    assert words == {512: "worse", 1024: "better", 1536: "same", 2048: "missing", 2560: "only after"}
    out = answered(["compare", "before", "after"])[1]
    assert next(line for line in out.splitlines() if line.endswith("worse")).split()[4:] == ["oom", "-", "-", "worse"]
    assert verdicts("after", "before")[1][512] == "better"


def test_planned_cells_are_not_measured() -> None:
    two_stores(0.0, repeats=1)
    sweep = SweepRecord(name="more", created=STARTED, cells=(a_cell(sequence_tokens=64).id,), steps=5)
    for side in ("before", "after"):
        write_attempted(Path(side), a_cell(sequence_tokens=64), "skipped")
        write_sweep(Path(side), sweep)
    code, words = verdicts("before/more", "after/more")
    assert (code, words) == (0, {64: "not measured"})


# -- what stands beside it -------------------------------------------------------------------------------------------


def test_other_hardware_and_commits_are_told() -> None:
    two_stores(0.0)

    def moved(record: RunRecord) -> RunRecord:
        changes = {"gpu": "NVIDIA H100", "commit": "ffff" * 10}
        return replace(record, environment=record.environment | changes)

    for run in Path("after").glob("0*"):
        write_record(run, moved(read_record(run)))
    found = json.loads(answered(["compare", "before", "after", "-o", "json"])[1])
    assert set(found["differences"]) == {"card", "commit"}
    assert found["differences"]["card"] == ["NVIDIA H200", "NVIDIA H100"]
    for form in ("table", "md"):
        assert "card: NVIDIA H200 → NVIDIA H100" in answered(["compare", "before", "after", "-o", form])[1]


def test_damaged_runs_are_notes() -> None:
    two_stores(0.0)
    (Path("after") / "0001" / "record.json").write_text("{")
    (Path("after") / "0003" / "steps.jsonl").write_text("{}\n")
    code, out, err = answered(["compare", "before", "after"])
    # One of two repeats is lost.
    assert code == 1
    assert "record.json is damaged" in err
    assert "p20, p80" in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("before after --threshold 3", "--threshold cannot be '3'"),
        ("before after --threshold -1%", "--threshold cannot be"),
        ("before after --threshold nan", "--threshold cannot be 'nan'"),
        ("before after --threshold x", "--threshold cannot be 'x'"),
        ("before after -o xml", "--output cannot be 'xml'"),
        ("before nowhere", "no run, sweep or cell is called 'nowhere'"),
        ("before empty", "there is nothing to compare in empty"),
        ("before other", "have no cell in common"),
        ("before notes.txt", "notes.txt"),
        (", before", "there is nothing to compare in ,"),
        ("before ./nowhere/x", "is not the folder of a run"),
    ],
)
def test_mistakes(line: str, words: str) -> None:
    two_stores(0.0, repeats=1)
    make_store(Path("other"), 2, steps=6, precision="fp8")
    Path("empty").mkdir()
    Path("notes.txt").write_text("nothing of ours\n")
    code, out, err = answered(["compare", *line.split()])
    assert (code, out) == (2, "")
    assert words in err
    assert "hint: " in err


def test_a_side_is_missing() -> None:
    code, _, err = answered(["compare", "before"])
    assert code == 2
    assert "after" in err.lower()


def test_the_words_rest_on_the_steps() -> None:
    """What is printed is what the statistics say of the very samples."""
    two_stores(0.04, repeats=1)
    sides = [
        [Measured(row=row, sample=quantiles_of(row)) for row in collect(Path(side)).rows]
        for side in ("before", "after")
    ]
    found = compare_runs(sides[0], sides[1], names=("a", "b"), threshold=0.03)
    samples = [[quantiles_of(side[0].row)] for side in sides]
    expected = change([sample for sample in samples[0] if sample], [sample for sample in samples[1] if sample])
    assert found.cells[0].change is not None
    assert found.cells[0].change.relative == pytest.approx(expected.relative)
    assert found.cells[0].change.low == pytest.approx(expected.low)
