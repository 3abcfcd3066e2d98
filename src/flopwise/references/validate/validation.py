"""Predictions against a published table: errors, rank, memory verdicts, and folds to keep fitting and testing apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flopwise.references.validate.protocol import Case, Metric, Skipped

ERROR_WORDS: dict[Metric, str] = {
    "throughput": "error: |predicted ÷ measured − 1| of tokens per second",
    "time": "error: |predicted ÷ measured − 1| of seconds per step",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidatedRow:
    """One row of the table beside its prediction."""

    row: int
    size: str
    label: str
    measured_s: float | None
    predicted_s: float | None
    """None where there is no prediction."""
    error: float | None
    """As a share, never negative; None where one of the two times is missing."""
    measured_fits: bool | None
    predicted_fits: bool | None
    held_out: bool
    """Whether nothing was fitted to the row, or to any of its size, before it was predicted."""
    counted: bool
    """Whether its error is part of the figures; the others are listed aside."""
    low_s: float | None = None
    """The interval that is printed around the prediction; None where there is none."""
    high_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another way to predict the counted rows, and how far off it is."""

    name: str
    n: int
    median_error: float
    p90_error: float


def peer_of(name: str, errors: Sequence[float] | NDArray[np.float64]) -> Peer | None:
    """None where there is no error."""
    known = np.asarray(errors, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not len(known):
        return None
    return Peer(
        name=name, n=len(known), median_error=float(np.median(known)), p90_error=float(np.percentile(known, 90))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """How well a table was predicted. Errors are shares; they and the correlation are None without a row to count."""

    table: str
    protocol: str
    """What was fitted to what, what an error is, what is special about the table."""
    n: int
    """Rows with an error that is counted."""
    unpredicted: int
    """Rows that were measured and not predicted."""
    median_error: float | None
    mean_error: float | None
    p90_error: float | None
    """Nine rows of ten are closer."""
    max_error: float | None
    rank_correlation: float | None
    """Spearman's, of predicted and measured tokens per second and device: total throughput would mostly rank the number
    of devices."""
    oom_accuracy: float | None
    """Share of rows whose verdict on memory was right; None where no row has one."""
    false_fits: int
    """Rows said to fit that ran out of memory."""
    false_ooms: int
    """Rows said to run out of memory that ran."""
    rows: tuple[ValidatedRow, ...]
    skipped: tuple[Skipped, ...] = ()
    """Rows that could not be read, or not be predicted."""
    inside: float | None = None
    """Share of the counted rows whose measured step lies in its interval."""
    inside_without: float | None = None
    """The same with intervals of all tables but this one."""
    peers: tuple[Peer, ...] = ()
    anchored: tuple[Peer, ...] = ()
    """Every row predicted from another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeErrors:
    """The errors of one model size."""

    size: str
    n: int
    median_error: float
    max_error: float


def validate(
    table: str,
    cases: Sequence[Case],
    predicted_s: Sequence[float] | NDArray[np.float64],
    predicted_fits: Sequence[bool | None] | None = None,
    *,
    protocol: str,
    metric: Metric = "throughput",
    held_out: Sequence[bool] | NDArray[np.bool_] | None = None,
    counted: Sequence[bool] | NDArray[np.bool_] | None = None,
    skipped: Sequence[Skipped] = (),
) -> Validation:
    """Compare predicted seconds a step (NaN: no prediction) and memory verdicts with what a table printed.

    An error is |predicted ÷ measured − 1| of what the table publishes, the `metric`. So a prediction twice too fast is
    off by 100 % in a table of throughputs and by 50 % in one of times. `held_out` tells which rows were predicted
    without having been fitted to; without it, those that never may be. `counted`: rows of the figures; all without it.
    """
    verdicts = list(predicted_fits) if predicted_fits is not None else [None] * len(cases)
    apart = [bool(out) for out in held_out] if held_out is not None else [not case.fitted for case in cases]
    inside = [bool(one) for one in counted] if counted is not None else [True] * len(cases)
    rows = tuple(
        _row(case, float(seconds), verdict, metric, held_out=out, counted=one)
        for case, seconds, verdict, out, one in zip(cases, predicted_s, verdicts, apart, inside, strict=True)
    )
    rank = _throughput_rank(cases, rows)
    return replace(
        summarize(table, rows, protocol=f"{protocol}; {ERROR_WORDS[metric]}", rank=rank), skipped=tuple(skipped)
    )


def summarize(table: str, rows: tuple[ValidatedRow, ...], *, protocol: str, rank: float | None) -> Validation:
    """The figures of rows that are compared already."""
    errors = np.array([row.error for row in rows if row.error is not None and row.counted])
    judged = [row for row in rows if row.counted and row.measured_fits is not None and row.predicted_fits is not None]
    right = sum(row.measured_fits == row.predicted_fits for row in judged)
    return Validation(
        table=table,
        protocol=protocol,
        n=len(errors),
        unpredicted=sum(row.measured_s is not None and row.predicted_s is None for row in rows),
        median_error=float(np.median(errors)) if len(errors) else None,
        mean_error=float(np.mean(errors)) if len(errors) else None,
        p90_error=float(np.percentile(errors, 90)) if len(errors) else None,
        max_error=float(np.max(errors)) if len(errors) else None,
        rank_correlation=rank,
        oom_accuracy=right / len(judged) if judged else None,
        false_fits=sum(bool(row.predicted_fits) and not row.measured_fits for row in judged),
        false_ooms=sum(bool(row.measured_fits) and not row.predicted_fits for row in judged),
        rows=rows,
    )


def _row(
    case: Case, seconds: float, fits: bool | None, metric: Metric, *, held_out: bool, counted: bool
) -> ValidatedRow:
    # A time of 0 or infinity is no prediction either: it has no ratio to a measured one.
    predicted = seconds if math.isfinite(seconds) and seconds > 0 else None
    error = None
    if case.step_s is not None and predicted is not None:
        error = abs(predicted / case.step_s - 1) if metric == "time" else abs(case.step_s / predicted - 1)
    return ValidatedRow(
        row=case.row,
        size=case.size,
        label=case.label,
        measured_s=case.step_s,
        predicted_s=predicted,
        error=error,
        measured_fits=case.fits,
        predicted_fits=fits,
        held_out=held_out,
        counted=counted,
    )


def _throughput_rank(cases: Sequence[Case], rows: Sequence[ValidatedRow]) -> float | None:
    """Spearman's correlation of tokens per second and device, over the counted rows that have both times."""
    pairs = [
        (case.setup.batch_tokens / case.setup.parallel.devices / row.measured_s, row.measured_s / row.predicted_s)
        for case, row in zip(cases, rows, strict=True)
        if row.measured_s is not None and row.predicted_s is not None and row.counted
    ]
    return rate_rank(pairs)


def rate_rank(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's correlation of rates, from (measured, predicted over measured) of each."""
    measured, ratios = (np.array([pair[place] for pair in pairs]) for place in (0, 1))
    return rank_correlation(measured, measured * ratios)


def rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float | None:
    """Spearman's rank correlation, equal values sharing their mean rank; None where one side is all equal."""
    if len(first) < 2:
        return None
    ranks = [_ranks(values) - (len(values) - 1) / 2 for values in (first, second)]
    spread = math.sqrt(float(ranks[0] @ ranks[0]) * float(ranks[1] @ ranks[1]))
    return float(ranks[0] @ ranks[1]) / spread if spread else None


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank of each value from 0, ties at the mean of the places that they take up."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    first = np.cumsum(count) - count
    ranks: NDArray[np.float64] = (first + (count - 1) / 2)[place]
    return ranks


def errors_by_size(validation: Validation) -> tuple[SizeErrors, ...]:
    """Counted errors of each size, in the table's order; sizes without any are left out."""
    errors: dict[str, list[float]] = {}
    for row in validation.rows:
        if row.error is not None and row.counted:
            errors.setdefault(row.size, []).append(row.error)
    return tuple(
        SizeErrors(size=size, n=len(own), median_error=float(np.median(own)), max_error=max(own))
        for size, own in errors.items()
    )
