"""Two sets of runs on the page: every cell with its change, and two runs of the one that changed most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flopwise.report.document import Items, Table, Words
from flopwise.report.page.data import PageData, RunDetail, now
from flopwise.report.page.profiles import plain_table
from flopwise.report.run_comparison import CellChange, Comparison, Measured, comparison_document
from flopwise.report.words import safe
from flopwise.store.results import Result

LONGEST_NAME = 24
Side = Sequence[Measured]
Details = Mapping[str, RunDetail]


def comparison_page(found: Comparison, sides: tuple[Side, Side], details: tuple[Details, Details]) -> PageData:
    """The rows of both sides; runs of one number in both are told apart by the side's name."""
    names = [safe(name.rstrip("/").rpartition("/")[2] or name, LONGEST_NAME) for name in found.names]
    names = names if names[0] != names[1] else ["before", "after"]
    rows, known = _together(names, sides, details)
    document = comparison_document(found)
    blocks = list(document.blocks)
    told = [block.text for block in blocks if isinstance(block, Words) and block.style != "dim"]
    told += [line for block in blocks if isinstance(block, Items) for line in block.items]
    return PageData(
        title=f"{names[0]} → {names[1]}",
        created=now(),
        rows=rows,
        details=known,
        said=[f"{line[:1].upper()}{line[1:].removesuffix('.')}." for line in told],
        tables=[plain_table(block) for block in blocks if isinstance(block, Table)],
        opens="compare",
        marked=_furthest(found, sides, rows),
    )


def _together(
    names: Sequence[str], sides: tuple[Side, Side], details: tuple[Details, Details]
) -> tuple[list[Result], dict[str, RunDetail]]:
    runs = [{each.row.run for each in side if each.row.run} for side in sides]
    rows: list[Result] = []
    known: dict[str, RunDetail] = {}
    for name, side, some in zip(names, sides, details, strict=True):
        for each in side:
            run = each.row.run
            is_both = run is not None and run in runs[0] & runs[1]
            called = f"{name}/{run}" if is_both else run
            rows.append(replace(each.row, run=called))
            if called is not None and run is not None and run in some:
                known[called] = replace(some[run], run=called)
    return rows, known


def _furthest(found: Comparison, sides: tuple[Side, Side], rows: Sequence[Result]) -> tuple[str, ...]:
    """A run of each side, of the cell whose time changed most."""

    def size(cell: CellChange) -> float:
        return abs(cell.change.relative) if cell.change else -1.0

    cell = max(found.cells, key=size)
    marked = []
    for start, side in ((0, sides[0]), (len(sides[0]), sides[1])):
        places = [start + place for place, each in enumerate(side) if each.row.run and _is_of(each.row, cell)]
        # Two cells that are no pair by themselves were compared whatever they are.
        places = places or [start + place for place, each in enumerate(side) if each.row.run][:1]
        marked += [str(rows[place].run) for place in places[-1:]]
    return tuple(marked)


def _is_of(row: Result, cell: CellChange) -> bool:
    return row.cell == cell.cell if cell.cell else row == cell.settings
