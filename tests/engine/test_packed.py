"""Sequences of uneven length without their padding: where they lie, their attention, and what fills up a chunk."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from flopwise.base.errors import FlopwiseError  # noqa: E402
from flopwise.engine.batch import NO_LABEL, Batch  # noqa: E402
from flopwise.engine.kernels.attention import attention_backward, attention_forward  # noqa: E402
from flopwise.engine.kernels.packed_attention import Packed, packed_backward, packed_forward  # noqa: E402
from flopwise.engine.kernels.plain_attention import AttentionMask, Saved  # noqa: E402
from flopwise.engine.streaming.inputs import IDS, LABELS, POSITIONS, Inputs  # noqa: E402
from flopwise.plan.device.forecast import flops_of  # noqa: E402
from flopwise.records.plan import Plan  # noqa: E402
from flopwise.work.describe import describe  # noqa: E402
from flopwise.work.lengths import count_lengths  # noqa: E402
from flopwise.work.op import Attention, Pairs  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.engine.test_streaming_counts import Counting  # noqa: E402
from tests.support.tiny_models import TINY, TOKENS, parameters, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    everything_stays,
    executor_for,
    first_gradients,
    largest_error,
    random_batch,
    reference_gradients,
    total_error,
)

MASKS = {
    "all": AttentionMask(4, 4, 8, causal=False, window=None),
    "causal": AttentionMask(4, 2, 8, causal=True, window=None),
    "window": AttentionMask(4, 1, 8, causal=True, window=3),
}
LENGTHS = ((5, 1, 9, 3), (1,), (7, 7), (2, 0, 4))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", MASKS)
def test_packed_attention_is_that_of_each_sequence_alone(kind: str, lengths: tuple[int, ...]) -> None:
    mask = MASKS[kind]
    rows, most = sum(lengths), max(lengths)
    torch.manual_seed(len(lengths))
    query, gradient = (torch.randn(rows, 4, 8, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(rows, mask.kv_heads, 8, dtype=torch.float64) for _ in range(2))
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    out, sums = torch.zeros_like(query), torch.zeros(4, rows, dtype=torch.float64)
    packed = Packed(starts, most)
    packed_forward(query, key, value, mask, packed, out=out, logsumexp=sums)
    found = [torch.zeros_like(each) for each in (query, key, value)]
    packed_backward(
        Saved(gradient, query, key, value, out, sums),
        mask,
        packed,
        query_gradient=found[0],
        key_gradient=found[1],
        value_gradient=found[2],
    )
    expected = _padded_attention(lengths, (gradient, query, key, value), mask)
    for got, wanted in zip((out, *found), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def _padded_attention(lengths: tuple[int, ...], given: tuple[Tensor, ...], mask: AttentionMask) -> list[Tensor]:
    """The same by the plain kernel over sequences that are filled up."""
    there = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

    def padded(packed: Tensor) -> Tensor:
        whole: Tensor = torch.zeros(*there.shape, *packed.shape[1:], dtype=packed.dtype)
        whole[there] = packed
        return whole

    gradient, query, key, value = (padded(each) for each in given)
    out, sums = torch.zeros_like(query), torch.zeros(len(lengths), 4, max(lengths), dtype=query.dtype)
    several: dict[str, Any] = {"lengths": torch.tensor(lengths, dtype=torch.int32), "kernel": "plain"}
    attention_forward(query, key, value, mask, out=out, logsumexp=sums, **several)
    found = [torch.zeros_like(each) for each in (query, key, value)]
    attention_backward(
        gradient, query, key, value, out, sums, mask, accumulate=False, **several,
        query_gradient=found[0], key_gradient=found[1], value_gradient=found[2],
    )  # fmt: skip
    return [each[there] for each in (out, *found)]


def inputs_for(plan: Plan, *, granule: int, classifies: bool = False) -> Inputs:
    room = torch.zeros(12 * plan.tokens_per_round, dtype=torch.uint8)
    return Inputs(plan, room, vocabulary=99, classifies=classifies, causal=False, granule=granule)


def ragged(lengths: list[int], tokens: int) -> Batch:
    ids = np.arange(len(lengths) * tokens, dtype=np.int32).reshape(len(lengths), tokens) + 1
    return Batch(ids, ids + 100, np.array(lengths, dtype=np.int32))


def test_no_row_is_without_a_token() -> None:
    plan = everything_stays(TINY["bert-masked"], sequence=6, sequences=3)
    inputs = inputs_for(plan, granule=1)
    inputs.prepare([ragged([2, 6, 1], 6)])
    inputs.bring(0)
    chunk = inputs.chunk(0)
    assert chunk is not None
    assert chunk.packed
    assert chunk.count == 9
    assert inputs.ids(0).tolist() == [1, 2, 7, 8, 9, 10, 11, 12, 13]
    assert inputs.labels(0).tolist() == [101, 102, 107, 108, 109, 110, 111, 112, 113]
    assert chunk.positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 0]
    assert chunk.begins.tolist() == [0, 2, 8]


@pytest.mark.parametrize("lengths", [[2, 6, 1], [1, 1, 1], [6, 6, 5], [3]])
def test_chunks_are_filled_up_with_sequences_that_have_no_loss(lengths: list[int]) -> None:
    plan = everything_stays(TINY["bert-masked"], sequence=6, sequences=3)
    inputs = inputs_for(plan, granule=8)
    inputs.prepare([ragged(lengths, 6)])
    inputs.bring(0)
    chunk, total = inputs.chunk(0), sum(lengths)
    assert chunk is not None
    assert chunk.starts is not None
    assert chunk.count == min(-(-total // 8) * 8, 18)
    assert inputs._block[LABELS, total : chunk.count].tolist() == [NO_LABEL] * (chunk.count - total)
    assert not inputs._block[[IDS, POSITIONS], total : chunk.count].any()
    starts = chunk.starts.tolist()
    assert starts[: len(lengths) + 1] == [0, *np.cumsum(lengths)]
    assert starts[-1] == chunk.count
    assert all(0 <= last - first <= 6 for first, last in pairwise(starts))


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("family", ["bert", "bert-masked", "llama"])
def test_what_fills_up_changes_no_gradient(family: str, rounds: int) -> None:
    model = TINY[family]
    plan = everything_stays(model, sequence=11, sequences=3, rounds_per_step=rounds)
    batch = random_batch(model, 3 * rounds, 11, 3, ragged=True)
    module = random_module(model)
    expected = reference_gradients(module, batch)
    executor = executor_for(plan, model, parameters(module))
    inputs = executor.player.inputs
    for granule in (1, 8, 64):
        executor.clear_moments()
        executor.set_weights(parameters(module))
        executor.player.inputs = Inputs(
            plan,
            inputs._block.view(-1).view(torch.uint8),
            vocabulary=model.vocab,
            classifies=model.head == "classifier",
            causal=model.causal,
            granule=granule,
            types=model.token_types,
        )
        result = executor.step(batch, 0)
        assert result.loss == pytest.approx(expected[0], rel=1e-9)
        assert largest_error(first_gradients(executor), expected[1]) < 1e-9


def test_even_sequences_are_not_packed() -> None:
    plan = everything_stays(TINY["bert-masked"], sequence=6, sequences=3)
    inputs = inputs_for(plan, granule=8)
    layouts = inputs.prepare([ragged([6, 6, 6], 6)])
    assert layouts[0].rows is None


def test_a_sequence_without_a_token_is_refused() -> None:
    plan = everything_stays(TINY["bert-masked"], sequence=6, sequences=3)
    with pytest.raises(FlopwiseError, match="without a token"):
        inputs_for(plan, granule=1).check(ragged([3, 0, 2], 6))


def test_a_step_after_one_that_failed_is_as_if_it_had_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY["bert"]
    plan = everything_stays(model, sequence=11, sequences=3)
    module, batch = random_module(model), random_batch(model, 3, 11, 3)
    expected, executor = (executor_for(plan, model, parameters(module)) for _ in range(2))
    (block,) = executor.player.blocks.values()

    def fail(*_: object, **__: object) -> None:
        executor.player.arena.take((5,), torch.float64)
        raise RuntimeError("out of luck")

    with monkeypatch.context() as failing:
        failing.setattr(block, "backward", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            executor.step(batch, 0)
    assert executor.player.arena.empty
    # What was updated before it failed begins anew.
    executor.clear_moments()
    executor.set_weights(parameters(module))
    assert executor.step(batch, 0) == expected.step(batch, 0)


# -- the same with and without padding --------------------------------------------------------------------------------

ODD = {
    "a row of one token": (1, 9, 4),
    "a row of full length": (11, 2, 7),
    "all equal": (5, 5, 5),
    "one token each": (1, 1, 1),
    "both ends": (11, 1, 11),
}
FP32 = {"precision": "fp32"}


def of_lengths(batch: Batch, lengths: tuple[int, ...]) -> Batch:
    """The batch with sequences of these lengths."""
    count = np.array(lengths, dtype=np.int32)
    labels = batch.labels.copy()
    if labels.ndim > 1:
        labels[np.arange(labels.shape[1]) >= count[:, None]] = NO_LABEL
        # One has a loss, whatever was masked.
        labels[0, 0] = 3
    return Batch(batch.ids, labels, count)


@pytest.mark.parametrize("lengths", ODD)
@pytest.mark.parametrize("family", ["bert", "bert-masked", "llama", "gpt2"])
def test_padded_and_packed_batches_give_the_same_losses_and_gradients(
    family: str, lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TINY[family]
    plan = everything_stays(model, sequence=11, sequences=3, **FP32)
    batch = of_lengths(random_batch(model, 3, 11, 5), ODD[lengths])
    weights = {name: values.float() for name, values in parameters(random_module(model)).items()}
    packed, padded = (executor_for(plan, model, weights) for _ in range(2))
    monkeypatch.setattr(padded.player.inputs, "_packs", lambda _: False)
    found, expected = packed.step(batch, 0), padded.step(batch, 0)
    assert packed.player.inputs.layout.rows is not None
    assert padded.player.inputs.layout.rows is None
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.with_loss == expected.with_loss
    assert total_error(first_gradients(packed), first_gradients(padded)) < 1e-6
    # Of a parameter whose gradient is nearly nothing the rounding of larger numbers is more.
    assert largest_error(first_gradients(packed), first_gradients(padded)) < 1e-5


@pytest.mark.parametrize("lengths", ODD)
@pytest.mark.parametrize("family", ["bert", "bert-masked", "llama"])
def test_a_packed_step_runs_the_products_that_its_plan_counts(family: str, lengths: str) -> None:
    model = TINY[family]
    found = count_lengths(ODD[lengths])
    plan = everything_stays(model, sequence=11, sequences=3, lengths=found.words)
    executor = executor_for(plan, model, parameters(random_module(model)))
    counting = Counting()
    with counting:
        executor.step(of_lengths(random_batch(model, 3, 11, 5), ODD[lengths]), 0)
    work = describe(model, 11, lengths=found)
    batches = len(ODD[lengths]) // work.sequences
    attention = next(op for op in work.ops if isinstance(op, Attention))

    def of_attention(pairs: Pairs) -> int:
        return batches * (attention.forward_flops(pairs) + attention.backward_flops("flash", pairs))

    # torch's attention on a CPU computes the whole square.
    assert counting.flops["attention"] == of_attention("square")
    assert counting.flops["products"] + of_attention("mask") == flops_of(plan, model, "causal")[1]


@pytest.mark.parametrize("replay", [False, True])
def test_chunks_of_a_step_that_is_replayed_have_as_many_rows_as_the_fullest(replay: bool) -> None:
    model = TINY["bert-masked"]
    cut: dict[str, Any] = {"chunk_tokens": 12, "chunks_per_round": 2, "saves": ("FF",) * model.layers}
    plan = everything_stays(model, sequence=6, replay=replay, **cut)
    inputs = inputs_for(plan, granule=4)
    layouts = inputs.prepare([ragged([2, 1, 6, 3], 6)])
    assert layouts[0].rows == ((12, 12) if replay else (4, 12))


# -- several documents in a sequence ----------------------------------------------------------------------------------

DOCUMENTS = ([5, 3, 3], [2, 7], [11], [1, 1, 1, 1, 1, 1], [10, 1])
"""Of each sequence of eleven tokens."""


def of_documents(model: Transformer, rows: int) -> tuple[Batch, Batch]:
    """The same documents sharing sequences, and one a sequence."""
    dice = np.random.default_rng(5)
    each = [length for row in DOCUMENTS[:rows] for length in row]
    alone = np.zeros((len(each), 11), dtype=np.int32)
    labels = np.full_like(alone, NO_LABEL)
    for row, length in enumerate(each):
        alone[row, :length] = dice.integers(0, model.vocab, length)
        there = dice.random(length) < 0.7
        labels[row, :length] = np.where(there, dice.integers(0, model.vocab, length), NO_LABEL)
    packed_ids, packed_labels = np.zeros((rows, 11), np.int32), np.full((rows, 11), NO_LABEL, np.int32)
    number = 0
    for row in range(rows):
        first = 0
        for length in DOCUMENTS[row]:
            packed_ids[row, first : first + length] = alone[number, :length]
            packed_labels[row, first : first + length] = labels[number, :length]
            first, number = first + length, number + 1
    documents = tuple(np.array(row, dtype=np.int32) for row in DOCUMENTS[:rows])
    lengths = np.array([sum(row) for row in DOCUMENTS[:rows]], dtype=np.int32)
    whole = Batch(alone, labels, np.array(each, dtype=np.int32))
    return Batch(packed_ids, packed_labels, lengths, documents), whole


@pytest.mark.parametrize("granule", [1, 8, 64])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen3"])
def test_documents_of_a_sequence_know_nothing_of_each_other(family: str, granule: int) -> None:
    model = TINY[family]
    packed, alone = of_documents(model, 5)
    # The last round is not full.
    plan = everything_stays(model, sequence=11, sequences=3, rounds_per_step=2)
    module = random_module(model)
    expected = reference_gradients(module, alone)
    executor = executor_for(plan, model, parameters(module))
    inputs = executor.player.inputs
    executor.player.inputs = Inputs(
        plan,
        inputs._block.view(-1).view(torch.uint8),
        vocabulary=model.vocab,
        classifies=False,
        causal=True,
        granule=granule,
    )
    assert executor.evaluate([packed]).loss == pytest.approx(expected[0], rel=1e-9)
    result = executor.step(packed, 0)
    assert result.loss == pytest.approx(expected[0], rel=1e-9)
    assert largest_error(first_gradients(executor), expected[1]) < 1e-9
    assert packed.lengths_counted() == alone.lengths_counted() and packed.tokens == alone.tokens


def test_few_beginnings_are_looked_at_and_all_that_there_are() -> None:
    plan = everything_stays(TINY["llama"], sequence=40, sequences=2)
    inputs = inputs_for(plan, granule=8)
    ids = np.ones((2, 40), dtype=np.int32)
    found = []
    for documents in ([1] * 40, [40]):
        rows = tuple(np.array(documents, dtype=np.int32) for _ in range(2))
        layout = inputs.prepare([Batch(ids, ids, np.array([40, 40], dtype=np.int32), rows)])
        inputs.bring(0)
        chunk = inputs.chunk(0)
        assert chunk is not None and chunk.starts is not None
        ends = chunk.starts.tolist()
        assert ends[: 2 * len(documents) + 1] == [0, *np.cumsum(documents * 2)] and ends[-1] == 80
        found.append((len(ends), layout[0].places))
    assert found == [(96, (96,)), (32, (32,))]


def test_documents_behind_each_other_are_refused_beyond_a_chunk_of_attention() -> None:
    model = TINY["llama4_text"]
    plan = everything_stays(model, sequence=TOKENS, sequences=2)
    executor = executor_for(plan, model, parameters(random_module(model)))
    batch = random_batch(model, 2, TOKENS, 0)
    several = replace(
        batch,
        lengths=np.array([TOKENS, TOKENS], dtype=np.int32),
        documents=(np.array([10, TOKENS - 10], dtype=np.int32), np.array([TOKENS], dtype=np.int32)),
    )
    with pytest.raises(FlopwiseError, match="longer than attention's chunks"):
        executor.step(several, 0)
    # Within one they are not.
    wide = replace(model, attention_chunk=TOKENS)
    assert executor_for(plan, wide, parameters(random_module(wide))).step(several, 0).loss > 0
