"""Predictions for people and for programs: a page of text, markdown, CSV, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flopwise.base.files import to_json, with_schema
from flopwise.base.units import show_bytes, show_count, show_seconds, show_share, significant
from flopwise.records.prediction import DeviceBytes, Interval, Prediction
from flopwise.report.clusters import PART_WORDS, stage_table, time_table
from flopwise.report.tables import csv_text, fitting_columns, markdown_table, text_table

OPTIMIZER_TITLES = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}


def prediction_page(prediction: Prediction, title: str) -> RenderableType:
    """One prediction: the set-up, memory by owner, time by operator, the answer."""
    return Group(
        heading(prediction, title),
        "",
        *memory_and_time(prediction),
        "",
        text_table(OPERATOR_COLUMNS, _operator_rows(prediction), WORDS),
        "",
        _answer(prediction),
    )


def memory_and_time(prediction: Prediction) -> list[RenderableType]:
    """Memory by owner and whether it fits; over several devices by stage, and the parts of the step."""
    if not prediction.stages:
        return [_memory(prediction)]
    host = [f"{show_bytes(prediction.host_bytes)} of host memory for each device, not checked against what it has"]
    return [
        stage_table(prediction),
        _verdict(prediction),
        *(host if prediction.host_bytes else []),
        "",
        time_table(prediction),
    ]


def chosen_words(prediction: Prediction) -> str:
    """What `auto` stood for, and why."""
    shown = {
        "precision": f"precision {prediction.precision}",
        "sequence_tokens": f"sequence {prediction.sequence_tokens:,}",
        "batch_sequences": f"batch {prediction.batch_sequences:,}",
        "micro_batch_sequences": f"micro-batch {prediction.micro_batch_sequences:,}",
        "recompute": f"recompute {prediction.recompute}",
    }
    return " · ".join(f"{shown[setting]} ({reason})" for setting, reason in prediction.chosen.items())


def heading(prediction: Prediction, title: str) -> Text:
    """What is predicted, in three lines; four with several devices."""
    active = prediction.n_active_params
    parameters = f"{show_count(prediction.n_params)} parameters"
    if active != prediction.n_params:
        parameters += f", {show_count(active)} active"
    lines = [
        f"{prediction.model} · {prediction.devices:,} × {title} · sequence {prediction.sequence_tokens:,}"
        f" · {OPTIMIZER_TITLES[prediction.optimizer]} · {prediction.precision}",
        f"{parameters} · batch {prediction.batch_sequences:,} = {prediction.batch_tokens:,} tokens",
        f"micro-batch {prediction.micro_batch_sequences:,}, {prediction.accumulation_steps:,} a step"
        f" · recompute {prediction.recompute}",
    ]
    if prediction.stages:
        lines.insert(1, f"{prediction.parallel.label} · stack {prediction.stack}")
    return Text("\n".join(lines))


def _memory(prediction: Prediction) -> Table:
    table = _table("memory", "device")
    table.add_column("")
    memory = prediction.device_bytes
    for owner in owners():
        table.add_row(owner, show_bytes(getattr(memory, owner)), "")
    table.add_row("total", show_bytes(memory.total), _verdict(prediction))
    return table


def _verdict(prediction: Prediction) -> Text:
    """Whether it fits, in words."""
    memory = prediction.device_bytes
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
    return Text(verdict, style=style)


def owners() -> list[str]:
    """The owners of device memory, in the record's order."""
    return [field.name for field in fields(DeviceBytes) if field.name != "total"]


NOTHING_KNOWN = 10.0
"""An interval that reaches so many times the step says nothing."""

OPERATOR_COLUMNS = ("operator", "FLOP", "bytes", "time", "share", "bound by")


def _operator_rows(prediction: Prediction) -> list[list[str]]:
    """One row of words per operator, under `OPERATOR_COLUMNS`."""
    return [
        [
            op.name,
            show_count(op.flops) if op.flops else "-",
            show_bytes(op.bytes) if op.bytes else "-",
            show_seconds(op.time_s),
            show_share(op.share),
            op.bound,
        ]
        for op in prediction.ops
        if op.time_s or not prediction.stages
    ]


def interval_words(prediction: Prediction) -> str:
    """Where a measured step may lie, as a share of the predicted one; nothing where nobody knows."""
    interval = prediction.interval
    if interval is None:
        return ""
    low, high = interval.low_s / prediction.step_s - 1, interval.high_s / prediction.step_s - 1
    if high > NOTHING_KNOWN:
        return "; nothing of this kind has been measured"
    return f"; 8 of 10 measured steps lie {_signed(low)} to {_signed(high)} ({interval.basis})"


def outside_words(interval: Interval) -> str:
    """In what the data do not reach this far."""
    return f"no such data, so the interval is wider: {', '.join(interval.outside)}"


def _signed(share: float) -> str:
    return f"{'+' if share >= 0 else '−'}{abs(share):.0%}".replace("%", " %")


def _answer(prediction: Prediction) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("step", f"{show_seconds(prediction.step_s)}, bound by {prediction.bound}{interval_words(prediction)}")
    speed = f"{significant(prediction.tokens_per_s)} tok/s"
    table.add_row(
        "speed", f"{speed} · {show_share(prediction.mfu)} MFU · {show_share(prediction.hfu)} HFU", style="bold"
    )
    peak = f"{show_count(prediction.peak_flops)}FLOP/s dense {prediction.peak_format}"
    table.add_row("against", f"{peak} ({prediction.peak_source}), FLOPs counted {prediction.convention}")
    if prediction.interval is not None and prediction.interval.outside:
        table.add_row("outside", outside_words(prediction.interval))
    if prediction.chosen:
        table.add_row("chosen", chosen_words(prediction))
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

COMPARED = (
    *("model", "hardware", "devices", "precision", "seq", "batch", "micro", "recompute"),
    *("memory", "step", "tok/s", "MFU", "bound by"),
)
GIVING_WAY = ("bound by", "batch", "micro", "seq", "recompute")
"""Columns that leave a narrow terminal's table, the first one first: names are never folded."""
WORDS = {"model", "hardware", "precision", "recompute", "bound by", "operator"}


def compared_rows(predictions: Sequence[Prediction]) -> list[list[str]]:
    """One row of words per prediction, under `COMPARED`; the sign before the memory says whether it fits."""
    return [
        [
            prediction.model,
            prediction.hardware,
            f"{prediction.devices:,}",
            prediction.precision,
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


def compared_table(predictions: Sequence[Prediction], width: int) -> RenderableType:
    """Several predictions in a table `width` wide; what is the same in every row is said once, above it."""
    rows = compared_rows(predictions)
    titles = {"model": "", "hardware": "", "devices": "", "precision": "", "seq": "sequence ", "batch": "batch "}
    varied = [name for index, name in enumerate(COMPARED) if len({row[index] for row in rows}) > 1]
    same = {name: rows[0][index] for index, name in enumerate(COMPARED) if name in titles and name not in varied}
    places = [index for index, name in enumerate(COMPARED) if name not in same]
    columns = [COMPARED[index] for index in places]
    cells = [[row[index] for index in places] for row in rows]
    # What tells the rows apart stays; the micro-batch only where nothing else does.
    kept = {name for name in varied if name in titles}
    if len({tuple(row[: COMPARED.index("micro")]) for row in rows}) < len(rows):
        kept.add("micro")
    giving_way = [name for name in GIVING_WAY if name not in kept]
    shown = fitting_columns(columns, cells, width, giving_way)
    styles = ["" if prediction.fits else "red" for prediction in predictions]
    said = [f"{titles[name]}{value}" for name, value in same.items() if name != "devices"]
    heading = " · ".join([*said, _devices(predictions)])
    return Group(Text(heading), "", text_table(columns, cells, WORDS, shown=shown, styles=styles))


def _devices(predictions: Sequence[Prediction]) -> str:
    counts = {prediction.devices for prediction in predictions}
    if counts == {1}:
        return "1 device"
    words = {f"{prediction.devices:,} devices · {prediction.parallel.label}" for prediction in predictions}
    return words.pop() if len(words) == 1 else "several devices"


def predictions_markdown(predictions: Sequence[Prediction]) -> str:
    """The rows as a markdown table that pastes into an issue; one prediction brings its operators too."""
    parts = [markdown_table(COMPARED, compared_rows(predictions), WORDS)]
    if len(predictions) == 1:
        memory = predictions[0].device_bytes
        owned = [[owner, show_bytes(getattr(memory, owner))] for owner in (*owners(), "total")]
        parts.append(markdown_table(OPERATOR_COLUMNS, _operator_rows(predictions[0]), WORDS))
        parts.append(markdown_table(("memory", "device"), owned, {"memory"}))
    return "\n".join(parts)


def flat_row(prediction: Prediction) -> dict[str, object]:
    """Every figure of a prediction in one row, at full precision; memory by owner as `device_bytes_…`."""
    row = {field.name: getattr(prediction, field.name) for field in fields(Prediction)}
    memory = row.pop("device_bytes")
    interval, parts = row.pop("interval"), row.pop("parts")
    row["parallel"] = prediction.parallel.label
    for name in ("ops", "chosen", "notes", "stages"):
        del row[name]
    return {
        **row,
        "low_s": interval.low_s if interval else None,
        "high_s": interval.high_s if interval else None,
        **{f"device_bytes_{owner}": size for owner, size in asdict(memory).items()},
        **{f"part_{name}_s": parts.get(name) for name in PART_WORDS},
    }


def predictions_csv(predictions: Sequence[Prediction]) -> str:
    """One row per prediction, full precision, the unit in the column's name."""
    return csv_text([flat_row(prediction) for prediction in predictions])


def predictions_json(predictions: Sequence[Prediction]) -> str:
    """One object, or one with `rows` when several were asked for."""
    return to_json(with_schema(predictions[0] if len(predictions) == 1 else list(predictions), "prediction"))
