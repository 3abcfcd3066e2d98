"""Counters over a window: a told card with a told clock, a told /sys, and this process."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import fields
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_json
from flopwise.profile.measure.nvml import open_nvml
from flopwise.profile.measure.sampling import (
    CounterRecord,
    Counters,
    CpuSampler,
    NoSampler,
    Sampler,
    counters_values,
    read_counter_record,
    sampler_for,
)
from flopwise.records.profile import METRIC
from tests.support.fake_nvml import UUID, FakeLibrary

NEVER_S = 3600.0
"""Between two samples: only those at the start and the end are taken."""


def told(*values: float) -> Callable[[], float]:
    """One value for each call, the last for ever."""
    rest = chain(values, repeat(values[-1]))
    return lambda: next(rest)


def told_whole(*values: int) -> Callable[[], int]:
    rest = chain(values, repeat(values[-1]))
    return lambda: next(rest)


def window(library: FakeLibrary, seconds: float, every_s: float = NEVER_S) -> Counters:
    nvml = open_nvml(library)
    assert nvml is not None
    device = nvml.device(UUID)
    assert device is not None
    sampler = Sampler(device, every_s, clock=told(100.0, 100.0 + seconds))
    sampler.start()
    counters = sampler.stop()
    assert not library.gpm_samples, "every sample is given back"
    return counters


def test_energy_over_time_is_the_power_of_a_long_window() -> None:
    library = FakeLibrary()
    library.energy_mj = told_whole(1_000_000, 2_200_000)
    counters = window(library, 2.0)
    assert counters.energy_j == pytest.approx(1200)
    assert counters.power_w == pytest.approx(600)
    assert counters.power_limit_w == pytest.approx(700)
    assert counters.seconds == pytest.approx(2)


def test_a_short_window_has_the_mean_of_its_samples() -> None:
    library = FakeLibrary()
    library.energy_mj = told_whole(1_000_000, 1_400_000)
    library.power_mw = told_whole(500_000, 700_000)
    counters = window(library, 0.5)
    assert counters.energy_j is None
    assert counters.power_w == pytest.approx(600)


def test_a_counter_that_began_again_says_nothing() -> None:
    library = FakeLibrary()
    library.energy_mj = told_whole(1_000_000, 0)
    counters = window(library, 2.0)
    assert counters.energy_j is None
    assert counters.power_w == pytest.approx(650)


def test_what_a_limit_took_is_share_times_depth() -> None:
    library = FakeLibrary()
    library.reason_bits = told_whole(0x4 | 0x20, 0x1)
    library.clock_mhz = told_whole(990, 1980)
    library.temperature = told_whole(80, 60)
    counters = window(library, 1.0)
    assert counters.throttle_share == pytest.approx(0.5)
    # Half the time at half of 1980 MHz.
    assert counters.throttle_loss == pytest.approx(0.25)
    assert counters.clock_mean_hz == pytest.approx(1485e6)
    assert counters.clock_boost_hz == pytest.approx(1980e6)
    assert counters.reasons == {"idle": 0.5, "software power cap": 0.5, "software thermal": 0.5}
    assert counters.temperature_c == 80
    assert counters.samples == 2


def test_a_clock_that_somebody_asked_for_is_no_throttling() -> None:
    library = FakeLibrary()
    library.reason_bits = lambda: 0x2 | 0x10
    counters = window(library, 1.0)
    assert (counters.throttle_share, counters.throttle_loss) == (0, 0)


def test_shares_come_from_the_counters_of_the_card() -> None:
    counters = window(FakeLibrary(), 1.0)
    assert counters.matrix_share == pytest.approx(0.46)
    assert counters.dram_share == pytest.approx(0.13)
    assert counters.unit_share == pytest.approx(0.90)
    assert counters.occupancy == pytest.approx(0.25)


def test_a_card_that_refuses_everything_leaves_everything_out() -> None:
    handles = {"nvmlInit_v2", "nvmlDeviceGetHandleByUUID"}
    library = FakeLibrary()
    library.refused = {name.removeprefix("do_") for name in dir(FakeLibrary) if name.startswith("do_")} - handles
    counters = window(library, 2.0)
    assert counters == Counters(seconds=counters.seconds, samples=2)


def test_a_window_is_sampled_while_it_is_open_and_may_be_opened_again() -> None:
    library = FakeLibrary()
    nvml = open_nvml(library)
    assert nvml is not None
    sampler = sampler_for("cuda", UUID, every_s=0.001, nvml=nvml)
    assert sampler.device_name == "Card 1"
    assert sampler.driver_version == "580.95.05"
    for _ in range(2):
        calls = len(library.calls)
        sampler.start()
        while library.calls[calls:].count("nvmlDeviceGetClockInfo") < 5:
            time.sleep(0.001)
        assert 6 <= sampler.stop().samples < 1000


def test_a_torch_index_is_looked_up_among_the_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = open_nvml(FakeLibrary())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert sampler_for("cuda", 0, nvml=nvml).device_name == "Card 1"
    assert isinstance(sampler_for("cuda", 1, nvml=nvml), NoSampler)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert sampler_for("cuda", 0, nvml=nvml).device_name == "Card 0"


def test_where_nothing_counts_nothing_is_known() -> None:
    sampler = sampler_for("mps")
    sampler.start()
    assert sampler.stop() == Counters()
    assert counters_values(Counters(), 1.0, steps=1) == {}


def system(root: Path, energy: dict[str, int]) -> None:
    """A /sys and /proc of a machine with one core that has frequencies, and packages with so much energy used."""
    for name, microjoules in energy.items():
        folder = root / "sys/class/powercap" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "energy_uj").write_text(f"{microjoules}\n")
        (folder / "max_energy_range_uj").write_text("10000000\n")
    cores = root / "sys/devices/system/cpu/cpu0/cpufreq"
    cores.mkdir(parents=True, exist_ok=True)
    (cores / "scaling_cur_freq").write_text("2500000\n")
    (cores / "cpuinfo_max_freq").write_text("3500000\n")


def test_the_energy_of_packages_goes_round_and_their_parts_are_not_added(tmp_path: Path) -> None:
    system(tmp_path, {"intel-rapl:0": 9_000_000, "intel-rapl:0:0": 0, "intel-rapl:1": 1_000_000})
    sampler = CpuSampler(NEVER_S, root=tmp_path, clock=told(0.0, 2.0))
    sampler.start()
    system(tmp_path, {"intel-rapl:0": 500_000, "intel-rapl:0:0": 400_000, "intel-rapl:1": 3_500_000})
    counters = sampler.stop()
    # 1 J to the end and 0.5 J from the beginning, and 2.5 J of the other.
    assert counters.energy_j == pytest.approx(4.0)
    assert counters.power_w == pytest.approx(2.0)
    assert counters.clock_mean_hz == pytest.approx(2.5e9)
    assert counters.clock_boost_hz == pytest.approx(3.5e9)


def test_without_frequencies_the_processor_table_is_read(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model name : x\ncpu MHz\t\t: 2000.5\n\ncpu MHz\t\t: 3000.5\n")
    sampler = CpuSampler(NEVER_S, root=tmp_path)
    sampler.start()
    counters = sampler.stop()
    assert counters.clock_mean_hz == pytest.approx(2500.5e6)
    assert (counters.energy_j, counters.power_w, counters.clock_boost_hz) == (None, None, None)


def test_a_machine_that_tells_nothing_still_knows_its_process(tmp_path: Path) -> None:
    sampler = CpuSampler(NEVER_S, root=tmp_path)
    sampler.start()
    counters = sampler.stop()
    assert counters.clock_mean_hz is None
    assert counters.resident_peak_bytes is not None
    assert 2**20 < counters.resident_peak_bytes < 2**40
    assert counters.context_switches is not None
    assert counters.context_switches >= 0


def test_counters_of_the_card_need_a_fifth_of_a_second() -> None:
    assert window(FakeLibrary(), 0.1).matrix_share is None
    assert window(FakeLibrary(), 0.25).matrix_share is not None


def test_counters_under_the_names_of_a_profile() -> None:
    counters = Counters(
        seconds=2.0, energy_j=1200.0, power_w=600.0, matrix_share=0.5, dram_share=0.25, unit_share=0.9, samples=20
    )
    values = counters_values(counters, 0.4, steps=4)
    assert {name: value.value for name, value in values.items()} == pytest.approx(
        {"matrix_active_s": 0.25, "mbu": 0.3125, "unit_share": 0.9, "power_w": 600.0, "energy_j": 300.0}
    )
    assert {value.source for value in values.values()} == {"measured"}
    assert "energy_j" not in counters_values(counters, 0.4)


def test_every_counter_that_a_profile_has_a_name_for_is_passed_on() -> None:
    names = {item.name for item in fields(Counters)} & set(METRIC)
    ones: dict[str, Any] = dict.fromkeys(names, 1.0)
    everything = Counters(**ones, matrix_share=1.0, dram_share=1.0)
    values = counters_values(everything, 1.0, steps=1)
    assert set(values) == names | {"matrix_active_s", "mbu"}
    assert all(math.isclose(value.value, 1.0) for value in values.values())


def test_a_record_is_read_back_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    record = CounterRecord(rank=3, steps=7, window="steady", device="Card 1", counters=window(FakeLibrary(), 1.5))
    path = tmp_path / "counters-rank3.json"
    path.write_text(to_json(record))
    assert read_counter_record(path) == record
    for damaged in ("{", "[]", json.dumps({"rank": 0}), to_json(record).replace("steady", "other")):
        path.write_text(damaged)
        with pytest.raises(FlopwiseError, match=r"counters-rank3\.json"):
            read_counter_record(path)
