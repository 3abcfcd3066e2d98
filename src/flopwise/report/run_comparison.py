"""Two sets of results side by side: joined by cell, each change with its interval, and a word for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import Any

import numpy as np

from flopwise.base.units import significant
from flopwise.report.document import Block, Document, Heading, Items, Table, Words
from flopwise.report.words import UNKNOWN, count_nouns, printable, rate_words, safe, signed_share
from flopwise.store.results import ERROR, Result
from flopwise.store.rows import UNREADABLE
from flopwise.store.statistics import Change, Quantiles, Sample, change

MEASURED = "ok"
"""The state of rows whose speed counts."""
BAD = frozenset({"oom", "timeout", "failed", "interrupted", UNREADABLE, ERROR})
"""States that are worse than a speed."""
MISSING = "missing"
"""Verdict of a cell that has a speed before, and after it neither one nor a failure."""
WORSE = ("slower", "worse")
"""Verdicts that a comparison fails for."""
STYLES = {
    "slower": "red",
    "worse": "red",
    MISSING: "red",
    "faster": "green",
    "better": "green",
    "unclear": "yellow",
    "same": "",
    "not measured": "",
    "only before": "",
    "only after": "",
}
VERDICTS = tuple(STYLES)
"""In the order in which they are told."""
SETTINGS = (
    "model",
    "hardware",
    "devices",
    "sequence_tokens",
    "batch_sequences",
    "micro_batch_sequences",
    "precision",
    "optimizer",
    "device_cap_bytes",
    "host_cap_bytes",
)
"""What tells cells apart."""
MADE_WITH = ("hardware", "card", "power_limit_w", "driver", "cuda", "torch", "python", "flopwise", "commit")
"""What may differ between two sides without being the change that is looked for."""
LONGEST_NAME = 24
LONGEST_VALUE = 40
COMMIT_DIGITS = 12
MOST_TOLD = 10.0
MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A row, with the times of its steps as far as they are known."""

    row: Result
    sample: Sample | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CellChange:
    """One cell on both sides, or on one."""

    cell: str | None
    settings: Result
    """A row of it, for what was run."""
    before_state: str | None
    after_state: str | None
    before_tokens_per_s: float | None
    after_tokens_per_s: float | None
    change: Change | None
    """Of the median time of a token; None where a side has none."""
    verdict: str
    same_runs: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Everything that `flopwise compare` says."""

    names: tuple[str, str]
    threshold: float
    cells: tuple[CellChange, ...]
    differences: dict[str, tuple[str, str]]
    """What the sides were made with, where that differs."""
    notes: tuple[str, ...]
    allow_missing: bool = False
    """Cells that nobody has measured again are no reason to fail."""

    @property
    def counts(self) -> Counter[str]:
        return Counter(cell.verdict for cell in self.cells)

    @property
    def is_worse(self) -> bool:
        failing = WORSE if self.allow_missing else (*WORSE, MISSING)
        return any(self.counts[verdict] for verdict in failing)


# -- from rows to changes --------------------------------------------------------------------------------------------


def quantiles_of(row: Result) -> Quantiles | None:
    """What a row itself knows of its steps."""
    if row.step_s is None or not row.step_s > 0:
        return None
    return Quantiles(median=row.step_s, p20=row.step_s_p20, p80=row.step_s_p80, steps=row.steps)


def compare_runs(
    before: Sequence[Measured],
    after: Sequence[Measured],
    *,
    names: tuple[str, str],
    threshold: float,
    allow_missing: bool = False,
) -> Comparison:
    """Join two sides by cell; several rows of a cell are its repeats.

    Two single cells are compared whatever they are.
    """
    sides = [_by_cell(side) for side in (before, after)]
    notes = []
    if not sides[0].keys() & sides[1].keys() and len(sides[0]) == len(sides[1]) == 1:
        notes.append(_other_settings(before[0].row, after[0].row))
        sides[1] = {next(iter(sides[0])): next(iter(sides[1].values()))}
    keys = list(dict.fromkeys([*sides[0], *sides[1]]))
    found = [_cell_change(sides[0].get(key, ()), sides[1].get(key, ()), threshold) for key in keys]
    # What calls for a look comes first; among those alike the order of the cells stays.
    cells = tuple(sorted(found, key=lambda cell: VERDICTS.index(cell.verdict)))
    notes += _notes(cells)
    rows = [[each.row for key in side if key in keys for each in side[key]] for side in sides]
    return Comparison(
        names=names,
        threshold=threshold,
        cells=cells,
        differences=_differences(*rows),
        notes=tuple(notes),
        allow_missing=allow_missing,
    )


def _by_cell(side: Sequence[Measured]) -> dict[object, list[Measured]]:
    found: dict[object, list[Measured]] = {}
    for each in side:
        # Tables from elsewhere have no cells; their settings stand for them.
        key = each.row.cell or tuple(getattr(each.row, name) for name in SETTINGS)
        found.setdefault(key, []).append(each)
    return found


def _cell_change(before: Sequence[Measured], after: Sequence[Measured], threshold: float) -> CellChange:
    settings = (*before, *after)[0].row
    states = [_state(side) for side in (before, after)]
    samples = [_per_token(side) for side in (before, after)]
    found = change(*samples) if samples[0] and samples[1] else None
    verdict = found.verdict(threshold) if found else _state_verdict(*states)
    if found and verdict != "slower" and _ok_share(after) < _ok_share(before):
        verdict = "worse"
    rates = [_rate(side) for side in samples]
    runs = [
        {(each.row.run, each.row.started, each.row.step_s) for each in side if each.row.run} for side in (before, after)
    ]
    return CellChange(
        cell=settings.cell,
        settings=settings,
        before_state=states[0],
        after_state=states[1],
        before_tokens_per_s=rates[0],
        after_tokens_per_s=rates[1],
        change=found,
        verdict=verdict,
        same_runs=bool(runs[0]) and runs[0] == runs[1],
    )


def _state(side: Sequence[Measured]) -> str | None:
    """Of a cell: it was measured if one of its repeats was; None where a side does not have it."""
    states = [each.row.state for each in side]
    return next((state for state in states if state == MEASURED), states[-1] if states else None)


def _ok_share(side: Sequence[Measured]) -> float:
    """Of the repeats that came to an end, how many went well."""
    ended = [each.row.state == MEASURED for each in side if each.row.state == MEASURED or each.row.state in BAD]
    return sum(ended) / len(ended) if ended else 0.0


def _state_verdict(before: str | None, after: str | None) -> str:
    """Where at least one side has no speed."""
    if before == MEASURED:
        return "worse" if after in BAD else MISSING if after != MEASURED else "not measured"
    if before is None or after is None:
        return "only after" if before is None else "only before"
    if after == MEASURED:
        return "better" if before in BAD else "not measured"
    return "same" if before == after and before in BAD else "not measured"


def _per_token(side: Sequence[Measured]) -> list[Sample]:
    """Seconds of a token: where the largest batch was looked for, two sides may have found different ones."""
    found: list[Sample] = []
    for each in side:
        sample, tokens = each.sample, _tokens(each.row)
        # Figures of a damaged row may multiply to infinity, and seconds of a token then to nothing.
        if sample is None or each.row.state != MEASURED or not isfinite(tokens):
            continue
        if isinstance(sample, Quantiles):
            low, high = (None if value is None else value / tokens for value in (sample.p20, sample.p80))
            found.append(Quantiles(median=sample.median / tokens, p20=low, p80=high, steps=sample.steps))
        elif len(sample):
            found.append(sample / tokens)
    return found


def _tokens(row: Result) -> float:
    """Of a step, without the padding, as tokens/s has them."""
    if row.tokens_per_s and row.step_s:
        return row.tokens_per_s * row.step_s
    return float(row.batch_tokens or 1)


def _rate(samples: Sequence[Sample]) -> float | None:
    """Tokens a second, of all repeats."""
    medians = [each.median if isinstance(each, Quantiles) else float(np.median(each)) for each in samples]
    return exp(-sum(log(median) for median in medians) / len(medians)) if medians else None


def _other_settings(before: Result, after: Result) -> str:
    differing = [
        f"{name} {_value_words(getattr(before, name))} → {_value_words(getattr(after, name))}"
        for name in SETTINGS
        if getattr(before, name) != getattr(after, name)
    ]
    return f"the two are different cells: {', '.join(differing) or 'the model’s shape or a cap'}"


def _notes(cells: Sequence[CellChange]) -> list[str]:
    notes = []
    missing = sum(cell.verdict == MISSING for cell in cells)
    if missing:
        notes.append(
            f"{missing:,} of {len(cells):,} cells ran before and were not measured again; --allow-missing lets "
            "that pass"
        )
    same = sum(cell.same_runs for cell in cells)
    if same:
        notes.append(
            f"{same:,} of {len(cells):,} cells are the same runs on both sides; measure again with --force, or into "
            "another --store"
        )
    bases = Counter(cell.change.basis for cell in cells if cell.change)
    if bases["steps"]:
        notes.append("with one run on each side the scatter between runs is assumed; repeats measure it")
    if bases["quantiles"]:
        notes.append("without the steps of its runs an interval comes from p20, p80 and the number of steps")
    if bases["unknown"]:
        notes.append(f"{bases['unknown']:,} cells have too few steps for an interval")
    return notes


def _differences(before: Sequence[Result], after: Sequence[Result]) -> dict[str, tuple[str, str]]:
    found = {}
    for name in MADE_WITH:
        values = [dict.fromkeys(getattr(row, name) for row in side) for side in (before, after)]
        known = [[value for value in side if value is not None] for side in values]
        if known[0] and known[1] and set(known[0]) != set(known[1]):
            longest = COMMIT_DIGITS if name == "commit" else LONGEST_VALUE
            found[name] = (_some(known[0], longest), _some(known[1], longest))
    return found


def _some(values: Iterable[object], longest: int) -> str:
    named = [_value_words(value)[:longest] for value in values]
    return ", ".join(named[:MOST_NAMED]) + (f", … ({len(named)})" if len(named) > MOST_NAMED else "")


def _value_words(value: object) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, float):
        return significant(value)
    return f"{value:,}" if isinstance(value, int) else printable(str(value)[:LONGEST_VALUE])


# -- words -----------------------------------------------------------------------------------------------------------

LABELS: dict[str, Callable[[Result], object]] = {
    "model": lambda row: row.model,
    "hardware": lambda row: row.hardware,
    "devices": lambda row: row.devices,
    "seq": lambda row: row.sequence_tokens,
    "batch": lambda row: row.batch_sequences,
    "precision": lambda row: row.precision,
}
RESULT_COLUMNS = ("before tok/s", "after tok/s", "time", "95 % interval", "verdict")


def percent_words(share: float | None) -> str:
    """`+5.1 %`, `−0.3 %`; what is beyond reading is `over +1,000 %`."""
    if share is None:
        return UNKNOWN
    if share > MOST_TOLD:
        return f"over +{100 * MOST_TOLD:,.0f} %"
    words = signed_share(share)
    return words[1:] if words[1:] == "0.0 %" else words


def _interval_words(found: Change | None) -> str:
    if found is None or found.low is None or found.high is None:
        return UNKNOWN
    return f"{percent_words(found.low).removesuffix(' %')} to {percent_words(found.high)}"


def _table(comparison: Comparison) -> Table:
    """A row for each cell: settings that are the same in all are left out, but for the model."""
    kept = {
        label: get
        for label, get in LABELS.items()
        if label == "model" or len({get(cell.settings) for cell in comparison.cells}) > 1
    }
    rows = []
    for cell in comparison.cells:
        before = printable(cell.before_state or UNKNOWN)
        after = printable(cell.after_state or UNKNOWN)
        rows.append(
            [
                printable(cell.cell or UNKNOWN),
                *(safe(_value_words(get(cell.settings)), LONGEST_NAME) for get in kept.values()),
                before if cell.before_tokens_per_s is None else rate_words(cell.before_tokens_per_s),
                after if cell.after_tokens_per_s is None else rate_words(cell.after_tokens_per_s),
                percent_words(cell.change.relative if cell.change else None),
                _interval_words(cell.change),
                cell.verdict,
            ]
        )
    # A model that all have tells no row from another.
    same = ("model",) if len({cell.settings.model for cell in comparison.cells}) == 1 else ()
    return Table(
        columns=["cell", *kept, *RESULT_COLUMNS],
        rows=rows,
        left={"cell", "model", "hardware", "precision", "verdict"},
        giving_way=("cell", *same, "precision", "hardware", "batch", "devices"),
        styles=[STYLES.get(cell.verdict, "") for cell in comparison.cells],
    )


def summary_words(comparison: Comparison) -> str:
    """`12 cells: 1 slower, 11 same`."""
    counts = comparison.counts
    told = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in VERDICTS if counts[verdict])
    return f"{count_nouns(len(comparison.cells), 'cell')}: {told}"


def rule_words(comparison: Comparison) -> str:
    """What the words of the table mean."""
    limit = f"{100 * comparison.threshold:g} %"
    return (
        f"time: of a token, its median, after against before. slower: by {limit} or more, the whole interval above 0; "
        f"same: the whole interval within {limit}; worse: it ran before, and fails now or more often; "
        f"{MISSING}: it ran before and was not measured again."
    )


def comparison_document(comparison: Comparison) -> Document:
    """A row for each cell, how many there are of each verdict, and what the sides differ in beside it."""
    heading = Heading(" → ".join(printable(name) for name in comparison.names))
    table, summary = _table(comparison), Words(summary_words(comparison))
    differences = [f"{name}: {before} → {after}" for name, (before, after) in comparison.differences.items()]
    noted = [Items("", [*differences, *comparison.notes])] if differences or comparison.notes else []
    rest: list[Block] = [*noted, Words(rule_words(comparison), "dim")]
    return Document(
        blocks=[heading, table, summary, *rest],
        # Who reads an issue reads the sum first.
        tables=[heading, summary, table, *rest],
        rows=_records(comparison),
        told={"csv": [f"note: {line}" for line in (summary_words(comparison), *comparison.notes)]},
    )


# -- for programs ----------------------------------------------------------------------------------------------------


def _records(comparison: Comparison) -> list[dict[str, Any]]:
    """A row for each cell, at full precision."""
    return [
        {
            "cell": cell.cell,
            **{name: getattr(cell.settings, name) for name in SETTINGS},
            "before_state": cell.before_state,
            "after_state": cell.after_state,
            "before_runs": cell.change.runs[0] if cell.change else None,
            "after_runs": cell.change.runs[1] if cell.change else None,
            "before_tokens_per_s": cell.before_tokens_per_s,
            "after_tokens_per_s": cell.after_tokens_per_s,
            "time_change": cell.change.relative if cell.change else None,
            "time_change_low": cell.change.low if cell.change else None,
            "time_change_high": cell.change.high if cell.change else None,
            "interval_from": cell.change.basis if cell.change else None,
            "verdict": cell.verdict,
        }
        for cell in comparison.cells
    ]


def comparison_record(comparison: Comparison) -> dict[str, object]:
    """With what the sides were made with, and whether any cell is worse."""
    return {
        "before": comparison.names[0],
        "after": comparison.names[1],
        "threshold": comparison.threshold,
        "worse": comparison.is_worse,
        "counts": {verdict: comparison.counts[verdict] for verdict in VERDICTS},
        "cells": _records(comparison),
        "differences": {name: list(sides) for name, sides in comparison.differences.items()},
        "notes": list(comparison.notes),
    }
