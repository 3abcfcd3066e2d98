"""Dropout on a GPU: the documented masks in fused kernels, the same bits whatever is kept, and in replayed steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from flopwise.setup.training import Training  # noqa: E402
from flopwise.work.transformer import Dropout  # noqa: E402
from tests.engine.test_streaming_gpu import (  # noqa: E402
    FAMILIES,
    SEQUENCE,
    assert_all_alike,
    batch_for,
    planned,
    repeatable,
    variants,
)
from tests.support.dropped_reference import DocumentedDrops  # noqa: E402
from tests.support.tiny_models import parameters, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    GRADIENTS,
    assert_same_bits,
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
CUDA = torch.device("cuda")
DROPOUT = Dropout(embedding=0.1, hidden=0.2, attention=0.15, classifier=0.3)
MODELS = {name: replace(FAMILIES[name], dropout=DROPOUT) for name in ("llama", "mistral", "gpt2", "bert")}
STEPS = 6
TRAINING = Training(steps=STEPS, learning_rate=1e-2, clip_norm=1.0, seed=9)


def cuts_of(family: str) -> list[str]:
    return ["whole", "chunk", "sequence"] if MODELS[family].causal else ["whole", "sequence"]


@pytest.mark.parametrize("deterministic", [False, True], ids=["fastest", "deterministic"])
@pytest.mark.parametrize("family", MODELS)
def test_gradients_are_those_of_the_documented_masks(family: str, deterministic: bool) -> None:
    model = MODELS[family]
    exact = random_module(model, dtype=torch.bfloat16).double()
    for cut in cuts_of(family):
        for letters in ("f", "i", "faciFACI"):
            plan = planned(model, cut, letters)
            batch = batch_for(plan, model, 3, ragged=letters == "i")
            drops = DocumentedDrops(model, seed=9, step=0, sequence_tokens=SEQUENCE)
            loss, expected = reference_gradients(exact, batch, drops)
            _, plain = reference_gradients(random_module(model, dtype=torch.bfloat16), batch, drops)
            training = replace(GRADIENTS, seed=9)
            with repeatable(deterministic):
                executor = executor_for(
                    plan, model, parameters(exact), training, device=CUDA, deterministic=deterministic
                )
                assert executor.step(batch, 0).loss == pytest.approx(loss, rel=0.02, abs=0.01)
                assert total_error(first_gradients(executor), expected) <= 2 * total_error(plain, expected)
                executor.close()


@pytest.mark.parametrize("family", MODELS)
def test_save_levels_and_residencies_change_no_bit(family: str) -> None:
    for cut in cuts_of(family):
        with repeatable(True):
            # Some of them update while gradients are still made.
            unclipped = replace(TRAINING, clip_norm=None)
            assert_all_alike(variants(MODELS[family], cut, rounds_per_step=2), MODELS[family], unclipped, CUDA)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_replayed_steps_drop_what_eager_ones_do(family: str, ragged: bool) -> None:
    model = MODELS[family]
    plan = planned(model, "whole", "F", update_when="end")
    weights = parameters(random_module(model))
    with repeatable(True):
        eager, replayed = (
            executor_for(replace(plan, replay=replay), model, weights, TRAINING, device=CUDA, deterministic=True)
            for replay in (False, True)
        )
        losses = []
        for step in range(STEPS):
            # The same rows again and again: what differs is dropped.
            batch = random_batch(model, 3, SEQUENCE, 1, ragged=ragged)
            expected, found = eager.step(batch, step), replayed.step(batch, step)
            assert replace(found, waited_s=None) == replace(expected, waited_s=None)
            losses.append(found.loss)
        assert replayed._captured
        assert len(set(losses)) == STEPS
        assert_same_bits(state_of(replayed), state_of(eager))
