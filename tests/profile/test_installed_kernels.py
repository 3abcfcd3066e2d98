"""Which attention a machine's rates are of."""

from __future__ import annotations

from importlib import metadata

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model
from flopwise.plan.device.explain import notes
from flopwise.predict.kernels.attention import attention_share
from flopwise.profile.measure import this_machine
from flopwise.profile.measure.this_machine import FLASH_4, with_installed
from flopwise.setup.efficiency import AttentionEfficiency


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
    for tokens in (512, 8192, 65536):
        assert attention_share(here.efficiency, "forward", tokens, 128) == pytest.approx(
            1.09 * attention_share(named.efficiency, "forward", tokens, 128)
        )
        assert attention_share(here.efficiency, "backward", tokens, 128) == pytest.approx(
            1.13 * attention_share(named.efficiency, "backward", tokens, 128)
        )
    told = "attention is predicted as flash-4, which is installed here"
    assert told in notes(load_model("gpt2"), here, 128)
    assert told not in notes(load_model("gpt2"), named, 128)


def test_flash_attention_2_and_other_cards_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash-attn")
    assert with_installed(load_hardware("h200")) == load_hardware("h200")
    install(monkeypatch, FLASH_4)
    # Nobody has compared it on an H100, and an A100 cannot run it.
    for name in ("h100-sxm", "a100-80gb"):
        assert with_installed(load_hardware(name)) == load_hardware(name)


def test_a_factor_that_cannot_be_is_refused() -> None:
    with pytest.raises(FlopwiseError, match=r"others\.flash-4"):
        AttentionEfficiency(
            source="x", forward=((128.0, 0.5),), backward=((128.0, 0.5),), others={"flash-4": (0.0, 1.1)}
        )
