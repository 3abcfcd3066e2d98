"""How each family of mixtures of experts spells its shape in a `config.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.huggingface_blocks import (
    ATTENTION_BIAS,
    blocks_of,
    by_kind,
    kinds_or,
    llama_like,
    window_of,
)
from flopwise.catalog.huggingface_rules import (
    FULL,
    SLIDING,
    Family,
    Only,
    Rule,
    fixed,
    flag_of,
    number_of,
    rotary_base,
    rotary_dim,
    rotary_scaling,
    rotary_settings,
    size_of,
)
from flopwise.catalog.huggingface_settings import ConfigKeys
from flopwise.work.attention_kinds import OtherAttention, RotaryScaling, Temperature
from flopwise.work.latent import LatentAttention
from flopwise.work.routing import Routing


def _every_second(settings: ConfigKeys) -> list[str]:
    """gpt-oss begins with a window."""
    return kinds_or(lambda _: [FULL if number % 2 else SLIDING for number in range(blocks_of(settings))])(settings)


def _gpt_oss_angles(settings: ConfigKeys, _: str) -> tuple[float, RotaryScaling | None]:
    """A file that says nothing of it has the released models' scaling."""
    base = rotary_base("rope_theta", 150_000.0)(settings)
    if rotary_settings(settings).table:
        return base, rotary_scaling(settings)
    return base, RotaryScaling(method="yarn", factor=32.0, original_context=4096, truncate=False)


def _mixture(*, experts: int, experts_per_token: int, balance: float = 0.001) -> dict[str, Rule]:
    return {
        "experts": size_of("num_experts", "num_local_experts", absent=experts),
        "experts_per_token": size_of("num_experts_per_tok", absent=experts_per_token),
        "routing": lambda settings: balanced(
            settings, Routing(normalised=settings.flag("norm_topk_prob", absent=False)), absent=balance
        ),
    }


def balanced(settings: ConfigKeys, routing: Routing, *, absent: float = 0.001) -> Routing:
    """With the loss that transformers adds where a file asks for the router's scores; `absent`: its class's weight."""
    if not settings.flag("output_router_logits", absent=False):
        return routing
    weight = settings.table.get("router_aux_loss_coef", absent)
    # A weight of nothing is a loss that is only told.
    return replace(routing, balance=0.0 if weight == 0 else settings.number("router_aux_loss_coef", absent=absent))


def _qwen_dense(settings: ConfigKeys) -> tuple[int, ...]:
    """The blocks that are listed as dense, and those between every so many that are not."""
    layers, every = blocks_of(settings), settings.size("decoder_sparse_step", absent=1)
    listed = settings.table.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < layers for layer in listed):
        raise FlopwiseError(
            f"{settings.owner}: mlp_only_layers are no blocks", hint=f"numbers from 0 to {layers - 1}, or leave it out"
        )
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % every)


def _first_dense(settings: ConfigKeys) -> tuple[int, ...]:
    return tuple(range(min(settings.size("first_k_dense_replace", absent=1, null=0, least=0), blocks_of(settings))))


def _dense(blocks: Callable[[ConfigKeys], tuple[int, ...]]) -> dict[str, Rule]:
    """Of a mixture some of whose blocks have no experts."""
    return {
        "dense_blocks": blocks,
        "dense_ffn": lambda settings: settings.size("intermediate_size") if blocks(settings) else 0,
    }


def corrected_routing(settings: ConfigKeys) -> Routing:
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
        **llama_like(context=4096, kv_heads=0),
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
    loss = (
        "the loss that balances experts is that of routing.balance alone, as transformers leaves it out"
        if balanced
        else ""
    )
    return "; ".join(filter(None, (further, loss)))


LATENT_ONLY = (
    Only("attention_bias", (False,), "some of its products have biases and others none"),
    Only("moe_layer_freq", (1,), "which of its blocks have experts is read as DeepSeek's: all but the first ones"),
    Only("mlp_bias", (False,), "its experts have no biases"),
)


def _further_token_note(settings: ConfigKeys) -> str:
    further = settings.size("num_nextn_predict_layers", absent=0, null=0, least=0)
    return "the layer that foretells a further token is left out, as transformers does" if further else ""


def _llama4_turns(settings: ConfigKeys) -> list[bool]:
    """Which blocks have positions, and look back within a chunk."""
    layers, every = blocks_of(settings), settings.size("no_rope_layer_interval", absent=4)
    given = settings.table.get("no_rope_layers") or [int(number % every != 0) for number in range(1, layers + 1)]
    if not isinstance(given, list) or len(given) != layers or not all(each in (0, 1) for each in given):
        raise FlopwiseError(
            f"{settings.owner}: no_rope_layers cannot be described",
            why=f"there is 1 or 0 for each of {layers} blocks",
            hint="correct no_rope_layers, or leave it out",
        )
    kinds = ["chunked_attention" if turns else FULL for turns in given]
    if settings.texts("layer_types") not in ([], kinds):
        raise FlopwiseError(
            f"{settings.owner}: layer_types cannot be described",
            why="blocks with positions have chunked_attention, the others full_attention",
            hint="leave layer_types out",
        )
    return [bool(turns) for turns in given]


def _llama4_unturned(settings: ConfigKeys) -> tuple[int, ...]:
    """Blocks without positions, where others have them."""
    turns = _llama4_turns(settings)
    return tuple(layer for layer, each in enumerate(turns) if not each) if any(turns) else ()


def _llama4_chunk(settings: ConfigKeys) -> int | None:
    chunk = settings.size("attention_chunk_size", absent=8192, null=0)
    return chunk if chunk and any(_llama4_turns(settings)) else None


def _llama4_temperature(settings: ConfigKeys) -> Temperature | None:
    # Released files have a number where its class has a flag.
    if not settings.table.get("attn_temperature_tuning", True):
        return None
    return Temperature(floor=settings.size("floor_scale", absent=8192), scale=settings.number("attn_scale", absent=0.1))


def _llama4_others(settings: ConfigKeys) -> OtherAttention | None:
    if not _llama4_unturned(settings):
        return None
    base, scaling = rotary_base("rope_theta", 500_000.0)(settings), rotary_scaling(settings)
    return OtherAttention(
        rotary=False,
        rotary_base=base,
        rotary_scaling=scaling,
        temperature=_llama4_temperature(settings),
        qk_norm=False,
    )


def _llama4_dense(settings: ConfigKeys) -> tuple[int, ...]:
    """The blocks without experts: those between every so many, unless a file lists the others."""
    layers, step = blocks_of(settings), settings.size("interleave_moe_layer_step", absent=1)
    mixed = settings.table.get("moe_layers")
    if mixed is None:
        mixed = list(range(step - 1, layers, step))
    if not isinstance(mixed, list) or not all(type(layer) is int and 0 <= layer < layers for layer in mixed):
        raise FlopwiseError(
            f"{settings.owner}: moe_layers are no blocks", hint=f"numbers from 0 to {layers - 1}, or leave it out"
        )
    return tuple(layer for layer in range(layers) if layer not in mixed)


def _llama4_normed(settings: ConfigKeys) -> bool:
    return settings.flag("use_qk_norm", absent=True) and any(_llama4_turns(settings))


MIXTURES: dict[str, Family] = {
    "llama4_text": Family(
        title="Llama 4",
        bare=("Llama4TextModel",),
        only=(Only("router_jitter_noise", (0.0, 0), "training shakes what its experts read"),),
        rules={
            **llama_like(context=131_072, kv_heads=8),
            **ATTENTION_BIAS,
            "head_dim": size_of("head_dim", absent=128, null=0),
            "rotary_base": rotary_base("rope_theta", 500_000.0),
            "rotary_pairs": fixed("neighbours"),
            "positions": lambda settings: "rotary" if any(_llama4_turns(settings)) else "none",
            "attention_chunk": _llama4_chunk,
            "temperature": lambda settings: None if any(_llama4_turns(settings)) else _llama4_temperature(settings),
            "other_attention": _llama4_others,
            "other_blocks": _llama4_unturned,
            "qk_norm": _llama4_normed,
            "qk_norm_weights": lambda settings: not _llama4_normed(settings),
            "ffn": size_of("intermediate_size", absent=8192),
            "experts": size_of("num_local_experts", absent=16),
            "experts_per_token": size_of("num_experts_per_tok", absent=1),
            "routing": fixed(Routing(scores="sigmoid", normalised=False, on_inputs=True)),
            "shared_ffn": size_of("intermediate_size", absent=8192),
            "dense_blocks": _llama4_dense,
            "dense_ffn": lambda settings: (
                settings.size("intermediate_size_mlp", absent=16384) if _llama4_dense(settings) else 0
            ),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
        },
    ),
    "mixtral": Family(
        title="Mixtral",
        bare=("MixtralModel",),
        rules={
            **llama_like(context=131072, kv_heads=8),
            "window": window_of(absent=0),
            "experts": size_of("num_experts", "num_local_experts", absent=8),
            "experts_per_token": size_of("num_experts_per_tok", absent=2),
            "routing": lambda settings: balanced(settings, Routing()),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
            "rotary_base": rotary_base("rope_theta", absent=1e6),
        },
        only=(Only("router_jitter_noise", (0.0, 0), "training shakes what its experts read"),),
    ),
    "qwen2_moe": Family(
        title="Qwen2 MoE",
        bare=("Qwen2MoeModel",),
        only=(Only("use_sliding_window", (False,), "which of its blocks have windows is not read"),),
        rules={
            **llama_like(context=32768, kv_heads=16),
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
        rules={
            **llama_like(context=32768, kv_heads=4),
            **_mixture(experts=128, experts_per_token=8),
            **_dense(_qwen_dense),
            **ATTENTION_BIAS,
            "head_dim": size_of("head_dim", absent=0, null=0),
            "ffn": size_of("moe_intermediate_size", absent=768),
            "window": lambda settings: (
                window_of(absent=4096)(settings) if settings.flag("use_sliding_window", absent=False) else None
            ),
            "qk_norm": fixed(True),
        },
    ),
    "gpt_oss": Family(
        title="gpt-oss",
        bare=("GptOssModel",),
        only=(
            Only("swiglu_alpha", (1.702,), "it has another activation"),
            Only("swiglu_limit", (7.0,), "it has another activation"),
        ),
        rules={
            **llama_like(context=131_072, kv_heads=8),
            **by_kind(_every_second, _gpt_oss_angles, window=128),
            "head_dim": size_of("head_dim", absent=64, null=0),
            "activation": fixed("clamped_swiglu"),
            **dict.fromkeys(("qkv_bias", "output_bias"), flag_of("attention_bias", absent=True)),
            "ffn_bias": fixed(True),
            "sinks": fixed(True),
            "experts": size_of("num_experts", "num_local_experts", absent=128),
            "experts_per_token": size_of("num_experts_per_tok", absent=4),
            "routing": lambda settings: balanced(settings, Routing(bias=True)),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
        },
    ),
    "glm4_moe": Family(
        title="GLM-4.5",
        bare=("Glm4MoeModel",),
        note=_further_token_note,
        rules={
            **llama_like(context=131_072, kv_heads=8),
            **_dense(_first_dense),
            "head_dim": size_of("head_dim", absent=128, null=0),
            "qkv_bias": flag_of("attention_bias", absent=False),
            "qk_norm": flag_of("use_qk_norm", absent=False),
            "rotary_dim": rotary_dim(0.5),
            "ffn": size_of("moe_intermediate_size", absent=1408),
            "experts": size_of("n_routed_experts", "num_local_experts", absent=128),
            "experts_per_token": size_of("num_experts_per_tok", absent=8),
            "shared_ffn": _shared_experts,
            "routing": corrected_routing,
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
                "routing": corrected_routing,
                "rotary_pairs": lambda settings: (
                    "neighbours" if settings.flag("rope_interleave", absent=True) else "halves"
                ),
            },
        ),
    ),
    "olmoe": Family(
        title="OLMoE",
        bare=("OlmoeModel",),
        only=(Only("clip_qkv", (None,), "it cuts off large queries, keys and values"),),
        rules={
            **llama_like(context=4096, kv_heads=0),
            **_mixture(experts=64, experts_per_token=8, balance=0.01),
            **ATTENTION_BIAS,
            "qk_norm": fixed(True),
            "qk_norm_over": fixed("all"),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
        },
    ),
}
