"""Comma-separated tables, row by row: each mistake is answered with its file, line and column."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.base.files import read_text
from flopwise.base.headers import other_separator, otherwise_written
from flopwise.base.units import parse_figure, parse_tokens
from flopwise.catalog.load import hardware_aliases, hardware_names, load_hardware, load_model, split_power

LARGEST_NUMBER = 10**15
"""No cell that is read counts more than this; beyond it a number is a typing mistake."""

Meaning = TypeVar("Meaning")


load_device, shipped_model = cache(load_hardware), cache(load_model)
"""A device and a model of the catalogue, read once for all rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """A line of a table: cells by the name of their column, and where they stand."""

    where: str
    """The table's file or name, as an error repeats it."""
    line: int
    """Line of the file, from 1."""
    number: int
    """Rows of the table up to this one, from 1."""
    cells: Mapping[str, str]
    odd: FlopwiseError | None = None
    """What is wrong with the row as a whole, for who passes over such rows."""

    def has(self, column: str) -> bool:
        """Whether there is anything in the cell."""
        return bool(self.cells[column])

    def text(self, column: str) -> str:
        """A cell that must not be empty."""
        if not self.cells[column]:
            raise self.wrong(column, "is empty", hint=f"fill in {column}, or leave out the row")
        return self.cells[column]

    def number_of(self, column: str) -> float:
        """A cell that holds a number above 0."""
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            raise self.wrong(column, "is not a number", hint="a number such as 1024 or 12.5") from None
        return self._in_range(column, value)

    def figure(self, column: str) -> float:
        """The same of what was measured, as logs print it too: `66.67k`, `66,670`."""
        text = self.text(column)
        try:
            value = parse_figure(text)
        except FlopwiseError:
            raise self.wrong(column, "is not a number", hint="a number such as 1024, 12.5 or 66.67k") from None
        return self._in_range(column, value)

    def _in_range(self, column: str, value: float) -> float:
        if not math.isfinite(value) or not 0 < value <= LARGEST_NUMBER:
            raise self.wrong(column, "is out of range", hint=f"a number above 0 and up to {LARGEST_NUMBER:.0e}")
        return value

    def count(self, column: str) -> int:
        """A cell that holds a whole number of at least 1; `16.0` passes for 16."""
        value = self.number_of(column)
        if value != int(value):
            raise self.wrong(column, "is not a whole number", hint="a number such as 1 or 16")
        return int(value)

    def tokens(self, column: str) -> int:
        """A cell that counts tokens or sequences, in the units that these have everywhere: `8k` is 8,192."""
        text = self.text(column)
        if not text[-1:].isalpha():
            return self.count(column)
        try:
            return parse_tokens(text)
        except FlopwiseError as error:
            raise self.wrong(column, f"is no count of tokens ({error.what})", hint=error.hint or "8k") from None

    def truth(self, column: str) -> bool:
        """A cell that holds True or False."""
        return self.meaning(column, {"true": True, "false": False}, kind="truth value")

    def meaning(self, column: str, meanings: Mapping[str, Meaning], *, kind: str) -> Meaning:
        """What a word in a cell stands for, its case ignored."""
        word = self.text(column).lower()
        if word not in meanings:
            error = unknown_name(kind, self.text(column), meanings, hint=f"{column} is one of {_some(meanings)}")
            raise error.within(self.place)
        return meanings[word]

    def hardware(self, column: str) -> str:
        """The catalogue's name of the device that a cell names by any of its names."""
        word, watts = split_power(self.text(column).lower().replace("_", "-"))
        known = {**hardware_aliases(), **{name: name for name in hardware_names()}}
        if word not in known:
            raise unknown_name("GPU", self.text(column), known, hint="`flopwise ls hardware`").within(self.place)
        return known[word] if watts is None else f"{known[word]}@{watts:g}W"

    @property
    def place(self) -> str:
        return f"{self.where}, line {self.line}"

    def wrong(self, column: str, problem: str, *, hint: str) -> FlopwiseError:
        """An error about one cell."""
        return FlopwiseError(f"{self.place}: {column} = {shown(self.cells[column])} {problem}", hint=hint)


@contextmanager
def tell_row(row: TableRow) -> Iterator[None]:
    """Tell of any mistake found meanwhile which row it is in."""
    if row.odd:
        raise row.odd
    try:
        yield
    except FlopwiseError as error:
        raise error.within(row.place) from None


def check_batch(row: TableRow, batch: int, data: int, column: str) -> None:
    """Refuse a batch that the data ranks cannot share evenly."""
    if batch % data:
        raise row.wrong(column, f"is not a multiple of {data} data ranks", hint="each rank takes as many sequences")


def read_rows(path: Path, columns: Sequence[str], *, every: bool = True) -> tuple[TableRow, ...]:
    """The rows of a file that must have these columns, in any order and among others.

    One with too few or too many cells is an error, or without `every` a row that says that it is `odd`.
    """
    return parse_rows(_text(path, columns), str(path), columns, every=every)


def column_names(path: Path) -> tuple[str, ...]:
    """The names that a file's first line gives its columns; none for an empty file."""
    lines = _lines(_text(path, ()), str(path), ())
    check_separator(lines[0][1] if lines else [], str(path))
    return tuple(lines[0][1]) if lines else ()


def parse_rows(text: str, where: str, columns: Sequence[str], *, every: bool = True) -> tuple[TableRow, ...]:
    """The rows of a table's text; `where` names it in an error."""
    lines = _lines(text, where, columns)
    if not lines:
        raise FlopwiseError(f"{where} is empty", hint=_describe_columns(columns))
    (_, names), *body = lines
    check_separator(names, where)
    _check_header(names, columns, where)
    if not body:
        raise FlopwiseError(f"{where} has no rows", why="nothing follows its header", hint=_describe_columns(columns))
    rows = tuple(_row(line, number, cells, names, where) for number, (line, cells) in enumerate(body, start=1))
    if every and (odd := next((row.odd for row in rows if row.odd), None)):
        raise odd
    return rows


def _text(path: Path, columns: Sequence[str]) -> str:
    try:
        return read_text(path)
    except FlopwiseError as error:
        # What a description's reader advises is of no use for a table.
        raise FlopwiseError(error.what, why=error.why, hint=_describe_columns(columns)) from None


def _lines(text: str, where: str, columns: Sequence[str]) -> list[tuple[int, list[str]]]:
    """Number and cells of every line that is not blank."""
    reader = csv.reader(io.StringIO(text), strict=True)
    lines: list[tuple[int, list[str]]] = []
    try:
        lines.extend((reader.line_num, [cell.strip() for cell in cells]) for cells in reader)
    except csv.Error as error:
        what = f"{where}, line {reader.line_num}: cannot be read"
        raise FlopwiseError(what, why=str(error), hint=_describe_columns(columns)) from None
    return [(line, cells) for line, cells in lines if any(cells)]


def _describe_columns(columns: Sequence[str]) -> str:
    return f"a comma-separated file{' with the columns ' if columns else ''}{', '.join(columns)}"


def check_separator(names: Sequence[str], where: str) -> None:
    """Refuse a table whose columns are separated by something else than commas."""
    separator = other_separator(names)
    if separator is not None:
        raise FlopwiseError(
            f"{where} has {separator} between its columns",
            why="columns are separated by commas",
            hint="save it with commas, and numbers with a decimal point",
        )


def column_hint(missing: Iterable[str], names: Iterable[str], otherwise: str) -> str:
    """What to do about columns that a header lacks: those that it has in other letters are named."""
    near = otherwise_written(missing, names)
    return ", ".join(f"write {wanted} for {shown(there)}" for wanted, there in near.items()) or otherwise


def _check_header(names: list[str], wanted: Sequence[str], where: str) -> None:
    missing = [name for name in wanted if name not in names]
    if missing:
        raise FlopwiseError(
            f"{where} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}",
            why=f"its first line names: {_some(names)}",
            hint=column_hint(missing, names, "the first line names the columns, as the shipped tables do"),
        )
    twice = [name for name in wanted if names.count(name) > 1]
    if twice:
        raise FlopwiseError(f"{where} has the column {twice[0]} {names.count(twice[0])} times", hint="keep one of them")


def _row(line: int, number: int, cells: list[str], names: list[str], where: str) -> TableRow:
    odd = None
    if len(cells) != len(names):
        odd = FlopwiseError(
            f"{where}, line {line}: {len(cells)} cells where the header names {len(names)} columns",
            hint="look for a missing or an extra comma",
        )
    filled = [*cells, *[""] * len(names)]
    return TableRow(where=where, line=line, number=number, cells=dict(zip(names, filled, strict=False)), odd=odd)


def _some(names: Iterable[str], limit: int = 60) -> str:
    """Names for an error: a file of thousands of columns must not fill the screen."""
    listed = [name[:limit] for name in names]
    return ", ".join(listed[:limit]) + (f", … ({len(listed)} in all)" if len(listed) > limit else "")
