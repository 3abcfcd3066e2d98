"""The streaming executor's gradients against autograd's on the reference modules, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from flopwise.engine.batch import NO_LABEL, Batch  # noqa: E402
from flopwise.engine.kernels import plain_gated  # noqa: E402
from flopwise.engine.streaming.gated import GatedKernels  # noqa: E402
from flopwise.engine.streaming.player import reads_columns  # noqa: E402
from flopwise.engine.streaming.values import join_columns  # noqa: E402
from flopwise.records.plan import Plan, Residency  # noqa: E402
from flopwise.records.program import ALIGNMENT_BYTES  # noqa: E402
from flopwise.work.fusion import has_plain_swiglu  # noqa: E402
from flopwise.work.parameters import ENDS  # noqa: E402
from flopwise.work.routing import Routing  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support.tiny_models import LLAMA, MODERNBERT, TINY, TOKENS, parameters, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    any_levels,
    any_residency,
    cut_plan,
    everything_stays,
    executor_for,
    first_gradients,
    largest_error,
    random_batch,
    reference_gradients,
)

LETTERS = "faciFACI"
NOTHING_STAYS = Residency(blocks=0, passing=1)
CUTS = ("whole sequences", "attention by chunk", "attention by sequence")
HEAD_CHUNKS = (1, 7, 1000)
"""One token, a number that divides nothing, and more than a chunk has."""


def assert_equal_gradients(
    model: Transformer,
    plan: Plan,
    batch: Batch,
    seed: int = 0,
    *,
    packs: bool | None = None,
    gated: GatedKernels | None = None,
) -> None:
    module = random_module(model, seed=seed)
    loss, expected = reference_gradients(module, batch)
    executor = executor_for(plan, model, parameters(module), packs=packs, gated=gated)
    result = executor.step(batch, 0)
    assert result.loss == pytest.approx(loss, rel=1e-11, abs=1e-12)
    assert result.with_loss == batch.with_loss
    assert largest_error(first_gradients(executor), expected) < 1e-10
    assert executor.player.arena.empty
    assert executor.player.head_arena.empty
    # What did not fit is within what the plan leaves to libraries.
    assert executor.player.arena.peak_beside_bytes <= executor.slabs.left_to_libraries["temporaries"]
    assert not any(buffer.data_ptr() % ALIGNMENT_BYTES for buffer in executor.slabs.buffers if buffer.numel())


def plan_of(model: Transformer, cut: str, letters: str, **changes: Any) -> Plan:
    """Sequences of 19 tokens: two in a chunk, or each in chunks of 9 with a tail of one."""
    if cut == "whole sequences":
        saves = tuple(letters[layer % len(letters)] for layer in range(model.layers))
        return everything_stays(model, sequence=TOKENS, sequences=2, saves=saves, **changes)
    attention = cut.rsplit(" ", maxsplit=1)[-1]
    return cut_plan(model, sequence=TOKENS, chunk=9, letters=letters, attention=attention, **changes)


def cuts_of(model: Transformer) -> list[str]:
    cuts = CUTS[:1] if model.uncut else CUTS
    return [cut for cut in cuts if model.causal or cut != "attention by chunk"]


@pytest.mark.parametrize("family", [name for name, model in TINY.items() if all(map(reads_columns, model.kinds))])
def test_packed_products_give_the_gradients_of_autograd(family: str) -> None:
    model = TINY[family]
    for cut in cuts_of(model):
        for number, letters in enumerate(("f", "FA", "ai")):
            plan = plan_of(model, cut, letters)
            batch = random_batch(model, plan.sequences_per_round, TOKENS, number, ragged=number % 2 == 1)
            assert_equal_gradients(model, plan, batch, packs=True)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("family", [name for name, model in TINY.items() if has_plain_swiglu(model)])
def test_products_with_activations_in_them_give_the_gradients_of_autograd(family: str, packs: bool) -> None:
    model = TINY[family]
    for cut in cuts_of(model):
        for number, letters in enumerate(("f", "iF", "aC")):
            plan = plan_of(model, cut, letters, rounds_per_step=1 + number % 2)
            sequences = plan.sequences_per_round * plan.rounds_per_step
            batch = random_batch(model, sequences, TOKENS, number, ragged=number % 2 == 1)
            assert_equal_gradients(model, plan, batch, packs=packs, gated=plain_gated)


@pytest.mark.parametrize(
    ("family", "names"),
    [("llama", ("gate", "up")), ("gpt2", ("query", "key", "value")), ("qwen3", ("query_raw", "key_raw", "value"))],
)
def test_results_of_one_product_lie_beside_each_other_where_they_are_kept(family: str, names: tuple[str, ...]) -> None:
    model = TINY[family]
    executor = executor_for(plan_of(model, "whole sequences", "f"), model, parameters(random_module(model)), packs=True)
    saved, tokens = executor.player.saved[model], 2 * TOKENS
    buffer = torch.zeros(sum(field.bytes for field in saved.fields("full", tokens).values()), dtype=torch.uint8)
    views = saved.views(buffer, "full", tokens)
    together = join_columns([views[name] for name in names])
    assert together is not None
    for number, view in enumerate(views.values()):
        view.fill_(number)
    assert all((view == number).all() for number, view in enumerate(views.values())), "no two share a place"
    assert together.shape == (tokens, sum(saved.each[name] for name in names))


ALONE = ("llama-biased", "qwen3-biased", "gpt2", "bert-masked")
"""Families with all that is saved or made again: each level of theirs is alone in a plan, others share it with one."""


@pytest.mark.parametrize("family", TINY)
def test_every_save_level_of_every_family_gives_the_gradients_of_autograd(family: str) -> None:
    model = TINY[family]
    for cut in cuts_of(model):
        for number, letters in enumerate(LETTERS if family in ALONE else ("fA", "cI", "iF", "aC")):
            plan = plan_of(model, cut, letters, head_chunk_tokens=HEAD_CHUNKS[number % 3])
            batch = random_batch(model, plan.sequences_per_round, TOKENS, number, ragged=number % 2 == 1)
            assert_equal_gradients(model, plan, batch)


RESIDENCIES: dict[str, dict[str, Any]] = {
    "weights pass": {"weights": NOTHING_STAYS},
    "gradients pass": {"gradients": NOTHING_STAYS, "rounds_per_step": 2},
    "optimizer state passes": {"optimizer_state": NOTHING_STAYS},
    "all pass": {
        **dict.fromkeys(("weights", "gradients", "optimizer_state"), Residency(blocks=1, passing=2, ends=("head",))),
        "rounds_per_step": 3,
    },
    "all pass to the end": {
        **dict.fromkeys(("weights", "gradients", "optimizer_state"), NOTHING_STAYS),
        "update_when": "end",
    },
    "updated on the host": {"update_place": "host", "weights": NOTHING_STAYS, "rounds_per_step": 2},
    "copied to the host": {"host_copies": True, "weights": Residency(blocks=1, passing=1, ends=ENDS)},
}


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "gpt2-untied", "bert", "mixtral"])
def test_every_residency_gives_the_gradients_of_autograd(family: str, residency: str) -> None:
    model = replace(TINY[family], layers=3)
    for cut in cuts_of(model):
        plan = plan_of(model, cut, LETTERS, **RESIDENCIES[residency])
        sequences = plan.sequences_per_round * plan.rounds_per_step
        assert_equal_gradients(model, plan, random_batch(model, sequences, TOKENS, 5))
        # All sequences may be shorter than the plan's, and the last round may have fewer.
        fewer = sequences - plan.sequences_per_round + 1
        assert_equal_gradients(model, plan, random_batch(model, fewer, TOKENS - 2, 6, ragged=True))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bert-masked"])
def test_a_round_in_which_no_token_has_a_loss_adds_nothing(family: str) -> None:
    model = TINY[family]
    for cut in cuts_of(model):
        plan = plan_of(model, cut, "fCiA", rounds_per_step=2)
        each = plan.sequences_per_round
        batch = random_batch(model, 2 * each, TOKENS, 7)
        for rounds in (slice(0, each), slice(each, 2 * each), slice(0, 2 * each)):
            labels = batch.labels.copy()
            labels[rounds] = NO_LABEL
            assert_equal_gradients(model, plan, Batch(batch.ids, labels, batch.lengths))


OTHER_KINDS = {
    "attention and feed-forward beside each other": replace(LLAMA, parallel_residual=True),
    "beside each other, with norms on heads": replace(LLAMA, parallel_residual=True, qk_norm=True, norm_bias=True),
    "norms behind, causal": replace(LLAMA, norm_place="post", embedding_norm=True, tied=True, window=5),
    "no positions": replace(LLAMA, positions="none", qk_norm=True),
    "norms one more than their weights, on heads none": replace(
        LLAMA, qk_norm=True, qk_norm_weights=False, norm_adds_one=True
    ),
    "one head of keys": replace(LLAMA, kv_heads=1, head_bias=True, token_types=2),
    "one of everything": replace(LLAMA, heads=1, kv_heads=1, head_dim=2, hidden=1, ffn=1, vocab=2, layers=1),
    "most experts without a token": replace(LLAMA, experts=200, experts_per_token=2, ffn=3, layers=1),
    "all experts for every token": replace(LLAMA, experts=3, experts_per_token=3, routing=Routing(normalised=False)),
    "sinks": replace(LLAMA, sinks=True, window=5, activation="clamped_swiglu"),
    "scores beyond the softmax": replace(
        LLAMA,
        experts=6,
        experts_per_token=2,
        gated=False,
        ffn_bias=True,
        routing=Routing(scores="sigmoid", scale=2.5, groups=3, groups_kept=2, group_by="best two"),
    ),
    "one expert, norms behind": replace(LLAMA, experts=1, experts_per_token=1, norm_place="behind", tied=True),
    "experts beside attention": replace(LLAMA, experts=4, experts_per_token=1, parallel_residual=True, gated=False),
    "a classifier of the mean": replace(MODERNBERT, head="classifier", labels=3, tied=False, layers=3),
    "a classifier of the mean without norms": replace(
        TINY["bert"], pooling="mean", window=3, norm_place="pre", dropout=None
    ),
    "a classifier behind a norm": replace(TINY["bert"], norm_place="pre", final_norm=True, pooler_norm=True),
    "a masked head that turns": replace(LLAMA, causal=False, head="masked", final_norm=False, norm="layer"),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_kinds_that_no_family_has_give_the_gradients_of_autograd(kind: str) -> None:
    model = OTHER_KINDS[kind]
    for cut in cuts_of(model):
        for letters in ("F", "i", LETTERS):
            plan = plan_of(model, cut, letters)
            assert_equal_gradients(model, plan, random_batch(model, plan.sequences_per_round, TOKENS, 8))


@st.composite
def settings_of_a_step(draw: st.DrawFn) -> tuple[Transformer, Plan, Batch]:
    """A family, a plan that cuts and keeps in any way, and a batch for it."""

    def pick(options: Any) -> Any:
        return draw(st.sampled_from(list(options)))

    family = TINY[pick(TINY)]
    # A mixture whose first block has no experts needs a second one, and lists of blocks end with the last.
    listed = (*family.other_blocks, *family.recurrent_blocks, *family.feed_blocks)
    least = max(1 + len(family.dense_blocks), 1 + max(listed, default=0))
    model = replace(family, layers=max(pick((1, 2, 3)), least))
    sequence = pick((1, 2, 5, 13, 19))
    parted = {max(1, sequence // 2), max(1, sequence // 3), max(1, sequence - 1), 1}
    chunk = pick((sequence, 2 * sequence, *(() if model.uncut else parted)))
    parts = -(-sequence // chunk)
    count = parts * pick((1, 2, 3))
    plan = everything_stays(
        model,
        sequence=sequence,
        chunk_tokens=chunk,
        chunks_per_round=count,
        rounds_per_step=pick((1, 2, 3)),
        head_chunk_tokens=pick((1, 3, 7, 1000)),
        attention=pick(("sequence", "chunk")) if model.causal or parts == 1 else "sequence",
        saves=("F" * count,) * model.layers,
        update_when=pick(("backward", "end")),
    )
    plan = any_residency(any_levels(plan, pick), pick)
    most = plan.sequences_per_round * plan.rounds_per_step
    sequences = draw(st.integers(most - plan.sequences_per_round + 1, most))
    width = pick((sequence, max(1, sequence - 2)))
    batch = random_batch(model, sequences, width, draw(st.integers(0, 99)), ragged=pick((False, True)))
    labels = np.where(draw(st.booleans()) & (np.arange(sequences) == 0), NO_LABEL, batch.labels.T).T
    return model, plan, Batch(batch.ids, labels.astype(np.int32), batch.lengths)


@pytest.mark.slow
@settings(max_examples=100)
@given(settings_of_a_step())
def test_random_plans_give_the_gradients_of_autograd(setting: tuple[Transformer, Plan, Batch]) -> None:
    assert_equal_gradients(*setting)
