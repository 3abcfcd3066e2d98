"""Sums over a device's activity, by examples that can be drawn on paper and by counting every nanosecond."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flopwise.profile.explain.activity import SHOWN_KERNELS, Activity, ActivityBuilder, Summary, summarize
from flopwise.records.profile import KERNEL_CLASSES, KernelClass

Row = tuple[KernelClass, int, int, int]


def _activity(*rows: Row) -> Activity:
    """Rows of (class, start, end, launch)."""
    builder = ActivityBuilder()
    for kind, start, end, launch in rows:
        builder.add(f"a {kind}", kind, start, end, launch_ns=launch, moved_bytes=100 if kind == "copy" else -1)
    return builder.build()


def _ns(summary: Summary, name: str) -> float:
    return round(summary.values[name].value * 1e9, 6)


def test_copies_and_collectives_beside_computation() -> None:
    #  gemm  ####------      copy  --######--      comm  -----#####
    summary = summarize(_activity(("gemm", 0, 4, 0), ("copy", 2, 8, 0), ("communication", 5, 10, 0)))
    assert _ns(summary, "device_span_s") == 10
    assert _ns(summary, "device_busy_s") == 10
    assert _ns(summary, "idle_s") == 0
    assert _ns(summary, "copy_active_s") == 6
    # Where both run without computation, the time is the collective's.
    assert _ns(summary, "copy_exposed_s") == 1
    assert _ns(summary, "comm_exposed_s") == 5
    assert {spent.kind: round(spent.seconds * 1e9, 6) for spent in summary.classes} == {
        "gemm": 4,
        "communication": 5,
        "copy": 1,
    }
    assert summary.values["copy_bytes"].value == 100
    assert "comm_bytes" not in summary.values


def test_overlaps_count_once_when_active_and_each_when_added_up() -> None:
    summary = summarize(_activity(("communication", 0, 10, 0), ("communication", 5, 15, 0)))
    assert _ns(summary, "comm_active_s") == 15
    assert _ns(summary, "comm_time_s") == 20
    assert summary.values["comm_count"].value == 2


@pytest.mark.parametrize(
    ("before", "launch", "host", "copy", "communication"),
    [
        ("gemm", 5, 0, 0, 0),  # handed over before the gap, nothing known to wait for
        ("gemm", 13, 3, 0, 0),  # the host came 3 ns into the gap of 10
        ("gemm", 25, 10, 0, 0),  # a launch after the kernel's begin is all of the gap
        ("copy", 5, 0, 10, 0),
        ("copy", 14, 4, 6, 0),
        ("communication", 12, 2, 0, 8),
    ],
)
def test_causes_of_idle_time(before: KernelClass, launch: int, host: int, copy: int, communication: int) -> None:
    summary = summarize(_activity((before, 0, 10, 0), ("pointwise", 20, 30, launch)))
    assert _ns(summary, "idle_s") == 10
    assert _ns(summary, "idle_host_s") == host
    assert _ns(summary, "idle_copy_s") == copy
    assert _ns(summary, "idle_communication_s") == communication


def test_a_copy_that_ends_a_gap_did_not_wait_for_one() -> None:
    summary = summarize(_activity(("copy", 0, 10, 0), ("copy", 20, 30, 5)))
    assert _ns(summary, "idle_copy_s") == 0


def test_unknown_launches_leave_causes_unknown() -> None:
    summary = summarize(_activity(("gemm", 0, 10, -1), ("gemm", 20, 30, -1)))
    assert _ns(summary, "idle_s") == 10
    assert "idle_host_s" not in summary.values


def test_a_window_is_the_span() -> None:
    summary = summarize(_activity(("gemm", 0, 10, 0), ("norm", 15, 40, 0)), window_ns=(5, 30), steps=5)
    assert _ns(summary, "device_span_s") == 5
    assert _ns(summary, "device_busy_s") == 4
    assert {spent.kind: round(spent.seconds * 1e9, 6) for spent in summary.classes} == {"gemm": 1, "norm": 3}
    assert summary.values["kernel_count"].value == pytest.approx(2 / 5)


def test_nothing_at_all() -> None:
    summary = summarize(_activity())
    assert _ns(summary, "device_busy_s") == 0
    assert summary.classes == summary.kernels == ()
    assert "idle_host_s" not in summary.values


def test_kernels_beyond_the_shown_are_one_row() -> None:
    builder = ActivityBuilder()
    for number in range(SHOWN_KERNELS + 5):
        builder.add(f"kernel {number}", "gemm", 0, 1000 - number)
    kernels = summarize(builder.build()).kernels
    assert len(kernels) == SHOWN_KERNELS + 1
    assert kernels[0].name == "kernel 0"
    assert kernels[-1].name == "(5 others)"
    assert sum(spent.count for spent in kernels) == SHOWN_KERNELS + 5
    assert math.fsum(spent.seconds for spent in kernels) == pytest.approx(
        sum(1000 - number for number in range(SHOWN_KERNELS + 5)) * 1e-9
    )


ROWS = st.lists(
    st.tuples(st.sampled_from(KERNEL_CLASSES), st.integers(0, 30), st.integers(0, 40), st.integers(0, 40)), max_size=12
)


@given(ROWS)
@example([("gemm", 0, 4, 0), ("copy", 2, 8, 0), ("communication", 5, 10, 0)])
@settings(max_examples=50, deadline=None)
def test_sums_agree_with_counting(rows: list[Row]) -> None:
    summary = summarize(_activity(*rows))
    busy = {moment for _, start, end, _ in rows for moment in range(start, end)}
    computing = {m for kind, start, end, _ in rows if kind not in ("copy", "communication") for m in range(start, end)}
    talking, copying = (
        {moment for kind, start, end, _ in rows if kind == wanted for moment in range(start, end)}
        for wanted in ("communication", "copy")
    )
    assert _ns(summary, "device_busy_s") == len(busy)
    assert _ns(summary, "device_span_s") == (max(busy) + 1 - min(busy) if busy else 0)
    assert _ns(summary, "device_busy_s") + _ns(summary, "idle_s") == pytest.approx(_ns(summary, "device_span_s"))
    assert _ns(summary, "copy_exposed_s") == len(copying - talking - computing)
    assert _ns(summary, "comm_exposed_s") == len(talking - computing)
    charged = sum(spent.seconds for spent in summary.classes if spent.kind not in ("copy", "communication"))
    parts = ("comm_exposed_s", "copy_exposed_s", "idle_s")
    whole = round(charged * 1e9, 6) + sum(_ns(summary, name) for name in parts)
    assert whole == pytest.approx(_ns(summary, "device_span_s"), rel=1e-12)
    assert sum(spent.seconds for spent in summary.classes) == pytest.approx(summary.values["device_busy_s"].value)
    causes = [_ns(summary, f"idle_{cause}_s") for cause in ("host", "copy", "communication")] if busy else []
    assert all(cause >= 0 for cause in causes)
    assert sum(causes) <= _ns(summary, "idle_s") + 1e-6
