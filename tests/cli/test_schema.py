"""JSON that programs can rely on: every object says what it is, and is as `flopwise schema` describes it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import flopwise as fw
from flopwise.base.errors import FlopwiseError
from flopwise.cli import app
from flopwise.cli.json_types import KINDS, PRINTED
from flopwise.cli.output import schema_json
from flopwise.cli.schema import schema_of
from tests.support.json_schema import violations

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
COMMANDS: Any = typer.main.get_command(app)


def printed(*words: str, code: int = 0) -> dict[str, Any]:
    """What a command prints, checked against its schema."""
    result = CliRunner().invoke(app, [*words, "-o", "json"])
    assert (result.exit_code, getattr(result.exception, "exit_code", 0)) in ((code, 0), (1, code)), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    command = " ".join(words[:2] if words[0] == "profile" else words[:1])
    assert violations(found, schema_of(command)) == []
    return found


@pytest.mark.parametrize(
    ("words", "schema"),
    [
        ("predict gpt2 --on h200 --show-config", "flopwise.settings/1"),
        ("predict gpt2 --on h200,a100-80gb --show-config", "flopwise.settings-list/1"),
        ("ls stacks", "flopwise.stack-entry-list/1"),
        ("show lstm-lm", "flopwise.model/1"),
        ("show deepflow-2019", "flopwise.technology/1"),
        ("env", "flopwise.environment/1"),
    ],
)
def test_objects_are_as_the_schema_says(words: str, schema: str) -> None:
    assert printed(*words.split())["schema"] == schema


@pytest.mark.parametrize(
    ("words", "place", "needed"),
    [
        ("plan gpt-3-175b --on a100-80gb --gpus 8 --batch 64", "device", 175_644_023_808),
        ("plan llama-3-8b --on h100-sxm --seq 8k --device-mem 1GiB --host-mem 1GiB", "device", 52_081_739_264),
        ("plan llama-3-8b --on h100-sxm --seq 8k --device-mem 24GiB --host-mem 16GiB --rule dataflow", "host", None),
    ],
)
def test_nothing_fits_is_an_object_too(words: str, place: str, needed: int | None) -> None:
    found = printed(*words.split(), code=1)
    assert (found["schema"], found["fits"], found["place"]) == ("flopwise.does-not-fit/1", False, place)
    assert found["needed_bytes"] == needed or needed is None
    assert found["error"]["what"]


def test_a_mistake_prints_no_object() -> None:
    assert CliRunner().invoke(app, ["plan", "gpt2", "--on", "nowhere", "-o", "json"]).stdout == ""


def test_names_are_the_catalogues_whatever_was_typed() -> None:
    one = printed("plan", "gpt2", "--on", "H100", "--seq", "1k", "--batch", "8")
    many = printed("plan", "gpt2", "--on", "h100", "--gpus", "2", "--seq", "1k", "--batch", "8")
    step = printed("predict", "GPT2", "--on", "H100", "--seq", "1k", "--batch", "8")
    assert {one["hardware"], one["plan"]["hardware"], many["prediction"]["hardware"], step["hardware"]} == {"h100-sxm"}
    assert {one["model"], many["prediction"]["model"], step["model"]} == {"gpt2"}


def test_what_is_printed_is_read_back(tmp_path: Path) -> None:
    for name in ("gpt2", "h200"):
        assert (
            CliRunner().invoke(app, ["show", name, "-o", "json", "-w", str(tmp_path / f"{name}.json")]).exit_code == 0
        )
    found = printed("predict", str(tmp_path / "gpt2.json"), "--on", str(tmp_path / "h200.json"))
    assert found == printed("predict", "gpt2", "--on", "h200")


def test_every_command_with_json_has_a_schema() -> None:
    names = {
        name: command
        for group, each in COMMANDS.commands.items()
        for name, command in (
            [(f"{group} {inner}", one) for inner, one in each.commands.items()]
            if hasattr(each, "commands")
            else [(group, each)]
        )
    }
    with_json = {
        name
        for name, command in names.items()
        for one in command.params
        if one.name == "output" and "json" in (one.help or "")
    }
    assert with_json == set(PRINTED)
    assert {kind.removesuffix("-list") for kinds in PRINTED.values() for kind in kinds} == set(KINDS)


def test_the_page_names_all_that_is_printed() -> None:
    rows = dict(re.findall(r"^\| `([a-z ]+)` \| (`.*`) \|$", PAGE, re.MULTILINE))
    assert {name: tuple(re.findall(r"`(.+?)`", kinds)) for name, kinds in rows.items()} == PRINTED


def test_a_key_that_the_schema_does_not_name_is_seen() -> None:
    found = printed("predict", "gpt2", "--on", "h200")
    schema = schema_of("predict")
    assert violations(found | {"more": 1}, schema) == ["$.more is not in the schema"]
    assert violations(found | {"interval": found["interval"] | {"more": 1}}, schema) != []
    assert violations(found | {"step_s": "1"}, schema) != []
    # What is not finite is a word wherever something was measured, nowhere else, and never null.
    assert violations(found | {"step_s": "nan"}, schema) != []
    assert violations(found | {"step_s": None}, schema) != []
    measured = json.loads(schema_json({"schema": "", "step_s": float("nan"), "mfu": float("-inf")}, "result"))
    assert (measured["step_s"], measured["mfu"]) == ("nan", "-inf")
    assert violations({"schema": "flopwise.result-list/1", "rows": [{"step_s": "nan"}]}, schema_of("report")) == []
    assert violations({key: value for key, value in found.items() if key != "step_s"}, schema) != []
    result = CliRunner().invoke(app, ["schema", "predicts"])
    assert "did you mean predict" in str(result.exception)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_answer_holds_what_is_no_number(value: float) -> None:
    for answer in (fw.predict("gpt2", on="h200"), fw.plan("gpt2", on="h200", batch=8).forecast):
        for name in ("step_s", "tokens_per_s", "mfu", "hfu"):
            with pytest.raises(FlopwiseError, match=f"{name} of .* comes out as {value}"):
                replace(answer, **{name: value})  # type: ignore[arg-type]
