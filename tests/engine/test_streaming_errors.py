"""What the streaming executor refuses: always with a reason or a hint, never with a traceback."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flopwise.base.errors import FlopwiseError  # noqa: E402
from flopwise.records.plan import Plan, Residency  # noqa: E402
from flopwise.setup.training import Training  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support.tiny_models import TINY, TOKENS, parameters, random_module  # noqa: E402
from tests.support.training_plans import cut_plan, everything_stays, executor_for, random_batch, state_of  # noqa: E402

LLAMA = TINY["llama"]


def refused(plan: Plan, model: Transformer = LLAMA, training: Training | None = None) -> tuple[str, str]:
    """What is said, and the hint that there has to be."""
    with pytest.raises(FlopwiseError) as caught:
        executor_for(plan, model, {}, training or Training(steps=1))
    assert caught.value.hint
    return caught.value.what, caught.value.hint


def test_clipping_needs_an_update_at_the_end() -> None:
    clipped = Training(steps=1, clip_norm=1.0)
    _, hint = refused(everything_stays(LLAMA, sequence=TOKENS), training=clipped)
    assert "--clip" in hint
    executor_for(everything_stays(LLAMA, sequence=TOKENS, update_when="end"), LLAMA, {}, clipped)


@pytest.mark.parametrize("precision", ["bf16,weights=fp8", "fp16-mixed", "bf16,weights=fp16", "bf16,moments=int8"])
def test_formats_without_kernels_are_refused(precision: str) -> None:
    what, hint = refused(everything_stays(LLAMA, sequence=TOKENS, precision=precision))
    assert precision in what
    assert "--precision" in hint


@pytest.mark.parametrize(
    "changes",
    [
        {"experts": 4, "experts_per_token": 2, "head": "classifier", "labels": 3},
        {"causal": False, "positions": "alibi"},
        {"tied": True, "head": "classifier", "labels": 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_models_that_nothing_here_runs_are_refused(changes: dict[str, Any]) -> None:
    model = replace(LLAMA, **changes)
    refused(everything_stays(model, sequence=TOKENS), model)


def test_a_sequence_beyond_the_position_table_is_refused() -> None:
    model = TINY["gpt2"]
    assert model.position_rows is not None
    _, hint = refused(everything_stays(model, sequence=model.position_rows + 1), model)
    assert "--seq" in hint


def test_a_plan_of_another_depth_is_refused() -> None:
    refused(everything_stays(replace(LLAMA, layers=3), sequence=TOKENS))


def test_attention_by_chunk_of_a_model_that_looks_ahead_is_refused() -> None:
    model = TINY["bert"]
    refused(cut_plan(model, sequence=TOKENS, chunk=6, letters="F", attention="chunk"), model)


@pytest.mark.parametrize("sequences", [0, 1, 2, 5, 6, 40])
def test_a_batch_of_another_number_of_rounds_is_refused_and_trains_nothing(sequences: int) -> None:
    passing = Residency(blocks=0, passing=1)
    plan = everything_stays(LLAMA, sequence=TOKENS, sequences=2, rounds_per_step=2, weights=passing)
    executor = executor_for(plan, LLAMA, parameters(random_module(LLAMA)))
    before = state_of(executor)
    with pytest.raises(FlopwiseError) as caught:
        executor.step(random_batch(LLAMA, sequences, TOKENS, 0), 0)
    assert caught.value.hint
    assert all(torch.equal(values, before[name]) for name, values in state_of(executor).items())
    assert executor.step(random_batch(LLAMA, 3, TOKENS, 0), 0).with_loss


@pytest.mark.parametrize("token", [-1, LLAMA.vocab])
@pytest.mark.parametrize("where", ["ids", "labels"])
def test_tokens_that_the_model_does_not_know_are_refused_before_anything_is_trained(where: str, token: int) -> None:
    plan = everything_stays(LLAMA, sequence=TOKENS, rounds_per_step=2)
    executor = executor_for(plan, LLAMA, parameters(random_module(LLAMA)))
    before = state_of(executor)
    batch = random_batch(LLAMA, 2, TOKENS, 0)
    getattr(batch, where)[1, 3] = token if where == "ids" or token > 0 else -2
    for call in (lambda: executor.step(batch, 0), lambda: executor.evaluate([batch])):
        with pytest.raises(FlopwiseError) as caught:
            call()
        assert "--tokenizer" in str(caught.value.hint)
    assert all(torch.equal(values, before[name]) for name, values in state_of(executor).items())


@pytest.mark.parametrize("cut", [False, True])
def test_a_longer_sequence_than_the_plans_is_refused(cut: bool) -> None:
    plan = (
        cut_plan(LLAMA, sequence=TOKENS, chunk=6, letters="i", attention="chunk")
        if cut
        else everything_stays(LLAMA, sequence=TOKENS)
    )
    executor = executor_for(plan, LLAMA, parameters(random_module(LLAMA)))
    longer = random_batch(LLAMA, 1, TOKENS + 1, 0)
    for call in (lambda: executor.step(longer, 0), lambda: executor.evaluate([longer])):
        with pytest.raises(FlopwiseError) as caught:
            call()
        assert caught.value.hint
    good = random_batch(LLAMA, 1, TOKENS, 0)
    fresh = executor_for(plan, LLAMA, parameters(random_module(LLAMA)))
    assert executor.evaluate([good]) == fresh.evaluate([good])
    assert executor.step(good, 0) == fresh.step(good, 0)


def test_memory_that_cannot_be_had_is_told() -> None:
    many = 2**31 - 1
    what, hint = refused(everything_stays(LLAMA, sequence=many, head_chunk_tokens=many))
    assert "device memory" in what
    assert "--device-mem" in hint
