"""Of what kind a caller's arguments are, held against the signature's own words before anything is done with them.

Which words and how large numbers may be is told by who takes them; here only that text is text and a number a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from numbers import Integral, Real
from os import PathLike
from typing import Any

from flopwise.base.errors import FlopwiseError, nearest, shown

LEFT_OPEN = ("Model", "Hardware", "Profile", "object")
"""What is refused, in better words, by who takes it."""
ELEMENTS = re.compile(r"^(Sequence|Mapping|Literal)\[(.*)\]$")

OF_COMMANDS = {"gpus": "devices", "set": "changes", "hardware": "on", "lr": "learning_rate", "batch_size": "batch"}
"""What the command line, or other trainers, call some of the arguments."""

EXAMPLES = {
    "anchor": '"runs/0001"',
    "adapters": '"runs/0001/checkpoints/step-00000060"',
    "attention": '"flash"',
    "base": '"nf4"',
    "batch": "16",
    "batch_tokens": '"1M"',
    "beta": "0.1",
    "beta1": "0.9",
    "beta2": "0.95",
    "callbacks": "[fw.train.Callback()]",
    "changes": '{"layers": 2}',
    "checkpoint_every": "100",
    "clip": "1.0",
    "convention": '"causal"',
    "data": '"chats.jsonl"',
    "data_format": '"tokens-uint16"',
    "decay_shape": '"linear"',
    "decay_share": "0.1",
    "device_mem": '"24GiB"',
    "devices": "8",
    "dpo_label_smoothing": "0.1",
    "dropout": "0.1",
    "ema": "0.999",
    "epochs": "2",
    "epsilon": "1e-8",
    "eval_data": '"test.jsonl"',
    "evaluate_every": "100",
    "freeze": '"embedding,blocks.0-15"',
    "fusion": '"fused"',
    "host_mem": '"110GiB"',
    "keep": "2",
    "label_column": '"label"',
    "label_smoothing": "0.1",
    "layout": '"packed"',
    "learning_rate": "1e-4",
    "lengths": "[17, 128, 64]",
    "log": '"wandb"',
    "loggers": "[wandb.init()]",
    "lora": "16",
    "lora_alpha": "32",
    "lora_on": '"all-linear"',
    "loss_share": "0.3",
    "mask_share": "0.15",
    "micro": "4",
    "min_learning_rate": "1e-5",
    "model": '"llama-3-8b"',
    "momentum": "0.9",
    "on": '"h200"',
    "optimizer": '"adamw"',
    "parallel": '"zero3"',
    "path": '"runs/0001"',
    "patience": "3",
    "power": '"500W"',
    "precision": '"bf16"',
    "price": "2.5",
    "profile_steps": "20",
    "recompute": '"full"',
    "resume": '"last"',
    "routing": '"busiest=1.7"',
    "schedule": '"cosine"',
    "section": '"step"',
    "seed": "0",
    "seq": '"8k"',
    "stack": '"torchtitan"',
    "steps": "100",
    "store": '"runs"',
    "task": '"language"',
    "text_column": '"text"',
    "thresholds": "Thresholds()",
    "tokenizer": '"tokenizer.json"',
    "warmup": '"3%"',
    "weight_decay": "0.1",
    "weights": '"Qwen/Qwen3-0.6B"',
    "what": '["last"]',
    "write": '"plan.toml"',
    "z_loss": "1e-4",
}
"""A usual value of each keyword, for hints."""

WORDS = {
    "str": "text",
    "Path": "a path",
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "Quantity": "a number, or text such as the command line takes",
    "Sequence": "a list",
    "Mapping": "a mapping of fields to values",
}


def check_arguments(function: Callable[..., object], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Refuse values of another kind than the function's annotations say."""
    parameters = signature(function).parameters
    given = dict(zip(parameters, arguments, strict=False)) | dict(keywords)
    for name, value in given.items():
        if name in parameters:
            _check(name, value, str(parameters[name].annotation))


def check_names(called: Callable[..., object], by_place: int, keywords: Mapping[str, Any]) -> None:
    """Refuse arguments that a function has not, or not in this place, and one that it misses."""
    function, parameters = called.__name__, signature(called).parameters
    if any(parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for parameter in parameters.values()):
        return
    for name in keywords:
        if name not in parameters:
            meant = OF_COMMANDS.get(name, name)
            found = [meant] if meant in parameters else nearest(name, parameters)
            told = f"{found[0]}={_usual(parameters[found[0]])}" if found else f"help(fw.{function}) has all of them"
            raise FlopwiseError(f"fw.{function} has no argument {name}", why=_did_you_mean(found), hint=told)
    placed = [name for name, each in parameters.items() if each.kind != Parameter.KEYWORD_ONLY]
    if by_place > len(placed):
        named = next(name for name in (*(("on",) if "on" in parameters else ()), *parameters) if name not in placed)
        raise FlopwiseError(
            f"fw.{function} was given {by_place} arguments without a name",
            why=f"it takes {len(placed)} so: {', '.join(placed)}",
            hint=f"the others by name, as {named}={_usual(parameters[named])}",
        )
    for name, parameter in parameters.items():
        if parameter.default is Parameter.empty and name not in keywords and name not in placed[:by_place]:
            raise FlopwiseError(f"fw.{function} was given no {name}", hint=f"fw.{function}({_usual(parameter)}, …)")


def _did_you_mean(names: Sequence[str]) -> str | None:
    return f"did you mean {names[0]}?" if names else None


def _usual(parameter: Parameter) -> str:
    return example(parameter.name, str(parameter.annotation))


def _check(name: str, value: object, annotation: str) -> None:
    kinds = annotation.split(" | ") if "[" not in annotation else re.split(r" \| (?![^\[]*\])", annotation)
    found = ELEMENTS.match(kinds[0])
    if len(kinds) == 1 and found is not None and found[1] == "Literal" and isinstance(value, str):
        words = [word.strip(" '\"") for word in found[2].split(",")]
        if value not in words:
            raise FlopwiseError(
                f"{name} cannot be {shown(value)}",
                why=f"it is one of {', '.join(words)}",
                hint=f'{name}="{next(iter([*nearest(value, words), *words]))}"',
            )
        return
    if any(_is(value, kind) for kind in kinds):
        return
    wanted = dict.fromkeys(_words(kind) for kind in kinds if kind != "None")
    raise FlopwiseError(
        f"{name} cannot be {shown(value)}",
        why=f"{' or '.join(wanted)} is expected",
        hint=f"{name}={example(name, annotation)}",
    )


def example(name: str, annotation: str) -> str:
    """A usual value of a keyword."""
    found = ELEMENTS.match(annotation)
    if found is not None and found[1] == "Literal":
        return found[2].split(",")[0]
    return "True" if annotation in ("bool", "bool | None") else EXAMPLES[name]


def _words(kind: str) -> str:
    found = ELEMENTS.match(kind)
    plain = found[1] if found is not None else kind
    if found is not None and plain == "Sequence" and found[2].startswith("Sequence"):
        return "a list of lists"
    # Other names are those of words, or of records.
    return WORDS.get(plain, "one of its words" if plain == "Literal" else f"a {plain}")


def _is(value: object, kind: str) -> bool:
    """Whether a value is of the kind that one of an annotation's alternatives says."""
    found = ELEMENTS.match(kind)
    if found is not None:
        return _is_made_of(value, found[1], found[2])
    known = CHECKS.get("str" if kind in WORDS_OF_LITERALS else kind)
    if known is not None:
        return known(value)
    return kind in LEFT_OPEN or kind in (each.__name__ for each in type(value).__mro__)


def _is_number(value: object, kind: type = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


CHECKS: dict[str, Callable[[object], bool]] = {
    "None": lambda value: value is None,
    "str": lambda value: isinstance(value, str),
    "Path": lambda value: isinstance(value, PathLike),
    # numpy's truth values are none of Python's.
    "bool": lambda value: isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"),
    "int": lambda value: _is_number(value, Integral),
    "float": _is_number,
    "Quantity": lambda value: _is_number(value) or isinstance(value, str),
    "Data": lambda value: hasattr(value, "batch") and hasattr(value, "evaluation"),
    "Callback": lambda value: hasattr(value, "on_step"),
    "Logger": lambda value: hasattr(value, "log"),
}


WORDS_OF_LITERALS = (
    *("Recompute", "Optimizer", "Convention", "Fusion", "SequenceLayout"),
    *("Task", "Schedule", "DecayShape", "DataFormat"),
)
"""Names of annotations that stand for words."""


def _is_made_of(value: object, kind: str, element: str) -> bool:
    if kind == "Literal":
        return isinstance(value, str)
    if kind == "Mapping":
        return isinstance(value, Mapping)
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        return False
    # Numbers of a list are told one by one, with their places, by who counts them.
    return element == "int" or all(any(_is(each, one) for one in element.split(" | ")) for each in value)
