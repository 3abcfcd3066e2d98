"""Technology, budgets and shares to a device, and the physical method on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import decode, to_toml
from flopwise.catalog.load import load_model
from flopwise.predict import Setup, step
from flopwise.references.deepflow import PUBLISHED
from flopwise.references.deepflow.machine import machine_of
from flopwise.references.design.technology import (
    Budget,
    CoreTechnology,
    MemoryTechnology,
    Shares,
    Technology,
    allot,
    from_deepflow,
    hardware_from_technology,
)
from flopwise.setup.hardware import Hardware
from flopwise.work.formats import POLICIES

GPU: dict[str, Any] = {
    "name": "paper-7nm",
    "core": {"energy_per_flop_j": {"bf16": 0.5e-12, "fp32": 4e-12}, "unit_flops": 0.2e12, "unit_area_mm2": 2.0},
    "shared": {"energy_per_bit_j": 0.1e-12, "bank_bytes": 32768, "bank_bytes_per_s": 64e9, "bank_area_mm2": 0.05},
    "l2": {"energy_per_bit_j": 0.5e-12, "bank_bytes": 524288, "bank_bytes_per_s": 64e9, "bank_area_mm2": 0.6},
    "dram": {"energy_per_bit_j": 4e-12, "bank_bytes": 16e9, "bank_bytes_per_s": 600e9, "bank_area_mm2": 10.0},
    "network_energy_per_bit_j": 5e-12,
}
TECHNOLOGY = decode(GPU, Technology, "paper-7nm")
POWER = Shares(core=0.6, shared=0.1, l2=0.1, dram=0.15, network=0.05)
BUDGET = Budget(power_w=400)


def test_watts_over_energy_make_rates_and_banks() -> None:
    found = allot(TECHNOLOGY, BUDGET, POWER)
    assert found.peak_flops["fp32"] == pytest.approx(240 / 4e-12)
    assert found.peak_flops["bf16"] == pytest.approx(240 / 0.5e-12)
    assert found.units == 300
    assert found.banks["dram"] == pytest.approx(60 / 32e-12 / 600e9)
    assert found.network_bytes_per_s == pytest.approx(20 / 40e-12)
    assert found.area_mm2["core"] == pytest.approx(600)


def test_the_reference_machine_comes_out_the_same() -> None:
    """The published shares add up to 1.09 with the network's, which a single device has no use for."""
    technology, budget = from_deepflow(PUBLISHED)
    power = PUBLISHED.power
    shares = Shares(core=power.core, dram=power.dram, l2=power.l2, shared=power.shared)
    device, machine = hardware_from_technology(technology, budget, shares).device, machine_of(PUBLISHED)
    assert device.peak_flops["fp32"].value == pytest.approx(machine.flops_per_s / 0.7)
    assert device.dram.size_bytes.value == pytest.approx(machine.dram_bytes)
    for name, size in (("l2", machine.l2_bytes), ("shared", machine.shared_bytes)):
        level = device.level(name)
        assert level is not None
        assert level.size_bytes.value == pytest.approx(size)


def test_every_number_names_where_it_comes_from() -> None:
    hardware = hardware_from_technology(TECHNOLOGY, BUDGET, POWER)
    kinds = {where: hardware.sources[key].kind for where, key in hardware.list_sources()}
    assert {kind for where, kind in kinds.items() if not where.startswith("efficiency")} == {"derived"}
    assert {kind for where, kind in kinds.items() if where.startswith("efficiency")} == {"estimated"}
    assert [network.bandwidth_bytes_per_s.value for network in hardware.networks] == [pytest.approx(0.5e12)]


def test_a_device_on_paper_is_a_file_like_any_other() -> None:
    import tomllib

    hardware = hardware_from_technology(TECHNOLOGY, BUDGET, POWER)
    assert decode(tomllib.loads(to_toml(hardware)), Hardware, "paper") == hardware


def test_less_area_than_power_asks_for_binds() -> None:
    area = Shares(core=0.5, shared=0.2, l2=0.2, dram=0.1)
    found = allot(TECHNOLOGY, Budget(power_w=400, area_mm2=400), POWER, area)
    assert found.area_mm2["core"] == pytest.approx(200)
    assert found.units == 100
    assert found.peak_flops["bf16"] == pytest.approx(100 * 0.2e12 * 8)
    # The DRAM's controllers need less than their 40 mm², so power binds there.
    assert found.banks["dram"] == pytest.approx(60 / 32e-12 / 600e9)
    assert sum(found.area_mm2.values()) <= 400


def test_what_does_not_fit_the_chip_is_refused() -> None:
    allot(TECHNOLOGY, Budget(power_w=400, area_mm2=900), POWER)
    with pytest.raises(FlopwiseError, match="mm² of a chip of 600") as told:
        allot(TECHNOLOGY, Budget(power_w=400, area_mm2=600), POWER)
    assert told.value.why is not None
    assert "core 600" in told.value.why
    with pytest.raises(FlopwiseError, match="area without an area"):
        allot(TECHNOLOGY, BUDGET, POWER, POWER)


def test_the_physical_method_predicts_an_lstm_on_it() -> None:
    """The same products on the same watts: within a third of the reference's time, and below the peak."""
    technology, budget = from_deepflow(PUBLISHED)
    shares = Shares(core=0.2592, dram=0.2592, l2=0.16896, shared=0.202752)
    hardware = hardware_from_technology(technology, budget, shares)
    setup = Setup(
        model=load_model("lstm-lm"),
        hardware=hardware,
        batch_sequences=512,
        micro_batch_sequences=512,
        formats=POLICIES["fp32"],
        recompute="none",
        optimizer="sgd",
    )
    prediction = step(setup)
    assert prediction.step_s == pytest.approx(302.9, rel=1 / 3)
    assert 0.4 < prediction.mfu < 0.76
    assert not prediction.fits
    assert any("estimated" in note for note in prediction.notes)


def test_more_power_is_never_slower() -> None:
    devices = [hardware_from_technology(TECHNOLOGY, Budget(power_w=watts), POWER) for watts in (100, 200, 400, 800)]
    setup = Setup(
        model=load_model("llama-3-1b"),
        hardware=devices[0],
        sequence_tokens=2048,
        batch_sequences=8,
        micro_batch_sequences=1,
        recompute="none",
    )
    times = [step(replace(setup, hardware=device)).step_s for device in devices]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"core": 0.0}, "the share of core is 0.0"),
        ({"l2": -0.1}, "the share of l2 is -0.1"),
        ({"dram": float("nan")}, "the share of dram is nan"),
        ({"network": -0.1}, "the share of network"),
        ({"core": 0.9}, "the shares add up to 1.3"),
    ],
)
def test_shares_are_positive_and_add_up_to_one_at_most(shares: dict[str, float], words: str) -> None:
    with pytest.raises(FlopwiseError) as told:
        replace(POWER, **shares)
    assert words in told.value.what
    assert told.value.hint


def test_rounded_shares_of_one_pass() -> None:
    Shares(core=0.1 + 0.2, shared=0.3, l2=0.3, dram=0.1 + 1e-12)


def test_bad_technology_is_refused() -> None:
    with pytest.raises(FlopwiseError, match="no energy per FLOP"):
        CoreTechnology(energy_per_flop_j={}, unit_flops=1e12)
    with pytest.raises(FlopwiseError, match="unknown number format 'fp7'"):
        CoreTechnology(energy_per_flop_j={"fp7": 1e-12}, unit_flops=1e12)
    with pytest.raises(FlopwiseError, match="unit_flops must be a positive number"):
        CoreTechnology(energy_per_flop_j={"bf16": 1e-12}, unit_flops=0)
    with pytest.raises(FlopwiseError, match="bank_bytes must be a positive number"):
        MemoryTechnology(energy_per_bit_j=1e-12, bank_bytes=-1, bank_bytes_per_s=1e9)
    with pytest.raises(FlopwiseError, match="power_w must be a positive number"):
        Budget(power_w=float("inf"))
    with pytest.raises(FlopwiseError, match="launch_s"):
        replace(TECHNOLOGY, launch_s=-1.0)
    with pytest.raises(FlopwiseError, match="cannot be called"):
        replace(TECHNOLOGY, name=" ")
    with pytest.raises(FlopwiseError, match="no number format of 3 bytes"):
        from_deepflow(replace(PUBLISHED, model=replace(PUBLISHED.model, element_bytes=3)))


def test_a_memory_too_small_to_be_one_is_refused() -> None:
    with pytest.raises(FlopwiseError, match="too small"):
        hardware_from_technology(TECHNOLOGY, Budget(power_w=1e-3), POWER)
