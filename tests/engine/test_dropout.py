"""Dropout in training: documented masks in every save level and chunking, their statistics, and what drops nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from flopwise.engine.batch import Batch  # noqa: E402
from flopwise.engine.kernels.dropout import DropMask, dropout  # noqa: E402
from flopwise.engine.kernels.rounding import Seed  # noqa: E402
from flopwise.engine.streaming.inputs import Inputs  # noqa: E402
from flopwise.records.plan import Plan  # noqa: E402
from flopwise.records.program import ALIGNMENT_BYTES  # noqa: E402
from flopwise.setup.training import Training  # noqa: E402
from flopwise.work.transformer import Dropout, Transformer  # noqa: E402
from tests.engine.test_streaming_gradients import settings_of_a_step  # noqa: E402
from tests.support.dropped_reference import DocumentedDrops, bits_of, keys_of  # noqa: E402
from tests.support.tiny_models import TINY, TOKENS, parameters, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    GRADIENTS,
    assert_same_bits,
    cut_plan,
    everything_stays,
    executor_for,
    first_gradients,
    largest_error,
    random_batch,
    reference_gradients,
    state_of,
)

DROPOUT = Dropout(embedding=0.2, hidden=0.3, attention=0.25, classifier=0.4)
MODELS = {
    name: replace(TINY[name], dropout=DROPOUT)
    for name in ("llama", "mistral", "qwen3", "gpt2", "gpt2-untied", "bert", "bert-masked")
} | {
    "parallel": replace(TINY["llama"], parallel_residual=True, dropout=DROPOUT),
    "electra": replace(TINY["bert"], pooler_activation="gelu", dropout=replace(DROPOUT, before_pooler=True)),
    "distilbert": replace(TINY["bert"], pooler_activation="relu", dropout=replace(DROPOUT, both_branches=False)),
}
SEED = 77
TRAINING = replace(GRADIENTS, seed=SEED)


def assert_documented_gradients(
    model: Transformer, plan: Plan, batch: Batch, step: int = 0, **changes: Any
) -> DocumentedDrops:
    module = random_module(model)
    drops = DocumentedDrops(model, seed=SEED, step=step, sequence_tokens=plan.sequence_tokens)
    loss, expected = reference_gradients(module, batch, drops)
    executor = executor_for(plan, model, parameters(module), replace(TRAINING, steps=step + 1), **changes)
    result = executor.step(batch, step)
    assert result.loss == pytest.approx(loss, rel=1e-11, abs=1e-12)
    assert largest_error(first_gradients(executor), expected) < 1e-10
    assert executor.player.arena.empty
    assert executor.player.head_arena.empty
    assert executor.player.arena.peak_beside_bytes <= executor.slabs.left_to_libraries["temporaries"]
    assert not any(buffer.data_ptr() % ALIGNMENT_BYTES for buffer in executor.slabs.buffers if buffer.numel())
    return drops


@pytest.mark.parametrize("letters", [*"faci", "fAcI"])
@pytest.mark.parametrize("family", MODELS)
def test_every_save_level_gives_the_gradients_of_autograd_with_the_documented_masks(family: str, letters: str) -> None:
    model = MODELS[family]
    plan = everything_stays(
        model, sequence=TOKENS, sequences=2, saves=tuple(letters[layer % len(letters)] for layer in range(model.layers))
    )
    for ragged in (False, True):
        assert_documented_gradients(model, plan, random_batch(model, 2, TOKENS, 3, ragged=ragged))


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("attention", ["chunk", "sequence"])
@pytest.mark.parametrize("chunk", [1, 9])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "bert"])
def test_cut_sequences_drop_what_whole_ones_do(family: str, chunk: int, attention: str, packs: bool) -> None:
    model = MODELS[family]
    if not model.causal and attention == "chunk":
        pytest.skip("what looks both ways is not cut there")
    plan = cut_plan(model, sequence=TOKENS, chunk=chunk, letters="fIcA", attention=attention, rounds_per_step=2)
    assert_documented_gradients(model, plan, random_batch(model, 2, TOKENS, 4, ragged=True), step=3, packs=packs)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_neither_rounds_nor_what_fills_up_changes_a_mask(family: str, rounds: int) -> None:
    model = MODELS[family]
    plan = everything_stays(model, sequence=11, sequences=6 // rounds, rounds_per_step=rounds)
    batch = random_batch(model, 6, 11, 5, ragged=True)
    module = random_module(model)
    drops = DocumentedDrops(model, seed=SEED, step=0, sequence_tokens=11)
    loss, expected = reference_gradients(module, batch, drops)
    executor = executor_for(plan, model, parameters(module), TRAINING)
    for granule in (1, 8):
        executor.clear_moments()
        executor.set_weights(parameters(module))
        executor.player.inputs = Inputs(
            plan,
            executor.player.inputs._block.view(-1).view(torch.uint8),
            vocabulary=model.vocab,
            classifies=model.head == "classifier",
            causal=model.causal,
            granule=granule,
            numbered=True,
            types=model.token_types,
        )
        assert executor.step(batch, 0).loss == pytest.approx(loss, rel=1e-9)
        assert largest_error(first_gradients(executor), expected) < 1e-9


@pytest.mark.parametrize(
    "only",
    [Dropout(embedding=0.5), Dropout(hidden=0.5, classifier=0.0), Dropout(attention=0.5), Dropout(classifier=0.5)],
)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_each_site_alone(family: str, only: Dropout) -> None:
    if family == "gpt2" and not only.sites:
        pytest.skip("it has no classifier")
    model = replace(MODELS[family], dropout=only)
    plan = everything_stays(model, sequence=TOKENS, sequences=2, saves=("i",) * model.layers)
    drops = assert_documented_gradients(model, plan, random_batch(model, 2, TOKENS, 6))
    assert drops.dropped


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_what_is_kept_changes_no_bit_of_the_weights(family: str) -> None:
    model = MODELS[family]
    training = Training(steps=3, learning_rate=1e-2, seed=SEED)
    states = []
    for letters in "faci":
        saves = (letters,) * model.layers
        plan = everything_stays(model, sequence=TOKENS, sequences=2, saves=saves, precision="bf16")
        executor = executor_for(plan, model, parameters(random_module(model)), training)
        for step in range(3):
            executor.step(random_batch(model, 2, TOKENS, step), step)
        states.append(state_of(executor))
    for state in states[1:]:
        assert_same_bits(state, states[0])


@pytest.mark.slow
@settings(max_examples=60)
@given(settings_of_a_step(), st.integers(0, 9))
def test_random_plans_drop_what_is_documented(setting: tuple[Transformer, Plan, Batch], step: int) -> None:
    model, plan, batch = setting
    # Branches whose results are normed, scaled, a mixture's or of blocks of several kinds are not dropped yet.
    normed = model.norm_place in ("behind", "sandwich") or model.residual_scale != 1.0
    whole = normed or model.experts or model.has_kinds
    dropout = replace(DROPOUT, hidden=0.0) if whole else DROPOUT
    # Attention beside sinks, or in chunks, is refused with dropout, by name.
    dropout = replace(dropout, attention=0.0) if model.sinks or model.attention_chunk else dropout
    assert_documented_gradients(replace(model, dropout=dropout), plan, batch, step)


def test_nothing_dropped_gives_the_bits_of_a_model_without_dropout() -> None:
    plain = TINY["bert"]
    batch = random_batch(plain, 2, TOKENS, 1)
    states = []
    for model, training in (
        (plain, TRAINING),
        (replace(plain, dropout=Dropout()), TRAINING),
        (replace(plain, dropout=DROPOUT), replace(TRAINING, drops=False)),
    ):
        plan = everything_stays(model, sequence=TOKENS, sequences=2)
        executor = executor_for(plan, model, parameters(random_module(model)), training)
        executor.step(batch, 0)
        states.append(state_of(executor))
    assert_same_bits(states[1], states[0])
    assert_same_bits(states[2], states[0])


def test_an_evaluation_drops_nothing() -> None:
    model = MODELS["bert"]
    plan = everything_stays(model, sequence=TOKENS, sequences=2)
    weights, batch = parameters(random_module(model)), random_batch(model, 2, TOKENS, 1)
    executors = [executor_for(plan, model, weights, replace(TRAINING, drops=drops)) for drops in (False, True)]
    expected, found = (executor.evaluate([batch]) for executor in executors)
    assert found == expected
    assert executors[0].step(batch, 0).loss != executors[1].step(batch, 0).loss


def test_steps_and_seeds_drop_otherwise_and_a_step_again_drops_the_same() -> None:
    model = MODELS["gpt2"]
    plan = everything_stays(model, sequence=TOKENS, sequences=2)
    weights, batch = parameters(random_module(model)), random_batch(model, 2, TOKENS, 1)

    def loss(seed: int, step: int) -> float:
        training = Training(steps=9, learning_rate=0.0, weight_decay=0.0, seed=seed)
        return executor_for(plan, model, weights, training).step(batch, step).loss

    assert len({loss(seed, step) for seed in (0, 1) for step in (0, 1, 5)}) == 6
    assert loss(1, 5) == loss(1, 5)


def test_what_is_kept_is_the_share_that_is_asked_for() -> None:
    """Of a million numbers, six standard deviations; rows, columns and sites have nothing to do with each other."""
    rows, width = 1000, 1000
    tokens = torch.arange(rows, dtype=torch.int32)
    masks = []
    for share, tensor in ((0.1, 16), (0.1, 17), (0.9, 18)):
        keys = torch.from_numpy(Seed(0).many_keys(3, np.array([tensor], dtype=np.uint64)).view(np.int32))[0]
        out = torch.empty(rows, width)
        dropout(torch.ones(rows, width), DropMask(share, keys, tokens), out=out)
        kept = out > 0
        assert torch.equal(out, kept.float() * torch.tensor(1 / (1 - share)))
        spread = (share * (1 - share)) ** 0.5
        assert abs(float(kept.double().mean()) - (1 - share)) < 6 * spread / 1000
        for side in (0, 1):
            deviations = (kept.double().mean(side) - (1 - share)) / (spread / 1000**0.5)
            assert 0.8 < float(deviations.std()) < 1.2
            assert float(deviations.abs().max()) < 6
            shifted = (kept & kept.roll(1, side)).double().mean()
            assert abs(float(shifted) - (1 - share) ** 2) < 6 * spread / 1000
        masks.append(kept)
    both = float((masks[0] & masks[1]).double().mean())
    assert abs(both - 0.81) < 6e-3


@pytest.mark.parametrize("seed", [0, 1, 2**62 + 5])
def test_masks_are_the_documented_hash(seed: int) -> None:
    tokens = torch.tensor([0, 1, 2**31 - 1, -1, -(2**31)], dtype=torch.int32)
    numbers = np.arange(3, dtype=np.uint64) + np.uint64(16)
    for number, words in enumerate(Seed(seed).many_keys(11, numbers)):
        keys = keys_of(seed, 11, 0, ("embedding", "attention", "projected")[number])
        assert tuple(words.tolist()) == keys == Seed(seed).keys(11, 16 + number)
        mask = DropMask(0.5, torch.from_numpy(words.view(np.int32)), tokens)
        out = torch.empty(5, 7, dtype=torch.float64)
        dropout(torch.ones_like(out), mask, out=out)
        expected = bits_of(keys, tokens.numpy().astype(np.int64)[:, None], np.arange(7)) >= 2**31
        assert np.array_equal(out.numpy() > 0, expected)
