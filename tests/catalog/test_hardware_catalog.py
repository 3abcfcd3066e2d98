"""The hardware descriptions that come with the package: they decode, agree with themselves and with datasheets."""

from __future__ import annotations

import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import msgspec
import pytest

from flopwise.setup.hardware import Device, Hardware

FOLDER = Path(__file__).parents[2] / "src/flopwise/catalog/hardware"
FILES = sorted(FOLDER.glob("*.toml"))
MIB = 2**20
GIB = 2**30

REQUIRED = {
    "v100",
    "a100-40gb",
    "a100-80gb",
    "a100-pcie-40gb",
    "a100-pcie-80gb",
    "h100-sxm",
    "h100-pcie",
    "h100-nvl",
    "h200",
    "b200",
    "l40s",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "mi210",
    "mi250x",
    "mi300x",
    "trn1",
    "trn1-core",
    "trn2",
    "tpu-v5e",
    "tpu-v5p",
    *("gb200", "gb300", "b300", "mi325x", "mi355x", "tpu-v6e", "tpu-v7", "l4", "a10", "rtx-pro-6000", "h20", "gh200"),
    *("h800", "t4", "rtx-a6000", "rtx-6000-ada", "a10g", "rtx-pro-6000-workstation"),
}

# Operations that one unit's matrix engines do per clock in bf16 (fp16 on Volta): the whitepapers' figures.
OPERATIONS_PER_CLOCK = {
    "v100": 1024,
    "v100-16gb": 1024,
    "a100-40gb": 2048,
    "a100-80gb": 2048,
    "a100-pcie-40gb": 2048,
    "a100-pcie-80gb": 2048,
    "h100-sxm": 4096,
    "h100-efa": 4096,
    "h100-96gb": 4096,
    "h100-pcie": 4096,
    "h100-nvl": 4096,
    "h200": 4096,
    "b200": 8192,
    "l40s": 1024,
    "rtx-3090": 512,  # with fp32 accumulation, half of what the unit does with fp16 accumulation
    "rtx-4090": 512,
    "rtx-5090": 512,
    "mi210": 1024,
    "mi250x": 1024,
    "mi300x": 2048,
    "trn1": 2 * 2 * 128 * 128,  # the matrix engine ticks twice per clock of the others
    "trn1-core": 2 * 2 * 128 * 128,
    "tpu-v5e": 4 * 2 * 128 * 128,
    "tpu-v5p": 4 * 2 * 128 * 128,
    "h800": 4096,
    "gh200": 4096,
    "h20": 1024,
    "gb200": 8192,
    "gb300": 8192,
    "b300": 8192,
    "l4": 1024,
    "a10": 1024,
    "a10g": 512,
    "t4": 1024,
    "rtx-a6000": 1024,
    "rtx-6000-ada": 1024,
    "rtx-pro-6000": 1024,
    "rtx-pro-6000-workstation": 1024,
    "mi325x": 2048,
    "mi355x": 4096,
}

# name, number format, dense TFLOP/s
GOLDEN_PEAKS = [
    ("v100", "fp16", 125),
    ("v100", "fp32", 15.7),
    ("a100-40gb", "bf16", 312),
    ("a100-80gb", "bf16", 312),
    ("a100-80gb", "fp16", 312),
    ("a100-80gb", "tf32", 156),
    ("a100-80gb", "fp32", 19.5),
    ("a100-pcie-80gb", "bf16", 312),
    ("h100-sxm", "bf16", 989.5),
    ("h100-sxm", "fp8", 1979),
    ("h100-pcie", "bf16", 756.5),
    ("h100-pcie", "fp8", 1513),
    ("h100-nvl", "bf16", 835.5),
    ("h200", "bf16", 989.5),
    ("h200", "fp8", 1979),
    ("h200", "tf32", 494.5),
    ("b200", "bf16", 2250),
    ("b200", "fp8", 4500),
    ("b200", "nvfp4", 9000),
    ("l40s", "bf16", 362.05),
    ("rtx-3090", "bf16", 71.2),
    ("rtx-4090", "bf16", 165.2),
    ("rtx-4090", "fp8", 330.3),
    ("rtx-5090", "bf16", 209.5),
    ("mi210", "bf16", 181),
    ("mi250x", "bf16", 191.5),
    ("mi300x", "bf16", 1307.4),
    ("mi300x", "fp8", 2614.9),
    ("trn1-core", "bf16", 2 * 128 * 128 * 2.8e9 / 1e12),
    ("trn1", "bf16", 2 * 2 * 128 * 128 * 2.8e9 / 1e12),
    ("trn2", "bf16", 667),
    ("trn2", "fp8", 1299),
    ("tpu-v5e", "bf16", 197),
    ("tpu-v5p", "bf16", 459),
    ("tpu-v6e", "bf16", 918),
    ("tpu-v7", "bf16", 2307),
    ("tpu-v7", "fp8", 4614),
    ("gb200", "bf16", 180_000 / 72),
    ("gb200", "nvfp4", 720_000 / 72),
    ("gb300", "nvfp4", 1_080_000 / 72),
    ("b300", "bf16", 2250),
    ("b300", "nvfp4", 108_000 / 8),
    ("h20", "bf16", 148),
    ("h20", "fp8", 296),
    ("gh200", "bf16", 989.5),
    ("h800", "bf16", 989.5),
    ("l4", "bf16", 121),
    ("a10", "bf16", 125),
    ("a10g", "bf16", 70),
    ("t4", "fp16", 65),
    ("rtx-a6000", "bf16", 154.8),
    ("rtx-6000-ada", "fp8", 728.5),
    ("rtx-pro-6000", "bf16", 503.8),
    ("mi325x", "bf16", 1307.4),
    ("mi355x", "bf16", 2516.6),
    ("mi355x", "mxfp4", 10066.3),
]

# name, nominal bytes, GB/s of the main memory
GOLDEN_MEMORY = [
    ("v100", 32 * GIB, 900),
    ("v100-16gb", 16 * GIB, 900),
    ("a100-40gb", 40 * GIB, 1555),
    ("a100-80gb", 80 * GIB, 2039),
    ("a100-pcie-40gb", 40 * GIB, 1555),
    ("a100-pcie-80gb", 80 * GIB, 1935),
    ("h100-sxm", 81559 * MIB, 3350),
    ("h100-pcie", 81559 * MIB, 2039),
    ("h100-nvl", 94 * GIB, 3900),
    ("h200", 150_109_880_320, 4800),
    ("b200", 180 * GIB, 7700),
    ("l40s", 48 * GIB, 864),
    ("rtx-3090", 24 * GIB, 936),
    ("rtx-4090", 24 * GIB, 1008),
    ("rtx-5090", 32 * GIB, 1792),
    ("mi210", 64 * GIB, 1638.4),
    ("mi250x", 64 * GIB, 1638.4),
    ("mi300x", 192 * GIB, 5300),
    ("trn1", 32 * GIB, 820),
    ("trn1-core", 16 * GIB, 410),
    ("trn2", 96 * GIB, 2900),
    ("tpu-v5e", 16 * GIB, 819),
    ("tpu-v5p", 95 * GIB, 2765),
    ("tpu-v6e", 32 * 10**9, 1638),
    ("tpu-v7", 192 * GIB, 7380),
    ("gb200", 186 * GIB, 8000),
    ("gb300", 288 * GIB, 8000),
    ("b300", 288 * GIB, 8000),
    ("h20", 96 * GIB, 4000),
    ("gh200", 96 * GIB, 4000),
    ("h800", 81559 * MIB, 3350),
    ("l4", 24 * GIB, 300),
    ("a10", 24 * GIB, 600),
    ("a10g", 24 * GIB, 600),
    ("t4", 16 * GIB, 320),
    ("rtx-a6000", 48 * GIB, 768),
    ("rtx-6000-ada", 48 * GIB, 960),
    ("rtx-pro-6000", 96 * GIB, 1597),
    ("rtx-pro-6000-workstation", 96 * GIB, 1792),
    ("mi325x", 256 * GIB, 6000),
    ("mi355x", 288 * GIB, 8000),
]

# name, level of the network, devices, GB/s each way for one device
GOLDEN_NETWORKS = [
    ("v100", "nvlink", 8, 150),
    ("a100-80gb", "nvlink", 8, 300),
    ("h100-sxm", "nvlink", 8, 450),
    ("h200", "nvlink", 8, 450),
    ("b200", "nvlink", 8, 900),
    ("mi300x", "infinity fabric", 8, 448),
    ("tpu-v5p", "ici", 8960, 600),
    ("gb200", "nvlink", 72, 900),
    ("gb300", "nvlink", 72, 900),
    ("b300", "nvlink", 8, 900),
    ("h800", "nvlink", 8, 200),
    ("h20", "nvlink", 8, 450),
    ("tpu-v6e", "ici", 256, 400),
    ("tpu-v7", "ici", 9216, 600),
]


@cache
def load(name: str) -> Hardware:
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Hardware, strict=True)


def peak(device: Device, format_name: str) -> float | None:
    fact = device.peak_flops.get(format_name)
    return None if fact is None else fact.value


@pytest.fixture(params=[file.stem for file in FILES])
def hardware(request: pytest.FixtureRequest) -> Hardware:
    name = request.param
    assert isinstance(name, str)
    return load(name)


def test_required_devices_are_there() -> None:
    assert {file.stem for file in FILES} >= REQUIRED


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_decodes_and_is_named_after_its_device(file: Path) -> None:
    assert load(file.stem).name == file.stem


def test_names_and_aliases_are_unique() -> None:
    used = Counter(word for file in FILES for word in (file.stem, *load(file.stem).aliases))
    assert [word for word, times in used.items() if times > 1] == []
    assert all(word == word.lower() and " " not in word for word in used)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("h100", "h100-sxm"),
        ("a100", "a100-80gb"),
        ("3090", "rtx-3090"),
        ("4090", "rtx-4090"),
        ("5090", "rtx-5090"),
        ("mi250x-gcd", "mi250x"),
    ],
)
def test_usual_names_are_aliases(alias: str, name: str) -> None:
    assert alias in load(name).aliases


def test_every_source_is_cited_and_says_enough(hardware: Hardware) -> None:
    assert {key for _, key in hardware.list_sources()} == set(hardware.sources)
    for key, source in hardware.sources.items():
        assert source.title, key
        # What the maker does not print needs a word on where it comes from.
        assert source.kind == "datasheet" or source.note or source.url, key


def test_peaks_agree_among_formats(hardware: Hardware) -> None:
    device = hardware.device
    half = peak(device, "bf16") or peak(device, "fp16")
    assert half is not None
    assert peak(device, "fp16") in (None, half)
    for wider in ("tf32", "fp32", "fp64"):
        assert (peak(device, wider) or 0) <= half, wider
    for narrower in ("fp8", "int8"):
        assert (peak(device, narrower) or half) >= half, narrower
    eight = peak(device, "fp8")
    four = peak(device, "nvfp4") or peak(device, "mxfp4")
    assert four is None or (eight is not None and four >= eight)
    assert device.vector_flops is None or device.vector_flops.value <= half


def test_memory_gets_bigger_and_slower_outwards(hardware: Hardware) -> None:
    levels = hardware.device.memory
    assert len({level.name for level in levels}) == len(levels)
    rates = [level.bandwidth_bytes_per_s.value for level in levels if level.bandwidth_bytes_per_s is not None]
    assert rates == sorted(rates, reverse=True)
    outer = [level.size_bytes.value for level in levels if level.name in ("l2", "l3", "dram")]
    assert outer == sorted(outer)
    assert levels[-1].size_bytes.value > levels[0].size_bytes.value


def test_networks_widen_and_slow_down(hardware: Hardware) -> None:
    networks = hardware.networks
    assert networks, "every catalogued device knows how to reach another"
    reach = [network.devices or float("inf") for network in networks]
    assert reach == sorted(set(reach))
    rates = [network.bandwidth_bytes_per_s.value for network in networks]
    assert rates == sorted(rates, reverse=True)
    # From a hop between chips on a board to one through the adapters of two hosts.
    latencies = [network.latency_s.value for network in networks if network.latency_s is not None]
    assert len(latencies) == len(networks)
    assert latencies == sorted(latencies)
    assert latencies[0] >= 0.5e-6
    # The most is a step of rings over EFA, as a cluster measured it.
    assert latencies[-1] <= 100e-6
    dram = hardware.device.dram.bandwidth_bytes_per_s
    assert dram is not None
    assert rates[0] < dram.value
    if hardware.link is not None:
        assert hardware.link.bandwidth_bytes_per_s.value < dram.value
        both = hardware.link.both_ways_bytes_per_s
        assert both is None or both.value <= hardware.link.bandwidth_bytes_per_s.value


def test_peak_is_units_times_clock_times_rate(hardware: Hardware) -> None:
    device = hardware.device
    if device.clock_hz is None:
        assert hardware.name in ("trn2", "tpu-v6e", "tpu-v7"), (
            "for these alone no clock is published that gives the peak"
        )
        return
    half = peak(device, "bf16") or peak(device, "fp16")
    expected = device.units.value * device.clock_hz.value * OPERATIONS_PER_CLOCK[hardware.name]
    assert half == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(("name", "format_name", "tera"), GOLDEN_PEAKS)
def test_peak_is_the_published_one(name: str, format_name: str, tera: float) -> None:
    assert peak(load(name).device, format_name) == pytest.approx(tera * 1e12, rel=1e-6)


@pytest.mark.parametrize(("name", "size_bytes", "giga"), GOLDEN_MEMORY)
def test_main_memory_is_the_published_one(name: str, size_bytes: int, giga: float) -> None:
    dram = load(name).device.dram
    # Programs see up to 8 % less than the nominal size: error correction and their own share.
    assert 0.92 * size_bytes <= dram.size_bytes.value <= size_bytes
    assert dram.bandwidth_bytes_per_s is not None
    assert dram.bandwidth_bytes_per_s.value == pytest.approx(giga * 1e9, rel=0.01)


@pytest.mark.parametrize(("name", "level", "devices", "giga"), GOLDEN_NETWORKS)
def test_nearest_network_is_the_published_one(name: str, level: str, devices: int, giga: float) -> None:
    nearest = load(name).networks[0]
    assert (nearest.name, nearest.devices) == (level, devices)
    assert nearest.bandwidth_bytes_per_s.value == pytest.approx(giga * 1e9)


def test_cards_without_nvlink_do_not_reach_their_slots_rate(hardware: Hardware) -> None:
    """Messages among the cards of a server pass its bridges and its memory, as eight RTX PRO 6000 were measured to."""
    for network in hardware.networks:
        if network.name == "pcie":
            assert (
                network.reached is not None or network.sustained_bytes_per_s < 0.5 * network.bandwidth_bytes_per_s.value
            )


def test_volta_has_no_bf16() -> None:
    assert "bf16" not in load("v100").device.peak_flops


def test_h200_link_is_measured() -> None:
    hardware = load("h200")
    assert hardware.link is not None
    assert hardware.link.bandwidth_bytes_per_s.value == pytest.approx(55.5e9)
    assert hardware.link.both_ways_bytes_per_s is not None
    assert hardware.link.both_ways_bytes_per_s.value == pytest.approx(50.4e9)
    assert hardware.sources[hardware.link.bandwidth_bytes_per_s.source].kind == "measured"


def test_parts_are_halves_of_their_chips() -> None:
    core, chip = load("trn1-core").device, load("trn1").device
    assert {name: 2 * fact.value for name, fact in core.peak_flops.items()} == pytest.approx(
        {name: fact.value for name, fact in chip.peak_flops.items()}
    )
    assert 2 * core.dram.size_bytes.value == chip.dram.size_bytes.value
    assert "one GCD of two" in load("mi250x").title
    assert "one NeuronCore of two" in load("trn1-core").title
