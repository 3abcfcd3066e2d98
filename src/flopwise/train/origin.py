"""Where a training begins: a folder of weights with its configuration and tokenizer, checked before anything is read.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.files import entry_kind, read_table
from flopwise.catalog.hub import find_snapshot, is_hub_name
from flopwise.catalog.huggingface import computed_otherwise, has_other_parts
from flopwise.catalog.load import is_plan, model_folder
from flopwise.engine.data.tokenizer import BYTES, tokenizer_file
from flopwise.engine.weights.weight_files import UNREAD_HINT, has_weights, unread_weights, weight_files
from flopwise.setup.trained import TrainedWords
from flopwise.train.request import TrainRequest

CONFIG = "config.json"
STATE = "state.json"
ADAPTER_CONFIG = "adapter_config.json"
NO_PLAIN_LORA = (
    *("lora_dropout", "rank_pattern", "alpha_pattern"),
    *("exclude_modules", "trainable_token_indices", "lora_bias", "use_qalora", "megatron_config"),
)
"""Settings that make other adapters of them."""
HEADS = ("classifier", "score", "pooler", "pre_classifier", "head")
"""Modules of classifiers that are saved whole beside adapters."""
OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "vocab.txt", "vocab.json", "spiece.model", "*.tiktoken")
"""Files of tokenizers that are not read."""


def find_weights(request: TrainRequest) -> Path | None:
    """The folder of first weights: the one that is named, or the model's own; None: they are drawn."""
    if request.weights:
        return find_snapshot(request.weights) if is_hub_name(request.weights) else Path(request.weights)
    if request.model is None or request.from_scratch or is_plan(request.model):
        return None
    folder = model_folder(request.model)
    if folder is None:
        return None
    if has_weights(folder):
        return folder
    unread = unread_weights(folder) if entry_kind(folder / CONFIG) == "file" else []
    if unread and not request.model.endswith(".toml"):
        raise FlopwiseError(
            f"{folder} has weights that are not read: {unread[0].name}",
            why="weights are read from *.safetensors files, and from nothing that runs code when it is read",
            hint=f"{UNREAD_HINT}; --from-scratch draws first weights",
        )
    return None


def read_config(weights: Path | None) -> dict[str, Any] | None:
    """The config.json beside weights, where there is one."""
    if weights is None or entry_kind(weights) == "nothing":
        return None
    folder = weights if weights.is_dir() else weights.parent
    return read_table(folder / CONFIG) if entry_kind(folder / CONFIG) == "file" else None


def read_adapters(folder: Path) -> TrainedWords:
    """What adapters of PEFT's format are; those that are not computed as their file says are refused."""
    path = folder / ADAPTER_CONFIG
    if entry_kind(path) != "file":
        raise FlopwiseError(
            f"{folder} holds no {ADAPTER_CONFIG}",
            why="adapters are read as PEFT saves them",
            hint="the folder of a checkpoint, or --lora 16",
        )
    table = read_table(path)
    rank, alpha, modules = (table.get(name) for name in ("r", "lora_alpha", "target_modules"))
    plain = {"peft_type": "LORA", "bias": "none"}
    odd = [name for name, value in plain.items() if table.get(name, value) != value]
    odd += [name for name in NO_PLAIN_LORA if table.get(name)]
    saved = table.get("modules_to_save") or []
    odd += ["modules_to_save"] * (not isinstance(saved, list) or any(name not in HEADS for name in saved))
    if odd or not isinstance(rank, int) or not isinstance(alpha, int | float):
        named = odd[0] if odd else "r or lora_alpha"
        raise FlopwiseError(
            f"{path}: these adapters are not computed here",
            why=f"{named} is {shown(table.get(odd[0]) if odd else None)}",
            hint="adapters of LoRA or DoRA, of one rank, without dropout",
        )
    names, more = [modules] if isinstance(modules, str) else modules or [], table.get("target_parameters") or []
    listed = isinstance(names, list) and isinstance(more, list) and bool(names or more)
    if not listed or not all(isinstance(name, str) and name for name in (*names, *more)):
        raise FlopwiseError(
            f"{path}: target_modules = {shown(modules)} are not the matrices of a block",
            why="they are the names of layers, or all-linear",
            hint="adapters that PEFT or flopwise saved",
        )
    blocks = table.get("layers_to_transform")
    chosen = [blocks] if isinstance(blocks, int) else blocks
    if chosen is not None and not (isinstance(chosen, list) and all(type(block) is int for block in chosen)):
        raise FlopwiseError(
            f"{path}: layers_to_transform = {shown(blocks)} are no blocks",
            why="they are numbers of blocks, from 0",
            hint="adapters that PEFT or flopwise saved",
        )
    return TrainedWords(
        lora_blocks=tuple(chosen or ()) or None,
        lora=rank,
        lora_alpha=float(alpha),
        lora_on=",".join([*names, *more]),
        rslora=bool(table.get("use_rslora")),
        dora=bool(table.get("use_dora")),
    )


def check_weights(weights: Path | None) -> None:
    """Refuse weights that are not there, and those of a network whose numbers are not computed as its file says."""
    if weights is None:
        return
    weight_files(weights)
    config = read_config(weights)
    if config is None or "model_type" not in config:
        return
    otherwise = computed_otherwise(config, str(weights))
    if otherwise:
        raise FlopwiseError(
            f"{weights}: these weights would be trained as another network",
            why="; ".join(otherwise),
            hint="other weights; --from-scratch trains the network that flopwise describes from first values",
        )


def adapter_notes(weights: Path | None) -> tuple[str, ...]:
    """What to tell of adapters whose matrices have other names in the model that they are loaded beside."""
    if has_other_parts(read_config(weights) or {}):
        named = "adapters have the names of the language model alone, and not of the whole with its vision part"
        return (f"{named}; load them beside the language model, or write it with --merge",)
    return ()


def begin_anew(request: TrainRequest, checkpoint: Path | None) -> TrainRequest:
    """The request of a run that is resumed: what it began with is in its checkpoint too, should it be gone by now."""
    if checkpoint is None:
        return request
    gone: dict[str, Any] = {
        name: str(checkpoint)
        for name, file in (("tokenizer", "tokenizer.json"), ("weights", CONFIG))
        if (chosen := getattr(request, name)) not in (None, BYTES)
        and entry_kind(Path(chosen)) == "nothing"
        and entry_kind(checkpoint / file) == "file"
    }
    return replace(request, **gone)


def label_names(weights: Path | None) -> tuple[str, ...]:
    """The classes of a classifier's weights, in their order; nothing where its file names none."""
    config = read_config(weights)
    named = config.get("id2label") if config else None
    if not isinstance(named, dict) or not all(str(key).isdecimal() for key in named):
        return ()
    return tuple(str(named[key]) for key in sorted(named, key=int))


def choose_tokenizer(request: TrainRequest, weights: Path | None) -> str | None:
    """The tokenizer's file or folder, or `bytes`; None: bytes, as nobody said anything else.

    Weights go with the tokenizer that lies beside them, and so does a configuration alone, unless another one is named.
    """
    if request.tokenizer is not None and request.tokenizer != BYTES:
        return str(tokenizer_file(request.tokenizer))
    if request.tokenizer is not None:
        return request.tokenizer
    if weights is None:
        # What a run began with is in its record, and nothing there is bytes.
        return _tokenizer_of_model(request) if request.resume is None else None
    folder = weights if weights.is_dir() else weights.parent
    if entry_kind(folder / "tokenizer.json") == "file":
        return str(folder / "tokenizer.json")
    trained_with = _tokenizer_of_checkpoint(folder)
    if trained_with is not None and (trained_with == BYTES or entry_kind(Path(trained_with)) != "nothing"):
        return trained_with
    if request.own_data:
        return None
    others = sorted(path.name for pattern in OTHER_TOKENIZERS for path in folder.glob(pattern))
    raise FlopwiseError(
        f"{folder} has weights and no tokenizer.json",
        why=(
            f"{others[0]} is a tokenizer of a kind that is not read" if others else "there is no tokenizer beside them"
        )
        + "; trained on bytes, they would unlearn what they know",
        hint="`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` writes one; --tokenizer with another"
        " file, or --tokenizer bytes if bytes are meant",
    )


def _tokenizer_of_model(request: TrainRequest) -> str | None:
    """What lies beside the configuration that describes a model, whose first values are drawn; None: bytes."""
    name = request.model
    if name is None or name.endswith(".toml") or request.own_data:
        return None
    folder = model_folder(name)
    beside = None if folder is None else folder / "tokenizer.json"
    return str(beside) if beside is not None and entry_kind(beside) == "file" else None


def _tokenizer_of_checkpoint(folder: Path) -> str | None:
    """What a checkpoint of flopwise's was trained with."""
    if entry_kind(folder / STATE) != "file":
        return None
    data = read_table(folder / STATE).get("data")
    name = data.get("tokenizer") if isinstance(data, dict) else None
    return name if isinstance(name, str) else None
