"""A page of rows that nobody has run: what a prediction knows beside its speed, what is best, what of it is shown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flopwise.cli import app
from flopwise.cli.foreseen import foresee_rows
from flopwise.references.published.results import read_results
from flopwise.store.results import Result
from tests.report.test_page_browser import ARGUMENTS, CHROMIUM, axe, sync_api

SWEEP = (
    "sweep --predict --model mpt-125m,mpt-350m,mpt-1b,mpt-7b --on a100-80gb,h100-sxm,h200 --gpus 8,64 --seq 2k,4k,8k "
    "--batch-tokens 2M -o csv"
)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreseen") / "predicted.csv"
    done = CliRunner().invoke(app, SWEEP.split())
    assert done.exit_code == 0
    path.write_text(done.stdout, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def rows(table: Path) -> list[Result]:
    return list(read_results(table))


def test_each_row_has_memory_interval_and_operators_of_its_own_prediction(rows: list[Result]) -> None:
    found = foresee_rows(rows)
    assert len(rows) == len(found) == 72
    for place, view in found.items():
        row = rows[place]
        assert view["step_s"] == pytest.approx(row.predicted_step_s, rel=1e-9)
        assert view["tokens_per_s"] == pytest.approx(row.predicted_tokens_per_s, rel=1e-9)
        (bar,) = view["bars"]
        assert sum(bar["bytes"]) == row.predicted_device_bytes == view["fit"]["total"]
        assert view["low_s"] <= view["step_s"] <= view["high_s"] and len(view["parts"]) >= 3
    # The line beside it asks for just this.
    view = found[71]
    (alone,) = [json.loads(CliRunner().invoke(app, [*view["command"].split()[1:], "-o", "json"]).stdout)]
    assert alone["step_s"] == view["step_s"] and alone["mfu"] == view["mfu"]


def test_nothing_is_shown_of_another_prediction(rows: list[Result]) -> None:
    """A model or a device that is another one by now, and what the catalogue does not have."""
    moved = replace(rows[0], predicted_step_s=1.001 * (rows[0].predicted_step_s or 1))
    own = replace(rows[1], model="ours")
    ran = replace(rows[2], state="ok", run="0001")
    assert list(foresee_rows([moved, own, ran, rows[3]])) == [3]
    kept: dict[Any, Any] = {}
    assert foresee_rows(rows[:2], kept) == foresee_rows(rows[:2], kept) and len(kept) == 2


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


def words(page: Any, selector: str) -> str:
    return str(page.locator(selector).inner_text()).replace("\u00a0", " ")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_the_page_recommends_filters_and_tells(browser: Any, table: Path, rows: list[Result]) -> None:
    path = table.parent / "predicted.html"
    assert CliRunner().invoke(app, ["report", str(table), "-o", "html", "-w", str(path)]).exit_code == 0
    page = browser.new_context(viewport={"width": 390, "height": 844}).new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # One for each model on each device, with its command; all of them by a click.
    assert page.locator("#best .first").count() == 12 == page.locator("#best .second code").count()
    page.locator("#best .chip").click()
    assert page.locator("#best .first").count() == 72
    # MFU, since models differ; what is foreseen is striped.
    assert page.input_value("#heat-value") == "mfu"
    assert page.locator("#heatmap .foreseen > rect").count() == page.locator("#heatmap .square > rect").count() > 8
    # Figures as filters: as many rows as Python counts.
    for written, holds in (
        ("tok/s>1e6", lambda row: row.predicted_tokens_per_s > 1e6),
        ("gpus=64 seq<=4k", lambda row: row.devices == 64 and row.sequence_tokens <= 4096),
        ("model:7b predicted<100k", lambda row: "7b" in row.model and row.predicted_tokens_per_s < 1e5),
        ("predicted_device_bytes>=100gib", lambda row: row.predicted_device_bytes >= 100 * 2**30),
    ):
        page.fill("#filter-q", written)
        assert page.evaluate("table.rows.length") == sum(map(holds, rows)) > 0, written
    page.fill("#filter-q", "")
    # Any field becomes a column, is kept in the address, and what is copied has it.
    page.locator("#columns summary").click()
    page.locator("[data-column=recompute]").check()
    page.locator("[data-column=hardware]").uncheck()
    heads = page.locator("#table th[data-name]").evaluate_all("all => all.map((each) => each.dataset.name)")
    assert "recompute" in heads and "hardware" not in heads and "cols=" in page.url
    header = next(csv.reader(io.StringIO(page.evaluate("csvText()"))))
    assert len(header) > len(heads)
    # What is foreseen of the row that is looked at, and none of the panels that only a run can fill.
    assert "as predicted" in words(page, "#memory .answer") and "8 of 10" in words(page, "#profile .answer")
    assert not any(page.locator(f"#{panel}").is_visible() for panel in ("timeline", "steps", "roofline"))
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    assert page.evaluate("axe.run().then(found => found.violations.map(one => [one.id, one.nodes[0].html]))") == []
    assert problems == []
    page.context.close()
