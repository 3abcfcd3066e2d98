"""A sweep before it runs, for people: how many cells, how many of them fit, how long it takes, and a row for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flopwise.base.units import AUTO, Auto, show_bytes, show_seconds
from flopwise.report.document import Block, Document, Heading, Table, Words
from flopwise.report.predictions import speed_range
from flopwise.report.results_files import results_rows
from flopwise.report.words import UNKNOWN, count_nouns, printable, rate_words, seconds_words, share_words
from flopwise.store.cells import Cell, CellOutcome
from flopwise.store.results import FIELDS, Result, result_of_cell

MOST_ROWS = 200
"""Of a table for a terminal; files have all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """What is shown of a sweep that has not run."""

    cells: Sequence[Cell]
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Cell → why it is left out."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Hardware, as the cells name it → for people."""
    total_s: float | None = None
    """Of all attempts one after the other; None: nothing runs."""


OfCell = Callable[[Cell], str]


def _open(cell: Cell, name: str) -> str:
    """A size, or what was foreseen of one that was left open."""
    given: int | Auto = getattr(cell.settings, name)
    chosen = getattr(cell.foreseen, name) if cell.foreseen else None
    if given != AUTO:
        return f"{given:,}"
    return AUTO if chosen is None else f"{chosen:,}"


def _cap(size: int | None) -> str:
    return UNKNOWN if size is None else "none" if size == 0 else show_bytes(size)


def _fits(cell: Cell) -> str:
    if cell.foreseen is None:
        return "skipped"
    if cell.foreseen.fits and cell.foreseen.reason:
        return "not known"
    return "✓ fits" if cell.foreseen.fits else "✗ needs"


def _memory(cell: Cell) -> str:
    taken = cell.foreseen.device_bytes if cell.foreseen else None
    return UNKNOWN if taken is None else show_bytes(taken)


COLUMNS: dict[str, OfCell] = {
    "cell": lambda cell: cell.id,
    "model": lambda cell: printable(cell.settings.model_name),
    "on": lambda cell: printable(cell.settings.hardware_name),
    "devices": lambda cell: f"{cell.settings.devices:,}",
    "sequence": lambda cell: f"{cell.settings.sequence_tokens:,}",
    "batch": lambda cell: _open(cell, "batch_sequences"),
    "micro": lambda cell: _open(cell, "micro_batch_sequences"),
    "precision": lambda cell: printable(cell.settings.precision),
    "device cap": lambda cell: _cap(cell.settings.device_memory_bytes),
    "host cap": lambda cell: _cap(cell.settings.host_memory_bytes),
    "": _fits,
    "memory": _memory,
    "tok/s": lambda cell: rate_words(cell.foreseen.tokens_per_s if cell.foreseen else None),
    "8 in 10 at": lambda cell: _range(cell.foreseen),
    "MFU": lambda cell: share_words(cell.foreseen.mfu if cell.foreseen else None),
    "ceiling": lambda cell: _ceiling(cell.foreseen),
    "step": lambda cell: seconds_words(cell.foreseen.step_s if cell.foreseen else None),
    "time": lambda cell: seconds_words(cell.foreseen.attempt_s if cell.foreseen else None),
}
LEFT = ("cell", "model", "on", "precision", "")
GIVING_WAY = ("step", "time", "ceiling", "micro", "MFU", "cell", "precision", "devices", "on")
"""What tells cells apart goes last."""
SHARED: dict[str, OfCell] = {
    "model": COLUMNS["model"],
    "on": lambda cell: f"on {printable(cell.settings.hardware_name)}",
    "devices": lambda cell: f"{cell.settings.devices:,} device{'s' if cell.settings.devices > 1 else ''}",
    "precision": COLUMNS["precision"],
    "device cap": lambda cell: f"device cap {COLUMNS['device cap'](cell)}",
    "host cap": lambda cell: f"host cap {COLUMNS['host cap'](cell)}",
}
"""What stands above the table where all cells say the same."""


def _range(foreseen: CellOutcome | None) -> str:
    """Between which rates eight of ten measured steps lie, where data say so."""
    if foreseen is None or not foreseen.tokens_per_s or not foreseen.step_s:
        return ""
    return speed_range(foreseen.tokens_per_s * foreseen.step_s, foreseen.interval)


def _ceiling(foreseen: CellOutcome | None) -> str:
    """MFU at the kernels' ceiling, where the other figures are what frameworks reach."""
    if foreseen is None or not foreseen.ceiling_s or not foreseen.mfu or not foreseen.step_s:
        return ""
    return share_words(foreseen.mfu * foreseen.step_s / foreseen.ceiling_s)


def preview_line(preview: Preview) -> str:
    """`10 cells · 8 fit · about 14 min on NVIDIA H200`."""
    cells = preview.cells
    fit = sum(cell.foreseen is not None and cell.foreseen.fits and not cell.foreseen.reason for cell in cells)
    parts = [count_nouns(len(cells), "cell"), f"{fit:,} fit{'s' if fit == 1 else ''}"]
    if preview.skipped:
        parts.append(f"{len(preview.skipped):,} skipped")
    names = {cell.settings.hardware: cell.settings.hardware_name for cell in cells}
    on = ", ".join(printable(preview.titles.get(name, short)) for name, short in names.items())
    if preview.total_s is None:
        return " · ".join([*parts, f"on {on}"])
    about = f"about {about_words(preview.total_s)} on {on}" if preview.total_s else f"no time is foreseen on {on}"
    return " · ".join([*parts, about])


def about_words(seconds: float) -> str:
    """A time that is not known to three digits: `45 s`, `14 min`, `3.2 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else show_seconds(seconds)


def preview_document(preview: Preview) -> Document:
    """The line, a row for each cell, and why cells do not fit or are skipped."""
    line = preview_line(preview)
    names, rows = _rows(preview.cells, leave_out=_untold(preview))
    named = tuple(name or "fits" for name in names)
    return Document(
        blocks=_blocks(preview, line),
        tables=[Words(line), Table(columns=named, rows=rows, left={*LEFT, "fits"})],
        rows=results_rows(preview_results(preview)),
        fields=FIELDS,
        faithful=True,
        told={"csv": [line], "json": [line]},
    )


def preview_results(preview: Preview) -> list[Result]:
    """A row for each cell, as results have it."""
    rows = []
    for cell in preview.cells:
        why, row = preview.skipped.get(cell.id), result_of_cell(cell, None)
        rows.append(row if why is None else replace(row, state="skipped", reason=why, source="predicted"))
    return rows


def _blocks(preview: Preview, line: str) -> Iterator[Block]:
    yield Words(line, indent=2)
    cells = preview.cells[:MOST_ROWS]
    shared = [name for name, words in SHARED.items() if len({words(cell) for cell in preview.cells}) == 1]
    if told := [SHARED[name](cells[0]) for name in shared if COLUMNS[name](cells[0]) != UNKNOWN]:
        yield Heading(" · ".join(told))
    names, rows = _rows(cells, leave_out=[*shared, *_untold(preview)])
    styles = ["dim" if cell.foreseen is None else "" if cell.foreseen.fits else "red" for cell in cells]
    yield Table(columns=names, rows=rows, left=LEFT, giving_way=GIVING_WAY, styles=styles)
    if len(preview.cells) > MOST_ROWS:
        yield Words(f"and {len(preview.cells) - MOST_ROWS:,} more, which -o csv lists")
    if reasons := _reasons(preview):
        yield Words("\n".join(reasons), indent=2)


def _untold(preview: Preview) -> tuple[str, ...]:
    """Where nothing runs, no attempt takes any time."""
    return ("time",) if preview.total_s is None else ()


def _rows(cells: Sequence[Cell], leave_out: Sequence[str]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Names and words of the columns in which anything is told."""
    kept = [name for name in COLUMNS if name not in leave_out]
    rows = [[COLUMNS[name](cell) for name in kept] for cell in cells]
    told = [place for place, name in enumerate(kept) if name == "" or any(row[place] != UNKNOWN for row in rows)]
    return tuple(kept[place] for place in told), [[row[place] for place in told] for row in rows]


MOST_REASONS = 6


def _reasons(preview: Preview) -> list[str]:
    """Why cells are left out, or do not fit whatever the device has, each reason once."""
    found: dict[str, list[str]] = {}
    for cell in preview.cells:
        why = preview.skipped.get(cell.id)
        if cell.foreseen is not None and cell.foreseen.device_bytes is None:
            why = cell.foreseen.reason
        if why:
            found.setdefault(printable(why), []).append(cell.id)
    lines: list[str] = []
    for why, cells in list(found.items())[:MOST_REASONS]:
        more = f" and {len(cells) - 1:,} more" if len(cells) > 1 else ""
        lines.append(f"{cells[0]}{more}: {why}")
    if len(found) > MOST_REASONS:
        lines.append(f"and other reasons, {len(found) - MOST_REASONS:,} of them, which -o csv lists")
    return lines
