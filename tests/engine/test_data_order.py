"""The endless order: permutations by epoch, and the same batch at a place however one comes there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flopwise.engine.data.order import Order

SEEDS = st.integers(0, 2**63 - 1)


@given(st.integers(1, 97), SEEDS, st.integers(0, 50))
def test_every_epoch_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    assert sorted(Order(count, seed).at(epoch * count, count)) == list(range(count))


@given(st.integers(1, 41), SEEDS, st.integers(0, 150), st.integers(1, 130))
def test_a_batch_is_a_slice_of_the_endless_order(count: int, seed: int, position: int, sequences: int) -> None:
    endless = [int(place) for epoch in range(8) for place in Order(count, seed).at(epoch * count, count)]
    while len(endless) < position + sequences:
        endless += [int(place) for place in Order(count, seed).at(len(endless), count)]
    assert Order(count, seed).at(position, sequences).tolist() == endless[position : position + sequences]


def test_an_order_that_was_used_answers_as_a_fresh_one() -> None:
    used = Order(13, 5)
    for position in (700, 3, 60, 12, 25):
        used.at(position, 30)
    assert used.at(45, 17).tolist() == Order(13, 5).at(45, 17).tolist()


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(Order(50, seed).at(epoch * 50, 50)) for seed in (0, 1, 2**40, 2**63 - 1) for epoch in range(4)]
    assert len(set(orders)) == len(orders)


def test_places_are_used_evenly() -> None:
    # The first place of many epochs: every sequence comes about as often.
    order = Order(4, 11)
    firsts = np.bincount([order.at(epoch * 4, 1)[0] for epoch in range(800)], minlength=4)
    assert firsts.min() > 150 and firsts.max() < 250
