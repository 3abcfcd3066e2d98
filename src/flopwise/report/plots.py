"""Pictures of results, PNG or SVG by the file's name: a heatmap over two axes, and lines over one.

Only here is matplotlib needed, and only when a picture is drawn. No global state of it is touched, and the same rows
give the same bytes of SVG.
"""

from __future__ import annotations

import io
import math
import os
import re
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from flopwise.base.errors import FlopwiseError, nearest, shown
from flopwise.base.files import WRITABLE_HINT, write_whole
from flopwise.base.units import show_bytes, show_share, significant
from flopwise.report.palette import HEAT, ink_on
from flopwise.report.words import printable
from flopwise.store.results import Result, check_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["heatmap", "scaling"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SUFFIXES = (".png", ".svg")


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """What a row can be placed by."""

    field: str
    title: str
    words: Callable[[float], str]


def _tokens(value: float) -> str:
    count = int(value)
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else f"{count:,}"


def _whole(value: float) -> str:
    return f"{int(value):,}"


def _size(value: float) -> str:
    return show_bytes(value).replace(".00 ", " ").replace(".0 ", " ")


AXES: dict[str, Axis] = {
    "sequence": Axis(field="sequence_tokens", title="sequence, tokens", words=_tokens),
    "batch": Axis(field="batch_sequences", title="batch, sequences", words=_whole),
    "micro-batch": Axis(field="micro_batch_sequences", title="micro-batch, sequences", words=_whole),
    "devices": Axis(field="devices", title="devices", words=_whole),
    "device-cap": Axis(field="device_cap_bytes", title="device memory cap", words=_size),
    "host-cap": Axis(field="host_cap_bytes", title="host memory cap", words=_size),
}
VALUES: dict[str, Axis] = {
    "tokens_per_s": Axis(field="tokens_per_s", title="tokens/s", words=significant),
    "mfu": Axis(field="mfu", title="MFU", words=show_share),
}
VALUE_ALIASES = {"tok/s": "tokens_per_s", "speed": "tokens_per_s"}
MOST_PANELS = 6
MOST_LINES = 10
MOST_PLACES = 24
"""On one axis of a heatmap: more cannot be read."""
ASIDE = {"oom": "OOM", "timeout": "timeout", "failed": "failed", "skipped": "skipped", "error": "error"}
"""States that stand in a heatmap's cell where nothing was measured there, the most telling first."""


def plot(
    rows: Sequence[Result],
    kind: Kind,
    path: Path,
    *,
    x: str = "sequence",
    y: str = "batch",
    value: str = "tokens_per_s",
) -> None:
    """Draw a heatmap of `value` over `x` and `y`, or `scaling`: `value` over `x`, a line for each model.

    Of several rows in one place the fastest is drawn; rows of one cell are repeats, and their median is taken first.
    """
    if kind not in KINDS:
        raise _unknown("kind of picture", kind, KINDS)
    check_picture(path)
    across, up, shown_value = _axis(x, "--x"), _axis(y, "--y"), _value(value)
    sound, shown_value = _foreseen([check_result(row) for row in rows], shown_value)
    if kind == "heatmap":
        if across == up:
            raise FlopwiseError(f"both axes are {x!r}", why="a heatmap has two", hint="--x sequence --y batch")
        figure = _heatmap(sound, across, up, shown_value)
    else:
        figure = _scaling(sound, across, shown_value)
    save(figure, path)


def _foreseen(rows: list[Result], value: Axis) -> tuple[list[Result], Axis]:
    """Where nobody has run any of them: what is predicted of each, and a title that says so."""
    is_speed = value.field == "tokens_per_s"
    if not is_speed or any(row.state != "planned" for row in rows):
        return rows, value
    drawn = [
        replace(row, state="ok", tokens_per_s=row.predicted_tokens_per_s) if row.predicted_fits is not False else row
        for row in rows
    ]
    return drawn, replace(value, title=f"{value.title}, predicted")


def check_picture(path: Path) -> None:
    """Refuse a file whose name is no picture's."""
    if path.suffix.lower() not in SUFFIXES:
        raise FlopwiseError(
            f"a picture cannot be written to {shown(str(path))}",
            why=f"its name ends in one of {', '.join(SUFFIXES)}",
            hint="results.svg",
        )


def _unknown(what: str, name: str, known: Sequence[str]) -> FlopwiseError:
    close = nearest(name, known)
    why = f"did you mean {' or '.join(close)}?" if close else None
    return FlopwiseError(f"there is no {what} {shown(name)}", why=why, hint=f"one of {', '.join(known)}")


def _axis(name: str, option: str) -> Axis:
    by_field = {axis.field: key for key, axis in AXES.items()}
    key = by_field.get(name, name)
    if key not in AXES:
        raise _unknown(f"axis for {option} called", name, tuple(AXES))
    return AXES[key]


def _value(name: str) -> Axis:
    key = VALUE_ALIASES.get(name.lower(), name.lower())
    if key not in VALUES:
        raise _unknown("value to draw called", name, tuple(VALUES))
    return VALUES[key]


# -- rows to points --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What is drawn in one place: a value with its spread, or why there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None
    state: str = "ok"


def _read_value(row: Result, value: Axis) -> float | None:
    found: float | None = getattr(row, value.field)
    usable = row.state == "ok" and found is not None and math.isfinite(found) and found >= 0
    return found if usable else None


def points(rows: Sequence[Result], place: Callable[[Result], object], value: Axis) -> dict[Any, Point]:
    """The point of each place: of a cell's repeats the median, of several cells the best; else the worst word."""
    groups: dict[Any, list[Result]] = {}
    for row in rows:
        groups.setdefault(place(row), []).append(row)
    return {key: _point(group, value) for key, group in groups.items()}


def _point(rows: Sequence[Result], value: Axis) -> Point:
    cells: dict[object, list[Result]] = {}
    for number, row in enumerate(rows):
        if _read_value(row, value) is not None:
            cells.setdefault(row.cell or number, []).append(row)
    found = [_median(group, value) for group in cells.values()]
    if found:
        return max(found, key=lambda point: point.value or 0.0)
    states = {row.state for row in rows}
    return Point(value=None, state=next((state for state in ASIDE if state in states), min(states)))


def _median(rows: Sequence[Result], value: Axis) -> Point:
    figures = [figure for row in rows if (figure := _read_value(row, value)) is not None]
    middle = statistics.median(figures)
    lows, highs = [], []
    for row, figure in zip(rows, figures, strict=True):
        speed, low, high = row.tokens_per_s, row.tokens_per_s_p20, row.tokens_per_s_p80
        # MFU is the speed times a constant, so its spread is the speed's.
        known = speed and low is not None and high is not None
        lows.append(figure * low / speed if known and speed and low is not None else figure)
        highs.append(figure * high / speed if known and speed and high is not None else figure)
    return Point(value=middle, low=min(lows), high=max(highs))


def _nothing(axes: Sequence[Axis], value: Axis) -> FlopwiseError:
    names = " and ".join(axis.field for axis in axes)
    return FlopwiseError(
        f"there is nothing to draw of {value.title}",
        why=f"no row has {names}, and {value.field} where it is ok",
        hint="other axes: --x sequence, batch, devices, device-cap or host-cap",
    )


Setup = tuple[str | None, ...]
"""Model, hardware and precision: what has a line or a panel of its own."""
LONGEST_NAME = 32


def _setup(row: Result) -> Setup:
    return row.model, row.hardware, row.precision


def _titles(setups: Sequence[Setup]) -> tuple[str, list[str]]:
    """What all have in common, and what each has of its own."""
    common = [part[0] if len(set(part)) == 1 else None for part in zip(*setups, strict=True)]
    own = [[part for part, shared in zip(setup, common, strict=True) if part != shared] for setup in setups]
    return _join(common), [_join(parts) for parts in own]


def _join(parts: Sequence[str | None]) -> str:
    words = [printable(part) for part in parts if part]
    short = [word if len(word) <= LONGEST_NAME else f"{word[: LONGEST_NAME - 1]}…" for word in words]
    # Between two dollars matplotlib reads a formula.
    return " · ".join(short).replace("$", r"\$")


# -- the heatmap -----------------------------------------------------------------------------------------------------


def _heatmap(rows: Sequence[Result], across: Axis, up: Axis, value: Axis) -> Figure:
    placed = [row for row in rows if None not in (getattr(row, across.field), getattr(row, up.field))]
    panels: dict[Setup, list[Result]] = {}
    for row in placed:
        panels.setdefault(_setup(row), []).append(row)
    if not panels or not any(_read_value(row, value) is not None or row.state in ASIDE for row in placed):
        raise _nothing((across, up), value)
    if len(panels) > MOST_PANELS:
        raise FlopwiseError(
            f"{len(panels)} heatmaps are too many for a picture",
            why="there is one for each model, hardware and precision",
            hint=f"choose at most {MOST_PANELS}: --model NAME",
        )
    columns = sorted({getattr(row, across.field) for row in placed})
    lines = sorted({getattr(row, up.field) for row in placed})
    if max(len(columns), len(lines)) > MOST_PLACES:
        raise FlopwiseError(
            f"{len(columns)} × {len(lines)} places are too many for a heatmap",
            why=f"at most {MOST_PLACES} on an axis can be read",
            hint="name fewer rows, or draw lines: without --y",
        )
    tables = [
        points(group, lambda row: (getattr(row, across.field), getattr(row, up.field)), value)
        for group in panels.values()
    ]
    common, own = _titles(list(panels))
    width, height = max(3.2, 0.85 * len(columns) + 1.2), max(2.2, 0.5 * len(lines) + 1.4)
    figure = empty_figure(width * len(tables) + 0.9, height)
    highest = max((point.value or 0.0 for table in tables for point in table.values()), default=0.0) or 1.0
    figure.suptitle(common, fontsize=10)
    axes = figure.subplots(1, len(tables), squeeze=False)[0]
    for number, (panel, table) in enumerate(zip(axes, tables, strict=True)):
        cells = [[_square(table.get((column, line)), value) for column in columns] for line in lines]
        image = draw_squares(panel, cells, 0.0, highest)
        panel.set_title(own[number], fontsize=9)
        panel.set_xticks(range(len(columns)), [across.words(column) for column in columns], fontsize=8)
        panel.set_yticks(range(len(lines)), [up.words(line) for line in lines] if not number else [], fontsize=8)
        panel.set_xlabel(across.title, fontsize=9)
        if number == 0:
            panel.set_ylabel(up.title, fontsize=9)
    bar = figure.colorbar(image, ax=list(axes), label=value.title)
    bar.ax.yaxis.set_major_formatter(lambda figure_value, _: value.words(figure_value))
    return figure


def _square(point: Point | None, value: Axis) -> Square | None:
    if point is None:
        return None
    words = ASIDE.get(point.state, point.state) if point.value is None else value.words(point.value)
    return Square(value=point.value, words=words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Square:
    """A place of a heatmap: its value as a colour, words in it, and what an SVG tells of it to whoever points there."""

    value: float | None
    words: str
    told: str = ""
    framed: bool = False


def draw_squares(panel: Axes, squares: Sequence[Sequence[Square | None]], low: float, high: float) -> Any:  # noqa: ANN401 - matplotlib's image
    """Lines of squares, the first one below; colours go from `low` to `high`."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, to_hex
    from matplotlib.patches import Rectangle

    # The same as the page's.
    colours = LinearSegmentedColormap.from_list("flopwise", list(HEAT))
    grid = np.array(
        [[math.nan if square is None or square.value is None else square.value for square in line] for line in squares]
    )
    image = panel.imshow(grid, origin="lower", aspect="auto", cmap=colours, vmin=low, vmax=high)
    panel.set_facecolor("#e6e6e6")
    for row, line in enumerate(squares):
        for column, square in enumerate(line):
            if square is None:
                continue
            share = 0.5 if square.value is None or high <= low else (square.value - low) / (high - low)
            colour = "#a00000" if square.value is None else ink_on(to_hex(colours(min(1.0, max(0.0, share)))))
            panel.text(column, row, square.words, ha="center", va="center", fontsize=8, color=colour)
            corner = (column - 0.5, row - 0.5)
            if square.framed:
                panel.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#e8890c", linewidth=3, clip_on=False))
            if square.told:
                # Not to be seen, and still what is pointed at.
                panel.add_patch(Rectangle(corner, 1, 1, alpha=0, gid=f"{TOLD}{printable(square.told)}", zorder=9))
    panel.tick_params(length=0)
    return image


TOLD = "told: "
"""Begins the name of a part of an SVG whose rest is its tooltip."""


# -- lines -----------------------------------------------------------------------------------------------------------


def _scaling(rows: Sequence[Result], across: Axis, value: Axis) -> Figure:
    lines: dict[Setup, list[Result]] = {}
    for row in rows:
        if getattr(row, across.field) is not None:
            lines.setdefault(_setup(row), []).append(row)
    found = {key: points(group, lambda row: getattr(row, across.field), value) for key, group in lines.items()}
    found = {key: line for key, line in found.items() if any(point.value is not None for point in line.values())}
    if not found:
        raise _nothing((across,), value)
    if len(found) > MOST_LINES:
        raise FlopwiseError(
            f"{len(found)} lines are too many for a picture",
            why="there is one for each model, hardware and precision",
            hint=f"choose at most {MOST_LINES}: --model NAME",
        )
    common, own = _titles(list(found))
    figure = empty_figure(8.0, 4.6)
    panel = figure.subplots()
    for number, line in enumerate(found.values()):
        _draw_line(panel, line, f"C{number % 10}", own[number])
    _mark_lost(panel, list(found.values()))
    _finish(panel, list(found.values()), across, value)
    panel.set_title(common, fontsize=10)
    if len(found) > 1:
        panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def _draw_line(panel: Axes, line: dict[Any, Point], colour: str, label: str) -> None:
    known = [(place, point) for place, point in sorted(line.items()) if point.value is not None]
    places = [place for place, _ in known]
    values = [point.value or 0.0 for _, point in known]
    panel.plot(places, values, marker="o", markersize=4, linewidth=1.5, color=colour, label=label)
    lows = [point.value or 0.0 if point.low is None else point.low for _, point in known]
    highs = [point.value or 0.0 if point.high is None else point.high for _, point in known]
    if lows != values or highs != values:
        panel.fill_between(places, lows, highs, color=colour, alpha=0.2, linewidth=0)


def _mark_lost(panel: Axes, lines: Sequence[dict[Any, Point]]) -> None:
    """At the foot, in each line's colour, a word where it was tried and not measured; words stand on each other."""
    above: dict[Any, int] = {}
    for number, line in enumerate(lines):
        for place, point in sorted(line.items()):
            if point.value is None and point.state in ASIDE:
                height = above[place] = above.get(place, 0) + 1
                panel.annotate(
                    f"× {ASIDE[point.state]}",
                    (place, 0.0),
                    (0, 10 * height - 7),
                    xycoords=panel.get_xaxis_transform(),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                    color=f"C{number % 10}",
                )


def _finish(panel: Axes, lines: Sequence[dict[Any, Point]], across: Axis, value: Axis) -> None:
    places = sorted({place for line in lines for place in line})
    values = [point.value for line in lines for point in line.values() if point.value is not None]
    if places[0] > 0 and places[-1] >= 4 * places[0]:
        panel.set_xscale("log", base=2)
    panel.set_xticks(_apart(places, panel.get_xscale() == "log"))
    panel.set_xlim(*_margins(places[0], places[-1], logarithmic=panel.get_xscale() == "log"))
    if min(values) > 0 and max(values) > 20 * min(values):
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0.0)
    panel.minorticks_off()
    panel.xaxis.set_major_formatter(lambda place, _: across.words(place))
    panel.yaxis.set_major_formatter(lambda figure_value, _: value.words(figure_value))
    panel.set_xlabel(across.title)
    panel.set_ylabel(value.title)
    panel.grid(color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)


def _margins(least: float, largest: float, *, logarithmic: bool) -> tuple[float, float]:
    """A little beyond the first and the last place, those included that have nothing but a word."""
    if logarithmic:
        factor = (largest / least) ** 0.05
        return least / factor, largest * factor
    room = 0.05 * (largest - least) or 0.5
    return least - room, largest + room


def _apart(places: Sequence[float], logarithmic: bool, least: float = 1 / 14) -> list[float]:
    """Places that are far enough from each other for a word under each."""
    scaled = [math.log(place) if logarithmic else float(place) for place in places]
    room = least * ((scaled[-1] - scaled[0]) or 1.0)
    kept: list[int] = []
    for index, place in enumerate(scaled):
        if not kept or place - scaled[kept[-1]] >= room:
            kept.append(index)
    return [places[index] for index in kept]


# -- matplotlib ------------------------------------------------------------------------------------------------------


def empty_figure(width_inches: float, height_inches: float) -> Figure:
    """Paper to draw on."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FlopwiseError(
            "pictures need matplotlib, which is not installed", hint="pip install 'flopwise[plots]'"
        ) from None
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save(figure: Figure, path: Path, title: str | None = None) -> None:
    """Write the picture whole, without a date and with the same names of its parts every time."""
    import matplotlib

    suffix = path.suffix.lower()
    stream = io.BytesIO()
    fixed: dict[Any, Any] = {"svg.hashsalt": "flopwise", "svg.fonttype": "none"}
    unsaid: dict[str, Any] = {"Date": None, "Creator": None} if suffix == ".svg" else {"Software": None}
    with warnings.catch_warnings(), matplotlib.rc_context(fixed):
        # A name in signs that the font lacks is drawn with boxes.
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(stream, format=suffix[1:], metadata={**unsaid, **({"Title": title} if title else {})})
    if suffix == ".svg":
        # Words with a quotation mark stand in apostrophes.
        told = re.compile(rf"<g id=([\"']){TOLD}(.*?)\1>", re.DOTALL)
        write_whole(path, told.sub(r"<g><title>\2</title>", stream.getvalue().decode()))
    else:
        _write_bytes(path, stream.getvalue())


def _write_bytes(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Made here and now: its name can be foretold, and nothing is written through a link in its place.
        with beside.open("xb") as stream:
            stream.write(content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise FlopwiseError(f"cannot write {path}", why=error.strerror, hint=WRITABLE_HINT) from None
