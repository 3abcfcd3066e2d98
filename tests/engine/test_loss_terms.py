"""Label smoothing and z-loss, against autograd on torch's own functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from flopwise.base.errors import FlopwiseError  # noqa: E402
from flopwise.engine.kernels.dispatch import LossTerms, cross_entropy  # noqa: E402
from flopwise.setup.training import Training  # noqa: E402
from tests.support.tiny_models import TINY, TOKENS, parameters, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    GRADIENTS,
    everything_stays,
    executor_for,
    first_gradients,
    largest_error,
    random_batch,
)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("terms", [LossTerms(0.1, 0.0), LossTerms(0.0, 1e-2), LossTerms(0.3, 1e-3)])
def test_loss_and_gradient_are_autograds(terms: LossTerms, cap: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(11, 37, generator=generator, dtype=torch.float64) * 4
    labels = torch.randint(0, 37, (11,), generator=generator)
    labels[::3] = -100
    given = logits.clone().requires_grad_()
    bent = given if cap is None else cap * torch.tanh(given / cap)
    expected = functional.cross_entropy(bent, labels, reduction="sum", label_smoothing=terms.smoothing)
    expected = expected + terms.z_loss * (bent.logsumexp(-1).square() * (labels >= 0)).sum()
    (0.7 * expected).backward()
    loss, made = torch.zeros((), dtype=torch.float64), logits.clone()
    cross_entropy(made, labels.int(), scale=0.7, loss=loss, cap=cap, terms=terms)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(made, given.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_step_goes_by_them_and_an_evaluation_does_not(family: str) -> None:
    model = TINY[family]
    module = random_module(model)
    batch = random_batch(model, 2, TOKENS, 3)
    training = replace(GRADIENTS, label_smoothing=0.2, z_loss=1e-2)
    executor = executor_for(everything_stays(model, sequence=TOKENS, sequences=2), model, parameters(module), training)
    evaluated = executor.evaluate([batch])
    found = executor.step(batch, 0)
    lengths = None if batch.lengths is None else torch.from_numpy(batch.lengths).long()
    types = None if batch.types is None else torch.from_numpy(batch.types).long()
    logits = module(torch.from_numpy(batch.ids).long(), lengths, None, types)
    logits, labels = logits.reshape(-1, logits.shape[-1]), torch.from_numpy(batch.labels).reshape(-1).long()
    plain = functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum") / batch.with_loss
    whole = functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum", label_smoothing=0.2)
    whole = (whole + 1e-2 * (logits.logsumexp(-1).square() * (labels >= 0)).sum()) / batch.with_loss
    torch.autograd.backward(whole)
    assert evaluated.loss == pytest.approx(float(plain.detach()), rel=1e-10)
    assert found.loss == pytest.approx(float(whole.detach()), rel=1e-10)
    gradients = {
        name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in module.named_parameters()
    }
    assert largest_error(first_gradients(executor), gradients) < 1e-9


def test_preferences_have_none() -> None:
    with pytest.raises(FlopwiseError, match="no smoothing over answers"):
        Training(steps=1, task="dpo", label_smoothing=0.1)
