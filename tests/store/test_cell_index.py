"""The index of cells: the same rows with it and without, whatever happened to their files or to the index."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.store import cell_index, index
from flopwise.store.cell_index import CELLS_INDEX, Held, cell_names, indexed_cells
from flopwise.store.collecting import Memory, collect
from flopwise.store.sweeps import cell_folder, read_attempts, read_cell, write_attempt, write_cell
from tests.support.run_stores import STARTED, a_cell, make_store, write_attempted


@pytest.fixture(autouse=True)
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the store is, and however new its files."""
    monkeypatch.setattr(index, "WORTH_WRITING_BYTES", 1)
    monkeypatch.setattr(cell_index, "SETTLED_NS", -(10**9))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "runs", 3, sweep="grid", repeats=2, steps=6)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cells whose files are read from here on."""
    seen: list[str] = []

    def reading(folder: Path, name: str) -> Any:
        seen.append(name)
        return read_attempts(folder, name)

    monkeypatch.setattr(cell_index, "read_attempts", reading)
    return seen


def test_cells_are_read_once(store: Path, read: list[str]) -> None:
    first = collect(store).rows
    assert read == cell_names(store)
    read.clear()
    assert collect(store).rows == first
    assert collect(store, ["grid"]).rows == first
    # A few are read faster than an index.
    assert set(read) <= set(cell_names(store))
    assert (store / CELLS_INDEX).is_file()


def test_what_is_kept_is_what_is_written(store: Path) -> None:
    indexed_cells(store)
    for name, held in indexed_cells(store)[0].items():
        assert isinstance(held, Held)
        cell = read_cell(store, name)
        assert held.cell == replace(cell, settings=replace(cell.settings, model={"name": "gpt2"}))
        assert list(held.attempts) == read_attempts(store, name)[0]


def _another_attempt(store: Path, name: str) -> None:
    write_attempted(store, read_cell(store, name), "oom", repeat=3, reason="too large")


def _an_attempt_changed(store: Path, name: str) -> None:
    write_attempt(store, replace(read_attempts(store, name)[0][0], state="failed", ended=STARTED, reason="odd"))


def _another_prediction(store: Path, name: str) -> None:
    write_cell(store, replace(read_cell(store, name), foreseen=None))


def _written_in_place(store: Path, name: str) -> None:
    path = cell_folder(store, name) / "attempt-0001.json"
    with path.open("r+") as stream:
        text = stream.read().replace('"ok"', '"oom"')
        stream.seek(0)
        stream.write(text)


def _taken_away(store: Path, name: str) -> None:
    (cell_folder(store, name) / "attempt-0002.json").unlink()


def _damaged(store: Path, name: str) -> None:
    (cell_folder(store, name) / "cell.json").write_text("{")


@pytest.mark.parametrize(
    "change",
    [_another_attempt, _an_attempt_changed, _another_prediction, _written_in_place, _taken_away, _damaged],
    ids=lambda change: change.__name__.strip("_"),
)
def test_a_change_is_seen(store: Path, read: list[str], change: Any) -> None:
    collect(store)
    name = cell_names(store)[1]
    change(store, name)
    read.clear()
    rows = collect(store).rows
    assert set(read) <= {name}
    (store / CELLS_INDEX).unlink()
    assert collect(store).rows == rows


def test_running_attempts_are_never_kept(store: Path, read: list[str]) -> None:
    """Their file is touched now and then, and they end without anybody reading it in between."""
    cell = a_cell(sequence_tokens=64)
    host = os.uname().nodename
    write_attempted(store, cell, "running", host=host, pid=2**22 + 7)
    for _ in range(3):
        read.clear()
        assert [row.state for row in collect(store).rows if row.cell == cell.id] == ["failed"]
        assert cell.id in read
    assert cell.id not in json.loads((store / CELLS_INDEX).read_text())["cells"]


def test_what_was_written_just_now_is_not_kept(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the same tick of the clock it may be written again."""
    monkeypatch.setattr(cell_index, "SETTLED_NS", 10**12)
    collect(store)
    assert not (store / CELLS_INDEX).exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"layout": 1, "maker": "", "cells": {}}', "null", '{"cells": {"a": 1}}', "\x00", "[" * 5000],
)
def test_a_damaged_index_costs_nothing_but_time(store: Path, text: str) -> None:
    rows = collect(store).rows
    (store / CELLS_INDEX).write_text(text)
    assert collect(store).rows == rows
    assert len(json.loads((store / CELLS_INDEX).read_text())["cells"]) == 3


def test_an_entry_of_another_cell_is_left_alone(store: Path) -> None:
    rows = collect(store).rows
    whole = json.loads((store / CELLS_INDEX).read_text())
    first, second = cell_names(store)[:2]
    whole["cells"][first], whole["cells"][second] = whole["cells"][second], whole["cells"][first]
    whole["cells"][cell_names(store)[2]][0].pop()
    (store / CELLS_INDEX).write_text(json.dumps(whole))
    assert collect(store).rows == rows


def test_what_is_not_ours_stays(store: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text("mine")
    (store / CELLS_INDEX).symlink_to(elsewhere)
    assert collect(store).rows
    assert elsewhere.read_text() == "mine"


def test_a_store_that_cannot_be_written_to(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise FlopwiseError(f"cannot write {path}", why=text[:5])

    rows = collect(store).rows
    (store / CELLS_INDEX).unlink()
    monkeypatch.setattr(cell_index, "write_whole", refuse)
    assert collect(store).rows == rows


def test_no_cells_at_all(tmp_path: Path) -> None:
    assert indexed_cells(tmp_path) == ({}, [])
    (tmp_path / "cells").write_text("a file")
    assert indexed_cells(tmp_path) == ({}, [])


def test_rows_are_made_again_only_where_something_changed(store: Path) -> None:
    memory = Memory()
    collect(store, memory=memory)
    first = collect(store, memory=memory).rows
    again = collect(store, memory=memory).rows
    assert again == first == collect(store).rows
    assert all(old is new for old, new in zip(first, again, strict=True))
    name = cell_names(store)[1]
    _an_attempt_changed(store, name)
    changed = collect(store, memory=memory).rows
    assert changed == collect(store).rows
    assert [row.state for row in changed if row.cell == name and row.repeat == 1] == ["failed"]
