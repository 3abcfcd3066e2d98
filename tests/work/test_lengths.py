"""Sequences of uneven length: their counts against torch's own on each of them, and what distributions say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_model
from flopwise.work.describe import describe
from flopwise.work.formats import POLICIES
from flopwise.work.lengths import (
    MOST_LENGTHS,
    SEQUENCE_LAYOUTS,
    SequenceLayout,
    count_lengths,
    granule_of,
    parse_lengths,
)
from flopwise.work.op import Attention, Pairs
from flopwise.work.traffic import saved_bytes
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES
from tests.support.strategies import FAMILIES, transformers
from tests.support.torch_reference import Reference, flash_attention
from tests.work.test_torch_agreement import counted, described

SOME = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_flops_are_those_that_torch_counts_of_each_sequence_alone(family: str, data: st.DataObject) -> None:
    model = data.draw(transformers(family))
    # Experts share the tokens evenly in the reference, so the number of tokens must divide.
    lengths = [2 * half for half in data.draw(st.lists(st.integers(1, 8), min_size=2, max_size=3))]
    found = count_lengths(lengths)
    work = describe(model, max(lengths), lengths=found)
    expected = [0, 0]
    with torch.device("meta"):
        module = Reference(model, max(lengths), flash_attention)
    for tokens in lengths:
        for place, flops in enumerate(counted(module, 1, tokens)):
            expected[place] += flops
    batches = len(lengths) // work.sequences
    assert [batches * flops for flops in described(work, 1)] == expected
    assert work.parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_everything_else_adds_up_over_the_sequences(family: str, data: st.DataObject) -> None:
    """FLOPs by every mask and convention, tensors, what is saved at every level, parameters."""
    model = data.draw(transformers(family))
    lengths = data.draw(st.lists(st.integers(1, 17), min_size=1, max_size=6))
    found = count_lengths(lengths)
    together = describe(model, 17, lengths=found)
    alone = [describe(model, tokens) for tokens, count in found.counted for _ in range(count)]
    assert together.sequences == len(alone)
    assert together.sequence_tokens == sum(work.sequence_tokens for work in alone)
    for index, op in enumerate(together.ops):
        for pairs in ("mask", "reach", "square"):
            some: Pairs = pairs
            assert op.forward_flops(some) == sum(work.ops[index].forward_flops(some) for work in alone)
            assert op.backward_flops("flash", some) == sum(
                work.ops[index].backward_flops("flash", some) for work in alone
            )
    assert {name: tensor.elements for name, tensor in together.tensors.items()} == {
        name: sum(work.tensors[name].elements for work in alone) for name in together.tensors
    }
    for policy in RECOMPUTE_POLICIES:
        kept = sum(saved_bytes(work, policy, POLICIES["bf16"]) for work in alone)
        assert saved_bytes(together, policy, POLICIES["bf16"]) == kept
    assert together.model_flops("causal") == sum(work.model_flops("causal") for work in alone)


def test_saved_bytes_are_those_that_autograd_keeps_of_each_sequence() -> None:
    from tests.work.test_saved_tensors import kept_by_autograd

    model = Transformer(
        name="tiny", title="", source="", layers=2, hidden=16, heads=2, ffn=40, vocab=30, context=32,
        norm="layer", norm_bias=True, gated=False, positions="learned", position_rows=32, qkv_bias=True,
        output_bias=True, ffn_bias=True, tied=True,
    )  # fmt: skip
    lengths = [9, 2, 5, 5]
    work = describe(model, 32, lengths=count_lengths(lengths))
    module = Reference(model, 32, flash_attention)
    kept = sum(kept_by_autograd(module, torch.zeros(1, tokens, dtype=torch.long)) for tokens in lengths)
    assert saved_bytes(work, "none", POLICIES["fp32"]) - 4 * sum(lengths) == kept


def test_attention_alone_knows_where_sequences_end() -> None:
    model = load_model("bert-base")
    work = describe(model, 128, lengths=count_lengths([3, 5, 128]))
    even = describe(model, 136)
    for op, other in zip(work.ops, even.ops, strict=True):
        if isinstance(op, Attention):
            assert op.forward_flops() * 136**2 == other.forward_flops() * (3**2 + 5**2 + 128**2)
        elif op.in_block:
            assert op.forward_flops() == other.forward_flops()


# -- distributions ---------------------------------------------------------------------------------------------------


@given(SOME, st.sampled_from(SEQUENCE_LAYOUTS))
def test_words_are_read_back(lengths: list[int], layout: SequenceLayout) -> None:
    found = count_lengths(lengths, layout)
    assert parse_lengths(found.words) == found
    assert hash(parse_lengths(found.words)) == hash(found)
    assert found.mean == pytest.approx(float(np.mean(lengths)))
    assert found.longest == max(lengths)
    assert found.batch_tokens(len(lengths)) == sum(lengths)


def test_the_same_proportions_are_the_same_lengths() -> None:
    assert count_lengths([5, 5, 17, 17]) == count_lengths([17, 5])
    assert count_lengths([5, 5, 17]) != count_lengths([17, 5])
    assert replace(count_lengths([5]), note="from data.csv") == count_lengths([5])


@given(SOME, st.integers(1, 5))
@settings(max_examples=60)
def test_the_longest_of_some_is_the_mean_over_all_draws(lengths: list[int], together: int) -> None:
    draws = lengths if together == 1 else [max(lengths[place % len(lengths)] for place in range(together))]
    found = count_lengths(lengths).expected_longest(together)
    if together == 1:
        assert found == pytest.approx(sum(draws) / len(draws))
    everything = np.array(lengths)
    grid = np.stack(np.meshgrid(*[everything] * min(together, 3)), axis=-1).max(axis=-1)
    if together <= 3:
        assert found == pytest.approx(float(grid.mean()))
    assert min(lengths) <= found <= max(lengths)


@pytest.mark.parametrize(
    ("sequences", "chunks", "granule"), [(8, 1, 64), (32, 1, 256), (32, 3, 256), (256, 2, 2048), (4, 5, 1)]
)
def test_rows_of_packed_chunks_are_those_of_many_that_are_filled(sequences: int, chunks: int, granule: int) -> None:
    draw = np.random.default_rng(0)
    lengths = np.clip(np.round(draw.lognormal(3.0, 0.5, 4000)), 2, 128).astype(int)
    room = 128 * sequences
    batches = draw.choice(lengths, size=(2000, chunks, sequences)).sum(axis=2)
    filled = np.minimum(-(-batches // granule) * granule, room)
    fullest = filled.max(axis=1) if granule > 1 else filled.mean(axis=1)
    found = count_lengths(lengths.tolist()).rows(sequences, chunks=chunks, room=room, granule=granule)
    assert found == pytest.approx(float(fullest.mean()), rel=0.02)


def test_rows_of_equal_sequences_are_exact() -> None:
    same = count_lengths([24])
    assert same.rows(32, chunks=1, room=32 * 128, granule=256) == 768
    assert same.rows(33, chunks=4, room=33 * 128, granule=256) == 1024
    assert count_lengths([128]).rows(32, chunks=1, room=32 * 128, granule=256) == 4096
    assert granule_of(32 * 128) == 256
    assert granule_of(8) == 256


def test_more_lengths_than_are_told_apart_keep_their_mean_and_the_longest() -> None:
    lengths = np.random.default_rng(0).integers(1, 9001, 20_000).tolist()
    found = count_lengths(lengths)
    assert len(found.counted) <= MOST_LENGTHS
    assert found.mean == pytest.approx(sum(lengths) / len(lengths), rel=1e-3)
    assert found.longest == max(lengths)
    squares = sum(tokens**2 * count for tokens, count in found.counted) / found.sequences
    assert squares == pytest.approx(sum(tokens**2 for tokens in lengths) / len(lengths), rel=2e-3)


def test_what_is_too_long_is_cut_and_told() -> None:
    found = count_lengths([5, 100, 200, 300]).cut(128)
    assert Counter(dict(found.counted)) == {5: 1, 100: 1, 128: 2}
    assert "50 %" in found.note
    assert count_lengths([5, 100]).cut(128) == count_lengths([5, 100])


@pytest.mark.parametrize(
    "words",
    ["", "packed", "packed:", "packed:5x0", "packed:0", "packed:5,5", "packed:7,5", "heap:5", "5,7", "packed:a"],
)
def test_words_that_are_no_lengths_are_refused(words: str) -> None:
    with pytest.raises(FlopwiseError):
        parse_lengths(words)


def test_lengths_that_nothing_can_compute_are_refused() -> None:
    packed = count_lengths([3, 5])
    with pytest.raises(FlopwiseError, match="eager"):
        describe(load_model("gpt2"), 128, "eager", lengths=packed)
    with pytest.raises(FlopwiseError, match="one length"):
        describe(load_model("lstm-lm"), 8, lengths=packed)
