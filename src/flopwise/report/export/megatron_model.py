"""A model's description as Megatron-LM's arguments; what its GPT has no argument for is refused."""

from __future__ import annotations

from flopwise.report.export.ledger import Ledger
from flopwise.work.model import Model
from flopwise.work.transformer import RotaryScaling, Transformer

TARGET = "Megatron-LM"

Arguments = dict[str, str | int | None]

POSITIONS = {"rotary": "rope", "learned": "learned_absolute", "none": "none"}
NORMS = {"rms": "RMSNorm", "layer": "LayerNorm"}


def model_arguments(model: Model, ledger: Ledger) -> Arguments:
    """Sizes and kinds of the parts; dropout is 0, for flopwise has none and Megatron-LM's default is 0.1."""
    if not isinstance(model, Transformer):
        raise _unknown(ledger, model.name, "a recurrent network")
    _refuse(model, ledger)
    arguments: Arguments = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads,
        "--kv-channels": model.head_dim,
        "--vocab-size": model.vocab,
        # The vocabulary is padded for the tensor ranks alone; by default it is padded to multiples of 128 of them.
        "--make-vocab-size-divisible-by": 1,
        "--position-embedding-type": POSITIONS[model.positions],
        "--normalization": NORMS[model.norm],
        "--norm-epsilon": repr(model.norm_epsilon),
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
    }
    if model.kv_heads != model.heads:
        arguments |= {"--group-query-attention": None, "--num-query-groups": model.kv_heads}
    if model.positions == "rotary":
        arguments |= {"--rotary-base": f"{model.rotary_base:.0f}", **_scaling(model.rotary_scaling)}
    if model.gated:
        arguments["--swiglu"] = None
    else:
        # Its fused kernel is for gelu_tanh alone.
        arguments["--no-bias-gelu-fusion"] = None
        switch = {"relu2": "--squared-relu", "gelu_tanh": "--openai-gelu"}.get(model.activation)
        arguments |= {switch: None} if switch else {}
    if not model.tied:
        arguments["--untie-embeddings-and-output-weights"] = None
    if not (model.output_bias or model.ffn_bias):
        arguments["--disable-bias-linear"] = None
        if model.qkv_bias:
            arguments["--add-qkv-bias"] = None
    if model.qk_norm:
        arguments["--qk-layernorm"] = None
    if model.window is not None:
        # It counts the tokens before the one that looks.
        arguments["--window-size"] = f"{model.window - 1},0"
    if model.experts:
        arguments |= {"--num-experts": model.experts, "--moe-router-topk": model.experts_per_token}
    return arguments


def _scaling(scaling: RotaryScaling | None) -> Arguments:
    if scaling is None:
        return {}
    if scaling.original_context is None:
        return {"--rotary-seq-len-interpolation-factor": f"{scaling.factor:.0f}"}
    return {"--use-rope-scaling": None, "--rope-scaling-factor": repr(scaling.factor)}


def _refuse(model: Transformer, ledger: Ledger) -> None:
    all_biased = model.qkv_bias and model.output_bias and model.ffn_bias
    unbiased = not (model.output_bias or model.ffn_bias)
    scaling = model.rotary_scaling
    refused = {
        f"a {model.head} head": model.head != "language",
        "attention to both sides": not model.causal,
        "alibi positions": model.positions == "alibi",
        "attention and feed-forward side by side": model.parallel_residual,
        "norms behind the blocks": model.norm_place == "post",
        "a norm of the embedding": model.embedding_norm,
        "no norm before the head": not model.final_norm,
        "a bias of the head": model.head_bias,
        "token types": bool(model.token_types),
        "norms with other biases than a LayerNorm's": model.norm_bias != (model.norm == "layer"),
        "a rotary base that is no whole number": model.positions == "rotary" and model.rotary_base % 1 != 0,
        "biases on some products only": not (all_biased or unbiased),
        f"the activation {model.activation}": not _activation_known(model),
        "linear scaling by no whole number": scaling is not None
        and scaling.original_context is None
        and scaling.factor % 1 != 0,
        "another low-frequency scaling than Llama 3.1's": scaling is not None
        and scaling.original_context is not None
        and (scaling.original_context, scaling.low_frequency_factor, scaling.high_frequency_factor) != (8192, 1.0, 4.0),
    }
    for what, there in refused.items():
        if there:
            raise _unknown(ledger, model.name, what)


def _activation_known(model: Transformer) -> bool:
    return model.activation == "silu" if model.gated else model.activation in ("gelu", "gelu_tanh", "relu2")


def _unknown(ledger: Ledger, name: str, what: str) -> Exception:
    return ledger.refused(
        f"{name} has {what}" if what != "a recurrent network" else f"{name} is {what}",
        why="its GPT has no argument for that, and would train another model",
        hint="--to accelerate or --to deepspeed, which take any model",
    )
