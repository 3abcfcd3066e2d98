"""A part of a trace is told as one on every road that gives a figure of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flopwise.base.errors import FlopwiseError
from flopwise.cli import app
from flopwise.profile.read.reading import read_profiles
from tests.support.traces import gpu_trace

CUT = "cut.json is cut off"


@pytest.fixture
def traces(tmp_path: Path) -> tuple[str, str]:
    """One that ends in the middle of its events, and the whole of it."""
    content = json.dumps(gpu_trace()).encode()
    cut, whole = tmp_path / "cut.json", tmp_path / "whole.json"
    cut.write_bytes(content[: content.index(b"multi_tensor")])
    whole.write_bytes(content)
    return str(cut), str(whole)


def told(*words: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.stderr
    return " ".join(result.stdout.split()), " ".join(result.stderr.split())


def test_why_says_it_first(traces: tuple[str, str]) -> None:
    assert f"Warning: {CUT}: the list of its events has no end. A step takes" in told("why", traces[0])[0]
    assert "Warning" not in told("why", traces[1])[0]


@pytest.mark.parametrize("form", ["table", "md", "json", "html"])
def test_a_comparison_says_which_one_is_cut(traces: tuple[str, str], form: str) -> None:
    out, _ = told("profile", "compare", *traces, "-o", form)
    assert CUT in out
    assert "whole.json is cut" not in out


def test_a_comparison_in_json_has_it_as_a_field(traces: tuple[str, str]) -> None:
    found = json.loads(told("profile", "compare", *traces, "-o", "json")[0])
    assert list(found["warnings"]) == ["cut.json"]
    assert CUT in found["warnings"]["cut.json"][0]


@pytest.mark.parametrize("form", ["table", "md", "json", "html"])
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_shown_says_so(traces: tuple[str, str], form: str, count: int) -> None:
    assert CUT in told("profile", "show", *traces[:count], "-o", form)[0]


@pytest.mark.parametrize("command", ["show", "compare"])
def test_beside_rows_it_stands_on_stderr(traces: tuple[str, str], command: str) -> None:
    assert f"warning: cut.json: {CUT}" in told("profile", command, *traces, "-o", "csv")[1]


def test_rows_of_figures_keep_it(traces: tuple[str, str]) -> None:
    assert f"cut.json,warnings,1,{CUT}" in told("profile", "show", traces[0], "-o", "csv")[0]


def test_what_ends_before_the_first_event_is_called_cut_off(tmp_path: Path) -> None:
    """Not something that is no trace: it was one."""
    content = json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "x" * 500}], **gpu_trace()})
    for name, packed in (("a.json", content[:300].encode()), ("a.json.gz", gzip.compress(content.encode())[:100])):
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(FlopwiseError, match="cut off"):
            read_profiles([tmp_path / name])


def test_what_has_no_events_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"schemaVersion": 1, "deviceProperties": []}))
    with pytest.raises(FlopwiseError, match="is no trace"):
        read_profiles([tmp_path / "a.json"])
