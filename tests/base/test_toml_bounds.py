"""TOML of anybody's takes no more memory than its size warrants, and what is sound is read as the library reads it."""

from __future__ import annotations

import tomllib
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flopwise.base import files
from flopwise.base.errors import FlopwiseError
from flopwise.base.files import parse_toml, read_table
from flopwise.cli import app

DEEP = ".".join("a" * 25_000)
MOST_BYTES = 64 * 2**20


@pytest.mark.parametrize(
    "text",
    [
        f"{DEEP} = 1",
        f"[{DEEP}]\n",
        f"[[{DEEP}]]\n",
        f"x = {{ {DEEP} = 1 }}",
        " . ".join(["a"] * 2_000) + " = 1",
        ".".join(['"a"'] * 2_000) + " = 1",
        ".".join(["'a'"] * 2_000) + " = 1",
        "\t.\t".join(['"a.\\"b"', "c"] * 1_000) + " = 1",
        f"x = {'[' * 5_000}{']' * 5_000}",
        f"x = {'{ a = ' * 5_000}1{'}' * 5_000}",
        "# " + "x" * files.MOST_TOML_LETTERS,
    ],
    ids=["key", "table", "list", "inline", "blanks", "quoted", "literal", "mixed", "lists", "tables", "size"],
)
def test_what_would_take_too_much_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(FlopwiseError, match=r"is not valid TOML\nit is longer|a key in it has|it is nested"):
            read_table(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("words", [["predict", "X", "--on", "h200"], ["predict", "gpt2", "--on", "X"], ["show", "X"]])
def test_every_command_reads_its_files_so(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f"{DEEP} = 1")
    found = CliRunner().invoke(app, [str(path) if word == "X" else word for word in words])
    assert isinstance(found.exception, FlopwiseError), found.exception
    assert f"more than {files.MOST_KEY_PARTS} parts" in str(found.exception.why)


@pytest.mark.parametrize(
    "text",
    [
        f"x = \"{DEEP}\"\ny = '{DEEP}'",
        f'x = """\n{DEEP}\\"""\n"" {"[" * 500}"""\ny.z = 1.5',
        f"x = '''\n{DEEP}''{'{' * 500}'''\n[a.b.c]\n",
        f"# {DEEP} = {'[' * 500}\nx = 1979-05-27T07:32:00.999999-07:00",
        'x = "a\\"#[[["\ny = "#"',
        ".".join("abcdefgh") + " = [[[[1]]], {a = {b = [1.5]}}]",
    ],
)
def test_dots_and_brackets_of_strings_and_comments_are_none(text: str) -> None:
    assert parse_toml(text) == tomllib.loads(text)


@given(st.text(alphabet="ab.=[]{}'\"\\#\n ,1", max_size=60))
def test_small_texts_are_read_as_the_library_reads_them(text: str) -> None:
    try:
        expected = tomllib.loads(text)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            parse_toml(text)
        return
    assert parse_toml(text) == expected


@pytest.mark.parametrize("piece", ['"""\\"""', "'''", '"""', '"\\', "'", "[", "#", "a.", '""', "''"])
def test_what_has_no_end_is_looked_at_once(piece: str) -> None:
    """A search that began anew at every sign would take hours."""
    text = "x = " + piece * (2**20 // len(piece))
    with pytest.raises(ValueError, match=r"."):
        parse_toml(text)
