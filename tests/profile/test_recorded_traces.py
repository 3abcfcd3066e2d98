"""A recorded training of ours, its sums made again by plain loops over the file.

`cpu_training.json.gz`: two steps of a one-layer Llama, as `flopwise train --profile-steps 2` traced them on a CPU;
names of the machine and fields that nobody reads are taken out.
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
from flopwise.profile.read.reading import read_profiles
from flopwise.records.profile import Profile

TRACE = Path(__file__).parents[1] / "data" / "traces" / "cpu_training.json.gz"
STEPS = 2


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(TRACE.read_bytes()))["traceEvents"]
    return found


@pytest.fixture(scope="module")
def profile() -> Profile:
    (read,) = read_profiles([TRACE])
    (found,) = read.profiles
    return found


def calls(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["cat"] == "cpu_op"]


def own_times(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Every call with the microseconds that no call within it took."""
    found, all_calls = [], calls(events)
    for event in all_calls:
        begin, end = event["ts"], event["ts"] + event["dur"]
        within = [
            other
            for other in all_calls
            if other is not event
            and other["tid"] == event["tid"]
            and begin <= other["ts"]
            and other["ts"] < end
            and (other["ts"], -other["dur"]) > (begin, -event["dur"])
        ]
        outermost, until = 0.0, begin
        for other in sorted(within, key=lambda other: (other["ts"], -other["dur"])):
            last = min(end, other["ts"] + other["dur"])
            if last > until:
                outermost += last - max(until, other["ts"])
                until = last
        found.append((event, event["dur"] - outermost))
    return found


def in_an_update(event: dict[str, Any], events: list[dict[str, Any]]) -> bool:
    marks = [mark for mark in events if mark["name"].startswith("Optimizer.step")]
    return any(mark["ts"] <= event["ts"] < mark["ts"] + mark["dur"] for mark in marks)


def test_times_are_those_of_plain_loops(profile: Profile, events: list[dict[str, Any]]) -> None:
    marks = [event for event in events if event["name"].startswith("ProfilerStep#")]
    assert len(marks) == STEPS == profile.steps
    span = max(mark["ts"] + mark["dur"] for mark in marks) - min(mark["ts"] for mark in marks)
    by_class: dict[str, float] = defaultdict(float)
    for event, microseconds in own_times(events):
        kind = class_of(event["name"], category="cpu_op")
        by_class["optimizer" if kind not in {"gemm", "attention"} and in_an_update(event, events) else kind] += (
            microseconds
        )
    assert profile.get("device_span_s") == pytest.approx(span / STEPS / 1e6, rel=1e-6)
    assert profile.get("device_busy_s") == pytest.approx(sum(by_class.values()) / STEPS / 1e6, rel=1e-5)
    assert {row.kind: row.seconds for row in profile.classes} == pytest.approx(
        {kind: microseconds / STEPS / 1e6 for kind, microseconds in by_class.items()}, rel=1e-4
    )
    assert {"gemm", "attention", "pointwise", "optimizer"} <= set(by_class)


def test_sums_and_rules(profile: Profile) -> None:
    busy, idle, span = (profile.get(name) for name in ("device_busy_s", "idle_s", "device_span_s"))
    assert busy is not None and idle is not None and busy + idle == pytest.approx(span)
    assert broken(profile) == ()


def test_calls_and_flops(profile: Profile, events: list[dict[str, Any]]) -> None:
    assert profile.get("kernel_count") == len(calls(events)) / STEPS
    flops = 0
    for event in calls(events):
        dims = event["args"].get("Input Dims")
        if event["name"] == "aten::mm":
            flops += 2 * dims[0][0] * dims[0][1] * dims[1][1]
    (product,) = [row for row in profile.operators if row.name == "aten::mm"]
    assert product.flops == pytest.approx(flops / STEPS)
