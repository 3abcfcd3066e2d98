"""The planner in a browser: figures belong to what stands in the controls, a search goes on behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flopwise.catalog.load import hardware_names
from flopwise.cli import app
from flopwise.cli.planning import planned, predicted, view_text
from flopwise.cli.serving import Live, Server, listening
from flopwise.door.questions import Question
from tests.report.test_page_browser import ARGUMENTS, CHROMIUM, axe, eventually, sync_api

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
HERE = Question(model="gpt2", on="rtx-4090", seq="1k", batch="8")
ADDRESS = "#tab=plan&model=gpt2&on=rtx-4090&seq=1k&batch=8&price=rtx-4090:0.4"


class Searches:
    """The search itself, made once and without a process of its own."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_open = threading.Event()
        self.text = view_text(planned(HERE))

    def ask(self, query: str, is_wanted: Any) -> str | None:
        self.asked.append(query)
        while not self.is_open.wait(0.02):
            if not is_wanted():
                return None
        return self.text

    def close(self) -> None:
        self.is_open.set()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = listening(Live(tmp_path_factory.mktemp("runs")), 0)
    found.live.searches = Searches()  # type: ignore[assignment]
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield found
    found.live.searches.close()
    found.shutdown()
    thread.join()
    found.server_close()


def opened(browser: Any, url: str, **options: Any) -> tuple[Any, list[str]]:
    page = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options}).new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(url)
    return page, problems


def words(page: Any, selector: str) -> str:
    return str(page.locator(selector).inner_text()).replace("\u00a0", " ")


MOVED = """async (name) => {
  const seen = [];
  const control = () => document.getElementById(`ask-${name}`);
  const steps = Array.from({ length: 50 }, (_, place) => place % (Number(control().max) + 1));
  for (const step of steps) {
    control().focus();
    control().value = step;
    control().dispatchEvent(new Event("input", { bubbles: true }));
    const asked = planner.asked;
    while (!isCurrent()) await new Promise((next) => setTimeout(next, 2));
    const { question, view } = planner.answer;
    seen.push([asked, question[name], view.words?.speed ?? view.what, document.querySelector(".card b").textContent,
      document.querySelector(`output[for="ask-${name}"]`).textContent,
      document.getElementById("plan-line")?.textContent ?? "",
      new URLSearchParams(location.hash.slice(1)).get(name)]);
  }
  return seen;
}"""


def test_figures_belong_to_the_controls_however_they_are_moved(browser: Any, server: Server) -> None:
    page, problems = opened(browser, f"{server.url}{ADDRESS}")
    searches: Any = server.live.searches
    eventually(page, "planner.around !== null && planner.searching !== null")
    assert "searching for the fastest plan" in words(page, "#plan-searching")
    seen = page.evaluate(MOVED, "seq")
    assert len(seen) == 50 and len({asked for asked, *_ in seen}) == 50
    for _, seq, speed, card, told, line, kept in seen[:16]:
        view = predicted(Question(model="gpt2", on="rtx-4090", seq=seq, batch="8"))
        assert view.get("words", {}).get("speed", view.get("what")) == speed
        assert card in {speed, f"✗ {speed}"} and line == view["command"]
        assert kept == (None if seq == "auto" else seq)
        assert seq == "auto" or told.replace(",", "") == str(int(seq[:-1]) * 1024 if seq[-1] == "k" else seq).replace(
            "1M", "1048576"
        )
    # Moved faster than it is answered: the last one counts, and nothing of those before it is shown.
    page.evaluate("for (const seq of ['128', '256', '512', '1k']) change({ seq })")
    eventually(page, "isCurrent()")
    assert page.evaluate("[planner.answer.question.seq, planner.answer.view.setup.sequence_tokens]") == ["1k", 1024]

    # A search goes on behind it, is stopped, and begun again.
    eventually(page, "planner.searching !== null")
    page.locator("#plan-searching button").click()
    assert "the search was stopped" in words(page, "#plan-searching")
    searches.is_open.set()
    page.locator("#plan-searching button").click()
    eventually(page, "planner.answer.view.kind === 'planned'")
    view = json.loads(searches.text)
    assert words(page, ".card b >> nth=0") == view["words"]["speed"] and "planned" in words(page, ".card >> nth=0")
    assert words(page, "#plan-line") == view["command"]
    assert {"seq=1k", "batch=8"} <= set(searches.asked[-1].split("&"))
    assert "$" in words(page, ".card >> nth=4") and page.locator("#plan-devices tbody tr").count() == len(
        hardware_names()
    )

    # Figures with their intervals, bars with a cap line, the step with its waits, all of it saved as a picture.
    assert page.locator("#plan-memory .owner rect").count() == sum(len(bar["bytes"]) for bar in view["bars"])
    assert view["bars"][0]["cap_words"] in " ".join(page.locator("#plan-memory .cap").all_text_contents())
    figure = page.evaluate("document.querySelector('#plan-step canvas').figure().outerHTML")
    assert figure.count("<rect") > 20 and "<polygon" in figure
    with page.expect_download() as download:
        page.locator("#plan-step .save button").first.click()
    assert "<svg" in Path(download.value.path()).read_text(encoding="utf-8")

    # Pinned, changed by a chip, compared.
    page.click("#pin")
    page.locator("#plan-helps .chip").first.click()
    eventually(
        page, "isCurrent() && planner.answer.view.kind === 'predicted' || planner.answer.view.kind === 'planned'"
    )
    assert page.locator("#plan-pins tbody tr").count() >= 1
    assert problems == []
    page.context.close()


def test_the_timeline_is_handled_by_wheel_drag_keys_and_search(browser: Any, server: Server) -> None:
    server.live.searches.is_open.set()  # type: ignore[attr-defined]
    page, problems = opened(browser, f"{server.url}{ADDRESS}")
    eventually(page, "planner.answer?.view.kind === 'planned'")
    canvas = page.locator("#plan-step canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 12)
    page.mouse.down()
    page.mouse.up()
    eventually(page, "planner.view.chosen !== null && document.querySelector('#plan-step .told').textContent !== ''")
    told = words(page, "#plan-step .told")
    assert "compute" in told and "round 1" in told
    page.mouse.wheel(0, -400)
    eventually(page, "planner.view.to - planner.view.from < 0.5")
    before = page.evaluate("planner.view.from")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 120, box["y"] + 12, steps=4)
    page.mouse.up()
    eventually(page, f"planner.view.from > {before}")
    page.keyboard.press("0")
    assert page.evaluate("[planner.view.from, planner.view.to]") == [0, 1]
    page.keyboard.press("/")
    page.keyboard.type("optimize")
    page.keyboard.press("Enter")
    eventually(page, "document.querySelector('#plan-step .told').textContent.startsWith('optimize')")
    assert "1 of" in words(page, "#plan-step .tools")
    # The address holds the view: opened again it is the same.
    told = page.locator("#plan-step .told").text_content()
    view, address = page.evaluate("[planner.view, location.href]")
    assert "task=" in address and "t=" in address
    again, _ = opened(browser, address)
    eventually(again, "planner.answer?.view.kind === 'planned'")
    assert again.evaluate("planner.view") == pytest.approx(view)
    eventually(again, f"document.querySelector('#plan-step .told').textContent === {told!r}")
    assert problems == []
    for each in (page, again):
        each.context.close()


def test_one_file_answers_every_position_from_disk(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["predict", "gpt2", "--on", "rtx-4090", "-o", "html"]).exit_code == 0
    page, problems = opened(browser, (tmp_path / "predict.html").as_uri())
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for axis in page.evaluate("plannerData().grid.axes.map((axis) => axis.name)"):
        seen = page.evaluate(MOVED, axis)
        assert len(seen) == 50
        for _, value, speed, card, told, line, _ in seen:
            assert card in {speed, f"✗ {speed}"} and told
            assert value in ("auto", "1") or f"--{axis.replace('_', '-')} {value}" in line or value == "1k"
    # In other words, or what is not in the file: controls and figures stay of one set-up.
    page.evaluate("change({ seq: '512', gpus: '3' })")
    question = page.evaluate("planner.answer.question")
    assert (question["seq"], question["gpus"]) == ("512", "1") and "--seq 512" in words(page, "#plan-line")
    page.evaluate("change(usualQuestion())")
    page.click("#pin")
    assert page.locator("#plan-pins tbody tr").count() == 1
    assert asked == [] and problems == []
    page.context.close()


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 800, "light"), (390, 844, "dark")])
def test_nothing_overlaps_and_axe_finds_nothing(
    browser: Any, server: Server, width: int, height: int, scheme: str
) -> None:
    server.live.searches.is_open.set()  # type: ignore[attr-defined]
    page, problems = opened(
        browser, f"{server.url}{ADDRESS}", viewport={"width": width, "height": height}, color_scheme=scheme
    )
    eventually(page, "planner.answer?.view.kind === 'planned' && planner.around !== null")
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    assert page.evaluate("axe.run().then(found => found.violations.map(one => [one.id, one.nodes[0].html]))") == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.emulate_media(media="print")
    assert page.evaluate(OVERLAPS) == [] and problems == []
    page.context.close()


OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll("#plan-answer > *:not([hidden])")].filter((each) => each.offsetHeight)
    .map((each) => [each.id, each.getBoundingClientRect()]);
  return boxes.flatMap(([name, box], place) => boxes.slice(place + 1)
    .filter(([, other]) => box.top < other.bottom - 1 && other.top < box.bottom - 1)
    .filter(([, other]) => box.left < other.right - 1 && other.left < box.right - 1)
    .map(([other]) => [name, other]));
}"""
