"""The largest micro-batch that works: the same as a plain loop finds, in few tries."""

from __future__ import annotations

from collections.abc import Callable
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.sweep.auto_batch import MOST_AUTO_TOKENS, largest, most_sequences


def looked(works: Callable[[int], bool], guess: int, most: int) -> tuple[int, list[int]]:
    """What is found, and every number that was tried for it."""
    tried: list[int] = []

    def try_one(number: int) -> bool:
        assert 1 <= number <= most
        tried.append(number)
        return works(number)

    return largest(try_one, guess, most), tried


@given(st.integers(0, 3000), st.integers(-5, 4000), st.integers(0, 2500))
def test_it_finds_what_a_plain_loop_finds(answer: int, guess: int, most: int) -> None:
    found, tried = looked(lambda number: number <= answer, guess, most)
    plain = 0
    for number in range(1, most + 1):
        if number > answer:
            break
        plain = number
    assert found == plain
    assert len(set(tried)) == len(tried)
    assert len(tried) <= 2 * log2(most + 2) + 2


@given(st.sets(st.integers(1, 200)), st.integers(1, 200), st.integers(1, 200))
def test_where_gaps_lie_between_what_is_found_works_all_the_same(good: set[int], guess: int, most: int) -> None:
    found, tried = looked(lambda number: number in good, guess, most)
    assert found in good | {0}
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize(
    ("answer", "guess", "tries"),
    [(11, 11, 2), (11, 12, 2), (11, 10, 4), (512, 512, 1), (1, 1, 2), (0, 1, 1), (380, 400, 10), (11, 1, 8)],
)
def test_few_tries(answer: int, guess: int, tries: int) -> None:
    found, tried = looked(lambda number: number <= answer, guess, 512)
    assert found == answer
    assert tried[0] == guess
    assert len(tried) <= tries


@given(st.integers(16, 512), st.floats(0.95, 1.05))
def test_a_guess_that_is_nearly_right_saves_tries(answer: int, off: float) -> None:
    _, tried = looked(lambda number: number <= answer, round(answer * off), 512)
    assert len(tried) <= 11


@given(st.integers(0, 600), st.integers(1, 512), st.integers(1, 600))
def test_any_first_stride_finds_the_same(answer: int, guess: int, stride: int) -> None:
    assert largest(lambda number: number <= answer, guess, 512, stride=stride) == min(answer, 512)


@pytest.mark.parametrize(("tokens", "most"), [(512, 512), (2048, 128), (1000, 262), (2**18, 1), (2**20, 1)])
def test_no_micro_batch_is_looked_for_beyond_the_ceiling(tokens: int, most: int) -> None:
    assert most_sequences(tokens) == most
    assert most == 1 or most * tokens <= MOST_AUTO_TOKENS < (most + 1) * tokens
