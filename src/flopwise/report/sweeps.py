"""A sweep before it runs, for people: how many cells, how many of them fit, how long it takes, and a row for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.text import Text

from flopwise.base.units import AUTO, Auto, show_bytes, show_seconds
from flopwise.report.tables import fitting_columns, markdown_table, markdown_text, text_table
from flopwise.report.training import UNKNOWN, as_text, printable, rate_words, seconds_words, share_words, wrapped
from flopwise.store.cells import Cell

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


Words = Callable[[Cell], str]


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


COLUMNS: dict[str, Words] = {
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
    "MFU": lambda cell: share_words(cell.foreseen.mfu if cell.foreseen else None),
    "step": lambda cell: seconds_words(cell.foreseen.step_s if cell.foreseen else None),
    "time": lambda cell: seconds_words(cell.foreseen.attempt_s if cell.foreseen else None),
}
LEFT = ("cell", "model", "on", "precision", "")
GIVING_WAY = ("step", "time", "micro", "MFU", "cell", "precision", "devices", "on")
"""What tells cells apart goes last."""
SHARED: dict[str, Words] = {
    "model": COLUMNS["model"],
    "on": lambda cell: f"on {printable(cell.settings.hardware_name)}",
    "devices": lambda cell: f"{cell.settings.devices:,} device{'s' if cell.settings.devices > 1 else ''}",
    "precision": COLUMNS["precision"],
    "device cap": lambda cell: f"device cap {COLUMNS['device cap'](cell)}",
    "host cap": lambda cell: f"host cap {COLUMNS['host cap'](cell)}",
}
"""What stands above the table where all cells say the same."""


def preview_line(preview: Preview) -> str:
    """`10 cells · 8 fit · about 14 min on NVIDIA H200`."""
    cells = preview.cells
    fit = sum(cell.foreseen is not None and cell.foreseen.fits and not cell.foreseen.reason for cell in cells)
    parts = [f"{len(cells):,} cell{'' if len(cells) == 1 else 's'}", f"{fit:,} fit{'s' if fit == 1 else ''}"]
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


def preview_page(preview: Preview, width: int) -> RenderableType:
    """The line, a row for each cell, and why cells do not fit or are skipped."""
    page: list[RenderableType] = [as_text(wrapped([preview_line(preview)], width, indent=2))]
    cells = preview.cells[:MOST_ROWS]
    shared = [name for name, words in SHARED.items() if len({words(cell) for cell in preview.cells}) == 1]
    told = [SHARED[name](cells[0]) for name in shared if COLUMNS[name](cells[0]) != UNKNOWN]
    if told:
        page.append(Text("\n".join(wrapped(told, width)), style="bold", no_wrap=True, overflow="ignore"))
    names, rows = _rows(cells, leave_out=[*shared, *_untold(preview)])
    shown = fitting_columns(names, rows, width, GIVING_WAY)
    styles = ["dim" if cell.foreseen is None else "" if cell.foreseen.fits else "red" for cell in cells]
    page += ["", text_table(names, rows, LEFT, shown=shown, styles=styles)]
    if len(preview.cells) > MOST_ROWS:
        page += ["", f"and {len(preview.cells) - MOST_ROWS:,} more, which -o csv lists"]
    reasons = _reasons(preview, width)
    if reasons:
        page += ["", as_text(reasons)]
    return Group(*page)


def preview_markdown(preview: Preview) -> str:
    """The same rows for an issue, all of them."""
    names, rows = _rows(preview.cells, leave_out=_untold(preview))
    named = tuple(name or "fits" for name in names)
    return f"{markdown_text(preview_line(preview))}\n\n" + markdown_table(named, rows, {*LEFT, "fits"})


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


def _reasons(preview: Preview, width: int) -> list[str]:
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
        lines += wrapped(f"{cells[0]}{more}: {why}".split(" "), width, separator=" ", indent=2)
    if len(found) > MOST_REASONS:
        lines.append(f"and other reasons, {len(found) - MOST_REASONS:,} of them, which -o csv lists")
    return lines
