"""How a field of the description is found among the keys of a `config.json`: the rules that families are tables of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flopwise.base.errors import FlopwiseError, shown
from flopwise.catalog.huggingface_settings import ConfigKeys
from flopwise.work.attention_kinds import RotaryScaling
from flopwise.work.transformer import Dropout

ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_10", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh"), "gelu_tanh"),
    **{name: name for name in ("leaky_relu", "linear", "mish", "relu", "relu2", "relu6", "sigmoid", "tanh")},
    "quick_gelu": "quick_gelu",
}
"""Names of activations in `transformers`, and ours."""

NEARLY_GELU = ("gelu_10",)
"""Activations with other values than the GELU that they are described as; they read and write the same bytes."""

# -- the parts of a family's table ------------------------------------------------------------------------------------

Rule = Callable[[ConfigKeys], Any]
"""Finds the value of one field of the description."""


@dataclass(frozen=True, slots=True)
class Head:
    """What follows the last block, and what had to be assumed about it."""

    fields: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Only:
    """A key that changes the network in a way that no description holds, and the values that do not."""

    key: str
    accepted: tuple[object, ...]
    why: str
    group: str | None = None

    def check(self, settings: ConfigKeys) -> None:
        """Refuse any value but the accepted ones."""
        inside = settings.group(self.group) if self.group else settings
        value = inside.table.get(self.key, self.accepted[0])
        if value is not None and value not in self.accepted:
            raise FlopwiseError(
                f"{inside.owner}: {self.key} = {shown(value)} cannot be described",
                why=self.why,
                hint=f"leave {self.key} out for the nearest model that can",
            )


def architecture_of(settings: ConfigKeys) -> str:
    """The class that the file was saved from; `transformers` too looks at the first one only."""
    return next(iter(settings.texts("architectures")), "")


def no_such_head(settings: ConfigKeys, architecture: str, hint: str) -> FlopwiseError:
    return FlopwiseError(
        f"{settings.owner}: the head of {shown(architecture)} cannot be described",
        why="there are language models, and masked language models and sequence classifiers of encoders",
        hint=hint,
    )


def dropout_of(
    absent: float = 0.0,
    *,
    group: str = "",
    attention: str,
    hidden: str = "",
    embedding: str = "",
    classifier: str = "",
    absent_of_classifier: float | None = None,
    **sites: bool,
) -> Rule:
    """Under which keys a family has its probabilities, and what an absent one stands for; no key, no such site.

    `sites`: what a family drops otherwise than others, by the fields of `Dropout`.
    """

    def rule(settings: ConfigKeys) -> Dropout | None:
        inside = settings.group(group) if group else settings
        share = settings.share(hidden, absent) if hidden else 0.0
        absent_last = share if absent_of_classifier is None else absent_of_classifier
        last = settings.share(classifier, absent_last) if classifier else share
        found = Dropout(
            attention=inside.share(attention, absent),
            hidden=share,
            embedding=settings.share(embedding, absent) if embedding else 0.0,
            classifier=None if last == share else last,
            **sites,
        )
        return found if found.sites or found.of_classifier else None

    return rule


def language_head(settings: ConfigKeys, family: Family) -> Head:
    architecture = architecture_of(settings)
    if architecture in family.bare:
        return Head({}, f"{architecture} has no head; a language head is assumed")
    if architecture and not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise no_such_head(settings, architecture, 'leave "architectures" out for a language model of these blocks')
    return Head({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How one `model_type` spells its shape."""

    title: str
    bare: tuple[str, ...]
    """Classes of the network without a head."""
    rules: Mapping[str, Rule]
    head: Callable[[ConfigKeys, Family], Head] = language_head
    only: tuple[Only, ...] = ()
    note: Callable[[ConfigKeys], str] = lambda _: ""


def size_of(*keys: str, absent: int | None = None, null: int | None = None) -> Rule:
    return lambda settings: settings.size(*keys, absent=absent, null=null)


def flag_of(key: str, absent: bool) -> Rule:
    return lambda settings: settings.flag(key, absent)


def number_of(*keys: str, absent: float) -> Rule:
    return lambda settings: settings.number(*keys, absent=absent)


def fixed(value: object) -> Rule:
    return lambda _: value


def activation_of(key: str, absent: str) -> Rule:
    def rule(settings: ConfigKeys) -> str:
        written = settings.text(key, absent)
        if written not in ACTIVATIONS:
            raise FlopwiseError(
                f"{settings.owner}: {key} = {shown(written)} is no activation of transformers",
                hint=f"one of {', '.join(sorted(ACTIVATIONS))}",
            )
        return ACTIVATIONS[written]

    return rule


def activation_note(settings: ConfigKeys) -> str:
    """What to tell about an activation that no description holds exactly."""
    written = (settings.table.get(key) for key in ("hidden_act", "activation_function"))
    nearly = [name for name in written if name in NEARLY_GELU]
    return f"{nearly[0]} is taken for gelu, whose values differ a little" if nearly else ""


def rotary_settings(settings: ConfigKeys) -> ConfigKeys:
    """The rotary numbers, under `rope_parameters` since transformers 5; the older `rope_scaling` goes before it."""
    older = settings.group("rope_scaling")
    return older if older.table else settings.group("rope_parameters")


def rotary_kind(settings: ConfigKeys) -> str:
    """`default`, or how rotary angles are scaled."""
    rotary = rotary_settings(settings)
    if any(isinstance(value, dict) for value in rotary.table.values()):
        return "by kind of block"
    return rotary.text("rope_type", rotary.text("type", "default"))


def rotary_base(key: str, absent: float) -> Rule:
    """The base beside the other rotary numbers, or else under `key`, where files of older versions have it."""
    return lambda settings: rotary_settings(settings).number("rope_theta", absent=settings.number(key, absent=absent))


def rotary_scaling(settings: ConfigKeys) -> RotaryScaling | None:
    return scaling_in(rotary_settings(settings), settings)


def scaling_in(rotary: ConfigKeys, settings: ConfigKeys) -> RotaryScaling | None:
    """The scaling that a group of rotary numbers tells; None also where no description holds it."""
    kind = rotary.text("rope_type", rotary.text("type", "default"))
    if settings.table.get("model_type") == "phi3" and kind in ("su", "yarn"):
        # Earlier names of what it has always computed.
        kind = "longrope"
    if kind == "linear":
        return RotaryScaling(factor=rotary.number("factor"))
    if kind not in SCALINGS:
        return None
    context = settings.size("max_position_embeddings", absent=2048)
    if kind == "dynamic":
        return RotaryScaling(method="dynamic", factor=rotary.number("factor"), original_context=context)
    inside = rotary.size("original_max_position_embeddings", absent=context, null=context)
    original = settings.size("original_max_position_embeddings", absent=inside, null=inside)
    try:
        if kind == "llama3":
            return RotaryScaling(
                factor=rotary.number("factor"),
                original_context=inside,
                low_frequency_factor=rotary.number("low_freq_factor"),
                high_frequency_factor=rotary.number("high_freq_factor"),
            )
        factor = rotary.number("factor", absent=context / original)
        attention = rotary.number("attention_factor", absent=0.0) or None
        if kind == "longrope":
            return RotaryScaling(
                method="longrope",
                factor=factor,
                original_context=original,
                attention_factor=attention,
                short_factors=tuple(rotary.numbers("short_factor")),
                long_factors=tuple(rotary.numbers("long_factor")),
            )
        return RotaryScaling(
            method="yarn",
            factor=factor,
            original_context=original,
            attention_factor=attention,
            beta_fast=rotary.number("beta_fast", absent=32.0),
            beta_slow=rotary.number("beta_slow", absent=1.0),
            mscale=rotary.number("mscale", absent=0.0) or None,
            mscale_all_dim=rotary.number("mscale_all_dim", absent=0.0) or None,
            truncate=rotary.flag("truncate", absent=True),
        )
    except FlopwiseError as error:
        raise error.within(settings.owner) from None


SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of blocks, as `layer_types` has them."""

SCALINGS = ("llama3", "dynamic", "yarn", "longrope")
"""Rotary scalings that need to know the context before them."""


def rotary_dim(absent: float, old_key: str = "partial_rotary_factor") -> Rule:
    """The channels of a head that turn, where only a share of them does."""

    def rule(settings: ConfigKeys) -> int | None:
        beside = settings.number(old_key, absent=absent)
        share = rotary_settings(settings).number("partial_rotary_factor", absent=beside)
        whole = settings.size("head_dim", absent=0, null=0)
        whole = whole or settings.size("hidden_size") // settings.size("num_attention_heads")
        # More than all is refused with the description; a number beyond any size is no whole number at all.
        turned = int(whole * min(share, 2.0))
        return None if turned == whole else turned

    return rule


def rotary_note(settings: ConfigKeys) -> str:
    """What to tell about a rotary scaling that no description holds; what is counted does not depend on it."""
    kind = rotary_kind(settings)
    # Of several axes along which a text has the same positions.
    known = ("default", "mrope", "linear", *SCALINGS)
    if kind == "by kind of block" and settings.table.get("model_type") in BY_KIND:
        groups = (rotary_settings(settings).group(name) for name in (SLIDING, FULL))
        kind = next((own for group in groups if (own := group.text("rope_type", "default")) not in known), "default")
    if kind in known or (kind == "su" and settings.table.get("model_type") == "phi3"):
        return ""
    return f"rotary scaling {shown(kind)} is left out; unscaled rotary positions are assumed"


BY_KIND = ("gemma3_text", "olmo3", "modernbert")
"""Families with rotary numbers for each kind of block."""


def labels_of(settings: ConfigKeys) -> int:
    """The map of labels decides; `num_labels` counts only without one."""
    if settings.table.get("id2label") is None:
        return settings.size("num_labels", absent=2, null=2)
    return len(settings.group("id2label").table)


# -- what many families share ------------------------------------------------------------------------------------------

NO_CROSS_ATTENTION = Only("add_cross_attention", (False,), "a description holds one stack, not two that are linked")

USUAL_SIZES: dict[str, Rule] = {
    "layers": size_of("num_hidden_layers"),
    "hidden": size_of("hidden_size"),
    "heads": size_of("num_attention_heads"),
    "ffn": size_of("intermediate_size"),
    "vocab": size_of("vocab_size"),
}

GPT_LIKE: dict[str, Rule] = {
    "norm": fixed("layer"),
    "norm_bias": fixed(True),
    "gated": fixed(False),
    "qkv_bias": fixed(True),
    "output_bias": fixed(True),
    "ffn_bias": fixed(True),
}
