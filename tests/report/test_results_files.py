"""Results as files: CSV and JSON read back equal whatever they hold; published tables become results."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.references.published.results import read_results
from flopwise.report.results_files import SOURCES, kinds, read_results_csv, read_results_json, results_csv
from flopwise.store.results import FIELDS, Result
from tests.support.printing import results_json, results_markdown
from tests.support.result_rows import a_result, mixed

DOCUMENT = Path(__file__).parents[1] / "data" / "mpt_tables.md"

NASTY = (
    *(
        "",
        "'",
        "''",
        "=1+1",
        "+1",
        "-1",
        "@SUM(A1)",
        "'=1",
        "\t=1",
        "\r",
        "\n",
        "a\r\nb",
        'say "no"',
        "a,b",
        ";",
        "nan",
    ),
    *(
        "null",
        "true",
        "None",
        " ",
        " x ",
        "\x00",
        "\ufeff",
        "\u2028",
        "|",
        "<b>",
        "日本語",
        "1e5",
        "-",
        "inf",
        "\x0b=1",
    ),
)
words = st.sampled_from(NASTY) | st.text(st.characters(codec="utf-8"), max_size=8)
VALUES: dict[type, st.SearchStrategy[Any]] = {
    str: words,
    int: st.integers(-(2**63), 2**63),
    float: st.floats(),
    bool: st.booleans(),
}


@st.composite
def results(draw: st.DrawFn) -> Result:
    """Any row: a few fields are filled with whatever their kind allows."""
    filled = draw(st.lists(st.sampled_from([name for name in FIELDS if name not in ("state", "source")]), max_size=12))
    values = {name: draw(VALUES[kinds()[name]]) for name in dict.fromkeys(filled)}
    state, source = draw(words), draw(st.sampled_from(SOURCES))
    return Result(**{"cell": None, **values, "state": state, "source": source})


def refusal(text: str) -> FlopwiseError:
    with pytest.raises(FlopwiseError) as caught:
        read_results_csv(text)
    assert caught.value.hint
    return caught.value


# -- there and back --------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(results(), max_size=4))
@example([Result(cell=word, state=word, reason=word, model=word) for word in NASTY])
@example([a_result(mfu=float("nan"), hfu=-0.0, step_s=float("inf"), last_loss=float("-inf"), tokens_per_s=0.1 + 0.2)])
def test_csv_and_json_come_back_equal(rows: list[Result]) -> None:
    # repr: NaN is not equal to itself, and 0.0 is to -0.0.
    # NaN is not the same as NaN, its word is.
    assert [repr(asdict(row)) for row in read_results_csv(results_csv(rows))] == [repr(asdict(row)) for row in rows]
    assert [repr(asdict(row)) for row in read_results_json(results_json(rows))] == [repr(asdict(row)) for row in rows]


@settings(max_examples=100, deadline=None)
@given(st.lists(results(), min_size=1, max_size=3))
@example([Result(cell=word, state=word, reason=word, model=word) for word in NASTY])
def test_no_text_of_a_cell_is_a_formula(rows: list[Result]) -> None:
    for record in csv.DictReader(io.StringIO(results_csv(rows), newline="")):
        for name, cell in record.items():
            if kinds()[name] is str:
                assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))


def test_the_layout_is_that_of_the_standard() -> None:
    text = results_csv([a_result(reason='a "b", c', prediction_error=-0.25, predicted_fits=True)])
    header, line, end = text.split("\r\n")
    assert header == ",".join(FIELDS)
    assert end == ""
    assert '"a ""b"", c"' in line
    # A negative number is a number, not text.
    assert ",-0.25," in line
    assert ",true," in line
    assert "8030261248" in line


def test_numbers_keep_every_digit() -> None:
    row = a_result(tokens_per_s=1 / 3, n_params=2**60 + 1)
    record = next(csv.DictReader(io.StringIO(results_csv([row]))))
    assert (record["tokens_per_s"], record["n_params"]) == ("0.3333333333333333", "1152921504606846977")


def test_files_are_told_by_name_and_content(tmp_path: Path) -> None:
    rows = mixed()
    for name, text in (
        ("results.csv", results_csv(rows)),
        ("with-mark.csv", "\ufeff" + results_csv(rows)),
        ("results.json", results_json(rows)),
        ("json.txt", results_json(rows)),
        ("csv.txt", results_csv(rows)),
    ):
        (tmp_path / name).write_bytes(text.encode())
        assert read_results(tmp_path / name) == rows, name
    assert read_results_csv(tmp_path / "results.csv") == rows
    assert read_results_json(tmp_path / "results.json") == rows


# -- what others have written ----------------------------------------------------------------------------------------


def test_columns_may_be_missing_and_in_any_order() -> None:
    assert read_results_csv("mfu,state,model\n0.5,ok,gpt2\n") == [
        Result(cell=None, state="ok", model="gpt2", mfu=0.5, source="imported")
    ]
    assert read_results_csv("state\nok\n\noom\n") == [
        Result(cell=None, state=state, source="imported") for state in ("ok", "oom")
    ]
    assert read_results_json('[{"state": "ok", "tokens_per_s": 5}]')[0].tokens_per_s == 5.0


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        ("state,mfuu\nok,1\n", "line 1: results have no column 'mfuu'", "did you mean mfu"),
        ("state,mfu,state\n", "line 1: the column 'state' stands twice", None),
        ("model,mfu\ngpt2,1\n", "line 1: the column 'state' is missing", "whether a row was measured"),
        ("state,mfu\nok,1\nok,58.8 %\n", "line 3, column mfu: '58.8 %' is not a number", "no unit"),
        ('state,reason,devices\nok,"a\nb",1\nok,,x\n', "line 4, column devices: 'x' is not a whole number", None),
        ("state,devices\nok,1.5\n", "line 2, column devices: '1.5' is not a whole number", None),
        ("state,predicted_fits\nok,yes\n", "line 2, column predicted_fits: 'yes' is not true or false", None),
        ("state,mfu\nok,1,2\n", "line 2: 3 cells where 2 belong", None),
        ("state,mfu\n,1\n", "line 2, column state: it is empty", None),
        ("state,source\nok,heard\n", "line 2, column source: 'heard' is not known", "measured, predicted, imported"),
        ('state,mfu\nok,"1\n', "line 2 is not CSV", None),
        ("", "is empty", None),
        ("state,tokens_per_s\nok,1_000\n", "line 2, column tokens_per_s: '1_000' is not a number", None),
    ],
    ids=[
        *("name", "twice", "needed", "number", "whole", "fraction", "truth", "cells", "state", "source", "quote"),
        *("empty", "grouped"),
    ],
)
def test_mistakes_of_a_csv_are_named_with_their_place(text: str, what: str, why: str | None) -> None:
    error = refusal(text)
    assert what in error.what
    assert why is None or why in str(error.why)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not valid JSON"),
        ('{"state": "ok"}', "does not hold results"),
        ("[1]", "does not hold results"),
        ('[{"state": "ok"}, {"state": "ok", "mdoel": "x"}]', "row 2: results have no column 'mdoel'"),
        ('[{"state": "ok", "mfu": "58 %"}]', "row 1, column mfu: '58 %' is not a number"),
        ('[{"state": "ok", "devices": true}]', "row 1, column devices: true is not a whole number"),
        ('[{"state": "ok", "model": 7}]', "row 1, column model: 7 is not text"),
    ],
    ids=["broken", "object", "numbers", "name", "share", "truth", "text"],
)
def test_mistakes_of_a_json(text: str, what: str) -> None:
    with pytest.raises(FlopwiseError) as caught:
        read_results_json(text)
    assert what in caught.value.what


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    (tmp_path / "results.md").write_text(results_markdown(mixed()))
    (tmp_path / "bad.csv").write_text("state,mfu\nok,x\n")
    for name, what in (
        ("nothing.csv", "there is no file"),
        (".", "is not a file"),
        ("bytes.csv", "is not text"),
        ("results.md", "of flopwise itself"),
        ("bad.csv", f"{tmp_path / 'bad.csv'}: line 2, column mfu"),
    ):
        with pytest.raises(FlopwiseError) as caught:
            read_results(tmp_path / name)
        assert what in caught.value.what
        assert caught.value.hint


# -- the published tables --------------------------------------------------------------------------------------------

SHAPES = {
    "mpt-125m": (12, 768),
    "mpt-350m": (24, 1024),
    "mpt-760m": (24, 1536),
    "mpt-1b": (24, 2048),
    "mpt-3b": (32, 2560),
    "mpt-7b": (32, 4096),
    "mpt-13b": (40, 5120),
    "mpt-30b": (48, 7168),
    "mpt-70b": (80, 8192),
}
"""Layers and width of llm-foundry's configurations."""
PEAKS = {("h100_80gb", "bf16"): 989.5e12, ("h100_80gb", "fp8"): 1979e12}
A100_PEAK = 312e12


def test_every_published_row_is_a_result_and_its_utilisation_comes_out_again() -> None:
    """`mfu = 3 · (2·N·S + 4·L·d·S²) · sequences/s / (GPUs · peak)` and `hfu = mfu · 4/3`, as the document has them."""
    rows = read_results(DOCUMENT)
    assert len(rows) == 198
    for row in rows:
        assert (row.source, row.state, row.convention) == ("imported", "ok", "palm")
        assert row.model is not None
        assert row.tokens_per_s is not None
        assert row.sequence_tokens is not None
        assert row.n_params is not None
        assert row.devices is not None
        assert row.mfu is not None
        assert row.hfu is not None
        layers, hidden = SHAPES[row.model]
        peak = PEAKS.get((str(row.hardware), str(row.peak_format)), A100_PEAK)
        assert row.peak_flops == peak * row.devices
        sequence = row.sequence_tokens
        flops = 3 * (2 * row.n_params * sequence + 4 * layers * hidden * sequence**2)
        # The printed rate is cut to a whole number: half a token is the middle of what it may have been.
        mfu = flops * (row.tokens_per_s + 0.5) / sequence / (row.devices * peak)
        assert 100 * mfu == pytest.approx(100 * row.mfu, abs=0.01), row
        assert 100 * mfu * (4 / 3 if row.recompute == "full" else 1) == pytest.approx(100 * row.hfu, abs=0.01), row


def test_a_slow_row_keeps_its_digits() -> None:
    # Printed as 0 sequences/s and 4,594 tokens/s at 8,192 tokens.
    row = next(
        row for row in read_results(DOCUMENT) if (row.model, row.tokens_per_s, row.devices) == ("mpt-30b", 4594.0, 8)
    )
    assert row.samples_per_s == 4594 / 8192
    assert row.step_s == 168 * 8192 / 4594
    assert row.model_flops_per_s_per_device == 122_858_300_000_000
    assert (row.precision, row.sharding, row.accumulation_steps) == ("amp_bf16 DEFAULT", "FULL_SHARD", 21)


def test_a_model_that_is_no_mpt_keeps_its_published_name(tmp_path: Path) -> None:
    other = DOCUMENT.read_text(encoding="utf-8").replace("| 64862437376 |", "| 64862437377 |")
    (tmp_path / "other.md").write_text(other)
    rows = read_results(tmp_path / "other.md")
    assert rows[0].model == "70b"
    assert rows[2].model == "mpt-30b"


def test_published_rows_come_back_from_a_csv() -> None:
    rows = read_results(DOCUMENT)
    assert read_results_csv(results_csv(rows)) == rows
