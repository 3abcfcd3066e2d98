"""A training for people: a row for each step, and at the end the block of metrics, speed and memory beside the plan.

Everything here is made from records alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import isfinite

from flopwise.base.units import show_bytes, show_share
from flopwise.records.measurement import Measurement, MemoryRow, RunRecord, StepRecord
from flopwise.records.program import OWNERS
from flopwise.report.document import Block, Document, Figure, Table, Words
from flopwise.report.words import (
    loss_words,
    printable,
    rate_words,
    seconds_words,
    share_words,
    signed_share,
    size_words,
)
from flopwise.work.parameters import Place

LONGEST_DURATION_S = 1e11
"""Beyond it Python has no word for a duration; nothing has run for three thousand years."""

# -- a row for each step ---------------------------------------------------------------------------------------------

STEP_WIDTHS = {
    "step": 6,
    "loss": 8,
    "margin": 8,
    "right": 7,
    "balance": 8,
    "busiest": 8,
    "time": 7,
    "predicted": 9,
    "tok/s": 9,
    "MFU": 7,
    "device": 9,
    "host": 9,
    "exposed": 8,
}
"""Columns with room for what they mostly hold: rows come one by one and still stand below each other."""
STEPS_GIVING_WAY = ("host", "device", "exposed", "predicted")
GAP = "  "


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTable:
    """Steps as rows of words. Device and host memory are as measured, or as planned where a record does not tell."""

    columns: tuple[str, ...]
    steps: int
    device_bytes: int | None = None
    host_bytes: int | None = None

    def header(self) -> str:
        return GAP.join(name.rjust(self._width(name)) for name in self.columns)

    def row(self, record: StepRecord) -> str:
        cells = {
            "step": f"{record.step:,}",
            "loss": loss_words(record.loss),
            "margin": loss_words((record.rewards or {}).get("margin", 0.0)),
            "right": share_words((record.rewards or {}).get("accuracy")),
            "balance": loss_words((record.routing or {}).get("balance_loss", 0.0)),
            "busiest": f"{(record.routing or {}).get('busiest', 0.0):.2f} ×",
            "time": seconds_words(record.step_s),
            "predicted": seconds_words(record.predicted_s),
            "tok/s": rate_words(record.tokens_per_s),
            "MFU": share_words(record.mfu),
            "device": size_words(record.device_bytes or self.device_bytes),
            "host": size_words(record.host_bytes or self.host_bytes),
            "exposed": seconds_words(record.exposed_copy_s),
        }
        return GAP.join(cells[name].rjust(self._width(name)) for name in self.columns)

    def _width(self, name: str) -> int:
        return max(STEP_WIDTHS[name], len(f"{self.steps:,}") if name == "step" else 0)


def step_table(
    first: StepRecord, *, steps: int, width: int, device_bytes: int | None, host_bytes: int | None
) -> StepTable:
    """A table for steps like the first one, whose unknown figures have no column, as wide as there is room."""
    unknown = {
        "margin": first.rewards is None,
        "right": first.rewards is None,
        "balance": not (first.routing or {}).get("balance_loss"),
        "busiest": first.routing is None,
        "predicted": first.predicted_s is None,
        "MFU": first.mfu is None,
        "device": not (first.device_bytes or device_bytes),
        "host": not (first.host_bytes or host_bytes),
        "exposed": first.exposed_copy_s is None,
    }
    columns = [name for name in STEP_WIDTHS if not unknown.get(name, False)]

    def table() -> StepTable:
        return StepTable(columns=tuple(columns), steps=steps, device_bytes=device_bytes, host_bytes=host_bytes)

    for name in STEPS_GIVING_WAY:
        if name in columns and len(table().header()) > width:
            columns.remove(name)
    return table()


def evaluation_words(step: int, evaluation: Mapping[str, float]) -> str:
    """An evaluation on a line; how long it took and how many samples it saw is for the block at the end."""
    told = {name: value for name, value in evaluation.items() if not name.endswith(("_runtime", "_samples", "_second"))}
    figures = [f"{name} {metric_words(name, value)}" for name, value in told.items()]
    return f"evaluated after step {step:,}: {' · '.join(figures)}"


# -- the block of metrics --------------------------------------------------------------------------------------------


def metric_words(name: str, value: float | str) -> str:
    """A figure as Hugging Face's trainer prints it, an accuracy in per cent."""
    if isinstance(value, str) or not isfinite(value):
        return str(value)
    if name.endswith("_runtime"):
        return _duration(value)
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    if name.endswith("_accuracy"):
        return f"{100 * value:.2f}%"
    if name.endswith("_samples") and value == int(value):
        return str(int(value))
    return str(round(float(value), 3 if name.endswith("_per_second") else 4))


def _duration(seconds: float) -> str:
    if not 0 <= seconds < LONGEST_DURATION_S:
        return f"{seconds:g} s"
    return f"{timedelta(seconds=int(seconds))}.{int(100 * (seconds - int(seconds))):02d}"


def metrics_block(metrics: Mapping[str, float | str]) -> list[str]:
    """The trainer's block, line for line; nothing where nothing was counted."""
    if not metrics:
        return []
    words = {name: metric_words(name, value) for name, value in sorted(metrics.items())}
    names, values = max(map(len, words)), max(map(len, words.values()))
    return ["***** train metrics *****", *(f"  {name.ljust(names)} = {words[name].rjust(values)}" for name in words)]


# -- measured beside predicted ---------------------------------------------------------------------------------------


def measured_parts(measurement: Measurement) -> list[str]:
    """Speed and memory as measured, beside what was predicted and planned."""
    spread = f"{rate_words(measurement.tokens_per_s_p20)}–{rate_words(measurement.tokens_per_s_p80)}"
    parts = [f"measured {rate_words(measurement.tokens_per_s)} tok/s (p20–p80 {spread})"]
    if measurement.padded_tokens_per_s is not None:
        parts.append(f"{rate_words(measurement.padded_tokens_per_s)} with padding")
    predicted = measurement.predicted_tokens_per_s
    if predicted is not None:
        known = measurement.tokens_per_s > 0
        off = f" ({signed_share(predicted / measurement.tokens_per_s - 1)})" if known else ""
        parts.append(f"predicted {rate_words(predicted)}{off}")
    parts += [*_peak(measurement, "device", "peak"), *_peak(measurement, "host", "host")]
    return parts if measurement.mfu is None else [*parts, f"{show_share(measurement.mfu)} MFU"]


def _peak(measurement: Measurement, place: Place, name: str) -> list[str]:
    if not any(row.place == place for row in measurement.memory):
        return []
    was, planned = (measurement.total_bytes(place, planned=planned) for planned in (False, True))
    words, wanted = show_bytes(was), show_bytes(planned)
    number, _, unit = wanted.partition(" ")
    return [f"{name} {words} (planned {number if words.endswith(f' {unit}') else wanted})"]


MEMORY_PLACES: tuple[Place, ...] = ("device", "host")


def memory_table(memory: Sequence[MemoryRow]) -> Table | None:
    """Memory by owner and place, as planned and as it was, what nobody has planned last but the total."""
    places = [place for place in MEMORY_PLACES if any(row.place == place for row in memory)]
    if not places:
        return None
    found: dict[str, dict[Place, tuple[int, int]]] = {}
    for row in memory:
        planned, measured = found.setdefault(row.owner, {}).get(row.place, (0, 0))
        found[row.owner][row.place] = (planned + row.planned_bytes, measured + row.measured_bytes)
    columns = ["memory", *(f"{place} {kind}" for place in places for kind in ("planned", "measured"))]
    rows = [_memory_row(printable(owner), found[owner], places) for owner in sorted(found, key=_owner_order)]
    sums = {
        place: (
            sum(sizes.get(place, (0, 0))[0] for sizes in found.values()),
            sum(sizes.get(place, (0, 0))[1] for sizes in found.values()),
        )
        for place in places
    }
    return Table(columns=columns, rows=[*rows, _memory_row("total", sums, places)], left={"memory"})


def _owner_order(owner: str) -> tuple[int, str]:
    """As programs name them, others by name, and what is unaccounted last."""
    if owner in OWNERS:
        return OWNERS.index(owner), ""
    return len(OWNERS) + (owner == "unaccounted"), owner


def _memory_row(name: str, sizes: Mapping[Place, tuple[int, int]], places: Sequence[Place]) -> list[str]:
    return [name, *(size_words(size) for place in places for size in sizes.get(place, (0, 0)))]


# -- the end of a run ------------------------------------------------------------------------------------------------


def state_parts(record: RunRecord) -> list[str]:
    """How far a run has come, and why it did not come further."""
    parts = [f"{record.state}: {record.steps_done:,} of {record.training.steps:,} steps"]
    if record.reason:
        parts.append(printable(record.reason))
    if record.checkpoint:
        parts.append(f"checkpoint {printable(record.checkpoint)}")
    if record.resumed_from:
        parts.append(f"goes on from {printable(record.resumed_from)}")
    return parts


def end_document(record: RunRecord, store: str | None) -> Document:
    """What a training leaves behind; `store` is for the commands that come next, where it was named."""
    resuming = resume_words(record, store)
    return Document(blocks=_end(record, store, resuming), told={"json": [resuming] if resuming else []})


def _end(record: RunRecord, store: str | None, resuming: str | None) -> Iterator[Block]:
    if record.metrics:
        yield Figure(metrics_block(record.metrics))
    beside, lines = _beside(store), []
    if record.measurement:
        if table := memory_table(record.measurement.memory):
            yield table
        lines.append(" · ".join(measured_parts(record.measurement)))
    elif record.state == "done":
        lines.append("too few steps to measure a speed")
    if record.state != "done":
        lines.append(" · ".join(state_parts(record)))
    profiled = f" · flopwise why {record.id}{beside}" if record.profile else ""
    lines.append(f"saved run {record.id}   next: flopwise show {record.id}{beside}{profiled}")
    yield Words("\n".join([*lines, *([resuming] if resuming else [])]), indent=2)


def resume_words(record: RunRecord, store: str | None) -> str | None:
    """How to go on with a run that was interrupted; None where nothing is left to do, or nothing was saved."""
    if record.state != "interrupted" or not record.checkpoint:
        return None
    return f"go on with: flopwise train --resume {record.id}{_beside(store)}"


def _beside(store: str | None) -> str:
    return f" --store {shlex.quote(store)}" if store else ""
