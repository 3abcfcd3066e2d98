"""Training in fp8: its losses beside those of bf16, its gradients, and its memory within the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flopwise.catalog.load import load_hardware
from flopwise.engine.data import DataRequest, open_language_data
from flopwise.engine.kernels import fp8
from flopwise.engine.streaming.executor import StreamingExecutor
from flopwise.engine.weights.initial import initial_values
from flopwise.plan import CappedSetup, compile_plan, make_plan
from flopwise.plan.program.sizes import sizes_of
from flopwise.records.plan import Plan
from flopwise.setup.training import Training
from flopwise.train.planning import products_not_in_fp8
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats
from flopwise.work.op import Gemm
from flopwise.work.parameters import parameters_of
from flopwise.work.transformer import Transformer
from tests.engine.test_streaming_memory import assert_within_plan
from tests.support.tiny_models import TINY
from tests.support.training_plans import (
    CPU,
    GRADIENTS,
    assert_same_bits,
    cut_plan,
    everything_stays,
    executor_for,
    first_gradients,
    random_batch,
    total_error,
)

TOKENS = 64


def sixteens(name: str, **changes: Any) -> Transformer:
    """A small model whose sides are multiples of sixteen."""
    settled: dict[str, Any] = {"hidden": 64, "heads": 4, "head_dim": 16, "ffn": 176, "vocab": 272, "context": 1024}
    settled |= {"kv_heads": 2} if TINY[name].positions == "rotary" else {"kv_heads": 4, "position_rows": 1024}
    return replace(TINY[name], **(settled | changes))


def weights_of(model: Transformer, tokens: int = TOKENS) -> dict[str, Tensor]:
    """What a training begins with."""
    found = parameters_of(model, tokens)
    return {each.name: initial_values(each, 0, model.layers) for each in found}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """Sides of every product that is made in fp8."""
    made: list[tuple[int, int, int]] = []
    plain = fp8.multiply

    def counted(left: Tensor, left_scales: Tensor, right: Tensor, *rest: Any, **named: Any) -> None:
        made.append((left.shape[0], left.shape[1], right.shape[0]))
        plain(left, left_scales, right, *rest, **named)

    monkeypatch.setattr(fp8, "multiply", counted)
    yield made


# -- losses ----------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_bf16_within_a_few_per_cent(tmp_path: Path, products: list[tuple[int, int, int]]) -> None:
    model, sequences, steps = sixteens("llama"), 8, 30
    data = open_language_data(DataRequest(sequence_tokens=TOKENS, vocab=model.vocab, cache=tmp_path))
    training = Training(steps=steps, learning_rate=3e-3, warmup_steps=3, stochastic_rounding=True)
    first = weights_of(model)
    losses: dict[str, list[float]] = {}
    for precision in ("bf16", "fp8"):
        plan = everything_stays(model, sequence=TOKENS, sequences=sequences, precision=precision, head_chunk_tokens=256)
        executor = executor_for(plan, model, first, training)
        losses[precision] = [executor.step(data.batch(step * sequences, sequences), step).loss for step in range(steps)]
        assert bool(products) is (precision == "fp8")
    # Forward and both gradients of every product of the blocks, in however many calls.
    inside = [op for op in describe(model, TOKENS).ops if op.in_block and isinstance(op, Gemm)]
    wanted = 3 * steps * sequences * sum(op.forward_flops() for op in inside)
    assert sum(2 * prod(sides) for sides in products) == wanted
    bf16, narrow = (torch.tensor(losses[name], dtype=torch.float64) for name in ("bf16", "fp8"))
    assert float(bf16[-5:].mean()) < 0.75 * float(bf16[0])
    assert float(((narrow - bf16) / bf16).abs().amax()) < 0.03
    assert float(((narrow - bf16) / bf16)[-10:].mean().abs()) < 0.015
    # By the end the weights have gone different ways.
    assert (narrow[1:] != bf16[1:]).all()


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama-biased", "gpt2", "bert-masked"])
def test_gradients_are_near_those_of_bf16(family: str, products: list[tuple[int, int, int]]) -> None:
    model = sixteens(family)
    batch, first = random_batch(model, 2, TOKENS, 0), weights_of(model)
    found = {}
    for precision in ("bf16", "fp8"):
        plan = everything_stays(model, sequence=TOKENS, sequences=2, precision=precision)
        executor = executor_for(plan, model, first, GRADIENTS)
        executor.step(batch, 0)
        found[precision] = first_gradients(executor)
    error = total_error(found["fp8"], {name: values.double() for name, values in found["bf16"].items()})
    assert 1e-3 < error < 0.15
    # No side of a product is the vocabulary: the head's are not among them.
    assert products and not any(model.vocab in sides for sides in products)


def test_what_is_made_again_is_the_same(products: list[tuple[int, int, int]]) -> None:
    model = sixteens("llama")
    batch, first = random_batch(model, 2, TOKENS, 0), weights_of(model)
    found, counts = [], []
    for saves in (("F", "F"), ("i", "a")):
        products.clear()
        plan = everything_stays(model, sequence=TOKENS, sequences=2, precision="fp8", saves=saves)
        executor = executor_for(plan, model, first, GRADIENTS)
        executor.step(batch, 0)
        found.append(first_gradients(executor))
        counts.append(len(products))
    assert_same_bits(found[1], found[0])
    assert counts[0] < counts[1]


def test_sides_that_are_no_multiples_are_trained_in_bf16(products: list[tuple[int, int, int]]) -> None:
    model = sixteens("llama", ffn=180)
    executor = executor_for(
        everything_stays(model, sequence=TOKENS, precision="fp8"), model, weights_of(model), GRADIENTS
    )
    loss = executor.step(random_batch(model, 1, TOKENS, 0), 0).loss
    assert loss == pytest.approx(5.6, abs=0.6)
    assert products and not any(180 in sides for sides in products)


# -- memory ----------------------------------------------------------------------------------------------------------


def shapes(model: Transformer, tokens: int, **changes: Any) -> Iterator[Plan]:
    yield everything_stays(model, sequence=tokens, saves=("F", "F"), **changes)
    yield everything_stays(model, sequence=tokens, sequences=2, saves=("i", "a"), **changes)
    for attention in ("chunk", "sequence") if model.causal else ("sequence",):
        yield cut_plan(model, sequence=tokens, chunk=tokens // 4, letters="iFac", attention=attention, **changes)


def wide(family: str) -> Transformer:
    """Large enough that copies in fp8 are more than what begins at lines."""
    rotary = TINY[family].positions == "rotary"
    return sixteens(family, hidden=256, heads=8, kv_heads=2 if rotary else 8, head_dim=32, ffn=704)


MASTER, SINGLE_STATE = "fp8,master=fp32,moments=fp32", "fp8,weights=fp32,gradients=fp32"


@pytest.mark.parametrize(
    ("family", "precision", "packs"),
    [
        ("llama", "fp8", True),
        ("gpt2", SINGLE_STATE, False),
        pytest.param("llama", "fp8", False, marks=pytest.mark.slow),
        pytest.param("llama", MASTER, True, marks=pytest.mark.slow),
        pytest.param("llama", SINGLE_STATE, True, marks=pytest.mark.slow),
        pytest.param("gpt2", "fp8", True, marks=pytest.mark.slow),
        pytest.param("bert-masked", "fp8", True, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_taken_beside_the_room(
    family: str, precision: str, packs: bool, products: list[tuple[int, int, int]]
) -> None:
    model = wide(family)
    first = weights_of(model, 256)
    for plan in shapes(model, 256, precision=precision, head_chunk_tokens=64):
        products.clear()
        program = compile_plan(plan, model)
        executor = StreamingExecutor(plan, program, model, Training(steps=1), device=CPU, packs=packs)
        executor.clear_moments()
        executor.set_weights(first)
        batch = random_batch(model, plan.sequences_per_round, 256, 0)
        executor.step(batch, 0)
        executor.evaluate([batch])
        assert products
        assert executor.player.arena.peak_beside_bytes == 0
        assert executor.player.arena.empty
        assert all(row.measured_bytes == 0 for row in executor.memory() if row.owner == "unaccounted")


def test_copies_are_planned_for_each_token_and_each_matrix() -> None:
    model = wide("llama")
    bf16, narrow = (sizes_of(model, 256, parse_formats(name), "adamw") for name in ("bf16", "fp8"))
    # Gate and up read one input: copies of their gradients, a scale, and a product in bf16 to be added.
    assert narrow.temporary - bf16.temporary == 2 * 704 + 2 * 256 + 4
    assert 2 * 704 * 256 * 2 < narrow.fixed_workspace - bf16.fixed_workspace < 2 * 704 * 256 * 2 + 20_000
    assert replace(narrow, temporary=bf16.temporary, fixed_workspace=bf16.fixed_workspace) == bf16


def test_no_allocation_of_a_step_is_beyond_the_plan() -> None:
    model = wide("llama")
    plan = cut_plan(
        model, sequence=1024, chunk=512, letters="iF", attention="chunk", precision="fp8", head_chunk_tokens=256
    )
    assert_within_plan(replace(plan, device_memory_bytes=1 << 30), model)


@pytest.mark.parametrize("cap_mib", [60, pytest.param(100, marks=pytest.mark.slow)])
def test_a_plan_under_a_cap_holds_it(cap_mib: int) -> None:
    model = replace(wide("llama"), layers=4)
    question = CappedSetup(
        model=model,
        hardware=load_hardware("h200"),
        sequence_tokens=512,
        device_cap_bytes=cap_mib << 20,
        host_cap_bytes=1 << 30,
        batch_sequences=4,
        formats=parse_formats("fp8"),
    )
    plan = make_plan(question, helps=False).plan
    executor = StreamingExecutor(plan, compile_plan(plan, model), model, Training(steps=1), device=CPU)
    executor.clear_moments()
    executor.set_weights(weights_of(model))
    executor.step(random_batch(model, 4, 512, 0), 0)
    assert executor.player.arena.peak_beside_bytes == 0
    assert sum(row.planned_bytes for row in executor.memory() if row.place == "device") <= cap_mib << 20


def test_what_does_not_run_in_fp8_is_told() -> None:
    model = replace(TINY["llama"], hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=176)
    assert products_not_in_fp8(everything_stays(model, sequence=32, precision="fp8"), model) is None
    assert products_not_in_fp8(everything_stays(model, sequence=17, precision="bf16"), model) is None
    told = products_not_in_fp8(everything_stays(model, sequence=17, precision="fp8"), model)
    assert told is not None and "chunks of 17 tokens" in told
    odd = replace(model, ffn=model.ffn + 8)
    told = products_not_in_fp8(everything_stays(odd, sequence=32, precision="fp8"), odd)
    assert told is not None and "gate_up, down" in told and "qkv" not in told
