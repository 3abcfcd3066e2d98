"""The workspace that is planned is what the engine takes: temporaries of models of all proportions fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from flopwise.engine.kernels import plain_gated  # noqa: E402
from flopwise.engine.streaming.gated import GatedKernels  # noqa: E402
from flopwise.setup.training import Training  # noqa: E402
from flopwise.work.fusion import has_plain_swiglu  # noqa: E402
from tests.support.tiny_models import TINY  # noqa: E402
from tests.support.training_plans import cut_plan, everything_stays, executor_for, random_batch  # noqa: E402

TOKENS = 32
PROPORTIONS = {
    "llama-3-8b": (128, 8, 2, 16, 448),
    "llama-3-70b": (128, 8, 1, 16, 448),
    "qwen2.5-7b": (112, 7, 1, 16, 592),
    "all heads": (128, 8, 8, 16, 352),
    "wide heads": (64, 8, 2, 16, 128),
}
"""Hidden width, heads, heads of keys, width of a head, feed-forward width."""
FAMILIES = ("llama", "qwen3", "gpt2", "bert", "llama-biased", "mixtral", "qwen2_moe", "glm4_moe")
CROSSED = "llama-3-8b"
"""Of these proportions every save level is tried in every cut; of the others, every level and every cut."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("proportions", PROPORTIONS)
def test_no_temporary_lies_beside_the_workspace(family: str, proportions: str) -> None:
    hidden, heads, kv_heads, head_dim, ffn = PROPORTIONS[proportions]
    tiny = TINY[family]
    learned = tiny.positions == "learned"
    model = replace(
        tiny,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if learned else kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        layers=2,
        vocab=97,
        context=128,
        position_rows=128 if learned else tiny.position_rows,
    )
    beside = {}
    weights: dict[str, Tensor] = {}
    ways: list[tuple[bool, GatedKernels | None]] = [(False, None), (True, None)]
    if has_plain_swiglu(model):
        ways.append((True, plain_gated))
    for packs, gated in ways:
        cuts = ("whole", "sequence", "chunk") if model.causal else ("whole", "sequence")
        for number, cut in enumerate(cuts):
            for place, letter in enumerate("faci"):
                if proportions != CROSSED and place % len(cuts) != number:
                    continue
                precision = "bf16" if letter in "fi" else "fp32"
                if cut == "whole":
                    plan = everything_stays(
                        model, sequence=TOKENS, saves=(letter,) * 2, precision=precision, head_chunk_tokens=8
                    )
                else:
                    plan = cut_plan(
                        model,
                        sequence=2 * TOKENS,
                        chunk=TOKENS,
                        letters=letter,
                        attention=cut,
                        precision=precision,
                        head_chunk_tokens=8,
                    )
                executor = executor_for(plan, model, {}, Training(steps=1), packs=packs, gated=gated)
                weights = weights or {each.name: 0.02 * torch.randn(each.shape) for each in executor.parameters}
                executor.set_weights(weights)
                executor.step(random_batch(model, plan.sequences_per_round, plan.sequence_tokens, 0), 0)
                beside[packs, gated is not None, cut, letter] = executor.player.arena.peak_beside_bytes
    assert {case: size for case, size in beside.items() if size} == {}
