"""docs/validation.md prints the constants that ship."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flopwise.catalog.load import load_stack

PAGE = (Path(__file__).parents[2] / "docs" / "validation.md").read_text(encoding="utf-8")
UNITS = {" ms": 1e-3, " µs": 1e-6, "": 1.0}


@pytest.mark.parametrize("name", ["llm-foundry", "vtrain", "nanotron", "megatron-lm"])
def test_the_constants_of_a_stack_are_those_that_ship(name: str) -> None:
    row = re.findall(rf"^\| {name} \| (.*) \|$", PAGE, re.MULTILINE)[0]
    printed = sorted(float(value) * UNITS[unit] for value, unit in re.findall(r"(\d+(?:\.\d+)?)( ms| µs|)", row))
    assert printed == pytest.approx(sorted(constant.value for constant in load_stack(name).constants.values()))
