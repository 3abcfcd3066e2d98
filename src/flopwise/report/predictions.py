"""Predictions for people and for programs: a page of text, markdown, CSV, JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flopwise.core.files import to_json
from flopwise.core.prediction import DeviceBytes, Prediction
from flopwise.core.units import show_bytes, show_count, show_seconds, show_share, significant

OPTIMIZER_TITLES = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}


def prediction_page(prediction: Prediction, title: str) -> RenderableType:
    """One prediction: the set-up, memory by owner, time by operator, the answer."""
    return Group(
        _heading(prediction, title), "", _memory(prediction), "", _operators(prediction), "", _answer(prediction)
    )


def _chosen(prediction: Prediction) -> str:
    """What `auto` stood for, and why."""
    shown = {
        "precision": f"precision {prediction.precision}",
        "sequence_tokens": f"sequence {prediction.sequence_tokens:,}",
        "batch_sequences": f"batch {prediction.batch_sequences:,}",
        "micro_batch_sequences": f"micro-batch {prediction.micro_batch_sequences:,}",
        "recompute": f"recompute {prediction.recompute}",
    }
    return " · ".join(f"{shown[setting]} ({reason})" for setting, reason in prediction.chosen.items())


def _heading(prediction: Prediction, title: str) -> Text:
    active = prediction.n_active_params
    parameters = f"{show_count(prediction.n_params)} parameters"
    if active != prediction.n_params:
        parameters += f", {show_count(active)} active"
    lines = [
        f"{prediction.model} · 1 × {title} · sequence {prediction.sequence_tokens:,}"
        f" · {OPTIMIZER_TITLES[prediction.optimizer]} · {prediction.precision}",
        f"{parameters} · batch {prediction.batch_sequences:,} = {prediction.batch_tokens:,} tokens",
        f"micro-batch {prediction.micro_batch_sequences:,}, {prediction.accumulation_steps:,} a step"
        f" · recompute {prediction.recompute}",
    ]
    return Text("\n".join(lines))


def _memory(prediction: Prediction) -> Table:
    table = _table("memory", "device")
    table.add_column("")
    memory = prediction.device_bytes
    for owner in owners():
        table.add_row(owner, show_bytes(getattr(memory, owner)), "")
    spare = prediction.device_capacity_bytes - memory.total
    if prediction.fits:
        tight = spare < 0.05 * prediction.device_capacity_bytes
        style, verdict = ("yellow", "✓ fits, tight:") if tight else ("green", "✓ fits,")
        verdict = f"{verdict} {show_bytes(spare)} of {show_bytes(prediction.device_capacity_bytes)} spare"
    else:
        state = memory.weights + memory.gradients + memory.optimizer
        verdict = f"✗ does not fit {show_bytes(prediction.device_capacity_bytes)}"
        if state > prediction.device_capacity_bytes:
            verdict += f"; the state alone is {show_bytes(state)}"
        style = "red"
    table.add_row("total", show_bytes(memory.total), Text(verdict, style=style))
    return table


def owners() -> list[str]:
    """The owners of device memory, in the record's order."""
    return [field.name for field in fields(DeviceBytes) if field.name != "total"]


def _operators(prediction: Prediction) -> Table:
    table = _table("operator", "FLOP", "bytes", "time", "share")
    table.add_column("bound by")
    for op in prediction.ops:
        flops = show_count(op.flops) if op.flops else "-"
        table.add_row(op.name, flops, show_bytes(op.bytes), show_seconds(op.time_s), show_share(op.share), op.bound)
    return table


def _answer(prediction: Prediction) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("step", f"{show_seconds(prediction.step_s)}, bound by {prediction.bound}")
    speed = f"{significant(prediction.tokens_per_s)} tok/s"
    table.add_row(
        "speed", f"{speed} · {show_share(prediction.mfu)} MFU · {show_share(prediction.hfu)} HFU", style="bold"
    )
    peak = f"{show_count(prediction.peak_flops)}FLOP/s dense {prediction.peak_format}"
    table.add_row("against", f"{peak} ({prediction.peak_source}), FLOPs counted {prediction.convention}")
    if prediction.chosen:
        table.add_row("chosen", _chosen(prediction))
    for note in prediction.notes:
        table.add_row("note", note, style="cyan")
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


# -- several predictions, one row each ------------------------------------------------------------------------------

COMPARED = ("model", "hardware", "seq", "batch", "micro", "recompute", "memory", "step", "tok/s", "MFU", "bound by")
_WORDS = {"model", "hardware", "recompute", "bound by"}


def compared_rows(predictions: Sequence[Prediction]) -> list[list[str]]:
    """One row of words per prediction, under `COMPARED`; the sign before the memory says whether it fits."""
    return [
        [
            prediction.model,
            prediction.hardware,
            f"{prediction.sequence_tokens:,}",
            f"{prediction.batch_sequences:,}",
            f"{prediction.micro_batch_sequences:,}",
            prediction.recompute,
            f"{'✓' if prediction.fits else '✗'} {show_bytes(prediction.device_bytes.total)}",
            show_seconds(prediction.step_s),
            significant(prediction.tokens_per_s),
            show_share(prediction.mfu),
            prediction.bound,
        ]
        for prediction in predictions
    ]


def compared_table(predictions: Sequence[Prediction]) -> RenderableType:
    """Several predictions in a table for a terminal; what is the same in every row is said once, above it."""
    rows = compared_rows(predictions)
    shared = {"seq": "sequence", "batch": "batch"}
    same = [index for index, name in enumerate(COMPARED) if name in shared and len({row[index] for row in rows}) == 1]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, name in enumerate(COMPARED):
        if index not in same:
            folds = name in ("model", "hardware")
            table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=not folds, overflow="fold")
    for prediction, row in zip(predictions, rows, strict=True):
        cells = [cell for index, cell in enumerate(row) if index not in same]
        table.add_row(*cells, style=None if prediction.fits else "red")
    heading = " · ".join([*(f"{shared[COMPARED[index]]} {rows[0][index]}" for index in same), "1 device"])
    return Group(Text(heading), "", table)


def predictions_markdown(predictions: Sequence[Prediction]) -> str:
    """The rows as a markdown table that pastes into an issue; one prediction brings its operators too."""
    parts = [markdown_table(COMPARED, compared_rows(predictions), _WORDS)]
    if len(predictions) == 1:
        names = ("operator", "FLOP", "bytes", "time", "share", "bound by")
        rows = [
            [
                op.name,
                show_count(op.flops),
                show_bytes(op.bytes),
                show_seconds(op.time_s),
                show_share(op.share),
                op.bound,
            ]
            for op in predictions[0].ops
        ]
        parts.append(markdown_table(names, rows, {"operator", "bound by"}))
        memory = predictions[0].device_bytes
        parts.append(
            markdown_table(
                ("memory", "device"),
                [[owner, show_bytes(getattr(memory, owner))] for owner in (*owners(), "total")],
                {"memory"},
            )
        )
    return "\n".join(parts)


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[str]], words: set[str]) -> str:
    """A markdown table with its columns lined up; `words` are the columns that stand left."""
    widths = [max(3, len(name), *(len(row[index]) for row in rows)) for index, name in enumerate(names)]

    def line(cells: Sequence[str]) -> str:
        shown = [
            cell.ljust(width) if name in words else cell.rjust(width)
            for cell, width, name in zip(cells, widths, names, strict=True)
        ]
        return "| " + " | ".join(shown) + " |\n"

    rule = [
        "-" * width if name in words else "-" * (width - 1) + ":" for name, width in zip(names, widths, strict=True)
    ]
    return line(names) + line(rule) + "".join(line(row) for row in rows)


def flat_row(prediction: Prediction) -> dict[str, object]:
    """Every figure of a prediction in one row, at full precision; memory by owner as `device_bytes_…`."""
    row = {field.name: getattr(prediction, field.name) for field in fields(Prediction)}
    memory = row.pop("device_bytes")
    for name in ("ops", "chosen", "notes"):
        del row[name]
    return {**row, **{f"device_bytes_{owner}": size for owner, size in asdict(memory).items()}}


def predictions_csv(predictions: Sequence[Prediction]) -> str:
    """One row per prediction, full precision, the unit in the column's name."""
    rows = [flat_row(prediction) for prediction in predictions]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def predictions_json(predictions: Sequence[Prediction]) -> str:
    """One object, or a list of them when several were asked for."""
    return to_json(predictions[0] if len(predictions) == 1 else list(predictions))
