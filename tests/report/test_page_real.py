"""The page of runs that were really made, as `make demo` makes them: a small sweep on this CPU, drawn in a browser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_page_browser import ARGUMENTS, CHROMIUM, LANES, PANELS, axe, sync_api
from tests.support.launched import described_cpu

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
SWEEP = "--seq 64,128 --batch 2 --steps 8 --device cpu --name demo"
GRAVE = "axe.run().then(result => result.violations.filter(each => ['serious', 'critical'].includes(each.impact)))"


def flopwise(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "flopwise", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def marks(page: Any, selector: str) -> int:
    return int(page.locator(selector).count())


def check_panels(page: Any, rows: int) -> None:
    assert marks(page, "#heatmap .square > rect") == rows
    assert marks(page, "#accuracy .point > *") == rows
    assert marks(page, "#table tr[data-place]") == rows
    for drawn in ("#memory .owner > rect", "#timeline canvas", "#profile .stack span", "#best .first"):
        assert marks(page, drawn) > 0, drawn
    lanes = page.evaluate(LANES, page.evaluate("state.selected.run"))
    measured, predicted = (sum(tasks for side, tasks in lanes if side == one) for one in ("measured", "predicted"))
    assert measured == predicted > 0
    # CPU operators have shapes, and so a place below the roofs.
    assert marks(page, "#roofline .operator > circle") > 0
    # The first steps are in a run's own picture, too.
    assert marks(page, "#steps .step > circle") == 8
    for panel in PANELS:
        assert len(page.locator(f"#{panel} .answer").inner_text()) > 20, panel


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_real_sweep_is_drawn(real_page: Path, scheme: Any) -> None:
    problems: list[str] = []
    requests: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme).new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(real_page.as_uri())
        check_panels(page, rows=2)
        page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
        assert page.evaluate(GRAVE) == []
        browser.close()
    assert problems == []
    assert all(url.startswith(("file:", "data:")) for url in requests)


@pytest.fixture(scope="module")
def real_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    store, page = str(folder / "runs"), folder / "demo.html"
    (machine := folder / "mine.toml").write_text(described_cpu())
    model = ROOT / "benchmarks" / "data" / "mpt-1m.toml"
    flopwise("sweep", "--model", str(model), "--on", str(machine), *SWEEP.split(), "--store", store)
    flopwise("report", "--store", store, "-o", "html", "-w", str(page))
    return page
