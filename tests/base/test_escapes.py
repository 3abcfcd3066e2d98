"""Whatever stands in a file of others: no sign of it acts on a terminal, and none begins anything in markdown."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import encodable, json_text, write_whole
from flopwise.cli import app
from flopwise.report.results_files import results_csv
from flopwise.report.tables import markdown_table, text_table
from flopwise.report.words import visible
from flopwise.store.runs import PROFILE, RECORD, to_text
from flopwise.store.sweeps import CELLS, SWEEPS
from tests.support.result_rows import a_result
from tests.support.run_stores import make_store
from tests.support.traces import gpu_trace

BAD = "\x1b]0;x\x07\x9b31m\u202eA|B`c`<script>[x](javascript:y)\nZ\r"
ACTING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
BARS = re.compile(r"(?<!\\)\|")


def changed(value: Any, keep: frozenset[str]) -> Any:
    """With something bad at the end of every text that may be any, names of free tables among them."""
    if isinstance(value, str):
        return value + BAD
    if isinstance(value, list):
        return [changed(item, keep) for item in value]
    if isinstance(value, dict):
        return {key: item if key in keep else changed(item, keep) for key, item in value.items()}
    return value


def spoil(path: Path, *keep: str) -> dict[str, Any]:
    table: dict[str, Any] = changed(json.loads(path.read_text()), frozenset(keep))
    path.write_text(json.dumps(table))
    return table


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of a sweep with every text of every file spoilt that can be."""
    folder = make_store(tmp_path_factory.mktemp("spoilt") / "runs", 2, profiled=True, steps=8, sweep="grid")
    for run in ("0001", "0002"):
        path = folder / run / RECORD
        words = (
            "state",
            "task",
            "schedule",
            "decay_shape",
            "convention",
            "place",
            "profile",
            "architecture",
            "started",
            "optimizer",
        )
        table = spoil(path, *words)
        for free in ("metrics", "environment"):
            table[free] |= {f"name{BAD}": f"value{BAD}"}
        path.write_text(json.dumps(table))
        spoil(folder / run / PROFILE, "format", "kind", "source", "owner")
    for path in [*(folder / CELLS).glob("*/*.json"), *(folder / SWEEPS).glob("*.json")]:
        spoil(
            path,
            "id",
            "cell",
            "cells",
            "run",
            "state",
            "method",
            "task",
            "device",
            "sweep",
            "batch_sequences",
            "micro_batch_sequences",
            "architecture",
        )
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, results and a model, with names that are bad."""
    folder = tmp_path_factory.mktemp("others")
    trace = gpu_trace()
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "cpu_op"):
            event["name"] += BAD
    trace["deviceProperties"] = [{"id": 0, "name": f"NVIDIA H200{BAD}"}]
    (folder / f"trace{BAD.replace('/', '_')}.json").write_text(json.dumps(trace))
    row = a_result(model=f"m{BAD}", hardware=f"h{BAD}", reason=f"r{BAD}", card=f"c{BAD}", run=f"1{BAD}")
    (folder / "results.csv").write_text(results_csv([row, row]))
    return folder


def assert_quiet(words: list[str], *, form: str = "") -> None:
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, FlopwiseError | SystemExit | None), found.exception
    text = found.stdout + found.stderr
    assert not ACTING.search(text), (words, ACTING.findall(text)[:5])
    if form != "md":
        return
    assert "<script>" not in found.stdout
    assert not re.search(r"(?<!\\)\[x\]\(javascript", found.stdout)
    assert not re.search(r"(?<!\\)`c`", found.stdout)
    for table in re.findall(r"(?:^\|.*\n)+", found.stdout, re.M):
        assert len({len(BARS.findall(line)) for line in table.splitlines()}) == 1, table


def of_a_store() -> Iterator[tuple[list[str], str]]:
    for form in ("table", "md", "json"):
        for words in (["ls", "runs"], ["ls", "sweeps"], ["report"], ["compare", "1", "2"], ["report", "grid"]):
            yield [*words, "-o", form], form
        yield ["sweep", "--resume", "grid", "--dry-run", "-o", form], form
        yield ["profile", "show", "1", "-o", form], form
        yield ["profile", "compare", "1", "2", "-o", form], form
    yield ["show", "1"], "table"
    yield ["show", "1", "-o", "json"], "json"
    yield ["report", "--columns", "run,model,hardware,reason,card", "-o", "md"], "md"
    yield ["why", "1"], "table"
    yield ["report", "1-2", "--sort", "step_s"], "table"


def test_no_text_of_a_store_acts(store: Path) -> None:
    for words, form in of_a_store():
        assert_quiet([*words, "--store", str(store)], form=form)


def test_the_runs_are_told_all_the_same(store: Path) -> None:
    """What is checked here must be shown, or nothing is."""
    page = CliRunner().invoke(app, ["show", "1", "--store", str(store)])
    assert page.exit_code == 0, page.exception
    assert page.stdout.count("javascript") > 10
    table = CliRunner().invoke(app, ["report", "-o", "md", "--store", str(store)])
    assert "javascript" in table.stdout


def test_no_text_of_a_trace_or_of_results_acts(others: Path) -> None:
    trace = str(next(others.glob("trace*")))
    for form in ("table", "md", "json"):
        assert_quiet(["profile", "show", trace, "-o", form], form=form)
        assert_quiet(["profile", "compare", trace, trace, "-o", form], form=form)
        assert_quiet(["report", str(others / "results.csv"), "-o", form], form=form)
    assert_quiet(["why", trace])
    assert_quiet(["why", f"{trace}.nowhere"])


@pytest.mark.parametrize("words", [["predict", "X", "--on", "h200"], ["plan", "X", "--on", "h200"], ["show", "X"]])
def test_no_name_of_a_description_acts(words: list[str], tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["show", "gpt2", "-o", "json", "-w", str(tmp_path / "x.json")]).exit_code == 0
    table = json.loads((tmp_path / "x.json").read_text())
    for name, value in (("name", BAD), ("title", BAD), ("source", BAD), ("nowhere", 1)):
        path = tmp_path / f"{name}{BAD.replace('/', '_')}.json"
        path.write_text(json.dumps(table | {name: value}))
        for form in ("table", "md") if words[0] != "show" else ("json",):
            assert_quiet([*(str(path) if word == "X" else word for word in words), "-o", form], form=form)


def test_errors_are_told_without_acting(capsys: pytest.CaptureFixture[str]) -> None:
    from flopwise.cli import _fail

    with pytest.raises(SystemExit):
        _fail(FlopwiseError(BAD, why=BAD, hint=BAD))
    assert not ACTING.search(capsys.readouterr().err)


# -- the functions -----------------------------------------------------------------------------------------------------


@given(st.text())
def test_visible_text_acts_on_nothing_and_is_no_longer(text: str) -> None:
    assert not ACTING.search(visible(text))
    assert visible(visible(text)) == visible(text)
    assert visible(text).count("\n") == text.count("\n")


@given(st.text(), st.text())
def test_a_cell_is_one_cell_of_one_line(first: str, second: str) -> None:
    lines = markdown_table(["a", "b"], [[first, second]], {"a"}).split("\n")
    assert len(lines) == 4
    assert {len(BARS.findall(line.replace("\\\\", ""))) for line in lines[:3]} == {3}
    assert len(text_table(["a", "b"], [[first, second]], {"a"}).plain.split("\n")) == 2


@given(st.dictionaries(st.text(), st.text()))
def test_json_decodes_to_what_it_was(table: dict[str, str]) -> None:
    text = json_text(table, indent=2)
    assert json.loads(text) == table
    assert not ACTING.search(text)


# -- paths that are no text ------------------------------------------------------------------------------------------


def test_a_store_whose_path_is_no_text_is_reported(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/st\xffre"))
    make_store(folder, 2, profiled=True, steps=8)
    (folder / "0002" / RECORD).write_text("{")
    roads = [["ls", "runs", "-o", form] for form in ("table", "md", "csv", "json")]
    roads += [["report", "-o", form] for form in ("table", "md", "csv", "json")]
    roads += [["report", "-o", form, "-w", str(tmp_path / f"page.{form}")] for form in ("html", "csv", "md", "json")]
    roads += [["show", "1"], ["profile", "show", "1"], ["profile", "show", "1", "-o", "json"], ["why", "1"]]
    roads += [["collect", "--into", str(tmp_path / "results")], ["compare", "1", "1"]]
    for words in roads:
        found = CliRunner().invoke(app, [*words, "--store", str(folder)])
        assert found.exit_code == 0, (words, found.exception)
    assert "st\\xffre" in (tmp_path / "page.html").read_text()
    assert "st\\\\xffre" in CliRunner().invoke(app, ["ls", "runs", "-o", "json", "--store", str(folder)]).stdout


def test_bytes_of_a_path_stand_as_what_they_are(tmp_path: Path) -> None:
    assert encodable("a\udcff\ud800é") == "a\\xff\\ud800é"
    assert json.loads(to_text({"a\udcff": ["\udc80"]})) == {"a\\xff": ["\\x80"]}
    write_whole(tmp_path / "x", "a\udcff")
    assert (tmp_path / "x").read_text() == "a\\xff"
