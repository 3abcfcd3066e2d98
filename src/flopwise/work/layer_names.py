"""What `transformers` calls the matrices of a block that adapters may lie beside: an adapter is one layer's of theirs.

Where a family has several of our results in one layer, they share the adapter's first matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.work.adapters import GROUPS, HEADS, LATENTS, RESULTS, TARGETS, Target

if TYPE_CHECKING:
    from flopwise.work.transformer import Transformer

LLAMA: dict[Target, str] = {
    **{target: f"self_attn.{target}_proj" for target in HEADS},
    **{target: f"mlp.{target}_proj" for target in GROUPS["mlp"]},
}
BERT: dict[Target, str] = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}


def _in_one(layer: str, *targets: Target) -> dict[Target, str]:
    return dict.fromkeys(targets, layer)


GPT2: dict[Target, str] = {
    **_in_one("attn.c_attn", "q", "k", "v"),
    "o": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
BLOOM: dict[Target, str] = {
    **_in_one("self_attention.query_key_value", "q", "k", "v"),
    "o": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
ATTENTION: dict[Target, str] = {target: LLAMA[target] for target in HEADS}
EXPERTS: dict[Target, str] = {
    **ATTENTION,
    **{target: f"mlp.experts.{{}}.{target}_proj" for target in GROUPS["mlp"]},
}
"""Of a mixture: the number of an expert stands in the braces."""
LATENT: dict[Target, str] = {
    "q_a": "self_attn.q_a_proj",
    "q": "self_attn.q_b_proj",
    **_in_one("self_attn.kv_a_proj_with_mqa", "kv_a", "kv_turned"),
    **_in_one("self_attn.kv_b_proj", "k", "v"),
    "o": "self_attn.o_proj",
}
"""Of latent attention."""
LATENT_EXPERTS: dict[Target, str] = {**EXPERTS, **LATENT}
GATE_UP = _in_one("mlp.gate_up_proj", "gate", "up")
LAYERS: dict[str, dict[Target, str]] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "olmo2", "olmo3", "granite", "smollm3"), LLAMA),
    **dict.fromkeys(("cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "seed_oss", "stablelm", "arcee"), LLAMA),
    **dict.fromkeys(("nemotron", "exaone4", "ernie4_5"), LLAMA),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe"), EXPERTS),
    "mixtral": {
        **ATTENTION,
        "gate": "block_sparse_moe.experts.{}.w1",
        "up": "block_sparse_moe.experts.{}.w3",
        "down": "block_sparse_moe.experts.{}.w2",
    },
    "llama4_text": ATTENTION,
    "gpt_oss": {**ATTENTION, **_in_one("mlp.experts.gate_up_proj", "gate", "up"), "down": "mlp.experts.down_proj"},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), LATENT_EXPERTS),
    **dict.fromkeys(("bloom", "falcon"), BLOOM),
    "mpt": {**_in_one("attn.Wqkv", "q", "k", "v"), "o": "attn.out_proj", "up": "ffn.up_proj", "down": "ffn.down_proj"},
    "gptj": {
        **{target: f"attn.{target}_proj" for target in ("q", "k", "v")},
        "o": "attn.out_proj",
        "up": "mlp.fc_in",
        "down": "mlp.fc_out",
    },
    "opt": {**LLAMA, "o": "self_attn.out_proj", "up": "fc1", "down": "fc2"},
    "gpt2": GPT2,
    "gpt_neox": {
        **_in_one("attention.query_key_value", "q", "k", "v"),
        "o": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    "phi": {**LLAMA, "o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"},
    "phi3": {**LLAMA, **_in_one("self_attn.qkv_proj", "q", "k", "v"), **GATE_UP},
    "glm": {**LLAMA, **GATE_UP},
    "glm4": {**LLAMA, **GATE_UP},
    "starcoder2": {**LLAMA, "up": "mlp.c_fc", "down": "mlp.c_proj"},
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), BERT),
    "modernbert": {
        **_in_one("attn.Wqkv", "q", "k", "v"),
        "o": "attn.Wo",
        **_in_one("mlp.Wi", "gate", "up"),
        "down": "mlp.Wo",
    },
    "distilbert": {
        "q": "attention.q_lin",
        "k": "attention.k_lin",
        "v": "attention.v_lin",
        "o": "attention.out_lin",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
    },
}
"""`model_type` → the layer of each matrix, within a block."""


BLOCK_OF = re.compile(r"^.*\.[0-9]+\.")
"""Of a layer's whole name, what leads to its block."""


def layer_names(model: Transformer) -> dict[Target, str]:
    """The layer of each matrix of a model's block; a description of no family goes by what it is built like."""
    named = LAYERS.get(model.family)
    if named is None and model.experts:
        named = EXPERTS
    if named is not None and not model.experts and any("{}" in name for name in named.values()):
        # A mixture's block that has no experts.
        named = {**named, **{target: LLAMA[target] for target in GROUPS["mlp"]}}
    if named is None:
        named = LLAMA if model.positions != "learned" else GPT2 if model.causal else BERT
    if model.latent is not None:
        named = {**named, **LATENT} | ({} if model.latent.query_rank else {"q": "self_attn.q_proj"})
    without = (() if model.gated else ("gate",)) + (LATENTS if model.latent is None else ())
    if model.latent is not None and not model.latent.query_rank:
        without += ("q_a",)
    return {target: name for target, name in named.items() if target not in without}


def products_of(model: Transformer) -> tuple[str, ...]:
    """The products of a block that an adapter may lie beside."""
    others = {"up" if model.gated else "gate_up"}
    others |= {"latents", "query_up", "latent_up"} if model.latent is None else {"qkv"}
    others |= {"query_up"} if model.latent is not None and not model.latent.query_rank else set()
    return tuple(product for product in RESULTS if product not in others)


def targets_of(model: Transformer, product: str) -> tuple[Target, ...]:
    """The targets that a product's results belong to; queries may be made without a latent of their own."""
    if product == "latents" and model.latent is not None and not model.latent.query_rank:
        return ("q", *LATENTS[1:])
    return RESULTS[product]


def is_joined(model: Transformer, product: str) -> bool:
    """Whether all results of one of our products are one layer's, so that an adapter is one for all of them."""
    names = layer_names(model)
    layers = [names.get(target) for target in targets_of(model, product)]
    return len(layers) > 1 and len({*layers}) == 1


def inner_names(model: Transformer, product: str, prefix: str = "") -> dict[Target, str]:
    """What each of a product's targets calls its adapter's inner result: results of one layer have one."""
    names, targets = layer_names(model), targets_of(model, product)
    if is_joined(model, product):
        return dict.fromkeys(targets, f"{prefix}{product}")
    first: dict[str | None, Target] = {}
    for target in targets:
        first.setdefault(names.get(target, target), target)
    return {target: f"{prefix}{first[names.get(target, target)]}" for target in targets}


def parse_targets(text: str, model: Transformer) -> tuple[Target, ...]:
    """`all-linear`, `attention`, `q,v`, or a family's own names (`c_attn`, `mlp.c_proj`): in the order of a block."""
    names = layer_names(model)
    chosen: set[str] = set()
    for word in (part.strip() for part in text.split(",") if part.strip()):
        named = {target for target, name in names.items() if is_named(name, word)}
        plain = word.lower()
        if not named and plain not in GROUPS and plain not in TARGETS:
            known = (*GROUPS, *TARGETS, *dict.fromkeys(name.rpartition(".")[2] for name in names.values()))
            raise unknown_name("matrix of a block", word, known, hint="--lora-on all-linear")
        if plain in LATENTS and plain not in names:
            raise FlopwiseError(
                f"{model.name} has no {plain} for an adapter",
                why=f"its matrices are {', '.join(names)}",
                hint="--lora-on all-linear",
            )
        chosen.update(named or GROUPS.get(plain, (plain,)))
    return tuple(name for name in TARGETS if name in chosen)


def is_named(layer: str, word: str) -> bool:
    """Whether a word of PEFT's `target_modules` is about a layer: by its last parts, or by its place in one block."""
    return _ends(layer, word) or BLOCK_OF.sub("", word) == layer


def shortest_names(chosen: Iterable[str], others: Iterable[str]) -> list[str] | None:
    """Words that name the chosen layers and none of the others; None: there are none."""
    layers, rest, found = dict.fromkeys(chosen), set(others), list[str]()
    for layer in layers:
        parts = layer.split(".")
        words = (".".join(parts[first:]) for first in range(len(parts) - 1, -1, -1))
        word = next((each for each in words if not any(_ends(other, each) for other in rest)), None)
        if word is None:
            return None
        found.append(word)
    return list(dict.fromkeys(found))


def _ends(layer: str, word: str) -> bool:
    return layer == word or layer.endswith(f".{word}")


def check_targets(model: Transformer, targets: Iterable[Target], names: Mapping[Target, str] | None = None) -> None:
    """Refuse adapters beside a part of a layer."""
    names = layer_names(model) if names is None else names
    chosen = {*targets}
    for layer in dict.fromkeys(names.values()):
        members = tuple(target for target in TARGETS if names.get(target) == layer)
        if chosen & {*members} and not {*members} <= chosen:
            raise FlopwiseError(
                f"{model.name} has {', '.join(members)} in one matrix, {layer}",
                why="an adapter beside it is one for all of them",
                hint=f"--lora-on {','.join(members)}",
            )
