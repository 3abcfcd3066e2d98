"""Describe the network that Hugging Face `transformers` builds from a `config.json`.

Left out, because no description holds it: quantisation, auxiliary losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flopwise.base.errors import FlopwiseError, shown
from flopwise.catalog.huggingface_families import EVERYWHERE, FAMILIES
from flopwise.catalog.huggingface_hybrids import NOT_DESCRIBED
from flopwise.catalog.huggingface_rules import Family, activation_note, rotary_note
from flopwise.catalog.huggingface_settings import ConfigKeys
from flopwise.work.transformer import Transformer


def from_config(config: dict[str, object], name: str) -> Transformer:
    """Describe the model of a `config.json`, already parsed, under the name `name`.

    Whatever the file holds, the only exception is `FlopwiseError`. A choice that the file leaves open, such as the
    head of a bare encoder, is told in the description's `note`.
    """
    settings = ConfigKeys(config, name)
    if (inner := _language_part(settings)) is not None:
        found = from_config(inner, name)
        told = "its vision part is left out: the language model is described, and trained"
        return replace(found, note="; ".join(filter(None, (told, found.note))))
    model_type, family = _family(settings)
    for only in (*EVERYWHERE, *family.only):
        only.check(settings)
    head = family.head(settings, family)
    fields = {field: rule(settings) for field, rule in family.rules.items()}
    notes = [head.note, family.note(settings), activation_note(settings), _quantisation_note(settings)]
    if "rotary_scaling" in family.rules:
        notes.append(rotary_note(settings))
    return Transformer(
        name=name,
        title=f"{name} ({family.title})",
        source=f'Hugging Face config.json, model_type "{model_type}"',
        family=model_type,
        note="; ".join(filter(None, notes)) or None,
        **{**fields, **head.fields},
    )


def computed_otherwise(config: dict[str, object], name: str) -> tuple[str, ...]:
    """What of a `config.json` its description leaves out so that the network's numbers would differ, in words."""
    settings = ConfigKeys(config, name)
    if (inner := _language_part(settings)) is not None:
        return computed_otherwise(inner, name)
    _, family = _family(settings)
    told = [family.note(settings), activation_note(settings)]
    if "rotary_scaling" in family.rules:
        told.append(rotary_note(settings))
    return tuple(filter(None, told))


WITH_VISION = {
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    **dict.fromkeys(("mistral3", "llava", "llava_next", "internvl", "smolvlm", "idefics3", "cohere2_vision"), ""),
}
"""Models of several parts whose language model is described, and its `model_type`; empty: what the part itself says.

Positions of text are the same along all three of Qwen-VL's axes, so that it turns as Qwen does."""
FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Of these, those whose older files have the language model's keys beside `vision_config`."""
OF_PARTS: dict[str, dict[str, object]] = {
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208},
}
"""What the released files of some leave to the defaults of transformers."""


def has_other_parts(config: Mapping[str, object]) -> bool:
    """Whether a `config.json` is of a model that sees, whose language model is described alone."""
    return _language_part(ConfigKeys(dict(config), "config.json")) is not None


def _language_part(settings: ConfigKeys) -> dict[str, object] | None:
    """The configuration of the language model of one that has other parts too, where it is known."""
    inner, outer = settings.table.get("text_config"), settings.table.get("model_type")
    if not isinstance(outer, str) or outer not in WITH_VISION:
        return None
    if outer in FLAT and inner is None:
        others = ("vision_config", "architectures")
        inner = {key: value for key, value in settings.table.items() if key not in others}
    if not isinstance(inner, dict):
        return None
    told = {key: value for key, value in inner.items() if key != "tie_word_embeddings" or value is not None}
    if "tie_word_embeddings" in settings.table:
        told = {"tie_word_embeddings": settings.flag("tie_word_embeddings", absent=False), **told}
    return {**OF_PARTS.get(outer, {}), **told, "model_type": WITH_VISION[outer] or inner.get("model_type")}


def _family(settings: ConfigKeys) -> tuple[str, Family]:
    named = settings.table.get("model_type")
    if isinstance(named, str) and named in NOT_DESCRIBED:
        raise FlopwiseError(
            f"{settings.owner}: models of {named} cannot be described yet",
            why=NOT_DESCRIBED[named],
            hint="`flopwise ls models` lists what can",
        )
    if isinstance(named, str) and named in WITH_VISION:
        raise FlopwiseError(
            f"{settings.owner}: {named} without its language model",
            why="its sizes are those under text_config, and no table is there",
            hint="the config.json that `save_pretrained` writes",
        )
    if isinstance(settings.table.get("text_config"), dict):
        raise FlopwiseError(
            f"{settings.owner}: a model of several parts, with its language model under text_config",
            why="a description holds one stack of equal blocks, without the vision or audio part",
            hint="save the object under text_config as a config.json of its own to describe the language model",
        )
    model_type = settings.table.get("model_type")
    known = ", ".join(sorted(FAMILIES))
    if model_type is None:
        raise FlopwiseError(
            f"{settings.owner}: model_type is missing",
            why=f"it names the family: {known}",
            hint='"model_type": "llama"',
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise FlopwiseError(
            f"{settings.owner}: no family of models is known for model_type {shown(model_type)}",
            why=f"known: {known}",
            hint="describe the model in a TOML file, with the fields of the models in the catalogue",
        )
    return model_type, FAMILIES[model_type]


def _quantisation_note(settings: ConfigKeys) -> str:
    given = settings.table.get("quantization_config") is not None
    return "quantization_config is ignored; training in the chosen precision is assumed" if given else ""
