"""Neuron summaries, from text and from JSON: what their rows say of each other, and what they are under our names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.profile.read import neuron_json, neuron_text
from flopwise.profile.read.neuron_metrics import (
    CORE_V2_CLOCK_HZ,
    CORE_V2_PEAKS,
    NeuronDocument,
    NeuronRow,
    NeuronSection,
    document_profiles,
    section_profile,
)
from flopwise.profile.read.opening import TraceFile
from flopwise.records.profile import Profile

DATA = Path(__file__).parents[1] / "data" / "neuron"
DOCUMENT_NAMES = {"000": "batch_sizes.md", "001": "paddings.md"}
EXPECTED: dict[str, dict[str, Any]] = json.loads((DATA / "expected_verdicts.json").read_text())


def documents() -> dict[str, NeuronDocument]:
    return {
        prefix: neuron_text.read_document((DATA / name).read_bytes().split(b"\n"))
        for prefix, name in DOCUMENT_NAMES.items()
    }


def profiled() -> dict[str, tuple[NeuronSection, Profile]]:
    """The nine sections with a summary and their profiles, by the names of the records."""
    found = {}
    lines = {(path.name[:3], json.loads(path.read_text())["line"]): path.stem for path in DATA.glob("0*_*.json")}
    for prefix, document in documents().items():
        profiles = {profile.name: profile for profile in document_profiles(document, origin=(prefix,))}
        for section in document.sections:
            if section.summary:
                found[lines[prefix, section.line]] = (section, profiles[section.heading])
    return found


PROFILED = profiled()
BATCH_AND_SEQUENCE = {
    **{"000_baseline": (8, 128), "000_batch_2": (2, 128), "000_batch_4": (4, 128), "000_batch_16": (16, 128)},
    **{"000_batch_32": (32, 128), "000_batch32_cc_optim": (32, 128), "000_batch_48": (48, 128)},
    **{"000_batch_64_swap": (64, 128), "001_batch_32_fixed_padding_32": (32, 32)},
}


@dataclass(frozen=True)
class Interval:
    """What a printed number may have been."""

    low: float
    high: float

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Interval) -> Interval:
        return Interval(self.low - other.high, self.high - other.low)

    def __mul__(self, other: Interval | float) -> Interval:
        if not isinstance(other, Interval):
            return Interval(self.low * other, self.high * other)
        return Interval(self.low * other.low, self.high * other.high)

    def __truediv__(self, other: Interval | float) -> Interval:
        if not isinstance(other, Interval):
            return Interval(self.low / other, self.high / other)
        return Interval(self.low / other.high, self.high / other.low)

    def meets(self, other: Interval) -> bool:
        # A billionth for the arithmetic itself.
        return self.low <= other.high * (1 + 1e-9) and other.low <= self.high * (1 + 1e-9)

    def may_be_below(self, other: Interval) -> bool:
        return self.low <= other.high * (1 + 1e-9)


class Rows:
    """A summary as intervals; percentages as shares."""

    def __init__(self, section: NeuronSection, batch: int, sequence: int) -> None:
        self.section, self.batch, self.sequence = section, batch, sequence

    def __getitem__(self, name: str) -> Interval:
        row = self.section.summary[name]
        assert not isinstance(row.value, str)
        half, scale = row.half_ulp or 0.0, 0.01 if row.unit == "%" else 1.0
        return Interval((row.value - half) * scale, (row.value + half) * scale)

    @property
    def traffic(self) -> Interval:
        return self["hbm_read_bytes"] + self["hbm_write_bytes"]


PEAK, BANDWIDTH = CORE_V2_PEAKS.flops, CORE_V2_PEAKS.bandwidth or math.nan
PARAMETERS = 109_486_854
"""Of the model of the documents, with a classifier of six classes."""


def exact(value: float) -> Interval:
    return Interval(value, value)


def model_flops(rows: Rows) -> Interval:
    """Three times the forward pass of BERT base: projections, attention, pooler and classifier."""
    tokens, width, inner, layers = rows.sequence, 768, 3072, 12
    blocks = 2 * tokens * layers * (4 * width**2 + 2 * width * inner) + layers * 4 * tokens**2 * width
    return exact(3 * rows.batch * (blocks + 2 * (width**2 + width * 6)))


EQUAL: dict[str, tuple[Callable[[Rows], Interval], Callable[[Rows], Interval]]] = {
    "cycles": (lambda r: r["neuroncore_cycle_count"], lambda r: r["total_time"] * CORE_V2_CLOCK_HZ),
    "model_flops": (lambda r: r["model_flops"], model_flops),
    "intensity": (
        lambda r: r["mm_arithmetic_intensity"],
        lambda r: (r["hardware_flops"] - r["transpose_flops"]) / r.traffic,
    ),
    "ridge": (lambda r: r["peak_flops_bandwidth_ratio"], lambda _: exact(PEAK / BANDWIDTH)),
    "mfu": (lambda r: r["mfu_estimated_percent"], lambda r: r["model_flops"] / (r["total_time"] * PEAK)),
    "hfu": (lambda r: r["hfu_estimated_percent"], lambda r: r["hardware_flops"] / (r["total_time"] * PEAK)),
    "mfu_max": (
        lambda r: r["mfu_max_achievable_estimated_percent"],
        lambda r: r["model_flops"] / r.traffic / (PEAK / BANDWIDTH),
    ),
    "mfu_max_is_mfu_over_mbu": (
        lambda r: r["mfu_max_achievable_estimated_percent"],
        lambda r: r["mfu_estimated_percent"] / r["mbu_estimated_percent"],
    ),
    "mbu": (lambda r: r["mbu_estimated_percent"], lambda r: r.traffic / (r["total_time"] * BANDWIDTH)),
    "mbu_min": (
        lambda r: r["mbu_min_read_util_percent"],
        lambda r: r["inputs_and_weights_size_bytes"] / (r["total_time"] * BANDWIDTH),
    ),
    "dma_cycles": (lambda r: r["dma_active_cycles"], lambda r: r["dma_active_time"] * CORE_V2_CLOCK_HZ),
    "dma_percent": (
        lambda r: r["dma_active_time_percent"],
        lambda r: r["dma_active_cycles"] / r["neuroncore_cycle_count"],
    ),
    "dma_percent_of_time": (
        lambda r: r["dma_active_time_percent"],
        lambda r: r["dma_active_time"] / r["total_time"],
    ),
    "dma_total": (
        lambda r: r["dma_transfer_total_bytes"],
        lambda r: r["dma_transfer_average_bytes"] * r["dma_transfer_count"],
    ),
    "queues": (
        lambda r: r["dma_transfer_total_bytes"],
        lambda r: r["input_queue_bytes"] + r["output_queue_bytes"] + r["weight_queue_bytes"],
    ),
    "dynamic_packets": (
        lambda r: r["dynamic_dma_packet_percent"],
        lambda r: (
            r["software_dynamic_dma_packet_count"]
            / (r["software_dynamic_dma_packet_count"] + r["static_dma_packet_count"])
        ),
    ),
    "dynamic_size": (
        lambda r: r["dynamic_dma_size_percent"],
        lambda r: r["software_dynamic_dma_size"] / (r["software_dynamic_dma_size"] + r["static_dma_size"]),
    ),
    "inputs_are_parameters_and_moments": (
        lambda r: r["inputs_and_weights_size_bytes"],
        lambda _: exact(12 * PARAMETERS),
    ),
    **{
        f"{engine}_percent": (
            lambda r, engine=engine: r[f"{engine}_active_time_percent"],  # type: ignore[misc]
            lambda r, engine=engine: r[f"{engine}_active_time"] / r["total_time"],  # type: ignore[misc]
        )
        for engine in (
            *("tensor_engine", "vector_engine", "scalar_engine", "sync_engine", "gpsimd_engine"),
            *("cc_op", "cc_cores_instruction"),
        )
    },
    "sync_time": (lambda r: r["sync_engine_active_time"], lambda r: r["sync_engine_instruction_time"]),
    "gpsimd_time": (lambda r: r["gpsimd_engine_active_time"], lambda r: r["gpsimd_engine_instruction_time"]),
    "collectives_do_not_overlap": (lambda r: r["cc_op_active_time"], lambda r: r["cc_op_time"]),
}
NOT_ABOVE = (
    *(("event_count", "trace_count"), ("model_flops", "hardware_flops")),
    *(("dma_active_time", "dma_transfer_time"), ("dma_transfer_time", "dma_packet_time")),
    *(("spill_save_bytes", "hbm_write_bytes"), ("spill_reload_bytes", "hbm_read_bytes")),
    ("psum_read_sbuf_write_bytes", "psum_read_bytes"),
    *((f"{name}_engine_active_time", f"{name}_engine_instruction_time") for name in ("tensor", "vector", "scalar")),
    ("matmul_instruction_count", "tensor_engine_instruction_count"),
    ("activate_instruction_count", "scalar_engine_instruction_count"),
    ("activate_instruction_time", "scalar_engine_instruction_time"),
    ("cc_cores_instruction_active_time", "cc_cores_instruction_time"),
    *(("mfu_estimated_percent", "hfu_estimated_percent"), ("mbu_min_read_util_percent", "mbu_estimated_percent")),
    ("hfu_estimated_percent", "tensor_engine_active_time_percent"),
    ("mfu_estimated_percent", "mfu_max_achievable_estimated_percent"),
    ("mbu_estimated_percent", "dma_active_time_percent"),
)


def all_rows() -> list[Rows]:
    return [Rows(section, *BATCH_AND_SEQUENCE[name]) for name, (section, _) in PROFILED.items()]


@pytest.mark.parametrize("relation", EQUAL)
def test_rows_that_follow_from_others_do(relation: str) -> None:
    left, right = EQUAL[relation]
    assert [left(rows).meets(right(rows)) for rows in all_rows()] == [True] * 9


@pytest.mark.parametrize(("smaller", "larger"), NOT_ABOVE)
def test_rows_that_are_part_of_others_are_not_larger(smaller: str, larger: str) -> None:
    assert all(rows[smaller].may_be_below(rows[larger]) for rows in all_rows())


def test_a_digit_more_would_be_noticed() -> None:
    rows = Rows(PROFILED["000_batch_32"][0], 32, 128)
    assert not (rows["mfu_estimated_percent"] * 1.001).meets(rows["model_flops"] / (rows["total_time"] * PEAK))


def test_memory_adds_up() -> None:
    tables = [section for document in documents().values() for section in document.sections if section.memory]
    assert len(tables) == 7
    for section in tables:
        *parts, total = section.memory
        assert total.usage_type == "Total"
        tolerance = sum(row.half_ulp_bytes for row in section.memory)
        assert abs(sum(row.bytes for row in parts) - total.bytes) <= tolerance
        profile = section_profile(section)
        assert profile.memory_total_bytes == total.bytes
        assert [use.name for use in profile.memory] == [row.usage_type for row in parts]
        assert {use.owner for use in profile.memory}.isdisjoint({"other"})
    owners = {use.name: use.owner for use in section_profile(tables[0]).memory}
    assert (owners["tensor"], owners["Tensor"], owners["profiler buffers"]) == ("parameters", "code", "profiler")


@pytest.mark.parametrize("name", EXPECTED)
def test_values_equal_the_recorded_ones(name: str) -> None:
    section, profile = PROFILED[name]
    expected = EXPECTED[name]
    assert profile.get("device_span_s") == pytest.approx(expected["device_time_s"], rel=1e-12)
    for ours, theirs in (
        *(("mfu", "mfu"), ("hfu", "hfu"), ("mbu", "mbu"), ("throttle_share", "throttle_share")),
        *(("throttle_loss", "throttle_loss_bound"), ("copy_packet_bytes", "mean_dma_packet_bytes")),
    ):
        assert profile.get(ours) == pytest.approx(expected[theirs], rel=1e-12), ours
    spilt = (profile.get("spill_read_bytes") or 0) / (profile.get("hbm_read_bytes") or 1)
    assert spilt == pytest.approx(expected["spill_reload_share_of_reads"], rel=1e-12)
    layout = profile.share("layout_flops", of="hardware_flops")
    assert layout == pytest.approx(expected["transpose_share"], rel=1e-12)
    wall = profile.share("device_span_s", of="step_wall_s")
    if expected["device_share_of_wall"] is None:
        assert wall is None
    else:
        # The record divides the time as printed, to four digits; ours comes from the cycles.
        total = section.summary["total_time"]
        assert not isinstance(total.value, str)
        assert wall == pytest.approx(expected["device_share_of_wall"], rel=(total.half_ulp or 0) / total.value)


def test_times_shares_and_sources() -> None:
    profile = PROFILED["000_batch_32"][1]
    span = profile.values["device_span_s"]
    assert (span.source, span.half_ulp) == ("counted", 0.5 / 1.4e9)
    assert profile.values["mfu"].half_ulp == pytest.approx(0.5e-4)
    assert profile.values["mfu"].source == "ingested"
    assert profile.peaks == CORE_V2_PEAKS
    assert profile.get("comm_count") == 5
    assert profile.system["instance_type"] == profile.device == "trn1.2xlarge"
    assert profile.train_metrics["train_runtime"] == 174.6
    # Only one process is counted in the trainer's rate, and how many there are is not said.
    assert profile.get("samples_per_s") is None
    assert profile.world is None
    assert any("one process" in note for note in profile.notes)


def test_batches_and_sequences() -> None:
    for name, (_, profile) in PROFILED.items():
        batch, sequence = BATCH_AND_SEQUENCE[name]
        assert profile.batch_sequences == batch
        # Only the paddings are written down.
        assert profile.sequence_tokens == (sequence if name.startswith("001") else None)
    assert any("told from its FLOPs" in note for note in PROFILED["000_baseline"][1].notes)
    assert not any("told from its FLOPs" in note for note in PROFILED["000_batch_4"][1].notes)
    names = [profile.name for profile in document_profiles(documents()["001"])]
    assert names == ["Padding 16", "Padding 32", "Padding 64", "Padding 128"]


def test_flops_that_fit_no_batch_tell_none() -> None:
    def of(heading: str, flops: float) -> NeuronSection:
        row = NeuronRow(group="overall_stats", value=flops, unit="FLOP", raw="", half_ulp=0.0)
        return NeuronSection(heading=heading, level=1, summary={"model_flops": row})

    def batches(*sections: NeuronSection) -> list[int | None]:
        return [profile.batch_sequences for profile in document_profiles(NeuronDocument(sections=sections))]

    assert batches(of("Batch 4", 400.0), of("Plain", 700.0)) == [4, 7]
    assert batches(of("Batch 4", 400.0), of("Plain", 750.0)) == [4, None]
    assert batches(of("Batch 4", 400.0), of("Batch 8", 900.0), of("Plain", 700.0)) == [4, 8, None]
    assert batches(of("Batch 4, sequence 64", 400.0), of("Plain", 700.0)) == [4, None]


def test_impossible_limits_are_left_out_and_told() -> None:
    profile = PROFILED["000_baseline"][1]
    assert profile.get("util_limit") == pytest.approx(1.0967)
    assert any("25300 %" in warning for warning in profile.warnings)


def test_other_instances_have_no_peaks() -> None:
    section = PROFILED["000_batch_32"][0]
    row = NeuronRow(group="system", value="trn2.48xlarge", unit="text", raw="", half_ulp=None)
    other = section_profile(NeuronSection(heading="a", level=1, summary={**section.summary, "instance_type": row}))
    assert other.peaks is None
    assert other.get("device_span_s") == section.summary["total_time"].value


def as_json(section: NeuronSection) -> dict[str, Any]:
    """The summary as the profiler would write it as JSON: shares of 1, nothing scaled."""
    return {
        name: row.value / 100 if row.unit == "%" and not isinstance(row.value, str) else row.value
        for name, row in section.summary.items()
    }


def read_json(content: bytes, block: int = 2**20) -> tuple[Profile, ...]:
    blocks = iter([content[start : start + block] for start in range(0, len(content), block)])
    return neuron_json.read_source(TraceFile("a.json", blocks), "a.json").profiles


@pytest.mark.parametrize("shape", ["summary", "object", "list", "summary-object", "groups"])
def test_json_gives_the_same_values(shape: str) -> None:
    section, profile = PROFILED["000_batch_32"]
    entry = as_json(section)
    groups: dict[str, dict[str, Any]] = {}
    for name, row in section.summary.items():
        groups.setdefault(row.group, {})[name] = entry[name]
    content = json.dumps(
        {
            "summary": {"summary": [entry], "instruction": [{"a": 1}]},
            "object": entry,
            "list": [entry],
            "summary-object": {"dma": [], "summary": entry},
            "groups": {"summary": [groups]},
        }[shape]
    ).encode()
    assert neuron_json.looks_like(content)
    (found,) = read_json(content, block=1000)
    assert found.format == "neuron-json"
    for name, value in profile.values.items():
        if name not in ("step_wall_s", "device_span_s"):
            assert found.get(name) == pytest.approx(value.value, rel=1e-12), name
    assert found.peaks == CORE_V2_PEAKS
    assert not found.warnings


def test_json_lists_are_passed_over() -> None:
    section = PROFILED["000_batch_32"][0]
    instruction = b'{"opcode":"MATMUL","name":"the summary: [","start":1},' * 400_000
    content = b'{"instruction":[' + instruction[:-1] + b'],"summary":[' + json.dumps(as_json(section)).encode() + b"]}"
    assert len(content) > neuron_json.MOST_SUMMARY_BYTES
    (found,) = read_json(content)
    assert found.get("mfu") == pytest.approx(0.2039)


def test_newer_names_and_nanoseconds() -> None:
    (found,) = read_json(
        json.dumps(
            {
                "total_time": 0.05,
                "total_active_time": 0.04,
                "mfu_hlo_estimated_percent": 0.3,
                "mfu_hlo_max_achievable_estimated_percent": 0.6,
                "throttle_active_nc0_time_ns": 5_000_000,
                "max_achievable_util_with_throttling_percent": 0.98,
                **{"static_dma_packet_count": 10, "static_dma_size": 1000},
                **{"hardware_dynamic_dma_packet_count": 30, "hardware_dynamic_dma_size": 5000},
                "adjusted_hardware_flops": 12,
                "event_count": None,
            }
        ).encode()
    )
    expected = {"device_busy_s": 0.04, "idle_s": 0.01, "mfu": 0.3, "mfu_roof": 0.6, "throttle_share": 0.1}
    for name, value in {**expected, "util_limit": 0.98, "copy_packet_bytes": 150}.items():
        assert found.get(name) == pytest.approx(value), name


def test_json_damage_is_told() -> None:
    content = b'[{"total_time": 0.05, "mfu_estimated_percent": 20.4, "event_count": NaN, "trace_count": %s}]' % (
        b"9" * 9000
    )
    (found,) = read_json(content)
    assert len(found.warnings) == 3
    assert "fraction of 1" in found.warnings[0]


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"[]",
        b"[" * 100_000,
        b'{"summary": [{"total_time": 0.1',
        b'{"summary": [{}]}',
        b'"x"',
        b"{",
        b'{"summary": 3}',
    ],
)
def test_json_without_a_summary_is_an_error(content: bytes) -> None:
    with pytest.raises(FlopwiseError, match="no summary"):
        read_json(content)


def test_other_json_is_not_taken_for_it() -> None:
    assert not neuron_json.looks_like(b'{"traceEvents": [], "dma": 1}')
    assert not neuron_json.looks_like(b'{"train_runtime": 3}')
    assert not neuron_json.looks_like((DATA / "batch_sizes.md").read_bytes()[: 2**16])


SMALL_JSON = json.dumps({"summary": [as_json(PROFILED["000_batch_4"][0])], "dma": [1, 2]}).encode()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SMALL_JSON)), st.binary(max_size=4)), max_size=6), st.integers(0, 9))
def test_mutated_json_is_survived(changes: list[tuple[int, bytes]], cut: int) -> None:
    content = SMALL_JSON[: len(SMALL_JSON) * (cut + 1) // 10]
    for index, noise in changes:
        content = content[:index] + noise + content[index + len(noise) :]
    try:
        read_json(content)
    except FlopwiseError as error:
        assert "no summary" in error.what
