"""Rows of words as tables: for a terminal, in markdown, as CSV; and words in lines of a given width."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

from rich.cells import cell_len
from rich.text import Text

from flopwise.base.files import encodable
from flopwise.report.words import visible

GAP = 2
"""Blanks between two columns."""

ACTED_ON = ("=", "+", "-", "@", "\t", "\r", "\n", "'")
"""What a spreadsheet may act on where a cell begins with it, and the apostrophe that keeps it from doing so."""
HARMLESS = re.compile(r"-|[+-]?[0-9.,]+(?:[eE][+-]?[0-9]+)?(?: ?%)?", re.ASCII)
"""Words that begin with such a sign and are a number, or stand for none."""

Rows = Sequence[Sequence[str]]


class Styled(str):
    """Words in a style of the terminal; where there are no styles, a string."""

    style: str

    def __new__(cls, text: str, style: str) -> Styled:
        styled = super().__new__(cls, text)
        styled.style = style
        return styled


def style_of(words: str) -> str:
    return words.style if isinstance(words, Styled) else ""


# -- for a terminal --------------------------------------------------------------------------------------------------


def fitting_columns(widths: Mapping[str, int], width: int, giving_way: Sequence[str]) -> tuple[str, ...]:
    """The columns that `width` has room for: those of `giving_way` leave one after the other until the rest fits."""
    kept = list(widths)
    for name in giving_way:
        if sum(widths[column] + GAP for column in kept) - GAP <= width:
            break
        if name in kept:
            kept.remove(name)
    return tuple(kept)


def text_table(
    columns: Sequence[str], rows: Rows, left: Collection[str], *, styles: Sequence[str] = (), headed: bool = True
) -> Text:
    """A table for a terminal, never folded or cut; columns of `left` stand left, `styles` colour the rows."""
    widths = list(column_widths(columns, rows, headed=headed).values())
    is_left = [name in left for name in columns]

    def padded(row: Sequence[str]) -> list[str]:
        cells = zip(row, widths, is_left, strict=True)
        return [_pad(_on_a_line(cell), width, left=stands_left) for cell, width, stands_left in cells]

    lines = [(" " * GAP).join(padded(row)).rstrip() for row in ((columns, *rows) if headed else rows)]
    table = Text(no_wrap=True, overflow="ignore")
    if headed:
        table.append(lines[0], style="bold")
    # Neighbours of one style are one piece: thousands of pieces take long to print.
    for style, group in groupby(zip(lines[headed:], styles or [""] * len(rows), strict=True), key=lambda each: each[1]):
        text = "\n".join(line for line, _ in group)
        table.append(f"\n{text}" if table.plain else text, style=style)
    _colour_cells(table, rows, widths, start=len(lines[0]) + 1 if headed else 0, lines=lines[headed:])
    return table


def _colour_cells(table: Text, rows: Rows, widths: Sequence[int], *, start: int, lines: Sequence[str]) -> None:
    for row, line in zip(rows, lines, strict=True):
        place = start
        for cell, width in zip(row, widths, strict=True):
            # Signs that are two columns wide are few: a colour may end one sign late.
            table.stylize(style_of(cell), place, min(place + width, start + len(line))) if style_of(cell) else None
            place += width + GAP
        start += len(line) + 1


def column_widths(columns: Sequence[str], rows: Rows, *, headed: bool = True) -> dict[str, int]:
    """Columns of a terminal that each column of the table takes."""
    lines = (columns, *rows) if headed else rows
    widths = [max(map(_width, {row[index] for row in lines}), default=0) for index in range(len(columns))]
    return dict(zip(columns, widths, strict=True))


def _on_a_line(cell: str) -> str:
    return cell if cell.isprintable() else visible(cell).replace("\n", "?")


def _width(cell: str) -> int:
    """In columns of a terminal; plain letters, which most cells have, need no table of widths."""
    return len(cell) if cell.isascii() and cell.isprintable() else cell_len(_on_a_line(cell))


def _pad(cell: str, width: int, *, left: bool) -> str:
    blanks = " " * (width - _width(cell))
    return cell + blanks if left else blanks + cell


# -- lines -----------------------------------------------------------------------------------------------------------

FIRM = "\u00a0"
"""A blank at which `textwrap` does not break a line."""
UNIT = re.compile(
    r"(?<=\d) (?=(?:%|tok/s|[kMGTP]?i?B|s|ms|µs|us|min|h|days|tokens|FLOP/B|[kMGTP]?FLOP(?:/s)?)(?:[\s),;.]|$))"
)


def bind_units(words: str) -> str:
    """Words with the blanks made firm that stand between a number and its unit."""
    return UNIT.sub(FIRM, words).replace("± ", f"±{FIRM}")


def wrap_parts(parts: Iterable[str], width: int, *, separator: str = " · ", indent: int = 0) -> list[str]:
    """Parts one after the other in lines of at most `width`, broken between them; later lines are indented."""
    lines: list[str] = []
    for part in parts:
        room = width - (indent if lines else 0)
        if lines and cell_len(lines[-1]) + len(separator) + cell_len(part) <= width:
            lines[-1] += separator + part
        elif cell_len(part) <= room:
            lines.append(" " * (indent if lines else 0) + part)
        else:
            broken = textwrap.wrap(bind_units(part), width - indent, break_on_hyphens=False) or [""]
            lines += [
                " " * (indent if lines or number else 0) + line.replace(FIRM, " ") for number, line in enumerate(broken)
            ]
    return lines


def fold_words(words: str, width: int, *, indent: int = 0) -> list[str]:
    """Words in lines of at most `width`, broken behind their dots where that is possible."""
    lines = []
    for line in words.split("\n"):
        *parts, last = line.split(" · ")
        lines += wrap_parts([*(f"{part} ·" for part in parts), last], width, separator=" ", indent=indent)
    return lines


# -- markdown --------------------------------------------------------------------------------------------------------


def markdown_table(columns: Sequence[str], rows: Rows, left: Collection[str]) -> str:
    """A markdown table with its columns lined up, whose cells are text and nothing else; `left` stand left."""
    escaped = [
        [f"**{markdown_cell(cell)}**" if "bold" in style_of(cell) else markdown_cell(cell) for cell in row]
        for row in rows
    ]
    heads = [markdown_cell(name) for name in columns]
    widths = [max(3, *(_width(row[index]) for row in (heads, *escaped))) for index in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            _pad(cell, width, left=name in left) for cell, width, name in zip(cells, widths, columns, strict=True)
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


# -- CSV -------------------------------------------------------------------------------------------------------------


def csv_word(text: str) -> str:
    """Text that a spreadsheet takes for text: with an apostrophe before what it would take for a formula."""
    word = encodable(text)
    return f"'{word}" if word.startswith(ACTED_ON) else word


def csv_text(records: Iterable[Mapping[str, object]], fields: Sequence[str] = (), *, faithful: bool = False) -> str:
    """One line per record under the names of the first one's keys, or `fields`; None is an empty cell.

    `faithful` cells are those of a file that is read back, as `report.results_files` describes it.
    """
    listed = list(records)
    stream = io.StringIO(newline="")
    ending, cell = ("\r\n", _faithful_cell) if faithful else ("\n", _csv_cell)
    writer = csv.DictWriter(stream, fieldnames=fields or list(listed[0]), lineterminator=ending)
    writer.writeheader()
    writer.writerows({name: cell(value) for name, value in record.items()} for record in listed)
    return stream.getvalue()


def _csv_cell(value: object) -> object:
    return csv_word(value) if isinstance(value, str) and not HARMLESS.fullmatch(value) else value


def _faithful_cell(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return (csv_word(value) if value else "'") if isinstance(value, str) else value
