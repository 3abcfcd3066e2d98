"""Errors, ranks, memory verdicts and folds, against hand-made figures and plain definitions; and their printing."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.cli.output import schema_json
from flopwise.references.published import TABLES, protocol_of, read_cases
from flopwise.references.validate.fitting import folds
from flopwise.references.validate.protocol import Case
from flopwise.references.validate.report import (
    validation_document,
    validation_record,
    worst_rows,
)
from flopwise.references.validate.validation import (
    ValidatedRow,
    Validation,
    errors_by_size,
    rank_correlation,
    validate,
)
from flopwise.report.document import to_csv, to_markdown
from tests.support.printing import shown

JSON_KEYS = {
    "skipped",
    "inside",
    "inside_without",
    "peers",
    "anchored",
    "schema",
    "table",
    "n",
    "median_error",
    "mean_error",
    "p90_error",
    "max_error",
    "rank_correlation",
    "protocol",
    "rows",
}


def four_cases() -> list[Case]:
    """Two sizes; the third row ran out of memory, the fourth says nothing of memory and is never fitted to."""
    base = read_cases("mpt")[0]
    return [
        replace(base, row=1, size="small", step_s=1.0, fits=True),
        replace(base, row=2, size="large", step_s=2.0, fits=True),
        replace(base, row=3, size="large", step_s=None, fits=False),
        replace(base, row=4, size="small", step_s=4.0, fits=None, fitted=False),
    ]


def plain_ranks(values: list[float]) -> list[float]:
    """The definition: how many are smaller, and half of the others that are equal."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


# -- figures ----------------------------------------------------------------------------------------------------------


def test_errors_of_throughput_by_hand() -> None:
    found = validate("mpt", four_cases(), [1.25, 1.6, 3.0, 4.0], [True, False, True, True], protocol="nothing fitted")
    assert [row.error for row in found.rows] == [pytest.approx(0.2), pytest.approx(0.25), None, 0.0]
    assert (found.n, found.unpredicted) == (3, 0)
    assert found.median_error == pytest.approx(0.2)
    assert found.mean_error == pytest.approx(0.15)
    assert found.p90_error == pytest.approx(0.2 + 0.8 * 0.05)
    assert found.max_error == pytest.approx(0.25)
    assert found.oom_accuracy == pytest.approx(1 / 3)
    assert (found.false_fits, found.false_ooms) == (1, 1)
    assert found.rank_correlation == pytest.approx(1.0)
    assert [row.held_out for row in found.rows] == [False, False, False, True]
    assert found.protocol == "nothing fitted; error: |predicted ÷ measured − 1| of tokens per second"


def test_errors_of_time_by_hand() -> None:
    found = validate("vtrain", four_cases(), [1.25, 1.6, 3.0, 4.0], protocol="nothing fitted", metric="time")
    assert [row.error for row in found.rows] == [pytest.approx(0.25), pytest.approx(0.2), None, 0.0]
    assert "of seconds per step" in found.protocol
    assert found.oom_accuracy is None


def test_rows_aside_are_listed_and_not_counted() -> None:
    found = validate(
        "mpt", four_cases(), [1.25, 1.6, 3.0, 2.0], [True] * 4, protocol="p", counted=[True, True, False, False]
    )
    assert (found.n, found.oom_accuracy, found.rows[3].counted) == (2, 1.0, False)
    assert [found.max_error, found.rows[3].error] == pytest.approx([0.25, 1.0])
    assert [errors.n for errors in errors_by_size(found)] == [1, 1]
    assert all(row.counted for row in worst_rows(found))
    assert "1 rows not in these figures: median 100.0 %" in " ".join(printed_page(found).split())


@pytest.mark.parametrize("missing", [math.nan, math.inf, 0.0, -1.0])
def test_rows_without_a_prediction_are_counted_apart(missing: float) -> None:
    found = validate("mpt", four_cases(), [missing, 1.6, missing, 5.0], protocol="p")
    assert (found.n, found.unpredicted) == (2, 1)
    assert (found.rows[0].predicted_s, found.rows[0].error) == (None, None)


def test_no_prediction_at_all() -> None:
    found = validate("mpt", four_cases(), np.full(4, np.nan), [None] * 4, protocol="p")
    assert (found.n, found.unpredicted) == (0, 3)
    assert (found.median_error, found.mean_error, found.p90_error, found.max_error) == (None, None, None, None)
    assert (found.rank_correlation, found.oom_accuracy) == (None, None)
    assert not errors_by_size(found)


def test_rank_is_of_throughput_per_device() -> None:
    base = read_cases("mpt")[0]
    parallel = replace(base.setup.parallel, data=2 * base.setup.parallel.data)
    wide = replace(base, setup=replace(base.setup, parallel=parallel, micro_batch_sequences=1))
    # Twice the devices and the same time: half the throughput of each, whatever the total says.
    cases = [replace(base, step_s=1.0), replace(wide, step_s=1.0)]
    found = validate("mpt", cases, [1.0, 0.4], protocol="p")
    assert found.rank_correlation == pytest.approx(-1.0)


def test_mismatched_lengths_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="zip"):
        validate("mpt", four_cases(), [1.0], protocol="p")


def test_rank_correlation_by_hand() -> None:
    measured = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert rank_correlation(measured, measured**3) == pytest.approx(1.0)
    assert rank_correlation(measured, -measured) == pytest.approx(-1.0)
    assert rank_correlation(measured, np.array([2.0, 1.0, 4.0, 3.0, 5.0])) == pytest.approx(0.8)
    # Ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3.
    tied = rank_correlation(np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0]))
    assert tied == pytest.approx(4.5 / math.sqrt(4.5 * 5.0))
    assert rank_correlation(np.ones(3), measured[:3]) is None
    assert rank_correlation(measured[:1], measured[:1]) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=30))
def test_rank_correlation_is_that_of_plain_ranks(pairs: list[tuple[int, int]]) -> None:
    first, second = [float(one) for one, _ in pairs], [float(other) for _, other in pairs]
    found = rank_correlation(np.array(first), np.array(second))
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert found is None
        return
    plain = float(np.corrcoef(plain_ranks(first), plain_ranks(second))[0, 1])
    assert found == pytest.approx(plain, abs=1e-12)


# -- folds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_folds_are_the_sizes_that_the_split_names(table: str) -> None:
    cases = read_cases(table)
    found = folds(protocol_of(table), cases)
    assert sorted(found) == sorted({case.size for case in cases})
    assert found == list(protocol_of(table).sizes)


# -- printing ---------------------------------------------------------------------------------------------------------


def validated(table: str) -> Validation:
    """A table whose every prediction is 5 % to 30 % too long, memory judged by row number."""
    cases = read_cases(table)
    predicted = [(case.step_s or 1.0) * (1.05 + 0.25 * (case.row % 7) / 6) for case in cases]
    return validate(table, cases, predicted, [case.row % 9 != 0 for case in cases], protocol="constants × 1.05 to 1.30")


def printed_page(validation: Validation, *, every_row: bool = False, width: int = 80) -> str:
    return shown(validation_document(validation, every_row=every_row), width)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("every_row", [False, True])
def test_the_page_fits_80_columns(table: str, every_row: bool) -> None:
    validation = validated(table)
    lines = printed_page(validation, every_row=every_row).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert lines[0].split() == ["table", table]
    assert any(line.startswith("error") and "median" in line and "largest" in line for line in lines)
    assert sum(line.startswith("how") for line in lines) == 1
    # Whatever is cut, no row's number, times or error are.
    assert not any("…" in line.split("  ")[0] or line.rstrip().endswith("…") for line in lines)


def test_the_page_shows_the_ten_farthest_off_or_all() -> None:
    validation = validated("mpt")
    worst = worst_rows(validation)
    errors = sorted((row.error for row in validation.rows if row.error is not None), reverse=True)
    assert [row.error for row in worst] == errors[:10]
    page = printed_page(validation)
    assert "the 10 farthest off" in page
    assert all(f"\n{row.row:>3}  " in page for row in worst)
    assert "all 198 rows" in printed_page(validation, every_row=True)


def test_a_wrong_verdict_on_memory_is_shown_and_a_right_one_is_no_news() -> None:
    cases = four_cases()
    wrong = validate("mpt", cases, [1.0, 2.0, 3.0, 4.0], [False, True, True, None], protocol="p")
    page = printed_page(wrong, every_row=True)
    assert "✓ (said ✗)" in page
    assert "✗ (said ✓)" in page
    assert "wrongly said to fit: 1, wrongly said not to: 1" in " ".join(page.split())
    right = validate("mpt", cases[:2], [1.0, 2.0], [True, True], protocol="p")
    assert "fits" not in printed_page(right)


def test_a_page_without_any_error() -> None:
    nothing = validate("mpt", four_cases(), [math.nan] * 4, protocol="p")
    page = printed_page(nothing)
    assert "0 of 4 rows compared" in page
    assert "3 measured without a prediction" in " ".join(page.split())
    assert "median" not in page
    assert json.loads(schema_json(validation_record(nothing), "validation"))["median_error"] is None


def test_json_has_the_agreed_keys() -> None:
    with_memory = json.loads(schema_json(validation_record(validated("nanotron")), "validation"))
    assert set(with_memory) == {*JSON_KEYS, "oom_accuracy"}
    without = json.loads(
        schema_json(validation_record(validate("vtrain", four_cases(), [1.0] * 4, protocol="p")), "validation")
    )
    assert set(without) == JSON_KEYS
    assert set(without["rows"][0]) == {field.name for field in fields(ValidatedRow)}
    assert with_memory["n"] == sum(row["error"] is not None for row in with_memory["rows"])


def test_csv_and_markdown_have_every_row() -> None:
    validation = validated("megatron")
    rows = list(csv.DictReader(io.StringIO(to_csv(validation_document(validation)))))
    assert list(rows[0]) == [field.name for field in fields(ValidatedRow)]
    assert [float(row["error"]) for row in rows] == [row.error for row in validation.rows]
    text = to_markdown(validation_document(validation))
    assert sum(line.startswith("|") for line in text.splitlines()) == 2 * 3 + 6 + 10 + 10
    assert r"\|predicted ÷ measured − 1\|" in text


def test_errors_by_size_by_hand() -> None:
    found = errors_by_size(validate("mpt", four_cases(), [1.25, 1.6, 3.0, 4.0], protocol="p"))
    assert [(errors.size, errors.n) for errors in found] == [("small", 2), ("large", 1)]
    assert found[0].median_error == pytest.approx(0.1)
    assert found[0].max_error == pytest.approx(0.2)
