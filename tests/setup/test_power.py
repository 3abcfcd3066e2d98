"""A card under a power limit: compute-bound kernels slow down with it, those that are bound by bytes do not."""

from __future__ import annotations

from itertools import pairwise

import pytest

import flopwise as fw
from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import catalogue_word, load_hardware
from flopwise.setup.power import LEAST, at_power, rate_share


def test_a_limit_is_said_in_the_name_or_beside_it() -> None:
    named = fw.predict("llama-3-8b", on="H100@500W", seq="4k", batch=8)
    beside = fw.predict("llama-3-8b", on="h100-sxm", power="500W", seq="4k", batch=8)
    assert named.step_s == beside.step_s
    assert named.hardware == beside.hardware == "h100-sxm@500W"
    assert any("estimated" in note and "matrix products" in note for note in named.notes)
    assert catalogue_word("H100@500w") == "h100-sxm@500W"
    whole = fw.predict("llama-3-8b", on="h100-sxm", seq="4k", batch=8)
    assert load_hardware("h100-sxm@700W") == load_hardware("h100-sxm")
    assert 1.1 * whole.step_s < named.step_s < 700 / 500 * whole.step_s


def test_the_rate_falls_between_the_cube_root_and_linearly() -> None:
    for share in (0.4, 0.6, 0.9):
        assert share < rate_share(share) < share ** (1 / 3)
    assert rate_share(1.0) == 1.0


@pytest.mark.parametrize("name", ["h100-sxm", "a100-pcie-80gb", "gb300", "mi325x", "l4", "rtx-3090"])
def test_less_power_is_never_faster(name: str) -> None:
    card = load_hardware(name)
    assert card.device.power_w is not None
    whole = card.device.power_w.value
    steps = [
        fw.predict("llama-3-1b", on=at_power(card, share * whole), seq="1k", batch=1, micro=1).step_s
        for share in (1.0, 0.9, 0.7, LEAST)
    ]
    assert all(later > before for before, later in pairwise(steps))
    # What is bound by bytes keeps its rate.
    assert at_power(card, 0.5 * whole).efficiency.memory == card.efficiency.memory


def test_an_a100_is_between_its_two_cards() -> None:
    """The same chip at 400 and 300 W, as measured in steps; the law was told from them, within 5 %."""
    limited = load_hardware("a100-80gb@300W").efficiency.gemm.sustained
    assert limited == pytest.approx(load_hardware("a100-pcie-80gb").efficiency.gemm.sustained, rel=0.05)


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ("h100-sxm@900W", "cannot be limited to 900 W"),
        ("h100-sxm@100W", "cannot be limited to 100 W"),
        ("tpu-v5p@100W", "tpu-v5p at 100 W"),
        ("h100-sxm@fastW", "is no power limit"),
        ("h100-sxm@500W@400W", "limited to 500 W already"),
        ("h101@500W", "no hardware is called"),
    ],
)
def test_limits_that_cannot_be_are_refused(on: str, words: str) -> None:
    with pytest.raises(FlopwiseError, match=words):
        fw.predict("llama-3-1b", on=on)
    with pytest.raises(FlopwiseError, match="limited to 500 W already"):
        fw.predict("llama-3-1b", on="h100-sxm@500W", power="400W")
    assert fw.predict("llama-3-1b", on="h100-sxm@500W", power="500W").hardware == "h100-sxm@500W"
    with pytest.raises(FlopwiseError, match="power"):
        fw.predict("llama-3-1b", on="h100-sxm", power="a lot")


@pytest.mark.parametrize(("name", "told"), [("h100-sxm@500", "'500'"), ("h100@5kW", "'5kW'"), ("a100@", "nothing")])
def test_what_follows_an_at_is_told_to_be_watts(name: str, told: str) -> None:
    with pytest.raises(FlopwiseError, match=f"{told} is no power limit") as caught:
        load_hardware(name)
    assert caught.value.hint == f"{name.partition('@')[0]}@500W"


def test_a_device_nobody_knows_stays_unknown_with_a_limit() -> None:
    with pytest.raises(FlopwiseError, match="no hardware is called 'h1000@500'"):
        load_hardware("h1000@500")
