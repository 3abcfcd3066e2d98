"""Profiles side by side: what follows from them in sentences, then every figure with its change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from rich.cells import cell_len

from flopwise.profile.explain.comparing import FigureRow, HostWait, LineFit, ProfileComparison, WallFit
from flopwise.report.document import Block, Document, Table, Words
from flopwise.report.profile_words import warning_words
from flopwise.report.words import (
    UNKNOWN,
    about,
    change_words,
    count_words,
    printable,
    safe,
    scale_figure,
    seconds,
    shorten,
)

SAME = 5e-4
"""Figures that change by less are told once for all profiles."""
LONGEST_COLUMN = 24
"""Signs of a profile's name above its column."""
FIELDS = ("profile", "group", "name", "value", "unit", "source", "change", "baseline")


def comparison_document(comparison: ProfileComparison) -> Document:
    """Sentences, then the figures; in markdown each figure and its change share a cell."""
    warnings = [f"warning: {safe(name)}: {warning_words(told)}" for name, told in comparison.warnings.items()]
    return Document(
        blocks=_blocks(comparison, _changes(comparison), "yellow"),
        tables=_blocks(comparison, join_changes(comparison), ""),
        rows=_rows(comparison),
        fields=FIELDS,
        told={"csv": warnings},
    )


def comparison_record(comparison: ProfileComparison) -> dict[str, object]:
    """The whole record, with what follows from it in words."""
    return {**msgspec.to_builtins(comparison), "sentences": sentences(comparison)}


def _blocks(comparison: ProfileComparison, changes: Table, style: str) -> Iterator[Block]:
    if told := sentences(comparison):
        yield Words("\n".join(told))
    yield changes
    if same := same_words(comparison):
        yield Words(same)
    if comparison.lengths:
        yield length_table(comparison)
    for line in warn_of_parts(comparison):
        yield Words(line, style)
    if len(comparison.names) > 1:
        yield Words(f"Changes are relative to {safe(comparison.names[comparison.baseline])}.", "dim")


# -- sentences -------------------------------------------------------------------------------------------------------


def sentences(comparison: ProfileComparison) -> list[str]:
    """What follows from the profiles together."""
    told = [_host_words(comparison.host_wait)] if comparison.host_wait else []
    told += [fit_words(fit) for fit in comparison.fits]
    told += [_wall_words(comparison.wall_fit)] if comparison.wall_fit else []
    return told


def warn_of_parts(comparison: ProfileComparison) -> list[str]:
    """Of which profiles only a part is there."""
    return [f"Warning: {safe(name)}: {warning_words(told)}." for name, told in comparison.warnings.items()]


def fit_words(fit: LineFit) -> str:
    """`Device time is 33 ms + 2.56 ms × batch from batch 8 on`."""
    begun = f" from batch {fit.least_batch:,} on" if fit.is_partial else ""
    length = f" of sequence {fit.sequence_tokens:,}" if fit.sequence_tokens is not None else ""
    # What is left at batch 0 is extrapolated: two digits of it.
    line = f"{seconds(fit.fixed_s, 2)} + {seconds(fit.per_sequence_s, 3)} × batch{begun}"
    return f"Device time is {line} ({fit.points:,} profiles{length}, at most {about(fit.largest_residual)} off)."


def _wall_words(fit: WallFit) -> str:
    once, per_step, off = seconds(fit.once_s, 2), seconds(fit.per_step_s, 3), seconds(fit.largest_residual_s, 2)
    return (
        f"Beside the device's work a training takes {once} once and {per_step} a step ({fit.points:,} trainings, "
        f"at most {off} off)."
    )


def _host_words(wait: HostWait) -> str:
    least, most = about(wait.least_share), about(wait.most_share)
    between = least if least == most else f"{least.removesuffix(' %')}–{most}"
    share = f"The runs wait for their host: the device works only {between} of the wall time"
    if wait.known == 1:
        return f"{share} of the one profile that knows both."
    which = "all" if wait.waiting == wait.known else f"{wait.waiting:,} of the"
    return f"{share} in {which} {wait.known:,} profiles that know both."


# -- tables ----------------------------------------------------------------------------------------------------------


def split_rows(comparison: ProfileComparison) -> tuple[list[FigureRow], list[FigureRow]]:
    """Rows whose figures differ between the profiles, and those that are the same in all that have them."""
    differing: list[FigureRow] = []
    same: list[FigureRow] = []
    for row in comparison.rows:
        (same if _is_same(row, comparison.baseline) else differing).append(row)
    return differing, same


def _is_same(row: FigureRow, baseline: int) -> bool:
    base = row.cells[baseline].value
    others = [cell for number, cell in enumerate(row.cells) if number != baseline and cell.value is not None]
    if base is None or not others:
        return False
    return all(cell.value == base or (cell.change is not None and abs(cell.change) < SAME) for cell in others)


def same_words(comparison: ProfileComparison) -> str:
    """`The same in all: ridge 223.78 FLOP/B, comm_count 5.`"""
    told = []
    for row in split_rows(comparison)[1]:
        value = row.cells[comparison.baseline].value
        told.append(f"{safe(row.name)} {UNKNOWN if value is None else scale_figure(value, row.unit)}")
    return f"The same in all: {', '.join(told)}." if told else ""


def cell_words(row: FigureRow, column: int) -> tuple[str, str]:
    """A figure and its change."""
    cell = row.cells[column]
    return (UNKNOWN, "") if cell.value is None else (scale_figure(cell.value, row.unit), change_words(cell.change))


def titles(comparison: ProfileComparison, longest: int = LONGEST_COLUMN) -> list[str]:
    """What stands above the columns; no two alike even when they are cut."""
    found = [shorten(name, longest) for name in comparison.names]
    return [
        title if found.count(title) == 1 else f"{number}: {shorten(title, longest - 4)}"
        for number, title in enumerate(found, 1)
    ]


def _changes(comparison: ProfileComparison) -> Table:
    """Figures and changes, each lined up; columns that there is no room for come below."""
    rows, heads = split_rows(comparison)[0], titles(comparison)
    # The baseline first: all others are relative to it.
    order = [comparison.baseline, *(each for each in range(len(heads)) if each != comparison.baseline)]
    columns = [_column(rows, number) for number in order]
    cells = [[safe(row.name, 30), *(column[place] for column in columns)] for place, row in enumerate(rows)]
    return Table(columns=["figure", *(heads[number] for number in order)], rows=cells, left={"figure"}, banded=True)


def join_changes(comparison: ProfileComparison) -> Table:
    """A column for each profile, figure and change in one cell."""
    rows, places = split_rows(comparison)[0], range(len(comparison.names))
    cells = [[safe(row.name, 400), *(_join(row, number) for number in places)] for row in rows]
    return Table(columns=["figure", *titles(comparison, 60)], rows=cells, left={"figure"})


def _column(rows: Sequence[FigureRow], number: int) -> list[str]:
    pairs = [cell_words(row, number) for row in rows]
    widths = [max((cell_len(pair[place]) for pair in pairs), default=0) for place in (0, 1)]
    beside = [f" {change.rjust(widths[1])}" if widths[1] else "" for _, change in pairs]
    return [f"{figure.rjust(widths[0])}{change}" for (figure, _), change in zip(pairs, beside, strict=True)]


def _join(row: FigureRow, column: int) -> str:
    figure, change = cell_words(row, column)
    return f"{figure} ({change})" if change and change != "=" else figure


def length_table(comparison: ProfileComparison) -> Table:
    """What a shorter sequence buys."""
    rows = [
        [
            f"{row.sequence_tokens:,}",
            count_words(row.batch_sequences),
            *(UNKNOWN if taken is None else seconds(taken) for taken in (row.wall_s, row.device_s)),
            safe(row.profile, 40),
        ]
        for row in comparison.lengths
    ]
    columns = ("sequence", "batch", "wall", "device", "profile")
    return Table(title="by sequence length", columns=columns, rows=rows, left={"profile"})


def _rows(comparison: ProfileComparison) -> Iterator[Mapping[str, object]]:
    """One row for each known figure of each profile, at full precision, with its change."""
    base = printable(comparison.names[comparison.baseline])
    for row in comparison.rows:
        for name, cell in zip(comparison.names, row.cells, strict=True):
            if cell.value is not None:
                known = (printable(name), row.group, printable(row.name), cell.value, row.unit, cell.source or "")
                yield dict(zip(FIELDS, (*known, cell.change, base), strict=True))
