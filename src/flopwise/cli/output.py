"""From values to the terminal, or to whatever stands in for it."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

NARROWEST_TABLE = 80
WIDTH_WITHOUT_TERMINAL = 120


def width() -> int:
    """Columns to write in: the terminal's, or what COLUMNS says, or enough for every table; never under 80."""
    import shutil

    return max(shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns, NARROWEST_TABLE)


def show_page(page: RenderableType) -> None:
    from rich.console import Console

    # Names may hold [brackets] and :colons:, which are not ours to interpret.
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "width": width()}
    if sys.stdout.isatty():
        Console(**plain).print(page, crop=False)
        return
    # Into a file or a pipe: without the blanks that pad a terminal's lines.
    text = io.StringIO()
    Console(**plain, file=text).print(page, crop=False)
    typer.echo("\n".join(line.rstrip() for line in text.getvalue().splitlines()))
