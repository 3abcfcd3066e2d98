"""The page that `flopwise serve` serves, in a browser, while a training and a sweep go on: nothing is loaded again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwise.cli import serving
from flopwise.cli.serving import Live, Server, listening
from flopwise.records.measurement import RunRecord, StepRecord
from flopwise.setup.training import Training
from flopwise.store.runs import LOG, RunLock, StepLog, write_record
from tests.report.test_page_browser import ARGUMENTS, CHROMIUM, eventually, sync_api
from tests.support import page_data_samples as samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
STEPS = 200


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@contextmanager
def serve(store: Path, port: int = 0) -> Iterator[Server]:
    server = listening(Live(store), port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def page_of(browser: Any, server: Server, address: str = "#tab=runs") -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{server.url}{address}")
    yield page
    assert problems == []
    context.close()


def a_step(number: int) -> StepRecord:
    evaluation = {"eval_loss": 5.0 - number / 100} if number % 50 == 0 else None
    return replace(
        samples.steps(1)[0],
        step=number,
        loss=6.0 - number / 50,
        step_s=0.25,
        predicted_s=0.2,
        tokens_per_s=4096.0,
        learning_rate=1e-4 * number,
        evaluation=evaluation,
        device_bytes=3 * 2**30,
        exposed_copy_s=0.025,
    )


def begin(store: Path, name: str = "0001", **changes: Any) -> RunRecord:
    """A run's folder as `flopwise train` has it once the first step begins."""
    (store / name).mkdir(parents=True)
    ended = samples.record(int(name), 40, 128, 4096.0)
    record = replace(
        ended, id=name, state="running", ended=None, measurement=None, steps_done=0, training=Training(steps=STEPS)
    )
    record = replace(record, **changes)
    write_record(store / name, record)
    (store / name / LOG).write_text("2026-02-28T10:00:00+00:00 begins: llama-3-8b\n")
    return record


def words(page: Any, panel: str) -> str:
    return str(page.locator(f"#{panel}").inner_text()).replace("\u00a0", " ")


def shows(page: Any, panel: str, text: str) -> None:
    eventually(page, f"document.getElementById('{panel}').innerText.replaceAll('\\u00a0', ' ').includes({text!r})", 30)


def test_a_training_is_followed_from_before_it_began(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "EVERY_S", 0.0)
    store = tmp_path / "runs"
    with serve(store) as server, page_of(browser, server) as page:
        page.evaluate("window.mark = 'never loaded again'")
        record = begin(store, request={**samples.record(1, 40, 128, 4096.0).request, "profile": True})
        with RunLock(store / "0001"), StepLog(store / "0001") as log:
            shows(page, "progress", "no step of 200 is done yet")
            for number in range(1, 109):
                log.append(a_step(number))
            page.evaluate("update()")
            shows(page, "progress", "Step 108 of 200, 54 %; about 23 s left.")
            told = words(page, "progress")
            assert "a step takes 25 % longer than the predicted 200 ms; 10 % of the time a copy is awaited" in told
            for figure in ("3.840", "4.000 after step 100", "0.0108", "4,096 tok/s", "3.00 GiB"):
                assert figure in told, figure
            # Of the same moment: the row, the curve, and what is still to come.
            assert page.locator("#table td.state").inner_text() == "▸ 108/200"
            shows(page, "steps", "The loss goes from 5.980 to 3.840")
            assert "goes on and is profiled" in words(page, "profile")
            for number in range(109, STEPS + 1):
                log.append(a_step(number))
            page.evaluate("update()")
            shows(page, "progress", "Step 200 of 200, 100 %")
            ended = samples.record(1, 40, 128, 4096.0)
            write_record(store / "0001", replace(record, state="done", measurement=ended.measurement))
            page.evaluate("update()")
            eventually(page, "document.getElementById('progress').hidden", 30)
        assert "✓ ok" in words(page, "run-about") and page.evaluate("window.mark") == "never loaded again"


def test_a_server_that_was_interrupted_is_found_again(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "EVERY_S", 0.0)
    store = tmp_path / "runs"
    begin(store)
    with RunLock(store / "0001"), StepLog(store / "0001") as log:
        with serve(store) as server:
            port = server.server_port
            context = browser.new_context()
            page = context.new_page()
            page.goto(server.url)
        page.evaluate("update()")
        shows(page, "updated", "no answer")
        log.append(a_step(1))
        with serve(store, port):
            # It asks again by itself.
            shows(page, "progress", "Step 1 of 200")
            shows(page, "updated", "updated just now")
        context.close()


def test_a_cell_stays_selected_when_it_becomes_a_run(browser: Any, tmp_path: Path) -> None:
    """The rows of a store before and after an attempt has begun its run."""
    rows, details = samples.sweep_rows()
    cell = "8c84e0be2212"
    waiting = replace(samples.blank(rows[5]), run=None, cell=cell, attempt=1, state="running")
    data = replace(samples.page_of([*rows[:5], waiting]), details=details, live=True)
    from flopwise.report.page.data import page_json

    store = tmp_path / "runs"
    with serve(store) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{server.url}#tab=runs")
        page.evaluate(
            "page => { showNew(JSON.parse(page)); selectRow(findRow('cell-8c84e0be2212-1')) }",
            page_json(data),
        )
        assert page.locator("#run-title").inner_text() == f"Cell {cell}"
        assert "is being tried, and has no run yet" in words(page, "profile")
        begun = replace(waiting, run="0006")
        page.evaluate("page => showNew(JSON.parse(page))", page_json(replace(data, rows=[*rows[:5], begun])))
        assert page.locator("#run-title").inner_text() == "Run 0006" and "run=0006" in page.url
        context.close()


def test_two_trainings_are_compared_while_they_go_on(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "EVERY_S", 0.0)
    store = tmp_path / "runs"
    with serve(store) as server, page_of(browser, server) as page:
        begin(store, "0001")
        begin(store, "0002")
        with StepLog(store / "0001") as one, StepLog(store / "0002") as other:
            for number in range(1, 4):
                one.append(a_step(number))
                other.append(replace(a_step(number), loss=4.0))
            eventually(page, "document.getElementById('tabs').textContent.includes('Compare')", 30)
            page.evaluate("choose({ marked: '0001,0002' }); compareMarked()")
            shows(page, "compare-curves", "In the end the losses are 5.940 (run 0001) and 4.000 (run 0002).")
            for number in range(4, 20):
                one.append(a_step(number))
            page.evaluate("update()")
            shows(page, "compare-curves", "the losses are 5.620 (run 0001) and 4.000 (run 0002).")
