"""What the host takes to start kernels, in predictions and in plans for one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flopwise.catalog.load import load_hardware, load_model
from flopwise.plan.device.explain import make_plan
from flopwise.plan.device.forecast import forecast
from flopwise.plan.device.handing import HOST, kernels_of
from flopwise.predict import step
from flopwise.predict.step import steps
from flopwise.setup.hardware import Fact, Hardware, Host
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import Setup
from flopwise.work.formats import parse_formats


def with_starts(hardware: Hardware, seconds: float) -> Hardware:
    """A host that takes so long to start a kernel, from whichever program."""
    fact = Fact(value=seconds, source=hardware.device.units.source)
    return replace(hardware, host=replace(hardware.host or Host(), launch_s=fact, call_s=fact))


def small(hardware: Hardware, *, cuda_graphs: bool = False) -> Setup:
    return Setup(
        model=load_model("gpt2"),
        hardware=hardware,
        sequence_tokens=128,
        batch_sequences=1,
        micro_batch_sequences=1,
        recompute="none",
        cuda_graphs=cuda_graphs,
    )


def test_a_small_step_takes_as_long_as_its_kernels_are_started() -> None:
    hardware = load_hardware("h100-sxm")
    found, replayed = step(small(hardware)), step(small(hardware, cuda_graphs=True))
    assert found.bound == "host" != replayed.bound
    assert found.ops[-1].name == "host"
    assert sum(op.time_s for op in found.ops) == pytest.approx(found.step_s)
    assert sum(op.share for op in found.ops) == pytest.approx(1.0)
    assert any("estimated: 10 µs" in note for note in found.notes)
    # A block: four products with two backward each, attention and its three, five others there and back.
    assert found.step_s == pytest.approx((12 * (4 * 3 + 4 + 5 * 2) + 10) * 10e-6)
    slower = step(small(with_starts(hardware, 20e-6)))
    assert slower.step_s == pytest.approx(2 * found.step_s)
    assert not any("starting a kernel" in note for note in step(small(load_hardware("h200"))).notes)


def test_a_large_step_is_what_its_kernels_take() -> None:
    setup = Setup(model=load_model("llama-3-8b"), hardware=load_hardware("h100-sxm"), sequence_tokens=8192)
    found, replayed = step(setup), step(replace(setup, cuda_graphs=True))
    assert (found.step_s, found.ops) == (replayed.step_s, replayed.ops)
    assert found.bound == "compute"


def test_several_gpus_are_no_faster_than_their_hosts() -> None:
    hardware = load_hardware("h100-sxm")
    alone = step(small(hardware))
    spread = replace(small(hardware), parallel=Parallel(data=2), batch_sequences=2)
    found, replayed = step(spread), step(replace(spread, cuda_graphs=True))
    assert found.bound == "host" != replayed.bound
    assert found.step_s == pytest.approx(alone.step_s)
    assert replayed.parts["host"] == 0 < found.parts["host"]
    assert found.parts["host"] == pytest.approx(found.step_s - replayed.step_s)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    # Each of two stages starts its own layers' kernels, for each of two micro-batches.
    staged = step(replace(spread, parallel=Parallel(pipeline=2)))
    assert alone.step_s < staged.step_s < 1.2 * alone.step_s
    assert steps([spread, replace(spread, cuda_graphs=True)]) == [found, replayed]


def test_plans_go_by_the_machines_host() -> None:
    hardware, model = load_hardware("h100-sxm"), load_model("gpt2")
    setup = replace(small(hardware), micro_batch_sequences=None).cap(
        sequence_tokens=128, formats=parse_formats("bf16"), device=8 << 30, host=1 << 40
    )
    plan = make_plan(setup, helps=False, elsewhere=False).plan
    assert plan.replay
    eager = replace(plan, replay=False)
    found = forecast(eager, model, hardware)
    assert found.bound == "the host"
    assert found.step_s == pytest.approx(kernels_of(plan, model) * 40e-6)
    quick = with_starts(hardware, 1e-7)
    assert HOST not in forecast(eager, model, quick).idle
    assert not make_plan(replace(setup, hardware=quick), helps=False, elsewhere=False).plan.replay
