"""Time of matrix products on a device: a hierarchical roofline over output tiles.

A library cuts the m × n output into tiles and deals them to the device's units. For a tile of R × C (R along the
longer side of the output) on U units:

    tiles      T = groups · ⌈long/R⌉ · ⌈short/C⌉; of groups whose rows differ ⌈x⌉ is x + ½ of that side
    split      s = ⌊U/T⌋ parts of the depth when tiles are fewer than units, none shallower than 512
    waves      w = x + quantisation · (⌈x⌉ − x), at least 1, with x = T·s/U
    compute    w · (k/s + fill_depth) · 2·R·C / (peak · sustained · share / U)
    L2         w · k/s · (R + C) · operand bytes / (L2 bandwidth / U)
    DRAM       (reads + output) / (share of the DRAM bandwidth)
    time       launch + max(compute + exposed output, L2 + exposed output, DRAM)

Of the U tiles in flight half find each other's operands in L2. They form a super-tile of P × Q outputs (P·Q = U·R·C/2,
as square as the product allows), whose operands come from DRAM once: reads = groups · k · bytes · (long · max(1,
short/Q) + short · max(1, long/P)). The parts of a split are summed through L2 in fp32.

The levels' sizes decide what is possible: a tile's operands, two stages deep, must fit a GPU unit's shared memory; the
super-tile's operands must fit the L2; an accelerator's buffer or a CPU's cache holds a square of outputs with its two
operands, P·Q = size / (3 · bytes). The tile is the fastest of the device's menu that fits.

The idea (traffic at every level from a tile of that level's size, the slowest level decides) is that of DeepFlow
(Ardalani et al., arXiv 2211.03309); waves and fill follow NVIDIA's guide "Matrix Multiplication Background". The
bytes that 30 large products moved to the DRAM of an A100, by its counters, come out at 1.04 times the measured ones
in the median and between 0.7 and 1.2 for eight in ten.

Left out: leading dimensions that are not multiples of 128 bytes (products then lose up to a fifth), operands that
an earlier kernel left in L2, the moments after an idle phase in which the clock is still high, and what the library's
choice of a slower tile than the best costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flopwise.predict.kernels.bandwidth import dram_bytes_per_s
from flopwise.setup.efficiency import Efficiency, GemmEfficiency
from flopwise.setup.hardware import Device

Floats = NDArray[np.float64]

CAUSES = ("compute", "dram", "l2", "launch")
SPLIT_DEPTH = 512.0
"""Libraries do not split the depth into shallower parts; 512 fits the small grids timed on an A100 and an H200."""
SHARED_TILES = 0.5
"""Share of the tiles in flight that meet in L2: they drift apart, and the A100's and H100's L2 are two halves."""
DRIFT_DEPTH = 512.0
"""Depth over which a super-tile's operands stay in L2, so that its tiles need not run in step."""
STAGED_DEPTH = 64.0
"""Depth of a tile's operands that a unit holds at once: two stages of 32."""
PARTIAL_BYTES = 8.0
"""An fp32 partial sum is written once and read once."""


@dataclass(frozen=True, slots=True)
class GemmTimes:
    """Seconds of each product, and of each cause had it been alone."""

    seconds: Floats
    compute_s: Floats
    dram_s: Floats
    l2_s: Floats
    launch_s: float
    dram_bytes: Floats
    """Read and written."""

    def bound(self) -> NDArray[np.intp]:
        """Index into `CAUSES` of what takes longest."""
        launch = np.full_like(self.seconds, self.launch_s)
        causes = np.stack([self.compute_s, self.dram_s, self.l2_s, launch])
        return np.asarray(np.argmax(causes, axis=0), dtype=np.intp)


@dataclass(frozen=True, slots=True)
class _Products:
    """The products, in the quantities that every tile needs."""

    long: Floats
    short: Floats
    depth: Floats
    groups: Floats
    operand_bytes: Floats
    outputs: Floats
    output_bytes: Floats
    """All of them, read and written."""
    peak_flops: Floats
    uneven_long: Floats
    """1 where groups differ along the longer side, else 0; then along the shorter one."""
    uneven_short: Floats


@dataclass(frozen=True, slots=True)
class _Rates:
    """The device, in bytes per second and units."""

    units: float
    dram: float
    l2: float
    """Infinite where nobody published it, so that L2 never decides."""
    partial: float
    """Where partial sums go: L2, or DRAM when the L2's bandwidth is unknown."""
    gemm: GemmEfficiency
    shared_bytes: float
    """What one unit can hold of its tile's operands; infinite when unknown or not managed by tile."""
    l2_bytes: float
    """What the super-tile's operands may take; infinite when unknown."""
    store_bytes: float
    """On-chip memory that a program lays its operands out in by itself: an accelerator's buffer, a CPU's cache."""


@dataclass(frozen=True, slots=True)
class _Costs:
    compute_s: Floats
    dram_s: Floats
    l2_s: Floats
    dram_bytes: Floats

    def slowest(self) -> Floats:
        return np.maximum(np.maximum(self.compute_s, self.l2_s), self.dram_s)


def gemm_times(
    device: Device,
    efficiency: Efficiency,
    m: ArrayLike,
    k: ArrayLike,
    n: ArrayLike,
    *,
    peak_flops: ArrayLike,
    groups: ArrayLike = 1.0,
    operand_bytes: ArrayLike = 2.0,
    output_bytes: ArrayLike = 2.0,
    accumulate: ArrayLike = False,
    uneven: ArrayLike = False,
) -> GemmTimes:
    """Time `groups` products (m × k)·(k × n) that run as one kernel; every argument broadcasts, sizes are at least 1.

    `peak_flops` is the device's peak in the operands' number format, at the clock in force. `operand_bytes` and
    `output_bytes` are per element; `accumulate` adds to an output that has to be read first. Where groups are
    `uneven`, m is the mean of their rows, and each fills a half of its last tile in the mean.
    """
    rows, columns, count = _floats(m), _floats(n), _floats(groups)
    outputs = count * rows * columns
    products = _Products(
        long=np.maximum(rows, columns),
        short=np.minimum(rows, columns),
        depth=_floats(k),
        groups=count,
        operand_bytes=_floats(operand_bytes),
        outputs=outputs,
        output_bytes=outputs * _floats(output_bytes) * (1.0 + _floats(accumulate)),
        peak_flops=_floats(peak_flops),
        uneven_long=_floats(uneven) * (rows >= columns),
        uneven_short=_floats(uneven) * (rows < columns),
    )
    fastest = _fastest(products, _rates(device, efficiency))
    seconds, compute_s, dram_s, l2_s, dram_bytes = np.broadcast_arrays(
        efficiency.launch_s + fastest.slowest(),
        fastest.compute_s,
        fastest.dram_s,
        fastest.l2_s,
        fastest.dram_bytes,
    )
    return GemmTimes(seconds, compute_s, dram_s, l2_s, efficiency.launch_s, dram_bytes)


def _fastest(products: _Products, rates: _Rates) -> _Costs:
    """The costs of each product with the tile of the menu that suits it best."""
    tiles = rates.gemm.tiles
    sides = [(float(max(tile.rows, tile.columns)), float(min(tile.rows, tile.columns))) for tile in tiles]
    costs = _costs(products, rates, *sides[0], tiles[0].share)
    if len(tiles) == 1:
        return costs
    smallest = min(range(len(tiles)), key=lambda index: sides[index][0] * sides[index][1])

    def slowest(index: int, found: _Costs) -> Floats:
        staged = STAGED_DEPTH * sum(sides[index]) * products.operand_bytes
        # A tile whose operands a unit cannot hold is no choice; the smallest always is one.
        return np.where((staged > rates.shared_bytes) & (index != smallest), np.inf, found.slowest())

    seconds = slowest(0, costs)
    chosen = np.zeros(seconds.shape, dtype=np.intp)
    for index in range(1, len(tiles)):
        other = slowest(index, _costs(products, rates, *sides[index], tiles[index].share))
        np.copyto(chosen, index, where=other < seconds)
        seconds = np.minimum(seconds, other)
    # Costing the winners once more is cheaper than carrying four arrays through the search.
    side = np.array(sides)[chosen]
    return _costs(products, rates, side[..., 0], side[..., 1], np.array([tile.share for tile in tiles])[chosen])


def _rates(device: Device, efficiency: Efficiency) -> _Rates:
    dram = dram_bytes_per_s(device, efficiency)
    level, shared = device.level("l2"), device.level("shared")
    known = level.bandwidth_bytes_per_s if level is not None else None
    gpu, nearest = device.kind == "gpu", device.memory[0]
    return _Rates(
        units=device.units.value,
        dram=dram,
        l2=known.value if known else float("inf"),
        partial=known.value if known else dram,
        gemm=efficiency.gemm,
        shared_bytes=shared.size_bytes.value / device.units.value if gpu and shared is not None else float("inf"),
        l2_bytes=level.size_bytes.value if gpu and level is not None else float("inf"),
        store_bytes=0.0 if gpu or nearest is device.dram else nearest.size_bytes.value,
    )


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)


def _costs(
    products: _Products, rates: _Rates, rows: float | Floats, columns: float | Floats, share: float | Floats
) -> _Costs:
    """Seconds of each cause with tiles of rows × columns, rows along the longer side."""
    gemm, units = rates.gemm, rates.units
    padded_long = np.where(products.uneven_long, products.long + rows / 2, np.ceil(products.long / rows) * rows)
    padded_short = np.where(
        products.uneven_short, products.short + columns / 2, np.ceil(products.short / columns) * columns
    )
    tiles = products.groups * padded_long * padded_short / (rows * columns)
    split = np.maximum(np.minimum(np.floor(units / tiles), products.depth / SPLIT_DEPTH), 1.0)
    even = tiles * split / units
    waves = np.maximum(even + gemm.quantisation * (np.ceil(even) - even), 1.0)
    depth = products.depth / split

    output_s = products.output_bytes / rates.dram
    tail_s = gemm.exposed_output * output_s
    tail_s = tail_s + np.where(split > 1.0, split * products.outputs * (PARTIAL_BYTES / rates.partial), 0.0)
    unit_flops = products.peak_flops * (gemm.sustained / units) * share
    compute_s = waves * (depth + gemm.fill_depth) * (2.0 * rows * columns / unit_flops) + tail_s
    l2_s = waves * depth * (products.operand_bytes * (rows + columns) * (units / rates.l2)) + tail_s

    # The super-tile that meets in L2 is a square unless the product is narrower than that. Where the program lays
    # tiles out itself, two operands and the result share the store.
    fitting = rates.l2_bytes / (2.0 * DRIFT_DEPTH * products.operand_bytes)
    area = np.minimum(SHARED_TILES * units * rows * columns, fitting * fitting)
    area = np.maximum(area, rates.store_bytes / (3.0 * products.operand_bytes))
    held_long = np.minimum(padded_long, np.maximum(np.sqrt(area), area / padded_short))
    held_short = area / held_long
    again_long = np.maximum(products.short / held_short, 1.0)
    again_short = np.maximum(products.long / held_long, 1.0)
    reads = products.groups * products.depth * products.operand_bytes
    reads = reads * (products.long * again_long + products.short * again_short)
    return _Costs(compute_s, reads / rates.dram + output_s, l2_s, reads + products.output_bytes)
