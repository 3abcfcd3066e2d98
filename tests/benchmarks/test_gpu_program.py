"""The launching of `benchmarks.gpu_program` against a clock, and on a GPU where there is one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.gpu_card import MIB, CudaCard, DryCard
from benchmarks.gpu_program import SIGNALS, Case, Setting, Spans, idle_of, played, result_of
from flopwise.catalog.load import load_hardware
from flopwise.plan.program.compile import compile_plan
from flopwise.predict.simulate.simulator import simulate
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.records.plan import Residency
from flopwise.records.program import STREAMS, Stream
from flopwise.setup.hardware import Link
from tests.plan.test_compile import plain_plan, small_model


def link() -> Link:
    found = load_hardware("h200").link
    assert found is not None
    return found


RATE = link().bandwidth_bytes_per_s.value
PASSING = Residency(blocks=1, passing=1)


@cache
def setting() -> Setting:
    """Five layers of a small model in two rounds: all state but one block passes, and all activations leave."""
    model = small_model("qwen3-0.6b", 5)
    plan = plain_plan(
        model,
        chunks=2,
        letter="f",
        rounds_per_step=2,
        activation_slots=3,
        weights=PASSING,
        gradients=PASSING,
        optimizer_state=PASSING,
    )
    program = compile_plan(plan, model)
    return Setting(Case(64, 1, 2), program, TaskSeconds(plan, model, load_hardware("h200")).of(program))


@cache
def dry() -> tuple[DryCard, Spans]:
    card = DryCard(RATE)
    return card, played(setting().program, setting().seconds, card)


def test_every_task_is_launched_once_and_in_order_on_its_stream() -> None:
    card, _ = dry()
    tasks = setting().program.tasks
    # A task's marks are the two before and behind it; numbers count them in the order of the launches.
    marked: list[tuple[Stream, int]] = [(stream, number) for call, stream, number in card.calls if call == "mark"]
    assert marked == [(task.stream, 2 * index + side) for index, task in enumerate(tasks) for side in (0, 1)]
    calls = Counter((call, stream) for call, stream, _ in card.calls)
    assert calls["compute", "compute"] == sum(task.stream == "compute" for task in tasks)
    for stream in ("copy-in", "copy-out"):
        assert [size for call, on, size in card.calls if (call, on) == ("copy", stream)] == [
            task.bytes for task in tasks if task.stream == stream and task.bytes
        ]


def test_every_after_is_a_wait_for_the_end_of_that_task_right_before_the_start() -> None:
    card, _ = dry()
    waits: list[tuple[Stream, int]] = []
    seen = 0
    for call, stream, number in card.calls:
        if call == "wait":
            waits.append((stream, number))
        elif call == "mark" and number % 2 == 0:
            task = setting().program.tasks[number // 2]
            assert waits == [(task.stream, 2 * other + 1) for other in task.after]
            seen += len(waits)
            waits = []
    assert seen == sum(len(task.after) for task in setting().program.tasks) > 20
    assert not waits


def test_the_clock_agrees_with_the_simulator_where_directions_do_not_share_the_link() -> None:
    _, spans = dry()
    simulated = simulate(setting().program, setting().seconds, replace(link(), both_ways_bytes_per_s=None))
    assert spans.starts == pytest.approx(simulated.starts)
    assert spans.ends == pytest.approx(simulated.ends)


def test_what_is_waited_for_is_told_as_the_simulator_tells_it() -> None:
    simulated = simulate(setting().program, setting().seconds, link())
    found = idle_of(setting().program, simulated.starts, simulated.ends)
    assert {words: seconds for words, seconds in found.items() if seconds > 1e-12} == pytest.approx(simulated.idle)
    assert simulated.idle
    later = [[moment + 1e-3 for moment in some] for some in (simulated.starts, simulated.ends)]
    assert idle_of(setting().program, later[0], later[1])[SIGNALS] == pytest.approx(1e-3)


def test_a_dry_play_is_found_again_by_the_simulation_with_its_rates() -> None:
    found = result_of(setting(), dry()[1], link(), 0)
    assert found.rates_gb_per_s == pytest.approx(dict.fromkeys(found.rates_gb_per_s, RATE / 1e9))
    for how in ("measured rates too", "all measured"):
        assert found.step_s[how] == pytest.approx(found.step_s["measured"])
        assert found.idle_s[how] == pytest.approx(found.idle_s["measured"])
    assert found.step_s["predicted"] > found.step_s["measured"]
    assert found.largest_start_error_ms == pytest.approx(0, abs=1e-9)
    for how, busy in found.busy_s.items():
        assert found.step_s[how] == pytest.approx(busy["compute"] + sum(found.idle_s[how].values()))


@pytest.mark.gpu
def test_a_play_on_the_gpu_waits_for_all_that_it_has_to() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    program = setting().program
    card = CudaCard(sum(buffer.bytes for buffer in program.buffers if buffer.place == "device"), 1024 * MIB)
    spans = played(program, setting().seconds, card)
    free = dict.fromkeys(STREAMS, 0.0)
    for index, task in enumerate(program.tasks):
        # An event's time is told in steps of half a microsecond.
        ready = max([free[task.stream], *(spans.ends[other] for other in task.after)])
        assert spans.starts[index] >= ready - 2e-6
        assert spans.ends[index] >= spans.starts[index]
        free[task.stream] = spans.ends[index]
