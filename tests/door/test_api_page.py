"""docs/api.md is what the docstrings say, its examples run; and what people rely on does not change unnoticed."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
import typer.main

import flopwise as fw
from flopwise import door
from flopwise.cli import app
from tests.support.api_page import COMMAND, FUNCTIONS, PAGE, page

SURFACE = Path(__file__).parent / "surface.txt"


def test_the_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), f"docs/api.md is not up to date: {COMMAND}"


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page: later ones read the run that an earlier one made."""
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for name in FUNCTIONS:
        found = doctest.DocTestFinder(recurse=False).find(getattr(door, name), name, globs={"fw": fw})
        assert found[0].examples, f"{name} has no example"
        assert runner.run(found[0]).failed == 0


def test_every_function_is_on_the_page() -> None:
    assert set(FUNCTIONS) == set(door.__all__)
    assert {name for name in fw.__all__ if not name.startswith("_")} == {
        line.removeprefix("### fw.")
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("### ")
    }


def surface() -> str:
    """Names of the library, and commands with their options."""
    lines = ["# Names of `import flopwise`, commands and their options: what people and programs rely on.", ""]
    lines += [f"flopwise.{name}" for name in sorted(fw.__all__)]
    root = typer.main.get_command(app)
    for command, parameters in sorted(_commands(root, "flopwise")):
        lines += ["", command, *(f"    {words}" for words in sorted(parameters))]
    return "\n".join(lines) + "\n"


def _commands(command: object, name: str) -> list[tuple[str, list[str]]]:
    words = [" ".join(one.opts) for one in command.params]  # type: ignore[attr-defined]
    found = [(name, words)]
    for inner, each in getattr(command, "commands", {}).items():
        found += _commands(each, f"{name} {inner}")
    return found


def test_names_commands_and_options_are_those_that_were_agreed_on() -> None:
    wish = "if that is meant, write it anew: python -m tests.door.test_api_page, and say so in CHANGELOG.md"
    assert SURFACE.read_text(encoding="utf-8") == surface(), f"names, commands or options changed; {wish}"


if __name__ == "__main__":
    SURFACE.write_text(surface(), encoding="utf-8")
