"""How each family of blocks that carry a state spells its shape in a `config.json`."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from flopwise.base.errors import FlopwiseError, shown
from flopwise.catalog.huggingface_blocks import ATTENTION_BIAS, MOST_BLOCKS, blocks_of, llama_like
from flopwise.catalog.huggingface_mixtures import balanced, corrected_routing
from flopwise.catalog.huggingface_rules import (
    FULL,
    Family,
    Only,
    Rule,
    activation_of,
    fixed,
    flag_of,
    number_of,
    rotary_dim,
    size_of,
)
from flopwise.catalog.huggingface_settings import ConfigKeys
from flopwise.work.recurrence import Recurrence
from flopwise.work.routing import USUAL_ROUTING, Routing

LINEAR, EXPERTS, MLP = "linear_attention", "moe", "mlp"
"""Kinds of blocks, as `layer_types` and `layers_block_type` have them beside full attention."""
OLDER_KINDS = {"mamba": LINEAR, "attention": FULL}
"""Their earlier names."""
LETTERS = {"M": LINEAR, "E": EXPERTS, "*": FULL, "-": MLP}
"""Of Nemotron-H's pattern."""
MAMBA_CONTEXT = 2048
"""Tokens that the released Mamba-2 models were trained with; their files do not say."""

Kinds = Callable[[ConfigKeys], list[str]]


def _check_kinds(settings: ConfigKeys, key: str, found: list[str], known: tuple[str, ...]) -> list[str]:
    wrong = next((kind for kind in found if kind not in known), None)
    if wrong is not None or len(found) > MOST_BLOCKS:
        raise FlopwiseError(
            f"{settings.owner}: {key} cannot be described",
            why=f"{shown(wrong)} is no kind of block"
            if wrong
            else f"kinds are listed for up to {MOST_BLOCKS:,} blocks",
            hint=f"one of {', '.join(known)} for each block",
        )
    return found


def _every_fourth(settings: ConfigKeys) -> list[str]:
    """Qwen's: what is listed, or else every so many blocks one that looks back."""
    listed = settings.texts("layer_types")
    if not listed:
        every = settings.size("full_attention_interval", absent=4, null=4)
        listed = [LINEAR if number % every else FULL for number in range(1, blocks_of(settings) + 1)]
    _check_kinds(settings, "layer_types", listed, (LINEAR, FULL))
    return _one_for_each(settings, "layer_types", listed)


def _granite_kinds(settings: ConfigKeys) -> list[str]:
    key = "layer_types" if settings.table.get("layer_types") else "layers_block_type"
    listed = [OLDER_KINDS.get(kind, kind) for kind in settings.texts(key)] or [LINEAR] * blocks_of(settings)
    return _one_for_each(settings, key, _check_kinds(settings, key, listed, (LINEAR, FULL)))


def _bamba_kinds(settings: ConfigKeys) -> list[str]:
    layers, listed = blocks_of(settings), settings.table.get("attn_layer_indices") or []
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < layers for layer in listed):
        raise FlopwiseError(
            f"{settings.owner}: attn_layer_indices are no blocks", hint=f"numbers from 0 to {layers - 1}"
        )
    return [FULL if layer in listed else LINEAR for layer in range(layers)]


def _nemotron_kinds(settings: ConfigKeys) -> list[str]:
    """A list of words, or a letter for each block; `num_hidden_layers` counts for nothing."""
    known = (LINEAR, FULL, MLP, EXPERTS)
    for key in ("layers_block_type", "layer_types"):
        listed = settings.texts(key)
        if listed:
            return _check_kinds(settings, key, [OLDER_KINDS.get(kind, kind) for kind in listed], known)
    pattern = settings.text("hybrid_override_pattern", "")
    if not pattern:
        raise FlopwiseError(
            f"{settings.owner}: layers_block_type is missing",
            why="which blocks carry a state, look back or feed forward depends on it",
            hint='"hybrid_override_pattern": "M-M*-"',
        )
    return _check_kinds(settings, "hybrid_override_pattern", [LETTERS.get(letter, letter) for letter in pattern], known)


def _one_for_each(settings: ConfigKeys, key: str, found: list[str]) -> list[str]:
    if len(found) != blocks_of(settings):
        raise FlopwiseError(
            f"{settings.owner}: {key} has {len(found):,} blocks, and num_hidden_layers is {blocks_of(settings):,}",
            hint=f"correct {key}",
        )
    return found


def _places(kinds: Kinds, *wanted: str) -> Rule:
    return lambda settings: tuple(layer for layer, kind in enumerate(kinds(settings)) if kind in wanted)


def _carrying(kinds: Kinds, recurrence: Callable[[ConfigKeys], Recurrence]) -> dict[str, Rule]:
    """Which blocks carry a state, and what of one; where all look back there is none."""
    return {
        "recurrent_blocks": _places(kinds, LINEAR),
        "recurrence": lambda settings: recurrence(settings) if LINEAR in kinds(settings) else None,
    }


# -- the gated delta rule ----------------------------------------------------------------------------------------------


def _delta(settings: ConfigKeys) -> Recurrence:
    return Recurrence(
        rule="gated_delta",
        heads=settings.size("linear_num_value_heads", absent=32),
        head_dim=settings.size("linear_value_head_dim", absent=128),
        key_heads=settings.size("linear_num_key_heads", absent=16),
        key_dim=settings.size("linear_key_head_dim", absent=128),
        conv=settings.size("linear_conv_kernel_dim", absent=4),
    )


def _qwen_next_like(*, kv_heads: int) -> dict[str, Rule]:
    """What Qwen3-Next and Qwen3.5 share."""
    return {
        **llama_like(context=32_768, kv_heads=kv_heads),
        **ATTENTION_BIAS,
        **_carrying(_every_fourth, _delta),
        "head_dim": size_of("head_dim", absent=256, null=256),
        "rotary_dim": rotary_dim(0.25),
        "qk_norm": fixed(True),
        "attention_gate": fixed(True),
        "norm_adds_one": fixed(True),
    }


def _qwen_experts(*, experts: int, experts_per_token: int) -> dict[str, Rule]:
    return {
        "ffn": size_of("moe_intermediate_size", absent=512),
        "experts": size_of("num_experts", absent=experts),
        "experts_per_token": size_of("num_experts_per_tok", absent=experts_per_token),
        "shared_ffn": size_of("shared_expert_intermediate_size", absent=512),
        "shared_gate": fixed(True),
        "routing": lambda settings: balanced(
            settings, Routing(normalised=settings.flag("norm_topk_prob", absent=True))
        ),
    }


QWEN_ONLY = (
    Only("attn_output_gate", (True,), "its attention has no gate"),
    Only("attention_bias", (False,), "its gate has a bias"),
    Only("hidden_act", ("silu",), "the gate of its norms has the same activation"),
)
SPARSE_ONLY = (
    *QWEN_ONLY,
    Only("mlp_only_layers", ([],), "some of its blocks have no experts"),
    Only("decoder_sparse_step", (1,), "some of its blocks have no experts"),
)


# -- Mamba-2 -----------------------------------------------------------------------------------------------------------


def _mamba(keys: dict[str, str], *, groups: int, state: int, chunk: int) -> Callable[[ConfigKeys], Recurrence]:
    """A family's Mamba-2 layers, by the key of each field."""

    def rule(settings: ConfigKeys) -> Recurrence:
        heads = settings.size(keys["heads"], absent=128)
        least, most = _step_limit(settings)
        return Recurrence(
            rule="mamba2",
            heads=heads,
            head_dim=_head_dim(settings, keys, heads),
            key_heads=settings.size(keys["groups"], absent=groups),
            key_dim=settings.size(keys["state"], absent=state),
            conv=settings.size(keys["conv"], absent=4),
            conv_bias=settings.flag(keys["conv_bias"], absent=True),
            bias=settings.flag(keys["bias"], absent=False),
            chunk=settings.size(keys["chunk"], absent=chunk),
            least_step=least,
            most_step=most,
        )

    return rule


def _head_dim(settings: ConfigKeys, keys: dict[str, str], heads: int) -> int:
    """What is written, or else what `expand` leaves for a head; the others say 64 where they say nothing."""
    key, expand = keys["head_dim"], keys.get("expand")
    if expand is None or settings.table.get(key, "auto") != "auto":
        return settings.size(key, absent=64)
    return max(1, settings.size("hidden_size") * settings.size(expand, absent=2) // heads)


def _step_limit(settings: ConfigKeys) -> tuple[float, float | None]:
    """Between which numbers steps are kept; infinity is written in two ways."""
    written = settings.table.get("time_step_limit")
    if written is None:
        return 0.0, None
    limits = [inf if isinstance(each, dict) else each for each in written] if isinstance(written, list) else []
    if len(limits) != 2 or any(isinstance(each, bool) or not isinstance(each, int | float) for each in limits):
        raise FlopwiseError(
            f"{settings.owner}: time_step_limit must be two numbers, got {shown(written)}", hint="[0.0, Infinity]"
        )
    return float(limits[0]), None if limits[1] == inf else float(limits[1])


MAMBA_KEYS = {
    **{"heads": "num_heads", "head_dim": "head_dim", "groups": "n_groups", "state": "state_size"},
    **{"conv": "conv_kernel", "conv_bias": "use_conv_bias", "bias": "use_bias", "chunk": "chunk_size"},
}
NEMOTRON_KEYS = {**MAMBA_KEYS, "heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "state": "ssm_state_size"}
GRANITE_KEYS = {
    **{"heads": "mamba_n_heads", "head_dim": "mamba_d_head", "groups": "mamba_n_groups", "state": "mamba_d_state"},
    **{"conv": "mamba_d_conv", "conv_bias": "mamba_conv_bias", "bias": "mamba_proj_bias", "chunk": "mamba_chunk_size"},
    "expand": "mamba_expand",
}
_granite_mamba = _mamba(GRANITE_KEYS, groups=1, state=256, chunk=256)
_plain_mamba = _mamba(MAMBA_KEYS, groups=8, state=128, chunk=256)


def _nemotron_mamba(settings: ConfigKeys) -> Recurrence:
    """Its steps have the least one of a file, and no most; its norm is by group."""
    found = _mamba(NEMOTRON_KEYS, groups=8, state=128, chunk=128)(_nemotron_names(settings))
    least = settings.number("mamba_dt_min", "time_step_min", absent=0.001)
    return Recurrence(
        **{name: getattr(found, name) for name in ("rule", "heads", "head_dim", "key_heads", "key_dim", "conv")},
        **{name: getattr(found, name) for name in ("conv_bias", "bias", "chunk")},
        norm_groups=found.key_heads,
        least_step=least,
    )


def _nemotron_names(settings: ConfigKeys) -> ConfigKeys:
    """The same file without its older names of the same keys, which go before the others."""
    older = {
        **{"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_chunk_size": "chunk_size"},
        "mamba_conv_bias": "use_conv_bias",
    }
    renamed = {new: settings.table[old] for old, new in older.items() if old in settings.table}
    return ConfigKeys({**settings.table, "time_step_limit": None, **renamed}, settings.owner)


def _nemotron_feeds(settings: ConfigKeys) -> str:
    """The one kind of feed-forward part, where there is any."""
    kinds = {*_nemotron_kinds(settings)} & {MLP, EXPERTS}
    if len(kinds) > 1:
        raise FlopwiseError(
            f"{settings.owner}: blocks of experts beside blocks of an MLP cannot be described",
            why="all feed-forward parts of a description of such blocks are of one kind",
            hint="one of E and - in hybrid_override_pattern",
        )
    return next(iter(kinds), "")


def _of_experts(rule: Rule, otherwise: object = 0) -> Rule:
    return lambda settings: rule(settings) if _nemotron_feeds(settings) == EXPERTS else otherwise


def _nemotron_ffn(settings: ConfigKeys) -> int:
    keys = {MLP: "intermediate_size", EXPERTS: "moe_intermediate_size"}
    feeds = _nemotron_feeds(settings)
    return settings.size(keys[feeds]) if feeds else 0


def _granite_like() -> dict[str, Rule]:
    return {
        **llama_like(context=2048, kv_heads=0),
        **ATTENTION_BIAS,
        "positions": lambda settings: "rotary" if settings.table.get("position_embedding_type") == "rope" else "none",
        "embedding_scale": number_of("embedding_multiplier", absent=1.0),
        "residual_scale": number_of("residual_multiplier", absent=1.0),
        "attention_scale": number_of("attention_multiplier", absent=1.0),
        "logit_scale": lambda settings: 1.0 / settings.number("logits_scaling", absent=1.0),
    }


def _granite_experts(settings: ConfigKeys) -> int:
    return settings.size("num_local_experts", absent=8, null=0, least=0)


def _when_mixed(rule: Rule, otherwise: object = 0) -> Rule:
    return lambda settings: rule(settings) if _granite_experts(settings) else otherwise


def _granite_mixture() -> dict[str, Rule]:
    """Of Granite 3's, every block of which has experts."""
    return {
        **_granite_like(),
        "positions": fixed("rotary"),
        "experts": size_of("num_local_experts", absent=8),
        "experts_per_token": size_of("num_experts_per_tok", absent=2),
        "routing": lambda settings: balanced(settings, Routing(normalised=True)),
    }


def _in_fp32(settings: ConfigKeys) -> str:
    """Mamba-2 adds up its blocks in fp32 where nothing else is said."""
    wide = settings.flag("residual_in_fp32", absent=settings.table.get("model_type") == "mamba2")
    return "the residual stream is in the activations' format, not in fp32" if wide else ""


SILU_ONLY = "its convolution has another activation"
NO_EXPERT_LATENT = Only("moe_latent_size", (None,), "its experts read a latent of each token")

HYBRIDS: dict[str, Family] = {
    "qwen3_next": Family(
        title="Qwen3-Next",
        bare=("Qwen3NextModel",),
        only=SPARSE_ONLY,
        rules={**_qwen_next_like(kv_heads=2), **_qwen_experts(experts=512, experts_per_token=10)},
    ),
    "qwen3_5_text": Family(
        title="Qwen3.5", bare=("Qwen3_5TextModel",), only=QWEN_ONLY, rules=_qwen_next_like(kv_heads=4)
    ),
    "qwen3_5_moe_text": Family(
        title="Qwen3.5 MoE",
        bare=("Qwen3_5MoeTextModel",),
        only=SPARSE_ONLY,
        rules={
            **_qwen_next_like(kv_heads=2),
            **_qwen_experts(experts=256, experts_per_token=8),
            "routing": lambda settings: balanced(settings, Routing(normalised=True)),
        },
    ),
    "mamba2": Family(
        title="Mamba-2",
        bare=("Mamba2Model",),
        only=(Only("hidden_act", ("silu",), SILU_ONLY),),
        note=_in_fp32,
        rules={
            "layers": size_of("num_hidden_layers"),
            "hidden": size_of("hidden_size"),
            "heads": size_of("num_heads"),
            "head_dim": size_of("head_dim", absent=64),
            "vocab": size_of("vocab_size"),
            "ffn": fixed(0),
            "context": fixed(MAMBA_CONTEXT),
            "positions": fixed("none"),
            "norm_epsilon": number_of("layer_norm_epsilon", absent=1e-5),
            "tied": flag_of("tie_word_embeddings", absent=False),
            "one_branch": fixed(True),
            **_carrying(lambda settings: [LINEAR] * blocks_of(settings), _plain_mamba),
        },
    ),
    "nemotron_h": Family(
        title="Nemotron-H",
        bare=("NemotronHModel",),
        only=(
            NO_EXPERT_LATENT,
            Only("mamba_hidden_act", ("silu",), SILU_ONLY),
            Only("sliding_window", (None,), "its attention has windows"),
        ),
        note=_in_fp32,
        rules={
            **llama_like(context=4096, kv_heads=8),
            **ATTENTION_BIAS,
            **_carrying(_nemotron_kinds, _nemotron_mamba),
            "layers": lambda settings: len(_nemotron_kinds(settings)),
            "one_branch": fixed(True),
            "feed_blocks": _places(_nemotron_kinds, MLP, EXPERTS),
            "ffn": _nemotron_ffn,
            "ffn_bias": flag_of("mlp_bias", absent=False),
            "head_dim": size_of("head_dim", "attention_head_dim", absent=128),
            "positions": fixed("none"),
            "gated": fixed(False),
            "activation": activation_of("mlp_hidden_act", absent="relu2"),
            "norm_epsilon": number_of("layer_norm_epsilon", absent=1e-5),
            "experts": _of_experts(size_of("n_routed_experts", "num_local_experts", absent=8)),
            "experts_per_token": _of_experts(size_of("num_experts_per_tok", absent=2)),
            "shared_ffn": _of_experts(size_of("moe_shared_expert_intermediate_size", absent=7688)),
            "routing": _of_experts(corrected_routing, USUAL_ROUTING),
        },
    ),
    "bamba": Family(
        title="Bamba",
        bare=("BambaModel",),
        only=(Only("z_loss_coefficient", (0.0, 0), "it adds a loss of the logits' sums"),),
        rules={
            **llama_like(context=262_144, kv_heads=8),
            **ATTENTION_BIAS,
            **_carrying(_bamba_kinds, _granite_mamba),
            "ffn_bias": flag_of("mlp_bias", absent=False),
            "rotary_dim": rotary_dim(0.5),
            "norm_epsilon": number_of("rms_norm_eps", absent=1e-5),
        },
    ),
    "granitemoe": Family(title="Granite MoE", bare=("GraniteMoeModel",), rules=_granite_mixture()),
    "granitemoeshared": Family(
        title="Granite MoE with shared experts",
        bare=("GraniteMoeSharedModel",),
        rules={
            **_granite_mixture(),
            "shared_ffn": lambda settings: settings.size("shared_intermediate_size", absent=0, null=0, least=0),
        },
    ),
    "granitemoehybrid": Family(
        title="Granite 4",
        bare=("GraniteMoeHybridModel",),
        rules={
            **_granite_like(),
            **_carrying(_granite_kinds, _granite_mamba),
            "ffn": lambda settings: settings.size(
                "intermediate_size" if _granite_experts(settings) else "shared_intermediate_size"
            ),
            "experts": _granite_experts,
            "experts_per_token": _when_mixed(size_of("num_experts_per_tok", absent=2)),
            "shared_ffn": _when_mixed(size_of("shared_intermediate_size", absent=1024)),
            "routing": _when_mixed(lambda settings: balanced(settings, Routing(normalised=True)), USUAL_ROUTING),
        },
    ),
}

NOT_DESCRIBED = {
    **dict.fromkeys(
        ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        "heads of its full attention are wider than the others', keys may be values, blocks share them, and each has "
        "embeddings of its own",
    ),
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text"), "its blocks have several streams and embeddings of their own, and share keys"
    ),
    "ministral3": "its queries are scaled by their positions, from far ones on",
    "phi4_multimodal": "its matrices have adapters for what it sees and hears",
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"), "its queries and keys are normed behind their rotation, by channel"
    ),
    "apertus": "its activation has trained numbers of its own",
    "phimoe": "its experts are chosen by a rule of their own, one by one",
    "minimax": "its blocks' states fade by head, and nothing else decides how fast",
    **dict.fromkeys(
        ("mamba", "falcon_mamba", "jamba", "zamba"), "Mamba-1's states cannot be taken in chunks of products"
    ),
    "zamba2": "several of its blocks share one attention",
    "falcon_h1": "its blocks have attention and a state side by side",
    **dict.fromkeys(("lfm2", "lfm2_moe"), "some of its blocks are a gated convolution"),
    "kimi_linear": "its states fade by channel",
    "olmo_hybrid": "its states have two rates",
}
"""Families that are known by name and not described: why."""
