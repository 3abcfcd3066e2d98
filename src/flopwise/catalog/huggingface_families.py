"""How each family of Hugging Face `transformers` spells its shape in a `config.json`.

Each family is a table: which field of the description comes from which key, and which default `transformers` takes
when the key is absent. The sizes that make a model (layers, widths, heads, vocabulary) have no default here: a file
without them is a mistake, not a request for the 7B model that `transformers` would build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

from flopwise.base.errors import FlopwiseError, shown
from flopwise.catalog.huggingface_encoders import ENCODERS, encoder_head
from flopwise.catalog.huggingface_gpts import GPTS
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
    rotary_scaling,
    rotary_settings,
    scaling_in,
    size_of,
)
from flopwise.catalog.huggingface_settings import ConfigKeys
from flopwise.work.routing import Routing
from flopwise.work.transformer import Dropout, LatentAttention, OtherAttention, RotaryScaling

# -- the tables -------------------------------------------------------------------------------------------------------

EVERYWHERE = (
    Only("per_layer_config", ({},), "its blocks differ from each other; a description repeats one block"),
    Only("pruned_heads", ({},), "its blocks have different numbers of heads; a description repeats one block"),
)


def _llama_like(*, context: int, kv_heads: int) -> dict[str, Rule]:
    """What all of Llama's kin share; `context` and `kv_heads` are the defaults of absent keys (0: all heads)."""
    return {
        **USUAL_SIZES,
        "context": size_of("max_position_embeddings", absent=context),
        "kv_heads": size_of("num_key_value_heads", absent=kv_heads, null=0),
        "head_dim": size_of("head_dim", absent=0, null=0),
        "activation": activation_of("hidden_act", absent="silu"),
        "tied": flag_of("tie_word_embeddings", absent=False),
        "norm_epsilon": number_of("rms_norm_eps", absent=1e-6),
        "rotary_base": rotary_base("rope_theta", absent=10_000.0),
        "rotary_scaling": rotary_scaling,
        "dropout": dropout_of(attention="attention_dropout"),
    }


def _window(absent: int) -> Rule:
    return lambda settings: settings.size("sliding_window", absent=absent, null=0) or None


Kinds = Callable[[ConfigKeys], list[str]]
"""Finds the kind of each block."""
Angles = Callable[[ConfigKeys, str], tuple[float, RotaryScaling | None] | None]
"""Finds base and scaling of the rotary positions of a kind; None: it has no positions."""


MOST_BLOCKS = 100_000
"""Of a list of kinds."""


def _blocks(settings: ConfigKeys) -> int:
    """The number of blocks, where there is an entry for each."""
    layers = settings.size("num_hidden_layers")
    if layers > MOST_BLOCKS:
        raise FlopwiseError(
            f"{settings.owner}: num_hidden_layers = {shown(layers)} is too large",
            why=f"kinds of blocks are listed for up to {MOST_BLOCKS:,}",
            hint="correct num_hidden_layers",
        )
    return layers


def _kinds(default: Kinds) -> Kinds:
    """The kinds that a file lists, or else what its family's absent list stands for."""

    def rule(settings: ConfigKeys) -> list[str]:
        found = settings.texts("layer_types") or default(settings)
        if set(found) - {SLIDING, FULL} or len(found) != _blocks(settings):
            raise FlopwiseError(
                f"{settings.owner}: layer_types cannot be described",
                why=f"each block has {SLIDING} or {FULL}, and there is one entry for each",
                hint="correct layer_types",
            )
        return found

    return rule


def _full_every(absent: int) -> Kinds:
    """Every so many blocks one that looks back over everything."""

    def rule(settings: ConfigKeys) -> list[str]:
        every = settings.size("sliding_window_pattern", absent=absent, null=absent)
        return [SLIDING if number % every else FULL for number in range(1, _blocks(settings) + 1)]

    return _kinds(rule)


def _every_second(settings: ConfigKeys) -> list[str]:
    """gpt-oss begins with a window."""
    return _kinds(lambda _: [FULL if number % 2 else SLIDING for number in range(_blocks(settings))])(settings)


def _gpt_oss_angles(settings: ConfigKeys, _: str) -> tuple[float, RotaryScaling | None]:
    """A file that says nothing of it has the released models' scaling."""
    base = rotary_base("rope_theta", 150_000.0)(settings)
    if rotary_settings(settings).table:
        return base, rotary_scaling(settings)
    return base, RotaryScaling(method="yarn", factor=32.0, original_context=4096, truncate=False)


def _usual_angles(absent: float) -> Angles:
    return lambda settings, _: (rotary_base("rope_theta", absent)(settings), rotary_scaling(settings))


def _by_kind(
    kinds: Kinds, angles: Angles, window: int | None = 4096, reach: Callable[[ConfigKeys], int | None] | None = None
) -> dict[str, Rule]:
    """The rules of a family whose blocks come in kinds: those without a window have `other_attention`.

    `window`: what an absent one stands for; `reach`: how a family tells it otherwise.
    """
    seen = reach or _window(window or 0)

    def attention(settings: ConfigKeys, kind: str) -> OtherAttention:
        turned = angles(settings, kind)
        base, scaling = turned or (10_000.0, None)
        return OtherAttention(
            window=seen(settings) if kind == SLIDING else None,
            rotary_base=base,
            rotary_scaling=scaling,
            rotary=turned is not None,
        )

    def first(settings: ConfigKeys) -> OtherAttention:
        return attention(settings, SLIDING if SLIDING in kinds(settings) else FULL)

    def others(settings: ConfigKeys) -> tuple[int, ...]:
        found = kinds(settings)
        if len(set(found)) == 1 or attention(settings, SLIDING) == attention(settings, FULL):
            return ()
        return tuple(layer for layer, kind in enumerate(found) if kind == FULL)

    return {
        "window": lambda settings: first(settings).window,
        "rotary_base": lambda settings: first(settings).rotary_base,
        "rotary_scaling": lambda settings: first(settings).rotary_scaling,
        "positions": lambda settings: "rotary" if first(settings).rotary else "none",
        "other_attention": lambda settings: attention(settings, FULL) if others(settings) else None,
        "other_blocks": others,
    }


def _qwen_kinds(settings: ConfigKeys) -> list[str]:
    """Qwen gives the window to its upper blocks only, if at all."""
    if not settings.flag("use_sliding_window", absent=False):
        return [FULL]
    layers = _blocks(settings)
    full = min(settings.size("max_window_layers", absent=28, least=0), layers)
    return _kinds(lambda _: [FULL] * full + [SLIDING] * (layers - full))(settings)


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
    return _kinds(lambda _: [SLIDING if number % every else FULL for number in range(_blocks(settings))])(settings)


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
    layers = _blocks(settings)
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
    return _kinds(lambda _: [SLIDING if windows else FULL] * _blocks(settings))(settings)


def _cap(key: str, absent: float | None) -> Rule:
    """The cap under a key; null: none."""
    return lambda settings: None if settings.table.get(key, absent) is None else settings.number(key, absent=absent)


def _gemma_like(*, kv_heads: int, activation: str, context: int = 8192) -> dict[str, Rule]:
    return {
        **_llama_like(context=context, kv_heads=kv_heads),
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


def _mixture(*, experts: int, experts_per_token: int) -> dict[str, Rule]:
    return {
        "experts": size_of("num_experts", "num_local_experts", absent=experts),
        "experts_per_token": size_of("num_experts_per_tok", absent=experts_per_token),
        "routing": lambda settings: Routing(normalised=settings.flag("norm_topk_prob", absent=False)),
    }


def _qwen_dense(settings: ConfigKeys) -> tuple[int, ...]:
    """The blocks that are listed as dense, and those between every so many that are not."""
    layers, every = _blocks(settings), settings.size("decoder_sparse_step", absent=1)
    listed = settings.table.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < layers for layer in listed):
        raise FlopwiseError(
            f"{settings.owner}: mlp_only_layers are no blocks", hint=f"numbers from 0 to {layers - 1}, or leave it out"
        )
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % every)


def _first_dense(settings: ConfigKeys) -> tuple[int, ...]:
    return tuple(range(min(settings.size("first_k_dense_replace", absent=1, null=0, least=0), _blocks(settings))))


def _dense(blocks: Callable[[ConfigKeys], tuple[int, ...]]) -> dict[str, Rule]:
    """Of a mixture some of whose blocks have no experts."""
    return {
        "dense_blocks": blocks,
        "dense_ffn": lambda settings: settings.size("intermediate_size") if blocks(settings) else 0,
    }


def _corrected_routing(settings: ConfigKeys) -> Routing:
    """DeepSeek-V3's, and of those who follow it."""
    groups = settings.size("n_group", absent=1, null=1)
    return Routing(
        scores="sigmoid",
        normalised=settings.flag("norm_topk_prob", absent=True),
        scale=settings.number("routed_scaling_factor", absent=1.0),
        correction=True,
        groups=groups,
        groups_kept=settings.size("topk_group", absent=1, null=1),
        group_by="best two" if groups > 1 else "best",
    )


def _shared_experts(settings: ConfigKeys) -> int:
    """Several of them are one that is as wide as all."""
    count = settings.size("n_shared_experts", absent=1, null=0, least=0)
    return count * settings.size("moe_intermediate_size") if count else 0


def _latent(settings: ConfigKeys) -> LatentAttention:
    return LatentAttention(
        rank=settings.size("kv_lora_rank"),
        value_dim=settings.size("v_head_dim"),
        query_rank=settings.size("q_lora_rank", absent=0, null=0, least=0),
    )


def _latent_head_dim(settings: ConfigKeys) -> int:
    return settings.size("qk_nope_head_dim") + settings.size("qk_rope_head_dim")


def _latent_scale(settings: ConfigKeys) -> float | None:
    """Scores under YaRN are scaled twice by what it multiplies queries and keys by elsewhere."""
    scaling = rotary_scaling(settings)
    if scaling is None or scaling.method != "yarn" or not scaling.mscale_all_dim:
        return None
    factor = scaling.mscale_factor(scaling.mscale_all_dim)
    return float(_latent_head_dim(settings) ** -0.5 * factor * factor)


def _latent_like() -> dict[str, Rule]:
    """What DeepSeek-V2 and V3 share."""
    return {
        **_llama_like(context=4096, kv_heads=0),
        **_dense(_first_dense),
        "head_dim": _latent_head_dim,
        "rotary_dim": size_of("qk_rope_head_dim"),
        "rotary_pairs": fixed("neighbours"),
        "latent": _latent,
        "attention_scale": _latent_scale,
        "ffn": size_of("moe_intermediate_size"),
        "experts": size_of("n_routed_experts"),
        "experts_per_token": size_of("num_experts_per_tok"),
        "shared_ffn": _shared_experts,
    }


def _grouped_routing(settings: ConfigKeys) -> Routing:
    """DeepSeek-V2's, as its class in transformers computes it: whatever the file says, nothing is normalised."""
    grouped = settings.text("topk_method", "greedy") == "group_limited_greedy"
    return Routing(
        normalised=False,
        scale=settings.number("routed_scaling_factor", absent=1.0),
        groups=settings.size("n_group", absent=1, null=1) if grouped else 1,
        groups_kept=settings.size("topk_group", absent=1, null=1) if grouped else 1,
    )


def _left_to_others(settings: ConfigKeys) -> str:
    """What of DeepSeek's own training is not done."""
    further = _further_token_note(settings)
    balanced = settings.number("aux_loss_alpha", absent=0.0) != 0.0
    loss = "the loss that balances experts is left out, as transformers does" if balanced else ""
    return "; ".join(filter(None, (further, loss)))


LATENT_ONLY = (
    Only("attention_bias", (False,), "some of its products have biases and others none"),
    Only("moe_layer_freq", (1,), "which of its blocks have experts is read as DeepSeek's: all but the first ones"),
    Only("mlp_bias", (False,), "its experts have no biases"),
    Only("output_router_logits", (False,), "it adds a loss that balances the experts, which is not computed"),
)


def _further_token_note(settings: ConfigKeys) -> str:
    further = settings.size("num_nextn_predict_layers", absent=0, null=0, least=0)
    return "the layer that foretells a further token is left out, as transformers does" if further else ""


def _olmo_like() -> dict[str, Rule]:
    return {
        **_llama_like(context=2048, kv_heads=0),
        **ATTENTION_BIAS,
        "norm_place": fixed("behind"),
        "qk_norm": fixed(True),
        "qk_norm_over": fixed("all"),
        "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
    }


def _cohere_like() -> dict[str, Rule]:
    return {
        **_llama_like(context=8192, kv_heads=0),
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
    return None if mixed and kind == FULL else _usual_angles(10_000.0)(settings, kind)


def _glm_like() -> dict[str, Rule]:
    return {
        **_llama_like(context=131_072, kv_heads=2),
        "head_dim": size_of("head_dim", absent=128, null=0),
        "qkv_bias": flag_of("attention_bias", absent=True),
        "rotary_pairs": fixed("neighbours"),
        "rotary_dim": rotary_dim(0.5),
        "norm_epsilon": number_of("rms_norm_eps", absent=1.5625e-7),
    }


POOLINGS = {"cls": "first", "mean": "mean"}
"""What ModernBERT's classifiers read, by the name in a file."""
ATTENTION_BIAS = {
    "qkv_bias": flag_of("attention_bias", absent=False),
    "output_bias": flag_of("attention_bias", absent=False),
}
"""One switch for all four products around attention."""
NO_BALANCING = Only("output_router_logits", (False,), "it adds a loss that balances the experts, which is not computed")
NO_LOOKING_AHEAD = Only("use_bidirectional_attention", (False,), "its tokens see those that come after them")
NO_QK_NORM = Only("qk_layernorm", (False,), "its norms of queries and keys are none that a description holds")

FAMILIES: dict[str, Family] = {
    "llama": Family(
        title="Llama",
        bare=("LlamaModel",),
        rules={
            **_llama_like(context=2048, kv_heads=0),
            **ATTENTION_BIAS,
            "ffn_bias": flag_of("mlp_bias", absent=False),
        },
    ),
    "mistral": Family(
        title="Mistral",
        bare=("MistralModel",),
        rules={**_llama_like(context=131072, kv_heads=8), "window": _window(absent=4096)},
    ),
    "mixtral": Family(
        title="Mixtral",
        bare=("MixtralModel",),
        rules={
            **_llama_like(context=131072, kv_heads=8),
            "window": _window(absent=0),
            "experts": size_of("num_experts", "num_local_experts", absent=8),
            "experts_per_token": size_of("num_experts_per_tok", absent=2),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
            "rotary_base": rotary_base("rope_theta", absent=1e6),
        },
        only=(NO_BALANCING, Only("router_jitter_noise", (0.0, 0), "training shakes what its experts read")),
    ),
    "qwen2_moe": Family(
        title="Qwen2 MoE",
        bare=("Qwen2MoeModel",),
        only=(
            NO_BALANCING,
            Only("use_sliding_window", (False,), "which of its blocks have windows is not read"),
        ),
        rules={
            **_llama_like(context=32768, kv_heads=16),
            **_mixture(experts=60, experts_per_token=4),
            **_dense(_qwen_dense),
            "head_dim": fixed(0),
            "qkv_bias": flag_of("qkv_bias", absent=True),
            "ffn": size_of("moe_intermediate_size", absent=1408),
            "shared_ffn": size_of("shared_expert_intermediate_size", absent=5632),
            "shared_gate": fixed(True),
        },
    ),
    "qwen3_moe": Family(
        title="Qwen3 MoE",
        bare=("Qwen3MoeModel",),
        only=(NO_BALANCING,),
        rules={
            **_llama_like(context=32768, kv_heads=4),
            **_mixture(experts=128, experts_per_token=8),
            **_dense(_qwen_dense),
            **ATTENTION_BIAS,
            "head_dim": size_of("head_dim", absent=0, null=0),
            "ffn": size_of("moe_intermediate_size", absent=768),
            "window": lambda settings: (
                _window(absent=4096)(settings) if settings.flag("use_sliding_window", absent=False) else None
            ),
            "qk_norm": fixed(True),
        },
    ),
    "gpt_oss": Family(
        title="gpt-oss",
        bare=("GptOssModel",),
        only=(
            NO_BALANCING,
            Only("swiglu_alpha", (1.702,), "it has another activation"),
            Only("swiglu_limit", (7.0,), "it has another activation"),
        ),
        rules={
            **_llama_like(context=131_072, kv_heads=8),
            **_by_kind(_every_second, _gpt_oss_angles, window=128),
            "head_dim": size_of("head_dim", absent=64, null=0),
            "activation": fixed("clamped_swiglu"),
            **dict.fromkeys(("qkv_bias", "output_bias"), flag_of("attention_bias", absent=True)),
            "ffn_bias": fixed(True),
            "sinks": fixed(True),
            "experts": size_of("num_experts", "num_local_experts", absent=128),
            "experts_per_token": size_of("num_experts_per_tok", absent=4),
            "routing": fixed(Routing(bias=True)),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
        },
    ),
    "glm4_moe": Family(
        title="GLM-4.5",
        bare=("Glm4MoeModel",),
        only=(NO_BALANCING,),
        note=_further_token_note,
        rules={
            **_llama_like(context=131_072, kv_heads=8),
            **_dense(_first_dense),
            "head_dim": size_of("head_dim", absent=128, null=0),
            "qkv_bias": flag_of("attention_bias", absent=False),
            "qk_norm": flag_of("use_qk_norm", absent=False),
            "rotary_dim": rotary_dim(0.5),
            "ffn": size_of("moe_intermediate_size", absent=1408),
            "experts": size_of("n_routed_experts", "num_local_experts", absent=128),
            "experts_per_token": size_of("num_experts_per_tok", absent=8),
            "shared_ffn": _shared_experts,
            "routing": _corrected_routing,
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
        },
    ),
    "deepseek_v2": Family(
        title="DeepSeek-V2",
        bare=("DeepseekV2Model",),
        only=(
            *LATENT_ONLY,
            Only("topk_method", ("greedy", "group_limited_greedy"), "its experts are chosen by another rule"),
            Only("scoring_func", ("softmax",), "its experts' shares are others"),
            Only("norm_topk_prob", (False,), "transformers does not normalise its weights"),
        ),
        note=_left_to_others,
        rules={**_latent_like(), "routing": _grouped_routing},
    ),
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k2"),
        Family(
            title="DeepSeek-V3",
            bare=("DeepseekV3Model",),
            only=(
                *LATENT_ONLY,
                Only("topk_method", ("noaux_tc",), "its experts are chosen by another rule"),
                Only("scoring_func", ("sigmoid",), "its experts' shares are others"),
            ),
            note=_left_to_others,
            rules={
                **_latent_like(),
                "routing": _corrected_routing,
                "rotary_pairs": lambda settings: (
                    "neighbours" if settings.flag("rope_interleave", absent=True) else "halves"
                ),
            },
        ),
    ),
    "olmoe": Family(
        title="OLMoE",
        bare=("OlmoeModel",),
        only=(NO_BALANCING, Only("clip_qkv", (None,), "it cuts off large queries, keys and values")),
        rules={
            **_llama_like(context=4096, kv_heads=0),
            **_mixture(experts=64, experts_per_token=8),
            **ATTENTION_BIAS,
            "qk_norm": fixed(True),
            "qk_norm_over": fixed("all"),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
        },
    ),
    "qwen2": Family(
        title="Qwen2",
        bare=("Qwen2Model",),
        rules={
            **_llama_like(context=32768, kv_heads=32),
            **_by_kind(_qwen_kinds, _usual_angles(10_000.0)),
            "qkv_bias": fixed(True),
        },
    ),
    "qwen3": Family(
        title="Qwen3",
        bare=("Qwen3Model",),
        rules={
            **_llama_like(context=32768, kv_heads=32),
            "head_dim": size_of("head_dim", absent=128),
            **_by_kind(_qwen_kinds, _usual_angles(10_000.0)),
            **ATTENTION_BIAS,
            "qk_norm": fixed(True),
        },
    ),
    **GPTS,
    "nemotron": Family(
        title="Nemotron",
        bare=("NemotronModel",),
        rules={
            **_llama_like(context=4096, kv_heads=0),
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
            **_llama_like(context=2048, kv_heads=32),
            **_by_kind(_full_every(4), _exaone_angles),
            "norm_place": fixed("behind"),
            "qk_norm": fixed(True),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
        },
    ),
    "ernie4_5": Family(
        title="ERNIE 4.5",
        bare=("Ernie4_5Model",),
        rules={
            **_llama_like(context=131_072, kv_heads=2),
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
            **_llama_like(context=2048, kv_heads=0),
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
            **_llama_like(context=4096, kv_heads=0),
            "window": _window(absent=0),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
            "rotary_dim": rotary_dim(1.0),
            "dropout": dropout_of(attention="attention_dropout", hidden="resid_pdrop"),
        },
    ),
    "starcoder2": Family(
        title="Starcoder2",
        bare=("Starcoder2Model",),
        rules={
            **_llama_like(context=4096, kv_heads=2),
            "norm": fixed("layer"),
            "norm_bias": fixed(True),
            "gated": fixed(False),
            **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), flag_of("use_bias", absent=True)),
            "activation": activation_of("hidden_act", absent="gelu_pytorch_tanh"),
            "norm_epsilon": number_of("norm_epsilon", absent=1e-5),
            "window": _window(absent=0),
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
            **_llama_like(context=4096, kv_heads=32),
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
            **_llama_like(context=4096, kv_heads=0),
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
        rules={**_olmo_like(), **_by_kind(_full_every(4), _angles_by_kind(dict.fromkeys((SLIDING, FULL), 500_000.0)))},
    ),
    "granite": Family(
        title="Granite",
        bare=("GraniteModel",),
        rules={
            **_llama_like(context=2048, kv_heads=0),
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
            **_by_kind(
                _full_every(4),
                # Blocks without a window have no positions.
                lambda settings, kind: _usual_angles(10_000.0)(settings, kind) if kind == SLIDING else None,
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
            **_by_kind(_full_every(2), _usual_angles(10_000.0)),
        },
    ),
    "gemma3_text": Family(
        title="Gemma 3",
        bare=("Gemma3TextModel",),
        only=(NO_LOOKING_AHEAD,),
        rules={
            **_gemma_sandwich(context=131_072, caps=(None, None)),
            "qk_norm": fixed(True),
            **_by_kind(_full_every(6), _angles_by_kind({SLIDING: 10_000.0, FULL: 1e6}, "rope_local_base_freq")),
        },
    ),
    "ministral": Family(
        title="Ministral",
        bare=("MinistralModel",),
        rules={
            **_llama_like(context=131_072, kv_heads=8),
            **_by_kind(_ministral_kinds, _usual_angles(10_000.0)),
        },
    ),
    "smollm3": Family(
        title="SmolLM3",
        bare=("SmolLM3Model",),
        only=(Only("use_sliding_window", (False,), "windows and positions by block cannot be described together"),),
        rules={
            **_llama_like(context=32_768, kv_heads=4),
            **ATTENTION_BIAS,
            "ffn_bias": flag_of("mlp_bias", absent=False),
            "tied": flag_of("tie_word_embeddings", absent=True),
            **_by_kind(
                _smollm_kinds,
                lambda settings, kind: _usual_angles(2e6)(settings, kind) if kind == SLIDING else None,
                window=None,
            ),
            "window": fixed(None),
        },
    ),
    "seed_oss": Family(
        title="Seed-OSS",
        bare=("SeedOssModel",),
        rules={
            **_llama_like(context=524_288, kv_heads=8),
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
            **_by_kind(
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
    **ENCODERS,
}
