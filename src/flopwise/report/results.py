"""Results for people: a table for a terminal, and `results.md` in the columns of the published MPT benchmarks and more.

What did not come out (out of memory, out of time, failed, skipped) stays in both, with its reason. The repeats of a
cell that went well are one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Any

from flopwise.base.units import BINARY_UNITS, show_count, show_share, significant
from flopwise.report.document import Block, Document, Heading, Items, Table, Words
from flopwise.report.results_files import OFFLOADED, TITLE, kinds, results_rows
from flopwise.report.words import (
    UNKNOWN,
    count_nouns,
    count_words,
    printable,
    rate_words,
    safe,
    seconds_words,
    signed_share,
    size_words,
)
from flopwise.store.results import ERROR, FIELDS, Result, check_result

LONGEST_NAME = 28
GOOD = ("ok", "planned", "running")
"""States that need no reason."""
STATE_STYLES = {"ok": "", "planned": "dim", "running": "cyan", "skipped": "dim", "interrupted": "yellow"}
"""Of rows in a terminal; all others are red."""

# -- words -----------------------------------------------------------------------------------------------------------


def spread_words(low: float | None, high: float | None) -> str:
    """`11,190–11,260`: with as many digits as tell the two apart, at least three."""
    if low is None or high is None:
        return UNKNOWN
    if low == high or not (math.isfinite(low) and math.isfinite(high)):
        return f"{significant(low)}–{significant(high)}"
    digits = next((count for count in range(3, 8) if significant(low, count) != significant(high, count)), 3)
    return f"{significant(low, digits)}–{significant(high, digits)}"


def share_or_error(row: Result, share: float | None) -> str:
    """A share of the peak; never a figure where the row's are wrong."""
    if row.state == ERROR:
        return ERROR
    return UNKNOWN if share is None else show_share(share)


def field_words(row: Result, name: str) -> str:
    """One field of a row for a person, whatever it is."""
    value = getattr(row, name)
    if name in ("mfu", "hfu"):
        return share_or_error(row, value)
    if value is None:
        return UNKNOWN
    if isinstance(value, bool | str):
        return printable(value) if isinstance(value, str) else "yes" if value else "no"
    return _number_words(name, value)


def _number_words(name: str, value: float) -> str:
    if name == "prediction_error":
        return signed_share(value)
    if name.endswith("_bytes"):
        return size_words(int(value))
    if name.endswith(("step_s", "step_s_p20", "step_s_p80")):
        return seconds_words(value)
    if name in ("peak_flops", "model_flops_per_s_per_device"):
        return f"{show_count(value)}FLOP/s"
    if name == "seed":
        return str(value)
    return f"{value:,}" if isinstance(value, int) else significant(value)


@lru_cache(maxsize=4096)
def _name(text: str | None) -> str:
    return safe(text, LONGEST_NAME) if text else UNKNOWN


def _bound_words(row: Result) -> str | None:
    """Verdicts are called `host_bound`; people say `host bound`."""
    return row.bound.replace("_", " ") if row.bound else None


# -- the table -------------------------------------------------------------------------------------------------------

OfResult = Callable[[Result], str]

TABLE: dict[str, OfResult] = {
    "run": lambda row: printable(row.run) if row.run else UNKNOWN,
    "state": lambda row: printable(row.state),
    "model": lambda row: _name(row.model),
    "on": lambda row: _name(row.hardware),
    "devices": lambda row: count_words(row.devices),
    "sequence": lambda row: count_words(row.sequence_tokens),
    "batch": lambda row: count_words(row.batch_sequences),
    "micro": lambda row: count_words(row.micro_batch_sequences),
    "precision": lambda row: _name(row.precision),
    "device cap": lambda row: size_words(row.device_cap_bytes),
    "host cap": lambda row: size_words(row.host_cap_bytes),
    "tok/s": lambda row: rate_words(row.tokens_per_s),
    "padded": lambda row: rate_words(row.padded_tokens_per_s),
    "p20–p80": lambda row: spread_words(row.tokens_per_s_p20, row.tokens_per_s_p80),
    "predicted": lambda row: rate_words(row.predicted_tokens_per_s),
    "error": lambda row: signed_share(row.prediction_error),
    "MFU": lambda row: share_or_error(row, row.mfu),
    "HFU": lambda row: share_or_error(row, row.hfu),
    "memory": lambda row: size_words(row.device_bytes),
    "host": lambda row: size_words(row.host_bytes),
    "J/tok": lambda row: rate_words(row.energy_j_per_token),
    "tok/$": lambda row: UNKNOWN if row.tokens_per_dollar is None else show_count(row.tokens_per_dollar),
    "bound": lambda row: _name(_bound_words(row)),
    "cell": lambda row: printable(row.cell) if row.cell else UNKNOWN,
}
LEFT = {"run", "state", "model", "on", "precision", "bound", "cell"}
SAME_FOR_ALL: dict[str, Callable[[Result], str]] = {
    "model": lambda row: _name(row.model),
    "on": lambda row: f"on {_name(row.hardware)}",
    "devices": lambda row: f"{count_words(row.devices)} {'device' if row.devices == 1 else 'devices'}",
    "sequence": lambda row: f"sequence {count_words(row.sequence_tokens)}",
    "precision": lambda row: f"precision {_name(row.precision)}",
    "device cap": lambda row: f"device cap {size_words(row.device_cap_bytes)}",
    "host cap": lambda row: f"host cap {size_words(row.host_cap_bytes)}",
}
"""Columns that need not be, where all rows say the same: it stands above the table instead."""
GIVING_WAY = (
    *("cell", "padded", "host", "bound", "micro", "J/tok", "HFU", "p20–p80", "on", "precision", "error", "predicted"),
    *("memory", "host cap", "device cap", "devices", "batch", "tok/$", "MFU"),
)
MOST_NAMED = 6
"""Rows that one reason lists by name."""


def results_document(rows: Sequence[Result], columns: Sequence[str] | None = None) -> Document:
    """Results, a row each, reasons below; `columns` are fields of `Result` and never give way.

    With `columns` every measurement has its row, else those of a cell that went well have one.
    """
    every = [check_result(row) for row in rows]
    fields = columns or FIELDS
    return Document(
        title=TITLE if columns is None else "",
        blocks=_blocks(every) if columns is None else [_pick_columns(every, columns)],
        tables=_tables(every) if columns is None else [_pick_columns(every, columns)],
        rows=results_rows(rows, fields),
        fields=fields,
        faithful=True,
    )


def _pick_columns(rows: Sequence[Result], columns: Sequence[str]) -> Table:
    return Table(
        columns=columns,
        rows=[[field_words(row, name) for name in columns] for row in rows],
        left=[name for name in columns if kinds()[name] is str],
        styles=[STATE_STYLES.get(row.state, "red") for row in rows],
    )


def _blocks(rows: Sequence[Result]) -> Iterator[Block]:
    lines = lines_of(rows)
    sound = [line.row for line in lines]
    cells = {name: [words(row) for row in sound] for name, words in TABLE.items()}
    cells["tok/s"] = [line.rate_words(one) for line, one in zip(lines, cells["tok/s"], strict=True)]
    told = {name: column for name, column in cells.items() if set(column) != {UNKNOWN}}
    shared = [name for name in SAME_FOR_ALL if name in told and len(sound) > 1 and len(set(told[name])) == 1]
    if shared:
        yield Heading(" · ".join(SAME_FOR_ALL[name](sound[0]) for name in shared))
    kept = [name for name in told if name not in shared]
    yield Table(
        columns=kept,
        rows=list(zip(*(told[name] for name in kept), strict=True)),
        left=LEFT,
        giving_way=GIVING_WAY,
        styles=[STATE_STYLES.get(row.state, "red") for row in sound],
    )
    if reasons := _reasons(rows):
        yield Words("\n".join(reasons), indent=2)


def _reasons(rows: Sequence[Result]) -> list[str]:
    """Why rows are not ok, each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason or row.state not in GOOD:
            key = (row.state, printable(row.reason) if row.reason else "no reason is known")
            found.setdefault(key, []).append(printable(row.run or _title(row)))
    lines = []
    for (state, reason), names in found.items():
        listed = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" * (len(names) > MOST_NAMED))
        lines.append(f"{state}: {listed}: {reason}")
    return lines


def _title(row: Result) -> str:
    """What is told of a row that has no run."""
    counts = {"sequence": row.sequence_tokens, "batch": row.batch_sequences, "devices": row.devices}
    parts = [row.model or "a row", *(f"{noun} {count:,}" for noun, count in counts.items() if count is not None)]
    return " ".join(parts)


# -- results.md ------------------------------------------------------------------------------------------------------


def _plain_share(row: Result, share: float | None) -> str:
    """In per cent without the sign, as the published tables print it."""
    if row.state == ERROR:
        return ERROR
    return UNKNOWN if share is None else f"{100 * share:.2f}"


def _gib(size: int | None) -> str:
    return UNKNOWN if size is None else significant(size / BINARY_UNITS["GiB"], 4)


def precision_parts(precision: str | None) -> tuple[str, str]:
    """The number format, and what is said beyond it: `amp_bf16 DEFAULT`, `bf16-mixed`, `bf16,gradients=fp32`."""
    word = printable(precision) if precision else UNKNOWN
    place = next((index for index, sign in enumerate(word) if sign in " -," and index), len(word))
    return word[:place], word[place + 1 :].strip() or UNKNOWN


def _checkpointing(row: Result) -> str:
    if row.recompute is None:
        return UNKNOWN
    return "False" if row.recompute.removesuffix(OFFLOADED) == "none" else "True"


def _offload(row: Result) -> str:
    if row.recompute is None or row.source != "imported":
        return UNKNOWN
    return str(row.recompute.endswith(OFFLOADED))


def _text(value: str | None) -> str:
    return printable(value) if value else UNKNOWN


PUBLISHED: dict[str, OfResult] = {
    "Model": lambda row: _text(row.model),
    "SeqLen (T)": lambda row: count_words(row.sequence_tokens),
    "# GPUs": lambda row: count_words(row.devices),
    "GPU": lambda row: _text(row.hardware),
    "MFU": lambda row: _plain_share(row, row.mfu),
    "HFU": lambda row: _plain_share(row, row.hfu),
    "Model TFLOP": lambda row: (
        UNKNOWN if row.model_flops_per_s_per_device is None else rate_words(row.model_flops_per_s_per_device / 1e12, 4)
    ),
    "MicroBatchSize": lambda row: count_words(row.micro_batch_sequences),
    "GradAccum": lambda row: count_words(row.accumulation_steps),
    "GlobalBatchSize": lambda row: count_words(row.batch_sequences),
    "Throughput (S/s)": lambda row: rate_words(row.samples_per_s, 4),
    "Throughput (T/s)": lambda row: rate_words(row.tokens_per_s, 4),
    "Throughput (T/s/GPU)": lambda row: rate_words(row.tokens_per_s_per_device, 4),
    "GlobalBatchSize (T)": lambda row: count_words(row.batch_tokens),
    "Precision": lambda row: precision_parts(row.precision)[0],
    "MP Mode": lambda row: precision_parts(row.precision)[1],
    "Sharding Strategy": lambda row: _text(row.sharding),
    "Activation Checkpointing": _checkpointing,
    "Activation CPUOffload": _offload,
    "NumParams": lambda row: count_words(row.n_params),
}
"""The columns of llm-foundry's benchmark tables, by their names and in their order."""
PUBLISHED_RATE = "Throughput (T/s)"
FURTHER: dict[str, OfResult] = {
    "p20–p80 (T/s)": lambda row: spread_words(row.tokens_per_s_p20, row.tokens_per_s_p80),
    "Recompute": lambda row: _text(row.recompute),
    "Convention": lambda row: _text(row.convention),
    "Device cap (GiB)": lambda row: _gib(row.device_cap_bytes),
    "Host cap (GiB)": lambda row: _gib(row.host_cap_bytes),
    "Peak memory (GiB)": lambda row: _gib(row.device_bytes),
    "Host memory (GiB)": lambda row: _gib(row.host_bytes),
    "Energy (J/T)": lambda row: rate_words(row.energy_j_per_token, 4),
    "T per $": lambda row: rate_words(row.tokens_per_dollar, 4),
    "Predicted (T/s)": lambda row: rate_words(row.predicted_tokens_per_s, 4),
    "Error": lambda row: signed_share(row.prediction_error),
    "Bound": lambda row: _text(_bound_words(row)),
    "State": lambda row: row.state,
    "Cell": lambda row: _text(row.cell),
    "Run": lambda row: _text(row.run),
    "Reason": lambda row: _text(row.reason),
}
"""What those tables lack; a column that nobody fills is left out."""
ALWAYS = ("State",)
MARKDOWN_LEFT = {
    *("Model", "GPU", "Precision", "MP Mode", "Sharding Strategy", "Activation Checkpointing"),
    *("Activation CPUOffload", "Recompute", "Convention", "Bound", "State", "Cell", "Run", "Reason"),
}
NOTES = (
    "T is a token, S a sequence; rates are those of all devices, the median of the measured steps, with the rates that"
    " 20 % and 80 % of the steps stay below. Of several runs of a cell it is their median, ± half of the 95 %"
    " interval (Student's t over the runs).",
    "MFU and HFU are in per cent of the peak named below. HFU counts what is really made again in backward; that of"
    " imported rows is as published.",
    "Model TFLOP is TFLOP/s of one device, 10¹² each. Throughput keeps its digits: a slow row is not cut to 0.",
    "Error is that of the predicted speed against the measured one. A row in the state error claims more than its"
    " peak, so that no figure of it is to be trusted.",
)


def _tables(rows: Sequence[Result]) -> Iterator[Block]:
    """`results.md`: a table for each hardware and number format, then what MFU divides by, and where rows come from."""
    for heading, group in _groups(rows).items():
        lines = lines_of(group)
        further = {
            name: words
            for name, words in FURTHER.items()
            if name in ALWAYS or any(words(row) != UNKNOWN for row in group)
        }
        columns = {**PUBLISHED, **further}
        cells = {name: [words(line.row) for line in lines] for name, words in columns.items()}
        cells[PUBLISHED_RATE] = [line.rate_words(one) for line, one in zip(lines, cells[PUBLISHED_RATE], strict=True)]
        yield Table(
            title=heading, columns=tuple(columns), rows=list(zip(*cells.values(), strict=True)), left=MARKDOWN_LEFT
        )
    yield Items("", NOTES)
    yield Items("What MFU divides by", peak_lines(rows))
    yield Items("Provenance", provenance_lines(rows))


def heading_of(row: Result) -> str:
    """`H100 80GB BF16`, as the published tables are headed."""
    hardware, number_format = _text(row.hardware), precision_parts(row.precision)[0].removeprefix("amp_")
    is_model = any(sign.isdigit() for sign in hardware) and not any(sign in "/." for sign in hardware)
    device = hardware.replace("_", " ").upper() if is_model else hardware
    parts = [device if row.hardware else "unknown hardware", number_format.upper() if row.precision else ""]
    return " ".join(filter(None, parts))


def _groups(rows: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for row in rows:
        found.setdefault(heading_of(row), []).append(row)
    return found


CONVENTION_WORDS = {
    "causal": "half the square of attention, matrix products only",
    "palm": "6 FLOPs for each parameter and token, the full square of attention",
}


def peak_lines(rows: Sequence[Result]) -> list[str]:
    """What utilisation was divided by, and how FLOPs were counted: a line for each hardware, format and convention."""
    peaks: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row.mfu is not None:
            key = (heading_of(row), _text(row.peak_format), _text(row.convention))
            known = [row.peak_flops / row.devices / 1e12] if row.peak_flops and row.devices else []
            peaks.setdefault(key, []).extend(known)
    lines = []
    for (heading, number_format, how), found in peaks.items():
        # The peak of a processor is measured anew by every run.
        one = significant(found[0], 4) if found else ""
        words = one if len(set(found)) < 2 else spread_words(min(found), max(found))
        peak = f"{words} TFLOP/s of {number_format} a device" if found else "a peak that is not recorded"
        counted = f"{how}: {CONVENTION_WORDS[how]}" if how in CONVENTION_WORDS else how
        lines.append(f"{heading}: {peak}; FLOPs counted {counted}")
    return lines or ["no row has an MFU: the peak of its device is not known, or nothing was measured"]


ENVIRONMENT = {
    "card": "{}",
    "driver": "driver {}",
    "power_limit_w": "power cap {} W",
    "flopwise": "flopwise {}",
    "commit": "commit {}",
    "torch": "torch {}",
    "cuda": "CUDA {}",
    "python": "Python {}",
}
"""All that must be the same for two rows to have been made alike, and its words."""


def provenance_lines(rows: Sequence[Result]) -> list[str]:
    """A line for each environment that rows were made in: how many, when, on what, with what."""
    found: dict[tuple[object, ...], list[Result]] = {}
    for row in rows:
        found.setdefault((row.source, *(getattr(row, name) for name in ENVIRONMENT)), []).append(row)
    lines = []
    for (source, *values), group in found.items():
        dates = sorted(printable(row.started[:10]) for row in group if row.started)
        when = [] if not dates else [dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"]
        words = [
            template.format(significant(value) if isinstance(value, float) else printable(str(value)))
            for template, value in zip(ENVIRONMENT.values(), values, strict=True)
            if value
        ]
        known = [*when, *words] or ["versions, commit, driver and date are not recorded"]
        lines.append(f"{count_nouns(len(group), 'row')} {source}: {' · '.join(known)}")
    return lines or ["there are no rows"]


LARGEST = frozenset({"device_bytes", "host_bytes"})
"""Of several runs the most counts."""


@dataclass(frozen=True, slots=True)
class Line:
    """A row as people read it: one measurement, or the ok repeats of a cell together."""

    row: Result
    """Of repeats the medians."""
    runs: int = 1
    half_width: float | None = None
    """Of the 95 % interval of tokens/s: Student's t over the runs' medians; None: it cannot be told."""

    def rate_words(self, one: str) -> str:
        """`421,300 ± 900 (3 runs)`; `one` is what stands for a single run."""
        if self.runs < 2:
            return one
        rate = self.row.tokens_per_s
        told = one if rate is None or self.half_width is None else plus_minus(rate, self.half_width)
        return f"{told} ({self.runs:,} runs)"


def lines_of(rows: Sequence[Result]) -> list[Line]:
    """One line for each row, and one for all ok repeats of a cell, in the place of the first."""
    groups: dict[object, list[Result]] = {}
    rounds: dict[object, int] = {}
    for place, row in enumerate(rows):
        key: object = place
        if is_repeat(row):
            # The same repeat twice is of two stores, or of two files.
            same = (row.cell, row.source, row.hardware, row.repeat)
            rounds[same] = rounds.get(same, 0) + 1
            key = (row.cell, row.source, row.hardware, rounds[same])
        groups.setdefault(key, []).append(row)
    return [Line(group[0]) if len(group) == 1 else _join(group) for group in groups.values()]


def is_repeat(row: Result) -> bool:
    """Whether a row is one of a cell's measurements, and has a speed."""
    return row.state == "ok" and row.cell is not None and bool(row.repeat) and row.tokens_per_s is not None


def _join(rows: Sequence[Result]) -> Line:
    values: dict[str, Any] = {name: _common(name, [getattr(row, name) for row in rows]) for name in FIELDS}
    runs = sorted(row.run for row in rows if row.run)
    rate, predicted = values["tokens_per_s"], values["predicted_tokens_per_s"]
    row = replace(
        Result(**values),
        run=None if not runs else runs[0] if len(runs) == 1 else f"{runs[0]}…{runs[-1]}",
        prediction_error=predicted / rate - 1 if predicted and rate else None,
    )
    return Line(row, len(rows), _half_width(rows, rate))


def _common(name: str, values: Sequence[Any]) -> Any:  # noqa: ANN401 - as the field's type is
    """What stands for several values: of figures the middle, of sizes the most, of words those that are the same."""
    known = [value for value in values if value is not None]
    if not known or all(value == known[0] for value in known):
        return known[0] if known else None
    if name in LARGEST:
        return max(known)
    if all(isinstance(value, float) for value in known):
        return median(known)
    # Words and counts that differ are those of the first: `started`, `attempt`, `repeat`.
    return values[0]


def _half_width(rows: Sequence[Result], rate: float | None) -> float | None:
    from flopwise.store.statistics import Quantiles, relative_half_width

    known = [
        Quantiles(
            median=1 / row.tokens_per_s,
            p20=_inverse(row.tokens_per_s_p80),
            p80=_inverse(row.tokens_per_s_p20),
            steps=row.steps,
        )
        for row in rows
        if row.tokens_per_s
    ]
    share = relative_half_width(known)
    return None if share is None or rate is None else rate * share


def _inverse(rate: float | None) -> float | None:
    return 1 / rate if rate else None


def plus_minus(value: float, half_width: float) -> str:
    """`421,300 ± 900`: as many digits as the second number leaves, of which it has one, or two where it begins with 1.

    What cannot be told to any digit is a dash.
    """
    if not (math.isfinite(value) and math.isfinite(half_width)):
        return UNKNOWN
    if half_width <= 0:
        return f"{value:,.6g} ± 0"
    power = math.floor(math.log10(half_width))
    power -= half_width / 10.0**power < 2
    unit = 10.0**power
    places = max(0, -power)
    return f"{round(value / unit) * unit:,.{places}f} ± {math.ceil(half_width / unit - 1e-9) * unit:,.{places}f}"
