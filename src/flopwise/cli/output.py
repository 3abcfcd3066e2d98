"""From values to the terminal, or to whatever stands in for it."""

from __future__ import annotations

import io
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    from flopwise.report.document import Document


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


MOST_STYLED = 1000
"""Lines that are printed in colours; more of them only take longer, and the heading is out of sight."""


def show_page(page: Sequence[Text]) -> None:
    """Texts below each other, in colours where somebody looks at them."""
    from rich.console import Console, Group

    from flopwise.report.words import visible

    if not page:
        return
    if sum(text.plain.count("\n") for text in page) > MOST_STYLED:
        typer.echo(visible("\n".join(text.plain for text in page)))
    elif sys.stdout.isatty():
        Console(**_PLAIN, width=width()).print(_Visible(Group(*page)), crop=False)
    else:
        typer.echo(page_text(page))


class _Visible:
    """A page in which no text of others acts on the terminal; colours of the page itself stay."""

    def __init__(self, page: RenderableType) -> None:
        self._page = page

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        from flopwise.report.words import visible

        for segment in console.render(self._page, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def say(line: str) -> None:
    """Something for whoever looks on, on stderr: data goes to stdout alone."""
    from flopwise.report.words import visible

    typer.echo(visible(line), err=True)


def page_text(page: Sequence[Text], *, in_file: bool = False) -> str:
    """A page for a pipe, without the blanks that pad a terminal's lines; in a file never with colours."""
    from rich.console import Console, Group

    text = io.StringIO()
    Console(**_PLAIN, width=width(), file=text, force_terminal=False if in_file else None).print(
        _Visible(Group(*page)), crop=False
    )
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def show(
    document: Document, record: object, form: str, *, schema: str, write: str = "", name_file: bool = False
) -> None:
    """Print a record in the form that was asked for, or write it to a file: the one place that knows the forms.

    `document` is for people and tables, `record` for programs, whose JSON says that it is of the kind `schema`.
    `name_file`: the file's path is the answer.
    """
    from flopwise.report.document import to_csv, to_markdown, to_page

    if form == "table" and not write:
        show_page(to_page(document, width()))
    else:
        writers: dict[str, Callable[[], str]] = {
            "table": lambda: page_text(to_page(document, width()), in_file=True),
            "md": lambda: to_markdown(document),
            "csv": lambda: to_csv(document),
            "html": lambda: _html(document),
            "json": lambda: schema_json(record, schema),
        }
        put(writers[form](), write, name_file=name_file)
    for line in document.told.get(form, ()):
        say(line)


def _html(document: Document) -> str:
    from flopwise.report.document import to_html
    from flopwise.report.page.page import page_html

    return page_html(document.page()) if document.page else to_html(document)


def schema_json(record: object, kind: str) -> str:
    """A record, or `rows` of several, as JSON that says what it is: the one place that prints any."""
    from flopwise.base.files import with_schema
    from flopwise.store.runs import to_text

    return to_text(with_schema(record, kind))


def one_or_all(records: Sequence[object]) -> object:
    """What JSON holds: one object, or `rows` of them where several were asked for."""
    return records[0] if len(records) == 1 else records


def put(text: str, write: str = "", *, name_file: bool = False) -> None:
    """Text to stdout, or to the file that was named."""
    from pathlib import Path

    from flopwise.base.files import write_whole

    whole = text if text.endswith("\n") else f"{text}\n"
    if write:
        write_whole(Path(write), whole)
        typer.echo(write) if name_file else say(f"wrote {write}")
    else:
        typer.echo(whole, nl=False)


def keep_inputs(files: Sequence[str], *targets: str) -> None:
    """Refuse to write over what is to be read."""
    from flopwise.base.errors import FlopwiseError

    read = {_real(name) for name in files} - {None}
    for target in filter(None, targets):
        if _real(target) in read:
            raise FlopwiseError(
                f"{target} is one of the files to read", why="it would be lost", hint="write to another file"
            )


def _real(name: str) -> Path | None:
    from pathlib import Path

    try:
        return Path(name).resolve()
    except (OSError, ValueError, RuntimeError):
        # A loop of links, a null character: no such file.
        return None


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
