"""What an executor holds: evaluated without a trace, read and put into another, cut into uneven rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from flopwise.engine.batch import NO_LABEL, Batch  # noqa: E402
from flopwise.engine.executor import Left  # noqa: E402
from flopwise.engine.streaming.executor import StreamingExecutor  # noqa: E402
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
    first_gradients,
    largest_error,
    random_batch,
    reference_gradients,
    state_of,
)

TRAINING = Training(steps=9, learning_rate=1e-2)
STATE = ("weights", "gradients", "optimizer_state")


def residencies(layers: int) -> Iterator[dict[str, Any]]:
    """State that stays, passes in every way, and is updated on the host."""
    stays = Residency(blocks=layers, ends=ENDS)
    yield dict.fromkeys(STATE, stays)
    yield dict.fromkeys(STATE, Residency(blocks=0, passing=1))
    yield dict.fromkeys(STATE, Residency(blocks=1, passing=2, ends=("head",))) | {"host_copies": True}
    yield dict.fromkeys(STATE, Residency(blocks=0, passing=3, ends=("embedding",))) | {"update_place": "host"}
    yield {"weights": Residency(blocks=0, passing=2), "gradients": stays, "optimizer_state": stays}
    yield {"weights": stays, "gradients": stays, "optimizer_state": stays, "update_place": "host"}


def plans(model: Transformer, **changes: Any) -> Iterator[Plan]:
    """Of all residencies, with whole sequences and with cut ones in turn."""
    for residency in residencies(model.layers):
        more = {**residency, "rounds_per_step": 2, **changes}
        yield everything_stays(model, sequence=TOKENS, sequences=2, saves=("i", "F", "a"), **more)
        yield cut_plan(model, sequence=TOKENS, chunk=12, letters="iFa", attention="sequence", **more)


def batch_for(plan: Plan, model: Transformer, seed: int) -> Batch:
    return random_batch(model, plan.sequences_per_round * plan.rounds_per_step, TOKENS, seed, ragged=True)


# -- evaluation ------------------------------------------------------------------------------------------------------


def judged(model: Transformer, weights: dict[str, Tensor], batches: list[Batch]) -> tuple[float, int]:
    """Mean loss and right answers by the reference module."""
    module = random_module(model)
    module.load_state_dict(weights)
    total, correct = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            lengths = None if batch.lengths is None else torch.from_numpy(batch.lengths).long()
            ids, labels = torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.labels).long()
            types = None if batch.types is None else torch.from_numpy(batch.types).long()
            total += float(module.loss(ids, labels, lengths, None, types))
            answers = module(ids, lengths, None, types).argmax(-1)
            correct += int(((answers == labels) & (labels != NO_LABEL)).sum())
    return total / sum(batch.with_loss for batch in batches), correct


EVALUATED = ("llama", "llama-tied", "gpt2", "bert", "bert-masked")


@pytest.mark.slow
@pytest.mark.parametrize("family", EVALUATED)
def test_an_evaluation_is_the_references_and_leaves_no_trace(family: str) -> None:
    model = replace(TINY[family], layers=3)
    every = list(plans(model))
    # What one family has with whole sequences, the next one has with cut ones.
    cuts = [2 * number + (number + EVALUATED.index(family)) % 2 for number in range(len(every) // 2)]
    weights = parameters(random_module(model))
    # Any number of sequences, of any length that the plan has.
    held_out = [random_batch(model, count, width, seed) for seed, (count, width) in enumerate(((3, 19), (1, 7)))]
    for plan in (every[place] for place in cuts):
        alone, watched = (executor_for(plan, model, weights, TRAINING) for _ in range(2))
        for step in range(2):
            loss, correct = judged(model, state_of_weights(watched), held_out)
            for _ in range(2):
                found = watched.evaluate(iter(held_out))
                assert found.loss == pytest.approx(loss, rel=1e-11)
                assert found.correct == correct
                assert found.with_loss == sum(batch.with_loss for batch in held_out)
                assert found.sequences == 4
            assert_same_bits(state_of(watched), state_of(alone))
            batch = batch_for(plan, model, step)
            assert watched.step(batch, step) == alone.step(batch, step)
        assert_same_bits(state_of(watched), state_of(alone))


def state_of_weights(executor: StreamingExecutor) -> dict[str, Tensor]:
    return {name: values.clone() for name, values in executor.weights().items()}


def test_an_evaluation_of_nothing_is_nothing() -> None:
    model = TINY["llama"]
    plan = everything_stays(model, sequence=TOKENS)
    executor = executor_for(plan, model, parameters(random_module(model)))
    assert executor.evaluate([]).with_loss == 0
    unlabelled = random_batch(model, 2, TOKENS, 0)
    found = executor.evaluate([Batch(unlabelled.ids, np.full_like(unlabelled.labels, NO_LABEL))])
    assert (found.loss, found.correct, found.with_loss, found.sequences) == (0.0, 0, 0, 2)


def test_an_evaluation_between_clipped_steps_changes_nothing() -> None:
    model = replace(TINY["llama"], layers=3)
    weights = parameters(random_module(model))
    for plan in plans(model, update_when="end"):
        alone, watched = (executor_for(plan, model, weights, replace(TRAINING, clip_norm=0.1)) for _ in range(2))
        for step in range(2):
            batch = batch_for(plan, model, step)
            watched.evaluate([batch])
            assert watched.step(batch, step) == alone.step(batch, step)
        assert_same_bits(state_of(watched), state_of(alone))


def asked_from(task: int) -> Callable[[], bool]:
    """To leave a step, once that task is reached."""
    told = count()
    return lambda: next(told) >= task


def test_a_step_that_is_left_has_changed_nothing() -> None:
    """At any task before the first update; from there on it goes to its end."""
    model = replace(TINY["llama"], layers=3)
    weights = parameters(random_module(model))
    # Whole sequences with updates during backward, cut ones with updates behind all of it.
    for plan in (*list(plans(model))[::4], *list(plans(model, update_when="end"))[3::4]):
        training = replace(TRAINING, clip_norm=0.1 if plan.update_when == "end" else None)
        alone, left = (executor_for(plan, model, weights, training) for _ in range(2))
        kinds = [task.kind for task in left.program.tasks]
        first = kinds.index("optimize")
        batch = batch_for(plan, model, 0)
        assert left.step(batch, 0) == alone.step(batch, 0)
        for asked_at in (first // 2, first):
            with pytest.raises(Left):
                left.step(batch, 1, leaves=asked_from(asked_at))
            assert_same_bits(state_of(left), state_of(alone))
        assert left.step(batch, 1, leaves=asked_from(first + 1)) == alone.step(batch, 1)
        assert_same_bits(state_of(left), state_of(alone))


# -- state that moves ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "cut"),
    [("llama", "fp32", 0), ("llama", "bf16-mixed", 1), ("gpt2", "fp32", 1), ("gpt2", "bf16-mixed", 0)],
    ids=["llama-fp32-whole", "llama-mixed-cut", "gpt2-fp32-cut", "gpt2-mixed-whole"],
)
def test_state_read_after_three_steps_continues_in_any_other_residency(family: str, precision: str, cut: int) -> None:
    model = replace(TINY[family], layers=3)
    # Two cuts alternate.
    every = list(plans(model, precision=precision))[cut::2]
    weights = parameters(random_module(model))
    for number, plan in enumerate(every):
        other = every[(number + 1) % len(every)]
        first = executor_for(plan, model, weights, TRAINING)
        batches = [batch_for(plan, model, seed) for seed in range(5)]
        for step in range(3):
            first.step(batches[step], step)
        second = executor_for(other, model, state_of_weights(first), TRAINING)
        for name, moment, values in first.moments():
            second.set_moment(name, moment, values)
        assert_same_bits(state_of(second), state_of(first))
        for step in (3, 4):
            assert second.step(batches[step], step).loss == first.step(batches[step], step).loss
        assert_same_bits(state_of(second), state_of(first))


def test_new_weights_in_the_middle_of_a_training_are_used() -> None:
    model = replace(TINY["llama"], layers=3)
    fresh = parameters(random_module(model, seed=4))
    for plan in plans(model):
        used = executor_for(plan, model, parameters(random_module(model)), TRAINING)
        batch = batch_for(plan, model, 1)
        used.step(batch, 0)
        used.set_weights(fresh)
        used.clear_moments()
        new = executor_for(plan, model, fresh, TRAINING)
        assert used.step(batch, 0).loss == new.step(batch, 0).loss
        assert_same_bits(state_of(used), state_of(new))


# -- uneven rounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bert-masked"])
def test_48_sequences_in_elevens_are_the_48(family: str) -> None:
    model = TINY[family]
    weights = parameters(module := random_module(model))
    batch = random_batch(model, 48, TOKENS, 3, ragged=True)
    loss, expected = reference_gradients(module, batch)
    shapes: dict[str, dict[str, Any]] = {
        "elevens": {"sequences": 11, "rounds_per_step": 5},
        "all at once": {"sequences": 48},
        "elevens in chunks": {
            "sequences": 1,
            "chunks_per_round": 11,
            "rounds_per_step": 5,
            "saves": ("fi" * 5 + "a",) * 2,
        },
    }
    found = {}
    for name, shape in shapes.items():
        plan = everything_stays(model, sequence=TOKENS, **{"saves": ("i", "F"), **shape})
        executor = executor_for(plan, model, weights)
        assert executor.step(batch, 0).loss == pytest.approx(loss, rel=1e-12)
        found[name] = first_gradients(executor)
        assert largest_error(found[name], expected) < 1e-12
    # Were rounds weighted alike, and not by their tokens, the result would differ much.
    parts = [batch.part(first, min(48, first + 11)) for first in range(0, 48, 11)]
    means = [reference_gradients(module, part)[1] for part in parts]
    wrong = {name: sum((mean[name] for mean in means), torch.zeros(())) / 5 for name in expected}
    assert largest_error(wrong, expected) > 1e-3
