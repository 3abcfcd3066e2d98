"""Every message that names an option reads well from Python: a value follows it, or a known connective."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import flopwise
from flopwise import door
from flopwise.cli import app
from flopwise.door.python_words import CONNECTIVES, KEYWORDS, options_of, reword

SOURCES = Path(flopwise.__file__).parent
FUNCTIONS = tuple(getattr(door, name) for name in door.__all__)
HOLE = "\x00"
"""Where an f-string has a value."""


def texts() -> Iterator[tuple[str, str]]:
    """Every text of the sources outside the command line, with its file; those that stand alone are documentation."""
    for path in sorted(SOURCES.rglob("*.py")):
        place = path.relative_to(SOURCES)
        if place.parts[0] == "cli":
            continue
        tree = ast.parse(path.read_text())
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield (
                    str(place),
                    "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values),
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (alone | inside):
                yield str(place), node.value


def followers() -> Iterator[tuple[str, str, str]]:
    """Option, the word after it, and the file, for every option of the door that a message names outside a command."""
    known = {option for function in FUNCTIONS for option, keyword in options_of(function).items() if "=" not in keyword}
    for place, text in texts():
        for number, part in enumerate(text.split("`")):
            words = part.split(" ")
            if number % 2 and not part.startswith("--"):
                continue
            for word, following in pairwise(words):
                if word.lstrip("(") in known and following:
                    yield word.lstrip("("), following.rstrip(",;:.)"), place


VALUES = {
    "premise,hypothesis",
    "zero3",
    "blocks.0-15",
    *(
        "flash",
        "h100-sxm",
        "h200",
        "this-machine",
        "device.toml",
        "bf16",
        "bf16-mixed",
        "bf16-amp",
        "fp8",
        "adamw",
        "cpu",
    ),
    *("language", "masked", "classification", "FOLDER", "NAME", "data.csv", "mean=24", "packed", "padded", "longest"),
    *(
        "this-cpu",
        "cuda",
        "auto",
        "layers=2,4",
        "layers=4",
        "bf16,gradients=fp32",
        '"$store"',
    ),
    *(
        "all-linear",
        "attention",
        "embedding,blocks.0-15",
        "all",
        "bytes",
        "tokens-uint16",
        "sqrt",
        "cosine",
        "wsd",
        "dpo",
        "'tokens_per_s_per_gpu=6667@gpus=8",
    ),
}
"""Words that messages give as values; what begins with a digit or a hole is one too."""


def test_what_follows_an_option_is_its_value_or_a_connective() -> None:
    odd = [
        (option, word, place)
        for option, word, place in followers()
        if word not in CONNECTIVES
        and word.replace(HOLE, "15") not in VALUES
        and word[0] not in f"0123456789{HOLE}"
        and "--" not in word
    ]
    assert odd == [], "a word after an option is neither a value (VALUES here) nor a connective (door/python_words.py)"


def test_connectives_and_values_are_all_in_use() -> None:
    seen = {word for _, word, _ in followers()}
    assert sorted(VALUES - seen) == []
    # `one_of` says of whichever option it is that it cannot be such a word.
    assert set(CONNECTIVES) - seen <= {"cannot"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--micro 4 or less", "micro=4 or less"),
        ("--data 'a file', or --seq 8k", 'data="a file", or seq="8k"'),
        ("--batch-tokens 8192, or --batch 1", "batch_tokens=8192, or batch=1"),
        ("a shorter --seq, or --gpus 1, which streams", "a shorter seq, or devices=1, which streams"),
        ("--device-mem 40GiB, or --seq 8k", 'device_mem="40GiB", or seq="8k"'),
        ("`flopwise train … --profile` makes one", "`fw.train(…, profile=True)` makes one"),
        ("`flopwise plan … --gpus 8 -w plan.toml`", '`fw.plan(…, devices=8, write="plan.toml")`'),
        ("`flopwise predict gpt2 --on h100-sxm`", '`fw.predict("gpt2", on="h100-sxm")`'),
        ("`flopwise predict gpt2 --method deepflow`", "`flopwise predict gpt2 --method deepflow`"),
        ("`flopwise ls models`, or `flopwise train`", "`flopwise.catalog.load.model_names()`, or `fw.train()`"),
        ("`flopwise ls runs --store here` lists them", '`fw.results(store="here")` lists them'),
        ("`flopwise report`, or `flopwise report -o csv`", "`fw.results()`, or `flopwise report -o csv`"),
        (
            "`flopwise show gpt2`, `flopwise show h200`, `flopwise show NAME`",
            '`fw.load_model("gpt2")`, `fw.load_hardware("h200")`, `flopwise show NAME`',
        ),
        ("(--stochastic-rounding, --host-mem)", "(stochastic_rounding=True, host_mem)"),
        ("a run with --no-checkpoint", "a run with checkpoint=False"),
        ("--learning-rate 0.0001, or --clip 1.0", "learning_rate=0.0001, or clip=1.0"),
        ("--task language | classification", 'task="language" | "classification"'),
        ("every token (--train-on all), or a longer --seq", 'every token (train_on="all"), or a longer seq'),
        ("--data-format tokens-uint16 | tokens-uint32, as", 'data_format="tokens-uint16" | "tokens-uint32", as'),
        ("--tokenizer with another, or --tokenizer bytes", 'tokenizer with another, or tokenizer="bytes"'),
        ("--store FOLDER names another store", "store=FOLDER names another store"),
        ("nsys export --type sqlite", "nsys export --type sqlite"),
    ],
)
def test_options_become_keywords(text: str, expected: str) -> None:
    assert reword(text, options_of(door.train) | {"--batch-tokens": "batch_tokens"}) == expected


LEFT_TO_THE_COMMAND_LINE = {
    "predict": {"method", "print_out", "output", "show_config"},
    "plan": {"rule", "trace", "heatmap", "output"},
    "train": {"output"},
}


@pytest.mark.parametrize("name", list(LEFT_TO_THE_COMMAND_LINE))
def test_the_door_has_the_options_of_the_command_line(name: str) -> None:
    import typer.main

    group = typer.main.get_command(app)
    command = group.commands[name]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    missing = {option.removeprefix("--").replace("-", "_") for option in options - set(options_of(getattr(door, name)))}
    assert missing - {"help"} == LEFT_TO_THE_COMMAND_LINE[name]
    assert set(KEYWORDS) == {"gpus", "set"}
