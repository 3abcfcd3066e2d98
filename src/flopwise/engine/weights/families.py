"""How each family of `transformers` names its tensors and writes the description of its networks into a `config.json`.

The other direction, from a file to a description, is `catalog.huggingface_families`; `huggingface.family_of` holds the
two against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flopwise.engine.weights.initial import LEAST_DEVIATION
from flopwise.work.attention_kinds import RotaryScaling
from flopwise.work.transformer import Dropout, Transformer

NO_SPECIAL_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id"))
"""Until a tokenizer tells them; without the keys `transformers` would take those of the first model of the family."""
NO_PADDING = {"pad_token_id": None}
"""The same of the token whose embedding gets no gradient."""

# -- names ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Names:
    """How a family calls the parts of a layer and of the ends."""

    layers: str
    layer: Mapping[str, tuple[str, ...]]
    ends: Mapping[str, str]
    transposed: bool = False
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What each expert of a mixture calls its matrices."""
    expert: str = "mlp.experts.{}"
    """A mixture's experts, by number."""
    stacked: Mapping[str, str] = field(default_factory=dict)
    """What lies in the file as one tensor for all experts, with inputs as rows."""
    pairs_stacked: bool = True
    """Whether gate and up take turns there, number by number."""
    shared: str = ""
    """What every token goes through beside its experts."""
    heads_together: bool = False
    """Whether the rows of queries, keys and values lie together by key head, not all queries before all keys."""
    gated_heads: bool = False
    """Whether each head's query and gate lie together."""
    states_by_key: bool = False
    """Whether what makes states, their keys and gates lies together by key head."""


LLAMA_LAYER = {
    "norm1": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "query_norm": ("self_attn.q_norm",),
    "key_norm": ("self_attn.k_norm",),
    "output": ("self_attn.o_proj",),
    "norm2": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "up": ("mlp.up_proj",),
    "down": ("mlp.down_proj",),
}
LLAMA_ENDS = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


def like_llama(*, final_norm: str = LLAMA_ENDS["final_norm"], **layer: str | tuple[str, ...]) -> Names:
    """Llama's names but for these."""
    own = {module: (name,) if isinstance(name, str) else name for module, name in layer.items()}
    return Names("model.layers", {**LLAMA_LAYER, **own}, {**LLAMA_ENDS, "final_norm": final_norm})


NORMS_BEHIND = {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}
NORMS_AROUND = {
    "attention_norm": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "feed_norm": "post_feedforward_layernorm",
}
FUSED_GATE = {"gate_up": "mlp.gate_up_proj"}
BLOOM_LAYER = {
    "norm1": ("input_layernorm",),
    "norm2": ("post_attention_layernorm",),
    "qkv": ("self_attention.query_key_value",),
    "output": ("self_attention.dense",),
    "up": ("mlp.dense_h_to_4h",),
    "down": ("mlp.dense_4h_to_h",),
}
BLOOM_ENDS = {"embedding": "transformer.word_embeddings", "final_norm": "transformer.ln_f", "head": "lm_head"}


# -- configurations ---------------------------------------------------------------------------------------------------

Config = dict[str, Any]


def activation_of(model: Transformer) -> str:
    """The name in `transformers` of a description's activation."""
    return "gelu_pytorch_tanh" if model.activation == "gelu_tanh" else model.activation


def rotary_scaling_of(scaling: RotaryScaling | None) -> Config | None:
    """`rope_scaling` of a description."""
    if scaling is None:
        return None
    found: Config = {"rope_type": scaling.method, "factor": scaling.factor}
    if scaling.method == "llama3":
        found["low_freq_factor"] = scaling.low_frequency_factor
        found["high_freq_factor"] = scaling.high_frequency_factor
    elif scaling.method == "longrope":
        found |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    elif scaling.method == "yarn":
        more = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
        found |= {name: getattr(scaling, name) for name in more if getattr(scaling, name) is not None}
    if scaling.method in ("llama3", "longrope", "yarn"):
        found["original_max_position_embeddings"] = scaling.original_context
    if scaling.attention_factor is not None:
        found["attention_factor"] = scaling.attention_factor
    return found


def share_turned(model: Transformer) -> float:
    """The share of a head's channels that rotary positions turn."""
    return model.turned_channels / model.head_dim


def inverse(scale: float) -> float:
    """1 ÷ scale as a file would have it: the round number, where there is one whose inverse the scale is."""
    found = 1.0 / scale
    near = float(f"{found:.12g}")
    return near if 1.0 / near == scale else found


def usual_config(model: Transformer) -> Config:
    """The keys that most decoders share."""
    dropout = model.dropout or Dropout()
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "hidden_act": activation_of(model),
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": rotary_scaling_of(model.rotary_scaling),
        "tie_word_embeddings": model.tied,
        "initializer_range": LEAST_DEVIATION,
        "attention_dropout": dropout.attention,
        **NO_SPECIAL_TOKENS,
        **NO_PADDING,
    }


def _gpt_neox(model: Transformer) -> Config:
    dropout = model.dropout or Dropout()
    return {
        "attention_bias": model.qkv_bias,
        "use_parallel_residual": model.parallel_residual,
        "layer_norm_eps": model.norm_epsilon,
        "rotary_pct": share_turned(model),
        "rotary_emb_base": model.rotary_base,
        "hidden_dropout": dropout.hidden,
    }


def _phi(model: Transformer) -> Config:
    dropout = model.dropout or Dropout()
    return {
        "layer_norm_eps": model.norm_epsilon,
        "partial_rotary_factor": share_turned(model),
        "resid_pdrop": dropout.hidden,
        "embd_pdrop": dropout.embedding,
    }


def _phi3(model: Transformer) -> Config:
    scaling = model.rotary_scaling
    original = scaling.original_context if scaling is not None and scaling.method == "longrope" else None
    return {
        "sliding_window": model.window,
        "partial_rotary_factor": share_turned(model),
        "resid_pdrop": (model.dropout or Dropout()).hidden,
        "original_max_position_embeddings": original or model.context,
    }


def _starcoder2(model: Transformer) -> Config:
    dropout = model.dropout or Dropout()
    return {
        "use_bias": model.qkv_bias,
        "norm_epsilon": model.norm_epsilon,
        "sliding_window": model.window,
        "residual_dropout": dropout.hidden,
        "embedding_dropout": dropout.embedding,
    }


def _stablelm(model: Transformer) -> Config:
    return {
        "use_qkv_bias": model.qkv_bias,
        "use_parallel_residual": model.parallel_residual,
        "layer_norm_eps": model.norm_epsilon,
        "partial_rotary_factor": share_turned(model),
    }


def _granite(model: Transformer) -> Config:
    return {"attention_bias": model.qkv_bias, "mlp_bias": model.ffn_bias, **granite_scales(model)}


def granite_scales(model: Transformer) -> Config:
    """What Granite multiplies by."""
    return {
        "embedding_multiplier": model.embedding_scale,
        "residual_multiplier": model.residual_scale,
        "attention_multiplier": model.score_scale,
        "logits_scaling": inverse(model.logit_scale),
    }


def _glm(model: Transformer) -> Config:
    return {
        "head_dim": model.head_dim,
        "attention_bias": model.qkv_bias,
        "partial_rotary_factor": share_turned(model),
    }


def _cohere(model: Transformer) -> Config:
    return {
        "attention_bias": model.qkv_bias,
        "layer_norm_eps": model.norm_epsilon,
        "logit_scale": model.logit_scale,
        "use_qk_norm": False,
    }


def layer_types(model: Transformer) -> list[str]:
    """The kind of each block."""
    windows = (model.kind_of(layer).window for layer in range(model.layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def windows_of(model: Transformer) -> Config:
    """How far the blocks of each kind look back."""
    return {"sliding_window": model.window, "layer_types": layer_types(model)}


def _full(model: Transformer) -> Transformer:
    """The kind that looks back over everything; where there is none, the only one."""
    return next((kind for kind in model.kinds if kind.window is None), model)


def _gemma(model: Transformer) -> Config:
    return {"head_dim": model.head_dim, "attention_bias": model.qkv_bias}


def _gemma2(model: Transformer) -> Config:
    return {
        **_gemma(model),
        **windows_of(model),
        "hidden_activation": activation_of(model),
        "query_pre_attn_scalar": _squared(1.0 / model.score_scale),
        "attn_logit_softcapping": model.attention_cap,
        "final_logit_softcapping": model.logit_cap,
    }


def _squared(root: float) -> float:
    """The round number that a root is of, where there is one."""
    whole = round(root * root)
    return whole if abs(root * root - whole) < 1e-6 * whole else root * root


def _gemma3(model: Transformer) -> Config:
    full = _full(model)
    local = {} if model.window is None else {"rope_local_base_freq": model.rotary_base}
    return {
        **_gemma2(model),
        "rope_theta": full.rotary_base,
        **local,
        "rope_scaling": rotary_scaling_of(full.rotary_scaling),
    }


def _olmo3(model: Transformer) -> Config:
    full = _full(model)
    plain = {"rope_type": "default"}
    groups = {
        "full_attention": (rotary_scaling_of(full.rotary_scaling) or plain) | {"rope_theta": full.rotary_base},
        "sliding_attention": plain | {"rope_theta": model.rotary_base},
    }
    return {
        "attention_bias": model.qkv_bias,
        **windows_of(model),
        # Of the older keys `transformers` takes the base for one kind alone.
        "rope_theta": full.rotary_base,
        "rope_scaling": None,
        "rope_parameters": groups,
    }


def _smollm3(model: Transformer) -> Config:
    turns = [int(model.kind_of(layer).positions == "rotary") for layer in range(model.layers)]
    return {
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.ffn_bias,
        "use_sliding_window": False,
        "no_rope_layers": turns,
        "layer_types": ["full_attention"] * model.layers,
    }


def _seed_oss(model: Transformer) -> Config:
    return {
        "head_dim": model.head_dim,
        "attention_bias": model.qkv_bias,
        "attention_out_bias": model.output_bias,
        "mlp_bias": model.ffn_bias,
        "residual_dropout": (model.dropout or Dropout()).hidden,
    }


def _own_nothing(_: Transformer) -> Config:
    return {}


def _mpt(model: Transformer) -> Config:
    dropout = model.dropout or Dropout()
    attention = {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_type": "multihead_attention",
        # Its class takes whole numbers alone, which no share but this is.
        "attn_pdrop": dropout.attention or 0,
        "softmax_scale": model.attention_scale,
    }
    return {
        "d_model": model.hidden,
        "n_heads": model.heads,
        "n_layers": model.layers,
        "expansion_ratio": max(1, model.ffn // model.hidden),
        "max_seq_len": model.context,
        "layer_norm_epsilon": model.norm_epsilon,
        "no_bias": True,
        "attn_config": attention,
        "resid_pdrop": dropout.hidden,
        "emb_pdrop": dropout.embedding,
    }


def _bloom(model: Transformer) -> Config:
    return {
        "n_layer": model.layers,
        "n_head": model.heads,
        "seq_length": model.context,
        "layer_norm_epsilon": model.norm_epsilon,
        "hidden_dropout": (model.dropout or Dropout()).hidden,
    }


def _falcon(model: Transformer) -> Config:
    separate = model.parallel_residual and not model.shared_norm
    new = separate or model.kv_heads not in (1, model.heads)
    return {
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": 2 if separate else 1,
        "multi_query": model.kv_heads == 1,
        "num_kv_heads": model.kv_heads,
        "parallel_attn": model.parallel_residual,
        "alibi": model.positions == "alibi",
        "bias": model.qkv_bias,
        "ffn_hidden_size": model.ffn,
        "activation": activation_of(model),
        "layer_norm_epsilon": model.norm_epsilon,
    }


def _falcon_norms(model: Transformer) -> dict[str, tuple[str, ...]]:
    """Norms of each branch have names of their own where both read the block's input."""
    separate = model.parallel_residual and not model.shared_norm
    return {
        "norm1": ("ln_attn" if separate else "input_layernorm",),
        "norm2": ("ln_mlp" if separate else "post_attention_layernorm",),
    }


def _gptj(model: Transformer) -> Config:
    dropout = model.dropout or Dropout()
    return {
        "rotary_dim": model.turned_channels,
        "n_inner": model.ffn,
        "activation_function": activation_of(model),
        "layer_norm_epsilon": model.norm_epsilon,
        "attn_pdrop": dropout.attention,
        "resid_pdrop": dropout.hidden,
        "embd_pdrop": dropout.embedding,
    }


def _opt(model: Transformer) -> Config:
    return {
        "ffn_dim": model.ffn,
        "activation_function": activation_of(model),
        "do_layer_norm_before": True,
        "word_embed_proj_dim": model.hidden,
        "enable_bias": model.qkv_bias,
        "dropout": (model.dropout or Dropout()).hidden,
        "layerdrop": 0.0,
        "init_std": LEAST_DEVIATION,
    }


def _nemotron(model: Transformer) -> Config:
    return {
        "head_dim": model.head_dim,
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.ffn_bias,
        "norm_eps": model.norm_epsilon,
        "partial_rotary_factor": share_turned(model),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFamily:
    """How a family is saved: its decoders, unless a class of its own says otherwise."""

    architecture: str
    names: Names = field(default_factory=like_llama)
    layer_names: Callable[[Transformer], Mapping[str, tuple[str, ...]]] = _own_nothing
    """Names of a layer's parts that depend on the description, in the place of those of `names`."""
    own: Callable[[Transformer], Config] = _own_nothing
    """What its configuration has beside, or otherwise than, the usual keys."""

    def config(self, family: str, model: Transformer) -> Config:
        """Its `config.json`."""
        return {
            "model_type": family,
            "architectures": [self.architecture],
            **usual_config(model),
            **self.own(model),
        }


DECODERS: dict[str, SavedFamily] = {
    "mistral": SavedFamily(
        architecture="MistralForCausalLM",
        own=lambda model: {"head_dim": model.head_dim, "sliding_window": model.window},
    ),
    "gpt_neox": SavedFamily(
        architecture="GPTNeoXForCausalLM",
        names=Names(
            "gpt_neox.layers",
            {
                "norm1": ("input_layernorm",),
                "norm2": ("post_attention_layernorm",),
                "qkv": ("attention.query_key_value",),
                "output": ("attention.dense",),
                "up": ("mlp.dense_h_to_4h",),
                "down": ("mlp.dense_4h_to_h",),
            },
            {"embedding": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
            heads_together=True,
        ),
        own=_gpt_neox,
    ),
    "mpt": SavedFamily(
        architecture="MptForCausalLM",
        names=Names(
            "transformer.blocks",
            {
                "norm1": ("norm_1",),
                "norm2": ("norm_2",),
                "qkv": ("attn.Wqkv",),
                "output": ("attn.out_proj",),
                "up": ("ffn.up_proj",),
                "down": ("ffn.down_proj",),
            },
            {"embedding": "transformer.wte", "final_norm": "transformer.norm_f", "head": "lm_head"},
        ),
        own=_mpt,
    ),
    "bloom": SavedFamily(
        architecture="BloomForCausalLM",
        names=Names(
            "transformer.h",
            BLOOM_LAYER,
            {**BLOOM_ENDS, "embedding_norm": "transformer.word_embeddings_layernorm"},
            heads_together=True,
        ),
        own=_bloom,
    ),
    "falcon": SavedFamily(
        architecture="FalconForCausalLM",
        names=Names("transformer.h", BLOOM_LAYER, BLOOM_ENDS, heads_together=True),
        layer_names=_falcon_norms,
        own=_falcon,
    ),
    "gptj": SavedFamily(
        architecture="GPTJForCausalLM",
        names=Names(
            "transformer.h",
            {
                "norm1": ("ln_1",),
                "qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
                "output": ("attn.out_proj",),
                "up": ("mlp.fc_in",),
                "down": ("mlp.fc_out",),
            },
            {"embedding": "transformer.wte", "final_norm": "transformer.ln_f", "head": "lm_head"},
        ),
        own=_gptj,
    ),
    "opt": SavedFamily(
        architecture="OPTForCausalLM",
        names=Names(
            "model.decoder.layers",
            {
                **LLAMA_LAYER,
                "norm1": ("self_attn_layer_norm",),
                "norm2": ("final_layer_norm",),
                "output": ("self_attn.out_proj",),
                "up": ("fc1",),
                "down": ("fc2",),
            },
            {
                "embedding": "model.decoder.embed_tokens",
                "positions": "model.decoder.embed_positions",
                "final_norm": "model.decoder.final_layer_norm",
                "head": "lm_head",
            },
        ),
        own=_opt,
    ),
    "nemotron": SavedFamily(architecture="NemotronForCausalLM", own=_nemotron),
    "exaone4": SavedFamily(
        architecture="Exaone4ForCausalLM",
        names=like_llama(**NORMS_BEHIND),
        own=lambda model: {"head_dim": model.head_dim, "sliding_window_pattern": None, **windows_of(model)},
    ),
    "ernie4_5": SavedFamily(
        architecture="Ernie4_5ForCausalLM",
        own=lambda model: {"head_dim": model.head_dim, "use_bias": model.qkv_bias},
    ),
    "phi": SavedFamily(
        architecture="PhiForCausalLM",
        names=like_llama(final_norm="model.final_layernorm", output="self_attn.dense", up="mlp.fc1", down="mlp.fc2"),
        own=_phi,
    ),
    "phi3": SavedFamily(
        architecture="Phi3ForCausalLM", names=like_llama(qkv="self_attn.qkv_proj", **FUSED_GATE), own=_phi3
    ),
    "starcoder2": SavedFamily(
        architecture="Starcoder2ForCausalLM",
        names=like_llama(up="mlp.c_fc", down="mlp.c_proj"),
        own=_starcoder2,
    ),
    "stablelm": SavedFamily(architecture="StableLmForCausalLM", own=_stablelm),
    "arcee": SavedFamily(
        architecture="ArceeForCausalLM",
        own=lambda model: {
            "head_dim": model.head_dim,
            "attention_bias": model.qkv_bias,
            "mlp_bias": model.ffn_bias,
        },
    ),
    "olmo2": SavedFamily(
        architecture="Olmo2ForCausalLM",
        names=like_llama(**NORMS_BEHIND),
        own=lambda model: {"attention_bias": model.qkv_bias},
    ),
    "olmo3": SavedFamily(architecture="Olmo3ForCausalLM", names=like_llama(**NORMS_BEHIND), own=_olmo3),
    "granite": SavedFamily(architecture="GraniteForCausalLM", own=_granite),
    "glm": SavedFamily(architecture="GlmForCausalLM", names=like_llama(**FUSED_GATE), own=_glm),
    "glm4": SavedFamily(
        architecture="Glm4ForCausalLM",
        names=like_llama(**FUSED_GATE, attention_norm="post_self_attn_layernorm", feed_norm="post_mlp_layernorm"),
        own=_glm,
    ),
    "cohere": SavedFamily(architecture="CohereForCausalLM", own=_cohere),
    "cohere2": SavedFamily(
        architecture="Cohere2ForCausalLM", own=lambda model: {**_cohere(model), **windows_of(model)}
    ),
    "gemma": SavedFamily(architecture="GemmaForCausalLM", own=_gemma),
    "gemma2": SavedFamily(architecture="Gemma2ForCausalLM", names=like_llama(**NORMS_AROUND), own=_gemma2),
    "gemma3_text": SavedFamily(architecture="Gemma3ForCausalLM", names=like_llama(**NORMS_AROUND), own=_gemma3),
    "ministral": SavedFamily(
        architecture="MinistralForCausalLM", own=lambda model: {"head_dim": model.head_dim, **windows_of(model)}
    ),
    "smollm3": SavedFamily(architecture="SmolLM3ForCausalLM", own=_smollm3),
    "seed_oss": SavedFamily(architecture="SeedOssForCausalLM", own=_seed_oss),
}
"""By `model_type`."""
