"""Predictions as documents: one with memory by owner, time by operator and the answer; several with a row each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, fields

from flopwise.base.units import show_bytes, show_count, show_seconds, show_share, significant
from flopwise.records.outcome import Interval
from flopwise.records.prediction import DeviceBytes, Prediction, StagePrediction
from flopwise.report.document import Block, Document, Table, Words, beside_rows, facts, note_rows
from flopwise.report.tables import Styled
from flopwise.report.words import UNKNOWN, lengths_words, padded_words, signed_share
from flopwise.work.optimizers import Optimizer

OPTIMIZER_TITLES: dict[Optimizer, str] = {
    "adamw": "AdamW",
    "adamw-8bit": "AdamW in 8 bits",
    "muon": "Muon",
    "lion": "Lion",
    "sgd": "SGD",
    "sgd-momentum": "SGD with momentum",
    "adafactor": "Adafactor",
}
PART_WORDS = {
    "products": "matrix products",
    "attention": "attention",
    "streaming": "norms, activations, loss",
    "host": "waiting for the host",
    "interference": "slowed by collectives",
    "tensor": "tensor-parallel collectives",
    "context": "context ring, exposed",
    "expert": "expert all-to-all",
    "sharding": "gathers and reductions, exposed",
    "stages": "from stage to stage",
    "bubble": "pipeline bubble",
    "update": "optimizer, weights sent round",
    "offload": "copies to the host, exposed",
    "step": "once a step",
    "framework": "what frameworks take beyond",
}
"""Parts of a step in words."""
TIGHT = 0.05
"""A total with less than this share of the cap to spare is tight."""


def predictions_document(predictions: Sequence[Prediction], titles: Mapping[str, str]) -> Document:
    """One prediction whole, of several a row each; `titles` are those of the hardware, by its name."""
    one = predictions[0] if len(predictions) == 1 else None
    notes = [note for prediction in predictions for note in prediction.notes]
    return Document(
        blocks=_blocks(one, titles[one.hardware]) if one else _compare(predictions),
        tables=_tables(predictions),
        rows=map(flat_row, predictions),
        told=beside_rows(notes, *(() if one else ("table",))),
    )


def _blocks(prediction: Prediction, title: str) -> Iterator[Block]:
    yield from set_up_blocks(prediction, title)
    yield _operators(prediction)
    bound = f"{show_seconds(prediction.step_s)}, bound by {prediction.bound}{interval_words(prediction)}"
    peak = f"{show_count(prediction.peak_flops)}FLOP/s dense {prediction.peak_format}"
    yield facts(
        [
            ("step", bound),
            ("speed", speed_words(prediction)),
            *ceiling_rows(prediction),
            ("against", f"{peak} ({prediction.peak_source}), FLOPs counted {prediction.convention}"),
            *reason_rows(prediction),
        ]
    )


def set_up_blocks(prediction: Prediction, title: str) -> Iterator[Block]:
    """What is predicted; memory by owner and whether it fits; over several devices by stage, and the step's parts."""
    yield Words("\n".join(_heading(prediction, title)))
    if not prediction.stages:
        yield _memory(prediction)
        return
    yield _stages(prediction)
    rows = [
        [PART_WORDS[name], show_seconds(seconds), show_share(seconds / prediction.step_s)]
        for name, seconds in prediction.parts.items()
        if seconds > 0
    ]
    total = ["total", show_seconds(prediction.step_s), show_share(1.0)]
    yield Table(columns=("time of a step", "", " "), rows=[*rows, total], left={"time of a step"})


def speed_words(prediction: Prediction) -> str:
    rate = f"{significant(prediction.tokens_per_s)} tok/s{padded_words(prediction.padded_tokens_per_s)}"
    return Styled(f"{rate} · {show_share(prediction.mfu)} MFU · {show_share(prediction.hfu)} HFU", "bold")


def ceiling_rows(prediction: Prediction) -> list[tuple[str, str]]:
    """Beside what frameworks reach, what the kernels alone would allow."""
    if prediction.ceiling_s is None or prediction.ceiling_mfu is None:
        return []
    rate = significant(prediction.tokens_per_s * prediction.step_s / prediction.ceiling_s)
    words = f"{show_seconds(prediction.ceiling_s)} · {rate} tok/s · {show_share(prediction.ceiling_mfu)} MFU"
    return [("ceiling", f"{words}, with every exchange hidden; above is what frameworks reach")]


def reason_rows(prediction: Prediction) -> list[tuple[str, str]]:
    """What the interval leaves out, what `auto` stood for, and notes."""
    outside = outside_words(prediction.interval) if prediction.interval and prediction.interval.outside else ""
    return [("outside", outside), ("chosen", _choice_words(prediction)), *note_rows(prediction.notes)]


def _choice_words(prediction: Prediction) -> str:
    """What `auto` stood for, and why."""
    shown = {
        "precision": f"precision {prediction.precision}",
        "sequence_tokens": f"sequence {prediction.sequence_tokens:,}",
        "batch_sequences": f"batch {prediction.batch_sequences:,}",
        "micro_batch_sequences": f"micro-batch {prediction.micro_batch_sequences:,}",
        "recompute": f"recompute {prediction.recompute}",
        "attention": f"attention {prediction.attention_kernel}",
    }
    return " · ".join(f"{shown[setting]} ({reason})" for setting, reason in prediction.chosen.items())


def _heading(prediction: Prediction, title: str) -> Iterator[str]:
    """What is predicted, in three lines; four with several devices."""
    active = prediction.n_active_params
    parameters = f"{show_count(prediction.n_params)} parameters"
    if active != prediction.n_params:
        parameters += f", {show_count(active)} active"
    if prediction.n_trained_params is not None:
        parameters += f", {show_count(prediction.n_trained_params)} trained"
    yield (
        f"{prediction.model} · {prediction.devices:,} × {title} · sequence {prediction.sequence_tokens:,}"
        f" · {OPTIMIZER_TITLES[prediction.optimizer]} · {prediction.precision}"
    )
    if prediction.stages:
        yield f"{prediction.parallel.label} · stack {prediction.stack}"
    batch = f"batch {prediction.batch_sequences:,} = {prediction.batch_tokens:,} tokens"
    uneven = lengths_words(prediction.lengths)
    yield f"{parameters} · {batch}{f' · sequences {uneven}' if uneven else ''}"
    micro = f"micro-batch {prediction.micro_batch_sequences:,}, {prediction.accumulation_steps:,} a step"
    yield f"{micro} · recompute {prediction.recompute}"


# -- memory ----------------------------------------------------------------------------------------------------------


def _memory(prediction: Prediction) -> Table:
    memory = prediction.device_bytes
    rows = [[owner, show_bytes(getattr(memory, owner)), ""] for owner in _owners()]
    total = ["total", show_bytes(memory.total), _verdict(prediction)]
    return Table(columns=("memory", "device", ""), rows=[*rows, total], left={"memory", ""}, folded={"": 0})


def _owners() -> list[str]:
    """The owners of device memory, in the record's order."""
    return [field.name for field in fields(DeviceBytes) if field.name != "total"]


def _verdict(prediction: Prediction) -> Styled:
    """Whether it fits, in words."""
    memory, capacity = prediction.device_bytes, prediction.device_capacity_bytes
    if prediction.fits:
        spare = capacity - memory.total
        style, verdict = ("yellow", "✓ fits, tight:") if spare < TIGHT * capacity else ("green", "✓ fits,")
        return Styled(f"{verdict} {show_bytes(spare)} of {show_bytes(capacity)} spare", style)
    state = memory.weights + memory.gradients + memory.optimizer
    alone = f"; the state alone is {show_bytes(state)}" if state > capacity else ""
    return Styled(f"✗ does not fit {show_bytes(capacity)}{alone}", "red")


def _stages(prediction: Prediction) -> Table:
    """Memory of one device of the first, the fullest and the last stage, by owner, and whether it fits."""
    first, last = prediction.stages[0], prediction.stages[-1]
    fullest = max(prediction.stages, key=lambda stage: stage.device_bytes.total)
    stages = sorted({stage.stage: stage for stage in (first, fullest, last)}.values(), key=lambda one: one.stage)
    rows = [
        [owner, *(show_bytes(getattr(stage.device_bytes, owner)) for stage in stages)]
        for owner in ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
    ]
    verdict = _verdict(prediction)
    host = f"{show_bytes(prediction.host_bytes)} of host memory for each device, not checked against what it has"
    return Table(
        columns=("memory of a device", *(_stage_title(stage, len(prediction.stages)) for stage in stages)),
        rows=[*rows, ["total", *(_stage_total(stage, prediction.device_capacity_bytes) for stage in stages)]],
        left={"memory of a device"},
        note=Styled(f"{verdict}\n{host}", verdict.style) if prediction.host_bytes else verdict,
    )


def _stage_title(stage: StagePrediction, count: int) -> str:
    return "every device" if count == 1 else f"stage {stage.stage + 1} of {count} ({stage.layers} layers)"


def _stage_total(stage: StagePrediction, capacity: int) -> Styled:
    sign, style = ("✓", "green") if stage.device_bytes.total <= capacity else ("✗", "red")
    return Styled(f"{sign} {show_bytes(stage.device_bytes.total)}", style)


# -- time ------------------------------------------------------------------------------------------------------------


def _operators(prediction: Prediction) -> Table:
    rows = [
        [
            op.name,
            show_count(op.flops) if op.flops else UNKNOWN,
            show_bytes(op.bytes) if op.bytes else UNKNOWN,
            show_seconds(op.time_s),
            show_share(op.share),
            op.bound,
        ]
        for op in prediction.ops
        if op.time_s or not prediction.stages
    ]
    columns = ("operator", "FLOP", "bytes", "time", "share", "bound by")
    return Table(columns=columns, rows=rows, left={"operator", "bound by"})


def interval_words(prediction: Prediction) -> str:
    """Where a measured step may lie, as a share of the predicted one; nothing where nobody knows."""
    interval = prediction.interval
    if interval is None:
        return ""
    low, high = interval.low_s / prediction.step_s - 1, interval.high_s / prediction.step_s - 1
    return f"; 8 of 10 measured steps lie {signed_share(low, 0)} to {signed_share(high, 0)} ({interval.basis})"


def speed_range(tokens: float, interval: Interval | None) -> str:
    """Tokens per second that measured steps lie between, of a step with so many tokens; nothing where nobody knows."""
    if interval is None:
        return ""
    return f"{significant(tokens / interval.high_s)}–{significant(tokens / interval.low_s)}"


def outside_words(interval: Interval) -> str:
    """In what the data do not reach this far."""
    return f"no such data, so the interval is wider: {', '.join(interval.outside)}"


# -- several predictions, one row each ------------------------------------------------------------------------------

COMPARED: dict[str, Callable[[Prediction], str]] = {
    "model": lambda one: one.model,
    "hardware": lambda one: one.hardware,
    "devices": lambda one: f"{one.devices:,}",
    "strategy": lambda one: one.parallel.label if one.devices > 1 else "",
    "precision": lambda one: one.precision,
    "seq": lambda one: f"{one.sequence_tokens:,}",
    "lengths": lambda one: lengths_words(one.lengths),
    "batch": lambda one: f"{one.batch_sequences:,}",
    "micro": lambda one: f"{one.micro_batch_sequences:,}",
    "recompute": lambda one: one.recompute,
    "memory": lambda one: f"{'✓' if one.fits else '✗'} {show_bytes(one.device_bytes.total)}",
    "step": lambda one: show_seconds(one.step_s),
    "tok/s": lambda one: significant(one.tokens_per_s),
    "8 in 10 at": lambda one: speed_range(one.tokens_per_s * one.step_s, one.interval),
    "padded tok/s": lambda one: significant(one.padded_tokens_per_s) if one.padded_tokens_per_s else "",
    "MFU": lambda one: show_share(one.mfu),
    "ceiling": lambda one: show_share(one.ceiling_mfu) if one.ceiling_mfu else "",
    "bound by": lambda one: one.bound,
}
"""The sign before the memory says whether it fits."""
GIVING_WAY = ("bound by", "ceiling", "padded tok/s", "batch", "micro", "seq", "recompute", "step")
LAST_GIVING_WAY = ("MFU", "8 in 10 at")
LEFT = {"model", "hardware", "strategy", "precision", "lengths", "recompute", "bound by"}
SAID_ONCE = {
    **dict.fromkeys(("model", "hardware", "devices", "strategy", "precision"), ""),
    **{"seq": "sequence ", "lengths": "sequences ", "batch": "batch "},
}
"""What stands above the table where it is the same in every row."""


def _compare(predictions: Sequence[Prediction]) -> Iterator[Block]:
    """Several predictions in a table; what is the same in every row is said once, above it."""
    cells = _cells(predictions)
    varied = [name for name, column in cells.items() if len(set(column)) > 1]
    same = {name: cells[name][0] for name in SAID_ONCE if name in cells and name not in varied}
    columns = [name for name in cells if name not in same]
    # What tells the rows apart stays; the micro-batch only where nothing else does.
    kept = {name for name in varied if name in SAID_ONCE}
    before = list(cells)[: list(cells).index("micro")]
    if len(set(zip(*(cells[name] for name in before), strict=True))) < len(predictions):
        kept.add("micro")
    said = [f"{SAID_ONCE[name]}{value}" for name, value in same.items() if name not in ("devices", "strategy")]
    yield Words(" · ".join([*said, _devices(predictions)]))
    yield Table(
        columns=columns,
        rows=list(zip(*(cells[name] for name in columns), strict=True)),
        left=LEFT,
        giving_way=[*(name for name in GIVING_WAY if name not in kept), *_following(cells, kept), *LAST_GIVING_WAY],
        styles=["" if prediction.fits else "red" for prediction in predictions],
    )


def _following(cells: Mapping[str, Sequence[str]], kept: Collection[str]) -> list[str]:
    """Of the columns that vary, those that follow from the others, as a model's sequence does."""
    telling = [name for name in cells if name in kept]
    found: list[str] = []
    for name in ("batch", "seq"):
        others = [each for each in telling if each != name]
        if name in telling and len(set(zip(*(cells[each] for each in others), strict=True))) == len(cells[name]):
            telling = others
            found.append(name)
    return found


def _cells(predictions: Sequence[Prediction]) -> dict[str, list[str]]:
    """The columns that say anything."""
    cells = {name: [words(one) for one in predictions] for name, words in COMPARED.items()}
    return {name: column for name, column in cells.items() if any(column)}


def _devices(predictions: Sequence[Prediction]) -> str:
    if all(prediction.devices == 1 for prediction in predictions):
        return "1 device"
    words = {f"{prediction.devices:,} devices · {prediction.parallel.label}" for prediction in predictions}
    counts = {prediction.devices for prediction in predictions}
    if len(words) == 1:
        return words.pop()
    return f"{counts.pop():,} devices" if len(counts) == 1 else "several devices"


def _tables(predictions: Sequence[Prediction]) -> Iterator[Block]:
    """The rows for an issue; one prediction brings its operators and its memory too."""
    cells = _cells(predictions)
    yield Table(columns=tuple(cells), rows=list(zip(*cells.values(), strict=True)), left=LEFT)
    if len(predictions) == 1:
        memory = predictions[0].device_bytes
        yield _operators(predictions[0])
        owned = [[owner, show_bytes(getattr(memory, owner))] for owner in (*_owners(), "total")]
        yield Table(columns=("memory", "device"), rows=owned, left={"memory"})


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
