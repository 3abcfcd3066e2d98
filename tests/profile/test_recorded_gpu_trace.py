"""A step of ours as an H200 ran it, its sums made again by plain loops over the file.

`h200_training.json.gz`: the first traced step of the small model that `flopwise train` takes by itself (8 sequences of
512 tokens in bf16), from `benchmarks.gpu_profile`; names of the machine and fields that nobody reads are taken out.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from flopwise.profile.explain.invariants import broken
from flopwise.profile.explain.kernel_classes import class_of
from flopwise.profile.explain.verdicts import verdicts
from flopwise.profile.read.reading import read_profiles
from flopwise.records.profile import Profile

TRACE = Path(__file__).parents[1] / "data" / "traces" / "h200_training.json.gz"
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
# What the trainer said of the same run: counted from the plan, and of the step by its own clock.
MODEL_FLOPS, HARDWARE_FLOPS, STEP_S = 309_338_308_608, 313_633_275_904, 0.0479
PEAK_FLOPS = 989.5e12


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(TRACE.read_bytes()))["traceEvents"]
    return found


@pytest.fixture(scope="module")
def profile() -> Profile:
    (read,) = read_profiles([TRACE])
    (found,) = read.profiles
    return found


def spans(events: list[dict[str, Any]]) -> list[tuple[float, float, dict[str, Any]]]:
    """What ran on the device, by its begin."""
    found = [(event["ts"], event["ts"] + event["dur"], event) for event in events if event["cat"] in DEVICE]
    return sorted(found, key=lambda span: span[:2])


def test_busy_and_idle_are_those_of_plain_loops(profile: Profile, events: list[dict[str, Any]]) -> None:
    (mark,) = [event for event in events if event["cat"] == "gpu_user_annotation"]
    busy, until = 0.0, 0.0
    for begin, end, _ in spans(events):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    assert profile.steps == 1
    assert profile.get("device_busy_s") == pytest.approx(busy / 1e6, rel=1e-6)
    assert profile.get("device_span_s") == pytest.approx(mark["dur"] / 1e6, rel=1e-4)
    idle, span = profile.get("idle_s"), profile.get("device_span_s")
    assert idle is not None and span is not None and idle + busy / 1e6 == pytest.approx(span, rel=1e-6)
    assert broken(profile) == ()


def test_classes_are_those_of_plain_loops(profile: Profile, events: list[dict[str, Any]]) -> None:
    """One stream, nothing beside anything else: a class has what its kernels took."""
    by_class: dict[str, float] = defaultdict(float)
    for begin, end, event in spans(events):
        by_class[class_of(event["name"], category=event["cat"])] += (end - begin) / 1e6
    assert {row.kind: row.seconds for row in profile.classes} == pytest.approx(by_class, rel=1e-3)
    assert sum(row.seconds for row in profile.classes) == pytest.approx(profile.get("device_busy_s"))
    assert set(by_class) >= {"gemm", "attention", "norm", "pointwise", "optimizer"}


def test_products_and_attention_are_told_by_the_kernels_names(events: list[dict[str, Any]]) -> None:
    named = {event["name"]: class_of(event["name"], category="kernel") for *_, event in spans(events)}
    assert {kind for name, kind in named.items() if name.startswith("nvjet_sm90")} == {"gemm"}
    assert {kind for name, kind in named.items() if "sdpa_sm90" in name} == {"attention"}
    assert "other" not in named.values()


def test_flops_are_those_that_the_plan_counts(profile: Profile, events: list[dict[str, Any]]) -> None:
    """From shapes alone, causal attention halved: what the trainer's own description says."""
    flops = 0.0
    for event in events:
        dims, values = event["args"].get("Input Dims"), event["args"].get("Concrete Inputs")
        if event["name"] == "aten::mm":
            flops += 2 * dims[0][0] * dims[0][1] * dims[1][1]
        elif event["name"] == "aten::addmm_":
            flops += 2 * dims[1][0] * dims[1][1] * dims[2][1]
        elif event["name"] == "aten::_cudnn_attention_forward":
            (batch, heads, tokens, width), causal = dims[0], values[10] == "True"
            flops += 4 * batch * heads * tokens**2 * width / (2 if causal else 1)
        elif event["name"] == "aten::_cudnn_attention_backward":
            (batch, heads, tokens, width), causal = dims[1], values[14] == "True"
            flops += 10 * batch * heads * tokens**2 * width / (2 if causal else 1)
    assert profile.get("hardware_flops") == pytest.approx(flops, rel=1e-9)
    assert flops == pytest.approx(HARDWARE_FLOPS, rel=1e-9)


def test_use_of_the_peak_is_the_trainers(profile: Profile) -> None:
    assert profile.peaks is not None and profile.peaks.flops == PEAK_FLOPS
    span = profile.get("device_span_s")
    assert span is not None
    from_trace, from_trainer = (MODEL_FLOPS / (seconds * PEAK_FLOPS) for seconds in (span, STEP_S))
    assert from_trace == pytest.approx(from_trainer, rel=0.01)
    assert profile.get("hfu") == pytest.approx(HARDWARE_FLOPS / (span * PEAK_FLOPS), rel=1e-6)


def test_it_waits_for_its_host(profile: Profile) -> None:
    assert verdicts(profile)[0].kind == "host_bound"
