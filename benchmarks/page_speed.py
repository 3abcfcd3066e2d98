"""Speed of the page: `python -m benchmarks.page_speed`. Nothing here is a test; absolute times are this machine's.

A slider that a server answers, rows that are opened and filtered, tasks that are drawn, all in Chromium.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopwise.cli.serving import Live, listening
from flopwise.report.page.page import page_html
from tests.support import page_data_samples as samples

ROWS = 10_000
TASKS = 1_000_000
ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
MOVES = """async () => {
  const times = [], control = () => document.getElementById("ask-seq");
  for (let place = 0; place < 50; place += 1) {
    const begun = performance.now();
    control().focus();
    control().value = place % (Number(control().max) + 1);
    control().dispatchEvent(new Event("input", { bubbles: true }));
    while (!isCurrent()) await new Promise((next) => setTimeout(next, 1));
    times.push(performance.now() - begun);
  }
  return times;
}"""
FILTERS = """words => words.map((q) => {
  const begun = performance.now();
  choose({ q });
  refilter();
  document.body.offsetHeight;
  return performance.now() - begun;
})"""
DRAWN = """count => {
  const tasks = Array.from({ length: count }, (_, id) => ({ start: id, end: id + 0.9, kind: id % 4, id }));
  const spec = { lanes: [laneOf("compute", "", tasks)], end: count, kinds: ["a", "b", "c", "d"],
    colours: COLOURS.slice(0, 4), nameOf: String, detailOf: String, spanOf: (id) => tasks[id], find: () => [] };
  const view = { from: 0, to: 1, chosen: null };
  const chart = lanesChart("table", spec, view, () => {}, "many");
  return [1, 0.5, 0.1, 0.01, 1e-4].map((part) => {
    Object.assign(view, { from: 0.3 * (1 - part), to: 0.3 * (1 - part) + part });
    const begun = performance.now();
    chart.redraw();
    return performance.now() - begun;
  });
}"""
WORDS = ("mpt", "mpt-125m 8192", "tok/s>1e4", "mfu>40% seq=8k", "")


def told(what: str, times: Sequence[float]) -> None:
    """Median and worst, in milliseconds."""
    print(f"{what:44} median {statistics.median(times):7.0f} ms   worst {max(times):7.0f} ms   ({len(times)})")


def moves(browser: Any, folder: Path) -> None:  # noqa: ANN401 - Playwright's
    server = listening(Live(folder / "runs"), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{server.url}#tab=plan&model=llama-3-8b&on=h200")
    page.wait_for_selector("#plan-devices tbody tr")
    told("a slider moved, predict answered and drawn", page.evaluate(MOVES))
    page.close()
    server.live.searches.close()
    server.shutdown()
    thread.join()
    server.server_close()


def rows(browser: Any, folder: Path) -> None:  # noqa: ANN401
    path = folder / "many.html"
    path.write_text(page_html(samples.page_of(samples.many_rows(ROWS))), encoding="utf-8")
    opened, filtered = [], []
    for _ in range(3):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_selector("#table tr[data-place='0']")
        opened.append(page.evaluate("performance.getEntriesByType('navigation')[0].domComplete"))
        filtered += page.evaluate(FILTERS, list(WORDS))
        if len(opened) == 3:
            told(f"{TASKS:,} tasks drawn anew", page.evaluate(DRAWN, TASKS))
        page.close()
    told(f"{ROWS:,} rows opened", opened)
    told(f"{ROWS:,} rows filtered", filtered)


def main() -> None:
    """Each figure a line."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("there is no Chromium here")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        moves(browser, Path(folder))
        rows(browser, Path(folder))
        browser.close()


if __name__ == "__main__":
    main()
