"""From values to the terminal, or to whatever stands in for it."""

from __future__ import annotations

import io
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


class Noted(Protocol):
    """A record with notes for its reader."""

    @property
    def notes(self) -> tuple[str, ...]: ...


Record = TypeVar("Record", bound=Noted)

BAR_AFTER_S = 2.0
"""Work that takes longer shows a bar."""

NARROWEST_TABLE = 80
WIDTH_WITHOUT_TERMINAL = 120


def width() -> int:
    """Columns to write in: the terminal's, or what COLUMNS says, or enough for every table; never under 80."""
    import shutil

    return max(shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns, NARROWEST_TABLE)


# Names may hold [brackets] and :colons:, which are not ours to interpret.
_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}


def show_page(page: RenderableType) -> None:
    from rich.console import Console

    if sys.stdout.isatty():
        Console(**_PLAIN, width=width()).print(_Visible(page), crop=False)
    else:
        typer.echo(page_text(page))


class _Visible:
    """A page in which no text of others acts on the terminal; colours of the page itself stay."""

    def __init__(self, page: RenderableType) -> None:
        self._page = page

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        from flopwise.report.signs import visible

        for segment in console.render(self._page, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def say(line: str) -> None:
    """Something for whoever looks on, on stderr: data goes to stdout alone."""
    from flopwise.report.signs import visible

    typer.echo(visible(line), err=True)


def page_text(page: RenderableType, *, in_file: bool = False) -> str:
    """A page for a pipe, without the blanks that pad a terminal's lines; in a file never with colours."""
    from rich.console import Console

    text = io.StringIO()
    Console(**_PLAIN, width=width(), file=text, force_terminal=False if in_file else None).print(
        _Visible(page), crop=False
    )
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


@dataclass(frozen=True, kw_only=True, slots=True)
class Writers(Generic[Record]):
    """How records of a kind are written, in each form."""

    json: Callable[[list[Record]], str]
    csv: Callable[[list[Record]], str]
    markdown: Callable[[list[Record]], str]
    page: Callable[[Record], RenderableType]
    """Of one record."""
    table: Callable[[list[Record], int], RenderableType]
    """Of several, so many columns wide."""


def print_records(records: list[Record], form: str, writers: Writers[Record]) -> None:
    """Records in the form asked for; a page and JSON hold their notes, beside rows they are talk."""
    if form == "json":
        typer.echo(writers.json(records))
        return
    if form == "csv":
        typer.echo(writers.csv(records), nl=False)
    elif form == "md":
        typer.echo(writers.markdown(records), nl=False)
    elif len(records) == 1:
        show_page(writers.page(records[0]))
        return
    else:
        show_page(writers.table(records, width()))
    for note in dict.fromkeys(note for record in records for note in record.notes):
        say(f"note: {note}")


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[str, int, int], None] | None]:
    """Tells of work (its name or nothing, how much is done, of how much) by a bar on stderr.

    There is one where somebody looks at it, once the work has taken two seconds; else None is handed out.
    """
    import time

    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, begun = bar.add_task(what), time.monotonic()

    def tell(name: str, done: int, of: int) -> None:
        bar.update(task, description=name or what, completed=done, total=of)
        if not bar.live.is_started and time.monotonic() - begun > BAR_AFTER_S:
            bar.start()

    try:
        yield tell
    finally:
        bar.stop()
