"""Lines of JSONL and rows of CSV by their columns; documents and samples made of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from flopwise.base.errors import FlopwiseError, shown
from flopwise.engine.data.sources import PIECE_BYTES, DataSource, Entry, ReadingProgress, decode_text, pieces

LARGEST_FIELD = 2**31 - 1
"""Characters of a field of a CSV file; Python's own limit is that of a long page."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A document, or a piece of a long one."""

    text: str
    last: bool
    """Whether its document ends with it."""


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A text with its label."""

    text: str
    label: str
    place: str
    """The file and line that it stands in, for an error or a note; a cache keeps it, wherever the file lies."""


def passages(entry: Entry, text_column: str, progress: ReadingProgress | None) -> Iterator[Passage]:
    """The documents of a file: a text file is one, every line or row of the others is. Blank ones are left out."""
    if entry.source.form != "text":
        for line, (value,) in _records(entry, (text_column,), progress):
            text = _text(value, text_column, entry.source.path, line)
            if text.strip():
                yield Passage(text, last=True)
        return
    before: str | None = None
    begun = False
    for piece in pieces(entry, progress):
        if before is not None:
            yield Passage(before, last=False)
            begun = True
        before = piece
    if before is not None and (begun or before.strip()):
        yield Passage(before, last=True)


def samples(
    entry: Entry, text_column: str, label_column: str, progress: ReadingProgress | None
) -> Iterator[TextRecord]:
    """The labelled texts of a file, blank ones too."""
    path = entry.source.path
    for line, (text, label) in _records(entry, (text_column, label_column), progress):
        yield TextRecord(
            _text(text, text_column, path, line), _label(label, label_column, path, line), f"{entry.source.name}:{line}"
        )


def _text(value: object, column: str, path: Path, line: int) -> str:
    if not isinstance(value, str):
        raise FlopwiseError(
            f"{path}, line {line}: {column} is no text",
            why=f"it is {shown(value)}",
            hint="put it in quotes, or name the column that holds the text",
        )
    return value


def _label(value: object, column: str, path: Path, line: int) -> str:
    if isinstance(value, bool):
        return shown(value)
    if isinstance(value, int) or (isinstance(value, str) and value.strip()):
        return str(value)
    raise FlopwiseError(
        f"{path}, line {line}: {column} is no label",
        why="it is blank" if isinstance(value, str) else f"it is {shown(value)}; a label is a text or a whole number",
        hint="correct the line, or name the column that holds the labels",
    )


def _records(
    entry: Entry, columns: tuple[str, ...], progress: ReadingProgress | None
) -> Iterator[tuple[int, list[object]]]:
    """The line number and the asked-for columns of every record."""
    lines = pieces(entry, progress, whole_lines=True)
    if entry.source.form == "jsonl":
        return _json_records(entry.source.path, lines, columns)
    return _csv_records(entry.source.path, lines, columns)


def lines_of(entry: Entry) -> Iterator[str]:
    """The lines of a file that are not blank."""
    for piece in pieces(entry, None, whole_lines=True):
        yield from (line.strip() for line in piece.splitlines() if line.strip())


def column_of(entry: Entry, names: tuple[str, ...]) -> Iterator[object]:
    """The values of a table's first column of those names that it has, or of its only one."""
    path = entry.source.path
    lines = pieces(entry, None, whole_lines=True)
    first = next(lines, "")
    line = next((line for line in first.split("\n") if line.strip()), "")
    there: list[str] = []
    if entry.source.form == "jsonl":
        record = next(_json_objects(path, iter([line])), None)
        there = [] if record is None else list(record[1])
    else:
        there = [name.strip() for name in next(csv.reader([line]), [])]
    wanted = next(
        (name for name in names if name in there), there[0] if len(there) == 1 and len(names) > 1 else names[0]
    )
    read = _json_records if entry.source.form == "jsonl" else _csv_records
    for _, (value,) in read(path, chain([first], lines), (wanted,)):
        yield value


def check_columns(source: DataSource, columns: tuple[str, ...]) -> None:
    """Refuse a table whose first record lacks a column; as far as its beginning tells."""
    if source.form == "text":
        return
    with source.path.open("rb") as stream:
        content = stream.read(PIECE_BYTES)
    whole = content if len(content) < PIECE_BYTES else content[: content.rfind(b"\n") + 1]
    texts = iter([decode_text(source.path, whole, 0)])
    read = _json_records if source.form == "jsonl" else _csv_records
    next(iter(read(source.path, texts, columns)), None)


def _missing(path: Path, line: int, columns: tuple[str, ...], there: list[str]) -> FlopwiseError:
    wanted = next(column for column in columns if column not in there)
    listed = ", ".join(shown(name) for name in there[:12]) + (", …" if len(there) > 12 else "")
    return FlopwiseError(
        f"{path}, line {line}: there is no column {shown(wanted)}",
        why=f"there are: {listed}" if there else "there is none at all",
        hint="name the columns of the text and of the label as the file does",
    )


def _json_records(path: Path, texts: Iterator[str], columns: tuple[str, ...]) -> Iterator[tuple[int, list[object]]]:
    for number, record in _json_objects(path, texts):
        if not all(column in record for column in columns):
            raise _missing(path, number, columns, list(record))
        yield number, [record[column] for column in columns]


def _json_objects(path: Path, texts: Iterator[str]) -> Iterator[tuple[int, dict[str, object]]]:
    number = 0
    for text in texts:
        # A piece ends with its last line's end, behind which there is no further line.
        for line in text.removesuffix("\n").split("\n"):
            number += 1
            if not line.strip():
                continue
            try:
                record = msgspec.json.decode(line)
            except (ValueError, RecursionError) as error:
                raise FlopwiseError(
                    f"{path}, line {number} is not valid JSON",
                    why=str(error),
                    hint='every line is one object: {"text": "…"}',
                ) from None
            if not isinstance(record, dict):
                raise FlopwiseError(
                    f"{path}, line {number} is not an object",
                    why=f"it is {shown(record)}",
                    hint='every line is one object: {"text": "…"}',
                )
            yield number, record


def _csv_records(path: Path, texts: Iterator[str], columns: tuple[str, ...]) -> Iterator[tuple[int, list[object]]]:
    lines = (line for text in texts for line in io.StringIO(text, newline=""))
    reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    places: list[int] = []
    first = 1
    limit = csv.field_size_limit(LARGEST_FIELD)
    try:
        for row in reader:
            line, first = first, reader.line_num + 1
            if not row:
                continue
            if header is None:
                header = [name.strip() for name in row]
                if not all(column in header for column in columns):
                    raise _missing(path, line, columns, header)
                places = [header.index(column) for column in columns]
            elif len(row) != len(header):
                raise FlopwiseError(
                    f"{path}, line {line} has {len(row):,} fields",
                    why=f"the header has {len(header):,}",
                    hint="put a text that holds a comma or the end of a line in double quotes",
                )
            else:
                yield line, [row[place] for place in places]
    except csv.Error as error:
        raise FlopwiseError(
            f"{path}, line {first} is not valid CSV",
            why=str(error),
            hint='put a text in double quotes, and write a quote within it twice: "a ""b"" c"',
        ) from None
    finally:
        csv.field_size_limit(limit)
