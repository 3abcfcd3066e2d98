"""Profiles on the page: whole, self-contained, and nothing that a file says becomes markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from flopwise.profile.explain.comparing import compare
from flopwise.profile.explain.verdicts import verdicts
from flopwise.records.profile import METRICS, MemoryUse, Profile, SourcedValue
from flopwise.report.page.page import page_html
from flopwise.report.page.profiles import profiles_page
from tests.profile.test_profile_comparison import documents
from tests.report.test_profile_report import HOSTILE, a_profile, hostile_profile, invalid_verdict


class Page(HTMLParser):
    """Keeps tags and attributes, and the data that the page brings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.is_data = False
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.is_data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self.text += data if self.is_data else ""

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found


def page_of(*profiles: Profile) -> str:
    judged = [(profile, verdicts(profile)) for profile in profiles]
    return page_html(profiles_page(judged, compare(profiles) if len(profiles) > 1 else None))


def detail_of(profile: Profile) -> dict[str, Any]:
    (found,) = Page(page_of(profile)).data["details"].values()
    assert isinstance(found, dict)
    return found


def table(detail: dict[str, Any], title: str) -> list[list[str]]:
    (rows,) = [each["rows"] for each in detail["tables"] if each["title"] == title]
    assert isinstance(rows, list)
    return rows


def test_the_page_needs_nothing_else() -> None:
    page = Page(page_of(a_profile(), *documents("batch_sizes.md")))
    (policy,) = [value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not any(
        name in ("src", "srcset", "action") or name.startswith("on") for _, name, _ in page.attributes if name != "data"
    )
    assert all(value.startswith(("#", "data:")) for _, name, value in page.attributes if name == "href")
    assert page.data["of_profiles"]
    assert [each["title"] for each in page.data["tables"]][:1] == ["What was profiled?"]
    assert page.data["count"] == len(page.data["details"]) == 1 + len(documents("batch_sizes.md"))


def test_every_part_is_there() -> None:
    detail = detail_of(a_profile())
    titles = {each["title"] for each in detail["tables"] if each["title"]}
    assert titles == {
        "Figures",
        "Busy time by class",
        "Activity by engine",
        "Kernels",
        "Operators",
        "Device memory",
        "Memory as planned and as it was",
        "Tasks, as predicted and as they ran",
        "Tasks that differ most",
        "Train metrics",
        "System",
    }
    text = json.dumps(detail, ensure_ascii=False)
    for words in (
        *("the trace ends within step 3", "a note", "25 % of the device's 80 GiB is taken.", "unaccounted", "idle"),
        *("data-movement-bound", "gemm_kernel", "500 TFLOP/s", "Over 1 s: the peak is 20 GiB."),
    ):
        assert words in text, words
    assert detail["why"]
    assert detail["memory_over_time"]


def test_what_is_not_known_is_left_out() -> None:
    detail = detail_of(Profile(name="empty", format="trainer"))
    assert detail["memory"] == detail["memory_over_time"] == detail["classes"] == []
    assert [table["rows"] for table in detail["tables"]] == [[["empty", "trainer"]]]
    assert detail["tasks"] is detail["operators"] is None


def test_shares_and_memory_are_those_of_the_profile() -> None:
    detail = detail_of(a_profile(tasks=(), memory_over_time=(), memory_planned=()))
    # gemm 0.35 s, copy 0.25 s, idle 0.1 s, then copies 0.3 s: of 0.7 s each.
    shares = [each["share"] for each in (*detail["classes"], *detail["engines"])]
    assert shares == [pytest.approx(share, abs=1e-5) for share in (0.5, 0.35714, 0.14286, 0.42857)]
    (bar,) = detail["memory"]
    of_cap = [size / bar["cap_bytes"] for size in bar["measured_bytes"]]
    assert of_cap == [pytest.approx(share) for share in (0.125, 0.1, 0.025)]
    assert bar["planned_bytes"] is None


def test_tasks_have_both_times() -> None:
    tasks = detail_of(a_profile())["tasks"]
    assert tasks["streams"] == ["copy-in", "compute"]
    first = tasks["name"].index("load weights 0")
    assert tasks["measured_end_ns"][first] - tasks["measured_start_ns"][first] == 200_000_000
    assert tasks["predicted_end_ns"][first] - tasks["predicted_start_ns"][first] == 100_000_000


def test_names_never_become_markup() -> None:
    hostile = hostile_profile()
    quotes = replace(hostile, name="\"><img src=x onerror=alert(1)>' onload='x")
    judged = [(profile, (*verdicts(profile), invalid_verdict())) for profile in (hostile, quotes)]
    text = page_html(profiles_page(judged, compare([hostile, quotes])))
    page = Page(text)
    assert "img" not in page.tags
    assert not any(name.startswith("on") or name == "src" for _, name, _ in page.attributes)
    assert "<script>alert(1)</script>" in json.dumps(page.data), "it is told as it is, as text"
    assert not any(sign in text for sign in "\x1b\x9b\u202e")
    assert "<script>alert(1)" not in text
    Page(page_html(profiles_page([(replace(hostile, name=HOSTILE * 1000), ())]))).data["details"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, 1e300])
def test_figures_that_cannot_be_right_leave_the_page_whole(value: float) -> None:
    profile = a_profile(
        values={metric.name: SourcedValue(value, "measured") for metric in METRICS},
        memory=(MemoryUse(owner="other", bytes=value),),
        memory_total_bytes=value,
        memory_over_time=((0.0, value), (1.0, value), (value, 1.0)),
    )
    page = Page(page_of(profile, a_profile()))
    (first, _) = page.data["details"].values()
    assert all(isinstance(number, float | int) for point in first["memory_over_time"] for number in point)
    assert not re.search(r":(NaN|Infinity)", page.text)
