"""Verdicts: those of the nine profiled sections as published with them; each rule alone; what must always hold."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.profile.explain.invariants import broken
from flopwise.profile.explain.verdicts import Thresholds, matrix_fill, spill_share, thresholds_of, verdicts
from flopwise.profile.read.reading import read_profiles
from flopwise.records.profile import METRIC, METRICS, MemoryUse, Peaks, Profile, SourcedValue, Spent, Verdict

NEURON = Path(__file__).parents[1] / "data" / "neuron"
EXPECTED = json.loads((NEURON / "expected_verdicts.json").read_text())
OURS = {
    "host_bound": "host_bound",
    "dma_bound": "data_movement_bound",
    "spill_bound": "spill_bound",
    "transpose_overhead": "layout_overhead",
    "comm_heavy": "communication_bound",
    "tensor_engine_underfilled": "matrix_underfilled",
    "invalid:throttle_avg_util_limit>100%": "invalid: util_limit <= 1",
}
"""The published names of the verdicts in the vendor-neutral vocabulary."""

PEAKS = Peaks(flops=1e15, bandwidth=4e12, number_format="bf16", source="datasheet")


def section_file(profile: Profile) -> str:
    """What the section's file is called."""
    document = "000" if profile.origin == ("batch_sizes.md",) else "001_batch_32_fixed"
    words = profile.name.lower().replace("batch 32 fixed", "").replace("·", " ").replace("/", " ")
    return "_".join([document, *words.replace("(", "").replace(")", "").split()])


@pytest.fixture(scope="module")
def sections() -> dict[str, Profile]:
    reads = read_profiles([NEURON / "batch_sizes.md", NEURON / "paddings.md"])
    return {section_file(profile): profile for read in reads for profile in read.profiles}


def named(found: tuple[Verdict, ...]) -> set[str]:
    return {f"invalid: {verdict.detail}" if verdict.kind == "invalid" else verdict.kind for verdict in found}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_nine_profiled_sections(sections: dict[str, Profile], name: str) -> None:
    assert named(verdicts(sections[name])) == {OURS[verdict] for verdict in EXPECTED[name]["verdicts"]}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_they_rest_on(sections: dict[str, Profile], name: str) -> None:
    profile, expected = sections[name], EXPECTED[name]
    figures = {
        "device_time_s": profile.get("device_span_s"),
        "device_share_of_wall": profile.share("device_span_s", "step_wall_s"),
        "mfu": profile.get("mfu"),
        "hfu": profile.get("hfu"),
        "mbu": profile.get("mbu"),
        "dma_active": profile.share("copy_active_s"),
        "comm_active": profile.share("comm_active_s"),
        "spill_reload_share_of_reads": spill_share(profile),
        "transpose_share": profile.share("layout_flops", "hardware_flops"),
        "model_flops_per_active": matrix_fill(profile),
        "throttle_share": profile.get("throttle_share"),
        "throttle_loss_bound": profile.get("throttle_loss"),
        "mean_dma_packet_bytes": profile.get("copy_packet_bytes"),
    }
    for figure, value in figures.items():
        if expected[figure] is None:
            assert value is None, figure
        else:
            # Shares are printed as percentages with two decimals, and also follow from printed times.
            assert value == pytest.approx(expected[figure], rel=2e-3, abs=1e-4), figure


def test_below_the_ridge_is_not_bound_by_memory(sections: dict[str, Profile]) -> None:
    for name in EXPECTED:
        profile = sections[name]
        intensity, ridge = profile.get("intensity"), profile.get("ridge")
        assert intensity is not None and ridge is not None and intensity < ridge
        assert "memory_bound" not in named(verdicts(profile))


def test_the_most_time_at_stake_comes_first(sections: dict[str, Profile]) -> None:
    for name in EXPECTED:
        shares = [verdict.share for verdict in verdicts(sections[name])]
        known = [share for share in shares if share is not None]
        assert known == sorted(known, reverse=True) and all(0 <= share <= 1 for share in known)
        assert shares[: len(known)] == known
    assert verdicts(sections["000_batch_16"])[0].kind == "host_bound"
    assert verdicts(sections["000_baseline"])[0].kind == "data_movement_bound"


# -- each rule alone --------------------------------------------------------------------------------------------------


def profile_of(**values: float) -> Profile:
    return Profile(
        name="made",
        format="flopwise",
        peaks=PEAKS,
        values={name: SourcedValue(v, "measured") for name, v in values.items()},
    )


RULES = [
    ("host_bound", {"device_span_s": 0.6, "step_wall_s": 1.0}, {"device_span_s": 0.8, "step_wall_s": 1.0}),
    ("host_bound", {"device_span_s": 1.0, "idle_host_s": 0.2}, {"device_span_s": 1.0, "idle_host_s": 0.05}),
    ("memory_bound", {"mbu": 0.7, "intensity": 50.0, "ridge": 250.0}, {"mbu": 0.3, "intensity": 50.0, "ridge": 250.0}),
    ("memory_bound", {"mbu": 0.7}, {"mbu": 0.7, "intensity": 300.0, "ridge": 250.0}),
    (
        "data_movement_bound",
        {"device_span_s": 1.0, "copy_active_s": 0.9, "copy_exposed_s": 0.2},
        {"device_span_s": 1.0, "copy_active_s": 0.9, "copy_exposed_s": 0.05, "mbu": 0.1},
    ),
    (
        "data_movement_bound",
        {"device_span_s": 1.0, "copy_active_s": 0.9, "mbu": 0.3},
        {"device_span_s": 1.0, "copy_active_s": 0.9, "mbu": 0.7},
    ),
    (
        "spill_bound",
        {"spill_read_bytes": 3.0, "hbm_read_bytes": 10.0},
        {"spill_read_bytes": 2.0, "hbm_read_bytes": 10.0},
    ),
    (
        "layout_overhead",
        {"layout_flops": 2.0, "hardware_flops": 10.0},
        {"layout_flops": 1.0, "hardware_flops": 10.0},
    ),
    (
        "matrix_underfilled",
        {"model_flops": 4e14, "matrix_active_s": 1.0, "device_span_s": 2.0},
        {"model_flops": 6e14, "matrix_active_s": 1.0, "device_span_s": 2.0},
    ),
    (
        "communication_bound",
        {"device_span_s": 1.0, "comm_active_s": 0.5, "comm_exposed_s": 0.2},
        {"device_span_s": 1.0, "comm_active_s": 0.5, "comm_exposed_s": 0.05},
    ),
    (
        "communication_bound",
        {"device_span_s": 1.0, "comm_active_s": 0.3},
        {"device_span_s": 1.0, "comm_active_s": 0.1},
    ),
    ("throttled", {"throttle_loss": 0.1}, {"throttle_loss": 0.02, "throttle_share": 0.18}),
    (
        "compute_bound",
        {"device_span_s": 1.0, "matrix_active_s": 0.9},
        {"device_span_s": 1.0, "matrix_active_s": 0.5, "mfu": 0.3},
    ),
    ("compute_bound", {"mfu": 0.7}, {"mfu": 0.5}),
    ("compute_bound", {"mfu": 0.4, "mfu_roof": 0.5}, {"mfu": 0.2, "mfu_roof": 0.5}),
]


@pytest.mark.parametrize(("kind", "met", "missed"), RULES)
def test_a_rule(kind: str, met: dict[str, float], missed: dict[str, float]) -> None:
    assert kind in named(verdicts(profile_of(**met)))
    assert kind not in named(verdicts(profile_of(**missed)))


def test_memory_that_is_nearly_full_or_in_pieces() -> None:
    empty = profile_of()
    assert named(verdicts(replace(empty, memory_total_bytes=95.0, memory_capacity_bytes=100.0))) == {"capacity"}
    assert not verdicts(replace(empty, memory_total_bytes=80.0, memory_capacity_bytes=100.0))
    pieces = (MemoryUse(owner="fragmentation", bytes=20.0), MemoryUse(owner="parameters", bytes=60.0))
    assert named(verdicts(replace(empty, memory=pieces, memory_total_bytes=80.0))) == {"capacity"}


def test_a_profile_that_knows_nothing_is_judged_by_nothing() -> None:
    assert verdicts(profile_of()) == ()


def test_thresholds_are_the_users() -> None:
    profile = profile_of(device_span_s=0.6, step_wall_s=1.0)
    assert verdicts(profile, thresholds_of({"host_device_share": 0.5})) == ()
    with pytest.raises(FlopwiseError, match="no threshold is called 'host_devise_share'"):
        thresholds_of({"host_devise_share": 0.5})
    with pytest.raises(FlopwiseError, match=r"cannot be 1\.5"):
        thresholds_of({"host_device_share": 1.5})
    assert all(field.default is not None for field in fields(Thresholds))


def test_the_page_on_verdicts_names_every_threshold_and_its_value() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text(encoding="utf-8")
    assert re.findall(r"`(\w+)` ([\d.]+)", page) == [
        (field.name, f"{field.default:g}")
        for field in sorted(fields(Thresholds), key=lambda field: page.index(field.name))
    ]


# -- what must hold ---------------------------------------------------------------------------------------------------

SOUND = {
    "step_wall_s": 1.0,
    "device_span_s": 0.9,
    "device_busy_s": 0.8,
    "idle_s": 0.1,
    "mfu": 0.4,
    "hfu": 0.5,
    "matrix_active_s": 0.6,
    "mbu": 0.5,
    "mbu_min": 0.1,
    "mfu_roof": 0.8,
    "copy_time_s": 0.3,
    "copy_active_s": 0.2,
    "copy_exposed_s": 0.1,
    "util_limit": 0.9,
}
BREAKING = [
    ({"mfu": 0.55, "mfu_roof": 1.1}, "mfu <= hfu"),
    ({"hfu": 0.8}, "hfu <= matrix_active_s / device_span_s"),
    ({"mbu_min": 0.55}, "mbu_min <= mbu"),
    ({"mbu": 1.2, "mfu_roof": 1 / 3}, "mbu <= 1"),
    ({"util_limit": 1.0967}, "util_limit <= 1"),
    ({"idle_s": 0.2}, "busy + idle = device_span_s"),
    ({"mfu_roof": 0.9}, "mfu_roof * mbu = mfu"),
    ({"copy_exposed_s": 0.25}, "copy_exposed_s <= copy_active_s"),
    ({"device_span_s": math.nan}, "device_span_s is a number"),
    ({"copy_time_s": -0.1}, "copy_time_s >= 0"),
    ({"step_wall_s": 0.8}, "device_span_s <= step_wall_s"),
]


def test_a_sound_record_breaks_no_rule() -> None:
    assert broken(profile_of(**SOUND)) == ()


@pytest.mark.parametrize(("change", "rule"), BREAKING)
def test_a_broken_rule_is_told(change: dict[str, float], rule: str) -> None:
    profile = profile_of(**SOUND | change)
    assert rule in [found.rule for found in broken(profile)]
    assert f"invalid: {rule}" in named(verdicts(profile))


def test_memory_and_classes_have_to_add_up() -> None:
    memory = (MemoryUse(owner="parameters", bytes=60.0), MemoryUse(owner="activations", bytes=30.0))
    assert not broken(replace(profile_of(), memory=memory, memory_total_bytes=90.0))
    assert [row.rule for row in broken(replace(profile_of(), memory=memory, memory_total_bytes=100.0))]
    classes = (
        Spent(name="gemm", kind="gemm", seconds=0.5, count=1),
        Spent(name="x", kind="copy", seconds=0.3, count=1),
    )
    assert not broken(replace(profile_of(**SOUND), classes=classes))
    assert [row.rule for row in broken(replace(profile_of(**SOUND), classes=classes[:1]))] == [
        "classes = device_busy_s"
    ]


def test_rounding_of_what_was_printed_breaks_no_rule() -> None:
    values = {"mfu": SourcedValue(0.1045, "ingested", 5e-5), "hfu": SourcedValue(0.10445, "ingested", 5e-5)}
    assert broken(Profile(name="printed", format="neuron-text", values=values)) == ()
    exact = {name: SourcedValue(value.value, "ingested") for name, value in values.items()}
    assert [row.rule for row in broken(Profile(name="exact", format="neuron-text", values=exact))] == ["mfu <= hfu"]


@given(st.dictionaries(st.sampled_from([metric.name for metric in METRICS]), st.floats(allow_nan=True), max_size=12))
def test_no_numbers_make_it_fail(values: dict[str, float]) -> None:
    for verdict in verdicts(profile_of(**values)):
        assert verdict.share is None or 0 <= verdict.share <= 1


def test_a_name_that_is_no_metric_is_refused() -> None:
    assert "speed" not in METRIC
    with pytest.raises(FlopwiseError, match="no value called 'speed'"):
        profile_of(speed=1.0)
