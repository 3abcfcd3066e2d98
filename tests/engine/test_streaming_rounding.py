"""Gradients in fp32 and bf16 against fp64: the executor's error beside that of the reference module in that format."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, dtype  # noqa: E402

from flopwise.engine.batch import Batch  # noqa: E402
from flopwise.engine.formats import TYPES  # noqa: E402
from flopwise.records.plan import Plan, Residency  # noqa: E402
from flopwise.work.formats import parse_formats  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support.tiny_models import TINY, TOKENS, parameters, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    GRADIENTS,
    cut_plan,
    everything_stays,
    executor_for,
    first_gradients,
    random_batch,
    reference_gradients,
    total_error,
)

PRECISIONS = ("fp32", "bf16", "bf16-mixed", "bf16-amp", "bf16,gradients=fp32")
MULTIPLE = 2.0
"""How much larger than the reference's an error may be: other kernels round at other places."""


def errors(plan: Plan, model: Transformer, seed: int) -> tuple[float, float]:
    """Of the executor and of the reference module in the format of the activations."""
    formats = parse_formats(plan.precision)
    sequences = plan.sequences_per_round * plan.rounds_per_step
    wanted = reference(model, TYPES[formats.weights], TYPES[formats.compute], sequences, seed)
    executor = executor_for(plan, model, wanted.weights)
    result = executor.step(wanted.batch, 0)
    assert result.loss == pytest.approx(wanted.loss, rel=1e-5 if formats.compute == "fp32" else 0.05)
    return total_error(first_gradients(executor), wanted.gradients), wanted.plain_error


class Wanted(NamedTuple):
    """What a step should come to."""

    batch: Batch
    weights: dict[str, Tensor]
    loss: float
    gradients: dict[str, Tensor]
    plain_error: float
    """Of the reference module in the format of the activations."""


@lru_cache(maxsize=4)
def reference(model: Transformer, stored: dtype, computed: dtype, sequences: int, seed: int) -> Wanted:
    """The same for all cuts of as many sequences."""
    exact = random_module(model, dtype=stored, seed=seed).double()
    batch = random_batch(model, sequences, TOKENS, seed, ragged=True)
    loss, expected = reference_gradients(exact, batch)
    _, plain = reference_gradients(random_module(model, dtype=computed, seed=seed), batch)
    return Wanted(batch, parameters(exact), loss, expected, total_error(plain, expected))


def plans(model: Transformer, letters: str, **changes: Any) -> list[Plan]:
    saves = tuple(letters[layer % len(letters)] for layer in range(model.layers))
    found = [everything_stays(model, sequence=TOKENS, sequences=2, saves=saves, **changes)]
    for attention in () if model.uncut else ("chunk", "sequence") if model.causal else ("sequence",):
        found.append(cut_plan(model, sequence=TOKENS, chunk=9, letters=letters, attention=attention, **changes))
    return found


def assert_as_exact(each: list[tuple[float, float]], *, most: float) -> None:
    """Together: where a small model's activation has an edge, one number more or less beyond it is all of an error."""
    found, plain = (sum(error**2 for error in side) ** 0.5 for side in zip(*each, strict=True))
    assert found <= MULTIPLE * plain
    assert found < most * len(each) ** 0.5


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        (family, precision)
        if precision in ("bf16", "fp32") or family in ("llama", "bert")
        else pytest.param(family, precision, marks=pytest.mark.slow)
        for first, family in enumerate(TINY)
        for second, precision in enumerate(PRECISIONS)
        # Of mixtures of formats every other one with each family.
        if precision in ("bf16", "fp32") or family in ("llama", "bert") or (first + second) % 2
    ],
)
def test_errors_are_those_of_the_format(family: str, precision: str) -> None:
    model = TINY[family]
    mixed = precision not in ("bf16", "fp32")
    # Of a mixture of formats, how a level rounds is that of its own format: all levels are tried together.
    alone = ("F", "i", "faciFACI") if family in ("llama", "bert") else ("iF", "faciFACI")
    tried = ("faciFACI",) if mixed and family not in ("llama", "bert") else alone
    each = [
        errors(plan, model, seed)
        for seed, letters in enumerate(tried)
        for plan in plans(model, letters, precision=precision)
    ]
    # By a rounding a token may have another expert: where it has one alone, all of what it makes is another.
    coarse = 0.5 if model.experts_per_token == 1 else 0.15
    assert_as_exact(each, most=1e-5 if precision == "fp32" else coarse)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-amp", "bf16,gradients=fp32", "bf16,moments=fp32"])
def test_state_that_passes_is_of_the_same_formats(precision: str) -> None:
    model = replace(TINY["gpt2-untied"], layers=3)
    passing = Residency(blocks=1, passing=1)
    for place in ("device", "host"):
        changes = dict.fromkeys(("weights", "gradients", "optimizer_state"), passing)
        passes = plans(model, "aciF", precision=precision, update_place=place, rounds_per_step=2, **changes)
        assert_as_exact([errors(plan, model, 3) for plan in passes], most=0.15)


def test_a_master_copy_is_as_exact_as_what_it_was_given_and_weights_are_it_rounded() -> None:
    model = TINY["llama"]
    plan = everything_stays(model, sequence=TOKENS, precision="bf16-mixed")
    weights = {name: values.float() for name, values in parameters(random_module(model)).items()}
    executor = executor_for(plan, model, weights, replace(GRADIENTS, learning_rate=1e-5))
    masters = {name: values.clone() for name, moment, values in executor.moments() if moment == "master"}
    assert all(torch.equal(masters[name], values) for name, values in weights.items())
    executor.step(random_batch(model, 1, TOKENS, 0), 0)
    held = executor.weights()
    for name, moment, values in executor.moments():
        if moment == "master":
            # A step of about the learning rate, which bf16 itself could not hold.
            moved = (values - masters[name]).abs()
            assert 0 < float(moved.max()) < 1.1e-5
            assert torch.equal(held[name], values.to(torch.bfloat16))
