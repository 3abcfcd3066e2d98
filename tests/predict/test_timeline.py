"""Two streams against a plain simulator that keeps the start and the end of every task, and by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.predict.cluster.timeline import StreamTimes, played, started
from flopwise.predict.kernels.calls import Floats


@dataclass(slots=True)
class Task:
    """One kernel or collective, with what must have ended before it starts."""

    seconds: float
    after: list[Task] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0


def play(stream: list[Task], free_at: float) -> None:
    """Run a stream in order, all that its tasks wait for having been run."""
    for task in stream:
        task.start = max([free_at, *(before.end for before in task.after)])
        task.end = free_at = task.start + task.seconds


def simulate(
    kernels: list[float],
    gathers: list[float],
    reductions: list[float],
    prefetch: int,
    free_at: tuple[float, float] = (0.0, 0.0),
) -> tuple[float, float]:
    """When the kernels' and the collectives' streams are free; absent tasks (0 s) are not there at all."""
    layers = range(len(kernels))
    begin = Task(0.0, start=free_at[0], end=free_at[0])
    kernel = [Task(seconds) for seconds in kernels]
    gather = [Task(seconds) if seconds else None for seconds in gathers]
    reduction = [Task(seconds, [kernel[layer]]) if seconds else None for layer, seconds in enumerate(reductions)]
    for layer in layers:
        own = gather[layer]
        kernel[layer].after = [begin, *([kernel[layer - 1]] if layer else []), *([own] if own else [])]
        # Room for this layer's weights: that of the layer 1 + prefetch before it.
        room = layer - 1 - prefetch
        if own and (room >= 0 or prefetch == 0):
            own.after = [kernel[room] if room >= 0 else begin]
    issued = [gather[layer] for layer in layers if layer <= prefetch]
    for layer in layers:
        issued.append(reduction[layer])
        if layer + 1 + prefetch < len(kernels):
            issued.append(gather[layer + 1 + prefetch])
    collectives = [task for task in issued if task]
    # Times only grow, from wrong to right: as many rounds as tasks settle every chain of waiting.
    for _ in range(len(kernels) + len(collectives)):
        play(collectives, free_at[1])
        play(kernel, free_at[0])
    ends = [task.end for task in collectives]
    return max([free_at[0], *(task.end for task in kernel)]), max([free_at[1], *ends])


def run(
    kernels: list[float],
    gathers: list[float],
    reductions: list[float],
    prefetch: int,
    free_at: tuple[float, float] = (0.0, 0.0),
) -> tuple[float, float]:
    def arrays(seconds: list[float]) -> list[Floats]:
        return [np.array([value]) for value in seconds]

    start = StreamTimes(np.array([free_at[0]]), np.array([free_at[1]]))
    found = played(start, arrays(kernels), arrays(gathers), arrays(reductions), prefetch)
    assert found.end[0] == max(found.kernels[0], found.collectives[0])
    return float(found.kernels[0]), float(found.collectives[0])


seconds_or_none = st.one_of(st.just(0.0), st.floats(0.01, 10).map(lambda value: round(value, 2)))
layers = st.lists(
    st.tuples(st.floats(0.01, 10).map(lambda value: round(value, 2)), seconds_or_none, seconds_or_none),
    min_size=1,
    max_size=7,
)


@settings(max_examples=300)
@given(
    layers=layers,
    prefetch=st.integers(0, 3),
    free_at=st.tuples(st.floats(0, 20), st.floats(0, 20)),
)
def test_played_equals_the_plain_simulator(
    layers: list[tuple[float, float, float]], prefetch: int, free_at: tuple[float, float]
) -> None:
    kernels, gathers, reductions = ([layer[kind] for layer in layers] for kind in range(3))
    expected = simulate(kernels, gathers, reductions, prefetch, free_at)
    assert run(kernels, gathers, reductions, prefetch, free_at) == pytest.approx(expected)


@given(rows=st.lists(st.lists(layers, min_size=1, max_size=1), min_size=2, max_size=5), prefetch=st.integers(0, 3))
def test_an_array_is_as_many_timelines(rows: list[list[list[tuple[float, float, float]]]], prefetch: int) -> None:
    """Elements do not touch each other: zeros of one change nothing for the next."""
    count = min(len(row[0]) for row in rows)
    table = np.array([row[0][:count] for row in rows])
    kernels, gathers, reductions = (list(np.moveaxis(table, 0, -1)[:, kind]) for kind in range(3))
    found = played(started(kernels[0]), kernels, gathers, reductions, prefetch)
    for index, row in enumerate(table):
        alone = run(row[:, 0].tolist(), row[:, 1].tolist(), row[:, 2].tolist(), prefetch)
        assert (found.kernels[index], found.collectives[index]) == pytest.approx(alone)


NONE = [0.0, 0.0, 0.0]


def test_all_gathers_hidden_but_the_first() -> None:
    # G 0–1, 1–2, and the third at 11, when the first layer's place is free; K 1–11, 11–21, 21–31.
    assert run([10, 10, 10], [1, 1, 1], NONE, 1) == (31, 12)


def test_without_prefetch_every_gather_is_exposed() -> None:
    # G 0–1, K 1–11, G 11–12, K 12–22, G 22–23, K 23–33
    assert run([10, 10, 10], [1, 1, 1], NONE, 0) == (33, 23)


def test_slow_gathers_are_all_there_is() -> None:
    # G 0–10–20–30 back to back, each kernel behind its own; the last alone sticks out.
    assert run([1, 1, 1], [10, 10, 10], NONE, 1) == (31, 30)


def test_a_large_last_gather_waits_for_room() -> None:
    """It may start once the layer before the one in work is done, or with more prefetch earlier."""
    # K 1–11; G of the third 11–20; K 11–12, 20–21.
    assert run([10, 1, 1], [1, 1, 9], NONE, 1) == (21, 20)
    # G 2–11 behind the first kernels: K 11–12, 12–13.
    assert run([10, 1, 1], [1, 1, 9], NONE, 2) == (13, 11)


def test_reductions_follow_their_kernels() -> None:
    # K 0–4–8–12; R 4–7, 8–11, 12–15: only the last sticks out.
    assert run([4, 4, 4], NONE, [3, 3, 3], 1) == (12, 15)
    # R 4–14, 14–24, 24–34: two and a half of them stick out.
    assert run([4, 4, 4], NONE, [10, 10, 10], 1) == (12, 34)


def test_gathers_queue_behind_reductions() -> None:
    """G0 0–2, G1 2–4, K0 2–6, R0 6–16, G2 16–18, K1 6–10, R1 18–28, K2 18–22, R2 28–38."""
    assert run([4, 4, 4], [2, 2, 2], [10, 10, 10], 1) == (22, 38)


def test_a_pass_starts_where_its_streams_are() -> None:
    """The kernels' stream is busy until 5, the collectives' until 3: the first gathers run beside what came before."""
    assert run([2, 2], [1, 1], [0, 0], 1, (5.0, 3.0)) == (9, 5)
    # Without prefetch they are only issued when the kernels are due.
    assert run([2, 2], [1, 1], [0, 0], 0, (5.0, 3.0)) == (11, 9)


@given(layers=layers, prefetch=st.integers(0, 3))
def test_forward_is_never_slower_with_more_prefetch(layers: list[tuple[float, float, float]], prefetch: int) -> None:
    """With reductions in the same stream it may be: a gather that is issued earlier holds one up."""
    kernels, gathers = [layer[0] for layer in layers], [layer[1] for layer in layers]
    none = [0.0] * len(layers)
    assert run(kernels, gathers, none, prefetch + 1)[0] <= run(kernels, gathers, none, prefetch)[0] * (1 + 1e-12)
