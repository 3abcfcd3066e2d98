"""Lines of JSONL and rows of CSV by their columns; documents and samples made of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.headers import other_separator, otherwise_written
from flopwise.engine.data.request import text_columns
from flopwise.engine.data.sources import (
    PIECE_BYTES,
    TOKEN_FORMS,
    DataSource,
    Entry,
    ReadingProgress,
    decode_text,
    open_source,
    pieces,
)

LARGEST_FIELD = 2**31 - 1
"""Characters of a field of a CSV file; Python's own limit is that of a long page."""
ROWS_AT_ONCE = 1024
KNOWN_ROWS = "messages, conversations, prompt with completion, instruction with output, and input_ids"


@dataclass(frozen=True, slots=True)
class Passage:
    """A document, or a piece of a long one."""

    text: str
    last: bool
    """Whether its document ends with it."""


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A text with its label, or two of them."""

    text: str
    label: str
    place: str
    """The file and line that it stands in, for an error or a note; a cache keeps it, wherever the file lies."""
    second: str | None = None
    """Of a pair."""

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing to read in it."""
        return not (self.text.strip() or (self.second or "").strip())


def passages(entry: Entry, text_column: str, progress: ReadingProgress | None) -> Iterator[Passage]:
    """The documents of a file: a text file is one, every line or row of the others is. Blank ones are left out."""
    if entry.source.form != "text":
        for line, row in table_rows(entry.source, progress, entry):
            check_row(entry.source.path, line, row, (text_column,))
            text = _text(row[text_column], text_column, entry.source.path, line)
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


def text_passages(source: DataSource, text: str, text_column: str) -> Iterator[Passage]:
    """The same of whole lines from anywhere in a file of text, or of objects."""
    if source.form == "text":
        firsts = _line_starts(text, PIECE_BYTES)
        for first, last in pairwise([*firsts, len(text)] if text.strip() else []):
            yield Passage(text[first:last], last=last == len(text))
        return
    for line, row in _json_objects(source.path, iter([text])):
        check_row(source.path, line, row, (text_column,))
        found = _text(row[text_column], text_column, source.path, line)
        if found.strip():
            yield Passage(found, last=True)


def _line_starts(text: str, apart: int) -> list[int]:
    """Beginnings of lines, the first of all and others at least so far from each other."""
    found = [0]
    while (end := text.find("\n", found[-1] + apart)) >= 0 and end + 1 < len(text):
        found.append(end + 1)
    return found


def samples(
    entry: Entry, columns: tuple[str, ...], label_column: str, progress: ReadingProgress | None
) -> Iterator[TextRecord]:
    """The labelled texts of a file, or pairs of two columns, blank ones too."""
    path = entry.source.path
    for line, row in table_rows(entry.source, progress, entry):
        check_row(path, line, row, (*columns, label_column))
        texts = [_text(row[column], column, path, line) for column in columns]
        label = _label(row[label_column], label_column, path, line)
        yield TextRecord(texts[0], label, f"{entry.source.name}:{line}", texts[1] if len(texts) > 1 else None)


def columns_of_texts(sources: Iterable[DataSource], text_column: str) -> tuple[str, ...]:
    """The columns of a labelled set's texts, by those that its first table has."""
    there = next((columns for source in sources if (columns := first_columns(source))), ())
    return text_columns(text_column, there)


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


def table_rows(
    source: DataSource, progress: ReadingProgress | None, entry: Entry | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The line number and the columns of every record; without `entry` as far as the file's beginning tells."""
    if source.form in ("parquet", "arrow"):
        return _arrow_rows(source, progress, entry)
    if entry is None:
        with open_source(source.path) as stream:
            content = stream.read(PIECE_BYTES)
        whole = content if len(content) < PIECE_BYTES else content[: content.rfind(b"\n") + 1]
        texts = iter([decode_text(source.path, whole, 0)])
        if source.form == "json" and len(content) == PIECE_BYTES:
            # What is cut cannot be read as one list.
            return iter(())
    else:
        texts = pieces(entry, progress, whole_lines=True)
    if source.form == "json":
        return _json_list(source.path, "".join(texts))
    return _json_objects(source.path, texts) if source.form == "jsonl" else _csv_rows(source.path, texts)


def first_columns(source: DataSource) -> tuple[str, ...]:
    """The columns of a table's first record, as far as its beginning tells."""
    found = next(table_rows(source, None), None)
    return tuple(found[1]) if found else ()


def check_row(path: Path, line: int, row: dict[str, Any], columns: tuple[str, ...]) -> None:
    """Refuse a record that lacks a column."""
    if not all(column in row for column in columns):
        raise _missing(path, line, columns, list(row))


def lines_of(entry: Entry) -> Iterator[str]:
    """The lines of a file that are not blank."""
    for piece in pieces(entry, None, whole_lines=True):
        yield from (line.strip() for line in piece.splitlines() if line.strip())


def column_of(entry: Entry, names: tuple[str, ...]) -> Iterator[object]:
    """The values of a table's first column of those names that it has, or of its only one."""
    there = first_columns(entry.source)
    only = there[0] if len(there) == 1 and len(names) > 1 else names[0]
    wanted = next((name for name in names if name in there), only)
    for line, row in table_rows(entry.source, None, entry):
        check_row(entry.source.path, line, row, (wanted,))
        yield row[wanted]


def check_columns(source: DataSource, columns: tuple[str, ...]) -> None:
    """Refuse a table whose first record lacks a column; as far as its beginning tells."""
    if source.form in ("text", *TOKEN_FORMS):
        return
    found = next(table_rows(source, None), None)
    if found is not None:
        check_row(source.path, *found, columns)


def _arrow_rows(
    source: DataSource, progress: ReadingProgress | None, entry: Entry | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of Parquet files and of Arrow's, which Hugging Face datasets are saved in."""
    import pyarrow  # type: ignore[import-not-found, unused-ignore]
    from pyarrow import ipc, parquet

    try:
        if source.form == "parquet":
            batches = parquet.ParquetFile(source.path).iter_batches(batch_size=ROWS_AT_ONCE)
        else:
            with pyarrow.OSFile(str(source.path)) as opened:
                head = opened.read(6)
            mapped = pyarrow.memory_map(str(source.path))
            reader = ipc.open_file(mapped) if head == b"ARROW1" else ipc.open_stream(mapped)
            batches = (
                (reader.get_batch(number) for number in range(reader.num_record_batches))
                if head == b"ARROW1"
                else reader
            )
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise FlopwiseError(
            f"{source.path} cannot be read", why=str(error)[:200], hint="fetch the file again; it may be cut short"
        ) from None
    if progress is not None and entry is not None:
        progress.add(entry.size_bytes)


def _json_list(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a list; or those of lines, which many a .json holds."""
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        yield from _json_objects(path, iter([text]))
        return
    if isinstance(found, dict):
        # A file of lines that has one.
        found = [found]
    if not isinstance(found, list):
        raise FlopwiseError(
            f"{path} holds no rows",
            why=f"it is {shown(found)}, and not a list of objects",
            hint='a list of objects, or a .jsonl with an object on every line: {"text": "…"}',
        )
    for number, row in enumerate(found, 1):
        if not isinstance(row, dict):
            raise FlopwiseError(
                f"{path}, row {number} is not an object", why=f"it is {shown(row)}", hint='[{"text": "…"}, …]'
            )
        yield number, row


def _missing(path: Path, line: int, columns: tuple[str, ...], there: list[str]) -> FlopwiseError:
    wanted = next(column for column in columns if column not in there)
    separator = other_separator(there)
    if separator is not None:
        return _separated(path, separator)
    near = otherwise_written(columns, there)
    if near:
        pairs = " and ".join(f"{shown(name)} is there" for name in near.values())
        return FlopwiseError(
            f"{path}, line {line}: there is no column {shown(wanted)}",
            why=f"{pairs}: capitals count",
            hint="name the columns as the file does, with --text-column and --label-column",
        )
    listed = ", ".join(shown(name) for name in there[:12]) + (", …" if len(there) > 12 else "")
    return FlopwiseError(
        f"{path}, line {line}: there is no column {shown(wanted)}",
        why=f"there are: {listed}" if there else "there is none at all",
        hint="name the columns of the text and of the label as the file does"
        + (f"; read without a name are {KNOWN_ROWS}" if wanted == "text" else ""),
    )


def _separated(path: Path, separator: str) -> FlopwiseError:
    """For a table whose columns are separated by something else."""
    return FlopwiseError(
        f"{path} has {separator} between its columns",
        why="columns are separated by commas",
        hint="save it with commas, texts in double quotes; or as .jsonl, one object a line",
    )


def _json_objects(path: Path, texts: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
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


def _csv_rows(path: Path, texts: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = (line for text in texts for line in io.StringIO(text, newline=""))
    reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    first = 1
    limit = csv.field_size_limit(LARGEST_FIELD)
    try:
        for row in reader:
            line, first = first, reader.line_num + 1
            if not row:
                continue
            if header is None:
                header = [name.strip() for name in row]
                twice = next((name for name in header if name and header.count(name) > 1), None)
                if twice is not None:
                    raise FlopwiseError(
                        f"{path} has two columns called {shown(twice)}",
                        why="which of them is meant cannot be told",
                        hint="another name for one of them",
                    )
            elif len(row) != len(header):
                separator = other_separator(header)
                if separator is not None:
                    raise _separated(path, separator)
                raise FlopwiseError(
                    f"{path}, line {line} has {len(row):,} fields",
                    why=f"the header has {len(header):,}",
                    hint="put a text that holds a comma or the end of a line in double quotes",
                )
            else:
                yield line, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise FlopwiseError(
            f"{path}, line {first} is not valid CSV",
            why=str(error),
            hint='put a text in double quotes, and write a quote within it twice: "a ""b"" c"',
        ) from None
    finally:
        csv.field_size_limit(limit)
