"""With the same chunks a training is the same, bit for bit, whatever is kept, wherever state lies and is updated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from flopwise.engine.batch import Batch  # noqa: E402
from flopwise.records.plan import Plan, Residency  # noqa: E402
from flopwise.setup.training import Training  # noqa: E402
from flopwise.work.parameters import ENDS  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support.tiny_models import TINY, TOKENS, parameters, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    assert_same_bits,
    cut_plan,
    everything_stays,
    executor_for,
    random_batch,
    state_of,
)

STEPS = 3
"""A round with fewer sequences is between two full ones, and the last step is behind the warm-up."""
TRAINING = Training(steps=STEPS, learning_rate=1e-2, warmup_steps=2)
CLIPPED = replace(TRAINING, clip_norm=0.5)
NOTHING_STAYS = Residency(blocks=0, passing=1)
PASSING: dict[str, Any] = dict.fromkeys(("weights", "gradients", "optimizer_state"), NOTHING_STAYS)
SOME: dict[str, Any] = dict.fromkeys(
    ("weights", "gradients", "optimizer_state"), Residency(blocks=1, passing=2, ends=("embedding",))
)
RESIDENCIES: tuple[dict[str, Any], ...] = (
    PASSING,
    {**PASSING, "update_place": "host"},
    {**SOME, "host_copies": True},
    {**SOME, "update_place": "host", "fetch": "at once"},
)
CUTS = ("whole", "chunk", "sequence")
LEVELS = ("F", "f", "a", "c", "i", "A", "C", "I", "faciFACI")
PAIRED = ("F", "fA", "aC", "cI", "if")
"""Each level on either side, in layers that stand beside each other."""


def planned(model: Transformer, cut: str, letters: str, **changes: Any) -> Plan:
    changes = {"rounds_per_step": 2, **changes}
    if cut == "whole":
        saves = tuple(letters[layer % len(letters)] for layer in range(model.layers))
        return everything_stays(model, sequence=TOKENS, sequences=2, saves=saves, **changes)
    return cut_plan(model, sequence=TOKENS, chunk=9, letters=letters, attention=cut, **changes)


def variants(model: Transformer, cut: str, levels: Sequence[str] = LEVELS, **changes: Any) -> Iterator[Plan]:
    """Save levels in both places, mixtures of them, and state that stays, passes, or is updated on the host."""
    for letters in levels:
        yield planned(model, cut, letters, **changes)
    for residency in RESIDENCIES:
        yield planned(model, cut, "Fi", **changes, **residency)


def batches_of(model: Transformer, plan: Plan) -> list[Batch]:
    """Where a round has two sequences, the last of some steps has one."""
    most = plan.rounds_per_step * plan.sequences_per_round
    fewer = 1 if plan.sequences_per_round > 1 else 0
    return [random_batch(model, most - step % 2 * fewer, TOKENS, step) for step in range(STEPS)]


def trained(
    plan: Plan, model: Transformer, training: Training, weights: dict[str, Tensor]
) -> tuple[list[float], list[float | None], dict[str, Tensor]]:
    """Losses, norms of the gradients, weights and moments of all steps."""
    executor = executor_for(plan, model, weights, training)
    results = [executor.step(batch, step) for step, batch in enumerate(batches_of(model, plan))]
    return [result.loss for result in results], [result.gradient_norm for result in results], state_of(executor)


def assert_all_alike(plans: Iterator[Plan], model: Transformer, training: Training) -> None:
    weights = parameters(random_module(model))
    first = trained(next(plans), model, training, weights)
    assert all(isfinite(loss) for loss in first[0])
    for plan in plans:
        losses, norms, state = trained(plan, model, training, weights)
        assert losses == first[0]
        assert norms == first[1]
        assert_same_bits(state, first[2])


def cuts_of(family: str) -> tuple[str, ...]:
    """A model that looks ahead has no attention by chunk."""
    return tuple(cut for cut in CUTS if TINY[family].causal or cut != "chunk")


QUICK = (("llama", "bf16"), ("qwen3-biased", "fp32"), ("gpt2", "fp32"), ("bert", "bf16"))
SLOW = (
    *(("llama", "fp32", "whole"), ("qwen3-biased", "bf16", "chunk"), ("gpt2", "bf16", "sequence")),
    *(("bert", "fp32", "sequence"), ("bert-masked", "fp32", "whole"), ("bert-masked", "bf16", "sequence")),
    *(("mistral", "bf16", cut) for cut in CUTS),
    *(("qwen2_moe", "bf16", "chunk"), ("glm4_moe", "fp32", "sequence")),
)
"""Of levels in pairs. With the quick ones: every family in every cut that it has, every format in every cut, and each
of the other families than mistral in both formats. How a format rounds does not depend on the family, so not all three
are crossed."""


@pytest.mark.parametrize(
    ("family", "precision", "cut", "levels"),
    [
        *((family, precision, cut, LEVELS) for family, precision in QUICK for cut in cuts_of(family)),
        *(pytest.param(*each, PAIRED, marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_save_levels_and_residencies_change_no_bit(
    family: str, precision: str, cut: str, levels: tuple[str, ...]
) -> None:
    model = TINY[family]
    assert_all_alike(variants(model, cut, levels, precision=precision), model, TRAINING)


@pytest.mark.slow  # two threads wait for each other at every operator, which takes long where cores are shared
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("cut", CUTS)
def test_two_threads_change_no_bit_between_plans_either(cut: str, precision: str) -> None:
    model = replace(TINY["llama"], hidden=60, ffn=131, vocab=307)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_all_alike(variants(model, cut, ("F", "a", "i", "A", "I"), precision=precision), model, TRAINING)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "precision", ["fp32", "bf16-amp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "bf16-mixed"))]
)
@pytest.mark.parametrize("cut", CUTS)
def test_clipped_at_the_end_all_residencies_are_alike(cut: str, precision: str) -> None:
    model = TINY["llama-tied" if cut == "chunk" else "llama"]
    plans = variants(model, cut, ("F", "aciF"), precision=precision, update_when="end")
    assert_all_alike(plans, model, CLIPPED)


@pytest.mark.parametrize("training", [TRAINING, CLIPPED], ids=["free", "clipped"])
def test_rounding_by_chance_does_not_depend_on_the_pieces_of_an_update(training: Training) -> None:
    by_chance = replace(training, stochastic_rounding=True, seed=11)
    # A head that is much larger than a block passes in many pieces.
    model = replace(TINY["llama"], vocab=1009)
    for cut in CUTS:
        plans = variants(model, cut, ("F",), precision="bf16", update_when="end")
        assert_all_alike(plans, model, by_chance)
    weights = parameters(random_module(model))
    plan = planned(model, "whole", "F", precision="bf16", update_when="end")
    chance, plain = (trained(plan, model, each, weights)[2] for each in (by_chance, training))
    assert any(not torch.equal(chance[name], plain[name]) for name in plain)


def test_an_update_at_the_end_is_that_of_backward_bit_for_bit() -> None:
    model = TINY["qwen2"]
    plans = (
        planned(
            model, "chunk", "ai", precision="bf16", update_when=when, weights=Residency(blocks=1, passing=1), **more
        )
        for when in ("backward", "end")
        for more in ({}, {"gradients": NOTHING_STAYS, "optimizer_state": Residency(blocks=0, passing=2, ends=ENDS)})
    )
    assert_all_alike(plans, model, TRAINING)


def test_a_norm_below_the_clip_clips_nothing_and_is_that_of_the_gradients() -> None:
    model = TINY["llama"]
    weights = parameters(random_module(model))
    plan = planned(model, "chunk", "f", precision="fp32", update_when="end")
    free = trained(plan, model, TRAINING, weights)
    loose = trained(plan, model, replace(TRAINING, clip_norm=1e6), weights)
    assert_same_bits(loose[2], free[2])
    assert free[1] == [None] * STEPS
    executor = executor_for(plan, model, weights, replace(TRAINING, beta1=0.0, clip_norm=1e6))
    result = executor.step(batches_of(model, plan)[0], 0)
    squares = sum(
        float(values.double().square().sum()) for _, moment, values in executor.moments() if moment == "first"
    )
    assert result.gradient_norm == pytest.approx(squares**0.5, rel=1e-6)
