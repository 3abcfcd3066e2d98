"""Every device of the catalogue has a host, predicts and plans a model, and is the faster the more it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import flopwise as fw
from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import hardware_names, load_hardware
from flopwise.setup.hardware import Fact, Hardware

NAMES = hardware_names()


@pytest.mark.parametrize("name", NAMES)
def test_every_device_has_a_host_and_predicts(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.host is not None
    assert hardware.host.memory_bytes is not None
    assert 2**33 <= hardware.host.memory_bytes.value <= 2**39
    assert 0.1 < fw.predict("llama-3-1b", on=name, seq="2k", batch=8).mfu < 0.9


@pytest.mark.parametrize("name", ["h100-sxm", "gb200", "t4", "mi355x", "tpu-v6e", "h200"])
def test_what_does_not_fit_is_streamed_through_the_host(name: str) -> None:
    hardware = load_hardware(name)
    plan = fw.plan("smollm2-360m", on=name, seq="1k", device_mem="2GiB", precision="bf16" if name != "t4" else None)
    assert plan.forecast.host_total > 0
    assert hardware.host is not None
    assert hardware.host.memory_bytes is not None
    kind = hardware.sources[hardware.host.memory_bytes.source].kind
    assert any("usual machines" in note for note in plan.notes) == (kind != "measured")


def grown(hardware: Hardware, **device: Any) -> Hardware:
    return replace(hardware, device=replace(hardware.device, **device))


def more(fact: Fact | None, factor: float = 1.3) -> Fact:
    assert fact is not None
    return replace(fact, value=factor * fact.value)


@pytest.mark.parametrize("name", NAMES)
def test_more_of_anything_is_never_slower(name: str) -> None:
    hardware = load_hardware(name)
    device = hardware.device
    *levels, dram = device.memory
    changes: list[dict[str, Any]] = [
        {"peak_flops": {key: more(fact) for key, fact in device.peak_flops.items()}},
        {"memory": (*levels, replace(dram, bandwidth_bytes_per_s=more(dram.bandwidth_bytes_per_s)))},
        {"memory": (*levels, replace(dram, size_bytes=more(dram.size_bytes)))},
    ]
    usual = fw.predict("llama-3-1b", on=hardware, seq="2k", batch=16).step_s
    for change in changes:
        # Of micro-batches the largest that fits is taken, which may be a hair slower than a smaller one.
        assert fw.predict("llama-3-1b", on=grown(hardware, **change), seq="2k", batch=16).step_s <= usual * 1.001


# -- narrow formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if "nvfp4" in load_hardware(name).device.peak_flops])
def test_narrower_products_are_faster_where_units_multiply_in_them(name: str) -> None:
    steps = {
        precision: fw.predict("llama-3-8b", on=name, devices=8, seq="8k", batch=64, precision=precision)
        for precision in ("bf16", "fp8", "mxfp8", "nvfp4")
    }
    assert steps["bf16"].step_s > steps["fp8"].step_s > steps["nvfp4"].step_s
    assert steps["mxfp8"].step_s < steps["bf16"].step_s
    assert steps["nvfp4"].peak_format == "nvfp4"
    # Activations and state are in bf16 all the same.
    assert steps["nvfp4"].device_bytes.weights == steps["bf16"].device_bytes.weights


@pytest.mark.parametrize(("name", "precision"), [("h100-sxm", "nvfp4"), ("h200", "mxfp8"), ("a100-80gb", "fp8")])
def test_a_format_without_a_peak_is_refused_with_what_there_is(name: str, precision: str) -> None:
    with pytest.raises(FlopwiseError, match=f"{name} has no peak for {precision} matrix products") as caught:
        fw.predict("llama-3-8b", on=name, precision=precision)
    assert "bf16" in str(caught.value.why)


def test_flopwises_own_trainer_does_not_plan_what_it_cannot_run() -> None:
    with pytest.raises(FlopwiseError, match="cannot multiply in nvfp4"):
        fw.plan("llama-3-1b", on="b200", seq="2k", precision="nvfp4")
