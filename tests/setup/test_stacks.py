"""Training frameworks as data: what ships, how it is named, and that its constants are the fits that they claim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stacks import FITTED_TABLES, refitted, with_value
from flopwise.base.errors import FlopwiseError
from flopwise.base.files import read_text, to_json, to_toml
from flopwise.catalog.load import (
    ROOT,
    hardware_names,
    load_description,
    load_hardware,
    load_model,
    load_stack,
    model_names,
    stack_aliases,
    stack_names,
)
from flopwise.references.published import TABLES, protocol_of
from flopwise.setup.setup import Setup, scaled_as
from flopwise.setup.stack import MOST_CONSTANTS, NEUTRAL, Constant, Stack
from flopwise.work.formats import POLICIES, parse_formats
from flopwise.work.transformer import Transformer


def test_the_shipped_stacks() -> None:
    assert stack_names() == (
        *(
            "automodel",
            "deepspeed",
            "flopwise",
            "llm-foundry",
            "megatron-2022",
            "megatron-core",
            "megatron-lm",
            "nanotron",
            "torchtitan",
            "vtrain",
        ),
    )


@pytest.mark.parametrize("name", stack_names())
def test_a_stack_says_where_it_comes_from(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    assert stack.source
    assert len(stack.constants) <= MOST_CONSTANTS
    for constant in stack.constants.values():
        assert len(constant.how) > 20
        assert constant.value == float(f"{constant.value:.3g}")


def test_our_own_stack_adds_nothing() -> None:
    own = load_stack("flopwise")
    assert own.constants == {}
    assert {name: own.value(name) for name in NEUTRAL} == NEUTRAL
    assert "nothing has been measured yet" in own.source


@pytest.mark.parametrize("table", TABLES)
def test_a_stack_has_the_constants_of_its_protocol_and_no_others(table: str) -> None:
    protocol = protocol_of(table)
    shipped = set(load_stack(protocol.stack).constants)
    assert shipped == set(protocol_of(protocol.fitted_table).constants) >= set(protocol.start)


def test_aliases_are_names_of_nothing_else() -> None:
    aliases = stack_aliases()
    assert load_stack("MEGATRON") == load_stack("megatron-lm")
    assert load_stack("llm-foundry-2023").name == "llm-foundry"
    assert not set(aliases) & {*stack_names(), *model_names(), *hardware_names()}
    assert load_description("megatron") == load_stack("megatron-lm")
    assert load_description("nanotron") == load_stack("nanotron")


@pytest.mark.parametrize("name", stack_names())
def test_a_stack_survives_being_written_and_read(name: str, tmp_path: Path) -> None:
    stack = load_stack(name)
    for file, text in (("own.toml", to_toml(stack)), ("own.json", to_json(stack))):
        (tmp_path / file).write_text(text, encoding="utf-8")
        assert load_stack(tmp_path / file) == stack
        assert load_stack(str(tmp_path / file)) == load_description(str(tmp_path / file)) == stack


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nanotrom", "no stack is called 'nanotrom'\ndid you mean nanotron"),
        ("llama-3-8b", "'llama-3-8b' is a model, not a training framework"),
        ("h100", "'h100' is hardware, not a training framework"),
        ("none.toml", "there is no file none.toml"),
        (str(ROOT / "models" / "gpt2.toml"), "describes a model"),
        (str(ROOT / "hardware" / "h200.toml"), "describes hardware"),
        (str(ROOT), "is a folder"),
    ],
)
def test_wrong_names_are_answered(name: str, expected: str) -> None:
    with pytest.raises(FlopwiseError) as caught:
        load_stack(name)
    assert expected in str(caught.value)
    assert caught.value.hint


def test_mistakes_in_a_file_are_told(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    text = to_toml(load_stack("megatron-lm"))
    path.write_text(text.replace("[constants.products]", "[constants.product]"), encoding="utf-8")
    with pytest.raises(FlopwiseError, match="no constant is called 'product'"):
        load_stack(path)
    path.write_text(text.replace("gradient_overlap", "gradients_overlap"), encoding="utf-8")
    with pytest.raises(FlopwiseError, match="there is no field 'gradients_overlap'"):
        load_stack(path)
    seven = {name: Constant(value=1.0, how="made up") for name in list(NEUTRAL)[:7]}
    path.write_text(to_toml(Stack(name="own", title="own", source="none", constants=seven)), encoding="utf-8")
    with pytest.raises(FlopwiseError, match="has 7 constants"):
        load_stack(path)


def test_a_constant_of_an_architecture_holds_there_alone() -> None:
    stack = load_stack("llm-foundry")
    assert stack.on("Hopper").value("attention") == stack.constants["attention.Hopper"].value
    assert stack.on("Ampere").value("attention") == stack.constants["attention"].value


def test_a_framework_scales_fp8_in_its_own_way_where_nobody_says() -> None:
    torchtitan = load_stack("torchtitan")
    assert scaled_as(POLICIES["fp8"], torchtitan).scaled_by == "tensorwise"
    gathered = parse_formats("fp8,gathered=fp8")
    assert gathered.scaled_by == scaled_as(gathered, load_stack("flopwise")).scaled_by == "tensorwise"
    assert scaled_as(gathered, replace(torchtitan, fp8_scaling="rowwise")) is gathered
    said = parse_formats("fp8,scaling=rowwise")
    assert scaled_as(said, torchtitan) is said
    assert scaled_as(POLICIES["bf16"], torchtitan) is POLICIES["bf16"]
    assert POLICIES["fp8"].scaled_by == "rowwise"


# -- the constants are what they say ----------------------------------------------------------------------------------


def assert_shipped(found: Stack) -> None:
    shipped = load_stack(found.name)
    assert set(found.constants) == set(shipped.constants)
    for name, constant in found.constants.items():
        assert shipped.constants[name].value == pytest.approx(constant.value, rel=2e-2), name


@pytest.mark.parametrize(
    "table", [pytest.param(table, marks=[] if table == "megatron" else pytest.mark.slow) for table in FITTED_TABLES]
)
def test_shipped_constants_are_those_of_a_fit_to_all_rows(table: str) -> None:
    assert_shipped(refitted(table))


def test_a_refit_changes_values_and_nothing_else() -> None:
    text = read_text(ROOT / "stacks" / "llm-foundry.toml")
    changed = with_value(with_value(text, "attention.Hopper", 2.5), "streaming", 1 / 3)
    assert len(changed.splitlines()) == len(text.splitlines())
    assert "value = 0.333\n" in changed
    assert with_value(changed, "attention.Hopper", 1.0).count("value = 2.5\n") == 0
    assert replace(load_stack("llm-foundry"), constants={}).constants == {}


@pytest.mark.parametrize(("name", "share"), [("roberta-base", 0.3), ("qwen3-0.6b", 0.3)])
def test_a_share_of_tokens_that_was_asked_for_is_refused_behind_a_stack(name: str, share: float) -> None:
    """What is usual of a masked model is left out: frameworks compute the head of every token."""
    model = load_model(name)
    asked: dict[str, Any] = {"hardware": load_hardware("h200"), "stack": load_stack("torchtitan")}
    assert isinstance(model, Transformer)
    with pytest.raises(FlopwiseError, match="behind torchtitan"):
        Setup(model=replace(model, loss_share=share), **asked)
    usual = replace(model, loss_share=0.15 if model.head == "masked" else 1.0)
    assert replace(usual, loss_share=1.0) == Setup(model=usual, **asked).model
