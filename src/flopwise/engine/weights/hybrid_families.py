"""How `transformers` names and configures the families whose blocks carry a state."""

from __future__ import annotations

from dataclasses import replace

from flopwise.engine.weights.families import (
    LLAMA_ENDS,
    LLAMA_LAYER,
    Config,
    Names,
    SavedFamily,
    granite_scales,
    inverse,
    like_llama,
    share_turned,
)
from flopwise.engine.weights.mixture_families import EXPERT, balanced
from flopwise.work.recurrence import FEEDING, RECURRENT
from flopwise.work.transformer import Transformer

STATES = {
    "convolution": "conv1d",
    "steps": "dt_bias",
    "decay": "A_log",
    "skip": "D",
    "mix_norm": "norm",
    "mix_in": "in_proj",
    "mix_out": "out_proj",
}
"""Of what carries a state, the names within it."""
NEMOTRON_EXPERT = {"up": ("up_proj",), "down": ("down_proj",)}


def _states(module: str, **own: str) -> dict[str, str]:
    return {name: f"{module}.{word}" for name, word in {**STATES, **own}.items()}


def _kinds(model: Transformer, words: dict[str, str]) -> list[str]:
    """A word for each block; those that look back are called the same everywhere."""
    return [words.get(model.block_kind(layer), "full_attention") for layer in range(model.layers)]


LINEAR = {RECURRENT: "linear_attention"}


def _delta(model: Transformer) -> Config:
    recurrence = model.recurrence
    sizes: Config = {}
    if recurrence is not None:
        sizes = {
            "linear_conv_kernel_dim": recurrence.conv,
            "linear_key_head_dim": recurrence.key_dim,
            "linear_value_head_dim": recurrence.head_dim,
            "linear_num_key_heads": recurrence.key_heads,
            "linear_num_value_heads": recurrence.heads,
        }
    return {
        "head_dim": model.head_dim,
        "attention_bias": False,
        "layer_types": _kinds(model, LINEAR) if model.has_kinds else ["full_attention"] * model.layers,
        "partial_rotary_factor": share_turned(model),
        **sizes,
    }


def _qwen_experts(model: Transformer) -> Config:
    return {
        "moe_intermediate_size": model.ffn,
        "shared_expert_intermediate_size": model.shared_ffn,
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.routing.normalised,
        **balanced(model),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _limits(model: Transformer) -> Config:
    """Bounds of steps where there are any; as `transformers` writes a number without an end."""
    assert model.recurrence is not None
    least, most = model.recurrence.least_step, model.recurrence.most_step
    if not least and most is None:
        return {}
    return {"time_step_limit": [least, {"__float__": "Infinity"} if most is None else most]}


def _mamba2(model: Transformer) -> Config:
    recurrence = model.recurrence
    assert recurrence is not None
    return {
        "num_heads": recurrence.heads,
        "head_dim": recurrence.head_dim,
        "state_size": recurrence.key_dim,
        "n_groups": recurrence.key_heads,
        "expand": recurrence.width / model.hidden
        if recurrence.width % model.hidden
        else recurrence.width // model.hidden,
        "conv_kernel": recurrence.conv,
        "use_conv_bias": recurrence.conv_bias,
        "use_bias": recurrence.bias,
        "chunk_size": recurrence.chunk,
        **_limits(model),
        "layer_norm_epsilon": model.norm_epsilon,
        "residual_in_fp32": False,
    }


def _nemotron_h(model: Transformer) -> Config:
    recurrence, routing = model.recurrence, model.routing
    assert recurrence is not None
    feeds = "moe" if model.experts else "mlp"
    experts: Config = {
        "n_routed_experts": model.experts,
        "n_shared_experts": 1,
        "moe_intermediate_size": model.ffn,
        "moe_shared_expert_intermediate_size": model.shared_ffn,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": routing.normalised,
        "routed_scaling_factor": routing.scale,
        "n_group": routing.groups,
        "topk_group": routing.groups_kept,
    }
    return {
        "head_dim": model.head_dim,
        "attention_bias": model.qkv_bias,
        "layers_block_type": _kinds(model, {**LINEAR, FEEDING: feeds}),
        "mlp_hidden_act": model.activation,
        "mlp_bias": model.ffn_bias,
        "mamba_num_heads": recurrence.heads,
        "mamba_head_dim": recurrence.head_dim,
        "ssm_state_size": recurrence.key_dim,
        "n_groups": recurrence.key_heads,
        "conv_kernel": recurrence.conv,
        "use_conv_bias": recurrence.conv_bias,
        "use_bias": recurrence.bias,
        "chunk_size": recurrence.chunk,
        "time_step_min": recurrence.least_step,
        "layer_norm_epsilon": model.norm_epsilon,
        "residual_in_fp32": False,
        "rescale_prenorm_residual": False,
        "num_hidden_layers": model.layers,
        **(experts if model.experts else {}),
    }


def _mamba_of_granite(model: Transformer) -> Config:
    recurrence = model.recurrence
    assert recurrence is not None
    return {
        "mamba_n_heads": recurrence.heads,
        "mamba_d_head": recurrence.head_dim,
        "mamba_d_state": recurrence.key_dim,
        "mamba_n_groups": recurrence.key_heads,
        "mamba_d_conv": recurrence.conv,
        "mamba_expand": recurrence.width // model.hidden,
        "mamba_conv_bias": recurrence.conv_bias,
        "mamba_proj_bias": recurrence.bias,
        "mamba_chunk_size": recurrence.chunk,
        **_limits(model),
        "attention_bias": model.qkv_bias,
    }


def _bamba(model: Transformer) -> Config:
    looking = [layer for layer in range(model.layers) if layer not in model.recurrent_blocks]
    return {
        **_mamba_of_granite(model),
        "attn_layer_indices": looking,
        "mlp_bias": model.ffn_bias,
        "partial_rotary_factor": share_turned(model),
    }


def _granite_hybrid(model: Transformer) -> Config:
    return {
        **_mamba_of_granite(model),
        **granite_scales(model),
        "layer_types": _kinds(model, LINEAR),
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token or 1,
        "shared_intermediate_size": model.shared_ffn or model.ffn,
        "position_embedding_type": "rope" if model.positions == "rotary" else None,
        **balanced(model),
        "logits_scaling": inverse(model.logit_scale),
    }


def _granite_mixture(model: Transformer) -> Config:
    return {
        **granite_scales(model),
        "attention_bias": model.qkv_bias,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        **balanced(model),
    }


def _granite_names(model: Transformer) -> dict[str, tuple[str, ...]]:
    """Without experts the feed-forward part is what the others share."""
    first = "block_sparse_moe" if model.experts else "shared_mlp"
    return {"gate_up": (f"{first}.input_linear",), "down": (f"{first}.output_linear",)}


QWEN_NEXT = replace(
    like_llama(router="mlp.gate", shared_router="mlp.shared_expert_gate", **_states("linear_attn")),
    experts=EXPERT,
    shared="mlp.shared_expert",
    gated_heads=True,
)
QWEN_IN_TWO = {"mix_in": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")}
QWEN_IN_FOUR = {"mix_in": tuple(f"linear_attn.in_proj_{part}" for part in ("z", "qkv", "b", "a"))}
BACKBONE = {"embedding": "backbone.embeddings", "final_norm": "backbone.norm_f", "head": "lm_head"}
MIXER = Names(
    "backbone.layers",
    {
        **LLAMA_LAYER,
        "norm1": ("norm",),
        "qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        "output": ("mixer.o_proj",),
        "up": ("mixer.up_proj",),
        "down": ("mixer.down_proj",),
        "router": ("mixer.gate",),
        "routing": ("mixer.gate.e_score_correction_bias",),
        **{name: (word,) for name, word in _states("mixer").items()},
    },
    BACKBONE,
    experts=NEMOTRON_EXPERT,
    expert="mixer.experts.{}",
    shared="mixer.shared_experts",
)

GRANITE_EXPERTS = Names("model.layers", {**LLAMA_LAYER, "router": ("block_sparse_moe.router.layer",)}, LLAMA_ENDS)
GRANITE_SHARED = {"shared_gate_up": ("shared_mlp.input_linear",), "shared_down": ("shared_mlp.output_linear",)}

HYBRIDS: dict[str, SavedFamily] = {
    "qwen3_next": SavedFamily(
        architecture="Qwen3NextForCausalLM",
        names=replace(QWEN_NEXT, layer={**QWEN_NEXT.layer, **QWEN_IN_TWO}, states_by_key=True),
        own=lambda model: {**_delta(model), **_qwen_experts(model)},
    ),
    "qwen3_5_text": SavedFamily(
        architecture="Qwen3_5ForCausalLM",
        names=replace(QWEN_NEXT, layer={**QWEN_NEXT.layer, **QWEN_IN_FOUR}),
        own=_delta,
    ),
    "qwen3_5_moe_text": SavedFamily(
        architecture="Qwen3_5MoeForCausalLM",
        names=replace(QWEN_NEXT, layer={**QWEN_NEXT.layer, **QWEN_IN_FOUR}),
        own=lambda model: {**_delta(model), **_qwen_experts(model)},
    ),
    "mamba2": SavedFamily(architecture="Mamba2ForCausalLM", names=MIXER, own=_mamba2),
    "nemotron_h": SavedFamily(architecture="NemotronHForCausalLM", names=MIXER, own=_nemotron_h),
    "bamba": SavedFamily(
        architecture="BambaForCausalLM",
        names=Names(
            "model.layers",
            {
                **LLAMA_LAYER,
                "norm2": ("pre_ff_layernorm",),
                "gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
                "down": ("feed_forward.down_proj",),
                **{name: (word,) for name, word in _states("mamba").items()},
            },
            {**LLAMA_ENDS, "final_norm": "model.final_layernorm"},
        ),
        own=_bamba,
    ),
    "granitemoe": SavedFamily(
        architecture="GraniteMoeForCausalLM",
        names=GRANITE_EXPERTS,
        layer_names=_granite_names,
        own=_granite_mixture,
    ),
    "granitemoeshared": SavedFamily(
        architecture="GraniteMoeSharedForCausalLM",
        names=replace(GRANITE_EXPERTS, layer={**GRANITE_EXPERTS.layer, **GRANITE_SHARED}),
        layer_names=_granite_names,
        own=lambda model: {**_granite_mixture(model), "shared_intermediate_size": model.shared_ffn},
    ),
    "granitemoehybrid": SavedFamily(
        architecture="GraniteMoeHybridForCausalLM",
        names=Names(
            "model.layers",
            {
                **GRANITE_EXPERTS.layer,
                **GRANITE_SHARED,
                **{name: (word,) for name, word in _states("mamba").items()},
            },
            LLAMA_ENDS,
        ),
        layer_names=_granite_names,
        own=_granite_hybrid,
    ),
}
"""By `model_type`."""
