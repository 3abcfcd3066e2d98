"""What must hold of every profile, whoever made it. A figure that breaks a rule is reported, never hidden."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite

from flopwise.records.profile import METRIC, Profile, SourcedValue

MEASURED_SLACK = 0.02
"""Of figures that were sampled or estimated at different moments; those of one file have none but their rounding."""
EXACT_SLACK = 1e-6
CLOCK_SLACK = 0.1
"""The peaks of an H200 hold at 1,830 MHz, and it runs small loads at 1,980."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A rule that does not hold."""

    rule: str
    """`mfu <= hfu`."""
    found: float
    bound: float


@dataclass(frozen=True, slots=True)
class Term:
    """One side of a rule: a figure, how far it may be off, and whether it was sampled or estimated."""

    text: str
    value: float
    slack: float
    is_rough: bool


AT_MOST = (
    ("mfu", "hfu"),
    ("mfu", "mfu_roof"),
    ("mbu_min", "mbu"),
    ("model_flops", "hardware_flops"),
    ("layout_flops", "hardware_flops"),
    ("spill_read_bytes", "hbm_read_bytes"),
    ("spill_write_bytes", "hbm_write_bytes"),
    ("device_busy_s", "device_span_s"),
    ("copy_exposed_s", "copy_active_s"),
    ("copy_active_s", "copy_time_s"),
    ("comm_exposed_s", "comm_active_s"),
    ("comm_active_s", "comm_time_s"),
    ("matrix_active_s", "device_span_s"),
    ("vector_active_s", "device_span_s"),
    ("scalar_active_s", "device_span_s"),
    ("special_active_s", "device_span_s"),
    ("copy_active_s", "device_span_s"),
    ("comm_active_s", "device_span_s"),
    ("device_span_s", "step_wall_s"),
    ("clock_mean_hz", "clock_boost_hz"),
)
"""(smaller, larger): the first is a part of the second, or bounded by it."""


def broken(profile: Profile) -> tuple[Broken, ...]:
    """Rules that the profile breaks, by what was found."""
    found = [*_impossible(profile)]
    profile = without_impossible(profile)
    found += _shares(profile)
    for smaller, larger in AT_MOST:
        found += _at_most(_term(profile, smaller), _term(profile, larger))
    found += _at_most(*_matrix_work(profile))
    found += _sums(profile)
    return tuple(found)


def _impossible(profile: Profile) -> Iterator[Broken]:
    """Not a number, or less than nothing."""
    for name, value in profile.values.items():
        if not isfinite(value.value):
            yield Broken(rule=f"{name} is a number", found=value.value, bound=0.0)
        elif value.value < 0 and METRIC[name].unit != "degC":
            yield Broken(rule=f"{name} >= 0", found=value.value, bound=0.0)


def without_impossible(profile: Profile) -> Profile:
    """Without the values of which nothing can be concluded: not a number, or less than nothing."""
    values = {name: value for name, value in profile.values.items() if isfinite(value.value) and value.value >= 0}
    return replace(profile, values=values)


def _shares(profile: Profile) -> Iterator[Broken]:
    for name, value in profile.values.items():
        # The roof is what bandwidth would allow: above 1 it allows everything.
        if METRIC[name].unit == "share" and name != "mfu_roof":
            one = Term("1", 1.0, 0.0, False)
            yield from _at_most(_of(name, value), one)


def _matrix_work(profile: Profile) -> tuple[Term | None, Term | None]:
    """The least time that the executed FLOPs take, and the matrix unit's active time; or both as shares of the span.

    Counters have that time in cycles, and the clock may be above the one of the peak.
    """
    flops = _term(profile, "hardware_flops")
    active: Term | None
    if flops and profile.peaks:
        peak = profile.peaks.flops
        least: Term | None = Term("hardware_flops at the peak", flops.value / peak, flops.slack / peak, flops.is_rough)
        active = _term(profile, "matrix_active_s")
    else:
        least, active = _term(profile, "hfu"), _over(profile, "matrix_active_s", "device_span_s")
    if active is not None and profile.values["matrix_active_s"].source == "measured":
        active = replace(active, slack=active.slack + CLOCK_SLACK * active.value)
    return least, active


def _sums(profile: Profile) -> Iterator[Broken]:
    """Parts that make up a whole."""
    busy, idle = _term(profile, "device_busy_s"), _term(profile, "idle_s")
    if busy and idle:
        whole = Term("busy + idle", busy.value + idle.value, busy.slack + idle.slack, busy.is_rough)
        yield from _equal(whole, _term(profile, "device_span_s"))
    if busy and profile.classes:
        yield from _equal(Term("classes", sum(row.seconds for row in profile.classes), 0.0, False), busy)
    causes = [_term(profile, name) for name in ("idle_host_s", "idle_copy_s", "idle_communication_s")]
    known = [cause for cause in causes if cause]
    if idle and known:
        yield from _at_most(Term("causes of idle", sum(cause.value for cause in known), 0.0, False), idle)
    roof, mbu, mfu = (_term(profile, name) for name in ("mfu_roof", "mbu", "mfu"))
    if roof and mbu and mfu:
        slack = roof.slack * (mbu.value + mbu.slack) + mbu.slack * roof.value
        rough = roof.is_rough or mbu.is_rough
        yield from _equal(Term("mfu_roof * mbu", roof.value * mbu.value, slack, rough), mfu)
    if profile.memory and profile.memory_total_bytes is not None:
        parts = sum(use.bytes for use in profile.memory)
        # A total is printed no finer than its largest part.
        slack = sum(use.half_ulp for use in profile.memory) + max(use.half_ulp for use in profile.memory)
        yield from _equal(
            Term("memory by owner", parts, slack, False),
            Term("memory_total_bytes", profile.memory_total_bytes, 0.0, False),
        )


def _of(name: str, value: SourcedValue) -> Term:
    return Term(name, value.value, value.half_ulp, value.source in {"measured", "modelled"})


def _term(profile: Profile, name: str) -> Term | None:
    value = profile.values.get(name)
    return None if value is None else _of(name, value)


def _over(profile: Profile, part: str, whole: str) -> Term | None:
    above, below = _term(profile, part), _term(profile, whole)
    if above is None or below is None or not below.value:
        return None
    value = above.value / below.value
    slack = above.slack / below.value + value * below.slack / below.value
    return Term(f"{part} / {whole}", value, slack, above.is_rough or below.is_rough)


def _slack(left: Term, right: Term) -> float:
    relative = MEASURED_SLACK if left.is_rough or right.is_rough else EXACT_SLACK
    return left.slack + right.slack + relative * max(abs(left.value), abs(right.value))


def _at_most(left: Term | None, right: Term | None) -> Iterator[Broken]:
    if left and right and left.value > right.value + _slack(left, right):
        yield Broken(rule=f"{left.text} <= {right.text}", found=left.value, bound=right.value)


def _equal(left: Term | None, right: Term | None) -> Iterator[Broken]:
    if left and right and abs(left.value - right.value) > _slack(left, right):
        yield Broken(rule=f"{left.text} = {right.text}", found=left.value, bound=right.value)
