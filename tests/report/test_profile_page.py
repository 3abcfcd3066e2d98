"""The HTML page: whole, self-contained, and nothing that a file says becomes markup."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from flopwise.report.profile_page import profiles_page

from flopwise.profile.explain.comparing import compare
from flopwise.profile.explain.verdicts import verdicts
from flopwise.records.profile import METRICS, MemoryUse, Profile, Value
from tests.profile.test_profile_comparison import documents
from tests.report.test_profile_report import HOSTILE, a_profile, hostile_profile, invalid_verdict

VOID = {"meta", "br"}
ALLOWED = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "h3",
        "p",
        "div",
        "span",
        "section",
        "b",
        "br",
        "i",
    ),
    *("table", "tr", "th", "td", "small", "ol", "ul", "li", "a", "svg", "rect", "path"),
}


class Page(HTMLParser):
    """Checks on the way that what is opened is closed; keeps tags, attributes and words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def page_of(*profiles: Profile) -> str:
    judged = [(profile, verdicts(profile)) for profile in profiles]
    return profiles_page(judged, compare(profiles) if len(profiles) > 1 else None)


def test_the_page_needs_nothing_else() -> None:
    text = page_of(a_profile(), *documents("batch_sizes.md"))
    page = Page(text)
    assert page.tags <= ALLOWED
    policy = [value for tag, name, value in page.attributes if tag == "meta" and name == "content"]
    assert "default-src 'none'; style-src 'unsafe-inline'" in policy
    assert not any(
        name in ("src", "srcset", "data", "action") or name.startswith("on") for _, name, _ in page.attributes
    )
    assert all(value.startswith("#p") for _, name, value in page.attributes if name == "href")
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme:dark" in text
    targets = {value for _, name, value in page.attributes if name == "id"}
    assert {value.removeprefix("#") for _, name, value in page.attributes if name == "href"} == targets


def test_every_panel_is_there() -> None:
    text = Page(page_of(a_profile())).text
    for words in (
        *("Where did the time go?", "Which engines had work?", "how near are they to their roofs?", "Does it fit?"),
        *("Was the prediction right?", "What limits it?", "What are the figures?", "What did the trainer say?"),
        *("the trace ends within step 3", "a note", "25 % of the device's 80 GiB is taken.", "unaccounted", "idle"),
        *("data-movement-bound", "gemm_kernel", "500 TFLOP/s", "Over 1 s: the peak is 20 GiB."),
    ):
        assert words in text, words


def test_panels_without_figures_are_left_out() -> None:
    page = Page(page_of(Profile(name="empty", format="trainer")))
    assert "?" not in page.text
    assert "svg" not in page.tags


def test_bars_are_as_long_as_their_shares() -> None:
    text = page_of(a_profile(tasks=(), memory_over_time=()))
    widths = [float(width) for width in re.findall(r'<rect class="bar" width="([0-9.]+)%"', text)]
    # gemm 0.35 s, copy 0.25 s, idle 0.1 s, then copies 0.3 s: of 0.7 s each.
    assert widths == [pytest.approx(share, abs=1e-3) for share in (50.0, 35.714, 14.286, 42.857)]
    pieces = re.findall(r'<rect x="([0-9.]+)%" width="([0-9.]+)%" height="26"', text)
    assert [(float(start), float(width)) for start, width in pieces] == [(0.0, 12.5), (12.5, 10.0), (22.5, 2.5)]


def test_predicted_stands_above_measured() -> None:
    text = page_of(a_profile())
    rows = re.findall(r'class="(predicted|measured)" aria-label="([a-z-]+), (\w+)"', text)
    assert rows == [(kind, stream, kind) for stream in ("copy-in", "compute") for kind in ("predicted", "measured")]
    # The measured step is the longer one, 0.9 s: 0.1 s of it are 11.1 %.
    assert re.search(r'<rect x="0.000%" width="11.111%" height="14"><title>load weights 0: 100 ms</title>', text)


def test_names_never_become_markup() -> None:
    hostile = hostile_profile()
    quotes = replace(hostile, name="\"><img src=x onerror=alert(1)>' onload='x")
    judged = [(profile, (*verdicts(profile), invalid_verdict())) for profile in (hostile, quotes)]
    text = profiles_page(judged, compare([hostile, quotes]))
    page = Page(text)
    assert page.tags <= ALLOWED
    assert not any(name.startswith("on") or name == "src" for _, name, _ in page.attributes)
    assert "<script>alert(1)</script>" in page.text, "it is told as it is, as text"
    assert not any(sign in text for sign in "\x1b\x9b\u202e")
    Page(profiles_page([(replace(hostile, name=HOSTILE * 1000), ())]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, 1e300])
def test_figures_that_cannot_be_right_leave_the_page_whole(value: float) -> None:
    profile = a_profile(
        values={metric.name: Value(value, "measured") for metric in METRICS},
        memory=(MemoryUse(owner="other", bytes=value),),
        memory_total_bytes=value,
        memory_over_time=((0.0, value), (1.0, value), (value, 1.0)),
    )
    text = page_of(profile, a_profile())
    Page(text)
    for width in re.findall(r'(?:width|x)="([^"]*)%"', text):
        assert 0 <= float(width) <= 100
    assert not re.search(r'd="[^"]*(nan|inf)', text)
