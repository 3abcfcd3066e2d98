"""Every family of the hub that is trained, beside `transformers`: parameters, loss, gradients, checkpoint.

A tiny random network of `transformers` is saved, read here, stepped by the streaming executor in fp32, changed, saved
here and read back by `transformers`. Everything is compared with what its own classes compute.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from flopwise.catalog.huggingface import from_config  # noqa: E402
from flopwise.catalog.huggingface_families import FAMILIES  # noqa: E402
from flopwise.engine.batch import NO_LABEL, Batch  # noqa: E402
from flopwise.engine.executable import check_trainable  # noqa: E402
from flopwise.engine.modules import build  # noqa: E402
from flopwise.engine.weights.huggingface import config_of, family_of, from_huggingface, to_huggingface  # noqa: E402
from flopwise.work.describe import describe  # noqa: E402
from flopwise.work.parameters import parameters_of  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.support import tiny_models  # noqa: E402, F401 - tells `transformers` not to look for files elsewhere
from tests.support.training_plans import cut_plan, everything_stays, executor_for, first_gradients  # noqa: E402

SEQUENCES, TOKENS = 2, 23
SHORTER = np.array([TOKENS, 14], dtype=np.int32)
"""Tokens of each of an encoder's sequences."""
LABELS = 3
PAD = 1
FP32 = "fp32"

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}


MASKED, CLASSIFIER = "MaskedLM", "SequenceClassification"


@dataclass(frozen=True)
class Case:
    """A `model_type` with its settings."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    grouped: bool = True
    """Whether the family has fewer key heads than query heads."""
    head: str = "CausalLM"
    """As the names of its class end."""
    attention: str = "eager"

    def table(self) -> dict[str, Any]:
        heads = {"num_key_value_heads": 2} if self.grouped else {}
        labels = {"num_labels": LABELS} if self.head == CLASSIFIER else {}
        return {**SIZES, **heads, **labels, **self.settings}

    @property
    def kind(self) -> Any:
        """The class of `transformers` that finds its own."""
        import transformers

        return getattr(transformers, f"AutoModelFor{self.head}")


def llama(**rope: Any) -> Case:
    return Case("llama", {"rope_scaling": rope, "rope_theta": 100.0})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.4],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}

MODERN = {
    "num_hidden_layers": 4,
    "local_attention": 6,
    "classifier_pooling": "mean",
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 300.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
    },
}
FALCON_RW = {"alibi": True, "parallel_attn": False, "multi_query": False}

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
"""With a loss that balances experts."""

CORRECTED = {
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
}
"""Experts as DeepSeek-V3 has them."""

LLAMA4 = {
    "head_dim": 8,
    "intermediate_size": 12,
    "intermediate_size_mlp": 20,
    "num_local_experts": 4,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 7,
    "floor_scale": 5,
    "attn_scale": 0.3,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
    },
}
"""Blocks without positions, whose queries are scaled, among others; one of four experts, weighed on its input."""

LATENT = {
    **CORRECTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "norm_topk_prob": True,
}
"""Attention as DeepSeek-V3 has it."""
SOFTMAX = {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.5}

DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
    # What is read of a state may be almost nothing, which a norm of it would make as large as the rest, errors and all.
    "rms_norm_eps": 0.05,
    "initializer_range": 0.1,
}
SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
MAMBA = {
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
    "residual_in_fp32": False,
}
NEMOTRON_H = {
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "ssm_state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
    "residual_in_fp32": False,
    "rescale_prenorm_residual": False,
    "time_step_min": 0.3,
    "layer_norm_epsilon": 0.05,
}
GRANITE_SCALES = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 6.0,
}
GRANITE_4 = {
    **GRANITE_SCALES,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
"""Blocks that carry a state, tiny."""

ZOO = {
    "llama": Case("llama"),
    "llama-tied": Case("llama", {"tie_word_embeddings": True, "head_dim": 6}),
    "llama-biased": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-quick-gelu": Case("llama", {"hidden_act": "quick_gelu"}),
    "llama-relu2": Case("llama", {"hidden_act": "relu2"}),
    "llama-3.1": llama(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "llama-linear": llama(rope_type="linear", factor=3.0),
    "llama-dynamic": Case("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "rope_theta": 100.0}),
    "llama-dynamic-beyond": Case(
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "rope_theta": 100.0, "max_position_embeddings": 16},
    ),
    "llama-yarn": llama(**YARN),
    "llama-yarn-betas": llama(**YARN, beta_fast=4.0, beta_slow=0.5, truncate=False, attention_factor=1.25),
    "llama-yarn-mscale": llama(**YARN, mscale=0.7, mscale_all_dim=1.3),
    "llama-longrope": llama(**LONG, factor=4.0, original_max_position_embeddings=16),
    "llama-longrope-short": llama(**LONG, factor=2.0, original_max_position_embeddings=32, attention_factor=1.1),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral-window": Case("mistral", {"sliding_window": 5, "head_dim": 10}),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": Case("qwen2", {"rope_scaling": YARN, "rope_theta": 100.0}),
    "qwen2-window": Case("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": Case("qwen3", {"head_dim": 10, "attention_bias": True}),
    "qwen3-yarn": Case("qwen3", {"head_dim": 8, "rope_scaling": YARN, "rope_theta": 100.0}),
    "qwen2-some-windows": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_theta": 100.0}
    ),
    "qwen3-some-windows": Case(
        "qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral": Case("ministral", {"sliding_window": 5, "head_dim": 8}),
    "ministral-some-windows": Case(
        "ministral",
        {
            "head_dim": 10,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "smollm3": Case("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3-rotary": Case("smollm3", {"no_rope_layers": [1, 1, 1], "tie_word_embeddings": False}),
    "olmo3": Case("olmo3", {"sliding_window": 6, "num_hidden_layers": 4}),
    "olmo3-yarn": Case(
        "olmo3", {"sliding_window": 6, "num_hidden_layers": 4, "rope_scaling": YARN, "rope_theta": 90.0}
    ),
    "cohere2": Case("cohere2", {"sliding_window": 6, "num_hidden_layers": 4, "logit_scale": 0.25}),
    "gemma": Case("gemma", {"head_dim": 12}),
    "gemma2": Case("gemma2", {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "gemma2-uncapped": Case(
        "gemma2",
        {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": None, "final_logit_softcapping": 2.0},
    ),
    "gemma2-capped": Case(
        "gemma2",
        {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 1.5, "final_logit_softcapping": None},
    ),
    "gemma3": Case("gemma3_text", {"head_dim": 12, "sliding_window": 6, "sliding_window_pattern": 2}),
    "gemma3-scaled": Case(
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
            "rope_theta": 300.0,
            "rope_local_base_freq": 40.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "query_pre_attn_scalar": 8,
        },
    ),
    "gpt2": Case("gpt2", {"n_inner": 45, "activation_function": "gelu_new"}, grouped=False),
    "gpt2-unscaled": Case("gpt2", {"n_inner": 45, "scale_attn_weights": False}, grouped=False),
    "gpt_neox": Case("gpt_neox", {"use_parallel_residual": True}, grouped=False),
    "gpt_neox-one-after-another": Case(
        "gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False}, grouped=False
    ),
    "mpt": Case("mpt", {"max_seq_len": 64, "no_bias": True}, grouped=False),
    "mpt-six-heads": Case(
        "mpt", {"max_seq_len": 40, "n_heads": 6, "d_model": 36, "attn_config": {"softmax_scale": 0.3}}, grouped=False
    ),
    "bloom": Case("bloom", {"n_layer": 3, "n_head": 4}, grouped=False),
    "falcon-7b": Case("falcon", grouped=False),
    # Their eager attention adds the biases twice, beside the mask and in it.
    "falcon-rw": Case("falcon", {**FALCON_RW, "bias": True}, grouped=False, attention="sdpa"),
    "falcon-rw-six-heads": Case(
        "falcon",
        {**FALCON_RW, "hidden_size": 36, "num_attention_heads": 6, "activation": "relu"},
        grouped=False,
        attention="sdpa",
    ),
    "falcon-40b": Case("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, grouped=False),
    "falcon-11b": Case(
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 40,
            "tie_word_embeddings": False,
        },
        grouped=False,
    ),
    "gptj": Case("gptj", {"n_inner": 45, "rotary_dim": 4}, grouped=False),
    "opt": Case("opt", {"ffn_dim": 45, "word_embed_proj_dim": 32}, grouped=False),
    "opt-unbiased": Case("opt", {"ffn_dim": 45, "enable_bias": False, "activation_function": "gelu"}, grouped=False),
    "nemotron": Case("nemotron", {"mlp_bias": True}),
    "exaone4": Case("exaone4", {"sliding_window": 6, "sliding_window_pattern": 2}),
    "exaone4-full": Case("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ernie4_5": Case("ernie4_5", {"head_dim": 10, "use_bias": True}),
    "phi": Case("phi"),
    "phi3": Case("phi3"),
    "phi3-partial-window": Case("phi3", {"partial_rotary_factor": 0.75, "sliding_window": 7}),
    "phi3-longrope": Case(
        "phi3",
        {
            "rope_scaling": {**LONG, "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 2.0, 3.0]},
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 16,
        },
    ),
    "starcoder2": Case("starcoder2"),
    "starcoder2-unbiased": Case("starcoder2", {"use_bias": False, "sliding_window": 6, "tie_word_embeddings": False}),
    "stablelm": Case("stablelm"),
    "stablelm-parallel": Case("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "arcee": Case("arcee", {"mlp_bias": True}),
    "olmo2": Case("olmo2"),
    "olmo2-biased": Case("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "granite": Case(
        "granite",
        {**GRANITE_SCALES, "tie_word_embeddings": True, "mlp_bias": True},
    ),
    "glm": Case("glm", {"head_dim": 8}),
    "glm4": Case("glm4", {"head_dim": 8}),
    "glm4-whole": Case("glm4", {"head_dim": 12, "partial_rotary_factor": 1.0, "attention_bias": False}),
    "cohere": Case("cohere", {"logit_scale": 0.25}),
    "cohere-untied": Case("cohere", {"tie_word_embeddings": False, "attention_bias": True}),
    "mixtral": Case("mixtral", {"num_local_experts": 4}),
    "mixtral-window": Case(
        "mixtral", {**BALANCED, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 7}
    ),
    "qwen2_moe": Case(
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
        },
    ),
    "glm4_moe": Case("glm4_moe", {**CORRECTED, "head_dim": 8, "attention_bias": True}),
    "glm4_moe-normed": Case(
        "glm4_moe", {**CORRECTED, "head_dim": 12, "use_qk_norm": True, "n_group": 1, "topk_group": 1}
    ),
    "qwen3_moe": Case("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 1, "moe_intermediate_size": 12}),
    "qwen3_moe-normalised": Case(
        "qwen3_moe",
        {
            **BALANCED,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "head_dim": 6,
        },
    ),
    "gpt_oss": Case(
        "gpt_oss",
        {
            "head_dim": 6,
            "sliding_window": 5,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**YARN, "rope_theta": 90.0, "truncate": False},
        },
    ),
    "llama4_text": Case("llama4_text", LLAMA4),
    "llama4_text-maverick": Case(
        "llama4_text",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 90.0},
            "num_experts_per_tok": 2,
            "attention_bias": True,
        },
    ),
    "olmoe": Case("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": True}),
    "deepseek_v3": Case("deepseek_v3", LATENT, grouped=False),
    "deepseek_v3-yarn": Case(
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        grouped=False,
    ),
    "deepseek_v2": Case("deepseek_v2", {**LATENT, **SOFTMAX, "q_lora_rank": None}, grouped=False),
    "deepseek_v2-groups": Case(
        "deepseek_v2",
        {
            **LATENT,
            **SOFTMAX,
            "topk_method": "group_limited_greedy",
            "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
        grouped=False,
    ),
    "qwen3_next": Case("qwen3_next", {**DELTA, **SPARSE}),
    "qwen3_next-listed": Case(
        "qwen3_next",
        {
            **DELTA,
            **SPARSE,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 1.0,
        },
    ),
    "qwen3_5_text": Case("qwen3_5_text", {**DELTA, "rope_parameters": {"rope_theta": 70.0, "rope_type": "default"}}),
    "qwen3_5_text-tied": Case("qwen3_5_text", {**DELTA, "tie_word_embeddings": True, "linear_num_value_heads": 6}),
    "qwen3_5_moe_text": Case("qwen3_5_moe_text", {**DELTA, **SPARSE}),
    "mamba2": Case("mamba2", MAMBA, grouped=False),
    "mamba2-tied": Case(
        "mamba2",
        {**MAMBA, "tie_word_embeddings": True, "use_bias": True, "use_conv_bias": False, "time_step_limit": [0.2, 0.8]},
        grouped=False,
    ),
    "nemotron_h": Case("nemotron_h", {**NEMOTRON_H, "hybrid_override_pattern": "M-M*-"}),
    "nemotron_h-experts": Case(
        "nemotron_h",
        {
            **NEMOTRON_H,
            **CORRECTED,
            "hybrid_override_pattern": "ME*E",
            "moe_shared_expert_intermediate_size": 20,
            "n_shared_experts": 1,
        },
    ),
    "bamba": Case(
        "bamba",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 6,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 8,
        },
    ),
    "granitemoe": Case("granitemoe", {**GRANITE_SCALES, "num_local_experts": 4, **BALANCED}),
    "granitemoeshared": Case(
        "granitemoeshared",
        {**GRANITE_SCALES, "num_local_experts": 4, "shared_intermediate_size": 20, "tie_word_embeddings": True},
    ),
    "granitemoehybrid": Case(
        "granitemoehybrid",
        {**GRANITE_4, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 20},
    ),
    "granitemoehybrid-dense": Case(
        "granitemoehybrid",
        {
            **GRANITE_4,
            "num_local_experts": 0,
            "shared_intermediate_size": 20,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "seed_oss": Case("seed_oss", {"head_dim": 8, "attention_out_bias": True}),
    "modernbert-biased": Case(
        "modernbert",
        {
            **MODERN,
            "pad_token_id": PAD,
            "classifier_pooling": "cls",
            "hidden_activation": "relu",
            "classifier_activation": "silu",
            **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
        },
        grouped=False,
        head=CLASSIFIER,
    ),
    "modernbert-unbiased": Case(
        "modernbert",
        {**MODERN, "pad_token_id": PAD, "decoder_bias": False, "layer_types": ["sliding_attention"] * 4},
        grouped=False,
        head=MASKED,
    ),
    **{
        f"{family}-{head}": Case(family, {"pad_token_id": PAD, **settings}, grouped=False, head=head)
        for family, settings in (
            ("bert", {"hidden_act": "relu"}),
            ("roberta", {"max_position_embeddings": 30, "type_vocab_size": 1}),
            ("xlm-roberta", {"type_vocab_size": 1}),
            ("electra", {"embedding_size": 32, "type_vocab_size": 2, "hidden_act": "relu"}),
            ("modernbert", MODERN),
            ("distilbert", {"dim": 32, "n_heads": 4, "n_layers": 3, "hidden_dim": 44, "activation": "relu"}),
        )
        for head in (MASKED, CLASSIFIER)
    },
}


@cache
def theirs(name: str) -> Any:
    """The network of `transformers`, every number of it random."""
    case = ZOO[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        config = transformers.AutoConfig.for_model(case.family, **case.table())
        config._attn_implementation = case.attention
        torch.manual_seed(3)
        network = case.kind.from_config(config).float().eval()
    with torch.no_grad():
        for parameter_name, value in network.named_parameters():
            if value.ndim == 1 or parameter_name.endswith("_bias"):
                norm = "norm" in parameter_name.lower() and parameter_name.endswith("weight")
                adds_one = (
                    case.family.startswith(("gemma", "qwen3_next", "qwen3_5")) and ".linear_attn." not in parameter_name
                )
                centre = 1.0 if norm and not adds_one else 0.0
                value.copy_(centre + 0.2 * torch.randn_like(value))
        for buffer_name, value in network.named_buffers():
            if buffer_name.endswith("correction_bias"):
                value.copy_(0.3 * torch.randn_like(value))
    return network


def saved(network: Any, folder: Path) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def described(name: str, folder: Path) -> Transformer:
    """What we read of the network's file."""
    table = json.loads((folder / "config.json").read_text("utf-8"))
    model = from_config(table, name)
    assert model.note is None
    # What training drops is compared elsewhere: here both evaluate.
    return replace(model, dropout=None)


def batch_for(model: Transformer) -> Batch:
    """Random tokens; an encoder's sequences are of uneven length."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(PAD + 1, SIZES["vocab_size"], (SEQUENCES, TOKENS), generator=generator)
    labels = torch.randint(0, SIZES["vocab_size"], (SEQUENCES, TOKENS), generator=generator)
    labels[torch.rand((SEQUENCES, TOKENS), generator=generator) < 0.2] = NO_LABEL
    if model.causal:
        return Batch(ids.numpy().astype(np.int32), labels.numpy().astype(np.int32))
    behind = torch.arange(TOKENS) >= torch.from_numpy(SHORTER)[:, None]
    ids[behind], labels[behind] = PAD, NO_LABEL
    if model.head == "classifier":
        labels = labels[:, 0] % LABELS
    types = None
    if model.token_types > 1:
        # Pairs: the second text of each begins somewhere else.
        types = (torch.arange(TOKENS) >= torch.tensor([[9], [4]])).numpy().astype(np.int32)
    return Batch(ids.numpy().astype(np.int32), labels.numpy().astype(np.int32), SHORTER, types=types)


def given(batch: Batch) -> dict[str, Any]:
    """What `transformers` is called with."""
    ids = torch.from_numpy(batch.ids).long()
    lengths = torch.full((SEQUENCES,), TOKENS) if batch.lengths is None else torch.from_numpy(batch.lengths)
    seen = (torch.arange(TOKENS) < lengths[:, None]).long()
    more: dict[str, Any] = {"use_cache": False} if batch.lengths is None else {}
    if batch.types is not None:
        more["token_type_ids"] = torch.from_numpy(batch.types).long()
    return {"input_ids": ids, "attention_mask": seen, **more}


def their_loss(network: Any, batch: Batch) -> Tensor:
    made = network(**given(batch))
    logits = made.logits
    labels = torch.from_numpy(batch.labels).long().flatten()
    loss: Tensor = torch.nn.functional.cross_entropy(logits.reshape(labels.numel(), -1), labels, ignore_index=NO_LABEL)
    if getattr(network.config, "output_router_logits", False) and "aux_loss" in made:
        loss = loss + network.config.router_aux_loss_coef * made.aux_loss
    return loss


def their_gradients(network: Any, model: Transformer, batch: Batch, folder: Path) -> tuple[float, dict[str, Tensor]]:
    """The loss, and gradients under our names: saved and read as weights are."""
    network.zero_grad()
    loss = their_loss(network, batch)
    torch.autograd.backward(loss)
    before = {name: value.detach().clone() for name, value in network.named_parameters()}
    with torch.no_grad():
        for _, value in network.named_parameters():
            value.copy_(value.grad)
        try:
            found = from_huggingface(model, saved(network, folder), TOKENS).tensors
        finally:
            for name, value in network.named_parameters():
                value.copy_(before[name])
    trained = {parameter.name for parameter in parameters_of(model, TOKENS) if parameter.trained}
    return float(loss.detach()), {name: value.clone() for name, value in found.items() if name in trained}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of a tensor, relative to its largest number."""
    assert found.keys() == expected.keys()
    pairs = ((found[name].double(), expected[name].double(), name) for name in expected)
    return max(
        (float((one - other).abs().max() / other.abs().max().clamp_min(1e-12)), name) for one, other, name in pairs
    )


@pytest.mark.parametrize("name", ZOO)
def test_parameters_are_counted_as_transformers_has_them(name: str, tmp_path: Path) -> None:
    network = theirs(name)
    saved(network, tmp_path)
    model = described(name, tmp_path)
    assert describe(model, TOKENS).parameters == sum(value.numel() for value in network.parameters())
    check_trainable(model)


@pytest.mark.parametrize("name", ZOO)
def test_loss_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    network = theirs(name)
    tensors = saved(network, tmp_path)
    model = described(name, tmp_path)
    weights = from_huggingface(model, tensors, TOKENS).tensors
    batch = batch_for(model)
    loss, expected = their_gradients(network, model, batch, tmp_path / "gradients")
    whole = everything_stays(model, sequence=TOKENS, sequences=SEQUENCES, precision=FP32)
    cut = [
        # What a classifier averages is in one piece, and so is what a state is carried along.
        cut_plan(
            model,
            sequence=TOKENS,
            chunk=TOKENS if model.uncut else 9,
            letters="iF",
            attention=attention,
            groups=SEQUENCES,
            precision=FP32,
        )
        # Where tokens see those behind them, all of a sequence is needed at once.
        for attention in (("chunk", "sequence") if model.causal else ("sequence",))
    ]
    for plan in (whole, *cut):
        executor = executor_for(plan, model, weights)
        assert executor.step(batch, 0).loss == pytest.approx(loss, rel=1e-6)
        error, parameter = worst(first_gradients(executor), expected)
        assert error < 1e-5, parameter
    if model.routing.has_losses:
        # Several devices do not compute them.
        return
    # What several devices run.
    module = build(model, TOKENS, dtype=torch.float32, device="cpu")
    module.load_state_dict(weights)
    ids, labels = torch.from_numpy(batch.ids), torch.from_numpy(batch.labels)
    lengths = None if batch.lengths is None else torch.from_numpy(batch.lengths)
    types = None if batch.types is None else torch.from_numpy(batch.types)
    summed = module.loss(ids, labels, lengths, types=types) / batch.with_loss
    assert float(summed.detach()) == pytest.approx(loss, rel=1e-6)
    torch.autograd.backward(summed)
    gradients = {name: value.grad for name, value in module.named_parameters() if value.grad is not None}
    error, parameter = worst(gradients, expected)
    assert error < 1e-5, parameter


@pytest.mark.parametrize("name", ZOO)
def test_transformers_reads_our_checkpoint(name: str, tmp_path: Path) -> None:
    network = theirs(name)
    tensors = saved(network, tmp_path)
    model = described(name, tmp_path)
    assert family_of(model) == ZOO[name].family
    assert from_config(config_of(model), name).routing == model.routing
    # Changed, as an update changes them.
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: value * (1 + 0.1 * torch.randn(value.shape, generator=generator))
        for name, value in from_huggingface(model, tensors, TOKENS).tensors.items()
    }
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "config.json").write_text(json.dumps(config_of(model)), encoding="utf-8")
    written = {name: value.contiguous() for name, value in to_huggingface(model, weights).items()}
    save_file(written, ours / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read, told = ZOO[name].kind.from_pretrained(
            ours, dtype=torch.float32, output_loading_info=True, attn_implementation=ZOO[name].attention
        )
    assert type(read) is type(network)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    module = build(model, TOKENS, dtype=torch.float32, device="cpu")
    module.load_state_dict(weights)
    batch = batch_for(model)
    lengths = None if batch.lengths is None else torch.from_numpy(batch.lengths)
    with torch.no_grad():
        types = None if batch.types is None else torch.from_numpy(batch.types)
        expected = read.eval()(**given(batch)).logits
        found = module(torch.from_numpy(batch.ids), lengths, types=types)
    for row in range(SEQUENCES):
        # What is behind a sequence nobody reads.
        last = TOKENS if lengths is None or model.head == "classifier" else int(lengths[row])
        torch.testing.assert_close(found[row, :last], expected[row, :last], rtol=2e-5, atol=2e-5)


def test_the_zoo_has_every_family() -> None:
    # The network of DeepSeek-V3 under another name, for which transformers has no class.
    assert {case.family for case in ZOO.values()} == {*FAMILIES} - {"kimi_k2"}


def test_the_documents_name_every_family() -> None:
    """docs/train.md those that are trained, docs/predict.md those that are only predicted as well."""
    docs = Path(__file__).parents[2] / "docs"
    listed = docs.joinpath("train.md").read_text("utf-8").partition("by `model_type`: ")[2].partition(".")[0]
    trained = sorted({case.family for case in ZOO.values()})
    assert [name.strip(" `\n") for name in listed.split(",")] == trained
    read = docs.joinpath("predict.md").read_text("utf-8")
    assert all(f"`{name}`" in read for name in set(FAMILIES) - set(trained))
