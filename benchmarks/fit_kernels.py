"""Fit a device's efficiency constants to its measured kernels: `python -m benchmarks.fit_kernels`.

`calibrate.kernel_fit` has the constants' forms and the search. Matrix products: per chip three constants of its
kernels (fill_depth, quantisation, exposed_output), and per set of rows the `sustained` share, since cards of one chip
differ in their power cap and a locked clock has none. Rows whose sides are multiples of 64, one product each, weigh 1
when every side is at least 1024 and 0.3 otherwise.

Attention, heads whose queries and values are equally wide: per direction the share of endless sequences,
top, and the keys that a tile's start and end cost, start: share = top / (1 + 2 · start / tokens), listed at five
lengths; a factor for heads of 64 and the tail. Where few lengths are published, `start` is the H200's. Rows with less
than eight tiles of queries a unit weigh 0.3.

What is minimised is the mean |ln(predicted / measured)|, by differential evolution (Storn & Price 1997) with a fixed
seed. Bytes per second and launch times are not fitted here: they are read off the streaming rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.kernel_rows import (
    AttentionRows,
    Floats,
    GemmRows,
    load_attentions,
    load_gemms,
    predict_attentions,
    predict_gemms,
)
from flopwise.calibrate.kernel_fit import (
    KERNEL_BOUNDS,
    law_tiles,
    minimise,
    remembered,
    rounded_gemm_constants,
    with_attention_constants,
    with_gemm_constants,
)
from flopwise.catalog.load import load_hardware
from flopwise.predict.kernels.attention import TILE_QUERIES
from flopwise.setup.efficiency import Efficiency

CHIPS: dict[str, tuple[tuple[str, str], ...]] = {
    "A100": (("llmcompass", "a100-80gb"), ("simumax", "a100-pcie-80gb"), ("nsight", "a100-pcie-80gb")),
    "MI210": (("llmcompass", "mi210"),),
    "H200": (("flopwise", "h200"),),
    "B200": (("simumax", "b200"),),
}
"""Chip → (source, device) of the sets of matrix products that its constants are fitted to."""
SUSTAINED_BOUNDS = (0.3, 1.0)
START_OF_H200 = (180.0, 439.0)
"""Keys, forward and backward, from the H200's rows over nine lengths."""


def fit_gemms(sets: Sequence[GemmRows]) -> list[Efficiency]:
    """The efficiency of each set's device, with constants fitted to the rows of all sets together."""
    hardware = [load_hardware(rows.device) for rows in sets]
    fitted = [rows.where(_fit_for(rows)) for rows in sets]
    weights = [np.where(rows.large, 1.0, 0.3) for rows in fitted]

    def loss(constants: Floats) -> float:
        candidates = _gemm_efficiencies([item.efficiency for item in hardware], constants)
        total = 0.0
        for rows, item, efficiency, weight in zip(fitted, hardware, candidates, weights, strict=True):
            ratio = np.log(predict_gemms(rows, item, efficiency) / rows.seconds)
            total += float(np.average(np.abs(ratio), weights=weight))
        return total

    bounds = np.array([*KERNEL_BOUNDS, *[SUSTAINED_BOUNDS] * len(sets)])
    found = minimise(remembered(loss, rounded_gemm_constants), bounds)
    return _gemm_efficiencies([item.efficiency for item in hardware], found)


def fit_attentions(rows: AttentionRows) -> Efficiency:
    """The efficiency of the rows' device, with constants of attention fitted to them."""
    hardware = load_hardware(rows.device)
    rows = rows.where(rows.query_dim == rows.value_dim)
    lengths = len(np.unique(rows.tokens)) > 3
    tiles = rows.sequences * rows.heads * rows.tokens / TILE_QUERIES
    weights = np.where(tiles >= 8 * hardware.device.units.value, 1.0, 0.3)

    def candidate(constants: Floats) -> Efficiency:
        values = constants if lengths else (*constants[:5], *START_OF_H200)
        narrow = bool(rows.value_dim.min() <= 64)
        attention = with_attention_constants(hardware.efficiency.attention, values, narrow=narrow)
        return replace(hardware.efficiency, attention=attention)

    def loss(constants: Floats) -> float:
        ratio = np.log(predict_attentions(rows, hardware, candidate(constants)) / rows.seconds)
        return float(np.average(np.abs(ratio), weights=weights))

    bounds = np.array([(0.1, 1.0), (0.1, 1.0), (0.0, 1.0), (0.5, 1.0), (0.5, 1.0), (50.0, 800.0), (50.0, 800.0)])
    return candidate(minimise(loss, bounds))


def _gemm_efficiencies(devices: Sequence[Efficiency], constants: Floats) -> list[Efficiency]:
    kernel, sustained = constants[: len(KERNEL_BOUNDS)], constants[len(KERNEL_BOUNDS) :]
    tiled = [replace(device, gemm=replace(device.gemm, tiles=law_tiles())) for device in devices]
    return [with_gemm_constants(device, (*kernel, share)) for device, share in zip(tiled, sustained, strict=True)]


def _fit_for(rows: GemmRows) -> NDArray[np.bool_]:
    sides = np.stack([rows.m, rows.k, rows.n])
    return np.asarray(np.all(sides % 64 == 0, axis=0) & (rows.groups == 1), dtype=np.bool_)


def main() -> None:
    gemms = {(rows.source, rows.device): rows for rows in load_gemms()}
    for chip, keys in CHIPS.items():
        for key, efficiency in zip(keys, fit_gemms([gemms[key] for key in keys]), strict=True):
            print(chip, *key, efficiency.gemm, "", sep="\n")
    for rows in load_attentions():
        print(rows.source, rows.device, fit_attentions(rows).attention, "", sep="\n")


if __name__ == "__main__":
    main()
