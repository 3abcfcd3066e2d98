"""No name of a model, a machine or a file becomes a formula, a tag, a link or a piece of code in a report."""

from __future__ import annotations

import csv
import io

import pytest

from flopwise.report.document import to_csv, to_markdown
from flopwise.report.run_comparison import Measured, compare_runs, comparison_document, quantiles_of
from flopwise.report.tables import csv_text, csv_word, markdown_table, markdown_text
from tests.support.printing import results_markdown
from tests.support.result_rows import a_result

BAD = ("=cmd()", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "'=1")


@pytest.mark.parametrize("text", BAD)
def test_no_text_of_a_csv_is_a_formula(text: str) -> None:
    written = csv_text([{"name": text, "share": -0.25, "none": None, "empty": ""}])
    row = next(csv.DictReader(io.StringIO(written)))
    assert row == {"name": f"'{text}", "share": "-0.25", "none": "", "empty": ""}
    assert csv_word(text) == f"'{text}"


@pytest.mark.parametrize("text", ["-", "-0.3", "+5.1 %", "-1e-9", "gpt2", "a=b", ""])
def test_numbers_and_names_are_written_as_they_are(text: str) -> None:
    assert csv_text([{"name": text, "other": 1}]) == f"name,other\n{text},1\n"


def test_markdown_stays_text() -> None:
    assert markdown_text("<img src=x>") == "&lt;img src=x>"
    assert markdown_text("![x](http://a)") == "!\\[x](http://a)"
    assert markdown_text("a`b*c\\d") == "a\\`b\\*c\\\\d"
    assert markdown_text("one\ntwo\r\n# three\n") == "one two # three"
    assert markdown_table(["a"], [[markdown_text("x|y")]], {"a"}).splitlines()[2] == "| x\\|y |"


@pytest.mark.parametrize("name", ["<img src=x onerror=y>", "![x](http://a.b)", "`rm`", "a|b", "one\n\n# two"])
def test_names_in_reports_of_results_and_of_two_sides(name: str) -> None:
    rows = [a_result(model=name, hardware=name, card=name, commit=None), a_result(model=name, hardware=name, card="x")]
    sides = [[Measured(row=row, sample=quantiles_of(row))] for row in rows]
    found = compare_runs(sides[0], sides[1], names=(name, "after"), threshold=0.03)
    for text in (results_markdown(rows), to_markdown(comparison_document(found))):
        for sign in ("<img", "![x](", " `rm`", "\n# two", "| a|b"):
            assert sign not in text


def test_a_formula_in_a_comparison() -> None:
    row = a_result(model="=cmd()")
    side = [Measured(row=row, sample=quantiles_of(row))]
    assert ",'=cmd()," in to_csv(comparison_document(compare_runs(side, side, names=("a", "b"), threshold=0.03)))
