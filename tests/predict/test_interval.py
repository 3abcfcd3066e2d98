"""Intervals from held-out errors: the rule by hand, its properties, and the evidence that ships."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_evidence, stack_names
from flopwise.predict.interval import WORDS, SupportedInterval, beyond, interval
from flopwise.records.evidence import Evidence, Span
from flopwise.references.published import read_cases

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


def test_inside_the_data_it_is_their_quantiles() -> None:
    found = asked([ENTRY])
    assert bounds(found) == pytest.approx([0.9, 1.2])
    assert (found.basis, found.outside) == (("table",), ())
    assert asked([ENTRY], architecture="hopper", micro_tokens=8192) == found


def test_each_factor_of_two_outside_adds_half_the_width() -> None:
    inside = width(asked([ENTRY]))
    for change in ({"devices": 128}, {"sequence_tokens": 512}, {"tensor": 16}, {"pipeline": 8}, {"micro_tokens": 2048}):
        found = asked([ENTRY], **change)
        assert width(found) == pytest.approx(1.5 * inside)
        assert len(found.outside) == 1
    assert width(asked([ENTRY], devices=256)) == pytest.approx(2.0 * inside)
    assert width(asked([ENTRY], devices=256, tensor=16)) == pytest.approx(3.0 * inside)
    assert width(asked([ENTRY], architecture="Ampere")) == pytest.approx(1.5 * inside)
    assert asked([ENTRY], devices=128, architecture="Ampere").outside == (
        "number of devices 128",
        "architecture Ampere",
    )


def test_a_prediction_lies_in_its_own_interval() -> None:
    slow = replace(ENTRY, low=0.02, high=0.3)
    assert bounds(asked([slow])) == pytest.approx([1.0, 1.3])
    fast = replace(ENTRY, low=-0.2, high=-0.05)
    assert bounds(asked([fast])) == pytest.approx([0.8, 1.0])


def test_of_several_entries_the_nearest_count() -> None:
    other = replace(ENTRY, table="other", low=-0.3, high=0.05, devices=Span(least=128, most=512))
    found = asked([ENTRY, other], devices=256)
    assert bounds(found) == pytest.approx([0.7, 1.05])
    assert (found.basis, found.outside) == (("other",), ())
    both = asked([ENTRY, replace(other, devices=ENTRY.devices)], tensor=16)
    assert (both.basis, both.outside) == (("table", "other"), ("tensor ranks 16",))
    assert both.low < 0.7
    assert both.high > 1.2


def test_sharding_and_features_that_the_data_lack_are_outside() -> None:
    inside = width(asked([ENTRY]))
    for change, word in (
        ({"zero": 3}, "ZeRO stage 3"),
        ({"features": ("context parallelism",)}, "context parallelism"),
    ):
        found = asked([ENTRY], **change)
        assert found.outside == (word,)
        assert width(found) == pytest.approx(1.5 * inside)
    assert asked([ENTRY], features=("interleaved stages",)).outside == ()
    # Stages 0 to 2 keep whole weights everywhere: they are one kind.
    assert asked([ENTRY], zero=0).outside == ()
    sharded = replace(ENTRY, table="sharded", zero=3, low=0.5, high=3.0)
    assert asked([sharded], zero=0).outside == ("no sharding",)
    assert asked([ENTRY, sharded], zero=3).basis == ("sharded",)
    assert asked([ENTRY, sharded], zero=3).outside == ()


def test_without_a_framework_one_device_and_several_have_data_of_their_own() -> None:
    one = Span(least=1, most=1)
    single = replace(ENTRY, table="steps", stack="kernels", low=0.0, high=0.05, devices=one)
    single = replace(single, tensor=one, pipeline=one, zero=1)
    several = replace(ENTRY, table="slower", stack="kernels", low=0.2, high=0.8)
    data = replace(several, table="data", high=0.5, tensor=one, pipeline=one)
    entries = [ENTRY, single, several, data]
    for stack in ("kernels", "flopwise"):
        assert asked(entries, stack=stack, devices=1, tensor=1, pipeline=1).basis == ("steps",)
        found = asked(entries, stack=stack)
        assert (found.basis, found.outside) == (("slower",), ())
        assert bounds(found) == pytest.approx([1.0, 1.8])
        assert asked(entries, stack=stack, tensor=1, pipeline=1).basis == ("data",)
    # What is known of no framework says nothing about one that nobody measured.
    assert asked(entries, stack="mine").basis == ("table",)


def test_a_stack_without_data_takes_all_that_was_measured_and_more() -> None:
    computed = replace(ENTRY, table="computed", stack="simulator", low=-0.6, high=0.6, measured=False)
    found = asked([ENTRY, computed], stack="mine")
    assert (found.basis, found.outside) == (("table",), ("stack mine",))
    assert width(found) == pytest.approx(1.5 * width(asked([ENTRY])))
    assert asked([ENTRY, computed], stack="simulator").low == pytest.approx(0.4)


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


@given(ENTRIES, st.sampled_from(DIMENSIONS[:5]), st.lists(st.integers(1, 10**12)))
def test_never_narrower_outside_and_wider_the_farther(entry: Evidence, dimension: str, values: list[int]) -> None:
    entries = [entry]
    for value in values:
        here = asked(entries, **{dimension: value})
        there = asked(entries, **{dimension: 2 * value})
        nearest = [min(beyond(getattr(entry, dimension), number) for entry in entries) for number in (value, 2 * value)]
        near, far = (here, there) if nearest[0] <= nearest[1] else (there, here)
        assert far.low <= near.low <= 1.0 <= near.high <= far.high


@given(st.lists(ENTRIES, min_size=1, max_size=4))
def test_what_the_data_lack_never_narrows(entries: list[Evidence]) -> None:
    known, unknown = asked(entries), asked(entries, architecture="Volta")
    assert unknown.low <= known.low <= 1.0 <= known.high <= unknown.high
    assert unknown.outside == (*known.outside, "architecture Volta")


def test_spans_hold_something() -> None:
    with pytest.raises(FlopwiseError, match="holds nothing"):
        Span(least=2, most=1)


# -- what ships -------------------------------------------------------------------------------------------------------


def _book(*, of_kernels: bool = False) -> dict[tuple[str, int], Evidence]:
    """The shipped entries by table and ZeRO stage: those of frameworks, or those of no framework at all."""
    entries = [entry for entry in load_evidence() if entry.stack != "dataflow"]
    return {(entry.table, entry.zero): entry for entry in entries if (entry.stack == "kernels") == of_kernels}


def test_the_shipped_evidence_covers_the_measured_stacks() -> None:
    book, kernels = _book(), _book(of_kernels=True)
    frameworks = [("mpt", 3), ("vtrain", 0), ("nanotron", 0), ("nanotron", 1), ("megatron", 0)]
    assert list(book)[:5] == frameworks
    assert {entry.stack for entry in book.values()} | {"flopwise", "automodel"} == set(stack_names())
    assert [table for (table, _), entry in book.items() if not entry.measured] == ["vtrain"]
    assert all(-0.5 < book[key].low < book[key].high < 0.5 for key in frameworks)
    for table in ("mpt", "vtrain", "nanotron", "megatron"):
        rows = sum(bool(case.fitted and case.step_s) for case in read_cases(table))
        assert sum(entry.n for (name, _), entry in book.items() if name == table) == rows
    assert list(kernels)[:5] == [("steps_h200", 0), ("mpt", 3), ("nanotron", 0), ("nanotron", 1), ("megatron", 0)]
    assert kernels["steps_h200", 0].devices == Span(least=1, most=1)
    # No framework of the tables was as fast as its kernels, but the one that hides its tensor ranks' exchanges.
    assert {table for (table, _), entry in kernels.items() if entry.low < 0} <= {"megatron-core", "korthikanti"}


def test_a_row_of_table_2_lies_in_its_interval_or_nearly() -> None:
    """DeepSpeed's ZeRO-3 was up to 4.7 times slower than its kernels' constants say; its interval must know."""
    wide = _book()["megatron-2", 3]
    found = asked(
        list(load_evidence()),
        stack="megatron-lm",
        architecture="Ampere",
        parameters=175 * 10**9,
        sequence_tokens=2048,
        devices=1536,
        tensor=1,
        pipeline=1,
        zero=3,
    )
    assert (found.basis, found.outside) == (("megatron-2",), ())
    assert found.high == pytest.approx(1 + wide.high)
    assert found.high > 3
