"""Save levels against all assignments there are: within the budget, and none better by more than one rise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.catalog.load import load_hardware
from flopwise.plan.device.levels import Curve, choose_levels, curve_of
from flopwise.plan.program.sizes import Sizes, level_bytes
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.records.plan import LETTERS, Plan, spread
from tests.plan.test_compile import FAMILIES, plain_plan, sizes_for, small_model

Table = dict[str, tuple[int, float]]
"""Level → bytes and seconds of one chunk."""


class Seconds:
    """Stands in for what tasks take: what each level of each chunk makes again is given."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables

    def recompute_s(self, level: str, tokens: int, part: int) -> float:
        assert tokens > 0
        return self.tables[part][level][1]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Curve, list[Table], int]:
    """A curve of one to three chunks with any bytes and seconds, its points, and a number of sequences."""
    model = small_model("llama-3-8b", 2)
    parts = draw(st.integers(1, 3))
    sequences = draw(st.integers(1, 6 // parts))
    plan = plain_plan(model, chunks=parts, parts=parts)
    saved = {level: draw(st.integers(1, 50)) * 4 for level in LETTERS.values() if level != "full"}
    sizes = replace(sizes_for(plan, model), saved={"full": draw(st.integers(50, 99)) * 4, **saved})
    seconds = st.floats(0.001, 10.0)
    tables: list[Table] = [
        {
            level: (level_bytes(sizes, level, 64), 0.0 if level == "full" else draw(seconds))
            for level in LETTERS.values()
        }
        for _ in range(parts)
    ]
    return curve_of(plan, sizes, cast(TaskSeconds, Seconds(tables))), tables, sequences


def totals(rows: Sequence[Sequence[str]], tables: Sequence[Table]) -> tuple[int, float]:
    """Bytes and seconds of an assignment."""
    points = [tables[part][LETTERS[letter]] for row in rows for part, letter in enumerate(row)]
    return sum(size for size, _ in points), sum(seconds for _, seconds in points)


def every_total(tables: Sequence[Table], sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and seconds of all assignments."""
    points = [list(table.values()) for table in tables] * sequences
    combined = np.array([np.sum(chosen, axis=0) for chosen in product(*points)])
    return combined[:, 0], combined[:, 1]


@settings(max_examples=60)
@given(cases(), st.lists(st.floats(0.0, 1.2), min_size=1, max_size=6))
def test_no_assignment_is_better_by_more_than_one_rise(
    case: tuple[Curve, list[Table], int], shares: list[float]
) -> None:
    curve, tables, sequences = case
    sizes, seconds = every_total(tables, sequences)
    largest = max((rise.seconds for rise in curve.rises), default=0.0)
    for share in shares:
        budget = sequences * (curve.least_bytes + share * (curve.most_bytes - curve.least_bytes))
        rows = choose_levels(curve, sequences, budget)
        assert [len(row) for row in rows] == [len(tables)] * sequences
        taken, found = totals(rows, tables)
        assert taken <= budget * (1 + 1e-12)
        best = float(seconds[sizes <= budget].min())
        assert best - 1e-9 <= found <= best + largest + 1e-9
        assert sequences * float(curve.seconds_at(np.array([budget / sequences]))[0]) <= best + 1e-9


@settings(max_examples=60)
@given(cases())
def test_the_curve_is_the_lower_hull(case: tuple[Curve, list[Table], int]) -> None:
    curve, tables, _ = case
    assert [rise.worth for rise in curve.rises] == sorted((rise.worth for rise in curve.rises), reverse=True)
    assert all(rise.bytes > 0 and rise.seconds > 0 for rise in curve.rises)
    assert curve.least_bytes == sum(min(size for size, _ in table.values()) for table in tables)
    assert curve.seconds[-1] == pytest.approx(0.0, abs=1e-9)
    slopes = [(low - high) / (more - less) for (less, more), (low, high) in zip_pairs(curve)]
    assert all(first >= then * (1 - 1e-9) for first, then in pairwise(slopes))
    sizes, seconds = every_total(tables, 1)
    assert np.all(curve.seconds_at(sizes) <= seconds + 1e-9)


def zip_pairs(curve: Curve) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Neighbouring (bytes, seconds) of a curve."""
    return list(zip(pairwise(map(float, curve.bytes)), pairwise(map(float, curve.seconds)), strict=True))


@given(cases(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_more_bytes_never_cost_seconds(case: tuple[Curve, list[Table], int], one: float, other: float) -> None:
    curve, tables, sequences = case
    low, high = (
        totals(choose_levels(curve, sequences, sequences * share * curve.most_bytes), tables)
        for share in sorted((one, other))
    )
    assert high[1] <= low[1] + 1e-9


@given(cases())
def test_the_ends_of_the_budget_are_all_or_the_least(case: tuple[Curve, list[Table], int]) -> None:
    curve, _, sequences = case
    assert choose_levels(curve, sequences, sequences * curve.most_bytes) == [["f"] * len(curve.least)] * sequences
    assert choose_levels(curve, sequences, 0.0) == [list(curve.least)] * sequences
    assert choose_levels(curve, 0, 1e9) == []


def real_curve(name: str, parts: int, tokens: int) -> tuple[Curve, Plan, Sizes]:
    model = small_model(name, 4)
    plan = plain_plan(model, chunks=parts, sequence_tokens=tokens, chunk_tokens=-(-tokens // parts))
    sizes = sizes_for(plan, model)
    return curve_of(plan, sizes, TaskSeconds(plan, model, load_hardware("h200"))), plan, sizes


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("parts", [1, 3, 4])
def test_models_keep_the_least_first_and_everything_last(name: str, parts: int) -> None:
    curve, plan, sizes = real_curve(name, parts, 500)
    whole = sum(level_bytes(sizes, "full", plan.tokens_of(part)) for part in range(parts))
    least = sum(level_bytes(sizes, "input", plan.tokens_of(part)) for part in range(parts))
    assert curve.most_bytes == whole
    assert curve.least_bytes == least
    for share in np.linspace(0, 1, 7):
        budget = 8 * (least + float(share) * (whole - least))
        rows = choose_levels(curve, 8, budget)
        taken = sum(
            level_bytes(sizes, LETTERS[letter], plan.tokens_of(part)) for row in rows for part, letter in enumerate(row)
        )
        assert budget - max(rise.bytes for rise in curve.rises) <= taken <= budget


def test_a_long_context_keeps_the_result_of_attention_of_the_last_chunks_first() -> None:
    """Attention over all that comes before is what is dearest to make again; it is dearer the later the chunk."""
    curve, _, _ = real_curve("llama-3-8b", 16, 262144)
    first = [rise.part for rise in curve.rises if rise.letter == "a"]
    assert first == sorted(first, reverse=True)
    assert curve.rises[0].letter == "a"


@given(st.integers(0, 40), st.integers(1, 40))
def test_spread_is_even(count: int, places: int) -> None:
    found = spread(min(count, places), places)
    assert len(found) == min(count, places)
    assert found == sorted(set(found))
    gaps = [then - first for first, then in pairwise(found)]
    assert max(gaps, default=1) - min(gaps, default=1) <= 1
