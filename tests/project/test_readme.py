"""README and docs tell the truth: their commands print what they show; their Python runs; links lead somewhere."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from pathlib import Path
from unittest.mock import patch

import pytest

from flopwise.plan.device import explain
from flopwise.plan.device.search import FoundPlan, fastest_plan
from flopwise.setup.setup import CappedSetup
from tests.cli.test_cli_fuzz import answered

ROOT = Path(__file__).parents[2]
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
TEXT = "\n".join(PAGES.values())


def console_blocks() -> list[tuple[str, str]]:
    """(command, shown output) of every `$ flopwise …` in a console block."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL):
        for command, output in re.findall(r"^\$ flopwise (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            found.append((command, output))
    return list(dict.fromkeys(found))


def printed(command: str, folder: Path, code: int = 0) -> str:
    """What a command prints in a terminal of 120 columns; its home is the folder that it runs in."""
    home = {"PATH": "/usr/bin:/bin", "COLUMNS": "120", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, home, clear=True), contextlib.chdir(folder):
        found, out, err = answered(shlex.split(command))
    assert found == code, err
    return out


@pytest.fixture(autouse=True)
def _planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the pages show cells of the same grids: each is searched for once."""
    monkeypatch.setattr(explain, "fastest_plan", _find_once)


FOUND: dict[str, FoundPlan | None] = {}


def _find_once(setup: CappedSetup) -> FoundPlan | None:
    key = repr(setup)
    if key not in FOUND:
        FOUND[key] = fastest_plan(setup)
    return FOUND[key]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        # Plans for a grid of caps take seconds.
        pytest.param(*block, id=block[0], marks=pytest.mark.slow if "24,40,78,132GiB" in block[0] else ())
        for block in console_blocks()
    ],
)
def test_commands_print_what_is_shown(command: str, shown: str, tmp_path: Path) -> None:
    # Files that the page names lie in the repository; what a command writes does not go there.
    for folder in ("tests", "benchmarks"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    assert printed(command, tmp_path).strip() == shown.strip()
    # A picture that a command writes says what the one says that the page shows; matplotlib keeps a cache beside it.
    for written in (path for path in tmp_path.iterdir() if path.is_file()):
        assert _words(written) == _words(ROOT / "docs" / written.name) != []


def _words(picture: Path) -> list[str]:
    """All that an SVG says, in its order; where its lines lie differs with the version that draws it."""
    return re.findall(r"<(?:text|title|dc:title)\b[^>]*>([^<]+)<", picture.read_text(encoding="utf-8"))


def _shape(text: str) -> list[str]:
    """Lines without their figures, which differ from run to run and from machine to machine."""
    figures = re.compile(r"[-+−]?\d[\d,.:]*\s*(ms|s|µs|[KMG]iB|GF|%)?(?=\W|$)")
    lines = (re.sub(r"\s+", " ", figures.sub("#", line)).strip() for line in text.splitlines())
    return [line for line in lines if line]


@pytest.mark.slow
def test_the_training_shown_runs_and_prints_the_same_lines(tmp_path: Path) -> None:
    (block,) = re.findall(r"```text\n\$ flopwise (train.*?)```", TEXT, re.DOTALL)
    command, _, shown = block.partition("\n")
    lines = _shape(printed(command, tmp_path))
    assert len(lines) > 20
    assert _shape(shown)[-len(lines) :] == lines
    assert (tmp_path / "runs" / "0001" / "record.json").is_file()


def test_what_is_shown_in_part_is_how_it_begins(tmp_path: Path) -> None:
    blocks = re.findall(r"```text\n\$ flopwise ((?:profile|predict|plan) .*)\n((?:.*\n)*?) *…\n```", TEXT)
    assert len(blocks) > 2
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    for command, shown in blocks:
        code = 1 if '"fits": false' in shown else 0
        assert shown.count("\n") > 5 and printed(command, tmp_path, code).startswith(shown)


def test_the_readme_is_short() -> None:
    assert PAGES[ROOT / "README.md"].count("\n") <= 300


def test_there_are_commands_to_check() -> None:
    assert len(console_blocks()) >= 14


def test_python_runs() -> None:
    # Those of docs/api.md are signatures, and examples that tests/door runs; docs/fine-tuning.md is a story with files.
    texts = (text for page, text in PAGES.items() if page.name not in ("api.md", "fine-tuning.md"))
    blocks = [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    assert blocks
    for block in blocks:
        exec(compile(block, "block", "exec"), {"__name__": "__main__"})  # noqa: S102 - our own pages


def test_named_targets_files_and_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for indented, quoted in re.findall(r"^ +make (\w+)|`make (\w+)`", TEXT, re.MULTILINE):
        target = indented or quoted
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert link.startswith("http") or (page.parent / link).exists(), (page, link)
    for command in sorted(set(re.findall(r"`flopwise (\w+)", TEXT))):
        assert answered([command, "--help"])[0] == 0, command


def test_layout_page_names_every_room_and_is_two_screens_long() -> None:
    page = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    rooms = ROOT / "src" / "flopwise"
    for path in rooms.rglob("__init__.py"):
        room = path.parent.relative_to(rooms)
        # start_up is a folder for PYTHONPATH, not a room.
        assert not room.name or room.name == "start_up" or f"`{room.name}/`" in page, room
    for first in re.findall(r"\| `(\w+)/` \|.*\| ([^|]+) \|$", page, re.MULTILINE):
        for file in re.findall(r"`([\w/.]+)`", first[1]):
            assert (rooms / first[0] / file).exists(), file
    assert page.count("\n") < 100


def test_files_and_functions_stay_small() -> None:
    import ast

    for folder in ("src", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert text.count("\n") < 800, path
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    # Keywords of the door and arguments of kernels are typed a line each: there the body counts.
                    begin = node.body[0].lineno if path.parent.name in ("door", "kernels") else node.lineno
                    # A call that fills a record of dozens of fields is a table, not logic.
                    tables = sum(
                        (call.end_lineno or 0) - call.lineno
                        for call in ast.walk(node)
                        if isinstance(call, ast.Call) and len(call.keywords) > 40
                    )
                    assert (node.end_lineno or 0) - begin - tables < 80, f"{path}: {node.name}"


def test_no_class_name_is_defined_twice() -> None:
    import ast

    places: dict[str, list[str]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path.name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
