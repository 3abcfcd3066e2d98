"""Shapes of models with blocks that carry a state, as their `config.json` on the hub has them.

Less what says nothing of the shape. Of Qwen3.5 it is the object under `text_config`.
"""

from __future__ import annotations

Config = dict[str, object]

MAMBA2: Config = {
    "architectures": ["Mamba2ForCausalLM"],
    "chunk_size": 256,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba2",
    "n_groups": 1,
    "residual_in_fp32": True,
    "state_size": 128,
    "tie_word_embeddings": True,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 50288,
}
NEMOTRON_H: Config = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_key_value_heads": 8,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_min": 0.001,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
QWEN3_NEXT: Config = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
QWEN35: Config = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
BAMBA: Config = {
    "architectures": ["BambaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_layer_indices": [9, 18, 27],
    "attn_rotary_emb": 64,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "bamba",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
GRANITE_MIXTURE: Config = {
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "max_position_embeddings": 131_072,
    "model_type": "granitemoe",
    "num_attention_heads": 16,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_500_000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49_155,
}
GRANITE_SHARED: Config = {
    **GRANITE_MIXTURE,
    "architectures": ["GraniteMoeSharedForCausalLM"],
    "model_type": "granitemoeshared",
    "shared_intermediate_size": 1024,
}
GRANITE_HYBRID: Config = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "layer_types": ["mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "attention"],
    "logits_scaling": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 128,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_proj_bias": False,
    "max_position_embeddings": 4096,
    "model_type": "granitemoehybrid",
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "shared_intermediate_size": 512,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def mamba(hidden: int, layers: int) -> Config:
    """A size of Mamba-2."""
    return {**MAMBA2, "hidden_size": hidden, "num_hidden_layers": layers, "num_heads": hidden // 32}


def nemotron(pattern: str, hidden: int, inner: int, heads: int, states: int, **more: object) -> Config:
    """A size of Nemotron-H: heads of attention, and of states."""
    return {
        **NEMOTRON_H,
        "hybrid_override_pattern": pattern,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "mamba_num_heads": states,
        **more,
    }


def qwen(hidden: int, layers: int, heads: tuple[int, int], inner: int, states: int, *, tied: bool = False) -> Config:
    """A size of Qwen3.5: heads of attention and of its keys, and of states."""
    return {
        **QWEN35,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": inner,
        "linear_num_value_heads": states,
        "tie_word_embeddings": tied,
    }


def qwen_mixture(hidden: int, layers: int, heads: int, inner: int, *, states: int, **more: int) -> Config:
    """The same of a mixture: its experts, and those of a token."""
    return {
        **qwen(hidden, layers, (heads, 2), 0, states),
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
        **more,
    }


PATTERN_52 = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
PATTERN_56 = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
PATTERN_62 = "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-"
PATTERN_98 = "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
PATTERN_118 = "M-M-M-M*-" + 9 * "M-M-M-M-M*-" + "M-M-M-M-M-"
NANO_V2: Config = {"mamba_head_dim": 80, "max_position_embeddings": 131072}
NANO_3: Config = {
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}

HYBRIDS: dict[str, Config] = {
    "state-spaces/mamba2-130m": mamba(768, 24),
    "state-spaces/mamba2-370m": mamba(1024, 48),
    "state-spaces/mamba2-780m": mamba(1536, 48),
    "state-spaces/mamba2-1.3b": mamba(2048, 48),
    "state-spaces/mamba2-2.7b": mamba(2560, 64),
    "nvidia/Nemotron-H-4B-Base-8K": nemotron(PATTERN_52, 3072, 12288, 32, 112),
    "nvidia/Nemotron-H-8B-Base-8K": nemotron(PATTERN_52, 4096, 21504, 32, 128),
    "nvidia/Nemotron-H-47B-Base-8K": nemotron(PATTERN_98, 8192, 30720, 64, 256, ssm_state_size=256),
    "nvidia/Nemotron-H-56B-Base-8K": nemotron(PATTERN_118, 8192, 32768, 64, 256, ssm_state_size=256),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": nemotron(PATTERN_56, 4480, 15680, 40, 128, **NANO_V2),
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2": nemotron(PATTERN_62, 5120, 20480, 40, 128, **NANO_V2),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": nemotron(
        5 * "MEMEM*E" + "MEMEMEM*EMEMEMEME", 2688, 1856, 32, 64, **NANO_3
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": QWEN3_NEXT,
    "Qwen/Qwen3.5-0.8B": qwen(1024, 24, (8, 2), 3584, 16, tied=True),
    "Qwen/Qwen3.5-2B": qwen(2048, 24, (8, 2), 6144, 16, tied=True),
    "Qwen/Qwen3.5-4B": qwen(2560, 32, (16, 4), 9216, 32, tied=True),
    "Qwen/Qwen3.5-9B": qwen(4096, 32, (16, 4), 12288, 32),
    "Qwen/Qwen3.5-27B": qwen(5120, 64, (24, 4), 17408, 48),
    "Qwen/Qwen3.5-35B-A3B": qwen_mixture(2048, 40, 16, 512, states=32, num_experts=256, num_experts_per_tok=8),
    "Qwen/Qwen3.5-122B-A10B": qwen_mixture(3072, 48, 32, 1024, states=64, num_experts=256, num_experts_per_tok=8),
    "Qwen/Qwen3.5-397B-A17B": qwen_mixture(4096, 60, 32, 1024, states=64, num_experts=512, num_experts_per_tok=10),
    "ibm-ai-platform/Bamba-9B-v1": BAMBA,
    "granite-hybrid-tiny": GRANITE_HYBRID,
}
HYBRIDS_COUNTED = {
    # As the classes of transformers count them on the device `meta`: no layer for a further token, no vision part.
    "mamba2-130m": 128_989_632,
    "mamba2-370m": 368_346_624,
    "mamba2-780m": 780_161_280,
    "mamba2-1.3b": 1_343_757_312,
    "mamba2-2.7b": 2_702_599_680,
    "nemotron-h-4b": 4_489_223_040,
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-h-47b": 46_791_554_816,
    "nemotron-h-56b": 56_324_350_464,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "nemotron-nano-12b-v2": 12_310_001_152,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-2b": 1_881_825_088,
    "qwen3.5-4b": 4_205_751_296,
    # Of the whole model, without its vision part of 456,010,480.
    "qwen3.5-9b": 9_409_813_744 - 456_010_480,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-122b-a10b": 122_111_526_912,
    "qwen3.5-397b-a17b": 396_346_350_336,
}
