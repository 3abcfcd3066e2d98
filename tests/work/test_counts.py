"""Exact counts against published figures and hand-computed cases. None of the numbers comes from flopwise."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.catalog.load import load_model, model_names
from flopwise.work.describe import describe
from flopwise.work.formats import POLICIES
from flopwise.work.op import Attention, Gemm
from flopwise.work.optimizers import update_work
from flopwise.work.total_flos import non_embedding_parameters, total_flos
from flopwise.work.traffic import block_saved_bytes, saved_bytes
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES, Recompute, Work
from tests.support.strategies import transformers

BF16 = POLICIES["bf16"]

# Nine profiled training steps of BERT base with six labels: batch, tokens, printed model_flops.
BERT_STEPS = [
    (8, 128, "536.363 G"),
    (16, 128, "1.073 T"),
    (32, 128, "2.145 T"),
    (32, 128, "2.145 T"),  # a second compilation of the same step
    (48, 128, "3.218 T"),
    (64, 128, "4.291 T"),
    (4, 128, "268.181 G"),
    (2, 128, "134.091 G"),
    (32, 32, "525.577 G"),
]


@pytest.mark.parametrize(("batch", "tokens", "printed"), BERT_STEPS)
def test_bert_step_equals_the_profilers_count(batch: int, tokens: int, printed: str) -> None:
    flops = batch * describe(load_model("bert-base"), tokens).model_flops("causal")
    scale = {"G": 1e9, "T": 1e12}[printed[-1]]
    assert f"{flops / scale:.3f} {printed[-1]}" == printed


# The Trainer's line after three epochs: sequences seen by one process, tokens, what it printed.
TOTAL_FLOS = [
    (24_000, 128, "1470300GF"),
    (24_048, 128, "1473240GF"),
    (24_000, 16, "183787GF"),
    (24_000, 32, "367575GF"),
    (24_000, 64, "735150GF"),
]


@pytest.mark.parametrize(("sequences", "tokens", "printed"), TOTAL_FLOS)
def test_total_flos_line(sequences: int, tokens: int, printed: str) -> None:
    work = describe(load_model("bert-base"), tokens)
    assert non_embedding_parameters(work) == 85_651_206
    assert f"{total_flos(work, sequences) >> 30}GF" == printed


# Bytes per token and layer that the reference offload trainer keeps at each level, in bf16.
SAVE_LEVELS = [
    ("llama-3-8b", "context", 12_296),
    ("llama-3-8b", "attention", 20_616),
    ("llama-3-8b", "pointwise", 94_344),
    ("llama-3-8b", "input", 8_192),
    ("llama-3-1b", "context", 6_152),
    ("llama-3-1b", "attention", 10_376),
    ("llama-3-1b", "pointwise", 51_336),
    ("dataflow-32b", "context", 14_344),
    ("dataflow-32b", "attention", 24_744),
    ("dataflow-32b", "pointwise", 155_816),
]


@pytest.mark.parametrize(("name", "level", "expected"), SAVE_LEVELS)
def test_saved_bytes_by_level(name: str, level: Recompute, expected: int) -> None:
    work = describe(load_model(name), 4096)
    assert block_saved_bytes(work, level, BF16) == 4096 * expected


def test_level_attention_recomputes_query_output_gate_and_up() -> None:
    """2·c·D·(2A + 2F) FLOPs for a chunk of c tokens in the reference's own formula."""
    model = load_model("llama-3-8b")
    assert isinstance(model, Transformer)
    work = describe(model, 4096)
    again = work.recomputed("attention")
    flops = sum(int(op.forward_flops() * again.get(op.name, Fraction(0))) for op in work.ops)
    assert flops == 32 * 2 * 4096 * 4096 * (2 * 4096 + 2 * 14336)


def test_block_keeps_what_korthikanti_et_al_count() -> None:
    """34·s·b·h bytes for a GPT block, less the two dropout masks of s·b·h; their score terms are flash's to avoid."""
    model = load_model("gpt-3-175b")
    work = describe(model, 2048)
    assert isinstance(model, Transformer)
    plain = block_saved_bytes(work, "none", BF16)
    statistics = 2048 * (2 * 2 * 4 + 4 * model.heads)
    assert plain - statistics == 32 * 2048 * model.hidden


def test_eager_attention_keeps_the_probabilities() -> None:
    model = load_model("gpt-3-175b")
    assert isinstance(model, Transformer)
    flash = saved_bytes(describe(model, 2048), "none", BF16)
    eager = saved_bytes(describe(model, 2048, "eager"), "none", BF16)
    assert eager - flash == model.layers * model.heads * (2 * 2048 * 2048 - 4 * 2048)


def units(work: Work, policy: Recompute) -> tuple[Fraction, Fraction, Fraction]:
    """Executed FLOPs of attention, of the blocks' products and of the head, each in units of its forward."""

    def ratio(ops: list[Gemm] | list[Attention]) -> Fraction:
        again = work.recomputed(policy)
        executed = sum(work.hardware_flops(op, "causal", again.get(op.name, Fraction(0))) for op in ops)
        return Fraction(executed, sum(op.forward_flops() for op in ops))

    attention = [op for op in work.ops if isinstance(op, Attention)]
    products = [op for op in work.ops if isinstance(op, Gemm) and op.in_block]
    head = [op for op in work.ops if isinstance(op, Gemm) and not op.in_block]
    return ratio(attention), ratio(products), ratio(head)


def test_hardware_units_with_and_without_checkpointing() -> None:
    work = describe(load_model("mpt-7b"), 2048)
    assert units(work, "none") == (Fraction(7, 2), Fraction(3), Fraction(3))
    assert units(work, "full") == (Fraction(9, 2), Fraction(4), Fraction(3))
    assert units(work, "pointwise") == (Fraction(7, 2), Fraction(3), Fraction(3))
    attention, products, head = units(work, "input")
    assert (attention, head) == (Fraction(9, 2), Fraction(3))
    # All but the last product of the feed-forward, 4·d² of a block's 12·d².
    assert products == 3 + Fraction(8, 12)


def test_eager_attention_computes_the_whole_square_three_times() -> None:
    work = describe(load_model("mpt-7b"), 2048, "eager")
    assert units(work, "none")[0] == 6


@pytest.mark.parametrize("tokens", [512, 2048, 65_536])
@pytest.mark.parametrize("size", ["125m", "7b", "70b"])
def test_palm_is_six_n_plus_attention(size: str, tokens: int) -> None:
    model = load_model(f"mpt-{size}")
    assert isinstance(model, Transformer)
    work = describe(model, tokens)
    parameters = work.parameters
    layers, width = model.layers, model.hidden
    assert parameters == width * (50_368 + tokens) + layers * (12 * width**2 + 13 * width) + 2 * width
    assert work.model_flops("palm") == 3 * (2 * parameters * tokens + 4 * layers * width * tokens**2)


def test_causal_counts_half_the_square_and_no_look_ups() -> None:
    """45.0 GFLOP per token in 7.504 G matrix parameters and 2.15 GFLOP of attention forward at 8k."""
    model = load_model("llama-3-8b")
    work = describe(model, 8192)
    attention = next(op for op in work.ops if isinstance(op, Attention))
    assert attention.forward_flops() // 8192 == 2 * 8192 * 4096 * 32
    products = sum(op.forward_flops() for op in work.ops if isinstance(op, Gemm))
    assert products // 8192 == 2 * (32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128_256)
    assert work.model_flops("causal") == 3 * (attention.forward_flops() + products)


def test_window_leaves_a_band() -> None:
    """Pairs within a window w of S tokens, diagonal halved as without one: w·S − w²/2."""
    model = load_model("mistral-7b")
    assert isinstance(model, Transformer)
    attention = next(op for op in describe(model, 10_000).ops if isinstance(op, Attention))
    assert attention.twice_pairs("mask") == 2 * 4096 * 10_000 - 4096**2
    whole = next(op for op in describe(replace(model, window=None), 4096).ops if isinstance(op, Attention))
    narrow = next(op for op in describe(model, 4096).ops if isinstance(op, Attention))
    assert whole.twice_pairs("mask") == narrow.twice_pairs("mask") == 4096**2


@pytest.mark.parametrize(("tokens", "window"), [(50, 7), (20, 20), (9, 1), (7, 30)])
def test_a_window_that_looks_ahead_is_counted_pair_by_pair(tokens: int, window: int) -> None:
    model = load_model("bert-base")
    assert isinstance(model, Transformer)
    model = replace(model, window=window)
    attention = next(op for op in describe(model, tokens).ops if isinstance(op, Attention))
    seen = [sum(abs(query - key) < window for key in range(tokens)) for query in range(tokens)]
    assert attention.twice_pairs("mask") == 2 * sum(seen)
    assert attention.twice_pairs_of(2, 7) == 2 * sum(seen[2:7])
    assert attention.twice_pairs("reach") == 2 * tokens * max(seen)


def test_mixture_counts_active_experts() -> None:
    """Mixtral's paper: 47 B parameters, 13 B active."""
    work = describe(load_model("mixtral-8x7b"), 4096)
    assert work.parameters == 46_702_792_704
    assert work.active_parameters == 12_879_925_248
    gate = next(op for op in work.ops if op.name == "gate_up")
    assert gate.forward_flops() == 32 * 2 * 2 * 4096 * 4096 * 2 * 14336


@pytest.mark.parametrize("name", model_names())
def test_every_catalogue_model_is_consistent(name: str) -> None:
    model = load_model(name)
    work = describe(model, min(model.context, 2048))
    sizes = [saved_bytes(work, policy, BF16) for policy in RECOMPUTE_POLICIES]
    assert sizes == sorted(sizes, reverse=True), "each policy keeps at most what the one before keeps"
    executed = [work.total_hardware_flops("causal", policy) for policy in RECOMPUTE_POLICIES]
    assert executed == sorted(executed), "and executes at least as much"
    assert executed[0] >= work.model_flops("causal") > 0


@given(transformers(), st.integers(1, 16))
def test_policies_order_for_any_model(model: Transformer, tokens: int) -> None:
    work = describe(model, tokens)
    for convention in ("causal", "palm"):
        executed = [work.total_hardware_flops(convention, policy) for policy in RECOMPUTE_POLICIES]
        assert executed == sorted(executed)
    sizes = [saved_bytes(work, policy, BF16) for policy in RECOMPUTE_POLICIES]
    assert sizes[2:] == sorted(sizes[2:], reverse=True)


@pytest.mark.parametrize(
    ("policy", "update"),
    [
        ("bf16", 2 + 8 + 2 + 2),
        ("bf16-mixed", 2 + 16 + 2 + 8),
        ("bf16-amp", 4 + 16 + 4 + 4),
        ("fp32", 4 + 16 + 4 + 4),
    ],
)
def test_bytes_of_an_update(policy: str, update: int) -> None:
    """AdamW by hand: gradient read; both moments and the master read and written; weight (read and) written."""
    work = describe(load_model("gpt2"), 8)
    assert update_work(work, "adamw", POLICIES[policy]).moved_bytes == update * work.parameters


def test_palm_reaches_as_far_as_the_window() -> None:
    """12·h·d·min(w, S) FLOPs per token and layer for training, not 12·h·d·S."""
    attention = next(op for op in describe(load_model("mistral-7b"), 32_768).ops if isinstance(op, Attention))
    assert 3 * attention.forward_flops("reach") == 32 * 12 * 4096 * 4096 * 32_768


def test_eager_scores_alone_are_half_of_attention() -> None:
    """Level `attention` keeps the result: of the two products only the scores are made again."""
    work = describe(load_model("mpt-7b"), 2048, "eager")
    assert work.recomputed("attention")["attention"] == Fraction(1, 2)
    assert work.recomputed("context")["attention"] == 1
    assert units(work, "attention")[0] == 6 + Fraction(1)
