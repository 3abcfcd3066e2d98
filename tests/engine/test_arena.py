"""Room for temporaries under random use: nothing overlaps, everything comes back, what does not fit is counted."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import Tensor, dtype  # noqa: E402

from flopwise.engine.streaming.arena import Arena  # noqa: E402
from flopwise.records.program import ALIGNMENT_BYTES  # noqa: E402

KINDS = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


def aligned_room(size: int) -> Tensor:
    raw: Tensor = torch.zeros(size + ALIGNMENT_BYTES, dtype=torch.uint8)
    first = -raw.data_ptr() % ALIGNMENT_BYTES
    return raw[first : first + size]


def span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def within(tensor: Tensor, room: Tensor) -> bool:
    begin, end = span(tensor)
    return room.data_ptr() <= begin and end <= room.data_ptr() + room.numel()


def rounded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


USES = st.lists(
    st.tuples(st.booleans(), st.integers(1, 900), st.integers(1, 3), st.sampled_from(KINDS), st.integers(0, 10**6)),
    max_size=60,
)
"""Give one back or take one: rows, columns, type, and which."""


@settings(max_examples=200)
@given(uses=USES, size=st.integers(0, 12_000), beside=st.integers(0, 6000), spills=st.booleans())
def test_takes_and_gives_in_any_order(
    uses: list[tuple[bool, int, int, dtype, int]], size: int, beside: int, spills: bool
) -> None:
    second = Arena(aligned_room(beside)) if spills else None
    arena = Arena(aligned_room(size), spill=second)
    held: list[tuple[Tensor, int]] = []
    for number, (gives, rows, columns, kind, which) in enumerate(uses):
        if gives and held:
            tensor, value = held.pop(which % len(held))
            # Nobody else has written into it.
            assert bool((tensor == value).all())
            arena.give(tensor.view(-1) if which % 2 else tensor)
            continue
        tensor = arena.take((rows, columns), kind)
        assert tensor.shape == (rows, columns)
        assert tensor.dtype == kind
        value = number % 100 + 1
        tensor.fill_(value)
        if within(tensor, arena.room):
            assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
        held.append((tensor, value))
        spans = sorted(span(each) for each, _ in held)
        assert all(one[1] <= two[0] for one, two in pairwise(spans))
        inside = sum(rounded(each) for each, _ in held if within(each, arena.room))
        assert inside <= arena.peak_bytes <= size
    for tensor, _ in held:
        arena.give(tensor)
    for each in (arena, *([second] if second else [])):
        assert each.empty
        assert not each.beside_bytes
        # All of it is in one piece again.
        whole = each.room.numel() // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if whole:
            tensor = each.take((whole,), torch.uint8)
            assert tensor.data_ptr() == each.room.data_ptr()
            each.give(tensor)


def test_equal_calls_get_equal_addresses() -> None:
    arena = Arena(aligned_room(4096))
    found = []
    for _ in range(2):
        first, second = arena.take((100,), torch.float32), arena.take((7, 3), torch.bfloat16)
        arena.give(first)
        third = arena.take((64,), torch.float32)
        found.append([each.data_ptr() for each in (first, second, third)])
        arena.give(second)
        arena.give(third)
    assert found[0] == found[1]


def test_what_does_not_fit_is_counted_at_its_most() -> None:
    arena = Arena(aligned_room(1024))
    inside = arena.take((256,), torch.float32)
    beside = [arena.take((1000,), torch.uint8) for _ in range(3)]
    assert arena.beside_bytes == 3000
    for tensor in (*beside, inside):
        arena.give(tensor)
    assert arena.empty
    assert (arena.beside_bytes, arena.peak_beside_bytes, arena.peak_bytes) == (0, 3000, 1024)


def test_a_spill_is_asked_before_memory_beside_it() -> None:
    main = Arena(aligned_room(2048))
    small = Arena(aligned_room(256), spill=main)
    first, second, third = (small.take((200,), torch.uint8) for _ in range(3))
    assert within(first, small.room)
    assert within(second, main.room)
    assert within(third, main.room)
    # What was taken of the spill by others is not given back by it.
    other = main.take((200,), torch.uint8)
    for tensor in (first, second, third):
        small.give(tensor)
    assert (small.empty, main.empty) == (True, False)
    main.give(other)
    assert not main.beside_bytes + main.peak_beside_bytes
    # All of it is free again.
    assert within(main.take((2048,), torch.uint8), main.room)
