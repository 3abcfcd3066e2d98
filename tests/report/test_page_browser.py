"""The page in a real browser: what it draws, what the keyboard does, what the address keeps, what it never asks for."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from flopwise.report.page.data import PageData, detail_json, page_json
from flopwise.report.page.page import page_html
from flopwise.store.results import FIELDS
from tests.support import page_data_samples as samples

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
axe = pytest.importorskip("axe_playwright_python", reason="axe-core is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,  # a browser takes more time than its driver, whose time alone is counted
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
PANELS = ("memory", "roofline", "timeline", "heatmap", "accuracy", "profile", "steps", "table")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@dataclass
class Opened:
    """A page in a browser, and all that it said and asked for."""

    page: Any
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    contexts = []

    def open_page(data: PageData, address: str = "", *, url: str | None = None, **options: Any) -> Opened:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        found = Opened(page)
        page.on("console", lambda message: found.problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: found.problems.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        path = tmp_path / "page.html"
        path.write_text(page_html(data), encoding="utf-8")
        page.goto(f"{url or path.as_uri()}{address}")
        return found

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def sweep() -> PageData:
    return samples.sweep_page()


def count(page: Any, selector: str) -> int:
    return int(page.locator(selector).count())


def names(page: Any) -> list[str]:
    return [str(text) for text in page.locator("#table tr[data-place] td:nth-child(2)").all_inner_texts()]


def eventually(page: Any, condition: str, seconds: float = 120.0) -> None:
    """Wait until it holds; Playwright's own way needs an eval that the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


# -- drawing ---------------------------------------------------------------------------------------------------------


LANES = """run => tasksSpec([{ name: "", tasks: readTasks(state.details.get(run).tasks) }], ["predicted", "measured"])
  .lanes.map((lane) => [lane.side, lane.start.length])"""


def test_every_panel_is_drawn_from_its_data(opened: Any, sweep: PageData) -> None:
    found = opened(sweep, "#run=0003")
    page, detail = found.page, sweep.details["0003"]
    measured = [row for row in sweep.rows if row.tokens_per_s is not None]
    assert detail.tasks is not None and detail.operators is not None

    assert count(page, "#heatmap .square > rect") == len(sweep.rows) == 12
    assert {"OOM", "timeout"} < set(page.locator("#heatmap text").all_text_contents())
    assert count(page, "#accuracy .point > *") == len(measured) == 10
    pieces = [
        size for bar in detail.memory for sizes in (bar.planned_bytes or (), bar.measured_bytes or ()) for size in sizes
    ]
    assert count(page, "#memory .owner > rect") == len([size for size in pieces if size])
    # Predicted and measured: on lanes of their own, on a canvas that can be saved as a drawing.
    drawn = page.evaluate(LANES, "0003")
    for side in ("predicted", "measured"):
        assert sum(tasks for whose, tasks in drawn if whose == side) == len(detail.tasks.name)
    assert page.evaluate("document.querySelector('#timeline canvas').figure().querySelectorAll('rect').length") > 50
    known = [
        flops for flops, size in zip(detail.operators.flops, detail.operators.bytes, strict=True) if flops and size
    ]
    assert count(page, "#roofline .operator > circle") == len(known)
    assert count(page, "#profile .stack span") == len(detail.classes)
    assert page.locator("#profile .verdicts b").all_inner_texts() == ["compute-bound", "data-movement-bound"]
    assert count(page, "#steps .step > circle") == len(detail.steps["step"])
    assert len(names(page)) == len(sweep.rows)
    for panel in PANELS:
        assert page.locator(f"#{panel} h3").inner_text().endswith("?")
        assert len(page.locator(f"#{panel} .answer").inner_text()) > 20
    assert found.problems == []
    assert all(url.startswith(("file:", "data:")) for url in found.requests)


def test_cards_answer_from_the_rows(opened: Any, sweep: PageData) -> None:
    cards = opened(sweep).page.locator(".card").all_inner_texts()
    best = max(row.tokens_per_s or 0.0 for row in sweep.rows)
    assert float(re.sub(r"[^\d.]", "", cards[0].splitlines()[1])) == pytest.approx(best, rel=2e-3)
    assert "10 of 11" in cards[1] and "1 OOM" in cards[1] and "1 timeout" in cards[1]
    errors = sorted(abs(row.prediction_error) for row in sweep.rows if row.prediction_error is not None)
    middle = (errors[4] + errors[5]) / 2
    assert f"{100 * middle:.1f}\u00a0%" in cards[2] and "compute" in cards[3]


def test_a_page_without_data_says_what_to_run(opened: Any) -> None:
    found = opened(PageData(title="nothing", created=samples.CREATED, rows=[]))
    told = found.page.locator("main").inner_text()
    assert "no runs here yet" in told and told.count("flopwise train") == 1
    assert not any(found.page.locator(f"#{panel}").is_visible() for panel in PANELS if panel != "table")
    assert found.problems == []


def test_hostile_names_are_shown_as_text(opened: Any, sweep: PageData) -> None:
    bad = "</script><img src=x onerror=document.title='caught'><b>"
    rows = [replace(row, model=bad, hardware=bad, bound=bad, reason=bad) for row in sweep.rows]
    found = opened(PageData(title=bad, created=samples.CREATED, rows=rows, details=sweep.details), "#run=0003")
    assert found.page.locator("h1").inner_text() == bad
    assert count(found.page, "img") == 0 and found.page.title() != "caught"
    assert found.problems == []


ODD_TEXT = """() => {
  const found = [];
  for (const row of state.rows) {
    selectRow(row);
    for (const part of document.querySelectorAll("main *")) {
      const text = part.children.length ? "" : part.textContent;
      if (/undefined|NaN|Infinity|null|\\[object/.test(text)) found.push(part.outerHTML);
      for (const each of part.attributes) if (/undefined|NaN|Infinity/.test(each.value)) found.push(part.outerHTML);
    }
  }
  for (const x of Object.keys(AXES)) {
    for (const value of Object.keys(MEASURES)) { choose({ x, value }); drawHeatmap(state.shown); }
  }
  choose({ cols: allColumns().map(([name]) => name).join(",") });
  drawTable();
  for (const [name] of allColumns()) { sortBy(name); sortBy(name); }
  choose({ marked: state.rows.slice(0, 4).map((row) => row.key).join(",") });
  openTab("compare");
  return found.map((text) => text.slice(0, 300));
}"""


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_with_anything_in_them_are_shown_without_a_stumble(opened: Any, seed: int) -> None:
    rows = samples.holey_rows(24, seed)
    found = opened(replace(samples.page_of(rows), details=samples.holey_details(rows, seed)))
    assert found.page.evaluate(ODD_TEXT) == [] and found.problems == []


# -- the table -------------------------------------------------------------------------------------------------------


def test_keyboard_sorts_and_selects(opened: Any, sweep: PageData) -> None:
    page = opened(sweep).page
    head = page.locator('#table th[data-name="tokens_per_s"]')
    before = names(page)
    head.locator("button").focus()
    page.keyboard.press("Enter")
    ran = sorted((row for row in sweep.rows if row.tokens_per_s), key=lambda row: -(row.tokens_per_s or 0))
    assert head.get_attribute("aria-sort") == "descending"
    assert names(page)[:10] == [row.run for row in ran] != before[:10]
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending" and names(page)[:10] == [row.run for row in reversed(ran)]

    page.locator("#table tr[data-place='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    third = ran[-3].run
    assert page.evaluate("new URLSearchParams(location.hash.slice(1)).get('run')") == third
    assert page.locator("#run-title").inner_text() == f"Run {third}"
    assert page.locator("#table tr[aria-selected=true] td >> nth=1").inner_text() == third
    assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"


def test_filters_and_selection_survive_a_reload(opened: Any, sweep: PageData) -> None:
    page = opened(sweep).page
    page.select_option("#filter-state", "ok")
    page.fill("#filter-q", "bf16 llama")
    page.locator("#table tr[data-place='2']").click()
    chosen = page.locator("#run-title").inner_text()
    assert len(names(page)) == 10
    page.reload()
    assert page.input_value("#filter-state") == "ok" and page.input_value("#filter-q") == "bf16 llama"
    assert len(names(page)) == 10 and page.locator("#run-title").inner_text() == chosen
    page.click("#clear")
    assert len(names(page)) == 12 and page.input_value("#filter-q") == ""


def test_csv_and_markdown_hold_the_rows_that_are_shown(opened: Any, sweep: PageData) -> None:
    page = opened(sweep, "#state=ok", permissions=["clipboard-read", "clipboard-write"]).page
    with page.expect_download() as download:
        page.click("#csv")
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8"))))
    # The newest first.
    ran = [row for row in sweep.rows if row.state == "ok"][::-1]
    assert tuple(rows[0]) == FIELDS and [row["run"] for row in rows] == [row.run for row in ran]
    assert [float(row["tokens_per_s"]) for row in rows] == [row.tokens_per_s for row in ran]
    page.click("#copy")
    eventually(page, "document.getElementById('copied').textContent !== ''")
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert (
        len(lines) == 2 + len(ran) and lines[0].startswith("| run | state |") and lines[1].startswith("| --- | --- |")
    )
    assert all(line.count(" | ") == lines[0].count(" | ") for line in lines) and "\u00a0" not in "".join(lines)
    assert page.locator("#copied").inner_text() == "copied 10 rows"


# -- reading it ------------------------------------------------------------------------------------------------------


def test_an_address_opens_a_run_even_one_that_failed(opened: Any, sweep: PageData) -> None:
    page = opened(sweep, "#run=0005").page
    assert page.locator("#run-title").inner_text() == "Run 0005"
    assert "timeout" in page.locator("#run-about").inner_text() and "300 s" in page.locator("#run-about").inner_text()
    assert "was not profiled" in page.locator("#profile .answer").inner_text()
    eventually(page, "scrollY > 300")


def test_the_timeline_of_a_run_has_an_address_for_every_view(opened: Any, sweep: PageData) -> None:
    page = opened(sweep, "#run=0003").page
    page.get_by_label("Zoom in").click()
    page.get_by_label("Find a task").fill("backward 3")
    page.keyboard.press("Enter")
    eventually(page, "document.querySelector('#timeline .told').textContent !== ''")
    told = page.locator("#timeline .told").text_content()
    assert "backward 3" in told and "predicted" in told and "measured" in told
    seen, address = page.evaluate("[{ ...view }, location.href]")
    assert "t=" in address and "task=" in address and seen["to"] - seen["from"] < 0.5
    page.reload()
    assert page.evaluate("({ ...view })") == pytest.approx(seen)
    eventually(page, f"document.querySelector('#timeline .told').textContent === {told!r}")
    page.get_by_label("Show the whole step").click()
    assert page.evaluate("[view.from, view.to]") == [0, 1]


def test_the_heat_map_can_show_other_axes(opened: Any, sweep: PageData) -> None:
    rows = [replace(row, sequence_tokens=1024 * 2 ** (place % 3)) for place, row in enumerate(sweep.rows)]
    page = opened(replace(sweep, rows=rows)).page
    assert page.input_value("#heat-x") == "device_cap_bytes" and page.input_value("#heat-y") == "host_cap_bytes"
    page.select_option("#heat-x", "sequence_tokens")
    page.select_option("#heat-value", "mfu")
    assert (
        "x=sequence_tokens" in page.url
        and page.locator("#heatmap h3").inner_text() == "What does a longer sequence cost?"
    )
    assert any("%" in text for text in page.locator("#heatmap text").all_text_contents())


def test_a_square_shows_the_median_of_its_runs(opened: Any, sweep: PageData) -> None:
    """Three runs of one cell, one of them an outlier: the best would be 9,000."""
    first, other = sweep.rows[0], sweep.rows[1]
    runs = [
        replace(first, run=f"01{rate}", cell="aaaaaaaaaaaa", repeat=place, tokens_per_s=float(rate))
        for place, rate in enumerate((1000, 1100, 9000), 1)
    ]
    page = opened(
        replace(sweep, rows=[*runs, replace(other, cell="bbbbbbbbbbbb", tokens_per_s=500.0)], details={})
    ).page
    words = set(page.locator("#heatmap text").all_text_contents())
    assert "1,100" in words and not any(word.startswith("9") for word in words)
    titles = page.locator("#heatmap .target title").all_text_contents()
    assert any("median of 3 runs" in title and "0101100" not in title for title in titles)
    assert "Of several runs it shows the median." in page.locator("#heatmap .answer").inner_text()


OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll("#tab-runs .panel, #tab-runs .card, footer")]
    .filter((each) => each.offsetHeight).map((each) => [each.id || each.className, each.getBoundingClientRect()]);
  return boxes.flatMap(([name, box], place) => boxes.slice(place + 1)
    .filter(([, other]) => box.top < other.bottom - 1 && other.top < box.bottom - 1)
    .filter(([, other]) => box.left < other.right - 1 && other.left < box.right - 1)
    .map(([other]) => [name, other]));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(opened: Any, sweep: PageData, scheme: str) -> None:
    found = opened(sweep, "#run=0003", color_scheme=scheme)
    # The page's policy lets no other script run: axe comes in by the browser's own way.
    found.page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    violations = found.page.evaluate("axe.run().then(result => result.violations)")
    grave = [each for each in violations if each["impact"] in {"serious", "critical"}]
    assert [(each["id"], [node["html"][:120] for node in each["nodes"][:3]]) for each in grave] == []
    assert [each["id"] for each in violations] == []
    # On a sheet of A4 nothing lies over anything else, and no column is cut off.
    found.page.set_viewport_size({"width": 720, "height": 1000})
    found.page.emulate_media(media="print")
    assert found.page.evaluate(OVERLAPS) == []
    assert found.page.evaluate("document.querySelector('.rows').getBoundingClientRect().right") <= 720


@pytest.mark.parametrize("width", [420, 700, 1280])
def test_nothing_sticks_out_sideways(opened: Any, sweep: PageData, width: int) -> None:
    page = opened(sweep, "#run=0003", viewport={"width": width, "height": 800}).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for panel in PANELS:
        inside = page.evaluate(
            "id => { const box = document.getElementById(id).getBoundingClientRect();"
            " return [...document.querySelectorAll(`#${id} svg`)].every(svg => {"
            " const at = svg.getBoundingClientRect(); return at.left >= box.left && at.right <= box.right + 1; }) }",
            panel,
        )
        assert inside, panel


def test_of_ten_thousand_rows_only_those_in_view_are_drawn(opened: Any) -> None:
    found = opened(samples.page_of(samples.many_rows(10_000)))
    found.page.wait_for_selector("#table tr[data-place='0']")
    assert count(found.page, "#table tr[data-place]") < 60
    found.page.locator("#table tr[data-place='0']").focus()
    found.page.keyboard.press("End")
    assert names(found.page)[-1] == "10000" and "10000" in found.page.locator("#run-title").inner_text()
    found.page.fill("#filter-q", "mpt-125m 8192")
    assert 0 < found.page.evaluate("table.rows.length") < 1000
    assert found.problems == []


# -- served ----------------------------------------------------------------------------------------------------------


class Served(ThreadingHTTPServer):
    """What `flopwise serve` answers, of data that a test can change."""

    daemon_threads = True

    def __init__(self, data: PageData) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.details, self.asked = data, dict(data.details), list[tuple[str, str | None]]()


class Handler(BaseHTTPRequestHandler):
    server: Served

    def do_GET(self) -> None:
        shown = replace(self.server.data, details={}, live=True)
        tag = f'"{len(shown.rows)}"'
        self.server.asked.append((self.path, self.headers.get("If-None-Match")))
        if self.path == "/":
            self._answer(page_html(shown), "text/html; charset=utf-8")
        elif self.path == "/data.json":
            is_same = self.headers.get("If-None-Match") == tag
            self._answer(
                "" if is_same else page_json(shown), "application/json", status=304 if is_same else 200, tag=tag
            )
        elif match := re.fullmatch(r"/run/(\d+)\.json", self.path):
            self._answer(detail_json(self.server.details[match[1]]), "application/json")

    def _answer(self, text: str, kind: str, *, status: int = 200, tag: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(sweep: PageData) -> Iterator[Served]:
    server = Served(replace(sweep, rows=list(sweep.rows)[:8]))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_served_it_follows_the_store_and_keeps_what_was_chosen(opened: Any, served: Served, sweep: PageData) -> None:
    url = f"http://127.0.0.1:{served.server_address[1]}/"
    found = opened(sweep, "#run=0003&state=ok", url=url)
    page = found.page
    page.wait_for_selector("#timeline canvas")
    assert ("/run/0003.json", None) in served.asked and len(names(page)) == 6
    served.data = sweep
    eventually(page, "document.querySelectorAll('#table tr[data-place]').length === 10")
    assert page.locator("#run-title").inner_text() == "Run 0003" and page.input_value("#filter-state") == "ok"
    assert "updated" in page.locator("#updated").inner_text()
    end = time.monotonic() + 120.0
    while ("/data.json", '"12"') not in served.asked:
        assert time.monotonic() < end, "it does not ask again"
        page.wait_for_timeout(50)
    assert found.problems == [] and all(each.startswith((url, "data:")) for each in found.requests)
    assert json.loads(detail_json(sweep.details["0003"]))["run"] == "0003"
