"""Adapters and frozen parts in the streaming executor: gradients against autograd's on plain modules, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flopwise.engine.batch import Batch  # noqa: E402
from flopwise.plan.program.compile import compile_plan  # noqa: E402
from flopwise.records.plan import Plan, Residency  # noqa: E402
from flopwise.records.program import check  # noqa: E402
from flopwise.setup.training import Training  # noqa: E402
from flopwise.work.adapters import LATENTS, TARGETS, Adapters  # noqa: E402
from flopwise.work.parameters import parameters_of  # noqa: E402
from flopwise.work.transformer import Dropout, Transformer  # noqa: E402
from tests.support.adapted_modules import adapt, ours, trained  # noqa: E402
from tests.support.dropped_reference import DocumentedDrops  # noqa: E402
from tests.support.tiny_models import GPT2, LLAMA, TINY, TOKENS, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    GRADIENTS,
    cut_plan,
    everything_stays,
    executor_for,
    first_gradients,
    largest_error,
    random_batch,
)

ALL = Adapters(rank=3, alpha=5.0)
DORA = replace(ALL, magnitudes=True)
DROPOUT = Dropout(embedding=0.2, hidden=0.3, attention=0.25)
TUNED = {
    "llama": replace(LLAMA, adapters=ALL),
    "llama, tied": replace(LLAMA, adapters=ALL, tied=True),
    "llama, queries and values": replace(LLAMA, adapters=replace(ALL, targets=("q", "v"))),
    "llama, down alone": replace(LLAMA, adapters=replace(ALL, targets=("down",), rank=1)),
    "llama, stabilised": replace(LLAMA, adapters=replace(ALL, rank_stabilised=True, targets=("o", "gate"))),
    "qwen2": replace(TINY["qwen2"], adapters=ALL),
    "qwen3": replace(TINY["qwen3"], adapters=ALL),
    "olmo2": replace(TINY["olmo2"], adapters=ALL),
    "granite": replace(TINY["granite"], adapters=ALL),
    "cohere": replace(TINY["cohere"], adapters=ALL),
    "gpt2": replace(GPT2, adapters=ALL),
    "gpt2's shape, a layer for each": replace(GPT2, adapters=ALL, family="starcoder2"),
    "phi3": replace(LLAMA, adapters=ALL, family="phi3"),
    "glm": replace(LLAMA, adapters=replace(ALL, targets=("k", "gate", "up", "down")), family="glm"),
    "beside each other": replace(LLAMA, adapters=ALL, parallel_residual=True),
    "norms behind": replace(LLAMA, adapters=ALL, norm_place="post", embedding_norm=True),
    "mixture": replace(TINY["qwen3_moe"], adapters=ALL),
    "mixture, down alone": replace(TINY["mixtral"], adapters=replace(ALL, targets=("o", "down"), rank=1)),
    "mixture, gates": replace(TINY["mixtral"], adapters=replace(ALL, targets=("v", "gate"))),
    "mixture, shared and dense": replace(TINY["glm4_moe"], adapters=ALL),
    "mixture, gated shared": replace(TINY["qwen2_moe"], adapters=replace(ALL, targets=("up", "down"))),
    "mixture, attention": replace(TINY["glm4_moe"], adapters=replace(ALL, targets=("q", "k", "v", "o"))),
    "dora, llama": replace(LLAMA, adapters=DORA),
    "dora, llama, queries and values": replace(LLAMA, adapters=replace(DORA, targets=("q", "v"))),
    "dora, llama, keys and down": replace(LLAMA, adapters=replace(DORA, targets=("k", "down"), rank_stabilised=True)),
    "dora, llama, gates": replace(LLAMA, adapters=replace(DORA, targets=("o", "gate"), rank=1)),
    "dora, qwen2": replace(TINY["qwen2"], adapters=DORA),
    "dora, qwen3": replace(TINY["qwen3"], adapters=DORA),
    "dora, olmo2": replace(TINY["olmo2"], adapters=DORA),
    "dora, granite": replace(TINY["granite"], adapters=DORA),
    "dora, cohere": replace(TINY["cohere"], adapters=DORA),
    "dora, gpt2": replace(GPT2, adapters=DORA),
    "dora, gpt2's shape, a layer for each": replace(GPT2, adapters=DORA, family="starcoder2"),
    "dora, phi3": replace(LLAMA, adapters=DORA, family="phi3"),
    "dora, beside each other": replace(LLAMA, adapters=DORA, parallel_residual=True),
    "dora, norms behind": replace(LLAMA, adapters=DORA, norm_place="post", embedding_norm=True),
    "dora, mixture's attention": replace(TINY["glm4_moe"], adapters=replace(DORA, targets=("q", "k", "v", "o"))),
    "some blocks, llama": replace(LLAMA, adapters=ALL, layers=4, frozen=("blocks.0", "blocks.2")),
    "some blocks, tied": replace(LLAMA, adapters=ALL, layers=3, frozen=("blocks.0-1",), tied=True),
    "some blocks, gpt2": replace(GPT2, adapters=replace(ALL, targets=("o", "down")), layers=3, frozen=("blocks.1-2",)),
    "some blocks, dora": replace(LLAMA, adapters=DORA, layers=4, frozen=("blocks.0", "blocks.2")),
    "some blocks, olmo2": replace(TINY["olmo2"], adapters=ALL, frozen=("blocks.1",)),
    "some blocks, mixture": replace(TINY["glm4_moe"], adapters=ALL, frozen=("blocks.0",)),
    "some blocks, mixture, upper": replace(TINY["qwen3_moe"], adapters=ALL, layers=3, frozen=("blocks.0", "blocks.2")),
    "experts in one tensor": replace(TINY["gpt_oss"], adapters=ALL),
    "experts in one tensor, down": replace(TINY["gpt_oss"], adapters=replace(ALL, targets=("q", "down"), rank=1)),
    "experts in one tensor, inner": replace(TINY["gpt_oss"], adapters=replace(ALL, targets=("gate", "up"))),
    "latents": replace(TINY["deepseek_v3"], adapters=ALL),
    "latents, queries at once": replace(TINY["deepseek_v2"], adapters=ALL),
    "latents, narrow ones": replace(TINY["deepseek_v3"], adapters=replace(ALL, targets=("kv_a", "kv_turned", "o"))),
    "latents, queries": replace(TINY["deepseek_v3"], adapters=replace(ALL, targets=("q", "q_a"), rank=1)),
    "latents, dora": replace(
        TINY["deepseek_v3"], adapters=replace(DORA, targets=("q", "k", "v", "o", "q_a", "kv_a", "kv_turned"))
    ),
    "gpt2, with dropout": replace(GPT2, adapters=ALL, dropout=DROPOUT),
    "dora, gpt2, with dropout": replace(GPT2, adapters=DORA, dropout=DROPOUT),
    "norms behind, with dropout": replace(LLAMA, adapters=ALL, norm_place="post", embedding_norm=True, dropout=DROPOUT),
}
JOINED = {
    **dict.fromkeys(("latents", "latents, queries at once", "latents, dora"), ("latent_up",)),
    **dict.fromkeys(("phi3", "dora, phi3"), ("qkv", "gate_up")),
    **dict.fromkeys(("glm", "experts in one tensor", "experts in one tensor, inner"), ("gate_up",)),
    **dict.fromkeys(
        ("gpt2", "some blocks, gpt2", "gpt2, with dropout", "dora, gpt2", "dora, gpt2, with dropout"), ("qkv",)
    ),
}
"""Products that PEFT has one adapter for, as one layer makes all their results."""


def adapted(kind: str, **changes: Any) -> Any:
    return adapt(replace(TUNED[kind], **changes), joined=JOINED.get(kind, ()))


PASS = Residency(blocks=0, passing=1)
RESIDENCIES: dict[str, dict[str, Any]] = {
    "all stays": {},
    "weights pass": {"weights": PASS, "rounds_per_step": 2},
    "all passes": {
        **dict.fromkeys(("weights", "gradients", "optimizer_state"), PASS),
        "rounds_per_step": 3,
    },
    "to the end": {**dict.fromkeys(("weights", "gradients", "optimizer_state"), PASS), "update_when": "end"},
    "some pass": {
        **dict.fromkeys(("weights", "gradients", "optimizer_state"), Residency(blocks=1, passing=2, ends=("head",))),
    },
}
CUTS = ("whole", "chunk", "sequence")


def plan_of(model: Transformer, cut: str, letters: str, **changes: Any) -> Plan:
    if cut == "whole":
        saves = tuple(letters[layer % len(letters)] for layer in range(model.layers))
        plan = everything_stays(model, sequence=TOKENS, sequences=2, saves=saves, **changes)
    else:
        plan = cut_plan(model, sequence=TOKENS, chunk=9, letters=letters, attention=cut, **changes)
    kept = tuple("-" * len(row) if layer < model.first_reached else row for layer, row in enumerate(plan.saves))
    return replace(plan, saves=kept)


def check_gradients(model: Transformer, plan: Plan, module: Any, *, packs: bool | None = None, seed: int = 0) -> None:
    check(compile_plan(plan, model))
    batch: Batch = random_batch(model, plan.sequences_per_round * plan.rounds_per_step, TOKENS, seed)
    labels = torch.from_numpy(batch.labels).long()
    module.zero_grad()
    drops = None
    if model.dropout is not None:
        drops = DocumentedDrops(model, seed=GRADIENTS.seed, step=0, sequence_tokens=TOKENS)
    loss = module.loss(torch.from_numpy(batch.ids).long(), labels, drops=drops) / max(1, batch.with_loss)
    loss.backward()
    executor = executor_for(plan, model, ours(module), packs=packs)
    frozen = {name: values.clone() for name, values in executor.frozen_weights().items()}
    result = executor.step(batch, 0)
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-11, abs=1e-12)
    assert largest_error(first_gradients(executor), trained(module)) < 1e-10
    assert executor.player.arena.empty
    assert executor.player.arena.peak_beside_bytes <= executor.slabs.left_to_libraries["temporaries"]
    after = dict(executor.frozen_weights())
    assert frozen.keys() == after.keys()
    assert frozen.keys() == {each.name for each in parameters_of(model, TOKENS) if not each.trained}
    assert all(torch.equal(values, after[name]) for name, values in frozen.items())
    evaluated = executor.evaluate([batch])
    assert evaluated.with_loss == batch.with_loss


EACH = ("llama", "gpt2", "dora, llama", "some blocks, tied")
"""With these each level is tried alone, with the others in pairs: what is kept is alike in all."""


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", TUNED)
def test_adapters_have_the_gradients_of_autograd_at_every_save_level(kind: str, cut: str) -> None:
    model = TUNED[kind]
    for number, letters in enumerate(("f", "F", "a", "c", "i", "iFaC") if kind in EACH else ("fA", "ci", "iFaC")):
        packs = (number + CUTS.index(cut)) % 2 == 1
        check_gradients(model, plan_of(model, cut, letters), adapted(kind), packs=packs, seed=number)


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("kind", ["llama", "llama, queries and values", "gpt2", "dora, llama", "some blocks, tied"])
def test_adapters_have_the_gradients_of_autograd_wherever_state_is(kind: str, residency: str) -> None:
    model = replace(TUNED[kind], layers=3)
    for cut in CUTS:
        check_gradients(model, plan_of(model, cut, "fCiA", **RESIDENCIES[residency]), adapted(kind, layers=3))


FROZEN = {
    "embedding": ("embedding",),
    "lower blocks": ("embedding", "blocks.0-1"),
    "lower blocks, but the embedding": ("blocks.0-1",),
    "head and one in the middle": ("head", "blocks.1"),
    "upper blocks": ("blocks.1-2",),
}


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("parts", FROZEN)
@pytest.mark.parametrize("family", ["llama", "gpt2-untied", "gpt2-untied with dropout"])
def test_frozen_parts_leave_the_others_the_gradients_of_autograd(family: str, parts: str, residency: str) -> None:
    name, _, drops = family.partition(" with ")
    model = replace(TINY[name], layers=3, frozen=FROZEN[parts], dropout=DROPOUT if drops else None)
    module = random_module(replace(model, frozen=None))
    by_name = {each.name: each for each in parameters_of(model, TOKENS)}
    for name, value in module.named_parameters():
        value.requires_grad_(by_name[name].trained)
    place = list(FROZEN).index(parts) + list(RESIDENCIES).index(residency)
    # With the first family everything is crossed; with the others each pair of parts, residency and cut is tried.
    for cut in CUTS if family == "llama" else [CUTS[place % len(CUTS)]]:
        check_gradients(model, plan_of(model, cut, "fCiA", **RESIDENCIES[residency]), module)


def test_tied_tables_are_frozen_together() -> None:
    model = replace(LLAMA, tied=True, frozen=("embedding", "head", "blocks.0"))
    module = random_module(replace(model, frozen=None))
    for name, value in module.named_parameters():
        value.requires_grad_(name.startswith("layers.1."))
    check_gradients(model, plan_of(model, "whole", "f"), module)


@pytest.mark.parametrize("kind", ["llama", "dora, llama"])
def test_fifty_steps_equal_a_plain_trainer_step_by_step(kind: str) -> None:
    """PEFT's layers and torch's AdamW in fp32."""
    model = replace(TUNED[kind], layers=3)
    module = adapt(model, dtype=torch.float32)
    training = Training(steps=50, learning_rate=3e-3, weight_decay=0.1, warmup_steps=5)
    plan = plan_of(model, "whole", "fi", precision="fp32", weights=PASS)
    executor = executor_for(plan, model, ours(module), training)
    chosen = [value for value in module.parameters() if value.requires_grad]
    # Magnitudes scale a channel: they do not decay.
    groups = [
        {"params": [value for value in chosen if value.ndim == 2]},
        {"params": [value for value in chosen if value.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(training.beta1, training.beta2), weight_decay=0.1)
    for step in range(50):
        batch = random_batch(model, 2, TOKENS, step % 5)
        for group in optimizer.param_groups:
            group["lr"] = training.rate_at(step)
        optimizer.zero_grad()
        loss = module.loss(torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.labels).long())
        torch.autograd.backward(loss / batch.with_loss)
        optimizer.step()
        assert executor.step(batch, step).loss == pytest.approx(float(loss.detach()) / batch.with_loss, rel=1e-5)
    expected = ours(module)
    for name, values in executor.weights().items():
        assert torch.allclose(values, expected[name], rtol=1e-3, atol=1e-5), name


def test_gradients_are_clipped_by_the_norm_of_the_adapters_alone() -> None:
    model = TUNED["llama"]
    module = adapt(model)
    batch = random_batch(model, 2, TOKENS, 0)
    loss = module.loss(torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.labels).long())
    torch.autograd.backward(loss / batch.with_loss)
    norm = torch.stack([values.norm() for values in trained(module).values()]).norm()
    plan = plan_of(model, "whole", "f", update_when="end")
    executor = executor_for(plan, model, ours(module), Training(steps=1, clip_norm=1e-3))
    assert executor.step(batch, 0).gradient_norm == pytest.approx(float(norm), rel=1e-9)


@pytest.mark.parametrize("kind", [kind for kind, model in TUNED.items() if model.dropout is None])
def test_plain_modules_have_adapters_of_their_own(kind: str) -> None:
    """What several devices run: beside PEFT's rules on the same modules."""
    model = TUNED[kind]
    module, plain = adapted(kind), random_module(model)
    numbers = ours(module)
    with torch.no_grad():
        for name, value in plain.named_parameters():
            value.copy_(numbers[name])
    assert {name for name, _ in plain.named_parameters()} == {each.name for each in parameters_of(model, TOKENS)}
    batch = random_batch(model, 2, TOKENS, 0)
    losses = []
    for each in (module, plain):
        loss = each.loss(torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.labels).long())
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    chosen = {each.name for each in parameters_of(model, TOKENS) if each.trained}
    found = {name: value.grad for name, value in plain.named_parameters() if name in chosen}
    assert largest_error({name: value for name, value in found.items() if value is not None}, trained(module)) < 1e-10


def test_every_target_is_known() -> None:
    model = TUNED["llama"]
    trained_names = {each.local for each in parameters_of(model, TOKENS) if each.trained}
    assert trained_names == {
        *(f"{product}_A.weight" for product in ("qkv", "output", "gate_up", "down")),
        *(f"{target}_B.weight" for target in TARGETS if target not in LATENTS),
    }
