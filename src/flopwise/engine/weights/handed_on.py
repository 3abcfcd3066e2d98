"""What makes a checkpoint a model that others can use, beside its numbers: its configuration and its tokenizer.

Files are copied as they came. Of a configuration that describes the trained network everything stays but what the
training decides: the type of the numbers, the labels, the class of a new head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import entry_kind, read_bounded, to_json
from flopwise.catalog.huggingface import from_config
from flopwise.engine.data.tokenizer import BYTES, MOST_FILE_BYTES, FileTokenizer, byte_tokenizer_files, tokenizer_file
from flopwise.engine.weights.checkpoint import GENERATION, TOKENIZER_FILES
from flopwise.engine.weights.huggingface import NAMES, config_of, family_of, has_class
from flopwise.setup.training import Task
from flopwise.work.transformer import Transformer

HEADS = ("ForCausalLM", "LMHeadModel", "ForSequenceClassification")
BALANCING = "output_router_logits"
"""With it transformers adds a loss that balances experts."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def files_to_hand_on(
    weights: Path | None, tokenizer: str | None, task: Task, *, own_data: bool = False
) -> dict[str, bytes]:
    """The tokenizer's files and the settings of generation, by name; `own_data`: nobody said which tokenizer it is."""
    found: dict[str, bytes] = {}
    if weights is not None:
        folder = weights if weights.is_dir() else weights.parent
        found |= _read(folder, (GENERATION,))
    if tokenizer is None and own_data:
        return found
    if tokenizer in (None, BYTES):
        return found | byte_tokenizer_files(marked=task in ("classification", "masked"), masked=task == "masked")
    path = tokenizer_file(tokenizer)
    found |= _read(path.parent, TOKENIZER_FILES) | {"tokenizer.json": read_bounded(path, MOST_FILE_BYTES)}
    if "tokenizer_config.json" not in found:
        # Without it the class would be guessed by the model's family, which may read another kind of file.
        read = FileTokenizer(path)
        named = {"eos_token": read.end_name, "mask_token": read.mask_name}
        table = {"tokenizer_class": "PreTrainedTokenizerFast"} | {key: name for key, name in named.items() if name}
        found["tokenizer_config.json"] = to_json(table).encode()
    return found


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: read_bounded(folder / name, MOST_FILE_BYTES) for name in names if entry_kind(folder / name) == "file"}


def config_to_save(
    model: Transformer,
    sequence_tokens: int,
    *,
    origin: Mapping[str, Any] | None,
    labels: tuple[str, ...],
    dtype: str,
    end: int | None,
) -> dict[str, Any] | None:
    """The config.json of a model that transformers has a class for; None: it has none, and weights keep our names.

    `origin`: what the training began with; `end`: the token that ends a text, where no configuration says so.
    """
    if not has_class(model):
        return None
    family = family_of(model)
    if model.positions == "rotary" and not _is_scaled_by_context(model):
        model = replace(model, context=max(model.context, sequence_tokens))
    config = config_of(model, sequence_tokens)
    if origin is not None and NAMES.get(str(origin.get("model_type"))) is NAMES[family] and _describes(origin, model):
        config = _carry_over(origin, config, 0 if _is_scaled_by_context(model) else sequence_tokens)
    elif origin is not None:
        config |= {key: origin[key] for key in SPECIAL if origin.get(key) is not None}
    if config.get("eos_token_id") is None and end is not None and model.head == "language":
        config["eos_token_id"] = end
    if labels and not _named_by_number(origin or {}, labels):
        config |= {"id2label": {str(number): label for number, label in enumerate(labels)}}
        config |= {"label2id": {label: number for number, label in enumerate(labels)}}
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    return config


def _carry_over(origin: Mapping[str, Any], ours: Mapping[str, Any], sequence_tokens: int) -> dict[str, Any]:
    """The configuration that it began with, but for what is another now."""
    config = dict(origin)
    classes = config.get("architectures") or [""]
    same_head = ours["architectures"][0].endswith("ForSequenceClassification") == classes[0].endswith(HEADS[-1])
    if not (classes[0].endswith(HEADS) and same_head):
        config["architectures"] = ours["architectures"]
    for key in ("problem_type", "id2label", "label2id"):
        if key in ours and key not in config:
            config[key] = ours[key]
    if config.get("max_position_embeddings", sequence_tokens) < sequence_tokens:
        config["max_position_embeddings"] = sequence_tokens
    if ours.get(BALANCING, False) != config.get(BALANCING, False) or ours.get(BALANCING, False):
        config |= {key: ours[key] for key in (BALANCING, "router_aux_loss_coef") if key in ours}
    # The numbers are none of a quantised model's any more.
    config.pop("quantization_config", None)
    return config


def _is_scaled_by_context(model: Transformer) -> bool:
    """Whether its positions would turn otherwise if its configuration told of another context."""
    scaling = model.rotary_scaling
    return scaling is not None and scaling.method in ("dynamic", "yarn", "longrope")


def _describes(origin: Mapping[str, Any], model: Transformer) -> bool:
    """Whether a configuration is that of the trained network, whatever its head and its labels are."""
    try:
        described = from_config(dict(origin), model.name)
    except FlopwiseError:
        return False
    same = ["title", "source", "note", "context", "dropout", "family", "adapters", "frozen", "objective", "loss_share"]
    same += ["head", "labels", "tied", "final_norm"] if model.head != "language" else []
    # What was added to the loss is told apart.
    described, model = (replace(each, routing=each.routing.network) for each in (described, model))
    return replace(described, **{name: getattr(model, name) for name in same}) == model


def _named_by_number(origin: Mapping[str, Any], labels: tuple[str, ...]) -> bool:
    """Whether labels are the numbers of classes that nobody named: they stay as they came."""
    named = origin.get("id2label")
    return labels == tuple(map(str, range(len(labels)))) and isinstance(named, dict) and len(named) == len(labels)
