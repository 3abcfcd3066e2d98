"""How each family of mixtures of experts spells its shape in a `config.json`."""

from __future__ import annotations

from collections.abc import Callable

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
from flopwise.work.latent import LatentAttention
from flopwise.work.routing import Routing
from flopwise.work.transformer import RotaryScaling


def _every_second(settings: ConfigKeys) -> list[str]:
    """gpt-oss begins with a window."""
    return kinds_or(lambda _: [FULL if number % 2 else SLIDING for number in range(blocks_of(settings))])(settings)


def _gpt_oss_angles(settings: ConfigKeys, _: str) -> tuple[float, RotaryScaling | None]:
    """A file that says nothing of it has the released models' scaling."""
    base = rotary_base("rope_theta", 150_000.0)(settings)
    if rotary_settings(settings).table:
        return base, rotary_scaling(settings)
    return base, RotaryScaling(method="yarn", factor=32.0, original_context=4096, truncate=False)


def _mixture(*, experts: int, experts_per_token: int) -> dict[str, Rule]:
    return {
        "experts": size_of("num_experts", "num_local_experts", absent=experts),
        "experts_per_token": size_of("num_experts_per_tok", absent=experts_per_token),
        "routing": lambda settings: Routing(normalised=settings.flag("norm_topk_prob", absent=False)),
    }


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


NO_BALANCING = Only("output_router_logits", (False,), "it adds a loss that balances the experts, which is not computed")


MIXTURES: dict[str, Family] = {
    "mixtral": Family(
        title="Mixtral",
        bare=("MixtralModel",),
        rules={
            **llama_like(context=131072, kv_heads=8),
            "window": window_of(absent=0),
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
        only=(NO_BALANCING,),
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
            NO_BALANCING,
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
        only=(NO_BALANCING, Only("clip_qkv", (None,), "it cuts off large queries, keys and values")),
        rules={
            **llama_like(context=4096, kv_heads=0),
            **_mixture(experts=64, experts_per_token=8),
            **ATTENTION_BIAS,
            "qk_norm": fixed(True),
            "qk_norm_over": fixed("all"),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
        },
    ),
}
