"""How each family of Hugging Face `transformers` spells its shape in a `config.json`.

Each family is a table: which field of the description comes from which key, and which default `transformers` takes
when the key is absent. The sizes that make a model (layers, widths, heads, vocabulary) have no default here: a file
without them is a mistake, not a request for the 7B model that `transformers` would build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from flopwise.base.errors import FlopwiseError, shown
from flopwise.catalog.huggingface_settings import ConfigKeys
from flopwise.work.transformer import Dropout, OtherAttention, RotaryScaling

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


def _architecture(settings: ConfigKeys) -> str:
    """The class that the file was saved from; `transformers` too looks at the first one only."""
    return next(iter(settings.texts("architectures")), "")


def _no_such_head(settings: ConfigKeys, architecture: str, hint: str) -> FlopwiseError:
    return FlopwiseError(
        f"{settings.owner}: the head of {shown(architecture)} cannot be described",
        why="there are language models, masked language models (BERT) and sequence classifiers (BERT)",
        hint=hint,
    )


def _dropout(
    absent: float = 0.0, *, group: str = "", attention: str, hidden: str = "", embedding: str = "", classifier: str = ""
) -> Rule:
    """Under which keys a family has its probabilities, and what an absent one stands for; no key, no such site."""

    def rule(settings: ConfigKeys) -> Dropout | None:
        inside = settings.group(group) if group else settings
        share = settings.share(hidden, absent) if hidden else 0.0
        last = settings.share(classifier, share) if classifier else share
        found = Dropout(
            attention=inside.share(attention, absent),
            hidden=share,
            embedding=settings.share(embedding, absent) if embedding else 0.0,
            classifier=None if last == share else last,
        )
        return found if found.sites or found.of_classifier else None

    return rule


def _language_head(settings: ConfigKeys, family: Family) -> Head:
    architecture = _architecture(settings)
    if architecture in family.bare:
        return Head({}, f"{architecture} has no head; a language head is assumed")
    if architecture and not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise _no_such_head(settings, architecture, 'leave "architectures" out for a language model of these blocks')
    return Head({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How one `model_type` spells its shape."""

    title: str
    bare: tuple[str, ...]
    """Classes of the network without a head."""
    rules: Mapping[str, Rule]
    head: Callable[[ConfigKeys, Family], Head] = _language_head
    only: tuple[Only, ...] = ()
    note: Callable[[ConfigKeys], str] = lambda _: ""


def _size(*keys: str, absent: int | None = None, null: int | None = None) -> Rule:
    return lambda settings: settings.size(*keys, absent=absent, null=null)


def _flag(key: str, absent: bool) -> Rule:
    return lambda settings: settings.flag(key, absent)


def _number(*keys: str, absent: float) -> Rule:
    return lambda settings: settings.number(*keys, absent=absent)


def _fix(value: object) -> Rule:
    return lambda _: value


def _activation(key: str, absent: str) -> Rule:
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


def _rotary_settings(settings: ConfigKeys) -> ConfigKeys:
    """The rotary numbers, under `rope_parameters` since transformers 5; the older `rope_scaling` goes before it."""
    older = settings.group("rope_scaling")
    return older if older.table else settings.group("rope_parameters")


def rotary_kind(settings: ConfigKeys) -> str:
    """`default`, or how rotary angles are scaled."""
    rotary = _rotary_settings(settings)
    if any(isinstance(value, dict) for value in rotary.table.values()):
        return "by kind of block"
    return rotary.text("rope_type", rotary.text("type", "default"))


def _rotary_base(key: str, absent: float) -> Rule:
    """The base beside the other rotary numbers, or else under `key`, where files of older versions have it."""
    return lambda settings: _rotary_settings(settings).number("rope_theta", absent=settings.number(key, absent=absent))


def _rotary_scaling(settings: ConfigKeys) -> RotaryScaling | None:
    return _scaling_in(_rotary_settings(settings), settings)


def _scaling_in(rotary: ConfigKeys, settings: ConfigKeys) -> RotaryScaling | None:
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


SCALINGS = ("llama3", "dynamic", "yarn", "longrope")
"""Rotary scalings that need to know the context before them."""


def _rotary_dim(absent: float, old_key: str = "partial_rotary_factor") -> Rule:
    """The channels of a head that turn, where only a share of them does."""

    def rule(settings: ConfigKeys) -> int | None:
        beside = settings.number(old_key, absent=absent)
        share = _rotary_settings(settings).number("partial_rotary_factor", absent=beside)
        whole = settings.size("head_dim", absent=0, null=0)
        whole = whole or settings.size("hidden_size") // settings.size("num_attention_heads")
        # More than all is refused with the description; a number beyond any size is no whole number at all.
        turned = int(whole * min(share, 2.0))
        return None if turned == whole else turned

    return rule


def rotary_note(settings: ConfigKeys) -> str:
    """What to tell about a rotary scaling that no description holds; what is counted does not depend on it."""
    kind = rotary_kind(settings)
    known = ("default", "linear", *SCALINGS)
    if kind == "by kind of block" and settings.table.get("model_type") in BY_KIND:
        groups = (_rotary_settings(settings).group(name) for name in (SLIDING, FULL))
        kind = next((own for group in groups if (own := group.text("rope_type", "default")) not in known), "default")
    if kind in known or (kind == "su" and settings.table.get("model_type") == "phi3"):
        return ""
    return f"rotary scaling {shown(kind)} is left out; unscaled rotary positions are assumed"


BY_KIND = ("gemma3_text", "olmo3")
"""Families with rotary numbers for each kind of block."""


def _bert_head(settings: ConfigKeys, family: Family) -> Head:
    architecture = _architecture(settings)
    if architecture in ("BertForMaskedLM", "BertLMHeadModel"):
        return Head({"head": "masked", "tied": settings.flag("tie_word_embeddings", absent=True)})
    if architecture and architecture not in ("BertForSequenceClassification", *family.bare):
        raise _no_such_head(settings, architecture, '"architectures": ["BertForMaskedLM"] for the nearest that can')
    labels = _labels(settings)
    fields = {"head": "classifier", "labels": labels}
    if architecture == "BertForSequenceClassification":
        told = settings.table.get("id2label") is not None or settings.table.get("num_labels") is not None
        return Head(fields, "" if told else f"the file names no labels; {labels} are assumed")
    return Head(fields, f"{architecture or 'the file'} names no head; a classifier of {labels} labels is assumed")


def _labels(settings: ConfigKeys) -> int:
    """The map of labels decides; `num_labels` counts only without one."""
    if settings.table.get("id2label") is None:
        return settings.size("num_labels", absent=2, null=2)
    return len(settings.group("id2label").table)


# -- the tables -------------------------------------------------------------------------------------------------------

EVERYWHERE = (
    Only("per_layer_config", ({},), "its blocks differ from each other; a description repeats one block"),
    Only("pruned_heads", ({},), "its blocks have different numbers of heads; a description repeats one block"),
)

NO_CROSS_ATTENTION = Only("add_cross_attention", (False,), "a description holds one stack, not two that are linked")

USUAL_SIZES: dict[str, Rule] = {
    "layers": _size("num_hidden_layers"),
    "hidden": _size("hidden_size"),
    "heads": _size("num_attention_heads"),
    "ffn": _size("intermediate_size"),
    "vocab": _size("vocab_size"),
}

GPT_LIKE: dict[str, Rule] = {
    "norm": _fix("layer"),
    "norm_bias": _fix(True),
    "gated": _fix(False),
    "qkv_bias": _fix(True),
    "output_bias": _fix(True),
    "ffn_bias": _fix(True),
}


def _llama_like(*, context: int, kv_heads: int) -> dict[str, Rule]:
    """What all of Llama's kin share; `context` and `kv_heads` are the defaults of absent keys (0: all heads)."""
    return {
        **USUAL_SIZES,
        "context": _size("max_position_embeddings", absent=context),
        "kv_heads": _size("num_key_value_heads", absent=kv_heads, null=0),
        "head_dim": _size("head_dim", absent=0, null=0),
        "activation": _activation("hidden_act", absent="silu"),
        "tied": _flag("tie_word_embeddings", absent=False),
        "norm_epsilon": _number("rms_norm_eps", absent=1e-6),
        "rotary_base": _rotary_base("rope_theta", absent=10_000.0),
        "rotary_scaling": _rotary_scaling,
        "dropout": _dropout(attention="attention_dropout"),
    }


def _window(absent: int) -> Rule:
    return lambda settings: settings.size("sliding_window", absent=absent, null=0) or None


SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of blocks, as `layer_types` has them."""

Kinds = Callable[[ConfigKeys], list[str]]
"""Finds the kind of each block."""
Angles = Callable[[ConfigKeys, str], tuple[float, RotaryScaling | None] | None]
"""Finds base and scaling of the rotary positions of a kind; None: it has no positions."""


MOST_BLOCKS = 100_000
"""Of a list of kinds."""


def _blocks(settings: ConfigKeys) -> int:
    """The number of blocks, where there is an entry for each."""
    layers = settings.size("num_hidden_layers")
    if layers > MOST_BLOCKS:
        raise FlopwiseError(
            f"{settings.owner}: num_hidden_layers = {shown(layers)} is too large",
            why=f"kinds of blocks are listed for up to {MOST_BLOCKS:,}",
            hint="correct num_hidden_layers",
        )
    return layers


def _kinds(default: Kinds) -> Kinds:
    """The kinds that a file lists, or else what its family's absent list stands for."""

    def rule(settings: ConfigKeys) -> list[str]:
        found = settings.texts("layer_types") or default(settings)
        if set(found) - {SLIDING, FULL} or len(found) != _blocks(settings):
            raise FlopwiseError(
                f"{settings.owner}: layer_types cannot be described",
                why=f"each block has {SLIDING} or {FULL}, and there is one entry for each",
                hint="correct layer_types",
            )
        return found

    return rule


def _full_every(absent: int) -> Kinds:
    """Every so many blocks one that looks back over everything."""

    def rule(settings: ConfigKeys) -> list[str]:
        every = settings.size("sliding_window_pattern", absent=absent, null=absent)
        return [SLIDING if number % every else FULL for number in range(1, _blocks(settings) + 1)]

    return _kinds(rule)


def _usual_angles(absent: float) -> Angles:
    return lambda settings, _: (_rotary_base("rope_theta", absent)(settings), _rotary_scaling(settings))


def _by_kind(kinds: Kinds, angles: Angles, window: int | None = 4096) -> dict[str, Rule]:
    """The rules of a family whose blocks come in kinds: those without a window have `other_attention`.

    `window`: what an absent one stands for.
    """

    def attention(settings: ConfigKeys, kind: str) -> OtherAttention:
        turned = angles(settings, kind)
        base, scaling = turned or (10_000.0, None)
        seen = settings.size("sliding_window", absent=window or 0, null=0) or None
        return OtherAttention(
            window=seen if kind == SLIDING else None,
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


def _qwen_kinds(settings: ConfigKeys) -> list[str]:
    """Qwen gives the window to its upper blocks only, if at all."""
    if not settings.flag("use_sliding_window", absent=False):
        return [FULL]
    layers = _blocks(settings)
    full = min(settings.size("max_window_layers", absent=28, least=0), layers)
    return _kinds(lambda _: [FULL] * full + [SLIDING] * (layers - full))(settings)


def _angles_by_kind(bases: Mapping[str, float], local_key: str = "rope_theta") -> Angles:
    """A group of rotary numbers for each kind; in older files the scaling is for those without a window alone."""

    def rule(settings: ConfigKeys, kind: str) -> tuple[float, RotaryScaling | None]:
        rotary = _rotary_settings(settings)
        if isinstance(rotary.table.get(kind), dict):
            own = rotary.group(kind)
            return own.number("rope_theta", absent=bases[kind]), _scaling_in(own, settings)
        if kind == FULL:
            return settings.number("rope_theta", absent=bases[kind]), _scaling_in(rotary, settings)
        return settings.number(local_key, absent=bases[kind]), None

    return rule


def _smollm_kinds(settings: ConfigKeys) -> list[str]:
    """Blocks without positions count as those of the other kind: SmolLM3 has no windows."""
    layers = _blocks(settings)
    every = settings.size("no_rope_layer_interval", absent=4)
    given = settings.table.get("no_rope_layers")
    turns = (
        given if isinstance(given, list) and given else [int(number % every != 0) for number in range(1, layers + 1)]
    )
    if len(turns) != layers or SLIDING in settings.texts("layer_types"):
        raise FlopwiseError(
            f"{settings.owner}: no_rope_layers or layer_types cannot be described",
            why="there is one entry for each block, and no block has a window",
            hint="correct them",
        )
    return [SLIDING if turn else FULL for turn in turns]


def _ministral_kinds(settings: ConfigKeys) -> list[str]:
    windows = settings.size("sliding_window", absent=4096, null=0)
    return _kinds(lambda _: [SLIDING if windows else FULL] * _blocks(settings))(settings)


def _cap(key: str, absent: float | None) -> Rule:
    """The cap under a key; null: none."""
    return lambda settings: None if settings.table.get(key, absent) is None else settings.number(key, absent=absent)


def _gemma_like(*, kv_heads: int, activation: str, context: int = 8192) -> dict[str, Rule]:
    return {
        **_llama_like(context=context, kv_heads=kv_heads),
        **ATTENTION_BIAS,
        "head_dim": _size("head_dim", absent=256),
        "activation": _activation(activation, absent="gelu_pytorch_tanh"),
        "norm_adds_one": _fix(True),
        "embedding_scale": lambda settings: sqrt(settings.size("hidden_size")),
        "tied": _flag("tie_word_embeddings", absent=True),
    }


def _gemma_sandwich(*, context: int, caps: tuple[float | None, float | None]) -> dict[str, Rule]:
    return {
        **_gemma_like(kv_heads=4, activation="hidden_activation", context=context),
        "norm_place": _fix("sandwich"),
        "attention_scale": lambda settings: settings.number("query_pre_attn_scalar", absent=256.0) ** -0.5,
        "attention_cap": _cap("attn_logit_softcapping", caps[0]),
        "logit_cap": _cap("final_logit_softcapping", caps[1]),
    }


def _olmo_like() -> dict[str, Rule]:
    return {
        **_llama_like(context=2048, kv_heads=0),
        **ATTENTION_BIAS,
        "norm_place": _fix("behind"),
        "qk_norm": _fix(True),
        "qk_norm_over": _fix("all"),
        "norm_epsilon": _number("rms_norm_eps", absent=1e-5),
    }


def _cohere_like() -> dict[str, Rule]:
    return {
        **_llama_like(context=8192, kv_heads=0),
        **ATTENTION_BIAS,
        "norm": _fix("layer"),
        "parallel_residual": _fix(True),
        "shared_norm": _fix(True),
        "rotary_pairs": _fix("neighbours"),
        "rotary_base": _rotary_base("rope_theta", absent=500_000.0),
        "logit_scale": _number("logit_scale", absent=0.0625),
        "norm_epsilon": _number("layer_norm_eps", absent=1e-5),
        "tied": _flag("tie_word_embeddings", absent=True),
    }


def _gpt2_ffn(settings: ConfigKeys) -> int:
    return settings.size("n_inner", absent=0, null=0) or 4 * settings.size("hidden_size", "n_embd")


def _gpt2_note(settings: ConfigKeys) -> str:
    """Scores that are divided by a number of each layer have other values, but are counted the same."""
    by_layer = settings.flag("scale_attn_by_inverse_layer_idx", absent=False)
    return "attention scores are taken to be divided by √head_dim, as in the released GPT-2" if by_layer else ""


def _mpt_positions(settings: ConfigKeys) -> str:
    if settings.group("attn_config").flag("alibi", absent=True):
        return "alibi"
    return "learned" if settings.flag("learned_pos_emb", absent=True) else "none"


def _mpt_position_rows(settings: ConfigKeys) -> int | None:
    return settings.size("max_seq_len", absent=2048) if _mpt_positions(settings) == "learned" else None


def _mpt_ffn(settings: ConfigKeys) -> int:
    return settings.size("expansion_ratio", absent=4) * settings.size("hidden_size", "d_model")


def _mpt_bias(settings: ConfigKeys) -> bool:
    return not settings.flag("no_bias", absent=True)


def _mpt_note(settings: ConfigKeys) -> str:
    """`transformers` has one kind of MPT and overlooks these keys; the library that writes the files heeds them."""
    usual = (_mpt_positions(settings), _mpt_bias(settings), settings.size("expansion_ratio", absent=4))
    if usual == ("alibi", False, 4):
        return ""
    return "positions, biases and expansion as in llm-foundry; transformers builds ALiBi, no biases and 4"


def _glm_like() -> dict[str, Rule]:
    return {
        **_llama_like(context=131_072, kv_heads=2),
        "head_dim": _size("head_dim", absent=128, null=0),
        "qkv_bias": _flag("attention_bias", absent=True),
        "rotary_pairs": _fix("neighbours"),
        "rotary_dim": _rotary_dim(0.5),
        "norm_epsilon": _number("rms_norm_eps", absent=1.5625e-7),
    }


ATTENTION_BIAS = {
    "qkv_bias": _flag("attention_bias", absent=False),
    "output_bias": _flag("attention_bias", absent=False),
}
"""One switch for all four products around attention."""
NO_LOOKING_AHEAD = Only("use_bidirectional_attention", (False,), "its tokens see those that come after them")
NO_QK_NORM = Only("qk_layernorm", (False,), "its norms of queries and keys are none that a description holds")

FAMILIES: dict[str, Family] = {
    "llama": Family(
        title="Llama",
        bare=("LlamaModel",),
        rules={
            **_llama_like(context=2048, kv_heads=0),
            **ATTENTION_BIAS,
            "ffn_bias": _flag("mlp_bias", absent=False),
        },
    ),
    "mistral": Family(
        title="Mistral",
        bare=("MistralModel",),
        rules={**_llama_like(context=131072, kv_heads=8), "window": _window(absent=4096)},
    ),
    "mixtral": Family(
        title="Mixtral",
        bare=("MixtralModel",),
        rules={
            **_llama_like(context=131072, kv_heads=8),
            "window": _window(absent=0),
            "experts": _size("num_experts", "num_local_experts", absent=8),
            "experts_per_token": _size("num_experts_per_tok", absent=2),
            "norm_epsilon": _number("rms_norm_eps", absent=1e-5),
            "rotary_base": _rotary_base("rope_theta", absent=1e6),
        },
    ),
    "qwen2": Family(
        title="Qwen2",
        bare=("Qwen2Model",),
        rules={
            **_llama_like(context=32768, kv_heads=32),
            **_by_kind(_qwen_kinds, _usual_angles(10_000.0)),
            "qkv_bias": _fix(True),
        },
    ),
    "qwen3": Family(
        title="Qwen3",
        bare=("Qwen3Model",),
        rules={
            **_llama_like(context=32768, kv_heads=32),
            "head_dim": _size("head_dim", absent=128),
            **_by_kind(_qwen_kinds, _usual_angles(10_000.0)),
            **ATTENTION_BIAS,
            "qk_norm": _fix(True),
        },
    ),
    "gpt2": Family(
        title="GPT-2",
        bare=("GPT2Model",),
        note=_gpt2_note,
        only=(NO_CROSS_ATTENTION,),
        rules={
            **GPT_LIKE,
            # transformers takes the usual name too, and prefers it to the family's own.
            "layers": _size("num_hidden_layers", "n_layer"),
            "hidden": _size("hidden_size", "n_embd"),
            "heads": _size("num_attention_heads", "n_head"),
            "ffn": _gpt2_ffn,
            "vocab": _size("vocab_size"),
            "context": _size("max_position_embeddings", "n_positions", absent=1024),
            "positions": _fix("learned"),
            "attention_scale": lambda settings: None if settings.flag("scale_attn_weights", absent=True) else 1.0,
            "position_rows": _size("max_position_embeddings", "n_positions", absent=1024),
            "activation": _activation("activation_function", absent="gelu_new"),
            "norm_epsilon": _number("layer_norm_epsilon", absent=1e-5),
            "tied": _flag("tie_word_embeddings", absent=True),
            "dropout": _dropout(
                0.1,
                attention="attn_pdrop",
                hidden="resid_pdrop",
                embedding="embd_pdrop",
                classifier="summary_first_dropout",
            ),
        },
    ),
    "gpt_neox": Family(
        title="GPT-NeoX",
        bare=("GPTNeoXModel",),
        rules={
            **USUAL_SIZES,
            **GPT_LIKE,
            "context": _size("max_position_embeddings", absent=2048),
            "activation": _activation("hidden_act", absent="gelu"),
            "qkv_bias": _flag("attention_bias", absent=True),
            "output_bias": _flag("attention_bias", absent=True),
            "parallel_residual": _flag("use_parallel_residual", absent=True),
            "tied": _flag("tie_word_embeddings", absent=False),
            "norm_epsilon": _number("layer_norm_eps", absent=1e-5),
            "rotary_base": _rotary_base("rotary_emb_base", absent=10_000.0),
            "rotary_scaling": _rotary_scaling,
            "rotary_dim": _rotary_dim(0.25, "rotary_pct"),
            "dropout": _dropout(attention="attention_dropout", hidden="hidden_dropout", embedding="hidden_dropout"),
        },
    ),
    "mpt": Family(
        title="MPT",
        bare=("MptModel", "MPTModel"),
        note=_mpt_note,
        only=(
            Only("attn_type", ("multihead_attention",), "its heads share keys in another way", "attn_config"),
            Only("qk_ln", (False,), "it normalises queries and keys over all heads at once", "attn_config"),
            Only("prefix_lm", (False,), "its prefix looks ahead", "attn_config"),
            Only("rope", (False,), "it adds rotary positions", "attn_config"),
            Only("ffn_type", ("mptmlp",), "it has another feed-forward part", "ffn_config"),
            Only("norm_type", ("low_precision_layernorm", "layernorm"), "it has another norm"),
        ),
        rules={
            **GPT_LIKE,
            "layers": _size("num_hidden_layers", "n_layers"),
            "hidden": _size("hidden_size", "d_model"),
            "heads": _size("num_attention_heads", "n_heads"),
            "ffn": _mpt_ffn,
            "vocab": _size("vocab_size"),
            "context": _size("max_seq_len", absent=2048),
            "positions": _mpt_positions,
            "position_rows": _mpt_position_rows,
            "activation": _fix("gelu"),
            "norm_epsilon": _number("layer_norm_epsilon", absent=1e-5),
            "norm_bias": _mpt_bias,
            "qkv_bias": _mpt_bias,
            "output_bias": _mpt_bias,
            "ffn_bias": _mpt_bias,
            "dropout": _dropout(
                group="attn_config", attention="attn_pdrop", hidden="resid_pdrop", embedding="emb_pdrop"
            ),
            "tied": _flag("tie_word_embeddings", absent=True),
        },
    ),
    "bert": Family(
        title="BERT",
        bare=("BertModel",),
        head=_bert_head,
        only=(
            NO_CROSS_ATTENTION,
            Only("position_embedding_type", ("absolute",), "its positions are learned for each distance"),
        ),
        rules={
            **USUAL_SIZES,
            **GPT_LIKE,
            "context": _size("max_position_embeddings", absent=512),
            "causal": lambda settings: settings.flag("is_decoder", absent=False),
            "positions": _fix("learned"),
            "position_rows": _size("max_position_embeddings", absent=512),
            "activation": _activation("hidden_act", absent="gelu"),
            "norm_place": _fix("post"),
            "embedding_norm": _fix(True),
            "final_norm": _fix(False),
            "head_bias": _fix(True),
            "token_types": _size("type_vocab_size", absent=2),
            "norm_epsilon": _number("layer_norm_eps", absent=1e-12),
            "dropout": _dropout(
                0.1,
                attention="attention_probs_dropout_prob",
                hidden="hidden_dropout_prob",
                embedding="hidden_dropout_prob",
                classifier="classifier_dropout",
            ),
        },
    ),
    "phi": Family(
        title="Phi",
        bare=("PhiModel",),
        only=(NO_QK_NORM,),
        rules={
            **_llama_like(context=2048, kv_heads=0),
            **GPT_LIKE,
            "activation": _activation("hidden_act", absent="gelu_new"),
            "parallel_residual": _fix(True),
            "shared_norm": _fix(True),
            "head_bias": _fix(True),
            "norm_epsilon": _number("layer_norm_eps", absent=1e-5),
            "rotary_dim": _rotary_dim(0.5),
            "dropout": _dropout(attention="attention_dropout", hidden="resid_pdrop", embedding="embd_pdrop"),
        },
    ),
    "phi3": Family(
        title="Phi-3",
        bare=("Phi3Model",),
        rules={
            **_llama_like(context=4096, kv_heads=0),
            "window": _window(absent=0),
            "norm_epsilon": _number("rms_norm_eps", absent=1e-5),
            "rotary_dim": _rotary_dim(1.0),
            "dropout": _dropout(attention="attention_dropout", hidden="resid_pdrop"),
        },
    ),
    "starcoder2": Family(
        title="Starcoder2",
        bare=("Starcoder2Model",),
        rules={
            **_llama_like(context=4096, kv_heads=2),
            "norm": _fix("layer"),
            "norm_bias": _fix(True),
            "gated": _fix(False),
            **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), _flag("use_bias", absent=True)),
            "activation": _activation("hidden_act", absent="gelu_pytorch_tanh"),
            "norm_epsilon": _number("norm_epsilon", absent=1e-5),
            "window": _window(absent=0),
            "tied": _flag("tie_word_embeddings", absent=True),
            "dropout": _dropout(
                attention="attention_dropout", hidden="residual_dropout", embedding="embedding_dropout"
            ),
        },
    ),
    "stablelm": Family(
        title="StableLM",
        bare=("StableLmModel",),
        only=(NO_QK_NORM, Only("hidden_dropout", (0.0, 0), "it drops of the feed-forward part alone")),
        rules={
            **_llama_like(context=4096, kv_heads=32),
            "norm": _fix("layer"),
            "norm_bias": _fix(True),
            "qkv_bias": _flag("use_qkv_bias", absent=False),
            "parallel_residual": _flag("use_parallel_residual", absent=False),
            "shared_norm": _flag("use_parallel_residual", absent=False),
            "norm_epsilon": _number("layer_norm_eps", absent=1e-5),
            "rotary_dim": _rotary_dim(0.25),
        },
    ),
    "arcee": Family(
        title="Arcee",
        bare=("ArceeModel",),
        rules={
            **_llama_like(context=4096, kv_heads=0),
            **ATTENTION_BIAS,
            "gated": _fix(False),
            "activation": _activation("hidden_act", absent="relu2"),
            "ffn_bias": _flag("mlp_bias", absent=False),
            "norm_epsilon": _number("rms_norm_eps", absent=1e-5),
        },
    ),
    "olmo2": Family(title="OLMo 2", bare=("Olmo2Model",), rules=_olmo_like()),
    "olmo3": Family(
        title="OLMo 3",
        bare=("Olmo3Model",),
        rules={**_olmo_like(), **_by_kind(_full_every(4), _angles_by_kind(dict.fromkeys((SLIDING, FULL), 500_000.0)))},
    ),
    "granite": Family(
        title="Granite",
        bare=("GraniteModel",),
        rules={
            **_llama_like(context=2048, kv_heads=0),
            **ATTENTION_BIAS,
            "ffn_bias": _flag("mlp_bias", absent=False),
            "embedding_scale": _number("embedding_multiplier", absent=1.0),
            "residual_scale": _number("residual_multiplier", absent=1.0),
            "attention_scale": _number("attention_multiplier", absent=1.0),
            "logit_scale": lambda settings: 1.0 / settings.number("logits_scaling", absent=1.0),
        },
    ),
    "glm": Family(title="GLM", bare=("GlmModel",), rules=_glm_like()),
    "glm4": Family(title="GLM-4", bare=("Glm4Model",), rules={**_glm_like(), "norm_place": _fix("sandwich")}),
    "cohere": Family(
        title="Cohere",
        bare=("CohereModel",),
        only=(Only("use_qk_norm", (False,), "its norms of queries and keys are none that a description holds"),),
        rules=_cohere_like(),
    ),
    "cohere2": Family(
        title="Cohere 2",
        bare=("Cohere2Model",),
        only=(Only("use_qk_norm", (False,), "its norms of queries and keys are none that a description holds"),),
        rules={
            **_cohere_like(),
            **_by_kind(
                _full_every(4),
                # Blocks without a window have no positions.
                lambda settings, kind: _usual_angles(10_000.0)(settings, kind) if kind == SLIDING else None,
            ),
        },
    ),
    "gemma": Family(
        title="Gemma",
        bare=("GemmaModel",),
        only=(NO_LOOKING_AHEAD,),
        rules=_gemma_like(kv_heads=16, activation="hidden_act"),
    ),
    "gemma2": Family(
        title="Gemma 2",
        bare=("Gemma2Model",),
        only=(NO_LOOKING_AHEAD,),
        rules={
            **_gemma_sandwich(context=8192, caps=(50.0, 30.0)),
            **_by_kind(_full_every(2), _usual_angles(10_000.0)),
        },
    ),
    "gemma3_text": Family(
        title="Gemma 3",
        bare=("Gemma3TextModel",),
        only=(NO_LOOKING_AHEAD,),
        rules={
            **_gemma_sandwich(context=131_072, caps=(None, None)),
            "qk_norm": _fix(True),
            **_by_kind(_full_every(6), _angles_by_kind({SLIDING: 10_000.0, FULL: 1e6}, "rope_local_base_freq")),
        },
    ),
    "ministral": Family(
        title="Ministral",
        bare=("MinistralModel",),
        rules={
            **_llama_like(context=131_072, kv_heads=8),
            **_by_kind(_ministral_kinds, _usual_angles(10_000.0)),
        },
    ),
    "smollm3": Family(
        title="SmolLM3",
        bare=("SmolLM3Model",),
        only=(Only("use_sliding_window", (False,), "windows and positions by block cannot be described together"),),
        rules={
            **_llama_like(context=32_768, kv_heads=4),
            **ATTENTION_BIAS,
            "ffn_bias": _flag("mlp_bias", absent=False),
            "tied": _flag("tie_word_embeddings", absent=True),
            **_by_kind(
                _smollm_kinds,
                lambda settings, kind: _usual_angles(2e6)(settings, kind) if kind == SLIDING else None,
                window=None,
            ),
            "window": _fix(None),
        },
    ),
    "seed_oss": Family(
        title="Seed-OSS",
        bare=("SeedOssModel",),
        rules={
            **_llama_like(context=524_288, kv_heads=8),
            "head_dim": _size("head_dim", absent=128, null=0),
            "qkv_bias": _flag("attention_bias", absent=True),
            "output_bias": _flag("attention_out_bias", absent=False),
            "ffn_bias": _flag("mlp_bias", absent=False),
            "dropout": _dropout(0.1, attention="attention_dropout", hidden="residual_dropout"),
        },
    ),
}
