"""DPO in the streaming executor: losses, rewards and gradients are those of its formula on plain modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.nn.functional import logsigmoid  # noqa: E402

from flopwise.base.errors import FlopwiseError  # noqa: E402
from flopwise.engine.batch import NO_LABEL, Batch  # noqa: E402
from flopwise.engine.kernels import dispatch  # noqa: E402
from flopwise.engine.modules import ReferenceModel  # noqa: E402
from flopwise.records.plan import Residency  # noqa: E402
from flopwise.setup.training import Training  # noqa: E402
from flopwise.work.adapters import Adapters  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support.adapted_modules import adapt, ours, trained  # noqa: E402
from tests.support.tiny_models import GPT2, LLAMA, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    GRADIENTS,
    cut_plan,
    everything_stays,
    executor_for,
    first_gradients,
    largest_error,
)

TOKENS = 48
BETA, WRONG = 0.3, 0.1
TUNED = replace(LLAMA, objective="preference")
MODELS = {
    "llama": TUNED,
    "llama, capped": replace(TUNED, logit_cap=3.0, logit_scale=0.5, tied=True),
    "gpt2": replace(GPT2, objective="preference", context=TOKENS, position_rows=TOKENS),
    "with adapters": replace(TUNED, adapters=Adapters(rank=3, alpha=5.0)),
    "with a share": replace(TUNED, loss_share=0.4, logit_scale=0.5),
    "with magnitudes": replace(TUNED, adapters=Adapters(rank=3, alpha=5.0, magnitudes=True)),
}


def pairs(sequences: int, seed: int = 0) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Of each sequence, documents in pairs: tokens that are read, and what each foretells."""
    draw = np.random.default_rng(seed)
    found = []
    for sequence in range(sequences):
        documents = []
        for length in draw.integers(3, 11, 2 * (1 + sequence % 2)):
            ids, labels = (draw.integers(0, 53, length, dtype=np.int32) for _ in range(2))
            labels[: int(draw.integers(0, length - 1))] = NO_LABEL
            documents.append((ids, labels))
        found.append(documents)
    return found


def packed(documents: list[list[tuple[np.ndarray, np.ndarray]]], references: tuple[np.ndarray, ...]) -> Batch:
    counts = tuple(np.array([ids.size for ids, _ in row], dtype=np.int32) for row in documents)
    ids = np.zeros((len(documents), TOKENS), dtype=np.int32)
    labels = np.full(ids.shape, NO_LABEL, dtype=np.int32)
    for row, each in enumerate(documents):
        total = counts[row].sum()
        ids[row, :total], labels[row, :total] = (np.concatenate(parts) for parts in zip(*each, strict=True))
    return Batch(ids, labels, np.array([each.sum() for each in counts], dtype=np.int32), counts, references=references)


def score(module: ReferenceModel, ids: np.ndarray, labels: np.ndarray) -> Tensor:
    """How likely what is learned of a document is, as a logarithm."""
    loss: Tensor = module.loss(torch.from_numpy(ids)[None].long(), torch.from_numpy(labels)[None].long())
    return -loss


def plain_dpo(module: ReferenceModel, batch: Batch, documents: Any) -> tuple[Tensor, Mapping[str, float]]:
    """The loss of the paper and TRL's rewards, document by document."""
    assert batch.references is not None
    losses, chosen, rejected = [], [], []
    for row, references in zip(documents, batch.references, strict=True):
        scores = [score(module, *document) for document in row]
        for first in range(0, len(row), 2):
            better = BETA * (scores[first] - references[first])
            worse = BETA * (scores[first + 1] - references[first + 1])
            delta = better - worse
            losses.append(-(1 - WRONG) * logsigmoid(delta) - WRONG * logsigmoid(-delta))
            chosen.append(float(better.detach()))
            rejected.append(float(worse.detach()))
    rewards = {
        "chosen": float(np.mean(chosen)),
        "rejected": float(np.mean(rejected)),
        "accuracy": float(np.mean(np.array(chosen) > np.array(rejected))),
    }
    return torch.stack(losses).mean(), rewards


def module_of(model: Transformer, dtype: Any = torch.float64) -> ReferenceModel:
    plain = replace(model, objective="likelihood")
    return adapt(plain, dtype=dtype) if model.adapters is not None else random_module(plain, dtype=dtype)


def gradient(value: Any) -> Tensor:
    found: Tensor = value.grad
    return found


def references(documents: Any, seed: int = 5) -> tuple[np.ndarray, ...]:
    """Near what a model of 53 tokens finds likely, so that no pair is decided."""
    draw = np.random.default_rng(seed)
    counts = [[float((labels != NO_LABEL).sum()) for _, labels in row] for row in documents]
    return tuple(-3.0 * np.array(row) + draw.normal(0, 1, len(row)) for row in counts)


@pytest.mark.parametrize("passing", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_rewards_and_gradients_are_those_of_the_formula(kind: str, passing: bool) -> None:
    model = MODELS[kind]
    module, documents = module_of(model), pairs(4)
    batch = packed(documents, references(documents))
    assert batch.with_loss == 6
    loss, rewards = plain_dpo(module, batch, documents)
    loss.backward()  # type: ignore[no-untyped-call]
    places = dict.fromkeys(("weights", "gradients", "optimizer_state"), Residency(blocks=0, passing=1))
    more: dict[str, Any] = {**places, "rounds_per_step": 2} if passing else {}
    plan = everything_stays(model, sequence=TOKENS, sequences=2 if passing else 4, **more)
    # Pieces of the head that are no multiple of an answer.
    plan = replace(plan, head_chunk_tokens=7, saves=("i" * plan.chunks_per_round,) * model.layers)
    training = replace(GRADIENTS, dpo_beta=BETA, dpo_label_smoothing=WRONG)
    start = ours(module) if model.adapters is not None else {n: v.detach() for n, v in module.named_parameters()}
    executor = executor_for(plan, model, start, training)
    evaluated = executor.evaluate([batch])
    assert evaluated.loss == pytest.approx(float(loss.detach()), rel=1e-9)
    assert evaluated.correct / evaluated.with_loss == pytest.approx(rewards["accuracy"])
    result = executor.step(batch, 0)
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-9)
    assert result.rewards is not None
    found = {name: getattr(result.rewards, name) for name in rewards}
    assert found == pytest.approx(rewards, rel=1e-9)
    assert result.rewards.margin == pytest.approx(rewards["chosen"] - rewards["rejected"], rel=1e-9)
    expected = trained(module) if model.adapters is not None else ours(module, gradient)
    # What each row is weighed by is kept in fp32.
    assert largest_error(first_gradients(executor), expected) < 1e-6
    assert executor.player.arena.empty
    assert executor.player.arena.peak_beside_bytes <= executor.slabs.left_to_libraries["temporaries"]


@pytest.mark.parametrize("name", ["with adapters", "with magnitudes"])
def test_the_reference_of_adapters_is_the_model_without_them(name: str) -> None:
    model = MODELS[name]
    module, documents = module_of(model, torch.float32), pairs(3)
    executor = executor_for(
        everything_stays(model, sequence=TOKENS, sequences=2, precision="fp32"), model, ours(module)
    )
    unknown = tuple(np.zeros(len(row)) for row in documents)
    (found,) = executor.score([packed(documents, unknown)])
    plain = random_module(replace(model, adapters=None, objective="likelihood"), dtype=torch.float32)
    with torch.no_grad():
        expected = [np.array([float(score(plain, *each)) for each in row]) for row in documents]
    for told, scores in zip(found, expected, strict=True):
        assert told == pytest.approx(scores, rel=1e-6)
    # Nothing of it stays: what is evaluated next has its adapters.
    changed = executor.evaluate([packed(documents, found)])
    assert changed.rewards is not None
    assert changed.rewards.margin != 0


def test_a_step_in_fp32_is_that_of_the_formula() -> None:
    module, documents = module_of(TUNED, torch.float32), pairs(4)
    batch = packed(documents, references(documents))
    loss, _ = plain_dpo(module, batch, documents)
    loss.backward()  # type: ignore[no-untyped-call]
    plan = everything_stays(TUNED, sequence=TOKENS, sequences=4, precision="fp32")
    training = replace(GRADIENTS, dpo_beta=BETA, dpo_label_smoothing=WRONG)
    executor = executor_for(plan, TUNED, {n: v.detach() for n, v in module.named_parameters()}, training)
    assert executor.step(batch, 0).loss == pytest.approx(float(loss.detach()), rel=1e-6)
    expected = {name: value.grad.double() for name, value in module.named_parameters() if value.grad is not None}
    assert largest_error(first_gradients(executor), expected) < 1e-5


def test_sequences_that_are_cut_and_batches_without_pairs_are_refused() -> None:
    with pytest.raises(FlopwiseError, match="the plan cuts sequences"):
        executor_for(cut_plan(TUNED, sequence=TOKENS, chunk=9, letters="f", attention="chunk"), TUNED, {})
    executor = executor_for(everything_stays(TUNED, sequence=TOKENS, sequences=1), TUNED, {}, Training(steps=1))
    ids = np.zeros((1, TOKENS), dtype=np.int32)
    with pytest.raises(FlopwiseError, match="without pairs"):
        executor.step(Batch(ids, ids), 0)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_losses_of_tokens_add_up_to_that_of_all(cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(13, 41, generator=generator, dtype=torch.float64)
    labels = torch.randint(-1, 41, (13,), generator=generator, dtype=torch.int32)
    each, total = torch.empty(13, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    before = logits.clone()
    dispatch.token_losses(logits, labels, out=each, cap=cap)
    assert torch.equal(logits, before)
    scales = torch.rand(13, generator=generator)
    alone = torch.cat([_gradient(before[row : row + 1], labels[row : row + 1], scales[row], cap) for row in range(13)])
    dispatch.cross_entropy(logits, labels, scale=scales, loss=total, cap=cap)
    assert float(total) == pytest.approx(float(each.sum()), rel=1e-12)
    assert torch.allclose(logits, alone, rtol=1e-12, atol=0)


def _gradient(logits: Tensor, label: Tensor, scale: Tensor, cap: float | None) -> Tensor:
    found = logits.clone()
    dispatch.cross_entropy(found, label, scale=float(scale), loss=torch.zeros((), dtype=torch.float64), cap=cap)
    return found
