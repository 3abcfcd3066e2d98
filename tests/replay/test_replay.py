"""Every command of `commands.txt` prints the figures that it printed before; where words changed, a list says so."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from flopwise.cli.schema import schema_of
from tests.support.json_schema import violations

from .replaying import (
    CHANGED_WORDS,
    SAID,
    Said,
    changed_words,
    figures,
    from_text,
    lost_figures,
    make_folder,
    read_commands,
    recorded,
    run,
    to_text,
)

LINES = read_commands()
LISTED: dict[str, str] = tomllib.loads(CHANGED_WORDS.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("replay")
    make_folder(place)
    return place


@pytest.mark.parametrize("name", LINES)
def test_figures_stay_and_changed_words_are_listed(name: str, folder: Path) -> None:
    before, after = recorded(name), run(LINES[name], folder)
    lost = lost_figures(before, after)
    assert not lost, f"flopwise says other figures: {LINES[name]}\n" + "\n".join(lost)
    changed = changed_words(before, after)
    if name in LISTED:
        assert changed, f"{name} says what it said: take it out of {CHANGED_WORDS.name}"
    else:
        wish = f"list it with a reason in {CHANGED_WORDS.name} if that is meant: {LINES[name]}"
        assert not changed, f"other words; {wish}\n" + "\n".join(changed)
    if " -o json" in LINES[name] and after.code != 2:
        check_schema(LINES[name], after)


def check_schema(line: str, said: Said) -> None:
    """What a command prints with `-o json` is an object as `flopwise schema` describes it."""
    words = line[line.index("flopwise ") :].split()
    command = " ".join(words[1:3] if words[1] == "profile" else words[1:2])
    printed = said.parts.get("stdout")
    if printed is None:
        return  # it went to a file that other lines read
    assert violations(json.loads(printed), schema_of(command)) == []


def test_two_hundred_lines_over_all_commands_are_recorded() -> None:
    assert len(LINES) >= 200
    assert {path.stem for path in SAID.glob("*.txt")} == set(LINES)
    for name, line in LINES.items():
        text = (SAID / f"{name}.txt").read_text(encoding="utf-8")
        assert text.startswith(f"$ {line}\n"), name
    assert set(LISTED) <= set(LINES)
    assert all(reason.strip() for reason in LISTED.values())


# -- the rules themselves --------------------------------------------------------------------------------------------


def test_a_number_within_a_name_is_no_figure() -> None:
    text = "llama-3-8b on h100-sxm: dp8 tp2, 49.7 s, −16 % to +118 %, 1,024–2,048 tok/s of 8k at 3.35 TB/s (1.5e-3)"
    found = ["49.7 s", "−16 %", "+118 %", "1,024", "2,048 tok/s", "8k", "3.35 TB/s", "1.5e-3"]
    assert figures("stdout", text) == found


@pytest.mark.parametrize(
    ("before", "after", "lost", "changed"),
    [
        ("step 1.50 s", "step 1.50 s", False, False),
        ("step 1.50 s", "step  1.50\ns", False, False),
        ("step 1.50 s", "a step 1.50 s", False, True),
        ("step 1.50 s", "step 1.51 s", True, False),
        ("step 1.50 s", "step 1.50 ms", True, False),
        ("step 1.50 s", "step 1.5 s", True, False),
        ("1 a 2 b", "2 a 1 b", True, False),
        ("1 a", "1 a 2", True, True),
        ('{"a": 1.5, "b": [2]}', '{"b": [2], "a": 1.5}', False, False),
        ('{"a": 1.5, "b": [2]}', '{"c": {"a": 1.5, "d": 2}}', False, True),
        ('{"a": 1.5, "b": [2]}', '{"a": 1.5, "b": [2, 3]}', False, True),
        ('{"a": 1.5, "b": [2]}', '{"a": 1.5, "b": [2, 2]}', False, True),
        ('{"a": 1.5}', '{"a": 1.5, "schema": 1}', False, True),
        ('{"a": 1.5, "b": 1.5}', '{"a": 1.5, "b": null}', True, True),
        ('{"a": 1.5}', '{"a": 1.500000000001}', True, False),
        ('{"a": "word"}', '{"a": "other"}', False, True),
        ('{"a": 1}', "a 1", False, True),
    ],
)
def test_figures_may_not_change_and_words_are_seen(before: str, after: str, lost: bool, changed: bool) -> None:
    one, other = (Said(0, {"stdout": text}) for text in (before, after))
    assert bool(lost_figures(one, other)) == lost
    if not lost:
        assert bool(changed_words(one, other)) == changed


def test_exit_codes_streams_and_files_count() -> None:
    whole = Said(0, {"stdout": "1 s", "plan.toml": "a = 1\n"})
    assert lost_figures(whole, Said(1, whole.parts))
    assert lost_figures(whole, Said(0, {"stdout": "1 s"}))
    assert not lost_figures(whole, Said(0, {**whole.parts, "stderr": "note"}))
    assert changed_words(whole, Said(0, {**whole.parts, "stderr": "note"}))
    assert not lost_figures(whole, Said(0, {**whole.parts, "plan.toml": "[b]\nc = 1\n"}))
    assert from_text(to_text(whole, "flopwise x")) == Said(0, {"stdout": "1 s\n", "plan.toml": "a = 1\n"})


def test_a_folder_elsewhere_gives_the_same(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    other = tmp_path / "other"
    shutil.copytree(folder, other, symlinks=True)
    assert run(LINES["plan-write"], folder) == run(LINES["plan-write"], other)
