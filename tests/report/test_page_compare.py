"""Runs beside each other on the page: what is compared, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flopwise.cli import app
from flopwise.profile.explain.comparing import compare
from flopwise.profile.read.reading import read_profiles
from flopwise.report.page.data import page_json
from flopwise.report.page.page import page_html
from flopwise.report.page.profiles import profiles_page
from flopwise.store.runs import write_record
from tests.report.test_page_browser import ARGUMENTS, CHROMIUM, axe, sync_api
from tests.support import page_data_samples as samples

BATCHES = Path(__file__).parents[1] / "data" / "neuron" / "batch_sizes.md"


def stores(folder: Path) -> tuple[str, str]:
    """The same two cells, run twice: in the second store the first is a tenth slower."""
    for name, factor in (("old", 1.0), ("new", 0.9)):
        for number, rate in ((1, 9000.0 * factor), (2, 11000.0)):
            (folder / name / f"{number:04d}").mkdir(parents=True)
            write_record(folder / name / f"{number:04d}", samples.record(number, 24 * number, 128, rate))
    return str(folder / "old"), str(folder / "new")


def data_of(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.split('id="data">')[1].split("</script>", maxsplit=1)[0])
    return found


def test_compare_writes_a_page_of_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, after = stores(tmp_path)
    done = CliRunner().invoke(app, ["compare", before, after, "-o", "html"])
    # A slower cell is one, whatever the form.
    assert done.exit_code == 1 and done.stdout == "compared.html\n"
    data = data_of((tmp_path / "compared.html").read_text(encoding="utf-8"))
    # Runs of one number on both sides are told apart; the two that changed most are looked at first.
    assert list(data["details"]) == ["old/0001", "old/0002", "new/0001", "new/0002"]
    assert data["opens"] == "compare" and data["marked"] == ["old/0001", "new/0001"]
    assert any("1 slower" in line for line in data["said"]) and len(data["tables"][0]["rows"]) == 2
    assert str(tmp_path) not in (tmp_path / "compared.html").read_text(encoding="utf-8")


def test_profiles_are_drawn_with_the_line_that_is_told_of() -> None:
    profiles = [profile for read in read_profiles([BATCHES]) for profile in read.profiles]
    comparison = compare(profiles)
    page = json.loads(page_json(profiles_page([(profile, ()) for profile in profiles], comparison)))
    (line,), (fit,) = page["lines"], comparison.fits
    assert line["words"] in page["said"] and line["least_batch"] == fit.least_batch == 8
    assert [line["fixed_s"], line["per_sequence_s"]] == [fit.fixed_s, fit.per_sequence_s]
    drawn = {batch: seconds for batch, seconds, _ in line["points"]}
    assert len(line["points"]) == len(profiles) and drawn[64] == pytest.approx(0.19644, rel=1e-4)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_two_runs_are_ticked_and_compared(browser: Any, tmp_path: Path) -> None:
    sweep = samples.sweep_page()
    one, other = [name for name, detail in sweep.details.items() if detail.tasks][:2]
    named = {
        name: replace(detail, setup=(("learning_rate", "0.001" if name == one else "0.002"), ("seed", "0")))
        for name, detail in sweep.details.items()
    }
    (tmp_path / "page.html").write_text(page_html(replace(sweep, details=named)), encoding="utf-8")
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((tmp_path / "page.html").as_uri())
    for run in (one, other):
        page.get_by_label(f"Compare run {run}").check()
    assert page.locator("#compare-marked").inner_text() == "compare 2 ticked"
    page.click("#compare-marked")
    told = str(page.locator("#tab-compare").inner_text()).replace("\u00a0", " ")
    first, second = (next(row for row in sweep.rows if row.run == run) for run in (one, other))
    gain = (second.tokens_per_s or 0) / (first.tokens_per_s or 1) - 1
    assert f"{'+' if gain > 0 else '−'}{abs(100 * gain):.1f} %" in told
    assert "learning rate" in told and "0.001" in told and "seed" not in told
    # Curves, memory and steps of both, on one axis each.
    assert page.locator("#compare-curves svg[role=img]").count() == 2
    assert page.locator("#compare-memory .row-name").all_text_contents()[0].startswith(one)
    spec = page.evaluate("document.querySelector('#compare-steps canvas').getAttribute('aria-label')")
    assert one in spec and other in spec
    # The address is enough to see it again.
    page.reload()
    assert f"marked={one}%2C{other}" in page.url and page.locator("#compare-changes tbody tr").count() > 8
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    assert page.evaluate("axe.run().then(found => found.violations.map(one => [one.id, one.nodes[0].html]))") == []
    assert problems == []
    page.context.close()
