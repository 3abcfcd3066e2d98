"""One document in every form: nothing is too wide, nothing is lost, nothing becomes markup."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from flopwise.report.document import Document, Figure, Heading, Items, Table, Words, facts, to_csv, to_html, to_markdown
from flopwise.report.tables import Styled
from tests.support.printing import printed

HOSTILE = "<script>alert(1)</script> | `x` *y*"


def a_table(**changes: object) -> Table:
    rows = [["first", "1.50 s", "why it is so and not otherwise"], ["second", "22.0 s", "short"]]
    return Table(columns=("name", "time", "why"), rows=rows, left={"name", "why"}, **changes)  # type: ignore[arg-type]


def test_columns_give_way_are_cut_or_folded() -> None:
    assert printed(a_table(giving_way=("why",)), 30) == ["name      time", "first   1.50 s", "second  22.0 s"]
    assert printed(a_table(cut={"why": 8}), 30)[1] == "first   1.50 s  why it is so…"
    assert printed(a_table(folded={"why": 0}), 30) == [
        "name      time  why",
        "first   1.50 s  why it is so",
        "                and not",
        "                otherwise",
        "second  22.0 s  short",
    ]


def test_columns_without_room_come_below() -> None:
    table = Table(columns=("of", "a", "b", "c"), rows=[["x", "1", "2", "-"], ["y", "3", "-", "4"]], banded=True)
    assert printed(table, 8) == ["of  a  b", " x  1  2", " y  3  -", "", "of  c", " y  4"]


def test_a_figure_stays_with_its_unit_and_lines_break_behind_dots() -> None:
    assert printed(Words("about 83.1 GiB of it"), 12) == ["about", "83.1 GiB of", "it"]
    assert printed(facts([("a", "one two · three four"), ("b", "")]), 16) == ["a  one two ·", "   three four"]


@settings(max_examples=50, deadline=None)
@given(words=st.text("ab c×·", max_size=80), width=st.integers(30, 90))
def test_no_line_is_too_long_and_no_letter_is_lost(words: str, width: int) -> None:
    lines = printed(Document(blocks=[facts([("label", words), ("other", "x")]), Words(words)]), width)
    assert all(cell_len(line) <= width for line in lines)
    assert sum(line.count("a") for line in lines) == 2 * words.count("a") + len(["label"] if words else [])


@pytest.mark.parametrize("block", [Words(HOSTILE), Heading(HOSTILE), Items(HOSTILE, [HOSTILE]), Figure([HOSTILE])])
def test_words_never_become_markup(block: Words | Heading | Items | Figure) -> None:
    table = Table(columns=("a",), rows=[[HOSTILE]], title=HOSTILE, note=HOSTILE)
    document = Document(title=HOSTILE, blocks=[block, table])
    for text in (to_html(document), to_markdown(document)):
        assert "<script" not in text
    assert r"\|" in to_markdown(document)


def test_styles_are_colours_bold_or_nothing() -> None:
    table = Table(columns=("a",), rows=[[Styled("best", "bold green")]], left={"a"})
    assert "**best**" in to_markdown(Document(blocks=[table]))
    assert "font-weight:600;color:" in to_html(Document(blocks=[table]))
    assert printed(table, 80) == ["a", "best"]


def test_csv_has_its_fields_where_there_are_no_rows() -> None:
    assert to_csv(Document(fields=("a", "b"))) == "a,b\n"
    rows: list[dict[str, object]] = [{"a": "", "b": True}, {"a": None, "b": "=1"}]
    assert to_csv(Document(rows=rows)) == "a,b\n,True\n,'=1\n"
    assert to_csv(Document(rows=rows, faithful=True)) == "a,b\r\n',true\r\n,'=1\r\n"
