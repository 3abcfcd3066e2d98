"""Published training benchmarks, read from the markdown tables that they are printed in.

Columns are told by the names in the header, in whatever order. A header that lost one of its names is
repaired: the figures of a row hang together (a batch is devices × micro-batch × accumulation steps, and so
on), so only one place for the lost name leaves every row consistent. Where that is not so, it is an error.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from decimal import Decimal
from typing import Any

from flopwise.base.errors import FlopwiseError


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRow:
    """One measured configuration, as published. Shares are 0 to 1; rates and batches are whole as printed."""

    table: str
    """The heading above the table, empty if it has none."""
    line: int
    """Where the row stands in the document, counted from 1."""
    model: str
    sequence_tokens: int
    devices: int
    device: str
    mfu: float
    hfu: float
    model_flops_per_s_per_device: float
    micro_batch: int
    """Sequences per device and step of accumulation."""
    accumulation_steps: int
    global_batch: int
    """Sequences per optimiser step over all devices."""
    sequences_per_s: int
    """Cut to a whole number by the publisher: 0 for the slowest."""
    tokens_per_s: int
    tokens_per_s_per_device: int
    global_batch_tokens: int
    precision: str
    mixed_precision_mode: str
    sharding: str
    activation_checkpointing: bool
    activation_offload: bool
    parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkdownTable:
    """A table as it stands in the text: nothing of it interpreted, blanks around the cells taken off."""

    heading: str
    line: int
    """Of the header, counted from 1."""
    names: tuple[str, ...]
    rows: tuple[tuple[int, tuple[str, ...]], ...]
    """Line and cells of each row; rows may differ in their number of cells."""


_COLUMNS: dict[str, str] = {
    "model": "Model",
    "sequence_tokens": "SeqLen (T)",
    "devices": "# GPUs",
    "device": "GPU",
    "mfu": "MFU",
    "hfu": "HFU",
    "model_flops_per_s_per_device": "Model TFLOP",
    "micro_batch": "MicroBatchSize",
    "accumulation_steps": "GradAccum",
    "global_batch": "GlobalBatchSize",
    "sequences_per_s": "Throughput (S/s)",
    "tokens_per_s": "Throughput (T/s)",
    "tokens_per_s_per_device": "Throughput (T/s/GPU)",
    "global_batch_tokens": "GlobalBatchSize (T)",
    "precision": "Precision",
    "mixed_precision_mode": "MP Mode",
    "sharding": "Sharding Strategy",
    "activation_checkpointing": "Activation Checkpointing",
    "activation_offload": "Activation CPUOffload",
    "parameters": "NumParams",
}
"""Field of a row → the name that headers print for it."""


def _key(name: str) -> str:
    """What two spellings of a column's name share: headers vary in blanks, case and punctuation."""
    return "".join(re.findall(r"[a-z0-9]+", name.lower()))


_KINDS = {field.name: str(field.type) for field in dataclass_fields(BenchmarkRow)}
_FIELD_OF_KEY = {_key(name): field for field, name in _COLUMNS.items()}

_Fields = tuple[str | None, ...]
"""For each cell of a row the field that it fills; None for a column that is not ours to read."""


def read_benchmark_tables(text: str) -> list[BenchmarkRow]:
    """Every row of every benchmark table in a markdown document, in the document's order.

    Tables that lack a needed column are passed over as long as another table has them all. Raises
    `FlopwiseError` where there is nothing to read, or where a table cannot be read without guessing.
    """
    tables = markdown_tables(text)
    if not tables:
        raise _no_table(text)
    readable = [(table, fields) for table in tables if (fields := _fields_of(table)) is not None]
    if not readable:
        raise _no_benchmark(tables)
    rows = [row for table, fields in readable for row in _benchmark_rows(table, fields)]
    if not rows:
        raise FlopwiseError(
            f"the benchmark table at line {readable[0][0].line} has no rows",
            why="nothing follows its header",
            hint="put the rows right below the line of dashes",
        )
    return rows


# ---------------------------------------------------------------------------------------------------------
# Text → tables

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_HEADING = re.compile(r" {0,3}#{1,6}(?:[ \t]+(.*))?")
_UNDERLINE = re.compile(r" {0,3}(?:=+|-+)\s*")
_DASHES = re.compile(r":?-+:?")
_NO_NAME = re.compile(r"[0-9.,%]+|true|false", re.IGNORECASE)
"""Cells that no header and no column of names has."""


def markdown_tables(text: str) -> list[MarkdownTable]:
    """All tables of a markdown text, whatever they are about; those in code blocks and comments left out."""
    lines = _visible_lines(text)
    tables: list[MarkdownTable] = []
    heading, at = "", 0
    while at < len(lines):
        if _starts_table(lines, at):
            rows, after = _body(lines, at + 2)
            names = tuple(_cells(lines[at]))
            tables.append(MarkdownTable(heading=heading, line=at + 1, names=names, rows=tuple(rows)))
            at = after
            continue
        if found := _HEADING.fullmatch(lines[at]):
            heading = re.sub(r"(^| )#+$", "", " ".join((found[1] or "").split()))
        elif _UNDERLINE.fullmatch(lines[at]) and at > 0 and lines[at - 1].strip():
            heading = lines[at - 1].strip()
        at += 1
    return tables


def _visible_lines(text: str) -> list[str]:
    """The text's lines, with code blocks and comments blanked so that the others keep their numbers."""
    lines: list[str] = []
    fence = ""
    in_comment = False
    # Not str.splitlines: it also breaks at form feeds and the like, where no editor counts a line.
    for line in re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff")):
        shown = ""
        mark = _FENCE.fullmatch(line)
        if fence:
            if mark and mark[1].startswith(fence) and not mark[2].strip():
                fence = ""
        elif in_comment or line.lstrip().startswith("<!--"):
            in_comment = "-->" not in line
        elif mark:
            fence = mark[1]
        else:
            shown = line
        lines.append(shown)
    return lines


def _cells(line: str) -> list[str]:
    """The cells of a table's line, with or without outer pipes, free of emphasis and of needless blanks."""
    parts = re.split(r"(?<!\\)\|", line.strip())
    if len(parts) > 1 and not parts[0].strip():
        parts = parts[1:]
    if len(parts) > 1 and not parts[-1].strip():
        parts = parts[:-1]
    return [" ".join(part.replace("\\|", "|").split()).strip("*` ") for part in parts]


def _starts_table(lines: Sequence[str], at: int) -> bool:
    """Whether a header stands here: a line with pipes, and below it dashes in at least two columns."""
    if at + 1 >= len(lines) or "|" not in lines[at] or "|" not in lines[at + 1]:
        return False
    return _is_rule(_cells(lines[at + 1]))


def _is_rule(cells: Sequence[str]) -> bool:
    return len(cells) > 1 and all(_DASHES.fullmatch(cell) for cell in cells)


def _body(lines: Sequence[str], start: int) -> tuple[list[tuple[int, tuple[str, ...]]], int]:
    """The rows from a line on, and the line after the last of them.

    A blank line ends a table in most readings of markdown. Here rows of the same width go on after it, and
    after a line of dashes: losing the rest of a table to a stray line would go unnoticed.
    """
    rows: list[tuple[int, tuple[str, ...]]] = []
    after = start
    for at in range(start, len(lines)):
        if not lines[at].strip():
            continue
        cells = tuple(_cells(lines[at]))
        header = _starts_table(lines, at) and not any(_NO_NAME.fullmatch(cell) for cell in cells)
        if "|" not in lines[at] or header or _HEADING.fullmatch(lines[at]):
            break
        if at > after and not (rows and len(cells) == len(rows[-1][1])):
            break
        if not _is_rule(cells):
            rows.append((at + 1, cells))
        after = at + 1
    return rows, after


# ---------------------------------------------------------------------------------------------------------
# Tables → rows


_MAY_BE_NONE = ("sequences_per_s", "tokens_per_s", "tokens_per_s_per_device")
"""Rates that are cut to whole numbers: 0 for the slowest."""


def _row(heading: str, line: int, cells: Sequence[str], fields: _Fields) -> BenchmarkRow:
    """One row, its FLOP rate still in the unit that the table prints."""
    values: dict[str, Any] = {}
    for field, cell in zip(fields, cells, strict=True):
        if field is not None:
            values[field], wanted = _value(field, cell)
            if values[field] is None:
                shown = repr(cell if len(cell) <= 40 else cell[:39] + "…")
                raise FlopwiseError(
                    f"line {line}, column {_COLUMNS[field]!r}: {shown} is not {wanted}",
                    why="the cells of a benchmark table are read by the names in its header",
                    hint="correct the cell; if the whole column is off, look for a name missing in the header",
                )
    return BenchmarkRow(table=heading, line=line, **values)


def _value(field: str, text: str) -> tuple[object, str]:
    """What a cell of a field says, None where it cannot be that; and what it should be."""
    # The bounds on the digits keep out what no figure of a benchmark is, and what int() refuses.
    match _KINDS[field]:
        case "str":
            return text or None, "a name"
        case "bool":
            return {"true": True, "false": False}.get(text.lower()), "True or False"
        case "float" if field in ("mfu", "hfu"):
            found = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{0,18})?) ?%?", text)
            share = Decimal(found[1]) / 100 if found else Decimal(2)
            return float(share) if share <= 1 else None, "a percentage from 0 to 100"
        case "float":
            is_number = re.fullmatch(r"[0-9]{1,18}(?:\.[0-9]{0,18})?(?:[eE][+-]?[0-9]{1,2})?", text)
            return float(text) if is_number else None, "a number"
    if not re.fullmatch(r"[0-9]{1,18}|[0-9]{1,3}(?:,[0-9]{3}){1,5}", text):
        return None, "a whole number"
    value, least = int(text.replace(",", "")), 0 if field in _MAY_BE_NONE else 1
    return value if value >= least else None, f"a whole number from {least} on"


def _benchmark_rows(table: MarkdownTable, fields: _Fields) -> list[BenchmarkRow]:
    rows = [_row(table.heading, line, cells, fields) for line, cells in table.rows]
    unit = _flop_unit(rows)
    # In decimals, so that 4.212583 becomes 421258300000000 and not the float beside it.
    rates = [float(Decimal(str(row.model_flops_per_s_per_device)) * unit) for row in rows]
    return [replace(row, model_flops_per_s_per_device=rate) for row, rate in zip(rows, rates, strict=True)]


def _flop_unit(rows: Sequence[BenchmarkRow]) -> int:
    """FLOP/s that 1 in the column "Model TFLOP" stands for.

    The same column is published in units of 10¹⁴ (the exponent cut off), of 10¹² and of 1. A token costs at
    least 6 FLOPs per parameter, and even long attention stays below 50 times that: two of these units
    cannot both fit. Where none fits every row, the first is taken.
    """

    def fits(row: BenchmarkRow, unit: int) -> bool:
        least = 6.0 * row.parameters * row.tokens_per_s_per_device
        return 0.97 * least <= row.model_flops_per_s_per_device * unit < 50 * least

    return next((unit for unit in (10**14, 10**12, 1) if all(fits(row, unit) for row in rows)), 10**14)


# ---------------------------------------------------------------------------------------------------------
# Header → fields, also where the header lost a name


def _fields_of(table: MarkdownTable) -> _Fields | None:
    """The field of each cell; None for a table that lacks needed columns and so is about something else."""
    named = tuple(_FIELD_OF_KEY.get(_key(name)) for name in table.names)
    absent = [field for field in _COLUMNS if field not in named]
    width = _width(table)
    repairable = len(absent) == 1 and width == len(named) + 1
    if absent and not repairable:
        return None
    twice = [_COLUMNS[field] for field, count in Counter(named).items() if field and count > 1]
    if twice:
        raise FlopwiseError(
            f"line {table.line}: the header names {twice[0]!r} more than once",
            why="a column is found by its name, so each name can stand only once",
            hint="rename or remove one of the two columns",
        )
    _check_widths(table, width if repairable else len(named))
    if not repairable:
        return named
    name, place = find_missing_column(table)
    return (*named[:place], _FIELD_OF_KEY[_key(name)], *named[place:])


def _width(table: MarkdownTable) -> int:
    """Cells in most rows of the table."""
    if not table.rows:
        return len(table.names)
    return Counter(len(cells) for _, cells in table.rows).most_common(1)[0][0]


def _check_widths(table: MarkdownTable, width: int) -> None:
    for line, cells in table.rows:
        if len(cells) != width:
            few_or_many = "few" if len(cells) < width else "many"
            raise FlopwiseError(
                f"line {line}: the row has too {few_or_many} cells: {len(cells)} where {width} belong",
                why=f"the header at line {table.line} names {len(table.names)} columns",
                hint="look for a missing or an extra | in the row",
            )


def find_missing_column(table: MarkdownTable) -> tuple[str, int]:
    """The name that the header lacks, and its place among the cells counted from 0.

    For a table whose rows all have one cell more than the header has names. Every needed name that is
    absent is tried at every place over all rows; just one reading may come out. (Places that give equal
    rows, as between two columns with the same cells, are one reading.)
    """
    named = tuple(_FIELD_OF_KEY.get(_key(name)) for name in table.names)
    absent = [field for field in _COLUMNS if field not in named]
    fits: list[tuple[str, int, list[BenchmarkRow]]] = []
    furthest, reason = -1, "the header already has every name that is known"
    for field in absent:
        for place in range(len(named) + 1):
            rows, failure = _attempt(table, (*named[:place], field, *named[place:]))
            if failure is None:
                fits.append((_COLUMNS[field], place, rows))
            elif len(rows) > furthest:
                furthest = len(rows)
                reason = f"the best try, {_COLUMNS[field]!r} as column {place + 1}, fails: {failure}"
    what = f"line {table.line}: the header has {len(named)} names for rows of {_width(table)} cells"
    hint = "write the missing name into the header"
    if not fits:
        raise FlopwiseError(f"{what}, and no place for a missing name fits", why=reason, hint=hint)
    if any(rows != fits[0][2] for _, _, rows in fits):
        places = " or ".join(f"{name!r} as column {place + 1}" for name, place, _ in fits)
        raise FlopwiseError(f"{what}, and several places fit", why=f"it could be {places}", hint=hint)
    return fits[0][0], fits[0][1]


def _attempt(table: MarkdownTable, fields: _Fields) -> tuple[list[BenchmarkRow], str | None]:
    """The rows that read well with these fields, and what stopped the first that does not."""
    rows: list[BenchmarkRow] = []
    for line, cells in table.rows:
        if len(cells) != len(fields):
            return rows, f"line {line} has {len(cells)} cells"
        for field, cell in zip(fields, cells, strict=True):
            if field in _SHAPES and not _may_be(field, cell):
                return rows, f"line {line}: {cell!r} does not look like {_COLUMNS[field]!r}"
        try:
            row = _row(table.heading, line, cells, fields)
        except FlopwiseError as error:
            return rows, error.what
        if broken := _broken_identity(row):
            return rows, f"line {line}: {broken}"
        rows.append(row)
    return rows, _uneven_peak(rows)


_SHAPES: dict[str, re.Pattern[str]] = {
    "model": re.compile(r"[0-9.]+[kmbt]", re.IGNORECASE),
    "device": re.compile(r"[a-z]+[0-9]+[a-z]*_[0-9]+gb", re.IGNORECASE),
    "precision": re.compile(r"(amp_)?(bf|fp|tf)[0-9]+(_\w+)?", re.IGNORECASE),
    "mixed_precision_mode": re.compile(r"DEFAULT|PURE|FULL"),
    "sharding": re.compile(r"\w*SHARD\w*"),
}


def _may_be(field: str, cell: str) -> bool:
    """Whether a cell can hold this name. One that looks like nothing known may be any: it proves nothing."""
    if _NO_NAME.fullmatch(cell):
        return False
    return bool(_SHAPES[field].fullmatch(cell)) or not any(shape.fullmatch(cell) for shape in _SHAPES.values())


def _broken_identity(row: BenchmarkRow) -> str | None:
    """What holds in every true row and fails in this one. Rates may be cut or rounded to whole numbers."""
    factor, factor_text = (4 / 3, "4/3") if row.activation_checkpointing else (1.0, "1")
    if row.global_batch != row.devices * row.micro_batch * row.accumulation_steps:
        return "GlobalBatchSize is not # GPUs × MicroBatchSize × GradAccum"
    if row.global_batch_tokens != row.global_batch * row.sequence_tokens:
        return "GlobalBatchSize (T) is not GlobalBatchSize × SeqLen (T)"
    if abs(row.tokens_per_s - row.tokens_per_s_per_device * row.devices) > row.devices:
        return "Throughput (T/s/GPU) is not Throughput (T/s) / # GPUs"
    if abs(row.tokens_per_s - row.sequences_per_s * row.sequence_tokens) > row.sequence_tokens:
        return "Throughput (S/s) is not Throughput (T/s) / SeqLen (T)"
    # Both shares are printed to 0.01 %, so each may be off by half of that.
    if abs(row.hfu - row.mfu * factor) > 0.5e-4 * (1 + factor) + 1e-9:
        return f"HFU is not MFU × {factor_text}"
    return None


def _uneven_peak(rows: Sequence[BenchmarkRow]) -> str | None:
    """FLOP rate / MFU is the peak: one figure for a device and a precision. What is wrong if it is not."""
    peaks: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.mfu > 0:
            peaks[row.device, row.precision].append(row.model_flops_per_s_per_device / row.mfu)
    # 1 % leaves room for rates that are cut to whole TFLOP/s.
    if any(max(of_kind) > 1.01 * min(of_kind) for of_kind in peaks.values()):
        return "Model TFLOP / MFU is not the same in all rows of a device and precision"
    return None


# ---------------------------------------------------------------------------------------------------------
# Errors for texts with nothing to read


def _no_table(text: str) -> FlopwiseError:
    why = "a table has a header with | between its names, and below it a line of dashes"
    if not text.strip():
        why = "the text is empty"
    elif "\x00" in text:
        why = "this is not text: it has null bytes"
    elif "<table" in text.lower():
        why = "it has an HTML table, and only markdown tables are read"
    return FlopwiseError("no markdown table found", why=why, hint="give the markdown source, with | between the cells")


def _no_benchmark(tables: Sequence[MarkdownTable]) -> FlopwiseError:
    """Says of the table that comes nearest what it lacks."""

    def lacking(table: MarkdownTable) -> list[str]:
        keys = {_key(name) for name in table.names}
        return [name for name in _COLUMNS.values() if _key(name) not in keys]

    closest = min(tables, key=lambda table: len(lacking(table)))
    return FlopwiseError(
        "no table has the columns of a training benchmark",
        why=f"the nearest, at line {closest.line}, lacks: {', '.join(lacking(closest))}",
        hint=f"a benchmark table has the columns {', '.join(_COLUMNS.values())}, in any order",
    )
