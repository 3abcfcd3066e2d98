"""Plans for several devices: the best strategy, why the next ones lose, what would change it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from flopwise.core.files import to_json
from flopwise.core.parallel import Parallel
from flopwise.core.prediction import Prediction
from flopwise.core.units import show_bytes, show_seconds, show_share, significant
from flopwise.report.clusters import stage_table, time_table
from flopwise.report.predictions import heading, interval_words, outside_words
from flopwise.report.tables import csv_text, fitting_columns, markdown_table, text_table

NAMED = 0.15
"""A part of the step is named as a reason when it makes up this share of the loss."""

COLUMNS = ("strategy", "micro", "recompute", "memory", "step", "slower", "where")
WORDS = {"strategy", "recompute", "where"}
GIVING_WAY = ("micro", "recompute", "memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One strategy of an answer, as it is written."""

    parallel: Parallel
    micro_batch_sequences: int
    recompute: str
    device_bytes: int
    step_s: float
    slower: float
    """Share of the best's time."""
    lost: dict[str, float]
    """By part of the step, as shares of the best's time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeRow:
    """What a changed question would give."""

    change: str
    parallel: Parallel | None
    speed: float | None
    """Tokens per second over those of the answer; None where nothing fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """All that is printed of a plan."""

    prediction: Prediction
    rows: tuple[PlanRow, ...]
    """The best first."""
    changes: tuple[ChangeRow, ...]
    evaluated: int
    fitting: int


def plan_page(report: PlanReport, title: str, width: int) -> RenderableType:
    """The answer on a page `width` wide."""
    prediction = report.prediction
    lines: list[RenderableType] = [
        heading(prediction, title),
        "",
        stage_table(prediction),
        "",
        time_table(prediction),
        "",
        _speed(report),
        "",
        _losers(report, width),
    ]
    return Group(*lines)


def _speed(report: PlanReport) -> Table:
    prediction = report.prediction
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("step", f"{show_seconds(prediction.step_s)}{interval_words(prediction)}")
    rate = f"{significant(prediction.tokens_per_s)} tok/s"
    table.add_row(
        "speed", f"{rate} · {show_share(prediction.mfu)} MFU · {show_share(prediction.hfu)} HFU", style="bold"
    )
    table.add_row("searched", f"{report.evaluated:,} strategies, of which {report.fitting:,} fit")
    for change in report.changes:
        table.add_row("what if", f"{change.change}: {_changed(change, prediction.parallel)}")
    if prediction.interval is not None and prediction.interval.outside:
        table.add_row("outside", outside_words(prediction.interval))
    for note in prediction.notes:
        table.add_row("note", note, style="cyan")
    return table


def _changed(change: ChangeRow, before: Parallel) -> str:
    if change.parallel is None or change.speed is None:
        return "nothing fits"
    same = change.parallel == before
    gain = change.speed - 1
    sign = "+" if gain >= 0 else "−"
    return f"{sign}{show_share(abs(gain))} speed" + (
        ", the same strategy" if same else f" with {change.parallel.label}"
    )


def _losers(report: PlanReport, width: int) -> RenderableType:
    cells = [_cells(row) for row in report.rows]
    shown = fitting_columns(COLUMNS, cells, width, GIVING_WAY)
    return text_table(COLUMNS, cells, WORDS, shown=shown)


def _cells(row: PlanRow) -> list[str]:
    return [
        row.parallel.label,
        f"{row.micro_batch_sequences:,}",
        row.recompute,
        show_bytes(row.device_bytes),
        show_seconds(row.step_s),
        "" if not row.slower else f"+{show_share(row.slower)}",
        where_lost(row.lost),
    ]


def where_lost(lost: Mapping[str, float]) -> str:
    """The parts that cost the most, and the one that gains the most against them."""
    slower = [name for name in sorted(lost, key=lambda name: -lost[name]) if lost[name] > 0]
    total = sum(lost[name] for name in slower)
    named = [name for name in slower if lost[name] >= NAMED * total]
    words = [f"{name} +{show_share(lost[name])}" for name in named]
    gained = min(lost, key=lambda name: lost[name], default="")
    if gained and lost[gained] < -NAMED * total:
        words.append(f"{gained} −{show_share(-lost[gained])}")
    return ", ".join(words)


def plan_markdown(report: PlanReport) -> str:
    """The strategies as a markdown table."""
    return markdown_table(COLUMNS, [_cells(row) for row in report.rows], WORDS)


def plan_csv(report: PlanReport) -> str:
    """One row a strategy, full precision."""
    return csv_text([_flat(row) for row in report.rows])


def _flat(row: PlanRow) -> dict[str, object]:
    parts = {f"lost_{name}": share for name, share in row.lost.items()}
    plain = {key: value for key, value in asdict(row).items() if key not in ("parallel", "lost")}
    return {"strategy": row.parallel.label, **asdict(row.parallel), **plain, **parts}


def plan_json(report: PlanReport) -> str:
    """The whole answer."""
    return to_json(
        {
            "prediction": report.prediction,
            "strategies": report.rows,
            "what_if": report.changes,
            "evaluated": report.evaluated,
            "fitting": report.fitting,
        }
    )
