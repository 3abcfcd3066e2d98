"""Rows of words as tables: for a terminal, in markdown, as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from rich.cells import cell_len
from rich.text import Text

from flopwise.base.files import encodable
from flopwise.report.signs import visible

GAP = 2
"""Blanks between two columns."""

ACTED_ON = ("=", "+", "-", "@", "\t", "\r", "\n", "'")
"""What a spreadsheet may act on where a cell begins with it, and the apostrophe that keeps it from doing so."""
HARMLESS = re.compile(r"-|[+-]?[0-9.,]+(?:[eE][+-]?[0-9]+)?(?: ?%)?", re.ASCII)
"""Words that begin with such a sign and are a number, or stand for none."""

Rows = Sequence[Sequence[str]]


def fitting_columns(columns: Sequence[str], rows: Rows, width: int, giving_way: Sequence[str]) -> tuple[str, ...]:
    """The columns that `width` has room for: those of `giving_way` leave one after the other until the rest fits."""
    widths = dict(zip(columns, _widths(columns, rows), strict=True))
    kept = list(columns)
    for name in giving_way:
        if sum(widths[column] + GAP for column in kept) - GAP <= width:
            break
        if name in kept:
            kept.remove(name)
    return tuple(kept)


def text_table(
    columns: Sequence[str],
    rows: Rows,
    words: Iterable[str],
    *,
    shown: Sequence[str] | None = None,
    styles: Sequence[str] | None = None,
) -> Text:
    """A table for a terminal, never folded or cut; columns of `words` stand left, `styles` colour the rows."""
    left = set(words)
    places = [index for index, name in enumerate(columns) if shown is None or name in shown]
    widths = _widths(columns, rows)
    is_left = [name in left for name in columns]
    lines = []
    for row in (columns, *rows):
        cells = [_padded(_on_a_line(row[place]), widths[place], left=is_left[place]) for place in places]
        lines.append((" " * GAP).join(cells).rstrip())
    table = Text(no_wrap=True, overflow="ignore")
    table.append(lines[0], style="bold")
    # Neighbours of one style are one piece: thousands of pieces take long to print.
    body = zip(lines[1:], styles or [""] * len(rows), strict=True)
    for style, group in groupby(body, key=lambda each: each[1]):
        table.append("".join(f"\n{line}" for line, _ in group), style=style)
    return table


def markdown_table(
    columns: Sequence[str], rows: Rows, words: Iterable[str], *, cell: Callable[[str], str] | None = None
) -> str:
    """A markdown table with its columns lined up, whose cells are text and nothing else; `words` stand left.

    `cell` writes the cells of a table whose own words are markdown; no text of others may be in them.
    """
    left = set(words)
    escaped = [[(cell or markdown_cell)(text) for text in row] for row in rows]
    heads = [markdown_cell(name) for name in columns]
    widths = [max(3, width) for width in _widths(heads, escaped)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            _padded(cell, width, left=name in left) for cell, width, name in zip(cells, widths, columns, strict=True)
        ]
        return "| " + " | ".join(padded) + " |\n"

    rule = [
        "-" * width if name in left else "-" * (width - 1) + ":" for name, width in zip(columns, widths, strict=True)
    ]
    return line(heads) + line(rule) + "".join(line(row) for row in escaped)


def markdown_text(text: str) -> str:
    """Text that stays text within markdown, on one line: no tag, link, picture, emphasis or code begins in it."""
    line = " ".join(text.splitlines()) if text.splitlines()[1:] else text.rstrip("\r\n")
    return re.sub(r"([\\`*\[~])", r"\\\1", visible(line)).replace("<", "&lt;")


def markdown_cell(text: str) -> str:
    """The same within a table."""
    return markdown_text(text).replace("|", r"\|")


def csv_word(text: str) -> str:
    """Text that a spreadsheet takes for text: with an apostrophe before what it would take for a formula."""
    word = encodable(text)
    return f"'{word}" if word.startswith(ACTED_ON) else word


def csv_text(records: Sequence[Mapping[str, object]]) -> str:
    """One line per record under the names of the first one's keys; None is an empty cell."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _csv_cell(value) for name, value in record.items()} for record in records)
    return stream.getvalue()


def _csv_cell(value: object) -> object:
    return csv_word(value) if isinstance(value, str) and not HARMLESS.fullmatch(value) else value


def _on_a_line(cell: str) -> str:
    return cell if cell.isprintable() else visible(cell).replace("\n", "?")


def _widths(columns: Sequence[str], rows: Rows) -> list[int]:
    return [max(map(_width, {row[index] for row in (columns, *rows)})) for index in range(len(columns))]


def _width(cell: str) -> int:
    """In columns of a terminal; plain letters, which most cells have, need no table of widths."""
    return len(cell) if cell.isascii() and cell.isprintable() else cell_len(_on_a_line(cell))


def _padded(cell: str, width: int, *, left: bool) -> str:
    blanks = " " * (width - _width(cell))
    return cell + blanks if left else blanks + cell
