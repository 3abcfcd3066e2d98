"""NVML through ctypes: a card that does as it is told, one that refuses, and a real one where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from flopwise.profile.measure.nvml import NvmlDevice, open_nvml, visible_device
from tests.support.fake_nvml import BUS, UUID, FakeLibrary

READINGS: dict[str, tuple[str, object]] = {
    "name": ("nvmlDeviceGetName", "Card 1"),
    "driver_version": ("nvmlSystemGetDriverVersion", "580.95.05"),
    "energy_j": ("nvmlDeviceGetTotalEnergyConsumption", 5000.0),
    "power_w": ("nvmlDeviceGetPowerUsage", 650.0),
    "power_limit_w": ("nvmlDeviceGetEnforcedPowerLimit", 700.0),
    "clock_hz": ("nvmlDeviceGetClockInfo", 1485e6),
    "clock_boost_hz": ("nvmlDeviceGetMaxClockInfo", 1980e6),
    "temperature_c": ("nvmlDeviceGetTemperature", 61.0),
    "memory_total_bytes": ("nvmlDeviceGetMemoryInfo", 1000),
    "gpm_sample": ("nvmlGpmSampleGet", None),
}


def card(library: FakeLibrary, which: int | str = 1) -> NvmlDevice:
    nvml = open_nvml(library)
    assert nvml is not None
    device = nvml.device(which)
    assert device is not None
    return device


@pytest.mark.parametrize("reading", [name for name in READINGS if name != "gpm_sample"])
def test_every_reading_is_in_base_units(reading: str) -> None:
    assert getattr(card(FakeLibrary()), reading)() == pytest.approx(READINGS[reading][1])


@pytest.mark.parametrize("kind", ["refused", "missing"])
@pytest.mark.parametrize("reading", READINGS)
def test_what_the_driver_refuses_is_none(reading: str, kind: str) -> None:
    function = READINGS[reading][0]
    library = FakeLibrary(refused=[function]) if kind == "refused" else FakeLibrary(missing=[function])
    assert getattr(card(library), reading)() is None
    assert not library.gpm_samples, "a sample that could not be taken is given back"


@pytest.mark.parametrize("which", [UUID, UUID.removeprefix("GPU-"), BUS, 1])
def test_a_device_is_found_by_uuid_bus_or_number(which: int | str) -> None:
    assert card(FakeLibrary(), which).name() == "Card 1"


@pytest.mark.parametrize("which", [2, "GPU-none", "00000000:FF:00.0"])
def test_a_device_that_is_not_there_is_none(which: int | str) -> None:
    nvml = open_nvml(FakeLibrary())
    assert nvml is not None
    assert nvml.device(which) is None


def test_no_driver_no_library_of_it() -> None:
    assert open_nvml(FakeLibrary(refused=["nvmlInit_v2"])) is None
    assert open_nvml(object()) is None


def test_it_is_shut_down_once() -> None:
    library = FakeLibrary()
    nvml = open_nvml(library)
    assert nvml is not None
    nvml.close()
    assert library.calls == ["nvmlInit_v2", "nvmlShutdown"]


@pytest.mark.parametrize(
    ("listed", "index", "expected"),
    [
        (None, 3, 3),
        ("2,0", 0, 2),
        ("2,0", 1, 0),
        ("2, 0", 2, None),
        ("", 0, None),
        ("1,-1,0", 0, 1),
        ("1,-1,0", 1, None),
        (f"{UUID},0", 0, UUID),
        ("MIG-ab,GPU-cd", 1, "GPU-cd"),
        ("0,1", -1, None),
    ],
)
def test_cuda_numbers_only_the_devices_that_it_sees(listed: str | None, index: int, expected: int | str | None) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_device(index, environment) == expected


def test_reasons_under_their_old_name_too() -> None:
    assert card(FakeLibrary()).reason_bits() == 0x4
    older = FakeLibrary(missing=["nvmlDeviceGetCurrentClocksEventReasons"])
    assert card(older).reason_bits() == 0x4
    older.missing.add("nvmlDeviceGetCurrentClocksThrottleReasons")
    assert card(older).reason_bits() is None


def test_two_samples_make_shares_and_rates() -> None:
    library = FakeLibrary()
    library.gpm[3] = float("nan")
    device = card(library)
    assert device.has_gpm()
    first, second = device.gpm_sample(), device.gpm_sample()
    assert first is not None
    assert second is not None
    assert first.until(second) == pytest.approx(
        {
            "graphics_share": 0.99,
            "unit_share": 0.90,
            "matrix_share": 0.46,
            "half_matrix_share": 0.45,
            "dram_share": 0.13,
            "pcie_sent_bytes_per_s": 2 * 2**20,
            "nvlink_received_bytes_per_s": 3 * 2**20,
        }
    )
    first.free()
    second.free()
    assert not library.gpm_samples


def test_before_hopper_there_are_no_shares() -> None:
    assert not card(FakeLibrary(missing=["nvmlGpmQueryDeviceSupport"])).has_gpm()
    refusing = card(FakeLibrary(refused=["nvmlGpmMetricsGet"]))
    first, second = refusing.gpm_sample(), refusing.gpm_sample()
    assert first is not None
    assert second is not None
    assert first.until(second) == {}


@pytest.mark.gpu
def test_a_real_card_answers() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    nvml = open_nvml()
    assert nvml is not None
    properties = torch.cuda.get_device_properties(0)
    device = nvml.device(str(properties.uuid))
    assert device is not None
    assert device.name() == properties.name
    readings: list[Callable[[], float | int | None]] = [
        *(device.energy_j, device.power_w, device.power_limit_w, device.clock_hz, device.clock_boost_hz),
        *(device.temperature_c, device.memory_total_bytes),
    ]
    for reading in readings:
        value = reading()
        assert value is not None, reading
        assert value > 0, reading
    clock, boost, total = device.clock_hz(), device.clock_boost_hz(), device.memory_total_bytes()
    assert clock is not None
    assert boost is not None
    assert clock <= boost
    assert total is not None
    assert total >= properties.total_memory
    if properties.major >= 9:
        check_shares_of_products(device)
    nvml.close()


def check_shares_of_products(device: NvmlDevice) -> None:
    """While large products run, the matrix unit is busy; while nothing does, it is not."""
    import torch

    assert device.has_gpm()
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def share(work: Callable[[], object]) -> float:
        work()
        torch.cuda.synchronize()
        first = device.gpm_sample()
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:
            work()
            torch.cuda.synchronize()
        second = device.gpm_sample()
        assert first is not None
        assert second is not None
        values = first.until(second)
        first.free()
        second.free()
        return values["matrix_share"]

    assert share(lambda: [matrix @ matrix for _ in range(50)]) > 0.3
    # The sampler's own window may still hold the end of the products.
    time.sleep(0.5)
    assert share(lambda: time.sleep(0.05)) < 0.05
