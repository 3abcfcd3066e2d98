"""Published tables of training speed, read into set-ups that a predictor can be held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.base.files import decode, read_table
from flopwise.catalog.load import ROOT
from flopwise.references.published import megatron, mpt, nanotron, vtrain
from flopwise.references.published.rows import TableRow, column_names, read_rows, tell_row
from flopwise.references.validate.protocol import Case, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a table is read."""

    file: str
    """In the catalogue."""
    columns: tuple[str, ...]
    """Those that are read; a file may have others."""
    cases: Callable[[Sequence[TableRow]], tuple[Case, ...]]


def _each(case: Callable[[TableRow], Case]) -> Callable[[Sequence[TableRow]], tuple[Case, ...]]:
    """The reader of a table whose rows say nothing of each other."""

    def cases(rows: Sequence[TableRow]) -> tuple[Case, ...]:
        found = []
        for row in rows:
            with tell_row(row):
                found.append(case(row))
        return tuple(found)

    return cases


_FORMS: dict[str, Form] = {
    "mpt": Form(file=mpt.FILE, columns=mpt.COLUMNS, cases=_each(mpt.mpt_case)),
    "vtrain": Form(file=vtrain.FILE, columns=vtrain.COLUMNS, cases=_each(vtrain.vtrain_case)),
    "nanotron": Form(file=nanotron.FILE, columns=nanotron.COLUMNS, cases=nanotron.nanotron_cases),
    "megatron": Form(file=megatron.FILES[0], columns=megatron.COLUMNS, cases=_each(megatron.first_case)),
    "megatron-2": Form(file=megatron.FILES[1], columns=megatron.SECOND_COLUMNS, cases=_each(megatron.second_case)),
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
    form = _FORMS[table_of(table, path)]
    if path is None:
        return form.cases(read_rows(ROOT / "tables" / form.file, form.columns))
    cases = form.cases(read_rows(path, form.columns))
    if all(case.step_s is None and case.fits is None for case in cases):
        raise FlopwiseError(
            f"{path} has no usable row",
            why=f"none of its {len(cases)} tells a speed or whether it fitted",
            hint="the shipped tables show what a measured row looks like",
        )
    return cases


@cache
def protocol_of(table: str) -> Protocol:
    """How a table is held against predictions."""
    name = table_of(table)
    return decode(read_table(ROOT / "protocols" / f"{name}.toml"), Protocol, f"protocol {name}")
