"""Headers of tables that are separated or written otherwise, and figures as logs print them."""

from __future__ import annotations

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.base.headers import other_separator, otherwise_written
from flopwise.base.units import parse_figure


def test_what_separates_a_header() -> None:
    assert other_separator(["text;label"]) == "semicolons"
    assert other_separator(["text\tlabel"]) == "tabs"
    assert other_separator(["text", "a;b"]) is None
    assert other_separator(["text"]) is None
    assert other_separator([]) is None


def test_columns_in_other_letters() -> None:
    assert otherwise_written(("text", "label"), ("Text", " LABEL", "x")) == {"text": "Text", "label": " LABEL"}
    assert otherwise_written(("seq_len",), ("Seq Len",)) == {"seq_len": "Seq Len"}
    assert otherwise_written(("text",), ("text", "Text")) == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [("66670", 66670), ("66,670", 66670), ("66.67k", 66670), ("66.67 K", 66670), ("6.667e4", 66670), ("1.5M", 1.5e6)],
)
def test_figures_as_they_are_printed(text: str, value: float) -> None:
    assert parse_figure(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["", "66,67", "1,2345", "k", "8ki", "-3", "nan", "1.2.3", "12 %"])
def test_what_is_no_figure_is_refused(text: str) -> None:
    with pytest.raises(FlopwiseError):
        parse_figure(text)
