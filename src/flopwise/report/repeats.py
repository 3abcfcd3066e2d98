"""Repeats of a cell as one line: the median of their speeds, and how far off it may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from flopwise.report.words import UNKNOWN
from flopwise.store.results import FIELDS, Result

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
    return [Line(group[0]) if len(group) == 1 else _joined(group) for group in groups.values()]


def is_repeat(row: Result) -> bool:
    """Whether a row is one of a cell's measurements, and has a speed."""
    return row.state == "ok" and row.cell is not None and bool(row.repeat) and row.tokens_per_s is not None


def _joined(rows: Sequence[Result]) -> Line:
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
