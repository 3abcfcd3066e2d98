"""The words that planner, simulator and engine share are types: a role renamed on one side does not type-check."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "flopwise"

PROGRAM = "records/program.py"
CHECKED = (
    PROGRAM,
    "plan/program/state.py",
    "plan/program/compile.py",
    "predict/simulate/simulator.py",
    "engine/streaming/slabs.py",
    "engine/streaming/player.py",
    "engine/streaming/executor.py",
)
SETTINGS = "[mypy]\nstrict_equality = True\n[mypy-torch.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
"""What is compared must be able to be equal. Torch, whose types take a minute, is left out."""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources beside a cache that all checks share."""
    folder = tmp_path_factory.mktemp("typed")
    shutil.copytree(SOURCES, folder / "flopwise", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    return folder


def complaints(folder: Path) -> dict[str, str]:
    """File → what mypy says of it, in the sources of a folder."""
    files = [f"flopwise/{name}" for name in CHECKED]
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--follow-imports", "silent", *files]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert not found.stderr, found.stderr
    said: dict[str, str] = {}
    for line in found.stdout.splitlines():
        if ": error: " in line:
            said[line.split(":")[0].removeprefix("flopwise/")] = line
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "objecting"),
    [
        ("", "", ()),
        ("home", "own place", ("plan/program/state.py", "plan/program/compile.py", "engine/streaming/player.py")),
        ("keys", "keys and values", ("plan/program/compile.py", "engine/streaming/player.py")),
        ("attended", "attention result", ("plan/program/compile.py",)),
        ("optimizer", "moments", ("plan/program/compile.py", "engine/streaming/executor.py")),
    ],
)
def test_a_renamed_role_does_not_type_check(copied: Path, old: str, new: str, objecting: tuple[str, ...]) -> None:
    """Roles, kinds and owners are renamed where they are listed, and nowhere else."""
    module = copied / "flopwise" / PROGRAM
    text = module.read_text(encoding="utf-8")
    listed = re.compile(r"^(Role|ValueKind|Owner) = Literal\[.*?\]$", re.MULTILINE | re.DOTALL)
    renamed = listed.sub(lambda match: match[0].replace(f'"{old}"', f'"{new}"') if old else match[0], text)
    assert (renamed != text) == bool(old)
    module.write_text(renamed, encoding="utf-8")
    try:
        found = complaints(copied)
    finally:
        module.write_text(text, encoding="utf-8")
    assert found.keys() >= set(objecting), found
    assert old or not found, found
