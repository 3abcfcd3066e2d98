"""The order of copies against a plain clock that looks at every task at every moment."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np
import pytest

from flopwise.catalog.load import load_hardware, load_model
from flopwise.plan.device.explain import make_plan
from flopwise.plan.device.forecast import times_of
from flopwise.plan.program.compile import compile_plan
from flopwise.plan.program.ordering import starts_by_need
from flopwise.predict.simulate.simulator import simulate
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.records.plan import Plan
from flopwise.records.program import Program, Stream, Task
from flopwise.setup.setup import CappedSetup
from flopwise.work.formats import parse_formats

GIB = 2**30


@cache
def plan_of(device_gib: float, host_gib: float, *, layers: int = 6, sequence: int = 2048, batch: int = 16) -> Plan:
    question = CappedSetup(
        model=replace(load_model("llama-3-1b"), layers=layers),
        hardware=load_hardware("h200"),
        sequence_tokens=sequence,
        device_cap_bytes=int(device_gib * GIB),
        host_cap_bytes=int(host_gib * GIB),
        formats=parse_formats("bf16"),
        batch_sequences=batch,
    )
    return make_plan(question, helps=False).plan


def program_of(plan: Plan, layers: int = 6) -> Program:
    return compile_plan(plan, replace(load_model("llama-3-1b"), layers=layers))


def plain_starts(tasks: tuple[Task, ...], seconds: list[float]) -> list[float]:
    """Moment by moment: every idle stream takes what it may, loads by need, stores in the order of their release."""
    needed, release = [len(tasks)] * len(tasks), [-1] * len(tasks)
    for index, task in enumerate(tasks):
        release[index] = index if task.stream == "compute" else max((release[b] for b in task.after), default=-1)
    changed = True
    while changed:
        changed = False
        for index, task in enumerate(tasks):
            due = index if task.stream == "compute" else needed[index]
            for before in task.after:
                changed, needed[before] = changed or due < needed[before], min(due, needed[before])
    streams: dict[Stream, list[int]] = {}
    for index, task in enumerate(tasks):
        streams.setdefault(task.stream, []).append(index)
    streams["copy-out"] = sorted(streams.get("copy-out", []), key=lambda store: (release[store], store))
    streams["copy-in"] = sorted(streams.get("copy-in", []), key=lambda load: (needed[load], load))
    starts: list[float] = [-1.0] * len(tasks)
    ends: dict[int, float] = {}
    busy: dict[Stream, float] = {}
    now = 0.0
    while len(ends) < len(tasks):
        for stream, waiting in streams.items():
            allowed = waiting if stream == "copy-in" else waiting[:1]
            ready = [i for i in allowed if all(before in ends and ends[before] <= now for before in tasks[i].after)]
            if ready and busy.get(stream, 0.0) <= now:
                waiting.remove(ready[0])
                starts[ready[0]], ends[ready[0]] = now, now + seconds[ready[0]]
                busy[stream] = ends[ready[0]]
        now = min((end for end in ends.values() if end > now), default=now)
    return starts


@pytest.mark.parametrize(("device_gib", "host_gib"), [(1.6, 8), (2.2, 8), (3.5, 4), (2.5, 6)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_clock_is_the_plain_one(device_gib: float, host_gib: float, seed: int) -> None:
    tasks = program_of(plan_of(device_gib, host_gib, batch=4)).tasks
    draw = np.random.default_rng(seed)
    seconds = [float(draw.uniform(0.5, 3.0)) * (2.0 if task.stream == "compute" else 1.0) for task in tasks]
    assert {task.stream for task in tasks} >= {"compute", "copy-in", "copy-out"}
    assert starts_by_need(tasks, seconds) == pytest.approx(plain_starts(tasks, seconds))


@pytest.mark.parametrize("fetch", ["by need", "at once"])
@pytest.mark.parametrize(("device_gib", "host_gib"), [(1.6, 8), (2.2, 8), (3.5, 4)])
def test_nothing_stands_before_what_it_waits_for(
    device_gib: float, host_gib: float, fetch: Literal["by need", "at once"]
) -> None:
    plan = replace(plan_of(device_gib, host_gib), fetch=fetch)
    program, other = program_of(plan), program_of(replace(plan, fetch="at once"))
    assert all(before < index for index, task in enumerate(program.tasks) for before in task.after)
    for stream in ("compute", "copy-out"):
        kept = [[task._replace(after=()) for task in each.tasks if task.stream == stream] for each in (program, other)]
        assert kept[0] == kept[1], "only loads change their order"
    names = [sorted(str(task._replace(after=())) for task in each.tasks) for each in (program, other)]
    assert names[0] == names[1]


def test_what_the_head_needs_does_not_keep_the_first_layers_waiting() -> None:
    """Llama-3-8B in 24 GiB: the head's weights and gradients could come as soon as a round begins."""
    model, hardware = load_model("llama-3-8b"), load_hardware("h200")
    question = CappedSetup(
        model=model,
        hardware=hardware,
        sequence_tokens=8192,
        device_cap_bytes=24 * GIB,
        host_cap_bytes=110 * GIB,
        formats=parse_formats("bf16"),
        batch_sequences=16,
    )
    plan = make_plan(question, helps=False).plan
    assert "head" not in plan.weights.ends
    by_need, at_once = (
        times_of(replace(plan, fetch=fetch), model, hardware).step_s for fetch in ("by need", "at once")
    )
    assert by_need < 0.995 * at_once


@pytest.mark.parametrize("link_share", [1.0, 0.1])
@pytest.mark.parametrize("fetch", ["by need", "at once"])
@pytest.mark.parametrize(("device_gib", "host_gib"), [(1.3, 8), (1.6, 8), (2.2, 8), (3.5, 4)])
def test_rounds_that_are_not_played_take_as_long_as_if_they_were(
    device_gib: float, host_gib: float, fetch: Literal["by need", "at once"], link_share: float
) -> None:
    """Also with a link that is behind after every round."""
    model, hardware = replace(load_model("llama-3-1b"), layers=6), load_hardware("h200")
    assert hardware.link is not None
    rate = hardware.link.bandwidth_bytes_per_s
    link = replace(
        hardware.link, bandwidth_bytes_per_s=replace(rate, value=link_share * rate.value), both_ways_bytes_per_s=None
    )
    hardware = replace(hardware, link=link)
    plan = replace(plan_of(device_gib, host_gib, batch=64), fetch=fetch)
    plan = replace(plan, rounds_per_step=13)
    costs = TaskSeconds(plan, model, hardware)
    program = compile_plan(plan, model)
    played = simulate(program, costs.of(program), hardware.link, peaks=False)
    found = times_of(plan, model, hardware, costs)
    assert found.step_s == pytest.approx(played.step_s, rel=0.01)
    assert found.compute_s == pytest.approx(played.busy["compute"])
    assert found.copy_in_bytes == sum(task.bytes for task in program.tasks if task.stream == "copy-in")
    assert found.copy_out_bytes == sum(task.bytes for task in program.tasks if task.stream == "copy-out")
    assert found.compute_s + sum(found.idle.values()) == pytest.approx(found.step_s)
