"""Arguments of another kind than a function of the door takes: each refused in words, before anything is done."""

from __future__ import annotations

import ast
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

import flopwise as fw
from flopwise import door
from flopwise.base.errors import FlopwiseError
from flopwise.door.arguments import check_arguments, example

OPTIONS = [
    (name, keyword)
    for name in ("load_model", "load_hardware", "predict", "plan", "train", "read_profile", "verdicts", "results")
    for keyword in signature(getattr(door, name)).parameters
]
WRONG: dict[str, Any] = {
    "an object": object(),
    "bytes": b"x",
    "a number": 5.5,
    "text": "x",
    "flag": True,
    "list": [1],
    "mapping": {1: 2},
    "not a number": float("nan"),
}
TAKEN: dict[str, Callable[[Any], bool]] = {
    # What each kind of annotation takes of these.
    "str": lambda value: value == "x",
    "int": lambda value: value == 5,
    "float": lambda value: isinstance(value, float),
    "bool": lambda value: value is True,
    "Quantity": lambda value: isinstance(value, float) or value == "x",
    "Sequence[int]": lambda value: value == [1],
    "Sequence[float]": lambda value: value == [1],
    "Mapping[str, object]": lambda value: value == {1: 2},
}
WORDS = ("Recompute", "Optimizer", "Convention", "Fusion", "SequenceLayout", "Task", "Schedule", "DecayShape")


def takes(annotation: str, value: Any) -> bool:
    if "Model" in annotation or "Hardware" in annotation or annotation in ("Profile", "object"):
        return True
    return any(
        TAKEN["str" if kind in (*WORDS, "DataFormat") else kind](value)
        for kind in annotation.split(" | ")
        if kind in TAKEN or kind in (*WORDS, "DataFormat")
    )


@pytest.mark.parametrize(("name", "keyword"), OPTIONS)
def test_every_option_refuses_what_it_does_not_take(name: str, keyword: str) -> None:
    function = getattr(door, name)
    annotation = str(signature(function).parameters[keyword].annotation)
    for kind, value in WRONG.items():
        if takes(annotation, value):
            check_arguments(function, (), {keyword: value})
            continue
        with pytest.raises(FlopwiseError, match=f"^{keyword} cannot be") as told:
            check_arguments(function, (), {keyword: value})
        assert told.value.why, kind
        assert told.value.hint, kind
        assert told.value.hint.startswith(f"{keyword}="), kind


@pytest.mark.parametrize(("name", "keyword"), OPTIONS)
def test_what_a_hint_names_is_taken(name: str, keyword: str) -> None:
    function = getattr(door, name)
    parameter = signature(function).parameters[keyword]
    check_arguments(function, (), {keyword: parameter.default} if parameter.default is not parameter.empty else {})
    if takes(str(parameter.annotation), object()):
        return
    usual = example(keyword, str(parameter.annotation))
    if "(" not in usual:
        check_arguments(function, (), {keyword: ast.literal_eval(usual)})


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: fw.predict("gpt2", stack=5), "stack cannot be 5"),  # type: ignore[arg-type]
        (lambda: fw.predict("gpt2", lengths=5), "lengths cannot be 5"),  # type: ignore[arg-type]
        (lambda: fw.plan("gpt2", freeze=5), "freeze cannot be 5"),  # type: ignore[call-overload]
        (lambda: fw.train(dropout="x"), "dropout cannot be 'x'"),  # type: ignore[arg-type]
        (lambda: fw.train(model=5), "5 is no model"),  # type: ignore[arg-type]
        (lambda: fw.train(log=[1]), "log cannot be a list of 1"),  # type: ignore[list-item]
        (lambda: fw.train(train_on="x"), "train_on cannot be 'x'"),  # type: ignore[arg-type]
        (lambda: fw.train(callbacks=["x"]), "callbacks cannot be a list of 1"),  # type: ignore[list-item]
    ],
)
def test_functions_refuse_them(call: Callable[[], object], what: str) -> None:
    with pytest.raises(fw.FlopwiseError, match=what) as told:
        call()
    assert told.value.hint


anything: Any = fw
"""The door as callers have it whom no type checker helps."""


@pytest.mark.parametrize(
    ("call", "what", "hint"),
    [
        (lambda: anything.predict(gpus=8), "fw.predict has no argument gpus", "devices=8"),
        (lambda: anything.plan("gpt2", batchs=8), "fw.plan has no argument batchs", "batch=16"),
        (lambda: anything.predict("gpt2", zzz=8), "no argument zzz", "help(fw.predict)"),
        (lambda: anything.predict("gpt2", "h100"), "2 arguments without a name", 'on="h200"'),
        (anything.plan, "fw.plan was given no model", 'fw.plan("llama-3-8b", …)'),
    ],
)
def test_names_that_are_not_there_are_told(call: Callable[[], object], what: str, hint: str) -> None:
    with pytest.raises(FlopwiseError) as told:
        call()
    assert what in told.value.what and hint in str(told.value.hint)
