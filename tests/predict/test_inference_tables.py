"""Kernels of inference engines, timed in short bursts on cool cards: their shapes and ratios, not their levels.

`benchmarks/data/inference_tables.csv` is made from the tables of ai-dynamo/aiconfigurator 095f58a (Apache-2.0): the
fastest causal attention of each length, heads of 128, forward; the median of products with all sides from 4096 on.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from flopwise.catalog.load import load_hardware
from flopwise.predict.kernels.attention import attention_times

FILE = Path(__file__).parents[2] / "benchmarks/data/inference_tables.csv"
BLACKWELL = ("b200", "gb200", "b300", "gb300")
TRAINED_FP8 = 1.5
"""Published steps over what the engine's products in fp8 would allow (the table nemo-blackwell)."""
KEPT_UP = 0.92
"""An H100 keeps up 0.721 of its peak in steps that last, where this table has 0.78."""


@cache
def table(kernel: str) -> tuple[dict[str, str], ...]:
    with FILE.open(encoding="utf-8", newline="") as stream:
        return tuple(row for row in csv.DictReader(stream) if row["kernel"] == kernel)


@cache
def beyond(device: str) -> dict[int, float]:
    """Predicted over measured attention, by length."""
    hardware, found = load_hardware(device), {}
    for row in table("attention"):
        if row["device"] != device:
            continue
        tokens, sequences, heads = (int(row[name]) for name in ("tokens", "sequences", "heads"))
        flops = 2.0 * sequences * tokens**2 * heads * 128
        seconds = attention_times(
            hardware.device,
            hardware.efficiency,
            "forward",
            flops=flops,
            moved_bytes=8.0 * sequences * tokens * heads * 128,
            heads=sequences * heads,
            tokens=tokens,
            head_dim=128,
            peak_flops=hardware.device.peak_flops["bf16"].value,
        ).seconds
        found[tokens] = flops / float(seconds) / 1e12 / float(row["tflops"])
    return found


@pytest.mark.parametrize("device", ["h100-sxm", *BLACKWELL])
def test_attention_beside_an_h200s(device: str) -> None:
    """What the engine does round attention is in the table; an H200's own rates, which we timed, tell how much."""
    ratios = [beyond(device)[tokens] / beyond("h200")[tokens] for tokens in sorted(beyond(device))]
    assert len(ratios) == 6
    assert median(abs(ratio - 1.0) for ratio in ratios) <= 0.08
    assert max(abs(ratio - 1.0) for ratio in ratios) <= 0.22


@pytest.mark.parametrize(("device", "bound"), [("rtx-pro-6000", 0.12), ("l40s", 0.4)])
def test_attention_of_other_cards(device: str, bound: float) -> None:
    assert max(abs(ratio - 1.0) for ratio in beyond(device).values()) <= bound


@pytest.mark.parametrize("device", [*BLACKWELL, "rtx-pro-6000"])
@pytest.mark.parametrize("number_format", ["bf16", "fp8", "nvfp4"])
def test_products_of_large_sides_by_format(device: str, number_format: str) -> None:
    (row,) = (row for row in table("gemm") if (row["device"], row["number_format"]) == (device, number_format))
    hardware = load_hardware(device)
    kept_up = hardware.efficiency.gemm.sustained_in(number_format) * hardware.device.peak_flops[number_format].value
    level = TRAINED_FP8 if (device in BLACKWELL and number_format == "fp8") else 1.0
    assert kept_up == pytest.approx(level * KEPT_UP * float(row["tflops"]) * 1e12, rel=0.09)
