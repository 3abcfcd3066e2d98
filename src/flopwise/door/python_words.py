"""Errors in Python's words: where the command line says `--micro 4`, a caller of a function reads `micro=4`.

What stands in the messages is the command line's own form, an option and its value. An option is known by the signature
of the function that was called, so nothing but the function's own keywords is reworded. Commands stand between
backticks: those that the door has a function for become calls of it, others stay as they are.
`tests/door/test_python_words.py` looks at every message there is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from flopwise.base.errors import FlopwiseError
from flopwise.door.arguments import check_arguments, check_names

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

KEYWORDS = {"gpus": "devices", "set": "changes"}
"""Options that have another name in Python."""
CATALOGUE = {"models": "model", "hardware": "hardware", "stacks": "stack"}
CONNECTIVES = ("or", "and", "cannot", "with", "without", "beside", "is", "says", "goes", "out", "the", "fixes")
"""What follows an option without being its value."""
CALLED = {"predict": "predict", "plan": "plan", "train": "train", "report": "results", "ls runs": "results"}
"""Commands that are functions too."""
LISTED = {f"ls {what}": f"flopwise.catalog.load.{one}_names()" for what, one in CATALOGUE.items()}
LONG = {"-w": "--write"}
BEFORE, AFTER = "(", ",;:.)"


def in_python(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """The function, whose arguments are of the kinds that it says, and whose errors speak of its keywords."""

    @wraps(function)
    def called(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Returned:
        check_names(function, len(arguments), keywords)
        check_arguments(function, arguments, keywords)
        try:
            return function(*arguments, **keywords)
        except FlopwiseError as error:
            options = options_of(function)
            error.what = reword(error.what, options)
            error.why = error.why and reword(error.why, options)
            error.hint = error.hint and reword(error.hint, options)
            error.args = (error.what,)
            raise

    return called


def options_of(function: Callable[..., object]) -> dict[str, str]:
    """Option → the keyword that it is in Python; a flag's with the value that it stands for."""
    options: dict[str, str] = {}
    for keyword, parameter in signature(function).parameters.items():
        option = next((typed for typed, name in KEYWORDS.items() if name == keyword), keyword).replace("_", "-")
        if parameter.kind is not Parameter.KEYWORD_ONLY:
            continue
        if parameter.annotation == "bool | None":
            options |= {f"--{option}": f"{keyword}=True", f"--no-{option}": f"{keyword}=False"}
        elif parameter.default is True:
            options[f"--no-{option}"] = f"{keyword}=False"
        else:
            options[f"--{option}"] = f"{keyword}=True" if parameter.default is False else keyword
    return options


def reword(text: str, options: dict[str, str]) -> str:
    """A message with every option and its value as a keyword; commands between backticks stay."""
    parts = text.split("`")
    for place, part in enumerate(parts):
        if place % 2 == 0 or part.startswith("--"):
            parts[place] = _reword_part(part, options)
        elif part.startswith("flopwise "):
            parts[place] = _call(part)
    return "`".join(parts)


def _call(command: str) -> str:
    """`flopwise predict gpt2 --on h200` as `fw.predict("gpt2", on="h200")`; what the door cannot do stays."""
    _, first, *words = command.split(" ")
    if first == "show" and len(words) == 1:
        return _load(words[0]) or command
    if first == "ls" and words:
        first = f"ls {words.pop(0)}"
    name = CALLED.get(first)
    if name is None:
        return LISTED.get(first, command)
    options = options_of(getattr(import_module("flopwise.door"), name))
    if name == "results":
        options["--store"] = "store"
    told = []
    while words:
        word = LONG.get(words[0], words[0])
        keyword = options.get(word)
        if word.startswith("-") and (keyword is None or ("=" not in keyword and len(words) < 2)):
            return command
        del words[0]
        if keyword is None:
            told.append(_literal(word))
        else:
            told.append(keyword if "=" in keyword else f"{keyword}={_literal(words.pop(0))}")
    return f"fw.{name}({', '.join(told)})"


def _load(name: str) -> str | None:
    """The call that loads what the catalogue has under a name."""
    from flopwise.catalog.load import hardware_names, model_names

    kinds = {"model": model_names(), "hardware": hardware_names()}
    return next((f'fw.load_{kind}("{name}")' for kind, names in kinds.items() if name in names), None)


def _reword_part(text: str, options: dict[str, str]) -> str:
    words = text.split(" ")
    told: list[str] = []
    while words:
        before, word, after = _parts(words.pop(0))
        keyword = options.get(word)
        if keyword is not None and not after and "=" not in keyword and words and _is_value(words[0]):
            _, value, after = _parts(_take_value(words))
            word = f"{keyword}={_literal(value)}"
            while len(words) > 1 and words[0] == "|":
                _, value, after = _parts(words[1])
                word += f" | {_literal(value)}"
                del words[:2]
        else:
            word = keyword or word
        told.append(f"{before}{word}{after}")
    return " ".join(told)


def _parts(word: str) -> tuple[str, str, str]:
    """The signs before a word, itself, and the signs after it."""
    begun = word.lstrip(BEFORE)
    core = begun.rstrip(AFTER)
    return word[: len(word) - len(begun)], core, begun[len(core) :]


def _take_value(words: list[str]) -> str:
    """The first word, or all that stand between its quotes."""
    value = words.pop(0)
    while value.startswith("'") and value.rstrip(AFTER).count("'") < 2 and words:
        value += f" {words.pop(0)}"
    return value


def _is_value(word: str) -> bool:
    return bool(word) and word not in CONNECTIVES and not word.startswith(("--", *BEFORE))


def _literal(value: str) -> str:
    """A number as it is, a word of capitals as what it stands for, everything else as a string."""
    value = value.strip("'")
    try:
        float(value)
    except ValueError:
        return value if value == "…" or (value.isupper() and value.isalpha()) else f'"{value}"'
    return value
