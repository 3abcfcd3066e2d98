"""Which attention a machine's rates are of."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model
from flopwise.plan.device.explain import notes
from flopwise.predict.kernels.attention import Direction, attention_share
from flopwise.profile.measure import this_machine
from flopwise.profile.measure.this_machine import FLASH_4, with_installed
from flopwise.setup.efficiency import AttentionEfficiency

WAYS: tuple[Direction, ...] = ("forward", "backward")


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def distribution(name: str) -> str:
        if name not in names:
            raise metadata.PackageNotFoundError(name)
        return name

    monkeypatch.setattr(metadata, "distribution", distribution)


def test_an_h200_with_flash_attention_4_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    named = load_hardware("h200")
    monkeypatch.setattr(this_machine, "gpu_name", lambda: "NVIDIA H200")
    install(monkeypatch, FLASH_4)
    here = this_machine.this_machine()
    assert (named.efficiency.attention.kernel, here.efficiency.attention.kernel) == ("cudnn", "flash-4")
    # As timed on one: TFLOP/s of cuDNN's kernels and of these, forward and backward.
    for tokens, *rates in ((8192, (558, 606), (477, 538)), (65536, (590, 648), (531, 598))):
        for direction, (before, after) in zip(WAYS, rates, strict=True):
            shares = [attention_share(one.efficiency.attention, direction, tokens, 128) for one in (named, here)]
            assert shares[1] / shares[0] == pytest.approx(after / before, rel=0.015)
    told = "attention is predicted by the rates of "
    assert told + "flash-4" in notes(load_model("gpt2"), here, 128)
    assert told + "cudnn" in notes(load_model("gpt2"), named, 128)


def test_flash_attention_2_and_other_cards_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash-attn")
    assert with_installed(load_hardware("h200")) == load_hardware("h200")
    install(monkeypatch, FLASH_4)
    # Nobody has compared it on an H100, and an A100 cannot run it.
    for name in ("h100-sxm", "a100-80gb"):
        assert with_installed(load_hardware(name)) == load_hardware(name)


def test_rates_of_one_family_in_two_places_are_refused() -> None:
    rates = AttentionEfficiency(source="x", forward=((128.0, 0.5),), backward=((128.0, 0.5),))
    with pytest.raises(FlopwiseError, match=r"others\.flash-4"):
        replace(rates, kernel="flash-4", others={"flash-4": rates})
    with pytest.raises(FlopwiseError, match="flash-9"):
        replace(rates, others={"flash-9": rates})
