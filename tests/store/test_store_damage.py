"""A store in which anything may have happened to a file: it is told, nothing waits, and the other runs are there."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from flopwise.base.errors import FlopwiseError
from flopwise.cli import app, catalogue, compare
from flopwise.cli.run_details import detail_of
from flopwise.cli.serving import ROUTES, Live
from flopwise.report import document, results, run_comparison, runs
from flopwise.report.page import data as page_data
from flopwise.store import runs as store_module
from flopwise.store.collecting import collect
from flopwise.store.results import check_result
from flopwise.store.rows import UNREADABLE, read_profile, run_rows
from flopwise.store.runs import (
    LOCK,
    PROFILE,
    RECORD,
    ROW,
    STEPS,
    StepLog,
    process_is_gone,
    read_record,
    read_steps,
    to_text,
)
from flopwise.store.sweeps import read_sweep
from tests.support.listing import list_runs
from tests.support.run_stores import make_store

DELETED = object()
VALUES: tuple[Any, ...] = (
    *(DELETED, None, True, 0, -1, 3, 10**30, 2.5, 1e308, -1e308, "nan", "inf", "", "7", "9" * 5000, "x\x1b[31m|<b>\n"),
    *([], [1], ["a", {"b": None}], {}, {"a": 1}),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("damaged") / "runs", 2, profiled=True, steps=8)


@pytest.fixture(scope="module")
def record(store: Path) -> dict[str, Any]:
    """A run's record with every field of the free tables that anybody looks at."""
    found: dict[str, Any] = json.loads((store / "0001" / RECORD).read_text())
    sizes = {"device_memory_bytes": 2**33, "host_memory_bytes": 2**33}
    found["plan"] |= {"devices": 1, "batch_sequences": 16, "recompute": "full", "parallel": {"zero": 3}, **sizes}
    found["plan"]["expected"]["tokens_per_s"] = 30_000.0
    found["request"] |= {"micro_batch_sequences": 4, "profile": True, "profile_steps": 2, **sizes}
    found["data"] |= {"files": 2, "tokenizer": "bytes", "labels": ["a", "b"]}
    found["environment"]["memory_bytes"] = "123"
    resumed = {"resumed_from": "checkpoints/step-000003", "resumed_after": 3}
    return found | resumed | {"cell": "0123456789ab", "attempt": 1, "reason": "x", "checkpoint": "c/1"}


def places(value: object, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything within a table, as keys from the top."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*above, key)
        yield from places(item, (*above, key))


def change(table: Any, place: tuple[Any, ...], value: object) -> None:
    """Put a value in place of another; what an earlier change has taken away is left alone."""
    for key in place[:-1]:
        if not _has(table, key):
            return
        table = table[key]
    if isinstance(table, dict) and value is DELETED:
        table.pop(place[-1], None)
    elif isinstance(table, dict) or _has(table, place[-1]):
        # A copy: a later change within it would change what it was drawn from, or put a value into itself.
        table[place[-1]] = None if value is DELETED else copy.deepcopy(value)


def _has(table: Any, key: Any) -> bool:
    if isinstance(table, list):
        return isinstance(key, int) and key < len(table)
    return isinstance(table, dict) and key in table


def every_road(store: Path) -> None:
    """All that lists, shows, reports, compares and serves runs; the second run must be everywhere."""
    entries = [catalogue._run_entry(run, store / run.name) for run in run_rows(store)]
    (table,) = runs.runs_document(entries, store).blocks
    assert isinstance(table, document.Table)
    assert [row[0] for row in table.rows] == ["0001", "0002"]
    to_text(entries)
    assert not runs.sweeps_document([], store).blocks
    rows = [check_result(row) for row in collect(store).rows]
    assert [row.run for row in rows] == ["0001", "0002"]
    document.to_page(results.results_document(rows), 100)
    document.to_markdown(results.results_document(rows))
    to_text(rows)
    details = {row.run or "": detail_of(store / str(row.run), lambda _: None) for row in rows}
    page_data.page_json(page_data.PageData(title="x", created="y", rows=rows, details=details))
    for route in ROUTES:
        assert Live(store).answer(route) is not None
    sides = [compare._side(name, str(store)) for name in ("1", "2")]
    found = run_comparison.compare_runs(*sides, names=("1", "2"), threshold=0.03)
    document.to_page(run_comparison.comparison_document(found), 100)
    document.to_markdown(run_comparison.comparison_document(found))
    to_text(run_comparison.comparison_record(found))
    if rows[0].state != UNREADABLE:
        document.to_page(runs.run_document(read_record(store / "0001"), catalogue._steps(store / "0001")), 100)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_a_record_ends_a_road(data: st.DataObject, store: Path, record: dict[str, Any]) -> None:
    changed = copy.deepcopy(record)
    for _ in range(data.draw(st.integers(1, 3))):
        change(changed, data.draw(st.sampled_from(list(places(record)))), data.draw(st.sampled_from(VALUES)))
    (store / "0001" / RECORD).write_text(json.dumps(changed))
    every_road(store)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_a_row_ends_a_road(data: st.DataObject, rows: tuple[Path, dict[str, Any]]) -> None:
    store, row = rows
    changed = copy.deepcopy(row)
    for _ in range(data.draw(st.integers(1, 3))):
        change(changed, data.draw(st.sampled_from(list(places(row)))), data.draw(st.sampled_from(VALUES)))
    (store / "0001" / ROW).write_text(json.dumps(changed))
    every_road(store)


@pytest.fixture
def rows(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A store and the row of its first run, as it was written."""
    store = make_store(tmp_path / "runs", 2, steps=8)
    return store, json.loads((store / "0001" / ROW).read_text())


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("model", "name"), DELETED, "its model has no name"),
        (("model", "name"), 7, "its model has no name: model.name is 7"),
        (("plan", "devices"), [1], "plan.devices is a list of 1, not a count"),
        (("plan", "sequence_tokens"), "inf", "plan.sequence_tokens is 'inf', not a count"),
        (("request", "batch_sequences"), {}, "request.batch_sequences is an object, not a count"),
        (("request", "host_memory_bytes"), "7", "request.host_memory_bytes is '7', not a count"),
        (("plan", "expected", "step_s"), "x", "plan.expected.step_s is 'x', not a number"),
        (("measurement", "devices"), 0, "devices of a measurement cannot be 0"),
        (("measurement", "step_s"), 0, "step_s of a measurement cannot be 0"),
        (("measurement", "step_s"), "nan", "step_s of a measurement cannot be nan"),
        (("environment", "memory_bytes"), "9" * 5000, ""),
    ],
)
def test_what_a_record_lacks_is_told_and_hides_no_other(
    store: Path, record: dict[str, Any], place: tuple[str, ...], value: object, told: str
) -> None:
    changed = copy.deepcopy(record)
    change(changed, place, value)
    (store / "0001" / RECORD).write_text(json.dumps(changed))
    result = CliRunner().invoke(app, ["ls", "runs", "--store", str(store)])
    assert result.exit_code == 0, result.exception
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["run", "0001", "0002"]
    assert told in result.stderr
    assert (told == "") == (not result.stderr)
    every_road(store)


# -- what is no file ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["pipe", "endless", "folder"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Something that is no file, and that a reader would wait for or never come to the end of."""
    path = tmp_path / "odd"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


def put(odd: Path, path: Path) -> None:
    path.unlink(missing_ok=True)
    odd.rename(path)


@pytest.mark.parametrize("name", [RECORD, ROW, STEPS, PROFILE, LOCK])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, odd: Path, name: str) -> None:
    store = make_store(tmp_path / "runs", 2, profiled=True, steps=8)
    put(odd, store / "0001" / name)
    every_road(store)
    for words in (["ls", "runs"], ["show", "1"], ["report"]):
        found = CliRunner().invoke(app, [*words, "--store", str(store)])
        assert isinstance(found.exception, FlopwiseError | None), found.exception


def test_steps_that_are_no_file_are_told(tmp_path: Path, odd: Path) -> None:
    store = make_store(tmp_path / "runs", 1, steps=8)
    put(odd, store / "0001" / STEPS)
    with pytest.raises(FlopwiseError, match="cannot be read"):
        read_steps(store / "0001")
    with pytest.raises(FlopwiseError, match="it is no file"):
        StepLog(store / "0001")
    assert not process_is_gone(store / "0001")


def test_a_sweep_that_is_no_file_is_told(tmp_path: Path, odd: Path) -> None:
    store = make_store(tmp_path / "runs", 1, steps=8, sweep="s")
    put(odd, store / "sweeps" / "s.json")
    with pytest.raises(FlopwiseError, match="damaged"):
        read_sweep(store, "s")


def test_a_link_to_a_file_is_one(tmp_path: Path) -> None:
    store = make_store(tmp_path / "runs", 1, steps=8)
    for name in (RECORD, STEPS):
        (store / "0001" / name).rename(tmp_path / name)
        (store / "0001" / name).symlink_to(tmp_path / name)
    assert list_runs(store)[0].record
    assert len(read_steps(store / "0001")) == 8


def test_what_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "runs", 2, profiled=True, steps=8)
    # Holes take no space on the disk.
    os.truncate(store / "0001" / RECORD, store_module.MOST_RECORD_BYTES + 1)
    assert "larger than" in list_runs(store)[0].problem
    os.truncate(store / "0002" / PROFILE, 2**30)
    assert read_profile(store / "0002") is None
    monkeypatch.setattr(store_module, "LONGEST_STEP_BYTES", 20)
    with pytest.raises(FlopwiseError, match="line 1 is damaged"):
        read_steps(store / "0002")
