"""One measured step as the anchor: what it scales, that it is met, and what it leaves unknown."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model, load_stack
from flopwise.predict.anchor import (
    KINDS,
    Anchor,
    anchored_interval,
    anchored_stack,
    find_anchor,
    own_stack,
    part_slopes,
)
from flopwise.predict.choose import choose
from flopwise.predict.interval import Scatter
from flopwise.predict.step import step
from flopwise.setup.parallel import Parallel, parse_parallel
from flopwise.setup.setup import SettledSetup, Setup
from flopwise.setup.trained import TrainedWords


def settled(words: str = "dp8 zero3", seq: int = 8192, batch: int = 16, micro: int = 2, **more: object) -> SettledSetup:
    parallel = parse_parallel(words, None) if words else Parallel()
    asked = Setup(
        model=load_model("llama-3.1-8b"),
        hardware=load_hardware("h100-sxm"),
        parallel=parallel,
        sequence_tokens=seq,
        batch_sequences=batch,
        micro_batch_sequences=micro,
        recompute="none",
        **more,  # type: ignore[arg-type]
    )
    return choose([asked])[0].setup


def anchored(setup: SettledSetup, off: float) -> Anchor:
    """An anchor whose step took so many times as long as predicted."""
    return find_anchor(setup, off * step(setup).step_s, "made up")


@settings(max_examples=10, deadline=None)
@given(st.floats(0.7, 3.0), st.sampled_from(["dp8 zero3", "tp8 sp", "dp2 tp2 pp2"]), st.sampled_from([4096, 16_384]))
def test_the_anchor_is_met(off: float, words: str, seq: int) -> None:
    setup = settled(words, seq, batch=32, micro=2)
    found = anchored(setup, off)
    again = step(replace(setup, stack=own_stack(found)))
    assert again.step_s == pytest.approx(found.step_s, rel=1e-3)
    assert found.off == pytest.approx(off, rel=1e-6)
    others = step(replace(setup, stack=anchored_stack(found, setup.hardware)))
    assert others.step_s == pytest.approx(found.step_s * off ** (found.counted - 1), rel=1e-3)


def test_heads_of_some_tokens_stay_so() -> None:
    model = load_model("llama-3.1-8b", {"loss_share": 0.3})
    setup = replace(settled(), model=model)
    found = anchored(setup, 1.5)
    assert step(replace(setup, stack=own_stack(found))).step_s == pytest.approx(found.step_s, rel=1e-3)
    with pytest.raises(FlopwiseError, match=r"loss_share = 0\.3 behind megatron-core"):
        replace(setup, stack=load_stack("megatron-core"))
    # Of what is hidden nobody said how much.
    masked = replace(setup, model=TrainedWords(task="masked").of(load_model("bert-base")), sequence_tokens=512)
    assert masked.model.loss_share == 0.15  # type: ignore[union-attr]
    assert replace(masked, stack=load_stack("megatron-core")).model.loss_share == 1.0  # type: ignore[union-attr]


def test_what_counts_for_others_is_what_lies_beyond_the_scatter_of_rows() -> None:
    """James and Stein's estimate by hand, 1 − (scatter ÷ off)²: nothing within the scatter, more far from its rows."""
    setup, around = settled(), Scatter(within=0.1 * 1.2816, doublings=0.0)

    def counted(off: float, scatter: Scatter | None) -> float:
        return find_anchor(setup, math.exp(off) * step(setup).step_s, "made up", scatter).counted

    for off in (0.2, -0.2, 0.4):
        assert counted(off, around) == pytest.approx(1 - (0.1 / off) ** 2, rel=1e-3)
    assert counted(0.09, around) == counted(-0.05, around) == 0.0
    assert counted(0.05, replace(around, doublings=5.0)) == pytest.approx(
        1 / (1 + (0.1 * 1.2816 / (5 * 0.035)) ** 2), rel=1e-3
    )
    assert counted(0.05, None) == counted(0.5, None) == 1.0


def test_with_a_stack_its_constants_are_what_is_scaled() -> None:
    stack = load_stack("nanotron")
    setup = settled("dp4 tp2 sp", stack=stack)
    found = anchored(setup, 1.3)
    scaled = anchored_stack(found, setup.hardware)
    assert scaled.value("products") == pytest.approx(stack.value("products") * found.factors["products"])
    assert scaled.value("tensor_call_s") == pytest.approx(stack.value("tensor_call_s") * found.factors["host"])
    assert step(replace(setup, stack=own_stack(found))).step_s == pytest.approx(found.step_s, rel=1e-3)


def test_what_it_scales_is_what_the_step_is_of() -> None:
    """Long sequences tell of attention, short ones of products; one device says nothing of a network."""
    short, long = anchored(settled(seq=2048), 1.3), anchored(settled(seq=131_072, batch=8, micro=1), 1.3)
    assert short.factors["products"] > short.factors["streaming"] > 1
    assert long.factors["attention"] > short.factors["attention"] > 1
    assert long.factors["products"] < short.factors["products"]
    alone = anchored(settled("", batch=2), 1.3)
    assert alone.factors["network"] == pytest.approx(1)
    # Products and the others share what the step is longer by as their shares of it and their spreads say.
    shares = part_slopes(settled(seq=2048), anchored_stack(short, load_hardware("h100-sxm")))
    assert sum(shares.values()) <= 1.001
    assert set(shares) == set(KINDS)


def half(anchor: Anchor, setup: SettledSetup) -> float:
    seen = step(replace(setup, stack=anchored_stack(anchor, setup.hardware)))
    found = anchored_interval(anchor, seen, setup, setup.hardware)
    assert found.low_s <= seen.step_s <= found.high_s
    assert seen.hfu * seen.step_s / found.low_s <= 1 + 1e-9
    return math.log(found.high_s / seen.step_s)


def test_the_interval_grows_with_what_the_anchor_did_not_have() -> None:
    anchor = anchored(settled(), 1.4)
    same, longer = half(anchor, settled()), half(anchor, settled(seq=131_072, batch=8, micro=1))
    more, other = half(anchor, settled("dp64 zero3", batch=128)), half(anchor, settled("dp8 tp8 sp", batch=128))
    assert 0.04 < same < 0.1
    assert same < more < other
    assert longer > same + 0.1
    hardware = load_hardware("a100-80gb")
    assert half(anchor, replace(settled(), hardware=hardware)) > same + 0.1
    told = anchored_interval(
        anchor, step(settled("dp8 tp8 sp", batch=128)), settled("dp8 tp8 sp"), anchor.setup.hardware
    )
    assert told.outside == ("tensor ranks",)
    assert told.basis == "the measured step made up"


def test_rows_of_the_stack_bound_what_the_anchor_had_nothing_of() -> None:
    """Of another way to split the work the stack's rows scatter by 6 %: so much is left, and no ±25 % for new ranks."""
    around = Scatter(within=0.06, doublings=0.0)
    anchor = find_anchor(settled(), 1.02 * step(settled()).step_s, "made up", around)
    other = settled("dp8 tp8 sp", batch=128)
    seen = step(replace(other, stack=anchored_stack(anchor, other.hardware)))
    wide, known = (anchored_interval(anchor, seen, other, other.hardware, one) for one in (None, around))
    assert wide.outside
    assert not known.outside
    assert math.log(wide.high_s / seen.step_s) > 0.2
    assert math.log(known.high_s / seen.step_s) == pytest.approx(0.06)
    farther = anchored_interval(anchor, seen, other, other.hardware, replace(around, doublings=2.0))
    assert math.log(farther.high_s / known.high_s) == pytest.approx(2 * 0.035)


def test_a_step_of_something_else_is_refused() -> None:
    for off in (0.05, 20.0):
        with pytest.raises(FlopwiseError, match="are predicted of it"):
            anchored(settled(), off)
