"""Runs of a store: a row for each, and a page for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path
from typing import Any, get_args

from flopwise.base.units import show_bytes, show_count, show_share
from flopwise.records.measurement import Measurement, RunRecord, StepRecord
from flopwise.report.document import Block, Document, Figure, Heading, Table, facts
from flopwise.report.predictions import OPTIMIZER_TITLES
from flopwise.report.training import measured_parts, memory_table, metrics_block, state_parts
from flopwise.report.words import (
    UNKNOWN,
    lengths_words,
    loss_words,
    printable,
    rate_words,
    safe,
    seconds_words,
    share_words,
    signed_share,
)
from flopwise.setup.training import Training
from flopwise.store.cells import Attempt, CellState, SweepRecord, standing_attempts
from flopwise.store.rows import UNREADABLE, RunRow

FIELDS = (
    "run",
    "state",
    "model",
    "task",
    "steps_done",
    "steps",
    "last_loss",
    "tokens_per_s",
    "mfu",
    "predicted_tokens_per_s",
    "prediction_error",
    "started",
    "ended",
    "folder",
    "problem",
)
"""Of a run's entry in JSON and CSV."""
KILLED = "killed"
"""A run that its record says is running, and that no process holds any more."""
LONGEST_NAME = 28

# -- a row for each --------------------------------------------------------------------------------------------------


def run_entry(run: RunRow, folder: Path, last: StepRecord | None = None, *, killed: bool = False) -> dict[str, Any]:
    """What a listing says of a run, at full precision.

    `last` is its last step where that says more than the record. `killed`: its record says that it
    runs, and nobody does.
    """
    entry: dict[str, Any] = dict.fromkeys(FIELDS)
    entry |= {"run": run.name, "folder": str(folder)}
    if run.problem is not None:
        return entry | {"state": UNREADABLE, "problem": run.problem}
    row = run.result
    is_measured = row.step_s is not None
    return entry | {
        "state": KILLED if killed else run.state,
        "model": row.model,
        "task": run.task,
        "steps_done": max(run.steps_done, last.step if last else 0),
        "steps": run.steps,
        "last_loss": last.loss if last else row.last_loss,
        "tokens_per_s": last.tokens_per_s if last and not is_measured else row.tokens_per_s,
        "mfu": last.mfu if last and not is_measured else row.mfu,
        "predicted_tokens_per_s": row.predicted_tokens_per_s if is_measured else None,
        "prediction_error": row.prediction_error,
        "started": row.started,
        "ended": run.ended,
    }


def model_name(record: RunRecord) -> str:
    """As the description has it."""
    return str(record.model.get("name") or (record.measurement.model if record.measurement else UNKNOWN))


def runs_document(entries: Sequence[Mapping[str, Any]], folder: Path) -> Document:
    """A row for each run of a store."""
    table = Table(
        columns=tuple(COLUMNS),
        rows=[_row(entry) for entry in entries],
        left={"run", "state", "model", "task", "started"},
        giving_way=("task", "error", "started", "MFU"),
    )
    nothing = [] if entries else [f"note: there are no runs in {folder}; `flopwise train` begins one"]
    problems = [f"note: {entry['run']}: {entry['problem']}" for entry in entries if entry["problem"]]
    return Document(
        blocks=[table] if entries else [],
        tables=[table],
        rows=entries,
        fields=FIELDS,
        told={"table": [*nothing, *problems], "md": [*nothing, *problems], "csv": nothing, "json": nothing},
    )


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "run": lambda entry: entry["run"],
    "state": lambda entry: entry["state"],
    "model": lambda entry: safe(entry["model"], LONGEST_NAME),
    "task": lambda entry: entry["task"],
    "steps": lambda entry: f"{entry['steps_done']:,}/{entry['steps']:,}",
    "loss": lambda entry: loss_words(entry["last_loss"]),
    "tok/s": lambda entry: rate_words(entry["tokens_per_s"]),
    "MFU": lambda entry: share_words(entry["mfu"]),
    # Of the predicted speed, against the measured one.
    "error": lambda entry: signed_share(entry["prediction_error"]),
    "started": lambda entry: when_words(entry["started"]),
}


def _row(entry: Mapping[str, Any]) -> list[str]:
    if entry["problem"] is not None:
        return [entry["run"], entry["state"], *[UNKNOWN] * (len(COLUMNS) - 2)]
    return [words(entry) for words in COLUMNS.values()]


def when_words(moment: str | None) -> str:
    """The minute of an ISO time."""
    return printable(moment[:16].replace("T", " ")) if moment else UNKNOWN


# -- sweeps ----------------------------------------------------------------------------------------------------------

STATES: tuple[CellState, ...] = get_args(CellState)
SWEEP_FIELDS = ("sweep", "cells", *STATES, "steps", "repeats", "created")


def sweep_entry(sweep: SweepRecord, attempts: Sequence[Sequence[Attempt]]) -> dict[str, Any]:
    """A sweep with its cells by state; `attempts` are those of each cell. One is ok when all of its repeats are."""
    counts = Counter(_cell_state(each, sweep.repeats) for each in attempts)
    told = {"steps": sweep.steps, "repeats": sweep.repeats, "created": sweep.created}
    return {"sweep": sweep.name, "cells": len(sweep.cells), **{state: counts[state] for state in STATES}, **told}


def _cell_state(attempts: Sequence[Attempt], repeats: int) -> CellState:
    """As the newest of its attempts is, where it has not been measured often enough."""
    states = [attempt.state for attempt in standing_attempts(attempts)]
    if states.count("ok") >= repeats:
        return "ok"
    left = [state for state in states if state != "ok"]
    return left[-1] if left else "planned"


def sweeps_document(entries: Sequence[Mapping[str, Any]], folder: Path) -> Document:
    """A row for each sweep of a store."""
    rows = [
        [
            entry["sweep"],
            f"{entry['cells']:,}",
            ", ".join(f"{entry[state]:,} {state}" for state in STATES if entry[state]) or UNKNOWN,
            f"{entry['steps']:,}",
            f"{entry['repeats']:,}",
            when_words(entry["created"]),
        ]
        for entry in entries
    ]
    table = Table(
        columns=("sweep", "cells", "states", "steps", "repeats", "created"),
        rows=rows,
        left={"sweep", "states", "created"},
        giving_way=("repeats", "steps"),
    )
    nothing = [] if entries else [f"note: there are no sweeps in {folder}; `flopwise sweep` begins one"]
    return Document(
        blocks=[table] if entries else [],
        tables=[table],
        rows=entries,
        fields=SWEEP_FIELDS,
        told=dict.fromkeys(("table", "md", "csv", "json"), nothing),
    )


# -- a page for one --------------------------------------------------------------------------------------------------


def run_document(record: RunRecord, steps: Sequence[StepRecord]) -> Document:
    """A run: what it was, how it went, what it took. `steps` are those that were written down."""
    return Document(blocks=_blocks(record, steps))


def _blocks(record: RunRecord, steps: Sequence[StepRecord]) -> Iterator[Block]:
    measured = record.measurement
    ended = f" to {when_words(record.ended)}" if record.ended else ""
    yield Heading(f"run {record.id} · {record.task} · {when_words(record.started)}{ended}")
    parts = {
        "model": model_parts(record),
        "plan": plan_parts(record),
        "data": data_parts(record.data),
        "training": training_parts(record.training),
        "state": state_parts(record),
        "loss": loss_parts(measured, steps),
        "speed": measured_parts(measured) if measured else [],
        "step": _step_parts(measured) if measured else [],
        "profile": [f"flopwise why {record.id}"] if record.profile else [],
        "made with": environment_parts(record.environment),
    }
    yield facts([(label, " · ".join(words)) for label, words in parts.items()])
    if measured and (table := memory_table(measured.memory)):
        yield table
    if record.metrics:
        yield Figure(metrics_block(record.metrics))


def model_parts(record: RunRecord) -> list[str]:
    """Name and size."""
    parts = [printable(model_name(record))]
    if record.measurement:
        parts.append(f"{show_count(record.measurement.n_params)} parameters")
    for key, noun in (("layers", "layers"), ("hidden", "hidden"), ("heads", "heads")):
        if isinstance(count := record.model.get(key), int):
            parts.append(f"{count:,} {noun}")
    return parts


def plan_parts(record: RunRecord) -> list[str]:
    """Sequence, batch, precision and caps: as they were run, else as the plan's table says."""
    plan, measured = record.plan, record.measurement
    if measured:
        parts = [
            f"{measured.devices} × {printable(measured.hardware)}",
            f"sequence {measured.sequence_tokens:,}",
            *([f"sequences {uneven}"] if (uneven := lengths_words(measured.lengths)) else []),
            f"batch {measured.batch_sequences:,} = {measured.batch_tokens:,} tokens",
            f"micro-batch {measured.micro_batch_sequences:,}",
            f"precision {printable(measured.precision)}",
            OPTIMIZER_TITLES.get(measured.optimizer, printable(measured.optimizer)),
        ]
    else:
        names = {"hardware": "on", "sequence_tokens": "sequence", "precision": "precision", "optimizer": "optimizer"}
        parts = [f"{words} {_value_words(plan[key])}" for key, words in names.items() if plan.get(key) is not None]
    for place in ("device", "host"):
        if isinstance(cap := plan.get(f"{place}_memory_bytes"), int) and cap:
            parts.append(f"{place} cap {show_bytes(cap)}")
    return parts


DATA_WORDS = {
    "files": "{} files",
    "documents": "{} documents",
    "samples": "{} samples",
    "tokens": "{} tokens",
    "sequences": "{} sequences",
    "sequences_about": "about {} sequences",
    "mask_share": "{} of all tokens hidden",
    "evaluation_sequences": "{} held out",
    "tokenizer": "tokenizer {}",
    "labels": "labels {}",
}
MOST_NAMED = 4
MOST_DIGITS = 18
"""Of a size: no machine has more bytes."""
SHOWN_DIGITS = 12
"""Of a digest: enough to compare two by eye."""


def data_parts(data: Mapping[str, Any]) -> list[str]:
    """What it was trained on: sources and counts, as far as the record has them."""
    sources, digest = data.get("sources"), data.get("fingerprint")
    parts = [_value_words(sources)] if sources else []
    parts += [words.format(_value_words(data[key])) for key, words in DATA_WORDS.items() if data.get(key)]
    return [*parts, f"fingerprint {printable(str(digest)[:SHOWN_DIGITS])}"] if digest else parts


def _value_words(value: object) -> str:
    """A value of a record's free tables; of a long list the first few."""
    if isinstance(value, list | tuple):
        named = [_value_words(item) for item in value[:MOST_NAMED]]
        return ", ".join(named) + (f", … ({len(value):,})" if len(value) > MOST_NAMED else "")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else printable(str(value))


def schedule_words(training: Training) -> str:
    """A schedule with what is not as it usually is."""
    floor = "" if training.min_learning_rate is None else f" to {training.min_learning_rate:g}"
    if training.schedule != "wsd":
        return f"{training.schedule}{floor}"
    return f"wsd, the last {training.decay_share:.3g} of it {training.decay_shape}{floor}"


def training_parts(training: Training) -> list[str]:
    """The settings that change the result."""
    warmup = f" after {training.warmup_steps:,} steps of warm-up" if training.warmup_steps else ""
    parts = [
        f"{training.steps:,} steps",
        f"learning rate {training.learning_rate:g}, {schedule_words(training)}{warmup}",
        f"betas {training.beta1:g} and {training.beta2:g}",
        f"weight decay {training.weight_decay:g}",
    ]
    parts += [f"clipped to {training.clip_norm:g}"] if training.clip_norm is not None else []
    parts += [] if training.drops else ["no dropout"]
    parts += ["stochastic rounding"] if training.stochastic_rounding else []
    return [*parts, f"seed {training.seed}"]


def environment_parts(environment: Mapping[str, str]) -> list[str]:
    """Versions and the machine; where Python lies is for the record alone."""
    parts = []
    for name, value in environment.items():
        if name.endswith("_bytes") and value.isdecimal() and len(value) <= MOST_DIGITS:
            parts.append(f"{printable(name.removesuffix('_bytes'))} {show_bytes(int(value))}")
        elif name != "executable":
            parts.append(f"{printable(name)} {printable(value[:SHOWN_DIGITS] if name == 'commit' else value)}")
    return parts


def _step_parts(measured: Measurement) -> list[str]:
    spread = f"{seconds_words(measured.step_s_p20)}–{seconds_words(measured.step_s_p80)}"
    parts = [f"{seconds_words(measured.step_s)} (p20–p80 {spread}, over {measured.steps:,} steps)"]
    if measured.predicted_step_s is not None:
        parts.append(f"predicted {seconds_words(measured.predicted_step_s)}")
    if measured.hfu is not None:
        parts.append(f"{show_share(measured.hfu)} HFU")
    if measured.peak_flops is not None:
        peak = f"{show_count(measured.peak_flops)}FLOP/s"
        parts.append(f"against {peak} {measured.peak_format or ''}".rstrip())
    return [*parts, f"FLOPs counted {measured.convention}"]


# -- the loss --------------------------------------------------------------------------------------------------------

BARS = "▁▂▃▄▅▆▇█"
NO_BAR = "×"
"""Where a loss is no number."""
LONGEST_CURVE = 40


def loss_parts(measured: Measurement | None, steps: Sequence[StepRecord]) -> list[str]:
    """The first and the last loss, and the way between."""
    losses = [step.loss for step in steps]
    if not losses and measured:
        losses = [measured.first_loss, measured.last_loss]
    if len(losses) < 2:
        return [loss_words(loss) for loss in losses]
    return [f"{loss_words(losses[0])} → {loss_words(losses[-1])}  {curve(losses)}"]


def curve(values: Sequence[float], most: int = LONGEST_CURVE) -> str:
    """Values as bars from the least to the largest, at most so many: means of as many neighbours as it takes."""
    size = ceil(len(values) / most)
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    means = [sum(group) / len(group) for group in groups]
    finite = [mean for mean in means if isfinite(mean)]
    least, largest = min(finite, default=0.0), max(finite, default=0.0)
    step = (largest - least) / (len(BARS) - 1)
    if not isfinite(step):
        return ""
    return "".join(
        NO_BAR if not isfinite(mean) else BARS[round((mean - least) / step) if step else 0] for mean in means
    )
