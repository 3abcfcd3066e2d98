"""Pipeline schedules against closed forms and against a plain simulator of who does what when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.predict.cluster.pipeline import GPIPE, INTERLEAVED, ONE_FORWARD, held_micro_batches, pipeline_seconds


@dataclass(frozen=True, slots=True)
class Task:
    """Forward or backward of one micro-batch on one stage."""

    backward: bool
    micro_batch: int


def device_order(schedule: int, stages: int, stage: int, micro_batches: int) -> list[Task]:
    """What a stage does, one task after the other."""
    forward = [Task(False, index) for index in range(micro_batches)]
    backward = [Task(True, index) for index in range(micro_batches)]
    if schedule == GPIPE:
        return forward + backward
    warm_up = min(micro_batches, stages - stage - 1)
    alternating = [task for pair in zip(forward[warm_up:], backward, strict=False) for task in pair]
    return forward[:warm_up] + alternating + backward[micro_batches - warm_up :]


@dataclass(frozen=True, slots=True)
class Played:
    """When the last task ends, and the most micro-batches that each stage holds between forward and backward."""

    seconds: float
    held: list[int]


def simulate(schedule: int, forward: list[float], backward: list[float], micro_batches: int) -> Played:
    """Each device runs its list in order; a task starts when the device is free and what it needs is there."""
    stages = len(forward)
    left = [device_order(schedule, stages, stage, micro_batches) for stage in range(stages)]
    ends: dict[tuple[int, Task], float] = {}
    free, alive, held = [0.0] * stages, [0] * stages, [0] * stages

    def needed(stage: int, task: Task) -> tuple[int, Task] | None:
        if not task.backward:
            return (stage - 1, task) if stage else None
        return (stage + 1, task) if stage < stages - 1 else (stage, Task(False, task.micro_batch))

    while any(left):
        ready = [
            stage for stage in range(stages) if left[stage] and needed(stage, left[stage][0]) in {None, *ends.keys()}
        ]
        assert ready, "the schedule waits for itself"
        for stage in ready:
            task = left[stage].pop(0)
            before = needed(stage, task)
            start = max(free[stage], ends[before] if before else 0.0)
            free[stage] = ends[stage, task] = start + (backward if task.backward else forward)[stage]
            alive[stage] += -1 if task.backward else 1
            held[stage] = max(held[stage], alive[stage])
    return Played(max(free), held)


def modelled(schedule: int, forward: list[float], backward: list[float], micro_batches: int, chunks: int = 1) -> float:
    found = pipeline_seconds(
        np.array([schedule]),
        np.array([float(chunks)]),
        np.array([float(micro_batches)]),
        np.array([float(len(forward))]),
        forward_sum=np.array([sum(forward)]),
        backward_sum=np.array([sum(backward)]),
        forward_most=np.array([max(forward)]),
        backward_most=np.array([max(backward)]),
        both_most=np.array([max(one + other for one, other in zip(forward, backward, strict=True))]),
    )
    assert found.shape == (1,)
    return float(found[0])


def held(schedule: int, stages: int, stage: int, micro_batches: int, chunks: int = 1) -> float:
    found = held_micro_batches(
        np.array([schedule]),
        np.array([float(chunks)]),
        np.array([float(micro_batches)]),
        np.array([float(stages)]),
        np.array([float(stage)]),
    )
    return float(found[0])


def test_the_simulator_by_hand() -> None:
    """Two stages, three micro-batches, forward 1 and backward 2.

    gpipe: forwards end at 3 and 4; backwards 4–6–8–10 on the last, 6–8–10–12 on the first.
    1f1b: the last does F 1–2 B 2–4 F 4–5 B 5–7 F 7–8 B 8–10, the first its last backward at 10–12.
    """
    assert simulate(GPIPE, [1, 1], [2, 2], 3) == Played(12, [3, 3])
    assert simulate(ONE_FORWARD, [1, 1], [2, 2], 3) == Played(12, [2, 1])


@pytest.mark.parametrize("schedule", [GPIPE, ONE_FORWARD])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 2), (4, 8), (8, 3), (5, 13)])
def test_bubble_of_equal_stages(schedule: int, stages: int, micro_batches: int) -> None:
    """(p − 1) / m of the useful time m·(f + b)."""
    useful = micro_batches * 3.5
    seconds = modelled(schedule, [1.0] * stages, [2.5] * stages, micro_batches)
    assert (seconds - useful) / useful == pytest.approx((stages - 1) / micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 2, 2), (4, 8, 2), (8, 16, 3), (4, 4, 5)])
def test_bubble_of_interleaved_stages(stages: int, micro_batches: int, chunks: int) -> None:
    """(p − 1) / (m·v): Narayanan et al., arXiv 2104.04473, section 2.2.2."""
    useful = micro_batches * 3.5
    seconds = modelled(INTERLEAVED, [1.0] * stages, [2.5] * stages, micro_batches, chunks)
    assert (seconds - useful) / useful == pytest.approx((stages - 1) / (micro_batches * chunks))


def test_one_micro_batch_passes_all_interleaved_stages() -> None:
    """There is nothing to overlap it with: eight stages of 3 s take 24, however they are cut."""
    assert modelled(INTERLEAVED, [1.0] * 8, [2.0] * 8, 1, chunks=2) == 24


stage_seconds = st.lists(
    st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)).map(lambda pair: (round(pair[0], 3), round(pair[1], 3))),
    min_size=1,
    max_size=7,
)


@given(seconds=stage_seconds, micro_batches=st.integers(1, 12))
def test_gpipe_is_exact_for_any_stages(seconds: list[tuple[float, float]], micro_batches: int) -> None:
    forward, backward = [pair[0] for pair in seconds], [pair[1] for pair in seconds]
    played = simulate(GPIPE, forward, backward, micro_batches)
    assert modelled(GPIPE, forward, backward, micro_batches) == pytest.approx(played.seconds)


@given(
    stages=st.integers(1, 8), micro_batches=st.integers(1, 12), forward=st.floats(0.1, 9), backward=st.floats(0.1, 9)
)
def test_equal_stages_are_exact(stages: int, micro_batches: int, forward: float, backward: float) -> None:
    for schedule in (GPIPE, ONE_FORWARD):
        played = simulate(schedule, [forward] * stages, [backward] * stages, micro_batches)
        assert modelled(schedule, [forward] * stages, [backward] * stages, micro_batches) == pytest.approx(
            played.seconds
        )


unbalanced = st.lists(st.tuples(st.sampled_from([0.001, 1.0, 4.0]), st.sampled_from([0.001, 1.0, 4.0])), max_size=7)
"""Stages that are slow in one direction only, which the schedule minds most."""


@settings(max_examples=300)
@given(seconds=stage_seconds | unbalanced.filter(len), micro_batches=st.integers(1, 12))
def test_one_forward_one_backward_is_never_too_short(seconds: list[tuple[float, float]], micro_batches: int) -> None:
    """An upper bound, and not an idle one: never longer than gpipe, which waits for everything."""
    forward, backward = [pair[0] for pair in seconds], [pair[1] for pair in seconds]
    played = simulate(ONE_FORWARD, forward, backward, micro_batches).seconds
    model = modelled(ONE_FORWARD, forward, backward, micro_batches)
    assert model >= played * (1 - 1e-12)
    assert model <= simulate(GPIPE, forward, backward, micro_batches).seconds * (1 + 1e-12)


def test_two_slow_directions_on_two_stages() -> None:
    """Forward slow on the second of three stages, backward on the first; two micro-batches.

    F of the second stage 1–5 and 5–9; of the third 5–6 and, after a backward at 6–7, 9–10; its second backward 10–11.
    B of the second 9–10 and 11–12, of the first 10–14 and 14–18.
    """
    forward, backward = [1.0, 4.0, 1.0], [4.0, 1.0, 1.0]
    assert simulate(ONE_FORWARD, forward, backward, 2).seconds == 18
    # Σ = 12, one more at the slowest stage: 5, and one wait for both directions: 8 − 5
    assert modelled(ONE_FORWARD, forward, backward, 2) == 20


def test_one_forward_one_backward_is_not_exact_for_unequal_stages() -> None:
    """A slow first stage hides the others' start: F 0–4–8, B 10–14 between, F 14–18, …; by hand for two of each.

    Stage 0 (f 4, b 4), stage 1 (f 1, b 1), two micro-batches. Stage 0: F 0–4, F 4–8, then B of the first, ready at 6:
    8–12, B of the second, ready at 10: 12–16. The formula has 10 + 8 = 18.
    """
    assert simulate(ONE_FORWARD, [4, 1], [4, 1], 2).seconds == 16
    assert modelled(ONE_FORWARD, [4, 1], [4, 1], 2) == 18


@pytest.mark.parametrize("schedule", [GPIPE, ONE_FORWARD])
@given(stages=st.integers(1, 7), micro_batches=st.integers(1, 12))
def test_held_micro_batches_are_those_of_the_simulator(schedule: int, stages: int, micro_batches: int) -> None:
    played = simulate(schedule, [1.0] * stages, [2.0] * stages, micro_batches)
    assert [held(schedule, stages, stage, micro_batches) for stage in range(stages)] == played.held


def test_held_chunks_of_the_interleaved_schedule() -> None:
    """Four devices of two chunks: 2·(p − 1 − d) + (v − 1)·p warm-up forwards and one in work, half a device each."""
    assert [held(INTERLEAVED, 4, device, 64, 2) for device in range(4)] == [5.5, 4.5, 3.5, 2.5]
    # The first device holds 1 + (p − 1)/(p·v) times what 1f1b holds (Narayanan et al., section 2.2.2).
    assert held(INTERLEAVED, 4, 0, 64, 2) / held(ONE_FORWARD, 4, 0, 64) == 1 + 3 / 8
    # Never more than there are.
    assert held(INTERLEAVED, 4, 0, 4, 2) == 4


def test_schedules_are_chosen_one_by_one() -> None:
    """A mixed array gives each element its own schedule."""
    ones = np.ones(3)
    found = pipeline_seconds(
        np.array([GPIPE, ONE_FORWARD, INTERLEAVED]),
        np.array([1.0, 1.0, 2.0]),
        4 * ones,
        3 * ones,
        forward_sum=6 * ones,
        backward_sum=9 * ones,
        forward_most=5 * ones,
        backward_most=8 * ones,
        both_most=10 * ones,
    )
    # 15 + 3·13, 15 + 3·10 + 1·(13 − 10), 4·10 + 5/2
    assert found.tolist() == [54, 48, 42.5]
