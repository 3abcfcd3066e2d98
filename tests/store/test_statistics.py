"""Step times compared: what is warm-up, how wide intervals are, and how often a slow-down is seen or made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.setup.training import Training
from flopwise.store.runs import read_steps
from flopwise.store.statistics import (
    DRAWS,
    RUN_SCATTER,
    Change,
    Quantiles,
    Sample,
    Seconds,
    block_steps,
    change,
    median_draws,
    relative_half_width,
    steady_seconds,
    traced_steps,
    warm_up_steps,
)
from tests.support.run_stores import a_record, write_run

THRESHOLD = 0.03
PAIRS = 100


def steps_of(generator: np.random.Generator, count: int, *, slow: float = 0.0, noise: float = 0.01) -> Seconds:
    """A run: neighbours alike by 0.5, an offset of its own of 0.5 %, one step in fifty far longer."""
    levels, level = np.empty(count), float(generator.normal())
    for place, fresh in enumerate(generator.normal(0.0, 0.75**0.5, count)):
        level = 0.5 * level + fresh
        levels[place] = level
    late = np.where(generator.random(count) < 0.02, 1 + generator.exponential(0.5, count), 1.0)
    return np.asarray((1 + slow) * (1 + 0.005 * generator.normal()) * (1 + noise * levels) * late)


def alarm_share(slow: float, *, runs: int, pairs: int = PAIRS, count: int = 30) -> float:
    generator = np.random.default_rng([runs, round(slow * 1000)])
    found = [
        change(
            [steps_of(generator, count) for _ in range(runs)],
            [steps_of(generator, count, slow=slow) for _ in range(runs)],
        )
        for _ in range(pairs)
    ]
    return sum(each.verdict(THRESHOLD) == "slower" for each in found) / pairs


# -- rates: bounds are three standard errors beyond the rates that are claimed --------------------------


@pytest.mark.parametrize("runs", [1, 3])
def test_a_planted_slow_down_of_five_per_cent_is_found(runs: int) -> None:
    claimed = 0.9
    assert alarm_share(0.05, runs=runs) >= claimed - 3 * (claimed * (1 - claimed) / PAIRS) ** 0.5


@pytest.mark.parametrize("runs", [1, 3])
def test_one_per_cent_is_not_cried_about(runs: int) -> None:
    claimed = 0.05
    assert alarm_share(0.01, runs=runs) <= claimed + 3 * (claimed * (1 - claimed) / PAIRS) ** 0.5


@pytest.mark.parametrize("runs", [1, 3])
def test_no_change_is_hardly_ever_called_slower(runs: int) -> None:
    assert alarm_share(0.0, runs=runs) <= 0.02


@pytest.mark.parametrize("runs", [1, 2, 4])
def test_intervals_hold_the_true_change(runs: int) -> None:
    generator = np.random.default_rng(runs)
    held = 0
    for _ in range(80):
        sides = [[steps_of(generator, 30, slow=slow) for _ in range(runs)] for slow in (0.0, 0.02)]
        found = change(*sides)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.02 <= found.high
    # 95 % are meant; 70 of 80 is three standard errors below.
    assert held >= 70


def test_single_steps_would_promise_too_much() -> None:
    """Where neighbours are alike, blocks make the interval as wide as new runs really scatter."""
    generator = np.random.default_rng(3)
    correlation, count = 0.8, 200

    def run() -> Seconds:
        levels, level = np.empty(count), float(generator.normal())
        for place, fresh in enumerate(generator.normal(0.0, (1 - correlation**2) ** 0.5, count)):
            level = correlation * level + fresh
            levels[place] = level
        return np.asarray(1 + 0.01 * levels)

    true_scatter = float(np.std([np.median(run()) for _ in range(400)]))
    drawn = np.mean([np.std(median_draws(run(), generator)) for _ in range(20)])
    sample = run()
    singly = np.std(np.median(sample[generator.integers(0, count, (DRAWS, count))], axis=1))
    assert 0.75 * true_scatter < drawn < 1.4 * true_scatter
    assert singly < 0.6 * true_scatter


# -- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "dropped"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([9.0], 0, id="the only one"),
        pytest.param([9.0, 1.0, 1.0, 1.0], 1, id="of a few the first"),
        pytest.param([9.0, *[1.0] * 9], 2, id="at least two"),
        pytest.param([1.0] * 20, 2, id="even where nothing warms up"),
        pytest.param([3.0] * 6 + [1.0] * 30, 4, id="until the median of five has settled"),
        pytest.param([0.9] * 6 + [1.0] * 30, 4, id="faster at first: before the device is hot"),
        pytest.param([1.01] * 6 + [1.0] * 30, 2, id="two per cent are nothing"),
        pytest.param(list(range(41, 1, -1)), 17, id="a drift: as far as the second half itself goes"),
        pytest.param([2.0, 1.0] * 10, 2, id="scatter is not warm-up"),
    ],
)
def test_warm_up(times: Sequence[float], dropped: int) -> None:
    assert warm_up_steps(times) == dropped


@given(st.lists(st.floats(1e-6, 1e6), max_size=60))
def test_never_more_than_half_is_warm_up(times: list[float]) -> None:
    dropped = warm_up_steps(times)
    if len(times) > 4:
        assert 0 <= dropped <= max(2, len(times) // 2)
    else:
        assert dropped == min(1, max(0, len(times) - 1))


def test_one_odd_step_early_is_not_warm_up() -> None:
    assert warm_up_steps([1.0, 1.0, 1.0, 5.0, 1.0, 1.0, *[1.0] * 20]) == 2


def test_blocks_grow_with_what_neighbours_have_in_common() -> None:
    generator = np.random.default_rng(0)
    apart = generator.normal(1.0, 0.1, 400)
    alike = np.cumsum(generator.normal(0.0, 0.1, 400)) + 10
    assert 3 <= block_steps(apart) <= 6
    assert block_steps(alike) > 3 * block_steps(apart)
    assert block_steps(apart[:7]) == 1
    assert block_steps(alike[:16]) <= 4


@pytest.mark.parametrize("count", [30, 100, 4000])
def test_medians_are_drawn_as_widely_as_they_scatter(count: int) -> None:
    """Steps that have nothing in common: the standard error of a normal median is 1.2533 σ / √n."""
    generator = np.random.default_rng(count)
    widths = []
    for _ in range(12):
        seconds = generator.normal(2.0, 0.1, count)
        low, high = np.quantile(median_draws(seconds, np.random.default_rng(1)), (0.025, 0.975))
        assert low <= np.median(seconds) <= high
        widths.append(float(high - low))
    expected = 2 * 1.96 * 0.1 * 1.2533 / count**0.5
    # Few blocks are given the benefit of Student's t.
    assert 0.8 * expected < float(np.mean(widths)) < (1.8 if count < 100 else 1.3) * expected


def test_half_the_width_of_runs_is_students() -> None:
    """Three medians 1 % apart: t of two degrees of freedom is 4.303."""
    runs = [Quantiles(median=median, p20=None, p80=None, steps=None) for median in (0.99, 1.0, 1.01)]
    found = relative_half_width(runs)
    assert found == pytest.approx(4.303 * 0.01 / 3**0.5, rel=0.02)
    assert relative_half_width(runs[:1]) is None
    # Runs that happen to agree are no surer than the steps within them.
    alike = [Quantiles(median=1.0, p20=0.9, p80=1.1, steps=25)] * 3
    spread = 0.2 / (2 * 0.8416)
    assert relative_half_width(alike) == pytest.approx(4.303 * spread * 1.2533 / 5 / 3**0.5, rel=0.2)


def test_the_interval_of_runs_holds_what_they_have_in_common() -> None:
    """Of runs that scatter by 1 %, in 95 of 100 experiments."""
    generator = np.random.default_rng(5)
    held = 0
    for _ in range(400):
        medians = np.exp(0.01 * generator.normal(size=3))
        half = relative_half_width([Quantiles(median=float(each), p20=None, p80=None, steps=None) for each in medians])
        assert half is not None
        held += abs(np.log(medians).mean()) <= np.log1p(half)
    assert 0.95 - 3 * (0.95 * 0.05 / 400) ** 0.5 <= held / 400 <= 0.95 + 3 * (0.95 * 0.05 / 400) ** 0.5


def test_exact_repeats_of_the_same_time() -> None:
    found = change([np.full(20, 1.0)], [np.full(20, 1.05)])
    assert found.relative == pytest.approx(0.05)
    assert found.low is not None
    # Only the scatter that is assumed for runs is left.
    assert found.low == pytest.approx(0.05 - 1.96 * RUN_SCATTER * 2**0.5, abs=0.003)
    assert found.basis == "steps"
    assert found == change([np.full(20, 1.0)], [np.full(20, 1.05)])


def test_runs_are_the_units_where_there_are_several() -> None:
    """Thousands of steps do not hide that the runs of a side differ by more than the sides do."""
    before = [np.full(2000, value) for value in (1.00, 1.04, 0.98)]
    after = [np.full(2000, value) for value in (1.05, 1.01, 1.06)]
    found = change(before, after)
    assert found.basis == "runs"
    assert found.runs == (3, 3)
    assert found.low is not None
    assert found.low < 0 < found.relative
    assert found.verdict(THRESHOLD) == "unclear"
    # Student's t by hand, of the logarithms, four degrees of freedom.
    logs = [np.log([run[0] for run in side]) for side in (before, after)]
    error = ((logs[0].var(ddof=1) + logs[1].var(ddof=1)) / 2 * 2 / 3) ** 0.5
    expected = np.exp(logs[1].mean() - logs[0].mean() - 2.776 * error) - 1
    assert found.low == pytest.approx(expected, rel=1e-3)


def test_two_runs_that_agree_by_chance_still_scatter_as_their_steps_do() -> None:
    generator = np.random.default_rng(1)
    base = generator.normal(1.0, 0.05, 30)
    found = change([base, base.copy()], [base * 1.01, base * 1.01])
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.0
    assert found.high > 0.02


def test_rows_alone() -> None:
    row = Quantiles(median=1.0, p20=0.99, p80=1.01, steps=50)
    found = change([row], [replace(row, median=1.1, p20=1.09, p80=1.11)])
    assert (found.basis, found.verdict(THRESHOLD)) == ("quantiles", "slower")
    unknown = change([replace(row, p20=None)], [row])
    assert (unknown.basis, unknown.low, unknown.verdict(THRESHOLD)) == ("unknown", None, "unclear")
    mixed = change([row], [np.full(20, 1.0)])
    assert mixed.basis == "quantiles"
    assert change([np.array([1.0, 1.0])], [np.full(20, 2.0)]).basis == "unknown"


@pytest.mark.parametrize(
    ("relative", "low", "high", "word"),
    [
        (0.05, 0.01, 0.09, "slower"),
        (0.05, -0.01, 0.11, "unclear"),
        (0.029, 0.02, 0.035, "unclear"),
        (0.02, 0.01, 0.029, "same"),
        (0.0, -0.02, 0.02, "same"),
        (0.0, -0.05, 0.05, "unclear"),
        (-0.05, -0.09, -0.01, "faster"),
        (-0.05, -0.11, 0.01, "unclear"),
        (0.03, 0.001, 0.06, "slower"),
    ],
)
def test_words(relative: float, low: float, high: float, word: str) -> None:
    found = Change(relative=relative, low=low, high=high, runs=(1, 1), basis="steps")
    assert found.verdict(THRESHOLD) == word


samples = st.lists(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=12).map(np.asarray), min_size=1, max_size=3)


@given(samples, samples)
def test_whatever_is_compared_the_change_lies_in_its_interval(before: list[Sample], after: list[Sample]) -> None:
    found = change(before, after)
    assert found.relative > -1
    if found.low is not None and found.high is not None and max(found.runs) > 1:
        assert found.low <= found.relative + 1e-9
        assert found.high >= found.relative - 1e-9


# -- steps of records ------------------------------------------------------------------------------------------------


def test_traced_steps_are_those_that_train_traces() -> None:
    from flopwise.train.profiling import TRACED_STEPS, WARM_UP_STEPS

    record = a_record(request={"profile": True})
    assert traced_steps(record) == range(WARM_UP_STEPS + 1, WARM_UP_STEPS + 1 + TRACED_STEPS)
    assert traced_steps(a_record(request={"profile": True, "profile_steps": 5})) == range(3, 8)
    assert traced_steps(a_record()) == range(0)
    assert traced_steps(a_record(request={"profile": True}, training=Training(steps=3))) == range(2, 4)
    resumed = a_record(request={"profile": True}, resumed_from="checkpoints/step-00000010", resumed_after=10)
    assert traced_steps(resumed) == range(13, 16)


def test_steps_that_count(tmp_path: Path) -> None:
    store = tmp_path
    times = [3.0, 2.0, 1.5, 1.5, 1.5, *[1.0] * 20]
    record = write_run(store, times, request={"profile": True})
    found = steady_seconds(record, read_steps(store / record.id))
    assert found.tolist() == [1.0] * 20
    traced_all = replace(record, request={"profile": True, "profile_steps": 100})
    assert len(steady_seconds(traced_all, read_steps(store / record.id))) > 0
    resumed = replace(record, resumed_after=20, request={})
    assert len(steady_seconds(resumed, read_steps(store / record.id))) == 3
    assert len(steady_seconds(record, [])) == 0
