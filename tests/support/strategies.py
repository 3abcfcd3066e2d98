"""Random small models for property tests, of every family."""

from __future__ import annotations

from hypothesis import strategies as st

from flopwise.work.lstm import Lstm
from flopwise.work.routing import Routing
from flopwise.work.transformer import Transformer

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "mpt", "mixtral", "bert", "bert_masked"),
    *("olmo2", "granite", "glm4", "cohere", "shared experts"),
)


@st.composite
def transformers(draw: st.DrawFn, family: str | None = None) -> Transformer:
    """A small model with the options of its family and awkward sizes."""
    family = family or draw(st.sampled_from(FAMILIES))
    kv_heads = draw(st.integers(1, 3))
    head_dim = 2 * draw(st.integers(1, 9))
    grouped = family in ("llama", "mistral", "qwen2", "qwen3", "mixtral", "olmo2", "granite", "glm4", "cohere")
    heads = kv_heads * draw(st.integers(1, 3)) if grouped else kv_heads
    own_width = family == "qwen3"
    shared = {
        "name": family,
        "title": family,
        "source": "test",
        "layers": draw(st.integers(1, 3)),
        "hidden": draw(st.integers(3, 40)) if own_width else heads * head_dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": draw(st.integers(1, 50)),
        "vocab": draw(st.integers(2, 70)),
        "context": 32,
    }
    biased = dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias", "norm_bias"), True)
    plain = {"norm": "layer", "gated": False, "activation": "gelu"}
    options: dict[str, dict[str, object]] = {
        "llama": {"tied": draw(st.booleans())},
        "mistral": {},
        "qwen2": {"qkv_bias": True, "tied": draw(st.booleans())},
        "qwen3": {"qk_norm": True},
        "gpt2": {**plain, **biased, "positions": "learned", "position_rows": 32, "tied": True},
        "gpt_neox": {**plain, **biased, "parallel_residual": draw(st.booleans())},
        "mpt": {**plain, **(biased if draw(st.booleans()) else {}), "positions": "learned", "tied": True},
        "mixtral": {"experts": 4, "experts_per_token": 2},
        "shared experts": {
            **{"experts": 4, "experts_per_token": 2, "shared_ffn": draw(st.integers(1, 40))},
            **{"shared_gate": draw(st.booleans()), "routing": Routing(scores="sigmoid", correction=True)},
            **({"dense_blocks": (0,), "dense_ffn": draw(st.integers(1, 40))} if int(str(shared["layers"])) > 1 else {}),
        },
        "olmo2": {"norm_place": "behind", "qk_norm": True, "qk_norm_over": "all"},
        "granite": {"residual_scale": 0.25, "embedding_scale": 3.0, "attention_scale": 0.5, "logit_scale": 0.125},
        "glm4": {
            "norm_place": "sandwich",
            "rotary_pairs": "neighbours",
            "rotary_dim": max(2, head_dim // 4 * 2),
            "qkv_bias": True,
        },
        "cohere": {"norm": "layer", "parallel_residual": True, "shared_norm": True, "rotary_pairs": "neighbours"},
    }
    encoder = {
        **plain,
        **biased,
        "positions": "learned",
        "position_rows": 32,
        "norm_place": "post",
        "embedding_norm": True,
        "final_norm": False,
        "token_types": 2,
        "causal": False,
    }
    options["bert"] = {**encoder, "head": "classifier", "labels": draw(st.integers(1, 9))}
    options["bert_masked"] = {**encoder, "head": "masked", "head_bias": True, "tied": True}
    return Transformer(**{**shared, **options[family]})  # type: ignore[arg-type]


@st.composite
def recurrent(draw: st.DrawFn) -> Lstm:
    """A small recurrent language model."""
    projection = draw(st.integers(0, 7))
    return Lstm(
        name="lstm",
        title="lstm",
        source="test",
        layers=draw(st.integers(1, 3)),
        hidden=draw(st.integers(1, 20)),
        vocab=draw(st.integers(2, 50)),
        context=8,
        projection=projection,
        head_input=draw(st.sampled_from(["hidden", "projection"])) if projection else "hidden",
    )
