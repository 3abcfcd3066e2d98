"""What is planned of the catalogue's models is what is trained: a tiny copy of each, planned and run for a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flopwise.catalog.load import load_hardware, load_model, model_names  # noqa: E402
from flopwise.engine.executable import check_trainable  # noqa: E402
from flopwise.engine.modules import build  # noqa: E402
from flopwise.engine.weights.initial import fill  # noqa: E402
from flopwise.plan.device.explain import make_plan  # noqa: E402
from flopwise.setup.setup import CappedSetup  # noqa: E402
from flopwise.work.formats import parse_formats  # noqa: E402
from flopwise.work.latent import LatentAttention  # noqa: E402
from flopwise.work.recurrence import Recurrence  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support.training_plans import executor_for, random_batch  # noqa: E402

TOKENS = 24


def tiny(model: Transformer) -> Transformer:
    """The same kinds of blocks and the same rules, with few layers and narrow ones."""
    # As few layers as have a block of each kind: the first, those after it, and the period of windows.
    layers = min(model.layers, 1 + max(2, *(_first_unlike(model, kind) for kind in model.kinds)))
    shared = model.heads // model.kv_heads
    heads = 4 if shared > 1 else 2
    head_dim, turned = 8, None if model.rotary_dim is None else 4
    latent = model.latent and LatentAttention(rank=6, value_dim=6, query_rank=10 if model.latent.query_rank else 0)
    groups = min(model.routing.groups, 4)
    routing = replace(model.routing, groups=groups, groups_kept=min(model.routing.groups_kept, groups))
    scaling = model.rotary_scaling
    if scaling is not None and scaling.method == "longrope":
        pairs = (turned or head_dim) // 2
        scaling = replace(
            scaling, short_factors=scaling.short_factors[:pairs], long_factors=scaling.long_factors[:pairs]
        )
    return replace(
        model,
        layers=layers,
        hidden=heads * head_dim,
        heads=heads,
        kv_heads=2 if heads == 4 else heads,
        head_dim=head_dim,
        rotary_dim=turned,
        rotary_scaling=scaling,
        latent=latent,
        ffn=16,
        vocab=96,
        experts=min(model.experts, 8),
        experts_per_token=min(model.experts_per_token, 2),
        routing=routing,
        shared_ffn=min(model.shared_ffn, 12),
        dense_ffn=min(model.dense_ffn, 20),
        dense_blocks=tuple(block for block in model.dense_blocks if block < layers),
        other_blocks=tuple(block for block in model.other_blocks if block < layers),
        recurrence=model.recurrence and tiny_states(model.recurrence),
        recurrent_blocks=tuple(block for block in model.recurrent_blocks if block < layers),
        feed_blocks=tuple(block for block in model.feed_blocks if block < layers),
        window=model.window and 5,
        position_rows=None if model.position_rows is None else TOKENS + model.position_offset,
        dropout=None,
    )


def tiny_states(states: Recurrence) -> Recurrence:
    """The same rule, with few heads and chunks that the tokens do not fill."""
    keys = min(states.key_heads, 2)
    groups = min(states.norm_groups, 2)
    return replace(states, heads=4, head_dim=6, key_heads=keys, key_dim=5, chunk=7, norm_groups=groups)


def _first_unlike(model: Transformer, kind: Transformer) -> int:
    return next(layer for layer in range(model.layers) if model.kind_of(layer) == kind)


def transformers_listed() -> list[str]:
    return [name for name in model_names() if isinstance(load_model(name), Transformer)]


@pytest.mark.parametrize("name", transformers_listed())
def test_what_is_planned_is_trained(name: str) -> None:
    found: Any = load_model(name)
    model = tiny(found)
    assert [*map(kind_words, model.kinds)] == [*map(kind_words, found.kinds)], "no kind of block is left out"
    check_trainable(model)
    question = CappedSetup(
        model=model,
        hardware=load_hardware("h200"),
        sequence_tokens=TOKENS,
        device_cap_bytes=1 << 30,
        host_cap_bytes=1 << 30,
        formats=parse_formats("fp32"),
        batch_sequences=2,
    )
    plan = make_plan(question, helps=False).plan
    module = build(model, TOKENS, dtype=torch.float32, device="cpu")
    fill(module, model, TOKENS, 0)
    weights = {key: value.detach() for key, value in module.named_parameters()}
    executor = executor_for(plan, model, weights)
    batch = random_batch(model, plan.sequences_per_round * plan.rounds_per_step, TOKENS, 0)
    lengths = None if batch.lengths is None else torch.from_numpy(batch.lengths).long()
    expected = module.loss(torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.labels).long(), lengths)
    first = executor.step(batch, 0)
    assert first.loss == pytest.approx(float(expected.detach()) / max(1, batch.with_loss), rel=1e-4)


def kind_words(kind: Transformer) -> tuple[object, ...]:
    """What tells kinds of blocks apart."""
    states = kind.recurrence and kind.recurrence.rule
    return (
        kind.window is not None,
        kind.positions,
        bool(kind.experts),
        kind.unnormed_attention,
        states,
        kind.feed_blocks != (),
    )
