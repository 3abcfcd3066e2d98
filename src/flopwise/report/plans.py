"""Plans for several devices: the best strategy, why the next ones lose, what would change it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table

from flopwise.base.files import to_json, with_schema
from flopwise.base.units import show_bytes, show_seconds, show_share, significant
from flopwise.records.cluster_plan import Answer, Loser, Option, WhatIf
from flopwise.records.prediction import Prediction
from flopwise.report.predictions import chosen_words, heading, interval_words, memory_and_time, outside_words
from flopwise.report.tables import csv_text, markdown_table

NAMED = 0.15
"""A part of the step is named as a reason when it makes up this share of the loss."""

SAME = 5e-4
"""Speeds that differ by less are printed as the same."""

COLUMNS = ("strategy", "micro", "recompute", "memory", "step", "slower", "where")
WORDS = {"strategy", "recompute", "where"}


def plan_page(prediction: Prediction, answer: Answer, title: str) -> RenderableType:
    """The answer on a page; `prediction` is that of its best strategy."""
    return Group(
        heading(prediction, title),
        "",
        *memory_and_time(prediction),
        "",
        _speed(prediction, answer),
        "",
        _strategies(answer),
    )


def _speed(prediction: Prediction, answer: Answer) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("step", f"{show_seconds(prediction.step_s)}{interval_words(prediction)}")
    rate = f"{significant(prediction.tokens_per_s)} tok/s"
    table.add_row(
        "speed", f"{rate} · {show_share(prediction.mfu)} MFU · {show_share(prediction.hfu)} HFU", style="bold"
    )
    table.add_row(
        "searched", f"{answer.evaluated:,} strategies, {answer.fitting:,} fit, {answer.timed:,} of them timed"
    )
    for change in answer.what_if:
        table.add_row("what if", f"{_question(change, prediction)}: {_changed(change, answer.best)}")
    if prediction.interval is not None and prediction.interval.outside:
        table.add_row("outside", outside_words(prediction.interval))
    if prediction.chosen:
        table.add_row("chosen", chosen_words(prediction))
    for note in prediction.notes:
        table.add_row("note", note, style="cyan")
    return table


def _question(change: WhatIf, prediction: Prediction) -> str:
    more = change.devices - prediction.devices
    if more:
        return f"one more {'node' if more > 1 else 'device'} ({change.devices:,} devices)"
    return f"half the memory ({show_bytes(change.capacity_bytes)})"


def _changed(change: WhatIf, best: Option) -> str:
    if change.option is None or change.speed is None:
        return "nothing fits"
    found, gain = change.option, change.speed - 1
    words = [f"{'+' if gain >= 0 else '−'}{show_share(abs(gain))} speed" if abs(gain) > SAME else "no change of speed"]
    parallel = found.setup.parallel
    words.append("the same strategy" if parallel == best.setup.parallel else f"with {parallel.label}")
    if found.setup.micro_batch_sequences != best.setup.micro_batch_sequences:
        words.append(f"micro-batch {found.setup.micro_batch_sequences:,}")
    if found.setup.recompute != best.setup.recompute:
        words.append(f"recompute {found.setup.recompute}")
    return ", ".join(words)


def _strategies(answer: Answer) -> Table:
    """The best and those that lose; what is too long for the terminal is folded."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in COLUMNS:
        folded = name in ("strategy", "where")
        table.add_column(name, justify="left" if name in WORDS else "right", no_wrap=not folded, overflow="fold")
    for row in _rows(answer):
        table.add_row(*_cells(row))
    return table


def _rows(answer: Answer) -> list[Loser]:
    """The best, which loses nothing, and those that lose."""
    nothing = dict.fromkeys(answer.best.parts, 0.0)
    return [Loser(option=answer.best, slower=0.0, lost=nothing), *answer.losers]


def _cells(row: Loser) -> list[str]:
    return [
        row.option.setup.parallel.label,
        f"{row.option.setup.micro_batch_sequences:,}",
        row.option.setup.recompute,
        show_bytes(row.option.device_bytes),
        show_seconds(row.option.step_s),
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


def plan_markdown(answer: Answer) -> str:
    """The strategies as a markdown table."""
    return markdown_table(COLUMNS, [_cells(row) for row in _rows(answer)], WORDS)


def plan_csv(answer: Answer) -> str:
    """One row a strategy, full precision."""
    return csv_text([_flat(row) for row in _rows(answer)])


def _flat(row: Loser) -> dict[str, object]:
    parallel, record = row.option.setup.parallel, _record(row)
    parts = {f"lost_{name}": share for name, share in row.lost.items()}
    plain = {key: value for key, value in record.items() if key not in ("parallel", "lost")}
    return {"strategy": parallel.label, **asdict(parallel), **plain, **parts}


def _record(row: Loser) -> dict[str, object]:
    """One strategy, as it is written."""
    return {
        "parallel": row.option.setup.parallel,
        "micro_batch_sequences": row.option.setup.micro_batch_sequences,
        "recompute": row.option.setup.recompute,
        "device_bytes": row.option.device_bytes,
        "step_s": row.option.step_s,
        "slower": row.slower,
        "lost": row.lost,
    }


def _change_record(change: WhatIf) -> dict[str, object]:
    option = change.option
    return {
        "devices": change.devices,
        "capacity_bytes": change.capacity_bytes,
        "parallel": option.setup.parallel if option else None,
        "micro_batch_sequences": option.setup.micro_batch_sequences if option else None,
        "recompute": option.setup.recompute if option else None,
        "speed": change.speed,
    }


def plan_json(prediction: Prediction, answer: Answer) -> str:
    """The whole answer."""
    whole = {
        "prediction": prediction,
        "strategies": [_record(row) for row in _rows(answer)],
        "what_if": [_change_record(change) for change in answer.what_if],
        "evaluated": answer.evaluated,
        "fitting": answer.fitting,
        "timed": answer.timed,
    }
    return to_json(with_schema(whole, "cluster-plan"))
