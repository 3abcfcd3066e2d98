"""Rows of words as tables: for a terminal, in markdown, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len
from rich.text import Text

GAP = 2
"""Blanks between two columns."""

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
    table = Text(no_wrap=True, overflow="ignore")
    for number, row in enumerate((columns, *rows)):
        cells = [_padded(row[place], widths[place], left=columns[place] in left) for place in places]
        style = "bold" if number == 0 else styles[number - 1] if styles else ""
        table.append((" " * GAP).join(cells).rstrip() + ("\n" if number < len(rows) else ""), style=style)
    return table


def markdown_table(columns: Sequence[str], rows: Rows, words: Iterable[str]) -> str:
    """A markdown table with its columns lined up; `words` are the columns that stand left."""
    left = set(words)
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(3, width) for width in _widths(columns, escaped)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            _padded(cell, width, left=name in left) for cell, width, name in zip(cells, widths, columns, strict=True)
        ]
        return "| " + " | ".join(padded) + " |\n"

    rule = [
        "-" * width if name in left else "-" * (width - 1) + ":" for name, width in zip(columns, widths, strict=True)
    ]
    return line(columns) + line(rule) + "".join(line(row) for row in escaped)


def csv_text(records: Sequence[Mapping[str, object]]) -> str:
    """One line per record under the names of the first one's keys; None is an empty cell."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def _widths(columns: Sequence[str], rows: Rows) -> list[int]:
    return [max(cell_len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]


def _padded(cell: str, width: int, *, left: bool) -> str:
    blanks = " " * (width - cell_len(cell))
    return cell + blanks if left else blanks + cell
