"""How `transformers` names and configures the families whose layers choose among experts."""

from __future__ import annotations

from dataclasses import replace

from flopwise.engine.weights.families import (
    Config,
    SavedFamily,
    like_llama,
    rotary_scaling_of,
    share_turned,
    windows_of,
)
from flopwise.work.transformer import Transformer

EXPERT = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
MIXTRAL_EXPERT = {"gate_up": ("w1", "w3"), "down": ("w2",)}


def _experts(model: Transformer) -> Config:
    return {
        "num_local_experts": model.experts,
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.routing.normalised,
        **balanced(model),
    }


def balanced(model: Transformer) -> Config:
    """What transformers adds to a training's loss: of all its layers at once."""
    routing = model.routing
    if routing.balance == 0 or routing.balance_over != "model":
        return {"output_router_logits": False}
    return {"output_router_logits": True, "router_aux_loss_coef": routing.balance}


def _qwen_dense(model: Transformer) -> Config:
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(model.dense_blocks),
        "intermediate_size": model.dense_ffn or model.ffn,
    }


def _llama4(model: Transformer) -> Config:
    kinds = [model.kind_of(layer) for layer in range(model.layers)]
    temperature = next((kind.temperature for kind in kinds if kind.temperature is not None), None)
    told = {} if temperature is None else {"floor_scale": temperature.floor, "attn_scale": temperature.scale}
    turns = [kind.positions == "rotary" for kind in kinds]
    return {
        "head_dim": model.head_dim,
        "attention_bias": model.qkv_bias,
        "intermediate_size_mlp": model.dense_ffn or model.ffn,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_layers": [layer for layer in range(model.layers) if layer not in model.dense_blocks],
        "use_qk_norm": model.qk_norm,
        "no_rope_layers": [int(each) for each in turns],
        "layer_types": ["chunked_attention" if each else "full_attention" for each in turns],
        "attention_chunk_size": model.attention_chunk,
        "attn_temperature_tuning": temperature is not None,
        **told,
        "output_router_logits": False,
    }


def _glm4_moe(model: Transformer) -> Config:
    return {
        "head_dim": model.head_dim,
        "attention_bias": model.qkv_bias,
        "use_qk_norm": model.qk_norm,
        "partial_rotary_factor": share_turned(model),
        **_corrected_experts(model),
    }


def _corrected_experts(model: Transformer) -> Config:
    """Of DeepSeek-V3 and those who follow it."""
    routing = model.routing
    return {
        "intermediate_size": model.dense_ffn or model.ffn,
        "moe_intermediate_size": model.ffn,
        "first_k_dense_replace": len(model.dense_blocks),
        "n_routed_experts": model.experts,
        "n_shared_experts": model.shared_ffn // model.ffn,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": routing.normalised,
        "routed_scaling_factor": routing.scale,
        "n_group": routing.groups,
        "topk_group": routing.groups_kept,
        "num_mtp_layers": 0,
        "output_router_logits": False,
    }


def _deepseek(model: Transformer) -> Config:
    """Of latent attention, and experts as DeepSeek-V2 and V3 have them."""
    latent, turned, routing = model.latent, model.turned_channels, model.routing
    assert latent is not None
    corrected = routing.correction
    return {
        **_corrected_experts(model),
        "attention_bias": False,
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.rank,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": model.head_dim - turned,
        "head_dim": turned,
        "v_head_dim": latent.value_dim,
        "rope_interleave": model.rotary_pairs == "neighbours",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "topk_method": "noaux_tc" if corrected else "group_limited_greedy" if routing.groups > 1 else "greedy",
        "scoring_func": routing.scores,
    }


def _latent_names(model: Transformer) -> dict[str, tuple[str, ...]]:
    """Queries are made at once, or from a latent of their own."""
    assert model.latent is not None
    first = "self_attn.q_a_proj" if model.latent.query_rank else "self_attn.q_proj"
    return {"latents": (first, "self_attn.kv_a_proj_with_mqa")}


DEEPSEEK_NAMES = replace(
    like_llama(
        router="mlp.gate",
        routing="mlp.gate.e_score_correction_bias",
        query_latent_norm="self_attn.q_a_layernorm",
        query_up="self_attn.q_b_proj",
        latent_norm="self_attn.kv_a_layernorm",
        latent_up="self_attn.kv_b_proj",
    ),
    experts=EXPERT,
    shared="mlp.shared_experts",
)


MIXTURES: dict[str, SavedFamily] = {
    "mixtral": SavedFamily(
        architecture="MixtralForCausalLM",
        names=replace(
            like_llama(router="block_sparse_moe.gate"), experts=MIXTRAL_EXPERT, expert="block_sparse_moe.experts.{}"
        ),
        own=lambda model: {"head_dim": model.head_dim, "sliding_window": model.window, **_experts(model)},
    ),
    "qwen2_moe": SavedFamily(
        architecture="Qwen2MoeForCausalLM",
        names=replace(
            like_llama(router="mlp.gate", shared_router="mlp.shared_expert_gate"),
            experts=EXPERT,
            shared="mlp.shared_expert",
        ),
        own=lambda model: {
            "qkv_bias": model.qkv_bias,
            "moe_intermediate_size": model.ffn,
            "shared_expert_intermediate_size": model.shared_ffn,
            **_experts(model),
            **_qwen_dense(model),
        },
    ),
    "qwen3_moe": SavedFamily(
        architecture="Qwen3MoeForCausalLM",
        names=replace(like_llama(router="mlp.gate"), experts=EXPERT),
        own=lambda model: {
            "head_dim": model.head_dim,
            "attention_bias": model.qkv_bias,
            "use_sliding_window": model.window is not None,
            "sliding_window": model.window,
            "moe_intermediate_size": model.ffn,
            **_experts(model),
            **_qwen_dense(model),
        },
    ),
    "gpt_oss": SavedFamily(
        architecture="GptOssForCausalLM",
        names=replace(
            like_llama(router="mlp.router", sinks="self_attn.sinks"),
            stacked={"gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"},
        ),
        own=lambda model: {
            "head_dim": model.head_dim,
            "attention_bias": model.qkv_bias,
            **windows_of(model),
            # Without one, its class would take that of the released models.
            "rope_scaling": rotary_scaling_of(model.rotary_scaling) or {"rope_type": "default"},
            "hidden_act": "silu",
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            **_experts(model),
        },
    ),
    "llama4_text": SavedFamily(
        architecture="Llama4ForCausalLM",
        names=replace(
            like_llama(
                router="feed_forward.router",
                gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
                down="feed_forward.down_proj",
            ),
            stacked={"gate_up": "feed_forward.experts.gate_up_proj", "down": "feed_forward.experts.down_proj"},
            shared="feed_forward.shared_expert",
            pairs_stacked=False,
        ),
        own=_llama4,
    ),
    "glm4_moe": SavedFamily(
        architecture="Glm4MoeForCausalLM",
        names=replace(
            like_llama(router="mlp.gate", routing="mlp.gate.e_score_correction_bias"),
            experts=EXPERT,
            shared="mlp.shared_experts",
        ),
        own=_glm4_moe,
    ),
    **{
        family: SavedFamily(architecture=architecture, names=DEEPSEEK_NAMES, layer_names=_latent_names, own=_deepseek)
        for family, architecture in (
            ("deepseek_v2", "DeepseekV2ForCausalLM"),
            ("deepseek_v3", "DeepseekV3ForCausalLM"),
            ("kimi_k2", "DeepseekV3ForCausalLM"),
        )
    },
    "olmoe": SavedFamily(
        architecture="OlmoeForCausalLM",
        names=replace(like_llama(router="mlp.gate"), experts=EXPERT),
        own=lambda model: {"attention_bias": model.qkv_bias, "clip_qkv": None, **_experts(model)},
    ),
}
"""By `model_type`."""
