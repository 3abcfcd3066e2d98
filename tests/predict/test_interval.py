"""Intervals from held-out errors: the rule by hand, its properties, and the evidence that ships."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import (
    load_evidence,
    load_hardware,
    load_model,
    load_stack,
    measured_stack,
    stack_names,
)
from flopwise.predict.expected import BEYOND_PEAK, expect, peak_share
from flopwise.predict.interval import BETWEEN, EACH_DOUBLING, MOST_WIDE, WORDS, SupportedInterval, interval
from flopwise.predict.step import step, steps
from flopwise.records.evidence import Evidence, Span
from flopwise.setup.parallel import Parallel, parse_parallel, shard_all
from flopwise.setup.setup import Setup
from flopwise.setup.stack import Constant

DIMENSIONS = tuple(WORDS)

ENTRY = Evidence(
    table="table",
    stack="framework",
    architectures=("Hopper",),
    zero=1,
    features=("interleaved stages",),
    measured=True,
    n=10,
    low=-0.1,
    high=0.2,
    level=0.05,
    parameters=Span(least=10**9, most=10**10),
    sequence_tokens=Span(least=1024, most=8192),
    devices=Span(least=8, most=64),
    tensor=Span(least=1, most=8),
    pipeline=Span(least=1, most=4),
    micro_tokens=Span(least=4096, most=16384),
    how="made up",
)


def asked(entries: list[Evidence], **changes: object) -> SupportedInterval:
    values: dict[str, object] = {
        "stack": "framework",
        "architecture": "Hopper",
        "parameters": 5 * 10**9,
        "sequence_tokens": 4096,
        "devices": 16,
        "tensor": 2,
        "pipeline": 2,
        "zero": 1,
    }
    found = interval(entries, **(values | changes))  # type: ignore[arg-type]
    assert found is not None
    return found


def bounds(found: SupportedInterval) -> list[float]:
    return [found.low, found.high]


def width(found: SupportedInterval) -> float:
    return math.log(found.high / found.low)


def half(found: SupportedInterval) -> float:
    return width(found) / 2


def test_inside_the_data_it_is_their_bounds() -> None:
    found = asked([ENTRY])
    assert bounds(found) == pytest.approx([0.9, 1.2])
    assert (found.basis, found.outside) == (("table",), ())
    assert asked([ENTRY], architecture="hopper", micro_tokens=8192) == found


def test_each_factor_of_two_outside_adds_as_much() -> None:
    inside = half(asked([ENTRY]))
    for change in ({"devices": 128}, {"sequence_tokens": 512}, {"tensor": 16}, {"pipeline": 8}, {"micro_tokens": 2048}):
        found = asked([ENTRY], **change)
        assert half(found) == pytest.approx(inside + EACH_DOUBLING)
        assert len(found.outside) == 1
    assert half(asked([ENTRY], devices=256)) == pytest.approx(inside + 2 * EACH_DOUBLING)
    assert half(asked([ENTRY], devices=256, tensor=16)) == pytest.approx(inside + 3 * EACH_DOUBLING)


def test_what_the_data_lack_adds_the_spread_between_tables_in_variance() -> None:
    inside = half(asked([ENTRY]))
    once = math.sqrt(inside**2 + BETWEEN**2)
    for change, word in (
        ({"architecture": "Ampere"}, "architecture Ampere"),
        ({"zero": 3}, "ZeRO stage 3"),
        ({"features": ("context parallelism",)}, "context parallelism"),
    ):
        found = asked([ENTRY], **change)
        assert found.outside == (word,)
        assert half(found) == pytest.approx(once)
    twice = asked([ENTRY], architecture="Ampere", features=("context parallelism",))
    assert half(twice) == pytest.approx(math.sqrt(inside**2 + 2 * BETWEEN**2))
    both = asked([ENTRY], devices=128, architecture="Ampere")
    assert half(both) == pytest.approx(once + EACH_DOUBLING)
    assert both.outside == ("number of devices 128", "architecture Ampere")
    assert asked([ENTRY], features=("interleaved stages",)).outside == ()
    # Stages 0 to 2 keep whole weights everywhere: they are one kind.
    assert asked([ENTRY], zero=0).outside == ()
    sharded = replace(ENTRY, table="sharded", zero=3, low=0.1, high=0.6)
    assert asked([sharded], zero=0).outside == ("no sharding",)
    assert asked([ENTRY, sharded], zero=3).basis == ("sharded",)


def test_a_prediction_with_a_stack_lies_in_its_own_interval() -> None:
    slow = replace(ENTRY, low=0.02, high=0.3)
    assert bounds(asked([slow])) == pytest.approx([1.0, 1.3])
    fast = replace(ENTRY, low=-0.2, high=-0.05)
    assert bounds(asked([fast])) == pytest.approx([0.8, 1.0])
    far = replace(ENTRY, low=2.0, high=6.0)
    assert bounds(asked([far])) == pytest.approx([1.0, 4.0])


def test_of_several_entries_the_nearest_count() -> None:
    other = replace(ENTRY, table="other", low=-0.3, high=0.05, devices=Span(least=128, most=512))
    found = asked([ENTRY, other], devices=256)
    assert bounds(found) == pytest.approx([0.7, 1.05])
    assert (found.basis, found.outside) == (("other",), ())
    both = asked([ENTRY, replace(other, devices=ENTRY.devices)], tensor=16)
    assert (both.basis, both.outside) == (("table", "other"), ("tensor ranks 16",))
    assert both.low < 0.7
    assert both.high > 1.2


ONE = Span(least=1, most=1)
BARE = {"stack": "kernels", "devices": 1, "tensor": 1, "pipeline": 1}


def bare_entries() -> list[Evidence]:
    """Steps of one device, and two frameworks held against their kernels."""
    single = replace(ENTRY, table="steps", stack="kernels", low=0.0, high=0.05, devices=ONE, tensor=ONE, pipeline=ONE)
    near = replace(ENTRY, table="near", stack="kernels", low=0.2, high=0.8, level=0.4)
    far = replace(near, table="far", low=0.1, high=0.3, level=0.2, features=())
    return [ENTRY, single, near, far]


def test_without_a_framework_the_middle_is_what_the_tables_reach() -> None:
    entries = bare_entries()
    within = (math.log(1.8 / 1.2) + math.log(1.3 / 1.1)) / 4
    for stack in ("kernels", "flopwise"):
        assert asked(entries, **(BARE | {"stack": stack})).basis == ("steps",)
        found = asked(entries, stack=stack)
        assert (found.basis, found.outside) == (("near", "far"), ())
        assert found.middle == pytest.approx(math.sqrt(1.4 * 1.2))
        assert half(found) == pytest.approx(math.hypot(within, BETWEEN))
    assert asked(entries, stack="kernels", least=1.3).low == pytest.approx(1.3)
    assert asked(entries, stack="kernels", features=("interleaved stages",)).outside == ()
    assert asked(entries, stack="kernels", features=("host offload",)).outside == ("host offload",)


def test_a_stack_that_nobody_measured_is_no_narrower_than_none() -> None:
    entries = bare_entries()
    for change in ({}, {"devices": 4096}, {"architecture": "Volta"}, {"features": ("host offload",)}):
        own, none = asked(entries, stack="mine of a file", **change), asked(entries, stack="kernels", **change)
        assert width(own) >= width(none) - 1e-12
        assert own.low < 1.0 < own.high
    assert asked(entries, stack="mine of a file").outside == ("stack mine of a file",)
    shipped = load_evidence()
    assert width(asked(list(shipped), stack="mine")) >= width(asked(list(shipped), stack="kernels")) - 1e-12


def test_without_any_evidence_there_is_no_interval() -> None:
    found = interval(
        [], stack="mine", architecture="Hopper", parameters=1, sequence_tokens=1, devices=1, tensor=1, pipeline=1
    )
    assert found is None


SPANS = st.tuples(st.integers(1, 10**12), st.integers(1, 10**12)).map(
    lambda pair: Span(least=min(pair), most=max(pair))
)
ENTRIES = st.builds(
    replace,
    st.just(ENTRY),
    low=st.floats(-0.9, 0.9),
    high=st.floats(0.9, 4.0),
    **dict.fromkeys(DIMENSIONS, SPANS),
)


@given(st.lists(ENTRIES, min_size=1, max_size=4), st.sampled_from(["framework", "mine"]), st.floats(0.01, 3.0))
def test_never_wider_than_four_times_and_never_before_what_is_possible(
    entries: list[Evidence], stack: str, least: float
) -> None:
    bare = [replace(entry, table=f"{entry.table} bare", stack="kernels") for entry in entries]
    for asked_stack in (stack, "kernels"):
        try:
            found = asked([*entries, *bare], stack=asked_stack, least=least)
        except AssertionError:
            # Every entry is of one device.
            return
        assert width(found) <= MOST_WIDE + 1e-9
        assert least * (1 - 1e-12) <= found.low <= found.high
        if asked_stack != "kernels" and least <= 1.0:
            assert found.low <= 1.0 <= found.high


@given(ENTRIES, st.sampled_from(DIMENSIONS[:5]), st.integers(1, 10**12))
def test_never_narrower_the_farther_outside(entry: Evidence, dimension: str, value: int) -> None:
    span = getattr(entry, dimension)
    near, far = (value, 2 * value) if value >= span.most else (2 * value, value)
    if span.least <= value <= span.most:
        return
    if value < span.least < span.most < 2 * value:
        return
    assert width(asked([entry], **{dimension: far})) >= width(asked([entry], **{dimension: near})) - 1e-9


def test_spans_hold_something() -> None:
    with pytest.raises(FlopwiseError, match="holds nothing"):
        Span(least=2, most=1)


# -- what ships -------------------------------------------------------------------------------------------------------


def _book(*, of_kernels: bool = False) -> dict[tuple[str, int], Evidence]:
    """The shipped entries by table and ZeRO stage: those of frameworks, or those of no framework at all."""
    entries = [entry for entry in load_evidence() if entry.stack not in ("dataflow", "flopwise-streaming")]
    return {(entry.table, entry.zero): entry for entry in entries if (entry.stack == "kernels") == of_kernels}


def test_the_spread_between_tables_is_that_of_the_shipped_ones() -> None:
    """Of their levels without any framework's constants; a sample of a few tables."""
    levels: dict[str, list[float]] = {}
    for entry in _book(of_kernels=True).values():
        if entry.devices.most > 1:
            levels.setdefault(entry.table, []).append(math.log1p(entry.level))
    means = [sum(mine) / len(mine) for mine in levels.values()]
    assert len(means) >= 6
    middle = sum(means) / len(means)
    deviation = math.sqrt(sum((mean - middle) ** 2 for mean in means) / (len(means) - 1))
    # Four of five lie within 1.28 standard deviations.
    assert 1.2816 * deviation == pytest.approx(BETWEEN, rel=0.4)


def test_the_shipped_evidence_covers_the_measured_stacks() -> None:
    book, kernels = _book(), _book(of_kernels=True)
    assert {entry.stack for entry in book.values()} | {"flopwise", "automodel"} >= set(stack_names())
    assert [table for (table, _), entry in book.items() if not entry.measured] == ["vtrain"]
    assert kernels["steps_h200", 0].devices == Span(least=1, most=1)
    assert all(entry.low <= entry.level <= entry.high for entry in (*book.values(), *kernels.values()))


SHAPES = ("llama-3-8b", "llama-3-70b", "llama-2-7b", "gemma-2-9b")


def a_setup(draw: st.DrawFn) -> Setup:
    """Any set-up of a few models on a few devices, with any stack."""
    devices = draw(st.sampled_from([1, 2, 8, 64, 1024]))
    tensor = draw(st.sampled_from([degree for degree in (1, 2, 8) if devices % degree == 0]))
    words = f"tp{tensor} sp" if tensor > 1 else ""
    words += " zero3" if draw(st.booleans()) and devices > tensor else ""
    stack = draw(st.sampled_from(["kernels", *stack_names()]))
    hardware = load_hardware(draw(st.sampled_from(["h100-sxm", "a100-80gb", "b200", "mi300x"])))
    sequence = draw(st.sampled_from([512, 4096, 65_536]))
    return Setup(
        model=load_model(draw(st.sampled_from(SHAPES))),
        hardware=hardware,
        parallel=parse_parallel(words, devices) if devices > 1 else Parallel(),
        sequence_tokens=sequence,
        batch_sequences=devices * draw(st.sampled_from([1, 4])),
        micro_batch_sequences=1,
        recompute=draw(st.sampled_from(["none", "full"])),
        stack=None if stack == "kernels" else load_stack(stack),
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_interval_lies_below_the_peak(data: st.DataObject) -> None:
    asked_setup = data.draw(st.composite(a_setup)())
    name = measured_stack(asked_setup.stack)
    found = expect(step(asked_setup), asked_setup, load_evidence(), stack=name)
    assert found.interval is not None
    assert found.interval.low_s > 0
    assert found.hfu * found.step_s / found.interval.low_s <= 1 + 1e-9
    assert found.interval.high_s / found.interval.low_s <= 4 + 1e-9
    assert found.interval.low_s <= found.step_s * (1 + 1e-9) <= found.interval.high_s * (1 + 2e-9)


def test_a_stack_faster_than_the_peak_has_no_interval_and_is_told() -> None:
    fast = replace(load_stack("nanotron"), constants={"products": Constant(value=0.1, how="made up")})
    asked_setup = Setup(model=load_model("llama-3-8b"), hardware=load_hardware("h100-sxm"), stack=fast)
    plain = step(asked_setup)
    assert plain.hfu > 1
    found = expect(plain, asked_setup, load_evidence(), stack=measured_stack(fast))
    assert found.interval is None
    assert BEYOND_PEAK in found.notes
    assert peak_share(steps([asked_setup], convention="palm")[0]) == 1.0


def test_on_several_devices_the_figures_are_what_frameworks_reach() -> None:
    asked_setup = Setup(model=load_model("llama-3-8b"), hardware=load_hardware("h100-sxm"), parallel=shard_all(8))
    plain = step(asked_setup)
    found = expect(plain, asked_setup, load_evidence(), stack="kernels")
    assert found.interval is not None
    assert found.ceiling_s is not None
    hidden = sum(plain.parts[name] for name in ("tensor", "expert", "sharding", "stages"))
    assert found.ceiling_s == pytest.approx(plain.step_s - hidden)
    assert found.ceiling_s < plain.step_s < found.step_s
    assert found.interval.low_s >= found.ceiling_s * (1 - 1e-12)
    assert found.step_s == pytest.approx(math.sqrt(found.interval.low_s * found.interval.high_s))
    assert found.tokens_per_s * found.step_s == pytest.approx(plain.tokens_per_s * plain.step_s)
    assert found.mfu * found.step_s == pytest.approx(plain.mfu * plain.step_s)
    assert found.ceiling_mfu == pytest.approx(plain.mfu * plain.step_s / found.ceiling_s)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert sum(op.time_s for op in found.ops) == pytest.approx(found.step_s)
    assert sum(op.share for op in found.ops) == pytest.approx(1)
    one = replace(asked_setup, parallel=Parallel())
    assert expect(step(one), one, load_evidence(), stack="kernels").ceiling_s is None
