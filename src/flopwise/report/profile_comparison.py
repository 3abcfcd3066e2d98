"""Profiles side by side: what follows from them in sentences, then every figure with its change."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import msgspec
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from flopwise.base.files import with_schema
from flopwise.base.units import significant
from flopwise.profile.explain.comparing import FigureRow, HostWait, LineFit, ProfileComparison, WallFit
from flopwise.report.profile_files import markdown_words
from flopwise.report.profile_words import UNKNOWN, about, change_words, safe, scaled, seconds, shortened, warning_words
from flopwise.report.tables import GAP, csv_text, markdown_table, text_table
from flopwise.report.training import as_text, printable, wrapped
from flopwise.store.runs import to_text

SAME = 5e-4
"""Figures that change by less are told once for all profiles."""
LONGEST_COLUMN = 24
"""Signs of a profile's name above its column."""
LENGTH_COLUMNS = ("sequence", "batch", "wall", "device", "profile")
CSV_FIELDS = ("profile", "group", "name", "value", "unit", "source", "change", "baseline")

# -- sentences -------------------------------------------------------------------------------------------------------


def sentences(comparison: ProfileComparison) -> list[str]:
    """What follows from the profiles together."""
    told = [_host_words(comparison.host_wait)] if comparison.host_wait else []
    told += [fit_words(fit) for fit in comparison.fits]
    told += [_wall_words(comparison.wall_fit)] if comparison.wall_fit else []
    return told


def warned(comparison: ProfileComparison) -> list[str]:
    """Of which profiles only a part is there."""
    return [f"Warning: {safe(name)}: {warning_words(told)}." for name, told in comparison.warnings.items()]


def fit_words(fit: LineFit) -> str:
    """`Device time is 33 ms + 2.56 ms × batch from batch 8 on`."""
    begun = f" from batch {fit.least_batch:,} on" if fit.is_partial else ""
    length = f" of sequence {fit.sequence_tokens:,}" if fit.sequence_tokens is not None else ""
    # What is left at batch 0 is extrapolated: two digits of it.
    line = f"{_rough(fit.fixed_s, 2)} + {_rough(fit.per_sequence_s, 3)} × batch{begun}"
    return f"Device time is {line} ({fit.points:,} profiles{length}, at most {about(fit.largest_residual)} off)."


def _wall_words(fit: WallFit) -> str:
    once, per_step, off = _rough(fit.once_s, 2), _rough(fit.per_step_s, 3), _rough(fit.largest_residual_s, 2)
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


def _rough(value: float, digits: int) -> str:
    size = abs(value)
    scale, unit = (1e6, "us") if size < 0.5e-3 else (1e3, "ms") if size < 1 else (1.0, "s")
    return f"{'−' if value < 0 else ''}{significant(size * scale, digits)} {unit}"


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


def same_words(rows: Sequence[FigureRow], baseline: int) -> str:
    """`The same in all: ridge 223.78 FLOP/B, comm_count 5.`"""
    told = []
    for row in rows:
        value = row.cells[baseline].value
        told.append(f"{safe(row.name)} {UNKNOWN if value is None else scaled(value, row.unit)}")
    return f"The same in all: {', '.join(told)}." if told else ""


def cell_words(row: FigureRow, column: int) -> tuple[str, str]:
    """A figure and its change."""
    cell = row.cells[column]
    return (UNKNOWN, "") if cell.value is None else (scaled(cell.value, row.unit), change_words(cell.change))


def titles(comparison: ProfileComparison, longest: int = LONGEST_COLUMN) -> list[str]:
    """What stands above the columns; no two alike even when they are cut."""
    found = [shortened(name, longest) for name in comparison.names]
    return [
        title if found.count(title) == 1 else f"{number}: {shortened(title, longest - 4)}"
        for number, title in enumerate(found, 1)
    ]


def comparison_page(comparison: ProfileComparison, width: int) -> RenderableType:
    """Sentences, then the figures; columns that `width` has no room for come below."""
    parts: list[RenderableType] = []
    for line in sentences(comparison):
        parts.append(as_text(wrapped([line], width)))
    rows, same = split_rows(comparison)
    for block in _blocks(comparison, rows, width):
        parts += [block] if not parts else ["", block]
    if same:
        parts += ["", as_text(wrapped([same_words(same, comparison.baseline)], width))]
    if comparison.lengths:
        parts += ["", Text("by sequence length", style="bold")]
        parts.append(text_table(LENGTH_COLUMNS, length_rows(comparison), {"profile"}))
    for line in warned(comparison):
        parts += ["", Text("\n".join(textwrap.wrap(line, width)), style="yellow")]
    base = safe(comparison.names[comparison.baseline])
    if len(comparison.names) > 1:
        parts += ["", Text(f"Changes are relative to {base}.", style="dim")]
    return Group(*parts)


def _blocks(comparison: ProfileComparison, rows: Sequence[FigureRow], width: int) -> Iterator[Text]:
    heads = titles(comparison)
    names = [safe(row.name, 30) for row in rows]
    room = width - max((cell_len(name) for name in ("figure", *names)), default=0)
    # The baseline first: all others are relative to it.
    order = [comparison.baseline, *(each for each in range(len(heads)) if each != comparison.baseline)]
    columns = {number: _column(rows, number, heads[number]) for number in order}
    block: list[int] = []
    used = 0
    for number in order:
        needed = GAP + max(cell_len(cell) for cell in columns[number])
        if block and used + needed > room:
            yield _block(names, columns, block)
            block, used = [], 0
        block.append(number)
        used += needed
    yield _block(names, columns, block)


def _column(rows: Sequence[FigureRow], number: int, head: str) -> list[str]:
    """A profile's cells below its name: figure and change, each lined up."""
    pairs = [cell_words(row, number) for row in rows]
    widths = [max((cell_len(pair[place]) for pair in pairs), default=0) for place in (0, 1)]
    return [
        head,
        *(
            f"{figure.rjust(widths[0])}{(' ' + change.rjust(widths[1])) if widths[1] else ''}"
            for figure, change in pairs
        ),
    ]


def _block(names: Sequence[str], columns: dict[int, list[str]], block: Sequence[int]) -> Text:
    heads = ["figure", *(columns[number][0] for number in block)]
    rows = [[name, *(columns[number][place] for number in block)] for place, name in enumerate(names, 1)]
    return text_table(heads, [row for row in rows if any(cell.strip() != UNKNOWN for cell in row[1:])], {"figure"})


def length_rows(comparison: ProfileComparison) -> list[list[str]]:
    """Rows of words under `LENGTH_COLUMNS`."""
    return [
        [
            f"{row.sequence_tokens:,}",
            UNKNOWN if row.batch_sequences is None else f"{row.batch_sequences:,}",
            *(UNKNOWN if taken is None else seconds(taken) for taken in (row.wall_s, row.device_s)),
            safe(row.profile, 40),
        ]
        for row in comparison.lengths
    ]


# -- files -----------------------------------------------------------------------------------------------------------


def comparison_markdown(comparison: ProfileComparison) -> str:
    """Sentences and tables; each profile's figure and its change share a cell."""
    parts = [f"{line}\n" for line in sentences(comparison)]
    rows, same = split_rows(comparison)
    heads = ["figure", *titles(comparison, 60)]
    cells = [[safe(row.name, 400), *(_joined(row, number) for number in range(len(comparison.names)))] for row in rows]
    parts.append(markdown_table(heads, cells, {"figure"}))
    if same:
        parts.append(f"{markdown_words(same_words(same, comparison.baseline), 4000)}\n")
    if comparison.lengths:
        parts.append(markdown_table(LENGTH_COLUMNS, length_rows(comparison), {"profile"}))
    parts += [f"{markdown_words(line, 4000)}\n" for line in warned(comparison)]
    if len(comparison.names) > 1:
        parts.append(f"Changes are relative to {markdown_words(comparison.names[comparison.baseline])}.\n")
    return "\n".join(parts)


def _joined(row: FigureRow, column: int) -> str:
    figure, change = cell_words(row, column)
    return f"{figure} ({change})" if change and change != "=" else figure


def comparison_csv(comparison: ProfileComparison) -> str:
    """One row for each known figure of each profile, at full precision, with its change."""
    base = printable(comparison.names[comparison.baseline])
    records = [
        dict(
            zip(
                CSV_FIELDS,
                (
                    *(printable(name), row.group, printable(row.name), cell.value, row.unit),
                    *(cell.source or "", cell.change, base),
                ),
                strict=True,
            )
        )
        for row in comparison.rows
        for name, cell in zip(comparison.names, row.cells, strict=True)
        if cell.value is not None
    ]
    return csv_text(records) if records else f"{','.join(CSV_FIELDS)}\n"


def comparison_json(comparison: ProfileComparison) -> str:
    """The whole record, with what follows from it in words."""
    record = msgspec.to_builtins(comparison)
    return to_text(with_schema(record | {"sentences": sentences(comparison)}, "profile-comparison"))
