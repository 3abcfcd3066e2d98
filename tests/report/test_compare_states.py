"""What `flopwise compare` makes of cells that are lost, fail more often, were replaced, or are padded."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flopwise.report.results_files import results_csv
from flopwise.report.run_comparison import Measured, compare_runs, comparison_document, percent_words, quantiles_of
from flopwise.store.cells import SweepRecord
from flopwise.store.collecting import collect
from flopwise.store.results import Result
from flopwise.store.runs import VARIABLE, read_record, write_record
from flopwise.store.sweeps import write_cell, write_sweep
from tests.cli.test_cli_fuzz import answered
from tests.support.printing import printed
from tests.support.result_rows import a_result, lost
from tests.support.run_stores import STARTED, a_cell, make_store, noisy_steps, write_attempted, write_run


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def verdict(before: list[Result], after: list[Result], *, allow_missing: bool = False) -> tuple[str, bool]:
    sides = [[Measured(row=row, sample=quantiles_of(row)) for row in rows] for rows in (before, after)]
    found = compare_runs(sides[0], sides[1], names=("a", "b"), threshold=0.03, allow_missing=allow_missing)
    return found.cells[0].verdict, found.is_worse


@pytest.mark.parametrize(
    ("state", "word", "fails"),
    [
        ("oom", "worse", True),
        ("timeout", "worse", True),
        ("failed", "worse", True),
        ("unreadable", "worse", True),
        ("error", "worse", True),
        ("planned", "missing", True),
        ("skipped", "missing", True),
        ("running", "missing", True),
    ],
)
def test_what_ran_and_does_not_any_more_never_passes_silently(state: str, word: str, fails: bool) -> None:
    assert verdict([a_result()], [lost(state, None)]) == (word, fails)
    assert verdict([a_result()], [lost(state, None)], allow_missing=True) == (word, fails and word == "worse")
    assert verdict([lost(state, None)], [a_result()])[1] is False


def test_a_row_that_claims_more_than_its_peak_is_worse() -> None:
    for name, mfu in (("before", 0.5), ("after", 1.5)):
        Path(f"{name}.csv").write_text(results_csv([a_result(mfu=mfu)]), newline="")
    assert answered(["compare", "before.csv", "after.csv"])[0] == 1
    assert answered(["compare", "after.csv", "before.csv"])[0] == 0


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ("ok ok ok", "ok ok oom", "worse"),
        ("ok oom", "ok oom", "same"),
        ("ok oom", "ok ok", "unclear"),
        ("ok ok", "ok ok running", "same"),
        ("ok ok", "ok", "unclear"),
    ],
    ids=["fails more often", "as often", "less often", "not over yet", "fewer of them"],
)
def test_the_share_of_repeats_that_went_well(before: str, after: str, word: str) -> None:
    sides = [
        [
            a_result(repeat=place) if state == "ok" else lost(state, None, repeat=place)
            for place, state in enumerate(states.split(), 1)
        ]
        for states in (before, after)
    ]
    found, fails = verdict(sides[0], sides[1])
    assert (found, fails) == (word, word == "worse")


def test_a_cell_that_is_not_there_any_more() -> None:
    make_store(Path("before"), 2, sweep="s", steps=20)
    make_store(Path("after"), 1, sweep="s", steps=20, seed=3)
    code, out, _ = answered(["compare", "before", "after"])
    assert code == 1
    assert "1 of 2 cells ran before and were not measured again" in " ".join(out.split())
    code, out, _ = answered(["compare", "before", "after", "--allow-missing", "-o", "json"])
    assert (code, json.loads(out)["counts"]["missing"]) == (0, 1)
    # What was never measured is no loss.
    write_cell(Path("after"), a_cell(sequence_tokens=64))
    write_sweep(Path("after"), SweepRecord(name="t", created=STARTED, cells=(a_cell(sequence_tokens=64).id,), steps=1))
    assert answered(["compare", "after", "before"])[0] == 0


def test_a_run_that_vanished_is_worse() -> None:
    for side in ("before", "after"):
        make_store(Path(side), 1, sweep="s", steps=20)
    shutil.rmtree("after/0001")
    code, out, _ = answered(["compare", "before", "after", "-o", "json"])
    assert (code, json.loads(out)["cells"][0]["after_state"]) == (1, "unreadable")


def test_runs_that_were_replaced_are_no_repeats() -> None:
    """The first attempt was slow, and --force has made it again."""
    for side, times in (("before", (0.5,)), ("after", (0.9, 0.5))):
        for step_s in times:
            record = write_run(Path(side), noisy_steps(30, step_s))
            write_attempted(Path(side), a_cell(record), run=record.id)
    code, out, _ = answered(["compare", "before", "after", "-o", "json"])
    cell = json.loads(out)["cells"][0]
    assert (code, cell["verdict"], cell["before_runs"], cell["after_runs"]) == (0, "same", 1, 1)


def test_padding_is_no_token() -> None:
    """The same step, of which half is padding on one side: half the tokens a second."""
    for side, share in (("before", 1.0), ("after", 0.5)):
        record = write_run(Path(side), noisy_steps(30, 0.5))
        assert record.measurement is not None
        rate = record.measurement.tokens_per_s * share
        write_record(
            Path(side) / record.id,
            replace(read_record(Path(side) / record.id), measurement=replace(record.measurement, tokens_per_s=rate)),
        )
    code, out, _ = answered(["compare", "before", "after", "-o", "json"])
    cell = json.loads(out)["cells"][0]
    assert (code, cell["verdict"]) == (1, "slower")
    assert cell["time_change"] == pytest.approx(1.0, abs=0.02)
    for side in ("before", "after"):
        row = collect(Path(side)).rows[0]
        assert cell[f"{side}_tokens_per_s"] == pytest.approx(row.tokens_per_s, rel=0.02)


# -- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "words"), [(0.051, "+5.1 %"), (-0.003, "−0.3 %"), (0.0, "0.0 %"), (5.3e7, "over +1,000 %"), (None, "-")]
)
def test_changes_in_words(share: float | None, words: str) -> None:
    assert percent_words(share) == words


def test_a_narrow_table_keeps_what_tells_rows_apart() -> None:
    rows = [
        Measured(row=row, sample=quantiles_of(row))
        for row in (
            replace(
                a_result(), cell=f"{batch:012x}", model="mpt-125m+layers=1+hidden=64+heads=2", batch_sequences=batch
            )
            for batch in (16, 32)
        )
    ]
    lines = printed(comparison_document(compare_runs(rows, rows, names=("a", "b"), threshold=0.03)), 80)
    header = next(line for line in lines if "verdict" in line)
    assert "batch" in header and "model" not in header
    assert max(map(len, lines)) <= 80
