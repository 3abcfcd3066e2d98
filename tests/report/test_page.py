"""The page as text: what it carries is safe, small and whole, and it names nothing outside itself."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.records.profile import TaskTime
from flopwise.report import palette
from flopwise.report.page import data as page_data
from flopwise.report.page.data import PageData, column, inline_json, page_json, run_detail
from flopwise.report.page.page import LIBRARIES, SCRIPTS, asset, page_html, policy
from flopwise.store.results import FIELDS, Result
from tests.support import page_data_samples as samples

ASSETS = Path(page_data.__file__).parent / "assets"
HOSTILE = "</script><img src=x onerror=alert(1)><!-- \u2028 & \" ' %%DATA%%"


class Parsed(HTMLParser):
    """Elements with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [found for name, found in self.elements if name == tag]

    def data(self) -> dict[str, Any]:
        place = [found.get("id") for found in self.attributes("script")].index("data")
        found: dict[str, Any] = json.loads(self.scripts[place])
        return found


def decoded(encoded: dict[str, Any] | None, count: int) -> list[Any]:
    """What `column` wrote, by the page's own rules."""
    if encoded is None:
        return [None] * count
    if "same" in encoded:
        return [encoded["same"]] * count
    if "words" in encoded:
        return [encoded["words"][place] for place in encoded["at"]]
    values: list[Any] = encoded["values"]
    return values


# -- what comes with it ----------------------------------------------------------------------------------------------


def test_vendored_files_are_those_that_are_named() -> None:
    rows = re.findall(r"^\| (\S+\.js) \|.*\| ([0-9.]+) \|.*\| ([0-9a-f]{64}) \|$", asset("VENDORED.md"), re.MULTILINE)
    assert [(name, version) for name, version, _ in rows] == [("d3.min.js", "7.9.0"), ("plot.umd.min.js", "0.6.17")]
    for name, version, digest in rows:
        content = (ASSETS / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        assert f"v{version}".encode() in content[:200]
        assert "Permission to use, copy, modify" in asset(f"{name.split('.')[0]}.LICENSE")


def test_scripts_hold_nothing_that_would_end_them_and_are_short() -> None:
    for name in (*LIBRARIES, *SCRIPTS):
        assert not re.search(r"</script|<!--", asset(name), re.IGNORECASE), name
    for name in SCRIPTS:
        assert len(asset(name).splitlines()) < 500, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", asset(name)), name
    assert {path.name for path in ASSETS.glob("*.js")} == {*LIBRARIES, *SCRIPTS}


def contrast(first: str, second: str) -> float:
    high, low = sorted((palette.luminance(first), palette.luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def mixed(above: str, below: str, share: float) -> str:
    pairs = [(int(above[place : place + 2], 16), int(below[place : place + 2], 16)) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(share * top + (1 - share) * bottom):02x}" for top, bottom in pairs)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_from_what_is_behind_them(scheme: str) -> None:
    blocks = re.findall(r":root \{(.*?)\}", asset("page.css"), re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[scheme == "dark"]))
    assert len(blocks) == 3 and len(colours) >= 11
    for name in ("ink", "faint", "accent", "good", "bad", "warn"):
        assert contrast(colours[name], colours["panel"]) >= 4.5, name
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
    for colour in palette.DARK if scheme == "dark" else palette.LIGHT:
        assert contrast(colour, colours["panel"]) >= 3, colour
    # The word on a square that failed.
    assert contrast(colours["bad"], mixed(colours["bad-paper"], colours["panel"], 0.6)) >= 4.5


# -- what it may do --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [False, True], ids=["file", "served"])
def test_policy_lets_only_its_own_scripts_run(live: bool) -> None:
    parsed = Parsed(page_html(replace(samples.sweep_page(), live=live)))
    metas = parsed.attributes("meta")
    found = next(meta["content"] or "" for meta in metas if meta.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in found.split(";"))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == ("'self'" if live else "'none'")
    assert "unsafe" not in rules["script-src"]
    run = [script for script, given in zip(parsed.scripts, parsed.attributes("script"), strict=True) if not given]
    assert len(run) == len(LIBRARIES) + len(SCRIPTS)
    assert policy(run, live=live) == found
    assert parsed.attributes("html")[0]["data-live"] == ("true" if live else "false")


def test_nothing_is_loaded_from_outside() -> None:
    text = page_html(samples.sweep_page())
    parsed = Parsed(text)
    assert not any("src" in found for _, found in parsed.elements)
    links = [found["href"] or "" for _, found in parsed.elements if "href" in found]
    assert links and all(link.startswith(("#", "data:")) for link in links)
    own = "".join(asset(name) for name in (*SCRIPTS, "page.css", "page.html"))
    # A name of a vocabulary is no address that anyone asks.
    assert set(re.findall(r"https?://[^\s'\"]+", own)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in own and "url(" not in own.replace("url(#foreseen)", "")


# -- what it carries -------------------------------------------------------------------------------------------------


def test_hostile_names_stay_data() -> None:
    rows, details = samples.sweep_rows()
    bad = replace(rows[1], run=HOSTILE, model=HOSTILE, hardware=HOSTILE, reason=HOSTILE, state=HOSTILE, bound=HOSTILE)
    page = PageData(
        title=HOSTILE, created=samples.CREATED, rows=[*rows, bad], details={**details, HOSTILE: details["0003"]}
    )
    text = page_html(page)
    clean = Parsed(page_html(samples.sweep_page()))
    parsed = Parsed(text)
    assert [name for name, _ in parsed.elements] == [name for name, _ in clean.elements]
    assert "<img" not in text and "&lt;img" in text.split("<style>", maxsplit=1)[0]
    data = parsed.data()
    assert data["title"] == HOSTILE and HOSTILE in data["details"]
    assert decoded(data["columns"][FIELDS.index("model")], data["count"])[-1] == HOSTILE


@given(st.text())
def test_inlined_json_is_the_same_json(text: str) -> None:
    inlined = inline_json(json.dumps({"name": text}, ensure_ascii=False))
    assert json.loads(inlined) == {"name": text}
    assert not set(inlined) & set("<>&\u2028\u2029")


@given(st.lists(st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=2)))
def test_columns_come_back_as_they_were(values: list[Any]) -> None:
    back = decoded(json.loads(json.dumps(column(values))), len(values))
    assert back == values
    # 1, 1.0 and true are equal, and yet not the same.
    assert [type(value) for value in back] == [type(value) for value in values]


def test_rows_come_back_at_full_precision() -> None:
    rows = samples.many_rows(50)
    data = json.loads(page_json(samples.page_of(rows)))
    columns = {name: decoded(found, 50) for name, found in zip(data["names"], data["columns"], strict=True)}
    assert tuple(columns) == FIELDS
    assert [Result(**{name: columns[name][place] for name in FIELDS}) for place in range(50)] == rows


def test_no_number_is_a_word() -> None:
    row = replace(samples.many_rows(1)[0], last_loss=float("nan"), mfu=float("inf"))
    data = json.loads(page_json(samples.page_of([row])), parse_constant=pytest.fail)
    assert data["columns"][FIELDS.index("last_loss")] == {"values": ["nan"]}


def test_ten_thousand_rows_stay_small() -> None:
    rows = samples.many_rows(10_000)
    size = len(page_html(samples.page_of(rows)).encode())
    assert 1e6 < size < 5e6
    assert len(page_json(samples.page_of(rows[:1000]))) < 0.5e6


def test_details_beyond_the_room_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    page = samples.sweep_page()
    whole = json.loads(page_json(page))
    assert whole["left_out"] == 0 and set(whole["details"]) == set(page.details)
    monkeypatch.setattr(page_data, "MOST_DETAIL_BYTES", 20_000)
    cut = json.loads(page_json(page))
    assert 0 < len(cut["details"]) < len(page.details)
    assert cut["left_out"] == len(page.details) - len(cut["details"])


# -- one run ---------------------------------------------------------------------------------------------------------


def test_memory_by_owner_with_cap_spare_and_unaccounted() -> None:
    run = samples.record(3, 40, 128, 11_000.0)
    assert run.measurement is not None
    device, host = run_detail(run, None, ()).memory
    assert device.cap_bytes == 40 * samples.GIB and host.cap_bytes == 128 * samples.GIB
    assert device.owners == samples.OWNERS and host.owners == ("weights", "optimizer", "activations")
    assert device.measured_bytes is not None
    assert sum(device.measured_bytes) == run.measurement.total_bytes("device")
    assert device.spare_bytes == 40 * samples.GIB - run.measurement.total_bytes("device")
    assert device.unaccounted_bytes == device.measured_bytes[-1] > 0 and host.unaccounted_bytes is None


def test_a_run_that_was_not_measured_shows_its_plan() -> None:
    run = samples.record(3, 40, 128, 11_000.0)
    plan = {**run.plan, "expected": {"device_bytes": 5 * samples.GIB, "host_bytes": 0}}
    detail = run_detail(replace(run, measurement=None, state="failed", reason="killed", plan=plan), None, ())
    (bar,) = detail.memory
    assert (
        bar.measured_bytes is None and bar.planned_bytes == (5 * samples.GIB,) and bar.spare_bytes == 35 * samples.GIB
    )
    assert (detail.state, detail.reason, detail.is_profiled) == ("failed", "killed", False)
    assert run_detail(replace(run, measurement=None), None, ()).memory == ()


def test_tasks_begin_at_zero_and_the_longest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    found = samples.profile()
    late = tuple(
        replace(
            task, predicted_start_s=(task.predicted_start_s or 0) + 5, predicted_end_s=(task.predicted_end_s or 0) + 5
        )
        for task in found.tasks
    )
    unknown = TaskTime(
        name="lost",
        stream="host",
        predicted_start_s=None,
        predicted_end_s=None,
        measured_start_s=2.0,
        measured_end_s=1.0,
    )
    run = samples.record(3, 40, 128, 11_000.0)
    tasks = run_detail(run, replace(found, tasks=(*late, unknown)), ()).tasks
    assert tasks is not None and len(tasks.name) == len(found.tasks) and tasks.note == ""
    assert min(start for start in tasks.predicted_start_ns if start is not None) == 0
    assert [tasks.streams[place] for place in tasks.stream] == [task.stream for task in found.tasks]
    first = found.tasks[0]
    assert first.predicted_end_s is not None and first.predicted_start_s is not None
    assert tasks.predicted_end_ns[0] == round(1e9 * (first.predicted_end_s - first.predicted_start_s))
    monkeypatch.setattr(page_data, "MOST_TASKS", 16)
    thin = run_detail(run, found, ()).tasks
    assert thin is not None and all(name.startswith("backward") for name in thin.name) and len(thin.name) == 16
    assert thin.note == f"The 16 longest of {len(found.tasks):,} tasks are drawn."


def test_roofs_operators_verdicts_and_steps() -> None:
    run = samples.record(3, 40, 128, 11_000.0)
    detail = run_detail(run, samples.profile(), samples.VERDICTS, samples.steps(1300))
    roofs = {roof.kind: roof.per_s for roof in detail.roofs}
    assert roofs == {"compute": 989e12, "memory": 4.8e12, "link": pytest.approx(4.2e11 / 9.1)}
    assert detail.operators is not None and detail.operators.name == tuple(row[0] for row in samples.OPERATORS)
    assert [verdict.title for verdict in detail.verdicts] == ["compute-bound", "data-movement-bound"]
    assert sum(each.seconds for each in detail.classes) == pytest.approx(15.4)
    assert ("read from device memory", "21.8 TiB") in {each[:2] for each in detail.traffic}
    shown = detail.steps["step"]
    assert len(shown) <= page_data.MOST_STEPS + 1 and shown[0] == 1 and shown[-1] == 1300
    alone = run_detail(run, None, ())
    assert [(roof.kind, roof.per_s) for roof in alone.roofs] == [("compute", 989e12)]


def test_no_two_scripts_declare_the_same_name() -> None:
    """They share one scope, in which the later function would silently take the place of the earlier one."""
    declared = re.compile(r"^(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
    names = [name for script in SCRIPTS for name in declared.findall(asset(script))]
    assert len(names) > 200
    assert sorted({name for name in names if names.count(name) > 1}) == []
