"""`flopwise validate offload`: recorded runs repeated by the simulator: errors, verdicts, files of one's own."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import ROOT, load_hardware, load_model
from flopwise.cli import app
from flopwise.references.dataflow.recorded import MOST_ACTIVATIONS, plan_of_run, rule_accepts, validate_recorded
from flopwise.references.published.offload import FILE, MODELS, OffloadRun, read_offload
from flopwise.references.validate.validation import Validation
from flopwise.setup.hardware import Hardware
from flopwise.work.transformer import Transformer

SHIPPED = ROOT / "tables" / FILE
MEDIAN_ERROR, P90_ERROR = 0.05, 0.12
"""The targets for predictions of these runs."""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["validate", "offload", *arguments])


def refused(*arguments: str) -> FlopwiseError:
    found = run(*arguments)
    assert isinstance(found.exception, FlopwiseError), found.output
    assert found.exception.exit_code == 2
    assert found.exception.hint
    return found.exception


def printed() -> list[dict[str, str]]:
    with SHIPPED.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def write(path: Path, rows: list[dict[str, str]]) -> str:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@cache
def shapes() -> dict[str, Transformer]:
    models = {name: load_model(name) for name in MODELS.values()}
    return {name: model for name, model in models.items() if isinstance(model, Transformer)}


@cache
def machine() -> Hardware:
    return load_hardware("h100-sxm")


def validated(runs: Iterable[OffloadRun]) -> Validation:
    return validate_recorded(tuple(runs), shapes(), {"h100-sxm": machine()}, table="offload", protocol="p")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Every twentieth row."""
    return write(tmp_path_factory.mktemp("offload") / "sample.csv", printed()[::20])


@pytest.fixture(scope="module")
def record(sample: str) -> dict[str, Any]:
    found = run(sample, "-o", "json")
    assert found.exit_code == 0, found.output
    assert found.stderr == ""
    read = json.loads(found.stdout)
    assert isinstance(read, dict)
    return read


# -- figures ---------------------------------------------------------------------------------------------------------


def test_the_sample_is_within_the_targets(record: dict[str, Any]) -> None:
    assert (record["table"], len(record["rows"])) == ("offload", 39)
    assert 20 < record["n"] < 39
    assert record["median_error"] <= MEDIAN_ERROR
    assert record["p90_error"] <= P90_ERROR
    assert record["rank_correlation"] > 0.99
    # One of the three that failed although the rule has a configuration for them is in the sample.
    assert record["oom_accuracy"] == 38 / 39


def test_errors_are_of_tokens_per_second(record: dict[str, Any]) -> None:
    for row, cells in zip(record["rows"], printed()[::20], strict=True):
        if row["error"] is None:
            assert (float(cells["tok_s"]), row["measured_fits"], row["predicted_s"]) == (0, False, None)
            continue
        tokens = float(cells["seqlen"]) * float(cells["seqs_per_step"])
        predicted = tokens / row["predicted_s"]
        assert row["error"] == pytest.approx(abs(predicted / float(cells["tok_s"]) - 1), abs=2e-5)


def test_the_words_tell_what_was_fitted(record: dict[str, Any]) -> None:
    told = record["protocol"]
    assert "no constant was fitted to these rows" in told
    assert "rates of matrix products and attention are from profiles of this trainer's own runs: not held out" in told
    assert "timed on one H200" in told
    assert not any(row["held_out"] for row in record["rows"])


# -- forms -----------------------------------------------------------------------------------------------------------


def test_forms(sample: str, tmp_path: Path) -> None:
    page = run(sample).stdout
    assert "the 10 farthest off" in page
    assert "llama-3-8b · 8,192" in page
    small = write(tmp_path / "small.csv", printed()[:400:100])
    assert "all 4 rows" in run(small, "--all-rows").stdout
    lines = list(csv.DictReader(io.StringIO(run(small, "-o", "csv").stdout)))
    assert [line["row"] for line in lines] == ["1", "2", "3", "4"]
    assert run(small, "-o", "md").stdout.startswith("| figure")


def test_failed_runs_alone_have_verdicts_and_no_errors(tmp_path: Path) -> None:
    failed = [row for row in printed() if float(row["tok_s"]) == 0]
    found = json.loads(run(write(tmp_path / "failed.csv", failed[:5]), "-o", "json").stdout)
    assert (found["n"], found["median_error"], found["oom_accuracy"]) == (0, None, 1.0)


def test_another_device_says_where_its_rates_are_from(tmp_path: Path) -> None:
    rows = [row | {"gpu": "rtx-5090"} for row in printed()[:1]]
    told = json.loads(run(write(tmp_path / "own.csv", rows), "-o", "json").stdout)["protocol"]
    assert "rtx-5090's rates of matrix products: Estimated efficiencies" in told
    assert "h100" not in told
    assert "not held out" not in told


# -- plans -----------------------------------------------------------------------------------------------------------


def test_plans_are_those_that_ran() -> None:
    for one in read_offload()[::50]:
        model = shapes()[one.model]
        if one.succeeded:
            plan = plan_of_run(one, model, machine())
            assert plan.tokens_per_step == one.sequences_per_step * one.sequence_tokens
            assert (plan.activation_slots, plan.rounds_per_step) == (one.slots, one.rounds)
        assert rule_accepts(one, model, machine()) == one.succeeded


def test_a_larger_cap_with_the_same_plan_takes_as_long() -> None:
    one = next(one for one in read_offload() if one.succeeded)
    found = validated([one, replace(one, row=2, host_bytes=2 * one.host_bytes)])
    assert found.rows[0].predicted_s == found.rows[1].predicted_s


def test_a_run_that_the_rule_refuses_has_no_prediction() -> None:
    one = next(one for one in read_offload() if one.succeeded)
    found = validated([replace(one, device_bytes=2**30)])
    assert (found.n, found.unpredicted, found.false_ooms) == (0, 1, 1)


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_nothing_is_fitted_so_nothing_can_be_left_out() -> None:
    error = refused("--leave-out", "model")
    assert "--leave-out model has no meaning for the table offload" in error.what
    assert "no constant is fitted" in str(error)


def test_files_that_are_no_such_table(tmp_path: Path) -> None:
    assert "there is no file" in refused(str(tmp_path / "none.csv")).what
    assert "is a folder" in refused(str(tmp_path)).what
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    assert "lacks the columns" in refused(str(tmp_path / "other.csv")).what
    (tmp_path / "empty.csv").write_text("", encoding="utf-8")
    assert "is empty" in refused(str(tmp_path / "empty.csv")).what


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_b": "7"}, "line 3: no model size (10⁹ parameters) is called '7'"),
        ({"seqlen": "8k"}, "line 3: seqlen = '8k' is not a number"),
        ({"rounds_per_step": "3"}, "row 2: 928 sequences a step are not a whole number in each of 3 rounds"),
        ({"dev_act_slots": "5"}, "row 2: 16 layers of 1 chunks have 16 activations, not 15"),
        ({"chunk_size": "1"}, "row 2: 16 layers of 16,384 chunks have 262,144 activations, not 16"),
        ({"chunk_size": "1", "dev_act_slots": "262134"}, f"activations, more than {MOST_ACTIVATIONS:,}"),
        ({"gpu": "trn1"}, "row 2: "),
    ],
)
def test_rows_that_cannot_be_repeated(changes: dict[str, str], expected: str, tmp_path: Path) -> None:
    rows = printed()[:2]
    rows[1] |= changes
    assert expected in refused(write(tmp_path / "own.csv", rows)).what
