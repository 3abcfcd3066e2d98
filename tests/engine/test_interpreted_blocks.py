"""Whole steps by Triton's kernels where there is no GPU: as its interpreter runs them, beside autograd in fp64.

For whoever changes a kernel: `TRITON_INTERPRET=1 python -m pytest tests/engine/test_interpreted_blocks.py` with Triton
at hand. Kernels of single operators have tests of their own; these find what only their callers get wrong.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from flopwise.engine.kernels import dispatch, fused_experts
from flopwise.engine.streaming import adapters, operators
from flopwise.engine.streaming.adapters import MOST_FUSED_DEPTH
from flopwise.engine.weights.adapter_files import adapter_config
from flopwise.work.adapters import Adapters
from flopwise.work.transformer import Transformer
from tests.support.adapted_modules import adapt, ours, trained
from tests.support.tiny_models import TINY, parameters, random_module
from tests.support.training_plans import (
    everything_stays,
    executor_for,
    first_gradients,
    random_batch,
    reference_gradients,
    total_error,
)
from tests.support.triton_device import IS_INTERPRETED, MARKS

pytestmark = [*MARKS, pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU runs these steps by itself")]

SEQUENCE = 7
LIMIT = 3e-5
"""Of gradients in fp32."""
MIXTURES = [name for name, model in TINY.items() if model.experts]
STATES = [name for name, model in TINY.items() if model.recurrent_blocks]
DENSE = [name for name in TINY if name not in {*MIXTURES, *STATES}]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that have a form for such numbers, on tensors of a CPU."""
    monkeypatch.setattr(dispatch, "is_fused", lambda *_: True)
    monkeypatch.setattr(operators, "expert_kernels", lambda *_: fused_experts)
    monkeypatch.setattr(adapters, "_has_kernel", lambda thin, _: thin.low.shape[1] <= MOST_FUSED_DEPTH)


@pytest.mark.parametrize("letters", ["F", "ic"])
@pytest.mark.parametrize("name", TINY)
def test_gradients_are_autograds(name: str, letters: str) -> None:
    check(TINY[name], letters)


@pytest.mark.parametrize("frozen", [("blocks.0",), ("embedding", "head")])
@pytest.mark.parametrize("name", DENSE)
def test_frozen_parts_change_no_other_gradient(name: str, frozen: tuple[str, ...]) -> None:
    model = TINY[name]
    if model.tied or model.embedding_norm:
        frozen = tuple(part for part in frozen if part.startswith("blocks"))
    if frozen:
        check(replace(model, frozen=frozen), "F")


def check(model: Transformer, letters: str) -> None:
    exact = random_module(model)
    saves = tuple(letters[layer % len(letters)] for layer in range(model.layers))
    plan = everything_stays(model, sequence=SEQUENCE, sequences=2, saves=saves, precision="fp32")
    batch = random_batch(model, 2, SEQUENCE, 3)
    loss, expected = reference_gradients(exact, batch)
    executor = executor_for(plan, model, parameters(exact), packs=True)
    assert executor.step(batch, 0).loss == pytest.approx(loss, rel=1e-4)
    found = first_gradients(executor)
    assert total_error(found, {each: expected[each] for each in found}) <= LIMIT
    executor.close()


@pytest.mark.parametrize("magnitudes", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", [name for name in DENSE if TINY[name].head == "language"])
def test_adapters_have_autograds_gradients(name: str, magnitudes: bool) -> None:
    check_adapters(replace(TINY[name], adapters=Adapters(rank=3, alpha=2.0, magnitudes=magnitudes)))


@pytest.mark.parametrize("name", [name for name in MIXTURES if name not in {*STATES, "llama4_text"}])
def test_adapters_beside_experts_have_autograds_gradients(name: str) -> None:
    check_adapters(replace(TINY[name], adapters=Adapters(rank=3, alpha=2.0)))


def check_adapters(model: Transformer) -> None:
    joined = tuple(each for each in ("qkv", "gate_up", "latent_up") if joins(model, each))
    exact = adapt(model, dtype=torch.float64, joined=joined)
    plan = everything_stays(model, sequence=SEQUENCE, sequences=2, saves=("F",) * model.layers, precision="fp32")
    batch = random_batch(model, 2, SEQUENCE, 3)
    loss = exact.loss(torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.labels).long())
    torch.autograd.backward(loss / batch.with_loss)
    executor = executor_for(plan, model, ours(exact), packs=True)
    assert executor.step(batch, 0).loss == pytest.approx(float(loss.detach()) / batch.with_loss, rel=1e-4)
    expected, found = trained(exact), first_gradients(executor)
    assert total_error(found, {each: expected[each] for each in found}) <= LIMIT
    executor.close()


def joins(model: Transformer, product: str) -> bool:
    """Whether a file of the family has one matrix for all of a product's results."""
    names = adapter_config(model, None)["target_modules"]
    if product == "latent_up":
        return model.latent is not None
    if product == "gate_up" and model.family == "gpt_oss":
        return True
    return {"qkv": {"c_attn", "qkv_proj", "Wqkv"}, "gate_up": {"gate_up_proj", "Wi"}}[product] & set(names) != set()
