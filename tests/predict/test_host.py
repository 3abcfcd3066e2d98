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
    # A sum of gradients for each of twelve layers, for the embedding and for the head.
    assert found.step_s == pytest.approx(alone.step_s + 14 * 10e-6)
    assert replayed.parts["host"] == 0 < found.parts["host"]
    assert found.parts["host"] == pytest.approx(found.step_s - replayed.step_s)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    # Each of two stages starts its own layers' kernels, for each of two micro-batches.
    staged = step(replace(spread, parallel=Parallel(pipeline=2)))
    assert alone.step_s < staged.step_s < 1.2 * alone.step_s
    assert steps([spread, replace(spread, cuda_graphs=True)]) == [found, replayed]


@pytest.mark.parametrize(
    ("parallel", "calls"),
    [
        # Two sums forward and two backward in a layer, one at each end.
        (Parallel(tensor=2), 12 * 4 + 2),
        # A scatter and a gather in place of each; each product's input once more.
        (Parallel(tensor=2, sequence=True), 12 * (8 + 2) + 4),
        # Weights for forward and for backward, gradients, of fourteen units.
        (Parallel(data=2, zero=3), 14 * 3),
        (Parallel(data=2, zero=3, reshard=False), 14 * 2),
        # Gradients are scattered, weights gathered after the update.
        (Parallel(data=2, zero=1), 14 * 2),
        # Keys and values go on once forward and once backward; gradients are summed over both ranks.
        (Parallel(context=2), 12 * 2 + 14),
    ],
)
def test_collectives_are_started_too(parallel: Parallel, calls: int) -> None:
    hardware = load_hardware("h100-sxm")
    one = replace(small(hardware), parallel=parallel, batch_sequences=parallel.data)
    slow = replace(one, hardware=with_starts(hardware, 1e-3))
    assert step(slow).bound == "host"
    kernels = step(small(with_starts(hardware, 1e-3))).step_s
    assert step(slow).step_s == pytest.approx(kernels + calls * 1e-3)
    replayed = step(replace(slow, cuda_graphs=True))
    assert replayed.step_s == step(replace(one, cuda_graphs=True)).step_s


def test_a_mixture_s_dispatches_are_started() -> None:
    """Out and back, forward and backward; two ranks of a pair that shares an expert gather and scatter beside."""
    hardware = with_starts(load_hardware("h100-sxm"), 1e-3)
    mixture = replace(small(hardware), model=load_model("olmoe-1b-7b"), batch_sequences=2)
    plain, dealt = (step(replace(mixture, parallel=Parallel(data=2, expert=ranks))) for ranks in (1, 2))
    assert dealt.bound == plain.bound == "host"
    assert dealt.step_s - plain.step_s == pytest.approx(16 * 4 * 1e-3)


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
