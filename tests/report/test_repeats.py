"""Repeats of a cell as one line for people, and one row each for programs."""

from __future__ import annotations

import re
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from flopwise.report.results import lines_of, plus_minus, results_document
from flopwise.report.results_files import read_results_csv, results_csv
from flopwise.store.results import Result
from tests.support.printing import printed, results_markdown
from tests.support.result_rows import a_result, lost, mixed

RATES = (420_900.0, 421_300.0, 421_600.0)


def three() -> list[Result]:
    """Of one cell, whose steps are steady enough to say nothing of their own."""
    return [
        a_result(
            run=f"000{place}",
            attempt=place,
            repeat=place,
            tokens_per_s=rate,
            tokens_per_s_p20=rate * 0.9999,
            tokens_per_s_p80=rate * 1.0001,
            device_bytes=place * 2**30,
            mfu=0.4 + place / 100,
        )
        for place, rate in enumerate(RATES, 1)
    ]


def test_repeats_are_one_line() -> None:
    """Student's t of two degrees of freedom is 4.303, and the standard deviation of the three is 351."""
    line = lines_of(three())[0]
    assert len(lines_of(three())) == 1
    assert (line.runs, line.row.tokens_per_s, line.row.run) == (3, median(RATES), "0001…0003")
    assert line.half_width == pytest.approx(4.303 * 351.2 / 3**0.5, rel=0.01)
    assert line.row.mfu == pytest.approx(0.42)
    assert line.row.device_bytes == 3 * 2**30
    assert line.row.prediction_error == pytest.approx(11_300 / 421_300 - 1)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_table_says_how_sure_it_is(width: int) -> None:
    lines = printed(results_document([*three(), a_result(run="0009", cell="ff")]), width)
    assert sum("421,300 ± 900 (3 runs)" in line for line in lines) == 1
    assert max(cell_len(line) for line in lines) <= width
    assert [line.split()[0] for line in lines[-2:]] == ["0001…0003", "0009"]


def test_markdown_says_it_too() -> None:
    text = results_markdown(three())
    assert "| 421,300 ± 900 (3 runs) |" in text
    assert len(re.findall(r"^\| llama", text, re.MULTILINE)) == 1
    assert "3 rows measured" in text


def test_programs_get_every_measurement() -> None:
    assert read_results_csv(results_csv(three())) == three()
    assert results_markdown(three(), ["run", "tokens_per_s"]).count("\n| 000") == 3
    assert [line.strip() for line in printed(results_document(three(), ["run"]), 80)] == [
        "run",
        "0001",
        "0002",
        "0003",
    ]


def test_what_is_no_repeat_stays_by_itself() -> None:
    rows = three()
    others = [
        lost("oom", "too large", repeat=4, attempt=4),
        a_result(run="0010"),
        a_result(run="0011"),
        a_result(run="0012", cell=None, repeat=1),
        a_result(run="0013", hardware="h100", repeat=2),
    ]
    assert [line.runs for line in lines_of([*rows, *others])] == [3, 1, 1, 1, 1, 1]
    # Of two files with the same cell: each has its repeats.
    assert [line.runs for line in lines_of([*rows, *rows])] == [3, 3]
    assert [line.row for line in lines_of(mixed())] == mixed()


def test_two_runs_are_hardly_sure() -> None:
    assert lines_of(three()[:2])[0].rate_words("") == "421,000 ± 3,000 (2 runs)"


@pytest.mark.parametrize(
    ("value", "half", "words"),
    [
        (421_300, 873.0, "421,300 ± 900"),
        (421_349, 1_234.0, "421,300 ± 1,300"),
        (11.2345, 0.05, "11.23 ± 0.05"),
        (11.2345, 0.012, "11.234 ± 0.012"),
        (5.0, 40.0, "0 ± 40"),
        (5.0, 0.0, "5 ± 0"),
        (5.0, float("inf"), "-"),
    ],
)
def test_digits(value: float, half: float, words: str) -> None:
    assert plus_minus(value, half) == words


@given(st.floats(1e-6, 1e12), st.floats(1e-9, 1e12))
def test_what_is_told_is_never_surer_than_it_is(value: float, half: float) -> None:
    told, width = (float(part.replace(",", "")) for part in plus_minus(value, half).split(" ± "))
    assert width >= half * (1 - 1e-9)
    # Behind sixteen digits a number in a table is not the same any more.
    assert abs(told - value) <= width + 1e-15 * value
