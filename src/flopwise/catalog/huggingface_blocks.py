"""What families of blocks have in common: Llama's keys, and blocks that come in kinds with windows of their own."""

from __future__ import annotations

from collections.abc import Callable

from flopwise.base.errors import FlopwiseError, shown
from flopwise.catalog.huggingface_rules import (
    FULL,
    SLIDING,
    USUAL_SIZES,
    Rule,
    activation_of,
    dropout_of,
    flag_of,
    number_of,
    rotary_base,
    rotary_scaling,
    size_of,
)
from flopwise.catalog.huggingface_settings import ConfigKeys
from flopwise.work.attention_kinds import OtherAttention, RotaryScaling


def llama_like(*, context: int, kv_heads: int) -> dict[str, Rule]:
    """What all of Llama's kin share; `context` and `kv_heads` are the defaults of absent keys (0: all heads)."""
    return {
        **USUAL_SIZES,
        "context": size_of("max_position_embeddings", absent=context),
        "kv_heads": size_of("num_key_value_heads", absent=kv_heads, null=0),
        "head_dim": size_of("head_dim", absent=0, null=0),
        "activation": activation_of("hidden_act", absent="silu"),
        "tied": flag_of("tie_word_embeddings", absent=False),
        "norm_epsilon": number_of("rms_norm_eps", absent=1e-6),
        "rotary_base": rotary_base("rope_theta", absent=10_000.0),
        "rotary_scaling": rotary_scaling,
        "dropout": dropout_of(attention="attention_dropout"),
    }


def window_of(absent: int) -> Rule:
    return lambda settings: settings.size("sliding_window", absent=absent, null=0) or None


Kinds = Callable[[ConfigKeys], list[str]]
"""Finds the kind of each block."""


Angles = Callable[[ConfigKeys, str], tuple[float, RotaryScaling | None] | None]
"""Finds base and scaling of the rotary positions of a kind; None: it has no positions."""


MOST_BLOCKS = 100_000
"""Of a list of kinds."""


def blocks_of(settings: ConfigKeys) -> int:
    """The number of blocks, where there is an entry for each."""
    layers = settings.size("num_hidden_layers")
    if layers > MOST_BLOCKS:
        raise FlopwiseError(
            f"{settings.owner}: num_hidden_layers = {shown(layers)} is too large",
            why=f"kinds of blocks are listed for up to {MOST_BLOCKS:,}",
            hint="correct num_hidden_layers",
        )
    return layers


def kinds_or(default: Kinds) -> Kinds:
    """The kinds that a file lists, or else what its family's absent list stands for."""

    def rule(settings: ConfigKeys) -> list[str]:
        found = settings.texts("layer_types") or default(settings)
        if set(found) - {SLIDING, FULL} or len(found) != blocks_of(settings):
            raise FlopwiseError(
                f"{settings.owner}: layer_types cannot be described",
                why=f"each block has {SLIDING} or {FULL}, and there is one entry for each",
                hint="correct layer_types",
            )
        return found

    return rule


def full_every(absent: int) -> Kinds:
    """Every so many blocks one that looks back over everything."""

    def rule(settings: ConfigKeys) -> list[str]:
        every = settings.size("sliding_window_pattern", absent=absent, null=absent)
        return [SLIDING if number % every else FULL for number in range(1, blocks_of(settings) + 1)]

    return kinds_or(rule)


def usual_angles(absent: float) -> Angles:
    return lambda settings, _: (rotary_base("rope_theta", absent)(settings), rotary_scaling(settings))


def by_kind(
    kinds: Kinds, angles: Angles, window: int | None = 4096, reach: Callable[[ConfigKeys], int | None] | None = None
) -> dict[str, Rule]:
    """The rules of a family whose blocks come in kinds: those without a window have `other_attention`.

    `window`: what an absent one stands for; `reach`: how a family tells it otherwise.
    """
    seen = reach or window_of(window or 0)

    def attention(settings: ConfigKeys, kind: str) -> OtherAttention:
        turned = angles(settings, kind)
        base, scaling = turned or (10_000.0, None)
        return OtherAttention(
            window=seen(settings) if kind == SLIDING else None,
            rotary_base=base,
            rotary_scaling=scaling,
            rotary=turned is not None,
        )

    def first(settings: ConfigKeys) -> OtherAttention:
        return attention(settings, SLIDING if SLIDING in kinds(settings) else FULL)

    def others(settings: ConfigKeys) -> tuple[int, ...]:
        found = kinds(settings)
        if len(set(found)) == 1 or attention(settings, SLIDING) == attention(settings, FULL):
            return ()
        return tuple(layer for layer, kind in enumerate(found) if kind == FULL)

    return {
        "window": lambda settings: first(settings).window,
        "rotary_base": lambda settings: first(settings).rotary_base,
        "rotary_scaling": lambda settings: first(settings).rotary_scaling,
        "positions": lambda settings: "rotary" if first(settings).rotary else "none",
        "other_attention": lambda settings: attention(settings, FULL) if others(settings) else None,
        "other_blocks": others,
    }


ATTENTION_BIAS = {
    "qkv_bias": flag_of("attention_bias", absent=False),
    "output_bias": flag_of("attention_bias", absent=False),
}
"""One switch for all four products around attention."""
