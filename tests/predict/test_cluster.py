"""Whole steps of parallel set-ups: one device as everywhere else, sums, orders, corners, and many at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model
from flopwise.predict import step
from flopwise.predict.cluster.costing import PARTS, PLAIN, evaluate
from flopwise.predict.cluster.pieces import BLOCK, EMBEDDING, HEAD
from flopwise.predict.cluster.stages import LAST
from flopwise.predict.cluster.strategies import listed
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import SCHEDULES, Parallel, why_illegal
from flopwise.setup.setup import SettledSetup
from flopwise.setup.stack import Stack
from flopwise.work.formats import POLICIES
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES
from tests.predict.test_pipeline import simulate
from tests.support.clusters import (
    MIXTURE,
    NEUTRAL,
    SMALL,
    Kernels,
    evaluated,
    machine,
    network,
    one,
    placed,
    stack,
    workload,
)
from tests.support.strategies import recurrent, transformers

EXACT = 1e-9


# -- one device --------------------------------------------------------------------------------------------------------


def check_one_device(model: Model, hardware: Hardware, work: SettledSetup) -> None:
    alone = step(placed(work, model, Parallel(), hardware))
    found = evaluated(model, Parallel(), work, hardware, PLAIN)
    assert one(found.step_s) == pytest.approx(alone.step_s, rel=EXACT)
    assert one(found.device_bytes) == pytest.approx(alone.device_bytes.total, rel=EXACT)
    update = next(op.time_s for op in alone.ops if op.name == "optimizer")
    assert one(found.parts["update"]) == pytest.approx(update, rel=EXACT)
    # A smaller last micro-batch is taken to shorten all kinds of kernels alike.
    if work.batch_sequences % work.micro_batch_sequences == 0:
        products = sum(op.time_s for op in alone.ops if op.kind == "gemm")
        assert one(found.parts["products"]) == pytest.approx(products, rel=EXACT)
    waits = sum(op.time_s for op in alone.ops if op.name == "host")
    assert one(found.parts["host"]) == pytest.approx(waits, rel=EXACT, abs=EXACT * alone.step_s)
    idle = set(PARTS) - {"products", "attention", "streaming", "update", "host"}
    assert all(one(found.parts[name]) == pytest.approx(0, abs=EXACT * alone.step_s) for name in idle)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("llama-3-8b", "h200"),
        ("gpt2", "rtx-4090"),
        ("mixtral-8x7b", "mi300x"),
        ("bert-base", "tpu-v5e"),
        ("qwen3-4b", "trn1"),
        ("lstm-lm", "a100-80gb"),
    ],
)
def test_one_device_is_a_step_on_one_device(name: str, device: str) -> None:
    """Also where the last micro-batch is smaller: 7 in threes."""
    for batch, micro in ((1, 1), (7, 3), (8, 8), (12, 5)):
        check_one_device(load_model(name), load_hardware(device), workload(batch, micro, tokens=20))


@settings(max_examples=50)
@given(
    model=transformers() | recurrent(),
    device=st.sampled_from(["h200", "mi300x", "tpu-v5e"]),
    batch=st.integers(1, 9),
    micro=st.integers(1, 9),
    formats=st.sampled_from(["bf16", "bf16-mixed", "bf16-amp"]),
    recompute=st.sampled_from(RECOMPUTE_POLICIES),
    attention=st.sampled_from(["flash", "eager"]),
    fusion=st.sampled_from(["fused", "eager"]),
    optimizer=st.sampled_from(["adamw", "lion", "sgd"]),
)
def test_any_small_model_on_one_device(
    model: Model, device: str, batch: int, micro: int, formats: str, **choices: Any
) -> None:
    work = workload(batch, min(micro, batch), tokens=8, formats=POLICIES[formats], **choices)
    check_one_device(model, load_hardware(device), work)


def test_a_device_without_a_network_is_enough_for_one() -> None:
    lonely = replace(load_hardware("h200"), networks=(), link=None, host=None)
    check_one_device(SMALL, lonely, workload(6, 2))


def test_one_device_that_shards_is_one_device() -> None:
    """ZeRO over a group of one neither sends nor holds anything more."""
    plain = evaluated(SMALL, Parallel(), workload(6, 2), machine())
    for zero in (1, 2, 3):
        found = evaluated(SMALL, Parallel(zero=zero), workload(6, 2), machine(), replace(NEUTRAL, reduce_always=True))
        assert one(found.step_s) == one(plain.step_s)
        assert one(found.device_bytes) == one(plain.device_bytes)


# -- random set-ups ----------------------------------------------------------------------------------------------------


@st.composite
def set_ups(draw: st.DrawFn) -> tuple[Transformer, Parallel, SettledSetup]:
    """A small model with any legal set-up, of as many as 2 × 4 × 6 × 2 × 2 devices."""
    model = draw(st.sampled_from([SMALL, MIXTURE, replace(SMALL, tied=True, parallel_residual=True)]))
    tensor, pipeline = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 6))
    data, context = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2]))
    # Six layers in two chunks are whole layers on three devices only.
    schedules = SCHEDULES if pipeline == 3 else SCHEDULES[:2]
    schedule = draw(st.sampled_from(schedules))
    divisors = [count for count in (1, 2, 4) if data * context % count == 0]
    parallel = Parallel(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=draw(st.sampled_from(divisors)) if model.experts else 1,
        sequence=tensor > 1 and draw(st.booleans()),
        zero=draw(st.integers(0, 3)),
        shard=draw(st.sampled_from([None, *divisors])),
        reshard=draw(st.booleans()),
        prefetch=draw(st.integers(0, 2)),
        schedule=schedule,
        chunks=2 if schedule == "interleaved" else 1,
        balance="layers" if schedule == "interleaved" else draw(st.sampled_from(["layers", "time"])),
        offload_optimizer=draw(st.booleans()),
        offload_activations=draw(st.booleans()),
    )
    batch = draw(st.integers(1, 20))
    work = workload(
        batch,
        draw(st.integers(1, batch)),
        tokens=64,
        recompute=draw(st.sampled_from(RECOMPUTE_POLICIES)),
        formats=draw(st.sampled_from([POLICIES["bf16-mixed"], POLICIES["bf16-amp"]])),
    )
    assert why_illegal(model, 64, parallel) is None
    return model, parallel, work


stacks = st.builds(
    lambda overlap, tensor_overlap, kept, always, interference, host: replace(
        stack(interference=interference, host_layer_s=host, tensor_call_s=host / 10, network=1.2),
        gradient_overlap=overlap,
        tensor_overlap=tensor_overlap,
        gathered_kept=kept,
        reduce_always=always,
    ),
    *[st.booleans()] * 4,
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 1e-5]),
)


def cluster(rate: float = 20e9, latency_s: float = 5e-6, faster: float = 1.0) -> Hardware:
    """Nodes of four; the network between them has a quarter of the rate inside."""
    inside, beyond = network(rate, latency_s, 4), network(rate / 4, 3 * latency_s)
    return machine(inside, beyond, link_bytes_per_s=10e9, host_bytes_per_s=100e9, faster=faster)


@settings(max_examples=60)
@given(set_up=set_ups(), framework=stacks)
def test_parts_are_what_a_step_is_made_of(set_up: tuple[Transformer, Parallel, SettledSetup], framework: Stack) -> None:
    found = evaluated(*set_up, cluster(), framework)
    assert tuple(found.parts) == PARTS
    assert sum(one(part) for part in found.parts.values()) == pytest.approx(one(found.step_s), rel=1e-12)
    assert all(one(part) >= -1e-12 * one(found.step_s) for part in found.parts.values())
    assert np.isfinite(one(found.step_s))
    assert one(found.device_bytes) == max(float(stage.total[0]) for stage in found.stages)
    model, parallel, work = set_up
    kernels = Kernels(*set_up, cluster())
    # The slowest stage has its share of the layers' kernels at the least.
    count = placed(work, model, parallel, cluster()).accumulation_steps
    least = (count - 1) * float(kernels.forward[BLOCK] + kernels.backward[BLOCK]) * kernels.layers / parallel.pipeline
    assert one(found.step_s) >= least


@settings(max_examples=60)
@given(set_up=set_ups(), framework=stacks, factor=st.floats(1.05, 50))
def test_a_better_network_is_never_slower(
    set_up: tuple[Transformer, Parallel, SettledSetup], framework: Stack, factor: float
) -> None:
    before = one(evaluated(*set_up, cluster(), framework).step_s)
    assert one(evaluated(*set_up, cluster(rate=factor * 20e9), framework).step_s) <= before * (1 + EXACT)
    assert one(evaluated(*set_up, cluster(latency_s=factor * 5e-6), framework).step_s) >= before * (1 - EXACT)


@settings(max_examples=60)
@given(set_up=set_ups(), framework=stacks, factor=st.floats(1.05, 50))
def test_a_faster_device_is_never_slower(
    set_up: tuple[Transformer, Parallel, SettledSetup], framework: Stack, factor: float
) -> None:
    """With equal numbers of layers: dealt out by time they move, and the embedding's stage may get more of them.

    With stages, what collectives leave exposed may move from one stage, pass or micro-batch to another, whose largest
    are added up: a thousandth of the step, seen at 7e-4 and less.
    """
    model, parallel, work = set_up
    parallel = replace(parallel, balance="layers")
    slack = EXACT if parallel.pipeline == 1 else 5e-3
    before = one(evaluated(model, parallel, work, cluster(), framework).step_s)
    assert one(evaluated(model, parallel, work, cluster(faster=factor), framework).step_s) <= before * (1 + slack)


@settings(max_examples=60)
@given(
    set_up=set_ups(),
    framework=stacks,
    name=st.sampled_from(["products", "attention", "streaming", "host_layer_s", "step_s", "network", "interference"]),
    factor=st.floats(1.05, 10),
)
def test_a_worse_stack_is_never_faster(
    set_up: tuple[Transformer, Parallel, SettledSetup], framework: Stack, name: str, factor: float
) -> None:
    """What only a step waits for shows in full; all else may hide behind something slower.

    An interleaved stage that is not the slowest counts by a part of its time, and hides reductions behind all of it.
    """
    model, parallel, work = set_up
    parallel = replace(parallel, balance="layers")
    slack = 2e-2 if parallel.schedule == "interleaved" else EXACT
    larger = factor * framework.value(name) + (1e-4 if name in {"host_layer_s", "step_s", "interference"} else 0)
    worse = framework.with_values({name: larger})
    better, after = (evaluated(model, parallel, work, cluster(), each) for each in (framework, worse))
    assert one(after.step_s) >= one(better.step_s) * (1 - slack)
    if name == "step_s":
        assert one(after.step_s) - one(better.step_s) == pytest.approx(larger)


@settings(max_examples=40)
@given(set_up=set_ups())
def test_twice_the_replicas_are_never_slower_on_a_free_network(
    set_up: tuple[Transformer, Parallel, SettledSetup],
) -> None:
    """The same batch over more data ranks; on a real network what they exchange may cost more than they save."""
    model, parallel, work = set_up
    free = machine(network(1e24), link_bytes_per_s=10e9, host_bytes_per_s=100e9)
    parallel = replace(parallel, shard=None)
    before = one(evaluated(model, parallel, work, free).step_s)
    more = replace(parallel, data=2 * parallel.data)
    assert one(evaluated(model, more, work, free).step_s) <= before * (1 + 1e-6)


# -- many at once ------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(cases=st.lists(set_ups(), min_size=2, max_size=9), framework=stacks)
def test_many_at_once_are_as_many_alone(
    cases: list[tuple[Transformer, Parallel, SettledSetup]], framework: Stack
) -> None:
    hardware = cluster()
    setups = [placed(work, model, parallel, hardware) for model, parallel, work in cases]
    together = evaluate(listed(setups), hardware, framework)
    assert together.step_s.shape == (len(cases),)
    for index, case in enumerate(cases):
        alone = evaluated(*case, hardware, framework)
        assert together.step_s[index] == pytest.approx(one(alone.step_s), rel=1e-12)
        assert together.device_bytes[index] == pytest.approx(one(alone.device_bytes), rel=1e-12)
        assert together.slowest[index] == alone.slowest[0]
        for name in PARTS:
            assert together.parts[name][index] == pytest.approx(one(alone.parts[name]), rel=1e-9, abs=1e-15)
        for here, there in zip(together.stages, alone.stages, strict=True):
            assert here.total[index] == pytest.approx(one(there.total), rel=1e-12)


def test_different_models_and_lengths_share_a_list() -> None:
    hardware = cluster()
    lstm = load_model("lstm-lm")
    cases: list[tuple[Model, Parallel, SettledSetup]] = [
        (SMALL, Parallel(tensor=2), workload(5, 2, tokens=70)),
        (lstm, Parallel(pipeline=2), workload(3, 1, tokens=20)),
        (SMALL, Parallel(tensor=2), workload(7, 3, tokens=70)),
        (MIXTURE, Parallel(data=3), workload(7, 3, tokens=33)),
    ]
    setups = [placed(work, model, parallel, hardware) for model, parallel, work in cases]
    together = evaluate(listed(setups), hardware, NEUTRAL).step_s
    assert together.tolist() == pytest.approx([one(evaluated(*case, hardware).step_s) for case in cases], rel=1e-12)


# -- micro-batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "micro", "data", "expected"),
    [
        (8, 2, 2, ((2, 2),)),
        # 9 over 2: the fuller rank has 5
        (9, 2, 2, ((2, 2), (1, 1))),
        (8, 2, 4, ((2, 1),)),
        (48, 11, 1, ((11, 4), (4, 1))),
    ],
)
def test_micro_batches_of_the_fullest_rank(
    batch: int, micro: int, data: int, expected: tuple[tuple[int, int], ...]
) -> None:
    setup = workload(batch, micro, parallel=Parallel(data=data))
    assert setup.micro_batches() == expected
    assert setup.accumulation_steps == sum(count for _, count in expected)


@pytest.mark.parametrize(
    ("batch", "micro", "data", "words"),
    [
        (8, 9, 1, "a micro-batch of 9 is larger than the batch of 8"),
        (8, 8, 4, "a micro-batch of 8 is larger than a data rank's 2"),
        (3, 3, 8, "a batch of 3 sequences is less than one for each of 8 data ranks"),
    ],
)
def test_a_batch_that_ranks_cannot_share_is_refused(batch: int, micro: int, data: int, words: str) -> None:
    with pytest.raises(FlopwiseError, match=words):
        workload(batch, micro, parallel=Parallel(data=data))


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(data=2),
        Parallel(data=2, zero=3),
        Parallel(data=2, pipeline=3),
        Parallel(data=2, pipeline=3, schedule="gpipe", zero=1),
        Parallel(data=2, tensor=2, pipeline=3, schedule="interleaved", chunks=2, balance="time"),
    ],
)
def test_a_smaller_last_micro_batch_lies_between(parallel: Parallel) -> None:
    """17 sequences a rank in eights: longer than 16, shorter than 24, as much as 34 that do not divide over the two."""
    hardware = cluster()
    sixteen, seventeen, ragged, more = (
        one(evaluated(SMALL, parallel, workload(batch, 8), hardware).step_s) for batch in (32, 34, 33, 48)
    )
    assert sixteen < seventeen < more
    assert ragged == seventeen


def test_a_second_micro_batch_takes_time_even_where_it_is_smaller() -> None:
    """3 + 2 sequences over three interleaved stages: no less than 3 alone, which pass all stages one by one."""
    parallel, hardware = Parallel(pipeline=3, schedule="interleaved", chunks=2), machine(network(1e24))
    alone, more = (one(evaluated(SMALL, parallel, workload(batch, 3), hardware).step_s) for batch in (3, 5))
    assert more >= alone


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_of_unequal_stages_is_the_simulated_one(schedule: Any) -> None:
    """Stages of 2, 3, 3 and 2 layers, the embedding on the first and the head on the last; no time for hops."""
    model, hardware = replace(SMALL, layers=10), machine(network(1e24))
    parallel, work = Parallel(pipeline=4, schedule=schedule), workload(14, 2)
    kernels = Kernels(model, parallel, work, hardware)
    ends = (EMBEDDING, None, None, HEAD)

    def seconds(by_part: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
        return [
            float(layers * by_part[BLOCK] + (by_part[end] if end is not None else 0.0))
            for layers, end in zip((2, 3, 3, 2), ends, strict=True)
        ]

    forward, backward = seconds(kernels.forward), seconds(kernels.backward)
    played = simulate(SCHEDULES.index(schedule), forward, backward, 7).seconds
    found = evaluated(model, parallel, work, hardware)
    assert [float(shape.layers[0]) for shape in found.shapes] == [2, 3, 2]
    piped = one(found.step_s) - one(found.parts["update"])
    if schedule == "gpipe":
        assert piped == pytest.approx(played)
    assert played * (1 - EXACT) <= piped <= 1.1 * played
    slowest = max(front + back for front, back in zip(forward, backward, strict=True))
    assert one(found.parts["bubble"]) == pytest.approx(piped - 7 * slowest)


def test_layers_that_are_not_there_do_not_fill_the_pipeline() -> None:
    """Nine layers over four stages are 2, 3, 2 and 2: one micro-batch passes nine, not ten."""
    model, hardware = replace(SMALL, layers=9), machine(network(1e24))
    parallel, work = Parallel(pipeline=4), workload(1, 1)
    found = evaluated(model, parallel, work, hardware)
    kernels = Kernels(model, parallel, work, hardware)
    assert one(found.step_s) - one(found.parts["update"]) == pytest.approx(kernels.total())


# -- corners -----------------------------------------------------------------------------------------------------------


def test_as_many_stages_as_layers() -> None:
    hardware = machine(network(1e24))
    kernels = Kernels(SMALL, Parallel(pipeline=6), workload(8, 1), hardware)
    found = evaluated(SMALL, Parallel(pipeline=6), workload(8, 1), hardware)
    both = kernels.forward + kernels.backward
    longest = float(both[BLOCK] + max(both[EMBEDDING], both[HEAD]))
    busy = sum(one(found.parts[name]) for name in ("products", "attention", "streaming"))
    assert busy == pytest.approx(8 * longest)


HEADED = replace(SMALL, layers=4, vocab=400_000)
"""Its head takes longer than all of its layers."""


def test_dealt_out_by_time_a_head_may_stand_alone() -> None:
    hardware, work = machine(network(1e24)), workload(16, 1)
    kernels = Kernels(HEADED, Parallel(pipeline=3), work, hardware)
    both = kernels.forward + kernels.backward
    assert both[HEAD] > 4 * both[BLOCK]
    found = evaluated(HEADED, Parallel(pipeline=3, balance="time"), work, hardware)
    assert [float(shape.layers[0]) for shape in found.shapes] == [2, 2, 0]
    assert found.slowest[0] == LAST
    busy = sum(one(found.parts[name]) for name in ("products", "attention", "streaming"))
    assert busy == pytest.approx(16 * both[HEAD])
    # 1f1b: all stages once, and 15 more times the head.
    piped = one(found.step_s) - one(found.parts["update"])
    assert piped == pytest.approx(kernels.total() + 15 * both[HEAD])
    equal = evaluated(HEADED, Parallel(pipeline=3), work, hardware)
    assert one(found.step_s) < one(equal.step_s)


def test_a_smaller_last_micro_batch_does_not_move_layers() -> None:
    """Dealt out by the whole micro-batch's times: the smaller one runs where the layers are.

    By its own time the head of one sequence would stand alone too, so the check is against its kernels by hand.
    """
    hardware = machine(network(1e24))
    model = replace(SMALL, layers=12, vocab=60_000)
    parallel = Parallel(pipeline=2, balance="time")
    whole, rest = (Kernels(model, parallel, workload(2 * size, size), hardware) for size in (64, 1))
    first, _, last = (
        float(shape.layers[0]) for shape in evaluated(model, parallel, workload(129, 64), hardware).shapes
    )
    alone = [float(shape.layers[0]) for shape in evaluated(model, parallel, workload(2, 1), hardware).shapes]
    assert (first, last) != (alone[0], alone[2]), "the two sizes must disagree for this to be a test"

    def slowest(kernels: Kernels) -> float:
        both = kernels.forward + kernels.backward
        return float(max(first * both[BLOCK] + both[EMBEDDING], last * both[BLOCK] + both[HEAD]))

    found = evaluated(model, parallel, workload(129, 64), hardware)
    full = evaluated(model, parallel, workload(192, 64), hardware)
    assert one(full.step_s) - one(found.step_s) == pytest.approx(slowest(whole) - slowest(rest))


def test_constants_of_a_stack_scale_their_kernels() -> None:
    plain = evaluated(SMALL, Parallel(), workload(6, 2), machine())
    found = evaluated(SMALL, Parallel(), workload(6, 2), machine(), stack(products=2, attention=3, streaming=5))
    for name, factor in (("products", 2), ("attention", 3), ("streaming", 5), ("update", 5)):
        assert one(found.parts[name]) == pytest.approx(factor * one(plain.parts[name]))
