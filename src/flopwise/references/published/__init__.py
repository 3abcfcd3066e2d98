"""Published tables of training speed, read into set-ups that a predictor can be held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.base.files import decode, read_table
from flopwise.base.units import show_seconds
from flopwise.catalog.load import ROOT
from flopwise.predict.cluster.collectives import check_reach
from flopwise.predict.step import least_seconds
from flopwise.references.published import megatron, mpt, nanotron, vtrain
from flopwise.references.published.named import NEEDED, OUTCOMES, missing_columns, named_case
from flopwise.references.published.rows import TableRow, column_hint, column_names, read_rows, tell_row
from flopwise.references.validate.protocol import Case, Protocol, Skipped

NAMED_FILES = {
    "torchtitan": "torchtitan.csv",
    "megatron-core": "megatron_core_h100_2024.csv",
    "korthikanti": "korthikanti_table5_a100.csv",
    "uci": "uci_llama2_7b_4xa100.csv",
    "deepspeed": "deepspeed_zero3_a100.csv",
    "dgx-cloud": "dgx_cloud_h100_2024.csv",
    "nemo": "nemo_h100.csv",
    "nemo-blackwell": "nemo_blackwell.csv",
}
"""Tables whose columns go by the names that any table may have, and their files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadTable:
    """The rows of a table as set-ups, and those that are none."""

    cases: tuple[Case, ...]
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a table is read."""

    file: str
    """In the catalogue."""
    columns: tuple[str, ...]
    """Those that a file must have; it may have others."""
    case: Callable[[Sequence[TableRow]], Callable[[TableRow], Case]]
    """From all rows to what reads one."""


def _each(case: Callable[[TableRow], Case]) -> Callable[[Sequence[TableRow]], Callable[[TableRow], Case]]:
    """The reader of a table whose rows say nothing of each other."""
    return lambda _: case


def _named(table: str, file: str) -> Form:
    """A table whose columns go by the names that any may have."""
    return Form(file=file, columns=("model",), case=_each(lambda row: named_case(row, protocol_of(table).columns)))


_FORMS: dict[str, Form] = {
    "mpt": Form(file=mpt.FILE, columns=mpt.COLUMNS, case=_each(mpt.mpt_case)),
    "vtrain": Form(file=vtrain.FILE, columns=vtrain.COLUMNS, case=_each(vtrain.vtrain_case)),
    "nanotron": Form(file=nanotron.FILE, columns=nanotron.COLUMNS, case=nanotron.nanotron_reader),
    "megatron": Form(file=megatron.FILES[0], columns=megatron.COLUMNS, case=_each(megatron.first_case)),
    "megatron-2": Form(file=megatron.FILES[1], columns=megatron.SECOND_COLUMNS, case=_each(megatron.second_case)),
    **{table: _named(table, file) for table, file in NAMED_FILES.items()},
}

TABLES: tuple[str, ...] = tuple(_FORMS)
SIBLINGS = {"megatron": ("megatron", "megatron-2"), "megatron-2": ("megatron-2", "megatron")}
"""Tables of one paper: a file of either may be given under either name."""


def table_of(table: str, path: Path | None = None) -> str:
    """The table that is meant: the named one, or the sibling whose columns the file has more of."""
    if table.lower() not in _FORMS:
        raise unknown_name("table", table, _FORMS, hint=f"one of {', '.join(_FORMS)}")
    family = SIBLINGS.get(table.lower(), (table.lower(),))
    if path is None or len(family) == 1:
        return family[0]
    names = set(column_names(path))
    return max(family, key=lambda name: len(names.intersection(_FORMS[name].columns)) / len(_FORMS[name].columns))


def read_cases(table: str, path: Path | None = None) -> tuple[Case, ...]:
    """The rows of a table as set-ups: those that ship with flopwise, or those of a file with the same columns."""
    return read_cases_and_skipped(table, path).cases


def read_cases_and_skipped(table: str, path: Path | None = None) -> ReadTable:
    """The same with the rows that cannot be read, or be predicted."""
    form = _FORMS[table_of(table, path)]
    read = _read(read_rows(path or ROOT / "tables" / form.file, form.columns, every=False), form.case)
    return read if path is None else _usable(read, path)


def read_own(path: Path, *, stack: str = "") -> ReadTable:
    """The rows of any file with named columns; `stack` is that of rows that name none."""
    names = column_names(path)
    missing = missing_columns(names, {})
    if missing:
        raise FlopwiseError(
            f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}",
            why="every row names a model, a GPU, how long sequences are, and what was measured",
            hint=column_hint(
                (*NEEDED, *OUTCOMES),
                names,
                "docs/validation.md lists the columns; `flopwise validate TABLE FILE` has those of a shipped table",
            ),
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise FlopwiseError(
            f"{path} has the column {twice[0]} {names.count(twice[0])} times",
            why="one of them would be lost",
            hint="keep one of them",
        )
    defaults = {"stack": stack} if stack else {}
    return _usable(_read(read_rows(path, NEEDED, every=False), _each(lambda row: named_case(row, defaults))), path)


def _read(rows: Sequence[TableRow], form: Callable[[Sequence[TableRow]], Callable[[TableRow], Case]]) -> ReadTable:
    """Every row that can be read and predicted; of the others, why not."""
    case, cases, skipped = form(rows), [], []
    for row in rows:
        try:
            with tell_row(row):
                found = case(row)
                check_possible(found)
            cases.append(found)
        except FlopwiseError as error:
            skipped.append(Skipped(row=row.number, why=_in_a_line(error, f"{row.where}, ")))
    return ReadTable(cases=tuple(cases), skipped=tuple(skipped))


def _in_a_line(error: FlopwiseError, where: str) -> str:
    what = error.what.removeprefix(where)
    return f"{what} ({error.why})" if error.why else what


def check_possible(case: Case) -> None:
    """Refuse a row that cannot be predicted: its model cannot be split so, or no network reaches all its devices.

    Nor one whose figure no device reaches: its unit, or its set-up, is another than the table says.
    """
    setup = case.setup
    setup.parallel.check(setup.model, setup.sequence_tokens)
    check_reach(setup.hardware.name, setup.hardware.networks, setup.parallel.devices)
    least_s = least_seconds(setup)
    if case.step_s is not None and case.step_s < least_s:
        raise FlopwiseError(
            f"what was measured means a step of {show_seconds(case.step_s)}",
            why=f"at its peak {setup.hardware.name} takes {show_seconds(least_s)}",
            hint="a figure of the whole job is no figure of one device",
        )


def _usable(read: ReadTable, path: Path) -> ReadTable:
    """Refuse a file of which nothing can be used."""
    if any(case.step_s is not None or case.fits is not None for case in read.cases):
        return read
    first = next(iter(read.skipped), None)
    raise FlopwiseError(
        f"{path} has no usable row",
        why=f"row {first.row}: {first.why}" if first else "none tells a speed or whether it fitted",
        hint="the shipped tables show what a measured row looks like",
    )


@cache
def protocol_of(table: str) -> Protocol:
    """How a table is held against predictions."""
    name = table_of(table)
    return decode(read_table(ROOT / "protocols" / f"{name}.toml"), Protocol, f"protocol {name}")
