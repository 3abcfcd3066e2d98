"""What memory buys: plans for many pairs of caps as a grid, and as a heatmap."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flopwise.base.units import BINARY_UNITS, show_bytes, show_seconds, show_share, significant
from flopwise.records.plan import CapCell, Planned
from flopwise.report.device_plans import SAME, main_values
from flopwise.report.document import Block, Document, Table, Words, beside_rows
from flopwise.report.plots import Square, draw_squares, empty_figure, save
from flopwise.report.tables import Styled
from flopwise.report.words import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST, NO_FIT = "★", "✗"
BEST_WORDS = "the least device memory that is as fast as any"
MOST_REASONS = 3
"""Reasons why nothing fits that a page repeats."""

Caps = tuple[int, int]
"""Device and host memory."""


def best_cell(cells: Sequence[CapCell]) -> CapCell | None:
    """The fastest; of those that are as fast, the one with the least device memory, then the least host memory."""
    speeds = [_speed(cell) for cell in cells if cell.planned]
    if not speeds:
        return None
    as_fast = [cell for cell in cells if cell.planned and _speed(cell) >= (1 - SAME) * max(speeds)]
    return min(as_fast, key=lambda cell: (cell.device_memory_bytes, cell.host_memory_bytes))


def _speed(cell: CapCell) -> float:
    return cell.planned.forecast.tokens_per_s if cell.planned else 0.0


def _axes(cells: Sequence[CapCell]) -> tuple[list[int], list[int], dict[Caps, CapCell]]:
    """Device caps, host caps, and the cell of each pair."""
    placed = {(cell.device_memory_bytes, cell.host_memory_bytes): cell for cell in cells}
    return sorted({device for device, _ in placed}), sorted({host for _, host in placed}), placed


# -- the grid -------------------------------------------------------------------------------------------------------


def grid_document(cells: Sequence[CapCell], title: str) -> Document:
    """Tokens per second over MFU for each pair of caps, and what the signs mean."""
    notes = [note for cell in cells if cell.planned for note in cell.planned.notes]
    return Document(
        blocks=_blocks(cells, title), tables=_tables(cells), rows=_rows(cells), told=beside_rows(notes, "table", "json")
    )


def _blocks(cells: Sequence[CapCell], title: str) -> Iterator[Block]:
    best = best_cell(cells)
    devices, hosts, placed = _axes(cells)
    yield Words(f"{title}\nrows: host memory · columns: device memory")
    yield Table(
        columns=["host", *map(show_bytes, devices)],
        rows=[[show_bytes(host), *(_lines(placed.get((device, host)), best) for device in devices)] for host in hosts],
        banded=True,
    )
    yield Words("\n".join(_legend(cells, best)))
    missing = [cell for cell in cells if cell.planned is None]
    reasons = list(dict.fromkeys(cell.why_not for cell in missing if cell.why_not))
    more = [f"and {len(reasons) - MOST_REASONS:,} more reasons"] if len(reasons) > MOST_REASONS else []
    if reasons:
        yield Words("\n".join(f"{NO_FIT} {reason}" for reason in [*reasons[:MOST_REASONS], *more]), "red")
    # From what device memory on something fits, for the host caps with which that is known.
    least = {cell.host_memory_bytes: cell.smallest_device_bytes for cell in missing if cell.smallest_device_bytes}
    if least:
        words = [f"{show_bytes(least[host])} with host {show_bytes(host)}" for host in sorted(least)]
        yield Words(f"hint: something fits from device {', '.join(words)}", "cyan")


def _lines(cell: CapCell | None, best: CapCell | None) -> str:
    """The two lines of a cell."""
    if cell is None:
        return ""
    if cell.planned is None:
        return Styled(f"{NO_FIT}\nno fit", "red")
    speed, share = significant(_speed(cell)), show_share(cell.planned.forecast.mfu)
    return Styled(f"{BEST} {speed}\nbest {share}", "bold green") if cell is best else f"{speed}\n{share}"


def _legend(cells: Sequence[CapCell], best: CapCell | None) -> Iterator[str]:
    yield "tok/s over MFU"
    batches = {cell.planned.plan.tokens_per_step for cell in cells if cell.planned}
    if len(batches) > 1:
        yield (
            f"batches differ, from {min(batches):,} to {max(batches):,} tokens a step, and with them speeds by up to"
            " 2 %; --batch-tokens fixes one"
        )
    if best:
        yield f"{BEST} best: {BEST_WORDS} ({_caps_words(best)})"
    if missing := sum(cell.planned is None for cell in cells):
        yield f"{NO_FIT} no fit: nothing fits these caps ({missing:,} of {len(cells):,})"


def _caps_words(cell: CapCell) -> str:
    return f"device {show_bytes(cell.device_memory_bytes)}, host {show_bytes(cell.host_memory_bytes)}"


# -- rows, records, markdown -----------------------------------------------------------------------------------------

VALUES = (
    *("model", "hardware", "step_s", "tokens_per_s", "mfu", "hfu", "ceiling_share", "bound", "tokens_per_step"),
    *("chunk_tokens", "chunks_per_round", "rounds_per_step", "head_chunk_tokens", "param_blocks", "grad_blocks"),
    *("optimizer_blocks", "activation_slots", "device_bytes", "host_bytes"),
)
"""What a row says of a cell's plan."""


def _rows(cells: Sequence[CapCell]) -> Iterator[dict[str, object]]:
    """One row a pair of caps, full precision; empty where nothing fits."""
    best = best_cell(cells)
    for cell in cells:
        values = main_values(cell.planned) if cell.planned else {}
        yield {**_record(cell, best), **{name: values.get(name) for name in VALUES}}


def _record(cell: CapCell, best: CapCell | None) -> dict[str, object]:
    return {
        "device_memory_bytes": cell.device_memory_bytes,
        "host_memory_bytes": cell.host_memory_bytes,
        "fits": cell.planned is not None,
        "best": cell is best,
        "why_not": cell.why_not,
        "smallest_device_bytes": cell.smallest_device_bytes,
    }


def grid_record(cells: Sequence[CapCell]) -> list[dict[str, object]]:
    """One record a pair of caps; `plan` holds the main values of its plan, or null."""
    best = best_cell(cells)
    return [
        {**_record(cell, best), "hints": cell.hints, "plan": main_values(cell.planned) if cell.planned else None}
        for cell in cells
    ]


PLAN_COLUMNS = (
    *("device", "host", "chunk", "chunks", "rounds", "weights", "gradients", "optimizer", "slots", "leave"),
    *("tok/s", "MFU", "HFU", "ceiling"),
)


def _tables(cells: Sequence[CapCell]) -> Iterator[Block]:
    """Rows are host caps, columns device caps, tok/s and MFU in each cell; below it each plan in a row."""
    best = best_cell(cells)
    devices, hosts, placed = _axes(cells)
    yield Table(
        columns=["host", *(f"device {show_bytes(device)}" for device in devices)],
        rows=[
            [show_bytes(host), *(_cell_words(placed.get((device, host)), best) for device in devices)] for host in hosts
        ],
    )
    if plans := [_plan_row(cell.planned) for cell in cells if cell.planned]:
        yield Table(columns=PLAN_COLUMNS, rows=plans, left={"leave"})


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


def _cell_words(cell: CapCell | None, best: CapCell | None) -> str:
    if cell is None:
        return "–"
    if cell.planned is None:
        return f"{NO_FIT} does not fit"
    words = f"{significant(_speed(cell))} tok/s, {show_share(cell.planned.forecast.mfu)} MFU"
    return Styled(f"{BEST} best {words}", "bold") if cell is best else words


# -- a heatmap ------------------------------------------------------------------------------------------------------

LEAST_SPAN = 0.1
"""The colours cover at least this share of the fastest: smaller differences should not look like large ones."""


def draw_caps(cells: Sequence[CapCell], title: str, path: Path) -> None:
    """Write the grid as a picture, PNG or SVG by the file's name."""
    save(caps_figure(cells, title), path, title=printable(title))


def caps_figure(cells: Sequence[CapCell], title: str) -> Figure:
    """Device caps to the right, host caps upwards, tok/s as colour and number, more of it where one points."""
    best = best_cell(cells)
    devices, hosts, placed = _axes(cells)
    squares = [[_square(placed.get((device, host)), best) for device in devices] for host in hosts]
    speeds = [_speed(cell) for cell in cells if cell.planned] or [0.0]
    low, high = min(*speeds, (1 - LEAST_SPAN) * max(speeds)), max(speeds)
    width, keys = max(6.0, 1.2 * len(devices) + 2.2), list(_keys(cells))
    lines = textwrap.wrap(printable(title), int(10 * width)) or [""]
    figure = empty_figure(width, max(2.4, 0.8 * len(hosts) + 1.2) + 0.2 * (len(lines) + len(keys)))
    figure.suptitle("\n".join(lines).replace("$", r"\$"), fontsize=11)
    figure.supxlabel("\n".join(keys), fontsize=8)
    panel = figure.subplots()
    image = draw_squares(panel, squares, low, high)
    device_unit, host_unit = _unit(devices), _unit(hosts)
    panel.set_xticks(range(len(devices)), [_in_unit(device, device_unit) for device in devices])
    panel.set_yticks(range(len(hosts)), [_in_unit(host, host_unit) for host in hosts])
    panel.set_xlabel(f"device memory ({device_unit})")
    panel.set_ylabel(f"host memory ({host_unit})")
    if high > low:
        bar = figure.colorbar(image, ax=panel)
        bar.set_ticks([low, high], labels=[significant(low), f"{significant(high)} tok/s"])
    return figure


def _square(cell: CapCell | None, best: CapCell | None) -> Square | None:
    if cell is None:
        return None
    if cell.planned is None:
        told = f"{_caps_words(cell)}: {cell.why_not or 'does not fit'}"
        return Square(value=None, words=f"{NO_FIT}\ndoes not fit", told=told)
    forecast = cell.planned.forecast
    speed, share = significant(forecast.tokens_per_s), f"{show_share(forecast.mfu)} MFU"
    told = f"{speed} tok/s, {share}, step {show_seconds(forecast.step_s)}, bound by {forecast.bound}"
    words = f"{speed}\n{share}\n{BEST} best" if cell is best else f"{speed}\n{share}"
    return Square(value=forecast.tokens_per_s, words=words, told=f"{_caps_words(cell)}: {told}", framed=cell is best)


def _keys(cells: Sequence[CapCell]) -> Iterator[str]:
    if any(cell.planned for cell in cells):
        yield f"{BEST} best: {BEST_WORDS}"
    if any(cell.planned is None for cell in cells):
        yield f"{NO_FIT} does not fit: no plan keeps to both caps"


def _unit(sizes: Sequence[int]) -> str:
    """The unit of an axis: GiB, or what its smallest cap needs."""
    smallest = min((size for size in sizes if size), default=BINARY_UNITS["GiB"])
    return next(name for name in ("GiB", "MiB", "KiB", "B") if smallest >= BINARY_UNITS[name] or name == "B")


def _in_unit(size: int, unit: str) -> str:
    return f"{size / BINARY_UNITS[unit]:,.3f}".rstrip("0").rstrip(".")
