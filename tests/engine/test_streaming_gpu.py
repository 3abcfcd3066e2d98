"""The streaming executor on a GPU: gradients against fp64 on the CPU, equal bits across plans, memory as planned."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

# Before a handle of the library is made: with this its products are repeatable.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from flopwise.engine.batch import Batch  # noqa: E402
from flopwise.records.plan import Plan, Residency  # noqa: E402
from flopwise.setup.training import Training  # noqa: E402
from flopwise.work.adapters import Adapters  # noqa: E402
from flopwise.work.latent import LatentAttention  # noqa: E402
from flopwise.work.routing import Routing  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support.adapted_modules import adapt, ours, trained  # noqa: E402
from tests.support.tiny_models import TINY, parameters, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    assert_same_bits,
    cut_plan,
    everything_stays,
    executor_for,
    first_gradients,
    random_batch,
    reference_gradients,
    state_of,
    total_error,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SEQUENCE = 49
STEPS = 5
TRAINING = Training(steps=STEPS, learning_rate=1e-2, warmup_steps=2)
WIDER: dict[str, Any] = {"hidden": 64, "heads": 8, "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 203}
FAMILIES: dict[str, Transformer] = {
    "llama": replace(TINY["llama"], **WIDER),
    "mistral": replace(TINY["mistral"], **WIDER),
    "qwen3": replace(TINY["qwen3"], **{**WIDER, "head_dim": 24}),
    "gpt2": replace(TINY["gpt2"], **{**WIDER, "kv_heads": 8, "head_dim": 8, "position_rows": SEQUENCE}),
    "bert": replace(TINY["bert"], **{**WIDER, "kv_heads": 8, "head_dim": 8, "position_rows": SEQUENCE}),
    "bert-masked": replace(
        TINY["bert-masked"], **{**WIDER, "kv_heads": 8, "head_dim": 8, "position_rows": SEQUENCE}, loss_share=0.3
    ),
    "deepseek_v3": replace(
        TINY["deepseek_v3"],
        **{**WIDER, "kv_heads": 8, "head_dim": 24, "rotary_dim": 8, "ffn": 32},
        latent=LatentAttention(rank=32, value_dim=16, query_rank=48),
    ),
}
CUTS = ("whole", "chunk", "sequence")
STATE = ("weights", "gradients", "optimizer_state")
PASSING: dict[str, Any] = dict.fromkeys(STATE, Residency(blocks=0, passing=1))
SOME: dict[str, Any] = dict.fromkeys(STATE, Residency(blocks=1, passing=2, ends=("head",)))


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def planned(model: Transformer, cut: str, letters: str, **changes: Any) -> Plan:
    """Three sequences in a chunk, or one in chunks of 16 with a tail of one token."""
    changes = {"precision": "bf16", "head_chunk_tokens": 20, **changes}
    if cut == "whole":
        saves = tuple(letters[layer % len(letters)] for layer in range(model.layers))
        return everything_stays(model, sequence=SEQUENCE, sequences=3, saves=saves, **changes)
    return cut_plan(model, sequence=SEQUENCE, chunk=16, letters=letters, attention=cut, **changes)


def batch_for(plan: Plan, model: Transformer, seed: int, *, ragged: bool = False) -> Batch:
    return random_batch(model, plan.sequences_per_round * plan.rounds_per_step, SEQUENCE, seed, ragged=ragged)


@pytest.fixture(params=["cuda"])
def device(request: pytest.FixtureRequest) -> Any:
    return torch.device(request.param)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fastest", "deterministic"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_cpu_in_fp64(family: str, cut: str, deterministic: bool, device: Any) -> None:
    model = FAMILIES[family]
    if not model.causal and cut == "chunk":
        pytest.skip("a model that looks ahead has no attention by chunk")
    exact = random_module(model, dtype=torch.bfloat16).double()
    with repeatable(deterministic):
        for letters in ("f", "a", "c", "i", "F", "A", "C", "I", "faciFACI"):
            plan = planned(model, cut, letters)
            batch = batch_for(plan, model, 3, ragged=letters in "fC")
            loss, expected = reference_gradients(exact, batch)
            plain_loss, plain = reference_gradients(random_module(model, dtype=torch.bfloat16), batch)
            executor = executor_for(plan, model, parameters(exact), device=device, deterministic=deterministic)
            # A loss of three rows is as far off as plain modules in bf16 are: 0.02 with pairs of texts.
            rounding = max(0.01, 2 * abs(plain_loss - loss))
            assert executor.step(batch, 0).loss == pytest.approx(loss, rel=0.02, abs=rounding)
            assert total_error(first_gradients(executor), expected) <= 2 * total_error(plain, expected)
            executor.close()


BESIDE = Adapters(rank=16, alpha=2.0)
LATENT_ALONE = replace(
    FAMILIES["deepseek_v3"],
    experts=0,
    experts_per_token=0,
    shared_ffn=0,
    dense_blocks=(),
    dense_ffn=0,
    routing=Routing(),
)
"""Without a choice of experts, which a rounding may turn."""
ADAPTED: dict[str, Transformer] = {
    "lora": replace(FAMILIES["llama"], adapters=BESIDE),
    "dora": replace(FAMILIES["llama"], adapters=replace(BESIDE, magnitudes=True)),
    "dora with biases": replace(TINY["gpt2"], adapters=replace(BESIDE, magnitudes=True), position_rows=SEQUENCE),
    "latents": replace(LATENT_ALONE, adapters=BESIDE),
    "experts in one tensor": replace(TINY["gpt_oss"], **{**WIDER, "ffn": 32}, adapters=BESIDE),
}
JOINED = {"dora with biases": ("qkv",), "latents": ("latent_up",), "experts in one tensor": ("gate_up",)}


@pytest.mark.parametrize("base", ["bf16", "nf4"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_have_the_gradients_of_the_cpu(kind: str, cut: str, base: str, device: Any) -> None:
    """Adapters in fp32 beside weights in bf16, or over NF4, where the error of these is not held against them."""
    model = ADAPTED[kind]
    joined = JOINED.get(kind, ())
    plain = adapt(model, dtype=torch.float32, joined=joined).to(torch.bfloat16)
    exact = adapt(model, dtype=torch.float32, joined=joined).to(torch.bfloat16).double()
    for letters in ("f", "F", "c", "i", "faciFACI"):
        plan = planned(model, cut, letters, precision=f"bf16-amp,base={base}")
        batch = batch_for(plan, model, 3)
        losses = []
        for module in (exact, plain):
            module.zero_grad()
            loss = module.loss(torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.labels).long())
            torch.autograd.backward(loss / batch.with_loss)
            losses.append(float(loss.detach()) / batch.with_loss)
        executor = executor_for(plan, model, ours(exact), device=device)
        found = executor.step(batch, 0).loss
        assert found == pytest.approx(losses[0], rel=0.02 if base == "bf16" else 0.2)
        if base == "bf16":
            expected = trained(exact)
            limit = 2 * total_error({name: value.float() for name, value in trained(plain).items()}, expected)
            assert total_error(first_gradients(executor), expected) <= limit
        executor.close()


def variants(model: Transformer, cut: str, **changes: Any) -> Iterator[Plan]:
    for letters in ("F", "f", "a", "c", "i", "A", "C", "I", "faciFACI"):
        yield planned(model, cut, letters, **changes)
    for residency in (PASSING, {**PASSING, "update_place": "host"}, {**SOME, "host_copies": True}):
        yield planned(model, cut, "Fi", **changes, **residency)


def assert_all_alike(plans: Iterator[Plan], model: Transformer, training: Training, device: Any) -> None:
    weights = parameters(random_module(model))
    expected: tuple[list[float], dict[str, Tensor]] | None = None
    for plan in plans:
        executor = executor_for(plan, model, weights, training, device=device, deterministic=True)
        losses = [executor.step(batch_for(plan, model, step), step).loss for step in range(STEPS)]
        found = losses, state_of(executor)
        executor.close()
        expected = expected or found
        assert found[0] == expected[0]
        assert_same_bits(found[1], expected[1])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_save_levels_and_residencies_change_no_bit(family: str, cut: str, device: Any) -> None:
    model = FAMILIES[family]
    if not model.causal and cut == "chunk":
        pytest.skip("a model that looks ahead has no attention by chunk")
    with repeatable(True):
        assert_all_alike(variants(model, cut, rounds_per_step=2), model, TRAINING, device)


@pytest.mark.parametrize("cut", CUTS)
def test_clipped_and_rounded_by_chance_all_residencies_are_alike(cut: str, device: Any) -> None:
    model = replace(FAMILIES["llama"], layers=3)
    training = replace(TRAINING, clip_norm=0.5, stochastic_rounding=True, seed=5)
    with repeatable(True):
        assert_all_alike(variants(model, cut, rounds_per_step=3, update_when="end"), model, training, device)


def test_an_evaluation_leaves_no_trace(device: Any) -> None:
    model = FAMILIES["llama"]
    weights = parameters(random_module(model))
    with repeatable(True):
        for plan in variants(model, "chunk", rounds_per_step=2):
            states = []
            for watched in (False, True):
                executor = executor_for(plan, model, weights, TRAINING, device=device, deterministic=True)
                for step in range(3):
                    if watched:
                        executor.evaluate([batch_for(plan, model, 99)])
                    executor.step(batch_for(plan, model, step), step)
                states.append(state_of(executor))
                executor.close()
            assert_same_bits(states[1], states[0])


BIG: dict[str, Any] = {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 1408, "vocab": 8003}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shape", ["llama", "qwen3", "wide queries", "gpt2"])
def test_a_step_takes_no_more_memory_than_planned(shape: str, cut: str, device: Any) -> None:
    model = {
        "llama": replace(TINY["llama"], **BIG),
        "qwen3": replace(TINY["qwen3"], **BIG),
        # As Qwen3 0.6B has them: queries that are twice as wide as the stream.
        "wide queries": replace(TINY["qwen3"], **{**BIG, "heads": 16}),
        "gpt2": replace(TINY["gpt2"], **{**BIG, "kv_heads": 8, "position_rows": 16384}),
    }[shape]
    changes: dict[str, Any] = {"precision": "bf16", "head_chunk_tokens": 2048}
    if cut == "whole":
        plan = everything_stays(model, sequence=16384, sequences=4, saves=("i", "F"), **changes)
    else:
        plan = cut_plan(model, sequence=16384, chunk=4096, letters="iF", attention=cut, **changes)
    executor = executor_for(plan, model, {}, TRAINING, device=device)
    for parameter in executor.parameters:
        executor.set_weights({parameter.name: torch.randn(parameter.shape) * 0.02})
    sequences = plan.sequences_per_round
    for step in range(2):
        executor.step(random_batch(model, sequences, plan.sequence_tokens, step), step)
    memory = executor.memory()
    executor.close()
    beyond = sum(row.measured_bytes for row in memory if row.owner == "unaccounted")
    # Products with a bias take a workspace of their own, which no plan counts: 4 MiB were seen for GPT-2 by chunk.
    assert beyond <= (8 << 20 if shape == "gpt2" else 0)
