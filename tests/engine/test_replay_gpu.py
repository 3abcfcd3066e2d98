"""Steps that are captured and replayed: the same bits as those handed over task by task, whatever their shapes."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

# Before a handle of the library is made: with this its products are repeatable.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest

torch = pytest.importorskip("torch")

from flopwise.engine.streaming.executor import StreamingExecutor  # noqa: E402
from flopwise.setup.training import Training  # noqa: E402
from tests.engine.test_streaming_gpu import FAMILIES, SEQUENCE, batch_for, planned, repeatable  # noqa: E402
from tests.support.tiny_models import parameters, random_module  # noqa: E402
from tests.support.training_plans import assert_same_bits, executor_for, random_batch, state_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
STEPS = 6
TRAINING = Training(steps=STEPS, learning_rate=1e-2, warmup_steps=3, clip_norm=1.0, stochastic_rounding=True)


def executors(family: str, cut: str, training: Training = TRAINING, **changes: object) -> list[StreamingExecutor]:
    """Eager, and replayed."""
    model = FAMILIES[family]
    weights = parameters(random_module(model))
    plan = planned(model, cut, "F", update_when="end", **changes)
    return [
        executor_for(
            replace(plan, replay=replay), model, weights, training, device=torch.device("cuda"), deterministic=True
        )
        for replay in (False, True)
    ]


@pytest.mark.parametrize("cut", ["whole", "chunk"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_replayed_steps_give_the_bits_of_eager_ones(family: str, cut: str) -> None:
    if cut == "chunk" and not FAMILIES[family].causal:
        pytest.skip("what looks both ways is not cut")
    with repeatable(True):
        eager, replayed = executors(family, cut)
        for step in range(STEPS):
            batch = batch_for(eager.plan, FAMILIES[family], step)
            expected, found = eager.step(batch, step), replayed.step(batch, step)
            assert replace(found, waited_s=None) == replace(expected, waited_s=None)
        assert replayed._captured
        assert_same_bits(state_of(replayed), state_of(eager))


def test_batches_of_uneven_length_are_replayed_by_their_size() -> None:
    model = FAMILIES["bert"]
    with repeatable(True):
        eager, replayed = executors("bert", "whole")
        for step in range(12):
            batch = random_batch(model, 3, SEQUENCE, step % 5)
            eager.step(batch, step)
            replayed.step(batch, step)
        assert replayed._captured
        assert_same_bits(state_of(replayed), state_of(eager))


def test_steps_of_which_some_tokens_have_a_loss_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As handed over task by task with the same rows to fill up: few graphs serve batches of any share."""
    model = replace(FAMILIES["llama"], loss_share=0.4)
    plan = replace(planned(model, "whole", "F", update_when="end"), replay=True)
    weights, device = parameters(random_module(model)), torch.device("cuda")
    with repeatable(True):
        eager, replayed = (
            executor_for(plan, model, weights, TRAINING, device=device, deterministic=True) for _ in range(2)
        )
        monkeypatch.setattr(eager, "_replays", lambda _: False)
        for step in range(12):
            batch = random_batch(model, 3, SEQUENCE, step % 5)
            expected, found = eager.step(batch, step), replayed.step(batch, step)
            assert replace(found, waited_s=None) == replace(expected, waited_s=None)
        assert replayed._captured
        assert_same_bits(state_of(replayed), state_of(eager))


def test_an_evaluation_between_replayed_steps_changes_nothing() -> None:
    with repeatable(True):
        eager, replayed = executors("llama", "whole")
        for step in range(STEPS):
            batch = batch_for(eager.plan, FAMILIES["llama"], step)
            eager.step(batch, step)
            replayed.step(batch, step)
            found = replayed.evaluate([batch])
            assert found.loss == eager.evaluate([batch]).loss
        assert_same_bits(state_of(replayed), state_of(eager))


def test_a_timed_replay_says_when_its_tasks_ran() -> None:
    _, replayed = executors("llama", "whole")
    for step in range(3):
        replayed.step(batch_for(replayed.plan, FAMILIES["llama"], step), step)
    replayed.times_tasks = True
    for step in range(3, 5):
        replayed.step(batch_for(replayed.plan, FAMILIES["llama"], step), step)
    times = replayed.task_times()
    computed = [index for index, task in enumerate(replayed.program.tasks) if task.stream == "compute"]
    assert sorted(times) == computed
    assert all(times[first][1] <= times[last][0] + 1e-6 for first, last in pairwise(computed))
