"""Small models of every family that can be trained, and the same networks as `transformers` builds them."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import torch

from flopwise.engine.kernels.experts import split_terms
from flopwise.engine.modules import ReferenceModel, build
from flopwise.engine.weights.huggingface import config_of, to_huggingface
from flopwise.work.attention_kinds import OtherAttention, RotaryScaling, Temperature
from flopwise.work.latent import LatentAttention
from flopwise.work.parameters import parameters_of
from flopwise.work.recurrence import Recurrence
from flopwise.work.routing import Routing
from flopwise.work.transformer import Transformer

# Before `transformers` is imported anywhere: a test never looks for files elsewhere.
os.environ["HF_HUB_OFFLINE"] = "1"

LLAMA = Transformer(
    name="llama",
    title="llama",
    source="test",
    layers=2,
    hidden=24,
    heads=6,
    kv_heads=2,
    head_dim=4,
    ffn=37,
    vocab=53,
    context=64,
    norm_epsilon=1e-4,
    rotary_base=50.0,
)
GPT2 = Transformer(
    name="gpt2",
    title="gpt2",
    source="test",
    layers=2,
    hidden=20,
    heads=5,
    ffn=33,
    vocab=53,
    context=19,
    positions="learned",
    position_rows=19,
    norm="layer",
    norm_bias=True,
    gated=False,
    activation="gelu_tanh",
    qkv_bias=True,
    output_bias=True,
    ffn_bias=True,
    tied=True,
    norm_epsilon=1e-4,
)
BERT = replace(
    GPT2,
    name="bert",
    causal=False,
    activation="gelu",
    norm_place="post",
    embedding_norm=True,
    final_norm=False,
    head_bias=True,
    token_types=2,
    head="classifier",
    labels=3,
    tied=False,
)
MODERNBERT = replace(
    LLAMA,
    name="modernbert",
    kv_heads=6,
    causal=False,
    window=4,
    norm="layer",
    embedding_norm=True,
    unnormed_attention="first",
    activation="gelu",
    head="masked",
    head_bias=True,
    tied=True,
    transform_bias=False,
    transform_activation="gelu",
    pooler_activation="gelu",
    pooler_norm=True,
    pooling="mean",
    family="modernbert",
)
DELTA = replace(
    LLAMA,
    qk_norm=True,
    norm_adds_one=True,
    rotary_dim=2,
    attention_gate=True,
    # What is read of a state may be almost nothing, which a norm of it would make as large as the rest.
    norm_epsilon=0.05,
    recurrent_blocks=(0,),
    recurrence=Recurrence(rule="gated_delta", heads=4, head_dim=5, key_heads=2, key_dim=3, conv=3),
)
MAMBA = Recurrence(rule="mamba2", heads=6, head_dim=8, key_heads=2, key_dim=5, conv_bias=True, chunk=7, norm_groups=2)
TINY = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied=True),
    "llama-biased": replace(LLAMA, qkv_bias=True, output_bias=True, ffn_bias=True, activation="gelu_tanh"),
    "llama-3.1": replace(
        LLAMA,
        head_dim=16,
        rotary_scaling=RotaryScaling(
            factor=8.0, original_context=32, low_frequency_factor=1.0, high_frequency_factor=4.0
        ),
    ),
    "llama-linear": replace(LLAMA, rotary_scaling=RotaryScaling(factor=3.0)),
    "mistral": replace(LLAMA, window=5),
    "qwen2": replace(LLAMA, qkv_bias=True, tied=True),
    "qwen2-window": replace(LLAMA, qkv_bias=True, window=4),
    "qwen3": replace(LLAMA, qk_norm=True, hidden=22, head_dim=6),
    "qwen3-biased": replace(LLAMA, qk_norm=True, qkv_bias=True, output_bias=True, window=7),
    "llama-yarn": replace(
        LLAMA,
        head_dim=16,
        activation="quick_gelu",
        rotary_scaling=RotaryScaling(method="yarn", factor=4.0, original_context=16),
    ),
    "phi": replace(
        GPT2,
        positions="rotary",
        position_rows=None,
        tied=False,
        parallel_residual=True,
        shared_norm=True,
        head_bias=True,
        rotary_dim=2,
        family="phi",
    ),
    "olmo2": replace(LLAMA, norm_place="behind", qk_norm=True, qk_norm_over="all", family="olmo2"),
    "granite": replace(
        LLAMA,
        residual_scale=0.22,
        embedding_scale=12.0,
        attention_scale=0.4,
        logit_scale=0.125,
        tied=True,
        family="granite",
    ),
    "glm4": replace(
        LLAMA, norm_place="sandwich", qkv_bias=True, rotary_pairs="neighbours", rotary_dim=2, family="glm4"
    ),
    "cohere": replace(
        LLAMA,
        norm="layer",
        parallel_residual=True,
        shared_norm=True,
        rotary_pairs="neighbours",
        logit_scale=0.5,
        tied=True,
        family="cohere",
    ),
    "mixtral": replace(LLAMA, experts=4, experts_per_token=2, family="mixtral"),
    "qwen2_moe": replace(
        LLAMA,
        qkv_bias=True,
        ffn=16,
        experts=5,
        experts_per_token=2,
        shared_ffn=20,
        shared_gate=True,
        routing=Routing(normalised=False),
        family="qwen2_moe",
    ),
    "glm4_moe": replace(
        LLAMA,
        ffn=16,
        experts=6,
        experts_per_token=2,
        shared_ffn=32,
        dense_blocks=(0,),
        dense_ffn=21,
        routing=Routing(scores="sigmoid", scale=2.5, correction=True, groups=3, groups_kept=2, group_by="best two"),
        family="glm4_moe",
    ),
    "qwen3_moe": replace(
        LLAMA,
        qk_norm=True,
        ffn=16,
        experts=5,
        experts_per_token=3,
        routing=Routing(normalised=False),
        family="qwen3_moe",
    ),
    "deepseek_v3": replace(
        LLAMA,
        kv_heads=LLAMA.heads,
        head_dim=10,
        rotary_dim=4,
        rotary_pairs="neighbours",
        latent=LatentAttention(rank=12, value_dim=6, query_rank=14),
        ffn=16,
        experts=6,
        experts_per_token=2,
        shared_ffn=16,
        dense_blocks=(0,),
        dense_ffn=21,
        routing=Routing(scores="sigmoid", scale=2.5, correction=True, groups=3, groups_kept=2, group_by="best two"),
        norm_epsilon=1e-6,
        family="deepseek_v3",
    ),
    "deepseek_v2": replace(
        LLAMA,
        kv_heads=LLAMA.heads,
        head_dim=10,
        rotary_dim=4,
        rotary_pairs="neighbours",
        latent=LatentAttention(rank=8, value_dim=10),
        ffn=16,
        experts=4,
        experts_per_token=2,
        shared_ffn=32,
        routing=Routing(normalised=False, scale=1.5),
        family="deepseek_v2",
    ),
    "gpt_oss": replace(
        LLAMA,
        experts=5,
        experts_per_token=2,
        activation="clamped_swiglu",
        sinks=True,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        routing=Routing(bias=True),
        window=4,
        family="gpt_oss",
    ),
    "qwen3_5": replace(DELTA, family="qwen3_5_text"),
    "qwen3_next": replace(
        DELTA,
        ffn=16,
        # Both, always: whose states differ a little would choose others.
        experts=2,
        experts_per_token=2,
        shared_ffn=12,
        shared_gate=True,
        routing=Routing(normalised=True),
        family="qwen3_next",
    ),
    "mamba2": replace(
        LLAMA,
        heads=6,
        kv_heads=6,
        head_dim=8,
        ffn=0,
        context=2048,
        positions="none",
        rotary_base=10_000.0,
        one_branch=True,
        recurrent_blocks=(0, 1),
        recurrence=replace(MAMBA, key_heads=3, norm_groups=1, bias=True),
        family="mamba2",
    ),
    "nemotron_h": replace(
        LLAMA,
        layers=3,
        positions="none",
        rotary_base=10_000.0,
        gated=False,
        activation="relu2",
        one_branch=True,
        recurrent_blocks=(0,),
        feed_blocks=(1,),
        recurrence=replace(MAMBA, least_step=0.3),
        family="nemotron_h",
    ),
    "llama4_text": replace(
        LLAMA,
        qk_norm=True,
        qk_norm_weights=False,
        rotary_pairs="neighbours",
        ffn=16,
        experts=5,
        experts_per_token=1,
        shared_ffn=16,
        routing=Routing(scores="sigmoid", normalised=False, on_inputs=True),
        attention_chunk=8,
        other_attention=OtherAttention(
            rotary=False, rotary_base=50.0, qk_norm=False, temperature=Temperature(floor=4, scale=0.5)
        ),
        other_blocks=(1,),
        family="llama4_text",
    ),
    "gpt2": GPT2,
    "gpt2-unscaled": replace(GPT2, attention_scale=1.0),
    "gpt2-untied": replace(GPT2, tied=False, activation="relu"),
    "bert": BERT,
    "bert-masked": replace(BERT, head="masked", labels=None, tied=True),
    "modernbert": MODERNBERT,
}
"""One for each way in which a class of `transformers` can be built."""

TOKENS = 19


def random_module(model: Transformer, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> ReferenceModel:
    """A reference module whose every number counts: biases and norms are random too."""
    module = build(model, TOKENS, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            adds_one = model.carries and model.norm_adds_one and "mix_norm" not in name
            value.copy_((not adds_one) + 0.2 * drawn if norm else 0.3 * drawn)
            if name.endswith("routing.bias"):
                # Its terms are those of one number each.
                value.copy_(split_terms(drawn[0]))
    return module


def random_ids(model: Transformer, sequences: int = 3, tokens: int = TOKENS, seed: int = 1) -> torch.Tensor:
    return torch.randint(model.vocab, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in module.named_parameters()}


def transformers_class(model: Transformer) -> Any:
    """The class that the configuration names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        return getattr(transformers, config_of(model)["architectures"][0])


def transformers_model(model: Transformer, module: ReferenceModel) -> Any:
    """The network of `transformers` with the module's numbers and in its type."""
    kind = transformers_class(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = kind.config_class.from_dict(config_of(model))
        config._attn_implementation = "eager" if model.sinks or model.has_kinds else "sdpa"
        config._experts_implementation = "eager"
        dtype = next(module.parameters()).dtype
        theirs = kind(config).to(dtype).eval()
        result = theirs.load_state_dict(_state_of(model, module), strict=False)
        theirs.tie_weights()
    assert not result.unexpected_keys
    tied = {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "decoder.weight"}
    assert set(result.missing_keys) <= (tied if model.tied else set())
    return theirs


def _state_of(model: Transformer, module: ReferenceModel) -> dict[str, torch.Tensor]:
    """The numbers under the names of the class: those of files, but that it has a mixture's experts in one tensor."""
    numbers = parameters(module)
    if model.family in ("gpt_oss", "llama4_text"):
        return to_huggingface(model, numbers)
    stacks = {name: numbers.pop(name) for name in list(numbers) if model.experts and numbers[name].ndim == 3}
    backbone = {"nemotron_h": "model."}.get(model.family, "backbone.")
    named = {
        name.replace("block_sparse_moe", "mlp").replace("backbone.", backbone): each
        for name, each in to_huggingface(model, numbers).items()
    }
    for name, value in stacks.items():
        layer, _, matrix = name.removesuffix(".weight").rpartition(".")
        named[f"model.{layer}.mlp.experts.{matrix}_proj"] = value
    return named


def names_and_shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in parameters_of(model, TOKENS)}
