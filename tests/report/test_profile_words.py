"""Figures and verdicts in words: printed as the documents print them, and a paragraph that says what is known."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.profile.explain.verdicts import CLAUSES, LIMITS, verdicts
from flopwise.records.profile import METRICS, Clue, MemoryUse, Peaks, Profile, SourcedValue, Unit, Verdict, known
from flopwise.report.profile_words import (
    FEWEST_WORDS,
    MOST_WORDS,
    clause,
    title,
    why_paragraph,
)
from flopwise.report.tables import fold_words
from flopwise.report.words import BINARY, about, change_words, safe, scale_figure, shorten
from tests.report.test_profile_report import HOSTILE, a_profile, hostile_profile

NEURON = Path(__file__).parents[1] / "data" / "neuron"
UNITS: dict[str, Unit] = {"s": "s", "B": "B", "FLOP": "FLOP", "FLOP/B": "FLOP/B", "%": "share", "count": "count"}


def printed_figures() -> list[tuple[str, float, Unit]]:
    """Every figure of the documents, and what was printed for it."""
    found = []
    for path in sorted(NEURON.glob("00*.json")):
        section = json.loads(path.read_text())
        cells: list[dict[str, Any]] = [cell for cell in section["summary"].values() if cell["unit"] in UNITS]
        cells += [{"value": row["bytes"], "unit": "B", "raw": row["raw"]} for row in section["memory_usage"]]
        for cell in cells:
            unit = UNITS[cell["unit"]]
            found.append((cell["raw"], cell["value"] / 100 if unit == "share" else cell["value"], unit))
    return found


def test_figures_are_printed_as_the_documents_print_them() -> None:
    figures = printed_figures()
    assert len(figures) > 700
    for raw, value, unit in figures:
        bare = raw.replace("*", "").strip().replace("flops/byte", "FLOP/B")
        assert scale_figure(value, unit).replace(",", "") == re.sub(r"FLOPS$", "FLOP", bare), (raw, value)


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (1023.0, "B", "1023 B"),
        (1024.0, "B", "1 KiB"),
        (1024.0**2 - 0.01, "B", "1 MiB"),
        (0.0, "s", "0 s"),
        (0.0004999, "s", "499.9 us"),
        (0.0005, "s", "0.5 ms"),
        (0.9999, "s", "999.9 ms"),
        (61.0, "s", "61 s"),
        (0.000999, "share", "0.1 %"),
        (0.000041, "share", "0.0041 %"),
        (253.0, "share", "25300 %"),
        (1.755e9, "Hz", "1.755 GHz"),
        (1234567.0, "count", "1,234,567"),
        (33.333333, "count", "33.33"),
        (27700.0, "1/s", "27,700/s"),
        (612.4, "W", "612 W"),
        (float("nan"), "s", "nan"),
        (float("inf"), "B", "inf"),
    ],
)
def test_scaled(value: float, unit: Unit, words: str) -> None:
    assert scale_figure(value, unit) == words


@settings(max_examples=50)
@given(st.floats(1, 1e18))
def test_bytes_are_within_the_last_digit(size: float) -> None:
    number, unit = scale_figure(size, "B").split(" ")
    scale = 1024.0 ** BINARY.index(unit)
    assert float(number) < 1024
    assert abs(float(number) * scale - size) <= 0.00051 * scale


def test_changes() -> None:
    assert [change_words(change) for change in (0.1234, -0.5, 3.2, 0.0001, None)] == [
        "+12.3 %",
        "−50.0 %",
        "×4.20",
        "=",
        "",
    ]
    assert (about(0.433), about(0.026), about(0.0999)) == ("43 %", "2.6 %", "10 %")


def test_names_are_cut_and_harmless() -> None:
    assert safe("a\nb\x1b[0m") == "a b?[0m"
    assert len(safe("x" * 10**6)) == 60
    assert len(safe("\n" * 500 + "x" * 500)) <= 60
    first, second = (shorten(f"a long name that ends in {number}", 18) for number in (16, 32))
    assert first != second
    assert len(first) == 18


# -- verdicts --------------------------------------------------------------------------------------------------------


def test_evidence_is_a_clause() -> None:
    evidence = Clue(
        what="the device's share of the step's wall time", value=0.4327, unit="share", bound=0.7, relation="<"
    )
    assert clause(evidence) == "the device is busy 43 % of the step's wall time, under 70 %"
    assert clause(evidence, bounded=False) == "the device is busy 43 % of the step's wall time"
    assert clause(Clue(what="something\nelse", value=5.0, unit="B")) == "something else: 5 B"


def limited_profiles() -> list[Profile]:
    """Together they have every limit that the rules know, each way that it can be told."""
    peaks = Peaks(flops=1e14, bandwidth=1e12, number_format="bf16", source="datasheet")
    worst = known(
        "measured",
        [
            *[("step_wall_s", 2.0), ("device_span_s", 1.0), ("idle_host_s", 0.5), ("mbu", 0.7), ("intensity", 5.0)],
            *[("ridge", 100.0), ("copy_exposed_s", 0.3), ("copy_active_s", 0.8), ("copy_packet_bytes", 5000.0)],
            *[("spill_read_bytes", 5.0), ("hbm_read_bytes", 10.0), ("layout_flops", 5.0), ("hardware_flops", 10.0)],
            *[("model_flops", 1e12), ("matrix_active_s", 0.9), ("comm_exposed_s", 0.2), ("throttle_loss", 0.2)],
            *[("clock_mean_hz", 1e9), ("clock_boost_hz", 2e9), ("power_w", 300.0), ("mfu", 0.5), ("mfu_roof", 0.6)],
        ],
    )
    memory = {
        "memory": (MemoryUse(owner="fragmentation", bytes=20.0), MemoryUse(owner="other", bytes=75.0)),
        "memory_total_bytes": 95.0,
        "memory_capacity_bytes": 100.0,
    }
    first = a_profile(values=worst, peaks=peaks, **memory)
    other = known("measured", [("device_span_s", 1.0), ("copy_active_s", 0.9), ("mbu", 0.3), ("comm_active_s", 0.5)])
    return [first, replace(first, values=other)]


def test_every_figure_of_the_rules_has_a_clause_and_every_limit_a_title() -> None:
    found = [verdict for profile in limited_profiles() for verdict in verdicts(profile)]
    assert {verdict.kind for verdict in found} >= set(LIMITS) - {"invalid"}
    told = {evidence.what for verdict in found if verdict.kind != "invalid" for evidence in verdict.evidence}
    assert told == set(CLAUSES)
    assert all(title(verdict) for verdict in found)


# -- why -------------------------------------------------------------------------------------------------------------


def batch_16() -> Profile:
    """As the documents print it."""
    return Profile(
        name="Batch 16",
        format="neuron-text",
        device="trn1.2xlarge",
        batch_sequences=16,
        values={
            **known("ingested", [("step_wall_s", 0.16955), ("device_span_s", 0.07337), ("mfu", 0.1594)]),
            **known("ingested", [("intensity", 94.82), ("ridge", 223.78), ("mbu", 0.3761), ("copy_active_s", 0.06153)]),
            **known("ingested", [("spill_read_bytes", 4.516), ("hbm_read_bytes", 6.481), ("util_limit", 1.0967)]),
        },
    )


def test_why_names_the_limits_in_order_and_what_is_none() -> None:
    text = why_paragraph(batch_16(), verdicts(batch_16()))
    assert text.startswith("Batch 16 ran on trn1.2xlarge with 16 sequences a step.")
    order = [
        "Most of all it is host-bound: the device is busy 43 % of the step's wall time, under 70 %",
        "Up to 57 % of the step is at stake",
        "bound by data movement (up to 36 %; copy engines have work for 84 % of the device's time)",
        "then it spills",
        "94.82 FLOP/B lie below the ridge of 223.78, but only 38 % of the memory bandwidth is used",
        "util_limit <= 1 cannot be right",
        "Try first: larger batches",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_why_tells_a_step_from_one_that_is_traced() -> None:
    values = known("measured", [("step_wall_s", 0.048), ("samples_per_s", 400.0)])
    profile = Profile(name="x", format="flopwise", batch_sequences=8, steps=1, values=values)
    assert "A step takes 20 ms (48 ms while it is traced)." in why_paragraph(profile, ())
    near = replace(profile, values=values | known("measured", [("step_wall_s", 0.0205)]))
    assert "A step takes 20.5 ms." in why_paragraph(near, ())


def test_why_does_not_deny_a_limit_that_holds() -> None:
    bound = known("measured", [("device_span_s", 1.0), ("mbu", 0.8), ("intensity", 50.0), ("ridge", 200.0)])
    profile = Profile(name="x", format="kineto", values=bound)
    text = why_paragraph(profile, verdicts(profile))
    assert "is bound by device memory: 80 % of the device-memory bandwidth is in use" in text
    assert "not the limit" not in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_begins_with_a_unit(width: int) -> None:
    lines = fold_words(why_paragraph(batch_16(), verdicts(batch_16())), width)
    assert " ".join(lines) == why_paragraph(batch_16(), verdicts(batch_16()))
    assert max(map(len, lines)) <= width
    assert not any(re.match(r"(%|ms|s|FLOP/B)\b|%", line) for line in lines)


def test_why_says_what_is_not_known() -> None:
    text = why_paragraph(Profile(name="x", format="trainer"), ())
    assert "No rule finds a limit" in text
    assert "Not known: a step's wall time" in text
    assert FEWEST_WORDS <= len(text.split()) <= MOST_WORDS


shares = st.floats(0, 1.2)
sizes = st.floats(1e-6, 1e12)
figures = st.dictionaries(st.sampled_from([metric.name for metric in METRICS]), st.one_of(shares, sizes), max_size=45)


@settings(max_examples=50)
@given(figures, st.booleans(), st.text(max_size=100))
def test_why_has_the_length_of_a_paragraph(values: dict[str, float], has_peaks: bool, name: str) -> None:
    peaks = Peaks(flops=1e14, bandwidth=1e12, number_format="bf16", source="datasheet") if has_peaks else None
    profile = Profile(
        name=name,
        format="kineto",
        peaks=peaks,
        values={each: SourcedValue(value, "measured") for each, value in values.items()},
    )
    text = why_paragraph(profile, verdicts(profile))
    assert FEWEST_WORDS <= len(text.split()) <= MOST_WORDS
    assert text.isprintable()


def test_the_longest_paragraph_has_its_length() -> None:
    for profile in (*limited_profiles(), hostile_profile()):
        odd = Verdict(
            kind="invalid",
            share=None,
            evidence=(Clue(what="x", value=2.0, unit="1"),),
            advice="",
            detail=HOSTILE,
        )
        text = why_paragraph(profile, (*verdicts(profile), odd, odd, odd))
        assert FEWEST_WORDS <= len(text.split()) <= MOST_WORDS, text
        assert text.isprintable()
