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
from flopwise.report.predictions import chosen_words, heading, interval_words, memory_and_time, outside_words
from flopwise.report.tables import csv_text, markdown_table

NAMED = 0.15
"""A part of the step is named as a reason when it makes up this share of the loss."""

SAME = 5e-4
"""Speeds that differ by less are printed as the same."""

COLUMNS = ("strategy", "micro", "recompute", "memory", "step", "slower", "where")
WORDS = {"strategy", "recompute", "where"}


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

    devices: int
    capacity_bytes: int
    parallel: Parallel | None
    micro_batch_sequences: int | None
    recompute: str | None
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
    timed: int


def plan_page(report: PlanReport, title: str) -> RenderableType:
    """The answer on a page."""
    prediction = report.prediction
    return Group(
        heading(prediction, title),
        "",
        *memory_and_time(prediction),
        "",
        _speed(report),
        "",
        _strategies(report),
    )


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
    table.add_row(
        "searched", f"{report.evaluated:,} strategies, {report.fitting:,} fit, {report.timed:,} of them timed"
    )
    for change in report.changes:
        table.add_row("what if", f"{_question(change, prediction)}: {_changed(change, report.rows[0])}")
    if prediction.interval is not None and prediction.interval.outside:
        table.add_row("outside", outside_words(prediction.interval))
    if prediction.chosen:
        table.add_row("chosen", chosen_words(prediction))
    for note in prediction.notes:
        table.add_row("note", note, style="cyan")
    return table


def _question(change: ChangeRow, prediction: Prediction) -> str:
    more = change.devices - prediction.devices
    if more:
        return f"one more {'node' if more > 1 else 'device'} ({change.devices:,} devices)"
    return f"half the memory ({show_bytes(change.capacity_bytes)})"


def _changed(change: ChangeRow, best: PlanRow) -> str:
    if change.parallel is None or change.speed is None:
        return "nothing fits"
    gain = change.speed - 1
    words = [f"{'+' if gain >= 0 else '−'}{show_share(abs(gain))} speed" if abs(gain) > SAME else "no change of speed"]
    if change.parallel == best.parallel:
        words.append("the same strategy")
    else:
        words.append(f"with {change.parallel.label}")
    if change.micro_batch_sequences != best.micro_batch_sequences:
        words.append(f"micro-batch {change.micro_batch_sequences:,}")
    if change.recompute != best.recompute:
        words.append(f"recompute {change.recompute}")
    return ", ".join(words)


def _strategies(report: PlanReport) -> Table:
    """The best and those that lose; what is too long for the terminal is folded."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in COLUMNS:
        folded = name in ("strategy", "where")
        table.add_column(name, justify="left" if name in WORDS else "right", no_wrap=not folded, overflow="fold")
    for row in report.rows:
        table.add_row(*_cells(row))
    return table


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
            "timed": report.timed,
        }
    )
