"""Plans for several devices as documents: the best strategy, why the next ones lose, what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from flopwise.base.units import show_bytes, show_seconds, show_share
from flopwise.records.cluster_plan import Answer, FoundStrategy, Loser, WhatIf
from flopwise.records.prediction import Prediction
from flopwise.report.document import Block, Document, Table, facts
from flopwise.report.predictions import ceiling_rows, interval_words, reason_rows, set_up_blocks, speed_words
from flopwise.report.words import signed_share

NAMED = 0.15
"""A part of the step is named as a reason when it makes up this share of the loss."""

SAME = 5e-4
"""Speeds that differ by less are printed as the same."""


def plan_document(prediction: Prediction, answer: Answer, title: str) -> Document:
    """The answer; `prediction` is that of its best strategy."""
    strategies = _strategies(answer, "step" if prediction.ceiling_s is None else "no framework")
    return Document(
        blocks=_blocks(prediction, answer, title, strategies), tables=[strategies], rows=map(_flat, _rows(answer))
    )


def _blocks(prediction: Prediction, answer: Answer, title: str, strategies: Table) -> Iterator[Block]:
    yield from set_up_blocks(prediction, title)
    what_if = [
        ("what if", f"{_question(change, prediction)}: {_change_words(change, answer.best)}")
        for change in answer.what_if
    ]
    yield facts(
        [
            ("step", f"{show_seconds(prediction.step_s)}{interval_words(prediction)}"),
            ("speed", speed_words(prediction)),
            *ceiling_rows(prediction),
            ("searched", f"{answer.evaluated:,} strategies, {answer.fitting:,} fit, {answer.timed:,} of them timed"),
            *what_if,
            *reason_rows(prediction),
        ]
    )
    yield strategies


def _question(change: WhatIf, prediction: Prediction) -> str:
    more = change.devices - prediction.devices
    if more:
        return f"one more {'node' if more > 1 else 'device'} ({change.devices:,} devices)"
    return f"half the memory ({show_bytes(change.capacity_bytes)})"


def _change_words(change: WhatIf, best: FoundStrategy) -> str:
    if change.option is None or change.speed is None:
        return "nothing fits"
    found, gain = change.option, change.speed - 1
    words = [f"{signed_share(gain)} speed" if abs(gain) > SAME else "no change of speed"]
    words.append("the same strategy" if found.parallel == best.parallel else f"with {found.parallel.label}")
    if found.micro_batch_sequences != best.micro_batch_sequences:
        words.append(f"micro-batch {found.micro_batch_sequences:,}")
    if found.recompute != best.recompute:
        words.append(f"recompute {found.recompute}")
    return ", ".join(words)


def _strategies(answer: Answer, step: str) -> Table:
    """The best and those that lose; `step`: what their seconds are."""
    rows = [
        [
            row.option.parallel.label,
            f"{row.option.micro_batch_sequences:,}",
            row.option.recompute,
            show_bytes(row.option.device_bytes),
            show_seconds(row.option.step_s),
            signed_share(row.slower) if row.slower else "",
            where_lost(row.lost),
        ]
        for row in _rows(answer)
    ]
    columns = ("strategy", "micro", "recompute", "memory", step, "slower", "where")
    left = {"strategy", "recompute", "where"}
    return Table(columns=columns, rows=rows, left=left, folded={"strategy": 0, "where": 0})


def _rows(answer: Answer) -> list[Loser]:
    """The best, which loses nothing, and those that lose."""
    nothing = dict.fromkeys(answer.best.parts, 0.0)
    return [Loser(option=answer.best, slower=0.0, lost=nothing), *answer.losers]


def where_lost(lost: Mapping[str, float]) -> str:
    """The parts that cost the most, and the one that gains the most against them."""
    slower = [name for name in sorted(lost, key=lambda name: -lost[name]) if lost[name] > 0]
    total = sum(lost[name] for name in slower)
    words = [f"{name} +{show_share(lost[name])}" for name in slower if lost[name] >= NAMED * total]
    gained = min(lost, key=lambda name: lost[name], default="")
    if gained and lost[gained] < -NAMED * total:
        words.append(f"{gained} −{show_share(-lost[gained])}")
    return ", ".join(words)


def _flat(row: Loser) -> dict[str, object]:
    """One strategy, full precision."""
    parallel, record = row.option.parallel, _record(row)
    parts = {f"lost_{name}": share for name, share in row.lost.items()}
    plain = {key: value for key, value in record.items() if key not in ("parallel", "lost")}
    return {"strategy": parallel.label, **asdict(parallel), **plain, **parts}


def _record(row: Loser) -> dict[str, object]:
    return {
        "parallel": row.option.parallel,
        "micro_batch_sequences": row.option.micro_batch_sequences,
        "recompute": row.option.recompute,
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
        "parallel": option.parallel if option else None,
        "micro_batch_sequences": option.micro_batch_sequences if option else None,
        "recompute": option.recompute if option else None,
        "speed": change.speed,
    }


def plan_record(prediction: Prediction, answer: Answer) -> dict[str, object]:
    """The whole answer, for programs."""
    return {
        "prediction": prediction,
        "strategies": [_record(row) for row in _rows(answer)],
        "what_if": [_change_record(change) for change in answer.what_if],
        "evaluated": answer.evaluated,
        "fitting": answer.fitting,
        "timed": answer.timed,
    }
