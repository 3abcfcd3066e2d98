"""What memory buys: plans for many pairs of caps as a grid for a terminal, markdown, CSV, JSON and a heatmap in SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from flopwise.base.files import to_json, with_schema
from flopwise.base.units import BINARY_UNITS, show_bytes, show_seconds, show_share, significant
from flopwise.records.plan import Cell, Planned
from flopwise.report.device_plan_files import main_values
from flopwise.report.device_plans import SAME
from flopwise.report.tables import GAP, csv_text, markdown_table

BEST, NO_FIT = "★", "✗"
BEST_WORDS = "the least device memory that is as fast as any"
MOST_REASONS = 3
"""Reasons why nothing fits that a page repeats."""

Caps = tuple[int, int]
"""Device and host memory."""


def best_cell(cells: Sequence[Cell]) -> Cell | None:
    """The fastest; of those that are as fast, the one with the least device memory, then the least host memory."""
    speeds = [_speed(cell) for cell in cells if cell.planned]
    if not speeds:
        return None
    as_fast = [cell for cell in cells if cell.planned and _speed(cell) >= (1 - SAME) * max(speeds)]
    return min(as_fast, key=lambda cell: (cell.device_memory_bytes, cell.host_memory_bytes))


def _speed(cell: Cell) -> float:
    return cell.planned.forecast.tokens_per_s if cell.planned else 0.0


def _axes(cells: Sequence[Cell]) -> tuple[list[int], list[int], dict[Caps, Cell]]:
    """Device caps, host caps, and the cell of each pair."""
    placed = {(cell.device_memory_bytes, cell.host_memory_bytes): cell for cell in cells}
    return sorted({device for device, _ in placed}), sorted({host for _, host in placed}), placed


# -- for a terminal -------------------------------------------------------------------------------------------------


def grid_page(cells: Sequence[Cell], title: str, width: int) -> RenderableType:
    """Tokens per second over MFU for each pair of caps; columns that `width` has no room for come below."""
    best = best_cell(cells)
    devices, hosts, placed = _axes(cells)
    labels = ["host", *(show_bytes(host) for host in hosts)]
    label_width = max(cell_len(label) for label in labels)
    columns = {device: [placed.get((device, host)) for host in hosts] for device in devices}
    widths = {device: _column_width(device, column, best) for device, column in columns.items()}
    parts: list[RenderableType] = [Text(title), Text("rows: host memory · columns: device memory"), ""]
    for band in _bands(widths, width - label_width):
        parts += [_band([(device, columns[device], widths[device]) for device in band], labels, label_width, best), ""]
    return Group(*parts, *_legend(cells, best))


def _column_width(device: int, column: Sequence[Cell | None], best: Cell | None) -> int:
    words = [show_bytes(device), *(line for cell in column for line in _lines(cell, best))]
    return max(cell_len(word) for word in words)


def _bands(widths: Mapping[int, int], room: int) -> list[list[int]]:
    """Columns in groups, none wider than the room; at least one in each."""
    bands: list[list[int]] = []
    used = 0
    for name, width in widths.items():
        used += width + GAP
        if not bands or used > room:
            bands.append([])
            used = width + GAP
        bands[-1].append(name)
    return bands


def _lines(cell: Cell | None, best: Cell | None) -> tuple[str, str]:
    """The two lines of a cell."""
    if cell is None:
        return "", ""
    if cell.planned is None:
        return NO_FIT, "no fit"
    speed, share = significant(_speed(cell)), show_share(cell.planned.forecast.mfu)
    return (f"{BEST} {speed}", f"best {share}") if cell is best else (speed, share)


def _band(
    columns: Sequence[tuple[int, Sequence[Cell | None], int]],
    labels: Sequence[str],
    label_width: int,
    best: Cell | None,
) -> Text:
    text = Text(no_wrap=True, overflow="ignore")
    gap = " " * GAP
    text.append(labels[0].rjust(label_width), style="bold")
    for device, _, width in columns:
        text.append(gap + show_bytes(device).rjust(width), style="bold")
    for row, label in enumerate(labels[1:]):
        for line in (0, 1):
            text.append("\n" + ("" if line else label).rjust(label_width), style="" if line else "bold")
            for _, cells, width in columns:
                cell = cells[row]
                text.append(gap + _lines(cell, best)[line].rjust(width), style=_style(cell, best, line))
    return text


def _style(cell: Cell | None, best: Cell | None, line: int) -> str:
    if cell is None:
        return ""
    if cell.planned is None:
        return "red"
    if cell is best:
        return "bold green"
    return "dim" if line else ""


def _legend(cells: Sequence[Cell], best: Cell | None) -> list[RenderableType]:
    words = ["tok/s over MFU"]
    batches = {cell.planned.plan.tokens_per_step for cell in cells if cell.planned}
    if len(batches) > 1:
        words.append(
            f"batches differ, from {min(batches):,} to {max(batches):,} tokens a step, and with them speeds by up to"
            " 2 %; --batch-tokens fixes one"
        )
    if best:
        words.append(f"{BEST} best: {BEST_WORDS} ({_caps_words(best)})")
    missing = [cell for cell in cells if cell.planned is None]
    if missing:
        words.append(f"{NO_FIT} no fit: nothing fits these caps ({len(missing):,} of {len(cells):,})")
    reasons = list(dict.fromkeys(cell.why_not for cell in missing if cell.why_not))
    more = len(reasons) - MOST_REASONS
    return [
        *map(Text, words),
        *(Text(f"{NO_FIT} {reason}", style="red") for reason in reasons[:MOST_REASONS]),
        *([Text(f"{NO_FIT} and {more:,} more reasons", style="red")] if more > 0 else []),
        *_smallest(missing),
    ]


def _smallest(missing: Sequence[Cell]) -> list[Text]:
    """From what device memory on something fits, for the host caps with which that is known."""
    least = {cell.host_memory_bytes: cell.smallest_device_bytes for cell in missing if cell.smallest_device_bytes}
    if not least:
        return []
    words = [f"{show_bytes(least[host])} with host {show_bytes(host)}" for host in sorted(least)]
    return [Text(f"hint: something fits from device {', '.join(words)}", style="cyan")]


def _caps_words(cell: Cell) -> str:
    return f"device {show_bytes(cell.device_memory_bytes)}, host {show_bytes(cell.host_memory_bytes)}"


# -- for files ------------------------------------------------------------------------------------------------------

VALUES = (
    *("model", "hardware", "step_s", "tokens_per_s", "mfu", "hfu", "ceiling_share", "bound", "tokens_per_step"),
    *("chunk_tokens", "chunks_per_round", "rounds_per_step", "head_chunk_tokens", "param_blocks", "grad_blocks"),
    *("optimizer_blocks", "activation_slots", "device_bytes", "host_bytes"),
)
"""What a row says of a cell's plan."""


def grid_csv(cells: Sequence[Cell]) -> str:
    """One row a pair of caps, full precision; empty where nothing fits."""
    best = best_cell(cells)
    rows = []
    for cell in cells:
        values = main_values(cell.planned) if cell.planned else {}
        rows.append({**_record(cell, best), **{name: values.get(name) for name in VALUES}})
    return csv_text(rows)


def _record(cell: Cell, best: Cell | None) -> dict[str, object]:
    return {
        "device_memory_bytes": cell.device_memory_bytes,
        "host_memory_bytes": cell.host_memory_bytes,
        "fits": cell.planned is not None,
        "best": cell is best,
        "why_not": cell.why_not,
        "smallest_device_bytes": cell.smallest_device_bytes,
    }


def grid_json(cells: Sequence[Cell]) -> str:
    """`rows` with one record a pair of caps; `plan` holds the main values of its plan, or null."""
    best = best_cell(cells)
    rows = [
        {**_record(cell, best), "hints": cell.hints, "plan": main_values(cell.planned) if cell.planned else None}
        for cell in cells
    ]
    return to_json(with_schema(rows, "capped-plan"))


PLAN_COLUMNS = (
    *("device", "host", "chunk", "chunks", "rounds", "weights", "gradients", "optimizer", "slots", "leave"),
    *("tok/s", "MFU", "HFU", "ceiling"),
)


def grid_markdown(cells: Sequence[Cell]) -> str:
    """Rows are host caps, columns device caps, tok/s and MFU in each cell; below it each plan in a row."""
    best = best_cell(cells)
    devices, hosts, placed = _axes(cells)
    columns = ["host", *(f"device {show_bytes(device)}" for device in devices)]
    rows = [
        [show_bytes(host), *(_markdown_cell(placed.get((device, host)), best) for device in devices)] for host in hosts
    ]
    plans = [_plan_row(cell.planned) for cell in cells if cell.planned]
    table = markdown_table(columns, rows, set(), cell=str)
    return f"{table}\n{markdown_table(PLAN_COLUMNS, plans, {'leave'})}" if plans else table


def _plan_row(planned: Planned) -> list[str]:
    """A plan's decisions and figures; of state, the blocks that stay on the device of all that there are."""
    plan, forecast = planned.plan, planned.forecast
    states = (plan.weights, plan.gradients, plan.optimizer_state)
    leave = {name: count for name, count in plan.saved("host").items() if count}
    return [
        *(show_bytes(cap) for cap in (plan.device_memory_bytes, plan.host_memory_bytes)),
        *(f"{count:,}" for count in (plan.chunk_tokens, plan.chunks_per_round, plan.rounds_per_step)),
        *(f"{residency.blocks} of {plan.layers}" for residency in states),
        f"{plan.activation_slots:,}",
        ", ".join(f"{count:,} {name}" for name, count in leave.items()) or "none",
        significant(forecast.tokens_per_s),
        *(show_share(share) for share in (forecast.mfu, forecast.hfu, forecast.ceiling_share)),
    ]


def _markdown_cell(cell: Cell | None, best: Cell | None) -> str:
    if cell is None:
        return "–"
    if cell.planned is None:
        return f"{NO_FIT} does not fit"
    words = f"{significant(_speed(cell))} tok/s, {show_share(cell.planned.forecast.mfu)} MFU"
    return f"**{BEST} best {words}**" if cell is best else words


# -- a heatmap ------------------------------------------------------------------------------------------------------

RAMP = ("#e5f0fc", "#b5d2f4", "#89b4e4", "#6396ce", "#4378b2", "#295c92", "#16416d")
"""One hue, from light to dark in equal steps of perceived lightness (OKLCH, hue 252, 0.95 to 0.37)."""
PAPER, INK, GREY, ACCENT = "#ffffff", "#1a1a1a", "#595959", "#e8890c"
LEAST_SPAN = 0.1
"""The ramp covers at least this share of the fastest: smaller differences should not look like large ones."""

CELL_WIDTH, CELL_HEIGHT = 88, 58
NARROWEST = 460
"""Pixels of a heatmap with few cells: its title and legend need them."""
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 16, 13, 11
LETTER, BOLD_LETTER = 0.62, 0.72
"""Width of a letter by its height, as the widest of the usual fonts have it."""
EDGE, LINE = 16, 22
"""Pixels of empty paper around everything, and from line to line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Where things are on the paper, in pixels from its upper left corner."""

    left: float
    """Where the cells begin."""
    top: float
    bottom: float
    """Where they end."""
    width: float
    """Of the paper."""


def heatmap_svg(cells: Sequence[Cell], title: str) -> str:
    """Device caps to the right, host caps upwards, tok/s as colour and number; a picture that needs nothing else."""
    devices, hosts, placed = _axes(cells)
    host_unit = _unit(hosts)
    longest = max((_text_width(_in_unit(host, host_unit), TEXT_SIZE) for host in hosts), default=0.0)
    left = EDGE + longest + 8
    width = max(NARROWEST, left + CELL_WIDTH * len(devices) + EDGE)
    lines = textwrap.wrap(_printable(title), int((width - 2 * EDGE) / (BOLD_LETTER * TITLE_SIZE)))
    top = EDGE + LINE * (len(lines) + 1) + 8
    frame = _Frame(left=left, top=top, bottom=top + CELL_HEIGHT * len(hosts), width=width)
    parts = [_text(EDGE, EDGE + 14 + LINE * index, line, TITLE_SIZE, bold=True) for index, line in enumerate(lines)]
    best, span = best_cell(cells), _span(cells)
    for (device, host), cell in placed.items():
        x = frame.left + CELL_WIDTH * devices.index(device)
        y = frame.bottom - CELL_HEIGHT * (hosts.index(host) + 1)
        parts.append(_drawn(cell, x, y, span, is_best=cell is best))
    if best:
        x = frame.left + CELL_WIDTH * devices.index(best.device_memory_bytes)
        parts.append(_mark(x, frame.bottom - CELL_HEIGHT * (hosts.index(best.host_memory_bytes) + 1)))
    parts += _ticks(frame, devices, hosts)
    keys = _keys(frame.bottom + 2 * LINE + 14, span, cells)
    return _document(frame, frame.bottom + 2 * LINE + 14 + LINE * len(keys) + EDGE, title, [*parts, *keys])


def _ticks(frame: _Frame, devices: Sequence[int], hosts: Sequence[int]) -> list[str]:
    """Both axes: the caps and what they are."""
    device_unit, host_unit = _unit(devices), _unit(hosts)
    parts = [_text(EDGE, frame.top - 8, f"host memory ({host_unit})", TEXT_SIZE, ink=GREY)]
    for index, device in enumerate(devices):
        x = frame.left + CELL_WIDTH * (index + 0.5)
        parts.append(_text(x, frame.bottom + 18, _in_unit(device, device_unit), TEXT_SIZE, anchor="middle"))
    for index, host in enumerate(hosts):
        y = frame.bottom - CELL_HEIGHT * (index + 0.5) + 5
        parts.append(_text(frame.left - 8, y, _in_unit(host, host_unit), TEXT_SIZE, anchor="end"))
    words = f"device memory ({device_unit})"
    return [*parts, _text(frame.left, frame.bottom + 18 + LINE, words, TEXT_SIZE, ink=GREY)]


def _drawn(cell: Cell, x: float, y: float, span: tuple[float, float], *, is_best: bool) -> str:
    """A cell with its numbers, and all that is known of it for whoever points at it."""
    middle = x + CELL_WIDTH / 2
    if cell.planned is None:
        fill, told = "url(#hatch)", cell.why_not or "does not fit"
        inside = [
            _text(middle, y + 27, NO_FIT, TEXT_SIZE, anchor="middle"),
            _text(middle, y + 43, "does not fit", SMALL_SIZE, anchor="middle"),
        ]
    else:
        forecast = cell.planned.forecast
        fill = colour(_position(forecast.tokens_per_s, span))
        ink, up = ink_on(fill), 8 if is_best else 0
        speed, share = significant(forecast.tokens_per_s), f"{show_share(forecast.mfu)} MFU"
        told = f"{speed} tok/s, {share}, step {show_seconds(forecast.step_s)}, bound by {forecast.bound}"
        inside = [
            _text(middle, y + 28 - up, speed, TEXT_SIZE, anchor="middle", ink=ink, bold=True),
            _text(middle, y + 44 - up, share, SMALL_SIZE, anchor="middle", ink=ink),
        ]
        if is_best:
            inside.append(_text(middle, y + 51, f"{BEST} best", SMALL_SIZE, anchor="middle", ink=ink, bold=True))
    box = (
        f'<rect class="cell" x="{x:.1f}" y="{y:.1f}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}"'
        f' fill="{fill}" stroke="{PAPER}" stroke-width="2"/>'
    )
    return f"<g><title>{_escaped(f'{_caps_words(cell)}: {told}')}</title>{box}{''.join(inside)}</g>"


def _mark(x: float, y: float) -> str:
    """The frame of the best cell, drawn over its neighbours' edges."""
    size = f'width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}"'
    return f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" {size} fill="none" stroke="{ACCENT}" stroke-width="3"/>'


def _keys(top: float, span: tuple[float, float], cells: Sequence[Cell]) -> list[str]:
    """What colour, frame and hatching mean, one line for each that there is."""
    keys: list[str] = []

    def line(swatch: str, words: str) -> None:
        y = top + LINE * len(keys)
        box = f'<rect x="{EDGE}" y="{y:.1f}" width="22" height="13" {swatch}/>'
        keys.append(f"<g>{box}{_text(EDGE + 30, y + 11, words, SMALL_SIZE)}</g>")

    if any(cell.planned for cell in cells):
        keys.append(_ramp_key(top, span))
        line(f'fill="none" stroke="{ACCENT}" stroke-width="3"', f"{BEST} best: {BEST_WORDS}")
    if any(cell.planned is None for cell in cells):
        line('fill="url(#hatch)"', f"{NO_FIT} does not fit: no plan keeps to both caps")
    return keys


def _ramp_key(top: float, span: tuple[float, float]) -> str:
    low, high = (significant(speed) for speed in span)
    begin = EDGE + _text_width(low, SMALL_SIZE) + 6
    words = _text(EDGE, top + 11, low, SMALL_SIZE) + _text(begin + 146, top + 11, f"{high} tok/s", SMALL_SIZE)
    return f'<g>{words}<rect x="{begin:.1f}" y="{top:.1f}" width="140" height="13" fill="url(#ramp)"/></g>'


def _document(frame: _Frame, height: float, title: str, parts: Sequence[str]) -> str:
    stops = "".join(
        f'<stop offset="{index / (len(RAMP) - 1):.3f}" stop-color="{shade}"/>' for index, shade in enumerate(RAMP)
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{frame.width:.0f}" height="{height:.0f}"'
            f' viewBox="0 0 {frame.width:.0f} {height:.0f}" role="img" font-family="system-ui, sans-serif">',
            f"<title>{_escaped(title)}</title>",
            "<defs>",
            f'<linearGradient id="ramp">{stops}</linearGradient>',
            '<pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<path d="M0 0H8V8H0Z" fill="#ececec"/><path d="M0 0V8" stroke="#d2d2d2" stroke-width="3"/></pattern>',
            "</defs>",
            f'<path d="M0 0H{frame.width:.0f}V{height:.0f}H0Z" fill="{PAPER}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _text(
    x: float, y: float, words: str, size: int, *, anchor: str = "start", ink: str = INK, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{ink}"{weight}'
    return f"<text {place}>{_escaped(words)}</text>"


def _text_width(words: str, size: int) -> float:
    return LETTER * size * cell_len(words)


def _printable(words: str) -> str:
    """Without the characters that a document must not hold."""
    return "".join(letter if letter.isprintable() else " " for letter in words)


def _escaped(words: str) -> str:
    return escape(_printable(words))


def _unit(sizes: Sequence[int]) -> str:
    """The unit of an axis: GiB, or what its smallest cap needs."""
    smallest = min((size for size in sizes if size), default=BINARY_UNITS["GiB"])
    return next(name for name in ("GiB", "MiB", "KiB", "B") if smallest >= BINARY_UNITS[name] or name == "B")


def _in_unit(size: int, unit: str) -> str:
    return f"{size / BINARY_UNITS[unit]:,.3f}".rstrip("0").rstrip(".")


def _span(cells: Sequence[Cell]) -> tuple[float, float]:
    """Speeds at the ends of the ramp."""
    speeds = [_speed(cell) for cell in cells if cell.planned]
    if not speeds:
        return 0.0, 0.0
    return min(*speeds, (1 - LEAST_SPAN) * max(speeds)), max(speeds)


def _position(speed: float, span: tuple[float, float]) -> float:
    low, high = span
    return (speed - low) / (high - low) if high > low else 1.0


def colour(position: float) -> str:
    """The ramp's colour at a place from 0 to 1."""
    place = min(max(position, 0.0), 1.0) * (len(RAMP) - 1)
    index = min(int(place), len(RAMP) - 2)
    share = place - index
    mixed = [
        round((1 - share) * below + share * above)
        for below, above in zip(_channels(RAMP[index]), _channels(RAMP[index + 1]), strict=True)
    ]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _channels(shade: str) -> tuple[int, int, int]:
    return int(shade[1:3], 16), int(shade[3:5], 16), int(shade[5:7], 16)


def contrast(first: str, second: str) -> float:
    """Contrast of two colours, 1 to 21, as WCAG defines it; 4.5 is enough for text."""
    lights = []
    for shade in (first, second):
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in (channel / 255 for channel in _channels(shade))
        ]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def ink_on(shade: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    return max(("#000000", "#ffffff"), key=lambda ink: contrast(ink, shade))
