"""What is printed: a document of blocks, and one renderer each for the terminal, markdown, CSV and HTML.

A record is turned into a `Document` once; no record has writers of its own, and no command asks which form it prints.
JSON comes from the record itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from flopwise.report.tables import (
    GAP,
    Styled,
    bind_units,
    column_widths,
    csv_text,
    fitting_columns,
    fold_words,
    markdown_table,
    markdown_text,
    style_of,
    text_table,
)
from flopwise.report.words import UNKNOWN, shorten, visible

if TYPE_CHECKING:
    from flopwise.report.page.data import PageData

LONGEST_LABEL = 26
"""Columns for what stands before words."""
NARROWEST = 8
"""Of a folded column."""
FACTS = ("", " ")
"""Columns of a table of facts: what it is, and what is known of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of words under their columns. What there is no room for gives way, is cut, is folded, or comes below."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str] = ()
    """Columns of words; all others stand right."""
    title: str = ""
    note: str = ""
    headed: bool = True
    styles: Sequence[str] = ()
    """One for each row, or none."""
    giving_way: Sequence[str] = ()
    """Columns that leave a narrow terminal, the first one first."""
    cut: Mapping[str, int] = field(default_factory=dict)
    """Column → how short its words may be cut."""
    cut_within: bool = False
    """Cut them in their middle: names of runs often differ at the end."""
    folded: Mapping[str, int] = field(default_factory=dict)
    """Column → how wide it is at most; 0: as wide as there is room."""
    banded: bool = False
    """Columns that there is no room for come below, again behind the first."""


@dataclass(frozen=True, slots=True)
class Words:
    """Lines of words, each folded where it is too long."""

    text: str
    style: str = ""
    indent: int = 0
    """Of what is folded."""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Items:
    """A list; `numbered` items may have further lines."""

    title: str
    items: Sequence[str]
    style: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """Lines that are a picture: never folded."""

    lines: Sequence[str]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Heading:
    """What follows is about something else."""

    text: str


Block = Table | Words | Items | Figure | Heading


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """What is printed of a record. Blocks and rows may be generators: only one form of a document is asked for."""

    title: str = ""
    blocks: Iterable[Block] = ()
    """For a terminal and a page."""
    tables: Iterable[Block] | None = None
    """For markdown, where that is something else: what pastes into an issue."""
    rows: Iterable[Mapping[str, object]] = ()
    """For CSV, at full precision, the unit in the column's name."""
    fields: Sequence[str] = ()
    """Columns of the CSV where there may be no rows."""
    faithful: bool = False
    """The CSV is read back: its cells tell empty words from unknown ones."""
    page: Callable[[], PageData] | None = None
    """What the page shows of it, where there is a form for a browser."""
    told: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Form → lines of talk beside it: data is on stdout, talk on stderr."""


def facts(rows: Iterable[tuple[str, str]], title: str = "", *, longest_label: int = LONGEST_LABEL) -> Table:
    """What is known, one thing a row; those of which nothing is known are left out."""
    kept = [(label, words) for label, words in rows if words]
    styles = [style_of(words) for _, words in kept]
    return Table(
        columns=FACTS,
        rows=kept,
        left=FACTS,
        headed=False,
        title=title,
        styles=styles,
        folded={FACTS[0]: longest_label, FACTS[1]: 0},
    )


def note_rows(notes: Iterable[str]) -> list[tuple[str, str]]:
    """Notes as the last of the facts."""
    return [("note", Styled(note, "cyan")) for note in notes]


def beside_rows(notes: Iterable[str], *forms: str) -> dict[str, list[str]]:
    """Notes as talk beside rows of markdown and CSV, which have no place for them, and beside further forms."""
    told = [f"note: {note}" for note in dict.fromkeys(notes)]
    return dict.fromkeys(("md", "csv", *forms), told)


# -- for a terminal --------------------------------------------------------------------------------------------------


def to_page(document: Document, width: int) -> list[Text]:
    """All blocks, `width` columns wide, with an empty line between two."""
    parts: list[Text] = []
    for block in document.blocks:
        parts += [*([Text("")] if parts else []), *_render_block(block, width)]
    return parts


def _render_block(block: Block, width: int) -> Iterator[Text]:
    if isinstance(block, Heading):
        yield _lines(fold_words(block.text, width, indent=2), "bold")
        return
    if block.title:
        style = block.style if isinstance(block, Items) else ""
        yield _lines([block.title], f"bold {style}".strip())
    if isinstance(block, Table):
        yield from _tables(block, width)
        yield from [_lines(fold_words(block.note, width), style_of(block.note) or "dim")] if block.note else []
    elif isinstance(block, Items):
        yield _lines([line for item in block.items for line in _item(item, width)])
    else:
        lines = fold_words(block.text, width, indent=block.indent) if isinstance(block, Words) else block.lines
        yield _lines(lines, block.style if isinstance(block, Words) else "")


def _lines(lines: Iterable[str], style: str = "") -> Text:
    """Lines as they are, never folded."""
    return Text("\n".join(lines), style=style, no_wrap=True, overflow="ignore")


def _item(item: str, width: int) -> Iterator[str]:
    """A mark and the item; its further lines are indented."""
    first, *others = item.split("\n")
    mark = "" if re.match(r"\d+\. ", first) else "- "
    lines = fold_words(first, width - 2, indent=2) or [""]
    yield from (f"{mark}{line}" if not number else line for number, line in enumerate(lines))
    for other in others:
        yield from (f"   {line}" for line in fold_words(other, width - 3, indent=2))


def _tables(table: Table, width: int) -> Iterator[Text]:
    """The table as wide as there is room, in one piece or in bands."""
    natural = column_widths(table.columns, [_flat(row) for row in table.rows], headed=table.headed)
    least = natural | {name: min(natural[name], short) for name, short in table.cut.items()}
    kept = fitting_columns(least, width, table.giving_way)
    widths = {name: natural[name] for name in kept}
    for name in [name for name in table.cut if name in kept]:
        beside = sum(widths[other] + GAP for other in kept if other != name)
        widths[name] = min(natural[name], max(table.cut[name], width - beside))
    _share_room(table, widths, width)
    places = {name: place for place, name in enumerate(table.columns)}
    for number, band in enumerate(_bands(widths, width) if table.banded else [kept]):
        rows, styles = _expand(table, [(places[name], name, widths[name]) for name in band])
        yield from [Text("")] if number else []
        yield text_table(band, rows, table.left, styles=styles, headed=table.headed)


def _flat(row: Sequence[str]) -> list[str]:
    """Of a cell in lines the longest."""
    return [max(cell.split("\n"), key=cell_len) if "\n" in cell else cell for cell in row]


def _share_room(table: Table, widths: dict[str, int], width: int) -> None:
    """Folded columns are as wide as they want to be, else equally wide, but for their longest words."""
    widths.update({name: min(widths[name], most) for name, most in table.folded.items() if most and name in widths})
    places = {name: place for place, name in enumerate(table.columns) if table.folded.get(name) == 0 and name in widths}
    room = width - sum(size + GAP for name, size in widths.items() if name not in places) - GAP * (len(places) - 1)
    if not places or sum(widths[name] for name in places) <= room:
        return
    words = {name: [re.split("[ \n]", bind_units(row[place])) for row in table.rows] for name, place in places.items()}
    least = {name: max(cell_len(word) for cell in cells for word in cell) for name, cells in words.items()}
    for level in range(max(widths[name] for name in places), 0, -1):
        shared = {name: min(widths[name], max(level, least[name])) for name in places}
        if sum(shared.values()) <= room:
            break
    # A word that is longer than all that there is room for is broken.
    widest = max(shared, key=lambda name: shared[name])
    shared[widest] = min(shared[widest], max(NARROWEST, room - sum(shared.values()) + shared[widest]))
    widths.update(shared)


def _bands(widths: Mapping[str, int], width: int) -> list[list[str]]:
    """Columns in groups behind the first one, none wider than the room; at least one in each."""
    first, *others = widths
    bands: list[list[str]] = []
    used = 0
    for name in others:
        used += widths[name] + GAP
        if not bands or used > width - widths[first]:
            bands.append([first])
            used = widths[name] + GAP
        bands[-1].append(name)
    return bands


def _expand(table: Table, places: Sequence[tuple[int, str, int]]) -> tuple[list[list[str]], list[str]]:
    """A row for each line of the cells, and its style."""
    rows: list[list[str]] = []
    styles: list[str] = []
    for number, row in enumerate(table.rows):
        if table.banded and all(row[place].strip() in ("", UNKNOWN) for place, _, _ in places[1:]):
            continue
        cells = [_cell_lines(row[place], name, width, table) for place, name, width in places]
        height = max(map(len, cells), default=1)
        rows += [[lines[line] if line < len(lines) else "" for lines in cells] for line in range(height)]
        styles += [table.styles[number] if table.styles else ""] * height
    return rows, styles


def _cell_lines(cell: str, name: str, width: int, table: Table) -> list[str]:
    if name in table.folded:
        lines = fold_words(cell, width)
    elif name in table.cut and cell_len(cell) > width:
        lines = [shorten(cell, width) if table.cut_within else set_cell_size(cell, width - 1).rstrip() + "…"]
    elif "\n" in cell and table.banded:
        lines = cell.split("\n")
    else:
        return [cell]
    style = style_of(cell)
    return [Styled(line, style) for line in lines] if style else lines


# -- markdown --------------------------------------------------------------------------------------------------------


def to_markdown(document: Document) -> str:
    """The document for an issue, or the page of a change."""
    blocks = document.blocks if document.tables is None else document.tables
    heading = [f"# {markdown_text(document.title)}\n"] if document.title else []
    return "\n".join([*heading, *(text for block in blocks for text in _markdown(block))])


def _markdown(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        yield f"# {_paragraph(block.text)}\n"
        return
    title = f"## {markdown_text(block.title)}\n\n" if block.title else ""
    if isinstance(block, Table):
        note = f"\n{_paragraph(block.note)}\n" if block.note else ""
        yield f"{title}{markdown_table(block.columns, block.rows, block.left)}{note}"
    elif isinstance(block, Items):
        yield title + "".join(f"- {_paragraph(item)}\n" for item in block.items)
    elif isinstance(block, Words):
        yield title + "".join(f"{_paragraph(line)}\n" for line in block.text.split("\n"))


def _paragraph(text: str) -> str:
    """Text at the beginning of a line, where it is no heading and no item of a list either."""
    return re.sub(r"^([#+-])(?=\s)", r"\\\1", markdown_text(text))


# -- CSV and HTML ----------------------------------------------------------------------------------------------------


def to_csv(document: Document) -> str:
    """A line for each row."""
    return csv_text(document.rows, document.fields, faithful=document.faithful)


COLOURS = {"red": "#b3261e", "green": "#1b7f3b", "yellow": "#9a5b00", "cyan": "#0b7285", "dim": "#6b7280"}


def to_html(document: Document) -> str:
    """The blocks as HTML within a page of others, such as a notebook's; every word is escaped."""
    return "\n".join(text for block in document.blocks for text in _html(block))


def _html(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        yield f"<h3>{_escape(block.text)}</h3>"
        return
    if block.title:
        yield f"<h4>{_escape(block.title)}</h4>"
    if isinstance(block, Table):
        yield _html_table(block)
        yield from [f"<p>{_escape(block.note)}</p>"] if block.note else []
    elif isinstance(block, Items):
        yield f"<ul>{''.join(f'<li>{_escape(item)}</li>' for item in block.items)}</ul>"
    elif isinstance(block, Figure):
        yield f"<pre>{_escape(chr(10).join(block.lines))}</pre>"
    else:
        yield f"<p{_css(block.style)}>{_escape(block.text).replace(chr(10), '<br>')}</p>"


def _html_table(table: Table) -> str:
    sides = ["text-align:left" if name in table.left else "text-align:right" for name in table.columns]
    styles = table.styles or [""] * len(table.rows)
    head = "".join(f'<th style="{side}">{_escape(name)}</th>' for name, side in zip(table.columns, sides, strict=True))
    rows = []
    for row, style in zip(table.rows, styles, strict=True):
        cells = zip(row, sides, strict=True)
        inner = "".join(f"<td{_css(style_of(cell) or style, side)}>{_escape(cell)}</td>" for cell, side in cells)
        rows.append(f"<tr>{inner}</tr>")
    return f"<table>{f'<tr>{head}</tr>' if table.headed else ''}{''.join(rows)}</table>"


def _css(style: str, *more: str) -> str:
    words = style.split()
    rules = [
        *(["font-weight:600"] if "bold" in words else []),
        *(f"color:{COLOURS[word]}" for word in words if word in COLOURS),
    ]
    return f' style="{";".join([*rules, *more])}"' if rules or more else ""


def _escape(text: str) -> str:
    return escape(visible(text))
