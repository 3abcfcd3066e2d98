"""Results as files: `results.csv` and JSON at full precision, both read back equal; published tables read as results.

CSV is that of RFC 4180 with a header. An empty cell is None. A spreadsheet takes text that begins with = + - @ for a
formula, so such text is written with an apostrophe before it, as is empty text and text that has one there itself;
reading takes it off again.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from flopwise.base.errors import FlopwiseError, nearest, shown
from flopwise.base.files import entry_kind
from flopwise.report.tables import csv_text
from flopwise.store.results import FIELDS, Result, Source
from flopwise.store.runs import NOT_FINITE

OFFLOADED = " and offload"
"""Behind `recompute`: what is kept goes to the host."""
TITLE = "Results"
"""Of `results.md`."""
LARGEST_FILE_BYTES = 256 * 2**20
NEEDED = ("state",)
"""Columns that a row cannot do without."""
SOURCES: tuple[str, ...] = get_args(Source)


@cache
def kinds() -> dict[str, type]:
    """What each field holds where it is not None: str, int, float or bool."""
    hints = get_type_hints(Result)
    return {name: _kind(hints[name]) for name in FIELDS}


def _kind(hint: object) -> type:
    choices = [choice for choice in get_args(hint) or (hint,) if choice is not type(None)]
    return choices[0] if isinstance(choices[0], type) else str


def check_fields(names: Sequence[str], where: str) -> None:
    """Refuse names that results do not have, and a name that stands twice."""
    for number, name in enumerate(names):
        if name not in FIELDS:
            close = nearest(name, FIELDS)
            why = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(FIELDS)}"
            raise FlopwiseError(
                f"{where}: results have no column {shown(name)}",
                why=why,
                hint="`flopwise report -o csv` prints every column",
            )
        if name in names[:number]:
            raise FlopwiseError(f"{where}: the column {shown(name)} stands twice", hint="remove one of the two")


# -- CSV -------------------------------------------------------------------------------------------------------------


def results_rows(rows: Iterable[Result], columns: Sequence[str] = FIELDS) -> Iterator[dict[str, object]]:
    """A row for each result under the names of its fields, as CSV and JSON have them."""
    return ({name: getattr(row, name) for name in columns} for row in rows)


def results_csv(rows: Iterable[Result]) -> str:
    """The text of `results.csv`."""
    return csv_text(results_rows(rows), FIELDS, faithful=True)


def read_results_csv(source: str | Path) -> list[Result]:
    """Rows of `results.csv`: its text, or the path of the file. Columns may be missing and stand in any order."""
    where, text = (str(source), file_text(source)) if isinstance(source, Path) else ("results.csv", source)
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    names: list[str] | None = None
    rows: list[Result] = []
    line = 1
    try:
        for cells in reader:
            if names is None:
                names = cells
                _check_header(names, where)
            elif cells:
                rows.append(_csv_row(names, cells, f"{where}: line {line}"))
            line = reader.line_num + 1
    except csv.Error as error:
        raise FlopwiseError(f"{where}: line {line} is not CSV", why=str(error), hint="write the file anew") from None
    if names is None:
        raise FlopwiseError(f"{where} is empty", why="the first line names the columns", hint="write the file anew")
    return rows


def _check_header(names: Sequence[str], where: str) -> None:
    check_fields(names, f"{where}: line 1")
    for needed in NEEDED:
        if needed not in names:
            raise FlopwiseError(
                f"{where}: line 1: the column {needed!r} is missing",
                why="it tells whether a row was measured at all",
                hint=f"add {needed!r}, with ok in every row that was measured",
            )


def _csv_row(names: Sequence[str], cells: Sequence[str], where: str) -> Result:
    if len(cells) != len(names):
        raise FlopwiseError(
            f"{where}: {len(cells)} cells where {len(names)} belong",
            why="every line has as many as the first",
            hint="look for a missing or an extra comma, or a quotation mark",
        )
    values = {name: _read_cell(name, cell, where) for name, cell in zip(names, cells, strict=True)}
    return _result(values, where)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}


def _read_cell(name: str, cell: str, where: str) -> object:
    kind = kinds()[name]
    if cell == "":
        return None
    if kind is str:
        return cell.removeprefix("'")
    try:
        return msgspec.convert(cell.strip().lower(), kind, strict=False)
    except msgspec.ValidationError:
        raise FlopwiseError(
            f"{where}, column {name}: {shown(cell)} is not {_WORDS[kind]}",
            why="full precision, no separators of thousands and no unit are expected",
            hint="correct the cell, or leave it empty where the value is not known",
        ) from None


def _result(values: dict[str, Any], where: str) -> Result:
    """A row of values of the right kinds; whether words are among those that a field can have is checked here."""
    if values.get("state") is None:
        raise FlopwiseError(f"{where}, column state: it is empty", hint="ok, oom, timeout, failed or skipped")
    if values.get("source") is None:
        values["source"] = "imported"
    if values["source"] not in SOURCES:
        raise FlopwiseError(
            f"{where}, column source: {shown(values['source'])} is not known",
            why=f"it is one of {', '.join(SOURCES)}",
            hint="imported, where somebody else measured it",
        )
    return Result(**{"cell": None, **values})


# -- JSON ------------------------------------------------------------------------------------------------------------


def read_results_json(source: str | Path) -> list[Result]:
    """Rows of `results.json`: its text, or the path of the file."""
    where, text = (str(source), file_text(source)) if isinstance(source, Path) else ("results.json", source)
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FlopwiseError(f"{where} is not valid JSON", why=str(error), hint="write the file anew") from None
    found = found.get("rows") if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise FlopwiseError(
            f"{where} does not hold results", why="`rows` with objects are expected", hint="`flopwise report -o json`"
        )
    return [_json_row(item, f"{where}: row {number}") for number, item in enumerate(found, 1)]


def _json_row(item: dict[str, Any], where: str) -> Result:
    check_fields(list(item), where)
    return _result({name: _json_value(name, value, where) for name, value in item.items()}, where)


def _json_value(name: str, value: object, where: str) -> object:
    kind = kinds()[name]
    if kind is float and isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    try:
        return msgspec.convert(value, kind | None)
    except msgspec.ValidationError:
        raise FlopwiseError(
            f"{where}, column {name}: {shown(value)} is not {_WORDS.get(kind, 'text')}",
            hint="correct it, or write null where it is not known",
        ) from None


def file_text(path: Path) -> str:
    hint = "a results.csv or results.json of flopwise, or a markdown document with benchmark tables"
    if entry_kind(path) == "nothing":
        raise FlopwiseError(f"there is no file {shown(str(path))}", hint=hint)
    if entry_kind(path) != "file":
        raise FlopwiseError(f"{path} is not a file", hint=hint)
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            why = f"at most {LARGEST_FILE_BYTES:,} bytes are read"
            raise FlopwiseError(f"{path} is too large for results", why=why, hint=hint)
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise FlopwiseError(f"{path} cannot be read", why=error.strerror, hint=hint) from None
    except UnicodeDecodeError as error:
        raise FlopwiseError(f"{path} is not text", why=f"byte {error.start} is not UTF-8", hint=hint) from None
