"""Time of flash attention, forward and backward, causal, bidirectional or windowed.

The FLOPs and bytes are the caller's, so the area of the score matrix that is computed (half of the square when
causal) and the FLOP convention are too; here they turn into time:

    share      of the peak, interpolated in log2 of the equivalent causal length, times a factor for narrow heads
    even       FLOPs / (peak · share): the work spread over all units
    longest    the tile of 128 queries with the most keys, alone on one unit
    compute    even + tail · longest
    time       kernels · launch + max(compute, bytes / (share of the DRAM bandwidth))

What lowers the share of short sequences is a tile's start and end, and the halves of tiles that the diagonal of the
mask cuts off. Bidirectional attention has twice the keys and no such halves: the rows of an H200 place n tokens at
about 3 n causal ones. A window has two cut edges. Both, and n itself for the causal area of a half, are met by
area · n · (1 + 2 · area).

`longest` is what limits few heads or short batches: with fewer tiles than units (sequences · heads · ⌈tokens/128⌉
below `units`) the time no longer falls with the work. Tiles of 128 queries are those of FlashAttention-2 (Dao,
arXiv 2307.08691) and of cuDNN; the backward pass takes its tiles along the keys, as many and as long.

The backward pass runs three kernels (row sums, the main one, the conversion of the queries' gradient) and, by the
flash convention that recomputes one of its five products, has 2.5 times the forward's FLOPs.

Which kernels run is the trainer's choice: a device's description has the rates of several families, and of each call
the first that takes its heads and sequences is assumed. Sequences of uneven length are timed by a typical one
(`calls.typical_square`), at the rates of a family that takes them: on Hopper those are FlashAttention-2's.

Left out: splitting the keys among units (flash decoding), dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flopwise.predict.kernels.bandwidth import dram_bytes_per_s
from flopwise.setup.efficiency import AttentionEfficiency, Efficiency
from flopwise.setup.hardware import Device
from flopwise.work.op import ATTENTION_PRODUCTS

Floats = NDArray[np.float64]
Direction = Literal["forward", "backward"]

CAUSES = ("compute", "dram", "launch")
TILE_QUERIES = 128.0
CAUSAL_AREA = 0.5
"""Less than this share of a square is computed under a window alone."""
KERNELS = {"forward": 1, "backward": 3}


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Seconds of each call, and of each cause had it been alone."""

    seconds: Floats
    compute_s: Floats
    dram_s: Floats
    launch_s: float

    def bound(self) -> NDArray[np.intp]:
        """Index into `CAUSES` of what takes longest."""
        launch = np.full_like(self.seconds, self.launch_s)
        return np.asarray(np.argmax(np.stack([self.compute_s, self.dram_s, launch]), axis=0), dtype=np.intp)


def attention_times(
    device: Device,
    efficiency: Efficiency,
    direction: Direction,
    *,
    flops: ArrayLike,
    moved_bytes: ArrayLike,
    heads: ArrayLike,
    tokens: ArrayLike,
    head_dim: ArrayLike,
    peak_flops: ArrayLike,
    area_share: ArrayLike = 0.5,
    packed: ArrayLike = False,
    value_share: ArrayLike = 1.0,
) -> AttentionTimes:
    """Time calls of `flops` and `moved_bytes` each; every argument broadcasts.

    `heads` counts the query heads of all sequences in the call, `tokens` are those of one sequence, and `area_share`
    is the part of the tokens × tokens square that is computed: 0.5 causal, 1 bidirectional, about window / tokens
    for a window. `packed`: whether sequences are of uneven length, for which other kernels may have to run.
    `value_share`: of these FLOPs, those of kernels that take values narrower than keys as they are.
    """
    found = _families(efficiency.attention, head_dim, packed, area_share)
    times = [
        _times(
            device,
            efficiency,
            attention,
            direction,
            flops=np.asarray(flops) * (np.asarray(value_share) if attention.narrow_values else 1.0),
            moved_bytes=moved_bytes,
            heads=heads,
            tokens=tokens,
            head_dim=head_dim,
            peak_flops=peak_flops,
            area_share=area_share,
        )
        for attention in found.kinds
    ]
    if len(times) == 1:
        return times[0]
    index = np.broadcast_to(found.which, times[0].seconds.shape)
    seconds, compute_s, dram_s = (
        np.choose(index, each)
        for each in zip(*((one.seconds, one.compute_s, one.dram_s) for one in times), strict=True)
    )
    return AttentionTimes(seconds, compute_s, dram_s, times[0].launch_s)


class _Families(NamedTuple):
    kinds: tuple[AttentionEfficiency, ...]
    which: NDArray[np.intp]
    """Of each call, which of them."""


def _families(attention: AttentionEfficiency, head_dim: ArrayLike, packed: ArrayLike, area: ArrayLike) -> _Families:
    """The kernels that calls run: the first family that can, of each."""
    heads, uneven, areas = np.broadcast_arrays(np.asarray(head_dim, dtype=np.float64), packed, area)
    if not attention.others or not heads.size:
        return _Families((attention,), np.zeros((), dtype=np.intp))
    kinds: dict[int, tuple[int, AttentionEfficiency]] = {}
    index = []
    for width, some, seen in zip(heads.flat, uneven.flat, areas.flat, strict=True):
        rates = kernels_for(attention, float(width), float(seen), packed=bool(some))
        index.append(kinds.setdefault(id(rates), (len(kinds), rates))[0])
    return _Families(tuple(rates for _, rates in kinds.values()), np.array(index, dtype=np.intp).reshape(heads.shape))


def kernels_for(attention: AttentionEfficiency, head_dim: float, area: float, *, packed: bool) -> AttentionEfficiency:
    """The first family that takes a call, `area` being the share of the square that is computed."""
    # Of sequences of uneven length the area is a mean, which does not tell whether there is a window.
    windowed = not packed and area < CAUSAL_AREA * (1.0 - 1e-9)
    return attention.for_calls(head_dim, packed=packed, windowed=windowed)


def _times(
    device: Device,
    efficiency: Efficiency,
    attention: AttentionEfficiency,
    direction: Direction,
    *,
    flops: ArrayLike,
    moved_bytes: ArrayLike,
    heads: ArrayLike,
    tokens: ArrayLike,
    head_dim: ArrayLike,
    peak_flops: ArrayLike,
    area_share: ArrayLike,
) -> AttentionTimes:
    work, length = np.asarray(flops, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    area = np.asarray(area_share, dtype=np.float64)
    share = attention_share(attention, direction, area * length * (1.0 + 2.0 * area), head_dim)
    even_s = work / (np.asarray(peak_flops, dtype=np.float64) * share)
    if attention.whole_keys:
        # Half a block more than the mask leaves, in the mean; a whole square has no more.
        whole = np.minimum(1.0, np.where(area < 1.0, area + 0.5 * attention.whole_keys / length, area))
        even_s = even_s * (whole / area)
        work = work * (whole / area)
    if attention.pair_s is not None:
        pairs = work / (2.0 * ATTENTION_PRODUCTS[direction] * np.asarray(head_dim, dtype=np.float64))
        even_s = even_s + pairs * attention.pair_s[direction == "backward"]
    # Of one head's work: its part of the queries times how much longer than the mean its row of keys is.
    longest = np.minimum(np.minimum(TILE_QUERIES / length, 1.0) * np.minimum(1.0 / area, 2.0), 1.0)
    longest_s = even_s * (longest * device.units.value / np.asarray(heads, dtype=np.float64))
    compute_s, dram_s = np.broadcast_arrays(
        even_s + attention.tail * longest_s,
        np.asarray(moved_bytes, dtype=np.float64) / dram_bytes_per_s(device, efficiency),
    )
    launch_s = KERNELS[direction] * efficiency.launch_s
    return AttentionTimes(launch_s + np.maximum(compute_s, dram_s), compute_s, dram_s, launch_s)


def attention_share(
    attention: AttentionEfficiency, direction: Direction, tokens: ArrayLike, head_dim: ArrayLike
) -> Floats:
    """Share of the peak that causal sequences of `tokens` reach with enough heads to fill the device."""
    points, narrow, wide = attention.forward, attention.head_dim_64, attention.head_dim_256
    if direction == "backward":
        points = attention.backward
        narrow, wide = attention.head_dim_64_backward or narrow, attention.head_dim_256_backward or wide
    share = np.interp(
        np.log2(np.asarray(tokens, dtype=np.float64)),
        np.log2([length for length, _ in points]),
        [value for _, value in points],
    )
    factor = np.interp(np.asarray(head_dim, dtype=np.float64), [64.0, 128.0, 256.0], [narrow, 1.0, wide])
    return np.asarray(share * factor, dtype=np.float64)
