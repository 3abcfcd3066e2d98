"""The design search: better than where it starts, close to trying everything, the same every time."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import ROOT, load_model
from flopwise.predict import Setup
from flopwise.references.deepflow import PUBLISHED, step_s
from flopwise.references.design.search import Objective, Search, deepflow_objective, search_design, step_objective
from flopwise.references.design.technology import Budget, Shares, from_deepflow
from flopwise.setup.hardware import Hardware
from flopwise.work.formats import POLICIES

PARTS = ("core", "dram", "l2", "shared")
EVEN = dict.fromkeys(PARTS, 0.25)


def ask_lstm(hardware: Hardware) -> Setup:
    return Setup(
        model=load_model("lstm-lm"),
        hardware=hardware,
        batch_sequences=512,
        micro_batch_sequences=512,
        formats=POLICIES["fp32"],
        recompute="none",
        optimizer="sgd",
    )


def ask_gpt2(hardware: Hardware) -> Setup:
    return Setup(model=load_model("gpt2"), hardware=hardware, batch_sequences=8, formats=POLICIES["fp32"])


def grid(names: tuple[str, ...], ways: int) -> Iterator[dict[str, float]]:
    """Every division of 1 among the names in multiples of 1/ways."""
    for cuts in itertools.combinations(range(1, ways), len(names) - 1):
        ends = (0, *cuts, ways)
        yield {name: (ends[index + 1] - ends[index]) / ways for index, name in enumerate(names)}


def reciprocal(weights: Mapping[str, float]) -> Objective:
    """Each part's work over its share; the best shares are as the roots of the work."""
    return lambda shares: sum(weight / shares[name] for name, weight in weights.items())


@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=5))
def test_a_smooth_optimum_is_found(work: list[float]) -> None:
    weights = {f"part{index}": weight for index, weight in enumerate(work)}
    best = sum(math.sqrt(weight) for weight in work) ** 2
    found = search_design(reciprocal(weights), dict.fromkeys(weights, 1.0), Search(starts=1))
    assert best <= found.seconds * (1 + 1e-9)
    assert found.seconds <= 1.02 * best


def test_the_reference_model_beats_its_grid() -> None:
    objective = deepflow_objective(PUBLISHED)
    found = search_design(objective, EVEN)
    best = min(objective(shares) for shares in grid(PARTS, 20))
    assert found.seconds <= best
    assert found.seconds < 0.5 * found.start_seconds
    assert sum(found.shares.values()) == pytest.approx(1)


def test_three_parts_come_close_to_a_fine_grid() -> None:
    fixed = replace(PUBLISHED, power=replace(PUBLISHED.power, shared=0.05))
    objective = deepflow_objective(fixed)
    parts = ("core", "dram", "l2")
    best = min(objective(shares) for shares in grid(parts, 60))
    found = search_design(objective, dict.fromkeys(parts, 1.0), Search(least_share=1 / 60))
    assert found.seconds <= 1.01 * best


def test_the_published_search_is_outdone() -> None:
    """From where it began, and within the budget, although its own designs overspend."""
    with (ROOT / "tables" / "deepflow_lstm.csv").open() as stream:
        published = [float(row["time_s"]) for row in csv.DictReader(stream) if row["batch_size"] == "512"]
    start = {"core": 0.15, "dram": 0.15, "l2": 0.3, "shared": 0.3}
    found = search_design(deepflow_objective(PUBLISHED), start, Search(starts=1))
    assert found.seconds < 0.9 * min(published)
    assert sum(found.shares.values()) <= 1 + 1e-9


def test_the_physical_method_is_an_objective() -> None:
    technology, budget = from_deepflow(PUBLISHED)
    objective = step_objective(ask_lstm, technology, budget)
    found = search_design(objective, EVEN, Search(starts=1, iterations=40))
    best = min(objective(shares) for shares in grid(PARTS, 8))
    assert found.seconds <= best
    assert found.seconds < found.start_seconds
    assert found.seconds == objective(found.shares)


def test_what_does_not_fit_is_no_design() -> None:
    technology, budget = from_deepflow(PUBLISHED)
    objective = step_objective(ask_gpt2, technology, budget, must_fit=True)
    found = search_design(objective, EVEN, Search(starts=1, iterations=10))
    assert math.isfinite(found.seconds)
    large = step_objective(ask_lstm, technology, budget, must_fit=True)
    with pytest.raises(FlopwiseError, match="can be built"):
        search_design(large, EVEN, Search(starts=1, iterations=2))


def test_the_same_seed_gives_the_same_design_and_every_call_is_counted() -> None:
    calls = 0

    def objective(shares: Mapping[str, float]) -> float:
        nonlocal calls
        calls += 1
        return deepflow_objective(PUBLISHED)(shares)

    search = Search(starts=3, iterations=8, seed=7)
    found = search_design(objective, EVEN, search)
    assert found.evaluations == calls
    assert found == search_design(deepflow_objective(PUBLISHED), EVEN, search)
    assert found.history != search_design(deepflow_objective(PUBLISHED), EVEN, replace(search, seed=8)).history


def test_the_best_that_was_seen_comes_back() -> None:
    seen: list[float] = []

    def objective(shares: Mapping[str, float]) -> float:
        seen.append(math.sin(40 * shares["a"]) + shares["b"] + 2)
        return seen[-1]

    found = search_design(objective, {"a": 1, "b": 1}, Search(starts=5))
    assert found.seconds == min(seen)
    for number in range(5):
        times = [trial.seconds for trial in found.history if trial.start == number]
        assert times == sorted(times, reverse=True)
    assert found.history[0].shares == {"a": 0.5, "b": 0.5}


@given(st.floats(0.1, 1.0), st.integers(0, 100))
def test_every_trial_spends_the_budget(budget: float, seed: int) -> None:
    def objective(shares: Mapping[str, float]) -> float:
        assert sum(shares.values()) == pytest.approx(budget)
        assert min(shares.values()) > 0
        return 1 / shares["a"] + 3 / shares["b"] + shares["c"]

    search_design(objective, {"a": 1, "b": 2, "c": 3}, Search(budget=budget, starts=2, iterations=6, seed=seed))


def test_a_start_that_cannot_be_built_is_left() -> None:
    def objective(shares: Mapping[str, float]) -> float:
        if shares["a"] < 0.6:
            raise FlopwiseError("too little of a")
        return 1 / shares["b"]

    found = search_design(objective, {"a": 1, "b": 1}, Search(starts=1))
    assert found.start_seconds == math.inf
    assert found.seconds == pytest.approx(1 / 0.4, rel=0.01)


def test_nothing_that_can_be_built_is_told_with_the_reason() -> None:
    def objective(shares: Mapping[str, float]) -> float:
        raise FlopwiseError(f"{len(shares)} parts are too many")

    with pytest.raises(FlopwiseError, match="none of the divisions") as told:
        search_design(objective, {"a": 1, "b": 1})
    assert told.value.why == "2 parts are too many"
    with pytest.raises(FlopwiseError, match="none of the divisions"):
        search_design(lambda _: math.nan, {"a": 1, "b": 1})


def test_mistakes_are_told() -> None:
    objective = deepflow_objective(PUBLISHED)
    with pytest.raises(FlopwiseError, match="no part of a device is called 'cores'"):
        objective({"cores": 0.3})
    technology, _ = from_deepflow(PUBLISHED)
    with pytest.raises(FlopwiseError, match="no part of a device is called 'tdp'"):
        step_objective(ask_gpt2, technology, Budget(power_w=300))({"tdp": 0.3})
    with pytest.raises(FlopwiseError, match="nothing to divide"):
        search_design(objective, {"core": 1.0})
    with pytest.raises(FlopwiseError, match="cannot start with 0"):
        search_design(objective, {"core": 0, "dram": 1.0})
    with pytest.raises(FlopwiseError, match="are more than"):
        search_design(objective, EVEN, Search(least_share=0.3))


@pytest.mark.parametrize(
    "change",
    [
        {"iterations": 0},
        {"starts": 0},
        {"perturbation": 1.0},
        {"step": 0.0},
        {"momentum": 1.0},
        {"least_share": 0.0},
        {"budget": 1.5},
    ],
    ids=lambda change: next(iter(change)),
)
def test_bad_settings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FlopwiseError, match=next(iter(change))):
        replace(Search(), **change)


def test_shares_of_the_reference_are_taken_as_they_are() -> None:
    power = replace(PUBLISHED.power, core=0.3, l2=0.1)
    assert deepflow_objective(PUBLISHED)({"core": 0.3, "l2": 0.1}) == step_s(replace(PUBLISHED, power=power))


def test_an_area_binds_the_physical_method() -> None:
    technology, _ = from_deepflow(PUBLISHED)
    core = replace(technology.core, unit_area_mm2=5.0)
    area = Shares(core=0.5, shared=0.2, l2=0.2, dram=0.1)
    budget = Budget(power_w=300, area_mm2=200)
    objective = step_objective(ask_lstm, replace(technology, core=core), budget, area=area)
    assert objective({**EVEN, "core": 0.25}) == objective({**EVEN, "core": 0.2})
