"""Whether one set of step times differs from another: medians, with intervals that know how step times scatter.

Three things make step times scatter. A step is much like the one before it, so blocks of neighbours are drawn and not
single steps. A few steps take far longer, so medians are compared. And a whole run is a little faster or slower than
the next one with the same settings (clocks, heat, where its memory lies), which no number of steps shows: with several
runs on a side the runs are the units, with one run on each their scatter is assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flopwise.records.measurement import RunRecord, StepRecord

Seconds = NDArray[np.float64]
Verdict = Literal["slower", "faster", "same", "unclear"]

LEAST_WARM_UP = 2
"""Steps that are always left out, where there are more than twice as many."""
WINDOW = 5
"""Steps whose median must have settled."""
SETTLED = 0.02
"""How far, relatively, the median may still be from where it stays."""
TRACED_STEPS, TRACED_AFTER = 3, 2
"""The steps that `--profile` traces where it is not told how many, and those that it lets pass before."""

DRAWS = 1000
MOST_DRAWN = 1000
"""Steps of one draw; of longer runs the scatter is scaled down."""
RUN_SCATTER = 0.005
SCATTER_OF_STEPS = 0.5
"""Standard deviation of a run's median over runs where it cannot be seen: relatively the first, or the second times
that of its steps, whichever is more. A machine whose steps scatter has slower causes of scatter too."""
LEAST_STEPS = 3
"""Of fewer the scatter cannot be told."""
SEED = 20_261_115
NORMAL_975 = 1.96
STUDENT_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Of 1, 2, … degrees of freedom."""
LARGEST_LOG = 50.0
"""Beyond it a change is no number that says anything."""
NORMAL_80 = 0.8416
MEDIAN_ERROR = 1.2533
"""Standard error of a normal sample's median, over that of its mean."""


# -- which steps count -----------------------------------------------------------------------------------------------


def warm_up_steps(seconds: Sequence[float] | Seconds) -> int:
    """How many steps at the start are warm-up: two at least, then all before the first window that has settled.

    A window of five steps has settled when its median is as far from the second half's median as 2 % or as the second
    half's own p20 to p80, whichever is more. At most half of the steps are left out, and of four or fewer the first.
    """
    times = np.asarray(seconds, dtype=np.float64)
    if len(times) <= 2 * LEAST_WARM_UP:
        return min(1, max(0, len(times) - 1))
    most = len(times) // 2
    later = times[most:]
    goal, low, high = (float(value) for value in np.quantile(later, (0.5, 0.2, 0.8)))
    tolerance = max(SETTLED * goal, high - low)
    for count in range(LEAST_WARM_UP, most):
        if abs(float(np.median(times[count : count + WINDOW])) - goal) <= tolerance:
            return count
    return max(LEAST_WARM_UP, most)


def traced_steps(record: RunRecord) -> range:
    """Steps, counted from 1, that a profiler may have slowed down."""
    request = record.request
    if not request.get("profile"):
        return range(0)
    done = record.resumed_after
    left = record.training.steps - done
    steps = max(1, min(_whole(request.get("profile_steps")) or TRACED_STEPS, left - 1))
    first = done + max(1, min(TRACED_AFTER, left - steps)) + 1
    return range(first, first + steps)


def _whole(value: Any) -> int:  # noqa: ANN401 - of a free table
    return value if isinstance(value, int) else 0


def steady_seconds(record: RunRecord, steps: Sequence[StepRecord]) -> Seconds:
    """The times of a run's steps that count: of its last process, not traced, behind the warm-up."""
    begun, traced = record.resumed_after, traced_steps(record)
    times = [step.step_s for step in steps if step.step > begun and step.step not in traced and step.step_s > 0]
    every = [step.step_s for step in steps if step.step > begun and step.step_s > 0]
    # A run that was traced all along has no others.
    chosen = np.asarray(times if len(times) > LEAST_WARM_UP else every, dtype=np.float64)
    return chosen[warm_up_steps(chosen) :]


# -- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """What is left of a run's step times in a row of results."""

    median: float
    p20: float | None
    p80: float | None
    steps: int | None


Sample = Seconds | Quantiles


def block_steps(seconds: Seconds) -> int:
    """The length of blocks that keep what neighbours have in common: (2ρ / (1 − ρ²))^⅔ · n^⅓, ρ that of the ranks.

    Carlstein's length for a process whose neighbours correlate by ρ. ρ is taken as 0.25 at least, and there are always
    four blocks or more.
    """
    count = len(seconds)
    if count < 8:
        return 1
    ranks = np.argsort(np.argsort(seconds)).astype(np.float64)
    ranks -= ranks.mean()
    correlation = float((ranks[1:] * ranks[:-1]).sum() / (ranks * ranks).sum())
    correlation = min(0.95, max(0.25, correlation))
    length = float((2 * correlation / (1 - correlation**2)) ** (2 / 3) * count ** (1 / 3))
    return max(1, min(round(length), count // 4))


def median_draws(seconds: Seconds, generator: np.random.Generator) -> Seconds:
    """Medians of samples that are put together from blocks of neighbours."""
    count = len(seconds)
    size, length = min(count, MOST_DRAWN), block_steps(seconds)
    blocks = -(-size // length)
    starts = generator.integers(0, count - length + 1, (DRAWS, blocks))
    places = (starts[:, :, None] + np.arange(length)).reshape(DRAWS, -1)[:, :size]
    drawn = np.median(seconds[places], axis=1)
    middle = float(np.median(seconds))
    # Samples of fewer than all steps scatter more than all would; few blocks scatter less than they should.
    return np.asarray(middle + (drawn - middle) * (size / count) ** 0.5 * _few(-(-count // length)))


def relative_half_width(runs: Sequence[Quantiles]) -> float | None:
    """Half of the 95 % interval of what several runs of the same settings have in common, relative to it.

    Student's t over their medians, whose scatter is never less than the steps within them tell; None of one run.
    """
    if len(runs) < 2:
        return None
    centres = np.array([_middle(run) for run in runs])
    known = [error**2 for run in runs if (error := _quantile_error(run)) is not None]
    variance = max(float(np.var(centres, ddof=1)), sum(known) / len(known) if known else 0.0)
    return exp(min(_student(len(runs) - 1) * (variance / len(runs)) ** 0.5, LARGEST_LOG)) - 1


def _few(units: int) -> float:
    """By how much the scatter of a mean of few units, drawn with replacement, falls short of its interval."""
    if units < 2:
        return 1.0
    return float(_student(units - 1) / NORMAL_975 * (units / (units - 1)) ** 0.5)


def _student(freedom: int) -> float:
    return STUDENT_975[freedom - 1] if freedom <= len(STUDENT_975) else NORMAL_975 + 2.4 / freedom


def _middle(sample: Sample) -> float:
    return log(sample.median if isinstance(sample, Quantiles) else float(np.median(sample)))


def _log_draws(sample: Sample, generator: np.random.Generator) -> Seconds | None:
    if not isinstance(sample, Quantiles):
        return np.log(np.maximum(median_draws(sample, generator), 1e-12)) if len(sample) >= LEAST_STEPS else None
    error = _quantile_error(sample)
    return None if error is None else np.asarray(log(sample.median) + generator.normal(0.0, 1.0, DRAWS) * error)


def _quantile_error(sample: Quantiles) -> float | None:
    """Of a run's log median, as its steps tell."""
    if sample.p20 is None or sample.p80 is None or (sample.steps or 0) < LEAST_STEPS:
        return None
    assert sample.steps is not None
    return float(_spread(sample) * MEDIAN_ERROR / float(sample.steps) ** 0.5 * _few(sample.steps))


# -- two sides -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Of the median step time, from one side to the other; above 0: the second one is slower."""

    relative: float
    low: float | None
    """Of the 95 % interval; None: too little is known."""
    high: float | None
    runs: tuple[int, int]
    """On each side."""
    basis: Literal["runs", "steps", "quantiles", "unknown"]
    """What the interval rests on. runs: several on a side. steps: one run on each, whose scatter is assumed.
    quantiles: of some run p20 and p80 alone."""

    def verdict(self, threshold: float) -> Verdict:
        """In a word.

        slower: the change is at least the threshold and the whole interval is above 0; faster, likewise. same: the
        whole interval is within the threshold. Else unclear.
        """
        if self.low is None or self.high is None:
            return "unclear"
        if self.relative >= threshold and self.low > 0:
            return "slower"
        if self.relative <= -threshold and self.high < 0:
            return "faster"
        return "same" if -threshold < self.low and self.high < threshold else "unclear"


def change(before: Sequence[Sample], after: Sequence[Sample]) -> Change:
    """How the median step time changed, each side a list of runs with at least one; the same answer every time.

    With more than one run on a side the runs are the units: Student's t over their medians, whose scatter is taken to
    be the same on both sides and never less than the steps within them tell. With one run on each side, blocks of its
    steps are drawn, and the scatter of runs is assumed.
    """
    assert before
    assert after
    generator = np.random.default_rng(SEED)
    sides = [_side(samples, generator) for samples in (before, after)]
    counts = (len(before), len(after))
    relative = exp(sides[1].centre - sides[0].centre) - 1
    freedom = sum(counts) - 2
    if freedom:
        bounds: tuple[float, float] | None = _bounds_of_runs(sides, freedom)
    else:
        bounds = _bounds_of_steps(sides, generator)
    if bounds is None:
        return Change(relative=relative, low=None, high=None, runs=counts, basis="unknown")
    low, high = (exp(min(bound, LARGEST_LOG)) - 1 for bound in bounds)
    has_rows = any(isinstance(sample, Quantiles) for sample in (*before, *after))
    basis: Literal["runs", "steps", "quantiles"] = "quantiles" if has_rows else "runs" if freedom else "steps"
    return Change(relative=relative, low=low, high=high, runs=counts, basis=basis)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    centres: Seconds
    """Log medians of its runs."""
    draws: Seconds | None
    """Of its first run's log median."""
    error: float
    """Of a run's log median, as the steps within it tell; 0 where they cannot."""
    scatter: float
    """Of runs, assumed."""

    @property
    def centre(self) -> float:
        return float(self.centres.mean())


def _side(samples: Sequence[Sample], generator: np.random.Generator) -> _Side:
    within = [_log_draws(sample, generator) for sample in samples]
    known = [float(np.var(draws)) for draws in within if draws is not None]
    return _Side(
        centres=np.array([_middle(sample) for sample in samples]),
        draws=within[0],
        error=(sum(known) / len(known)) ** 0.5 if known else 0.0,
        scatter=max(RUN_SCATTER, SCATTER_OF_STEPS * _spread(samples[0])),
    )


def _spread(sample: Sample) -> float:
    """Relative standard deviation of steps, from p20 and p80: outliers have no part in it."""
    if not isinstance(sample, Quantiles):
        low, middle, high = (float(value) for value in np.quantile(sample, (0.2, 0.5, 0.8)))
        return (high - low) / (2 * NORMAL_80) / middle
    if sample.p20 is None or sample.p80 is None:
        return 0.0
    return max(0.0, sample.p80 - sample.p20) / (2 * NORMAL_80) / sample.median


def _bounds_of_runs(sides: Sequence[_Side], freedom: int) -> tuple[float, float]:
    squares = sum(float(((side.centres - side.centre) ** 2).sum()) for side in sides)
    variance = squares / freedom
    error = sum(max(variance, side.error**2) / len(side.centres) for side in sides) ** 0.5
    change_, half = sides[1].centre - sides[0].centre, _student(freedom) * error
    return change_ - half, change_ + half


def _bounds_of_steps(sides: Sequence[_Side], generator: np.random.Generator) -> tuple[float, float] | None:
    before, after = (side.draws for side in sides)
    if before is None or after is None:
        return None
    scatter = [generator.normal(0.0, side.scatter, DRAWS) for side in sides]
    low, high = np.quantile(after + scatter[1] - before - scatter[0], (0.025, 0.975))
    return float(low), float(high)
