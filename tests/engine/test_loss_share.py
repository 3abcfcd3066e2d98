"""The head for the tokens alone that have a loss: losses and gradients of all, memory and FLOPs as described."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flopwise.catalog.load import load_hardware  # noqa: E402
from flopwise.engine.batch import NO_LABEL, Batch  # noqa: E402
from flopwise.engine.streaming.inputs import Inputs  # noqa: E402
from flopwise.plan.program.compile import compile_plan  # noqa: E402
from flopwise.predict.simulate.tasks import TaskSeconds  # noqa: E402
from flopwise.work.describe import describe  # noqa: E402
from flopwise.work.op import Gemm  # noqa: E402
from tests.engine.test_streaming_counts import Counting  # noqa: E402
from tests.engine.test_streaming_gradients import assert_equal_gradients, cuts_of, plan_of  # noqa: E402
from tests.engine.test_streaming_memory import assert_within_plan, wide  # noqa: E402
from tests.support.tiny_models import TINY, TOKENS, parameters, random_module  # noqa: E402
from tests.support.training_plans import everything_stays, executor_for, random_batch  # noqa: E402

FAMILIES = ("llama", "gpt2", "bert-masked")
CASES = [(family, cut) for family in FAMILIES for cut in cuts_of(TINY[family])]


def thinned(batch: Batch, share: float, seed: int = 0) -> Batch:
    """The same with about so many of its labels."""
    there = np.random.default_rng(seed).random(batch.labels.shape) < share
    return replace(batch, labels=np.where(there, batch.labels, np.int32(NO_LABEL)))


@pytest.mark.parametrize("head_chunk_tokens", [1, 7, 1000])
@pytest.mark.parametrize(("family", "cut"), CASES)
def test_gradients_are_those_of_computing_all(family: str, cut: str, head_chunk_tokens: int) -> None:
    model = replace(TINY[family], loss_share=0.2)
    # Even and uneven sequences; about as many as planned, many more, none in some, none at all.
    for seed, share in enumerate((0.2, 0.9, 0.03, 0.0)):
        batch = thinned(random_batch(model, 2, TOKENS, seed, masked=False, ragged=bool(seed % 2)), share, seed)
        groups: dict[str, int] = {} if cut == "whole sequences" else {"groups": 2}
        plan = plan_of(model, cut, "fa", head_chunk_tokens=head_chunk_tokens, **groups)
        assert_equal_gradients(model, plan, batch, seed)


def test_an_evaluation_is_that_of_computing_all() -> None:
    model = TINY["bert-masked"]
    module = random_module(model)
    batch = thinned(random_batch(model, 3, TOKENS, 1, ragged=True), 0.3)
    found = []
    for share in (1.0, 0.3):
        asked = replace(model, loss_share=share)
        plan = everything_stays(asked, sequence=TOKENS, sequences=3)
        found.append(executor_for(plan, asked, parameters(module)).evaluate([batch]))
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-12)
    assert found[0].correct == found[1].correct
    assert found[0].with_loss == found[1].with_loss == batch.with_loss


@pytest.mark.parametrize("family", ["llama", "bert-masked"])
def test_products_of_a_step_are_as_described(family: str) -> None:
    """With exactly the share that is described."""
    model = replace(TINY[family], loss_share=0.25)
    sequence = 16
    plan = everything_stays(model, sequence=sequence, sequences=2, head_chunk_tokens=3)
    labels = np.full((2, sequence), NO_LABEL, dtype=np.int32)
    labels[:, ::4] = 1
    batch = replace(random_batch(model, 2, sequence, 0), labels=labels)
    counting = Counting()
    executor = executor_for(plan, model, parameters(random_module(model)))
    with counting:
        executor.step(batch, 0)
    work = describe(model, sequence)
    expected = sum(2 * 3 * op.forward_flops() for op in work.ops if isinstance(op, Gemm))
    assert counting.flops["products"] == expected
    head = {op.name: op for op in work.ops}["head"]
    assert isinstance(head, Gemm)
    assert head.rows == 4


@pytest.mark.parametrize("family", ["llama", "bert-masked"])
@pytest.mark.parametrize("share", [0.15, 1e-3])
def test_a_step_takes_no_more_memory_than_planned(family: str, share: float) -> None:
    """Also where every token has a loss."""
    model = wide(replace(TINY[family], loss_share=share))
    plan = everything_stays(model, sequence=64, sequences=2, precision="bf16", head_chunk_tokens=50)
    assert_within_plan(plan, model)


def test_chunks_of_a_replayed_step_have_as_many_rows_as_the_fullest() -> None:
    model = replace(TINY["llama"], loss_share=0.5)
    plan = everything_stays(model, sequence=8, sequences=1, chunks_per_round=2, saves=("FF",) * model.layers)
    plan = replace(plan, replay=True)
    room = torch.zeros(16 * plan.tokens_per_round, dtype=torch.uint8)
    inputs = Inputs(plan, room, vocabulary=99, classifies=False, causal=True, granule=4, chooses=True)
    labels = np.full((2, 8), NO_LABEL, dtype=np.int32)
    labels[0, 6], labels[1, [1, 3, 4, 5, 7]] = 1, 2
    (layout,) = inputs.prepare([Batch(np.zeros_like(labels), labels)])
    assert layout.chosen == (8, 8)
    labels[1, 7] = NO_LABEL
    (layout,) = inputs.prepare([Batch(np.zeros_like(labels), labels)])
    assert layout.chosen == (4, 4)
    inputs.bring(0)
    # The row with a loss, then the first without one.
    assert [inputs.chosen(chunk).tolist() for chunk in range(2)] == [[6, 0, 1, 2], [1, 3, 4, 5]]  # type: ignore[union-attr]


def test_pieces_of_the_head_are_predicted_by_their_share() -> None:
    model = replace(wide(TINY["llama"]), vocab=50_000)
    few = replace(model, loss_share=0.125)
    seconds = {}
    for each in (model, few):
        plan = everything_stays(each, sequence=4096, precision="fp32", head_chunk_tokens=512)
        costs = TaskSeconds(plan, each, load_hardware("h200"))
        found = costs.of(compile_plan(plan, each))
        tasks = compile_plan(plan, each).tasks
        seconds[each] = sum(time for time, task in zip(found, tasks, strict=True) if task.kind == "head")
    assert seconds[few] == pytest.approx(seconds[model] / 8, rel=0.05)
