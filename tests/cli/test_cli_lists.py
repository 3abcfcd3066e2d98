"""Lists mean lists, on every command line; an option that takes one value takes one, once."""

from __future__ import annotations

import json
from itertools import product

import pytest

from tests.cli.test_cli_fuzz import answered

PREDICT = ["predict", "gpt2", "--on", "h100-sxm", "-o", "json"]


def predictions(*words: str) -> list[dict[str, object]]:
    code, out, err = answered([*PREDICT, *words])
    assert code == 0, err
    found = json.loads(out)
    assert found.pop("schema") == f"flopwise.prediction{'-list' if 'rows' in found else ''}/1"
    rows: list[dict[str, object]] = found.get("rows", [found])
    return rows


@pytest.mark.parametrize(
    ("words", "column", "values"),
    [
        (["--gpus", "64,256", "--batch", "256"], "devices", [64, 256]),
        (["--batch", "64,128"], "batch_sequences", [64, 128]),
        (["--batch-tokens", "64k,128k"], "batch_sequences", [64, 128]),
        (["--seq", "256-1k*2", "--batch", "8"], "sequence_tokens", [256, 512, 1024]),
        (["--micro", "1,2", "--batch", "8"], "micro_batch_sequences", [1, 2]),
        (["--gpus", "1,2", "--seq", "256,512", "--batch", "8"], "sequence_tokens", [256, 512, 256, 512]),
    ],
)
def test_a_list_is_several_set_ups(words: list[str], column: str, values: list[int]) -> None:
    assert [found[column] for found in predictions(*words)] == values


def test_each_of_a_list_is_what_it_is_alone() -> None:
    both = predictions("--gpus", "8,16", "--batch", "64")
    assert both == [predictions("--gpus", count, "--batch", "64")[0] for count in ("8", "16")]


@pytest.mark.parametrize("columns", ["80", "120"])
def test_rows_are_told_apart_by_what_was_listed(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    words = ["predict", "llama-3-70b", "--on", "h100-sxm", "--gpus", "64,256", "--seq", "4k,8k", "--batch", "512,1k"]
    code, out, _ = answered(words)
    rows = [line.split() for line in out.splitlines() if "GiB" in line]
    assert code == 0
    # Behind the devices stands the strategy, two words.
    assert {(row[0], *row[3:5]) for row in rows} == set(product(("64", "256"), ("4,096", "8,192"), ("512", "1,024")))
    assert max(map(len, out.splitlines())) <= int(columns)


REFUSED = [
    "plan llama-3-8b --on h100-sxm --gpus 64,256",
    "plan llama-3-8b --on h200 --batch 64,128",
    "plan llama-3-8b --on h200 --seq 8,192",
    "predict gpt2 --on h200 --device-mem 40,80GiB",
    *(f"train --{option} 1,000" for option in ("gpus", "steps", "seq", "batch", "micro", "warmup", "seed", "keep")),
    *(f"train --{option} 1,000" for option in ("checkpoint-every", "evaluate-every", "profile-steps", "device-mem")),
    "sweep --model gpt2 --steps 1,000 --dry-run",
    "sweep --model gpt2 --repeat 1,000 --dry-run",
    "serve --port 8,000",
    "profile run --steps 1,000 -- true",
]


@pytest.mark.parametrize("line", REFUSED)
def test_a_list_is_refused_where_one_number_is_taken(line: str) -> None:
    code, out, err = answered(line.split())
    assert (code, out) == (2, "")
    assert "a comma separates values, and one is expected here" in err


def test_too_many_set_ups_are_a_sweep() -> None:
    code, _, err = answered([*PREDICT, "--seq", "1-600+1", "--gpus", "1,2"])
    assert code == 2
    assert "1,200 set-ups" in err
    assert "flopwise sweep --predict" in err


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("predict gpt2 --on h200 -o json --output csv", "--output"),
        ("plan gpt2 --on h200 --seq 512 --seq 1k", "--seq"),
        ("train gpt2 --steps 5 --steps 6", "--steps"),
        ("sweep --model gpt2 --model bert-base --dry-run", "--model"),
        ("profile show x.json -o json -o csv", "--output"),
    ],
)
def test_an_option_of_one_value_is_given_once(line: str, option: str) -> None:
    code, out, err = answered(line.split())
    assert (code, out) == (2, "")
    assert f"{option} is given twice" in err


def test_options_that_collect_may_be_repeated() -> None:
    found = predictions("--set", "layers=2", "--set", "hidden=96", "--set", "heads=4")
    assert found[0]["model"] == "gpt2+layers=2+hidden=96+heads=4"


def test_an_option_without_its_value_is_answered_with_the_usage() -> None:
    code, _, err = answered(["train", "--resume", "7", "--steps"])
    assert code == 2
    assert "flopwise train [OPTIONS]" in err


@pytest.mark.parametrize("option", ["resume", "weights", "on", "store", "tokenizer"])
def test_a_variable_that_was_not_set_begins_no_training(option: str) -> None:
    code, _, err = answered(["train", f"--{option}", ""])
    assert code == 2
    assert f"--{option} is empty" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seq", "1k-8k"], "it does not say by how much"),
        (["--seq", "1-600+1", "--on", "h200,a100-80gb"], "1,200 set-ups"),
    ],
)
def test_lists_that_cannot_be_meant(words: list[str], said: str) -> None:
    on = [] if "--on" in words else ["--on", "h200"]
    code, _, err = answered(["predict", "gpt2", *on, *words])
    assert code == 2
    assert said in err


@pytest.mark.parametrize(("text", "hint"), [("1,000", "1000 if it is one number"), ("2,4", "run it once for each")])
def test_a_hint_joins_only_what_looks_like_one_number(text: str, hint: str) -> None:
    assert f"hint: {hint}" in answered(["train", "--steps", text])[2]
