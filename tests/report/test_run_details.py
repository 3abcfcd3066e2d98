"""Details of runs for the page: the same from `report` and from `serve`, whatever lies in a run's folder."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from flopwise.cli import report as report_command
from flopwise.cli import run_details
from flopwise.cli.run_details import detail_of
from flopwise.cli.serving import Live
from flopwise.report.page.data import detail_json
from flopwise.store.runs import PROFILE, RECORD, STEPS, VARIABLE, read_record, write_record
from tests.cli.test_cli_fuzz import answered
from tests.support.run_stores import make_store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    return make_store(Path("runs"), 3, profiled=True, steps=8)


def page_data() -> dict[str, object]:
    code, _, err = answered(["report", "-o", "html"])
    assert code == 0, err
    found = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', Path("report.html").read_text(), re.S)
    assert found is not None
    return dict(json.loads(found[1]))


def test_both_show_the_same(store: Path) -> None:
    served = Live(store).answer("/run/0001.json")
    assert served is not None
    details = page_data()["details"]
    assert isinstance(details, dict)
    assert details["0001"] == json.loads(served.body)
    assert details["0001"]["is_profiled"] is True


def test_a_profile_that_the_record_does_not_know_of_is_not_shown(store: Path) -> None:
    write_record(store / "0001", replace(read_record(store / "0001"), profile=None))
    assert detail_of(store / "0001", print).is_profiled is False


@pytest.mark.parametrize("what", ["pipe", "damaged", "large"])
@pytest.mark.parametrize("name", [STEPS, PROFILE])
def test_parts_that_cannot_be_read_are_left_out(
    store: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    path = store / "0001" / name
    if what == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif what == "damaged":
        path.write_text("{\n")
    else:
        monkeypatch.setattr(run_details, "MOST_STEPS_BYTES", 10)
        monkeypatch.setattr("flopwise.store.rows.MOST_PROFILE_BYTES", 10)
    told: list[str] = []
    detail = detail_of(store / "0001", told.append)
    assert bool(detail.steps) == (name == PROFILE and what != "large")
    assert detail.is_profiled == (name == STEPS and what != "large")
    assert detail.state == "ok"
    assert bool(told) == (what != "pipe")
    assert json.loads(detail_json(detail))["run"] == "0001"


def test_a_record_that_cannot_be_read_says_why(store: Path) -> None:
    (store / "0001" / RECORD).write_text("{")
    detail = detail_of(store / "0001", print)
    assert detail.state == "unreadable"
    assert "damaged" in (detail.reason or "")
    assert list(page_data()["details"]) == ["0002", "0003"]  # type: ignore[call-overload]


def test_runs_that_a_page_has_no_room_for_are_counted(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del store
    assert page_data()["left_out"] == 0
    monkeypatch.setattr(report_command, "MOST_DETAILS", 1)
    found = page_data()
    assert (len(found["details"]), found["left_out"]) == (1, 2)  # type: ignore[arg-type]
