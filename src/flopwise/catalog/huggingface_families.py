"""How each family of Hugging Face `transformers` spells its shape in a `config.json`.

Each family is a table: which field of the description comes from which key, and which default `transformers` takes
when the key is absent. The sizes that make a model (layers, widths, heads, vocabulary) have no default here: a file
without them is a mistake, not a request for the 7B model that `transformers` would build.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from flopwise.base.errors import FlopwiseError, shown
from flopwise.catalog.huggingface_blocks import (
    ATTENTION_BIAS,
    Angles,
    blocks_of,
    by_kind,
    full_every,
    kinds_or,
    llama_like,
    usual_angles,
    window_of,
)
from flopwise.catalog.huggingface_encoders import ENCODERS, encoder_head
from flopwise.catalog.huggingface_gpts import GPTS
from flopwise.catalog.huggingface_hybrids import HYBRIDS
from flopwise.catalog.huggingface_mixtures import MIXTURES
from flopwise.catalog.huggingface_rules import (
    FULL,
    GPT_LIKE,
    SLIDING,
    USUAL_SIZES,
    Family,
    Only,
    Rule,
    activation_of,
    dropout_of,
    fixed,
    flag_of,
    number_of,
    rotary_base,
    rotary_dim,
    rotary_settings,
    scaling_in,
    size_of,
)
from flopwise.catalog.huggingface_settings import ConfigKeys
from flopwise.work.attention_kinds import RotaryScaling
from flopwise.work.transformer import Dropout

# -- the tables -------------------------------------------------------------------------------------------------------

EVERYWHERE = (
    Only("per_layer_config", ({},), "its blocks differ from each other; a description repeats one block"),
    Only("pruned_heads", ({},), "its blocks have different numbers of heads; a description repeats one block"),
)


def _qwen_kinds(settings: ConfigKeys) -> list[str]:
    """Qwen gives the window to its upper blocks only, if at all."""
    if not settings.flag("use_sliding_window", absent=False):
        return [FULL]
    layers = blocks_of(settings)
    full = min(settings.size("max_window_layers", absent=28, least=0), layers)
    return kinds_or(lambda _: [FULL] * full + [SLIDING] * (layers - full))(settings)


def _angles_by_kind(bases: Mapping[str, float], local_key: str = "rope_theta", full_key: str = "rope_theta") -> Angles:
    """A group of rotary numbers for each kind; in older files the scaling is for those without a window alone."""

    def rule(settings: ConfigKeys, kind: str) -> tuple[float, RotaryScaling | None]:
        rotary = rotary_settings(settings)
        if isinstance(rotary.table.get(kind), dict):
            own = rotary.group(kind)
            return own.number("rope_theta", absent=bases[kind]), scaling_in(own, settings)
        if kind == FULL:
            return settings.number(full_key, absent=bases[kind]), scaling_in(rotary, settings)
        return settings.number(local_key, absent=bases[kind]), None

    return rule


def _modernbert_kinds(settings: ConfigKeys) -> list[str]:
    """The first of every so many blocks sees everything."""
    every = settings.size("global_attn_every_n_layers", absent=3)
    return kinds_or(lambda _: [SLIDING if number % every else FULL for number in range(blocks_of(settings))])(settings)


def _modernbert_pooling(settings: ConfigKeys) -> str:
    written = settings.text("classifier_pooling", "cls")
    if written not in POOLINGS:
        raise FlopwiseError(
            f"{settings.owner}: classifier_pooling = {shown(written)} is none that transformers has",
            hint=f"one of {', '.join(POOLINGS)}",
        )
    return POOLINGS[written]


def _modernbert_dropout(settings: ConfigKeys) -> Dropout | None:
    embedding, last = settings.share("embedding_dropout", 0.0), settings.share("classifier_dropout", 0.0)
    return Dropout(embedding=embedding, classifier=last or None) if embedding or last else None


def _smollm_kinds(settings: ConfigKeys) -> list[str]:
    """Blocks without positions count as those of the other kind: SmolLM3 has no windows."""
    layers = blocks_of(settings)
    every = settings.size("no_rope_layer_interval", absent=4)
    given = settings.table.get("no_rope_layers")
    turns = (
        given if isinstance(given, list) and given else [int(number % every != 0) for number in range(1, layers + 1)]
    )
    if len(turns) != layers or SLIDING in settings.texts("layer_types"):
        raise FlopwiseError(
            f"{settings.owner}: no_rope_layers or layer_types cannot be described",
            why="there is one entry for each block, and no block has a window",
            hint="correct them",
        )
    return [SLIDING if turn else FULL for turn in turns]


def _ministral_kinds(settings: ConfigKeys) -> list[str]:
    windows = settings.size("sliding_window", absent=4096, null=0)
    return kinds_or(lambda _: [SLIDING if windows else FULL] * blocks_of(settings))(settings)


def _cap(key: str, absent: float | None) -> Rule:
    """The cap under a key; null: none."""
    return lambda settings: None if settings.table.get(key, absent) is None else settings.number(key, absent=absent)


def _gemma_like(*, kv_heads: int, activation: str, context: int = 8192) -> dict[str, Rule]:
    return {
        **llama_like(context=context, kv_heads=kv_heads),
        **ATTENTION_BIAS,
        "head_dim": size_of("head_dim", absent=256),
        "activation": activation_of(activation, absent="gelu_pytorch_tanh"),
        "norm_adds_one": fixed(True),
        "embedding_scale": lambda settings: sqrt(settings.size("hidden_size")),
        "tied": flag_of("tie_word_embeddings", absent=True),
    }


def _gemma_sandwich(*, context: int, caps: tuple[float | None, float | None]) -> dict[str, Rule]:
    return {
        **_gemma_like(kv_heads=4, activation="hidden_activation", context=context),
        "norm_place": fixed("sandwich"),
        "attention_scale": lambda settings: settings.number("query_pre_attn_scalar", absent=256.0) ** -0.5,
        "attention_cap": _cap("attn_logit_softcapping", caps[0]),
        "logit_cap": _cap("final_logit_softcapping", caps[1]),
    }


def _olmo_like() -> dict[str, Rule]:
    return {
        **llama_like(context=2048, kv_heads=0),
        **ATTENTION_BIAS,
        "norm_place": fixed("behind"),
        "qk_norm": fixed(True),
        "qk_norm_over": fixed("all"),
        "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
    }


def _cohere_like() -> dict[str, Rule]:
    return {
        **llama_like(context=8192, kv_heads=0),
        **ATTENTION_BIAS,
        "norm": fixed("layer"),
        "parallel_residual": fixed(True),
        "shared_norm": fixed(True),
        "rotary_pairs": fixed("neighbours"),
        "rotary_base": rotary_base("rope_theta", absent=500_000.0),
        "logit_scale": number_of("logit_scale", absent=0.0625),
        "norm_epsilon": number_of("layer_norm_eps", absent=1e-5),
        "tied": flag_of("tie_word_embeddings", absent=True),
    }


def _exaone_angles(settings: ConfigKeys, kind: str) -> tuple[float, RotaryScaling | None] | None:
    """Where some blocks have windows, those without have no positions."""
    mixed = settings.table.get("sliding_window", 4096) is not None
    return None if mixed and kind == FULL else usual_angles(10_000.0)(settings, kind)


def _glm_like() -> dict[str, Rule]:
    return {
        **llama_like(context=131_072, kv_heads=2),
        "head_dim": size_of("head_dim", absent=128, null=0),
        "qkv_bias": flag_of("attention_bias", absent=True),
        "rotary_pairs": fixed("neighbours"),
        "rotary_dim": rotary_dim(0.5),
        "norm_epsilon": number_of("rms_norm_eps", absent=1.5625e-7),
    }


POOLINGS = {"cls": "first", "mean": "mean"}
"""What ModernBERT's classifiers read, by the name in a file."""
NO_LOOKING_AHEAD = Only("use_bidirectional_attention", (False,), "its tokens see those that come after them")
NO_QK_NORM = Only("qk_layernorm", (False,), "its norms of queries and keys are none that a description holds")

FAMILIES: dict[str, Family] = {
    "llama": Family(
        title="Llama",
        bare=("LlamaModel",),
        rules={
            **llama_like(context=2048, kv_heads=0),
            **ATTENTION_BIAS,
            "ffn_bias": flag_of("mlp_bias", absent=False),
        },
    ),
    "mistral": Family(
        title="Mistral",
        bare=("MistralModel",),
        rules={**llama_like(context=131072, kv_heads=8), "window": window_of(absent=4096)},
    ),
    "qwen2": Family(
        title="Qwen2",
        bare=("Qwen2Model",),
        rules={
            **llama_like(context=32768, kv_heads=32),
            **by_kind(_qwen_kinds, usual_angles(10_000.0)),
            "qkv_bias": fixed(True),
        },
    ),
    "qwen3": Family(
        title="Qwen3",
        bare=("Qwen3Model",),
        rules={
            **llama_like(context=32768, kv_heads=32),
            "head_dim": size_of("head_dim", absent=128),
            **by_kind(_qwen_kinds, usual_angles(10_000.0)),
            **ATTENTION_BIAS,
            "qk_norm": fixed(True),
        },
    ),
    **GPTS,
    "nemotron": Family(
        title="Nemotron",
        bare=("NemotronModel",),
        rules={
            **llama_like(context=4096, kv_heads=0),
            **ATTENTION_BIAS,
            "norm": fixed("layer"),
            "norm_bias": fixed(True),
            "norm_adds_one": fixed(True),
            "norm_epsilon": number_of("norm_eps", absent=1e-5),
            "gated": fixed(False),
            "activation": activation_of("hidden_act", absent="relu2"),
            "ffn_bias": flag_of("mlp_bias", absent=False),
            "rotary_dim": rotary_dim(0.5),
        },
    ),
    "exaone4": Family(
        title="EXAONE 4",
        bare=("Exaone4Model",),
        rules={
            **llama_like(context=2048, kv_heads=32),
            **by_kind(full_every(4), _exaone_angles),
            "norm_place": fixed("behind"),
            "qk_norm": fixed(True),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
        },
    ),
    "ernie4_5": Family(
        title="ERNIE 4.5",
        bare=("Ernie4_5Model",),
        rules={
            **llama_like(context=131_072, kv_heads=2),
            "head_dim": size_of("head_dim", absent=128, null=0),
            **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), flag_of("use_bias", absent=False)),
            "rotary_base": rotary_base("rope_theta", absent=500_000.0),
            "rotary_pairs": fixed("neighbours"),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
            "tied": flag_of("tie_word_embeddings", absent=True),
        },
    ),
    "phi": Family(
        title="Phi",
        bare=("PhiModel",),
        only=(NO_QK_NORM,),
        rules={
            **llama_like(context=2048, kv_heads=0),
            **GPT_LIKE,
            "activation": activation_of("hidden_act", absent="gelu_new"),
            "parallel_residual": fixed(True),
            "shared_norm": fixed(True),
            "head_bias": fixed(True),
            "norm_epsilon": number_of("layer_norm_eps", absent=1e-5),
            "rotary_dim": rotary_dim(0.5),
            "dropout": dropout_of(attention="attention_dropout", hidden="resid_pdrop", embedding="embd_pdrop"),
        },
    ),
    "phi3": Family(
        title="Phi-3",
        bare=("Phi3Model",),
        rules={
            **llama_like(context=4096, kv_heads=0),
            "window": window_of(absent=0),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
            "rotary_dim": rotary_dim(1.0),
            "dropout": dropout_of(attention="attention_dropout", hidden="resid_pdrop"),
        },
    ),
    "starcoder2": Family(
        title="Starcoder2",
        bare=("Starcoder2Model",),
        rules={
            **llama_like(context=4096, kv_heads=2),
            "norm": fixed("layer"),
            "norm_bias": fixed(True),
            "gated": fixed(False),
            **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), flag_of("use_bias", absent=True)),
            "activation": activation_of("hidden_act", absent="gelu_pytorch_tanh"),
            "norm_epsilon": number_of("norm_epsilon", absent=1e-5),
            "window": window_of(absent=0),
            "tied": flag_of("tie_word_embeddings", absent=True),
            "dropout": dropout_of(
                attention="attention_dropout", hidden="residual_dropout", embedding="embedding_dropout"
            ),
        },
    ),
    "stablelm": Family(
        title="StableLM",
        bare=("StableLmModel",),
        only=(NO_QK_NORM, Only("hidden_dropout", (0.0, 0), "it drops of the feed-forward part alone")),
        rules={
            **llama_like(context=4096, kv_heads=32),
            "norm": fixed("layer"),
            "norm_bias": fixed(True),
            "qkv_bias": flag_of("use_qkv_bias", absent=False),
            "parallel_residual": flag_of("use_parallel_residual", absent=False),
            "shared_norm": flag_of("use_parallel_residual", absent=False),
            "norm_epsilon": number_of("layer_norm_eps", absent=1e-5),
            "rotary_dim": rotary_dim(0.25),
        },
    ),
    "arcee": Family(
        title="Arcee",
        bare=("ArceeModel",),
        rules={
            **llama_like(context=4096, kv_heads=0),
            **ATTENTION_BIAS,
            "gated": fixed(False),
            "activation": activation_of("hidden_act", absent="relu2"),
            "ffn_bias": flag_of("mlp_bias", absent=False),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
        },
    ),
    "olmo2": Family(title="OLMo 2", bare=("Olmo2Model",), rules=_olmo_like()),
    "olmo3": Family(
        title="OLMo 3",
        bare=("Olmo3Model",),
        rules={**_olmo_like(), **by_kind(full_every(4), _angles_by_kind(dict.fromkeys((SLIDING, FULL), 500_000.0)))},
    ),
    "granite": Family(
        title="Granite",
        bare=("GraniteModel",),
        rules={
            **llama_like(context=2048, kv_heads=0),
            **ATTENTION_BIAS,
            "ffn_bias": flag_of("mlp_bias", absent=False),
            "embedding_scale": number_of("embedding_multiplier", absent=1.0),
            "residual_scale": number_of("residual_multiplier", absent=1.0),
            "attention_scale": number_of("attention_multiplier", absent=1.0),
            "logit_scale": lambda settings: 1.0 / settings.number("logits_scaling", absent=1.0),
        },
    ),
    "glm": Family(title="GLM", bare=("GlmModel",), rules=_glm_like()),
    "glm4": Family(title="GLM-4", bare=("Glm4Model",), rules={**_glm_like(), "norm_place": fixed("sandwich")}),
    "cohere": Family(
        title="Cohere",
        bare=("CohereModel",),
        only=(Only("use_qk_norm", (False,), "its norms of queries and keys are none that a description holds"),),
        rules=_cohere_like(),
    ),
    "cohere2": Family(
        title="Cohere 2",
        bare=("Cohere2Model",),
        only=(Only("use_qk_norm", (False,), "its norms of queries and keys are none that a description holds"),),
        rules={
            **_cohere_like(),
            **by_kind(
                full_every(4),
                # Blocks without a window have no positions.
                lambda settings, kind: usual_angles(10_000.0)(settings, kind) if kind == SLIDING else None,
            ),
        },
    ),
    "gemma": Family(
        title="Gemma",
        bare=("GemmaModel",),
        only=(NO_LOOKING_AHEAD,),
        rules=_gemma_like(kv_heads=16, activation="hidden_act"),
    ),
    "gemma2": Family(
        title="Gemma 2",
        bare=("Gemma2Model",),
        only=(NO_LOOKING_AHEAD,),
        rules={
            **_gemma_sandwich(context=8192, caps=(50.0, 30.0)),
            **by_kind(full_every(2), usual_angles(10_000.0)),
        },
    ),
    "gemma3_text": Family(
        title="Gemma 3",
        bare=("Gemma3TextModel",),
        only=(NO_LOOKING_AHEAD,),
        rules={
            **_gemma_sandwich(context=131_072, caps=(None, None)),
            "qk_norm": fixed(True),
            **by_kind(full_every(6), _angles_by_kind({SLIDING: 10_000.0, FULL: 1e6}, "rope_local_base_freq")),
        },
    ),
    "ministral": Family(
        title="Ministral",
        bare=("MinistralModel",),
        rules={
            **llama_like(context=131_072, kv_heads=8),
            **by_kind(_ministral_kinds, usual_angles(10_000.0)),
        },
    ),
    "smollm3": Family(
        title="SmolLM3",
        bare=("SmolLM3Model",),
        only=(Only("use_sliding_window", (False,), "windows and positions by block cannot be described together"),),
        rules={
            **llama_like(context=32_768, kv_heads=4),
            **ATTENTION_BIAS,
            "ffn_bias": flag_of("mlp_bias", absent=False),
            "tied": flag_of("tie_word_embeddings", absent=True),
            **by_kind(
                _smollm_kinds,
                lambda settings, kind: usual_angles(2e6)(settings, kind) if kind == SLIDING else None,
                window=None,
            ),
            "window": fixed(None),
        },
    ),
    "seed_oss": Family(
        title="Seed-OSS",
        bare=("SeedOssModel",),
        rules={
            **llama_like(context=524_288, kv_heads=8),
            "head_dim": size_of("head_dim", absent=128, null=0),
            "qkv_bias": flag_of("attention_bias", absent=True),
            "output_bias": flag_of("attention_out_bias", absent=False),
            "ffn_bias": flag_of("mlp_bias", absent=False),
            "dropout": dropout_of(0.1, attention="attention_dropout", hidden="residual_dropout"),
        },
    ),
    "modernbert": Family(
        title="ModernBERT",
        bare=("ModernBertModel",),
        head=encoder_head("ModernBert"),
        only=(
            Only("attention_dropout", (0.0, 0), "it drops of attention's result, and not of the feed-forward part's"),
            Only("mlp_dropout", (0.0, 0), "it drops inside the feed-forward part"),
            Only("rope_scaling", ({},), "it is for both kinds of its blocks"),
        ),
        rules={
            **USUAL_SIZES,
            **by_kind(
                _modernbert_kinds,
                _angles_by_kind({SLIDING: 10_000.0, FULL: 160_000.0}, "local_rope_theta", "global_rope_theta"),
                # As many to either side, and the token itself.
                reach=lambda settings: settings.size("local_attention", absent=128) // 2 + 1,
            ),
            **ATTENTION_BIAS,
            "causal": fixed(False),
            "context": size_of("max_position_embeddings", absent=8192),
            "norm": fixed("layer"),
            "norm_bias": flag_of("norm_bias", absent=False),
            "norm_epsilon": number_of("norm_eps", absent=1e-5),
            "embedding_norm": fixed(True),
            "unnormed_attention": fixed("first"),
            "activation": activation_of("hidden_activation", absent="gelu"),
            "ffn_bias": flag_of("mlp_bias", absent=False),
            "head_bias": flag_of("decoder_bias", absent=True),
            "transform_bias": flag_of("classifier_bias", absent=False),
            "transform_activation": activation_of("classifier_activation", absent="gelu"),
            "pooler_activation": activation_of("classifier_activation", absent="gelu"),
            "pooler_norm": fixed(True),
            "pooling": _modernbert_pooling,
            "dropout": _modernbert_dropout,
        },
    ),
    **MIXTURES,
    **HYBRIDS,
    **ENCODERS,
}
