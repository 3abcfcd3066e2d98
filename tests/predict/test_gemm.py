"""Kernel times against plain Python, at awkward sizes, and what must hold on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware
from flopwise.predict.kernels.attention import CAUSES as ATTENTION_CAUSES
from flopwise.predict.kernels.attention import Direction, attention_share, attention_times
from flopwise.predict.kernels.bandwidth import streaming_times
from flopwise.predict.kernels.gemm import CAUSES, gemm_times
from flopwise.setup.efficiency import AttentionEfficiency, Efficiency, GemmEfficiency, MemoryEfficiency, Tile
from flopwise.setup.hardware import Device, Fact, MemoryLevel

AWKWARD = (1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 511, 513, 1000, 1023, 1025, 2049, 4096)
SIDES = st.one_of(st.sampled_from(AWKWARD), st.integers(1, 5000))
CATALOGUE = {
    name: load_hardware(name)
    for name in ("a100-80gb", "a100-pcie-80gb", "mi210", "h100-sxm", "h200", "b200", "rtx-4090", "trn1")
}


@dataclass(frozen=True)
class Product:
    m: int
    k: int
    n: int
    groups: int = 1
    operand_bytes: int = 2
    output_bytes: int = 2
    accumulate: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.groups * self.m * self.k * self.n

    @property
    def least_bytes(self) -> int:
        """Every operand read once, the output written, and read where it is added to."""
        operands = self.operand_bytes * self.k * (self.m + self.n)
        return self.groups * (operands + self.output_bytes * self.m * self.n * (2 if self.accumulate else 1))


@dataclass(frozen=True)
class Machine:
    device: Device
    efficiency: Efficiency
    peak_flops: float


def machine(
    *,
    units: int = 20,
    peak: float = 40e12,
    dram: float = 1e12,
    l2: float | None = 4e12,
    l2_size: float = 4e7,
    shared_size: float = 4e6,
    kind: Literal["gpu", "accelerator"] = "gpu",
    launch_s: float = 3e-6,
    gemm: GemmEfficiency | None = None,
) -> Machine:
    def fact(value: float) -> Fact:
        return Fact(value=value, source="test")

    device = Device(
        vendor="test",
        architecture="test",
        kind=kind,
        units=fact(units),
        peak_flops={"bf16": fact(peak)},
        memory=(
            MemoryLevel(name="shared", size_bytes=fact(shared_size)),
            MemoryLevel(name="l2", size_bytes=fact(l2_size), bandwidth_bytes_per_s=None if l2 is None else fact(l2)),
            MemoryLevel(name="dram", size_bytes=fact(8e10), bandwidth_bytes_per_s=fact(dram)),
        ),
    )
    tiles = tuple(Tile(rows=r, columns=c, share=s) for r, c, s in ((256, 128, 1.0), (128, 128, 0.9), (64, 64, 0.7)))
    efficiency = Efficiency(
        source="test",
        launch_s=launch_s,
        gemm=gemm or GemmEfficiency(source="test", sustained=0.8, tiles=tiles, fill_depth=60, quantisation=0.7),
        attention=AttentionEfficiency(
            source="test", forward=((256, 0.2), (4096, 0.5)), backward=((256, 0.1), (4096, 0.4)), head_dim_64=0.7
        ),
        memory=MemoryEfficiency(source="test", dram=0.85, half_bytes=1e6),
    )
    return Machine(device, efficiency, peak)


@st.composite
def products(draw: st.DrawFn) -> Product:
    return Product(
        draw(SIDES),
        draw(SIDES),
        draw(SIDES),
        draw(st.sampled_from((1, 1, 1, 3, 17))),
        draw(st.sampled_from((1, 2, 4))),
        draw(st.sampled_from((2, 4))),
        draw(st.booleans()),
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    side = st.sampled_from((16, 64, 96, 128, 256))
    share = st.floats(0.3, 1.0)
    tiles = draw(st.lists(st.builds(Tile, rows=side, columns=side, share=share), min_size=1, max_size=5))
    gemm = GemmEfficiency(
        source="test",
        sustained=draw(share),
        tiles=tuple(tiles),
        fill_depth=draw(st.floats(0, 300)),
        quantisation=draw(st.floats(0, 1)),
        exposed_output=draw(st.floats(0, 1)),
    )
    return machine(
        units=draw(st.integers(1, 200)),
        peak=draw(st.floats(1e11, 5e15)),
        dram=draw(st.floats(1e10, 1e13)),
        l2=draw(st.one_of(st.none(), st.floats(1e11, 5e13))),
        l2_size=draw(st.floats(1e4, 1e9)),
        shared_size=draw(st.floats(1e4, 1e8)),
        kind=draw(st.sampled_from(["gpu", "accelerator"])),
        launch_s=draw(st.floats(0, 1e-4)),
        gemm=gemm,
    )


def seconds(on: Machine, product: Product) -> float:
    return float(
        gemm_times(
            on.device,
            on.efficiency,
            product.m,
            product.k,
            product.n,
            groups=product.groups,
            operand_bytes=product.operand_bytes,
            output_bytes=product.output_bytes,
            accumulate=product.accumulate,
            peak_flops=on.peak_flops,
        ).seconds
    )


def plain_seconds(on: Machine, product: Product) -> float:
    """The slow way: cut the output tile by tile, deal the tiles to the units, try every tile of the menu."""
    gemm, units = on.efficiency.gemm, int(on.device.units.value)
    dram_level, l2_level = on.device.dram, on.device.level("l2")
    assert dram_level.bandwidth_bytes_per_s is not None
    assert l2_level is not None
    dram = dram_level.bandwidth_bytes_per_s.value * on.efficiency.memory.dram
    l2 = l2_level.bandwidth_bytes_per_s.value if l2_level.bandwidth_bytes_per_s else None
    long, short = max(product.m, product.n), min(product.m, product.n)
    written = product.output_bytes * product.groups * product.m * product.n * (2 if product.accumulate else 1)
    shared_level = on.device.level("shared")
    assert shared_level is not None
    gpu = on.device.kind == "gpu"
    smallest = min(gemm.tiles, key=lambda tile: tile.rows * tile.columns)
    best = math.inf
    for tile in gemm.tiles:
        rows, columns = max(tile.rows, tile.columns), min(tile.rows, tile.columns)
        stages = [32 * (rows + columns) * product.operand_bytes] * 2
        if gpu and tile is not smallest and sum(stages) > shared_level.size_bytes.value / units:
            continue
        down = sum(1 for _ in range(0, long, rows))
        across = sum(1 for _ in range(0, short, columns))
        tiles = product.groups * down * across
        parts = 1.0
        if tiles < units:
            parts = max(1.0, min(float(units // tiles), product.k / 512))
        whole_waves, waves = 0, tiles * parts / units
        while whole_waves < waves:
            whole_waves += 1
        lost = gemm.quantisation * (whole_waves - waves)
        waves = max(1.0, waves + lost)
        depth = product.k / parts
        rate = on.peak_flops * gemm.sustained * tile.share / units
        end = gemm.exposed_output * written / dram
        if parts > 1:
            end += parts * 8 * product.groups * product.m * product.n / (l2 or dram)
        compute = waves * (depth + gemm.fill_depth) * 2 * rows * columns / rate + end
        through_l2 = waves * depth * (rows + columns) * product.operand_bytes / (l2 / units) + end if l2 else 0.0
        area = units * rows * columns / 2
        if gpu:
            side = l2_level.size_bytes.value / (2 * 512 * product.operand_bytes)
            area = min(area, side**2)
        else:
            area = max(area, shared_level.size_bytes.value / (3 * product.operand_bytes))
        held_long = min(down * rows, max(math.sqrt(area), area / (across * columns)))
        held_short = area / held_long
        passes_long, passes_short = max(1.0, short / held_short), max(1.0, long / held_long)
        read = product.groups * product.k * product.operand_bytes * (long * passes_long + short * passes_short)
        best = min(best, max(compute, through_l2, (read + written) / dram))
    return on.efficiency.launch_s + best


@given(machines(), products())
def test_arrays_agree_with_plain_python(on: Machine, product: Product) -> None:
    assert seconds(on, product) == pytest.approx(plain_seconds(on, product), rel=1e-9)


@pytest.mark.parametrize("kind", ["gpu", "accelerator"])
def test_larger_memories_never_move_more_and_sizes_matter(kind: Literal["gpu", "accelerator"]) -> None:
    moved = []
    for scale in (1e-3, 1e-2, 1.0, 100.0):
        on = machine(kind=kind, l2_size=4e7 * scale, shared_size=4e6 * scale)
        times = gemm_times(on.device, on.efficiency, 8192, 8192, 8192, peak_flops=on.peak_flops)
        moved.append(float(times.dram_bytes))
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > 2 * moved[-1]


@given(machines(), products())
def test_no_product_beats_the_roofline(on: Machine, product: Product) -> None:
    found = seconds(on, product)
    assert math.isfinite(found)
    bandwidth = on.device.dram.bandwidth_bytes_per_s
    assert bandwidth is not None
    assert found >= product.flops / on.peak_flops * (1 - 1e-12)
    assert found >= product.least_bytes / bandwidth.value * (1 - 1e-12)
    assert found > on.efficiency.launch_s


@given(machines(), products())
def test_transposed_product_takes_as_long(on: Machine, product: Product) -> None:
    assert seconds(on, replace(product, m=product.n, n=product.m)) == pytest.approx(seconds(on, product), rel=1e-12)


@given(products(), st.floats(1, 10))
def test_faster_parts_never_slow_a_product_down(product: Product, factor: float) -> None:
    before = seconds(machine(), product)
    for faster in (machine(peak=40e12 * factor), machine(dram=1e12 * factor), machine(l2=4e12 * factor)):
        assert seconds(faster, product) <= before


@pytest.mark.parametrize("name", CATALOGUE)
@given(product=products())
def test_a_device_twice_as_large_is_never_slower(name: str, product: Product) -> None:
    """Units, peak and every bandwidth doubled. Only then: more units alone divide the same peak more finely, and a
    grid that filled the old ones leaves new ones idle. Partial sums of a finer split may cost a little, most (8 %) on
    a device whose L2 bandwidth is unknown."""
    hardware = CATALOGUE[name]
    device = hardware.device
    doubled = replace(
        device,
        units=replace(device.units, value=2 * device.units.value),
        memory=tuple(
            replace(
                level,
                bandwidth_bytes_per_s=level.bandwidth_bytes_per_s
                and replace(level.bandwidth_bytes_per_s, value=2 * level.bandwidth_bytes_per_s.value),
            )
            for level in device.memory
        ),
    )
    peak = next(iter(device.peak_flops.values())).value
    small = Machine(device, hardware.efficiency, peak)
    large = Machine(doubled, hardware.efficiency, 2 * peak)
    assert seconds(large, product) <= 1.1 * seconds(small, product)


@pytest.mark.parametrize("name", CATALOGUE)
@given(product=products(), side=st.sampled_from(("m", "k", "n", "groups")), more=st.floats(1, 8))
def test_more_work_is_never_much_faster(name: str, product: Product, side: str, more: float) -> None:
    """Deeper is never faster. Larger may be a little: a grid that fills the units needs no partial sums (8 % on a
    device whose L2 bandwidth is unknown, less than 1 % on the others)."""
    hardware = CATALOGUE[name]
    peak = next(iter(hardware.device.peak_flops.values())).value
    on = Machine(hardware.device, hardware.efficiency, peak)
    grown = replace(product, **{side: math.ceil(getattr(product, side) * more)})
    assert seconds(on, grown) >= (1 - 1e-12 if side == "k" else 0.9) * seconds(on, product)


def test_broadcasts_and_reports_per_element() -> None:
    on = machine()
    m, n = np.array([[64.0], [4096.0]]), np.array([1.0, 129.0, 8192.0])
    times = gemm_times(on.device, on.efficiency, m, 512, n, peak_flops=on.peak_flops, accumulate=[True, False, True])
    for array in (times.seconds, times.compute_s, times.dram_s, times.l2_s, times.dram_bytes, times.bound()):
        assert array.shape == (2, 3)
    for row, rows in enumerate((64, 4096)):
        for column, columns in enumerate((1, 129, 8192)):
            product = Product(rows, 512, columns, accumulate=column != 1)
            assert times.seconds[row, column] == pytest.approx(seconds(on, product), rel=1e-12)
            assert times.dram_bytes[row, column] >= product.least_bytes
    slowest = np.maximum(np.maximum(times.compute_s, times.dram_s), times.l2_s)
    assert times.seconds == pytest.approx(times.launch_s + slowest)


def test_one_tile_on_the_menu_gives_full_shapes_too() -> None:
    on = machine(
        gemm=GemmEfficiency(source="t", sustained=1, tiles=(Tile(rows=64, columns=64, share=1),), fill_depth=0)
    )
    times = gemm_times(on.device, on.efficiency, 64, 64, 64, operand_bytes=[1, 2, 4], peak_flops=on.peak_flops)
    assert times.compute_s.shape == times.bound().shape == (3,)


def test_names_the_bound() -> None:
    hardware = CATALOGUE["h200"]
    times = gemm_times(
        hardware.device, hardware.efficiency, [8192, 8, 8], [8192, 8192, 8], [8192, 65536, 8], peak_flops=1e15
    )
    assert [CAUSES[index] for index in times.bound()] == ["compute", "dram", "launch"]
    slow_l2 = machine(l2=4e10)
    times = gemm_times(slow_l2.device, slow_l2.efficiency, 4096, 4096, 4096, peak_flops=1e15)
    assert CAUSES[int(times.bound())] == "l2"


@pytest.mark.parametrize("field", ["sustained", "quantisation", "exposed_output", "fill_depth"])
@pytest.mark.parametrize("value", [-0.1, 1e400, math.nan])
def test_constants_are_checked(field: str, value: float) -> None:
    with pytest.raises(FlopwiseError, match=field):
        replace(machine().efficiency.gemm, **cast(dict[str, Any], {field: value}))


# Attention and streaming.

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
TOKENS = st.one_of(st.sampled_from((1, 63, 127, 128, 129, 1000, 4097)), st.integers(1, 200_000))


def attention_seconds(on: Machine, direction: Direction, *, tokens: int, heads: int, dim: int, area: float) -> float:
    flops = (4 if direction == "forward" else 10) * heads * tokens**2 * area * dim
    return float(
        attention_times(
            on.device,
            on.efficiency,
            direction,
            flops=flops,
            moved_bytes=8.0 * heads * tokens * dim,
            heads=heads,
            tokens=tokens,
            head_dim=dim,
            area_share=area,
            peak_flops=on.peak_flops,
        ).seconds
    )


def plain_attention_seconds(
    on: Machine, direction: Direction, *, tokens: int, heads: int, dim: int, area: float
) -> float:
    """Tile by tile of 128 queries: their keys, then the longest one on top of the even spread."""
    points = {"forward": ((256, 0.2), (4096, 0.5)), "backward": ((256, 0.1), (4096, 0.4))}[direction]
    (first, low), (last, high) = points
    length = min(max(area * tokens * (1 + 2 * area), first), last)
    share = low + (high - low) * math.log2(length / first) / math.log2(last / first)
    share *= 0.7 + 0.3 * min(max(dim - 64, 0), 64) / 64
    per_key = (4 if direction == "forward" else 10) * dim
    unit = on.peak_flops * share / on.device.units.value
    total = heads * tokens**2 * area * per_key
    longest = min(128, tokens) * min(tokens, 2 * area * tokens) * per_key
    longest = min(longest, total / heads)
    compute = total / unit / on.device.units.value + 0.5 * longest / unit
    moved = 8 * heads * tokens * dim / (1e12 * 0.85)
    return (1 if direction == "forward" else 3) * 3e-6 + max(compute, moved)


@pytest.mark.parametrize("direction", DIRECTIONS)
@given(TOKENS, st.integers(1, 300), st.sampled_from((8, 64, 80, 128, 256)), st.sampled_from((0.5, 1.0, 0.03)))
def test_attention_agrees_with_plain_python(
    direction: Direction, tokens: int, heads: int, dim: int, area: float
) -> None:
    on = machine()
    found = attention_seconds(on, direction, tokens=tokens, heads=heads, dim=dim, area=area)
    plain = plain_attention_seconds(on, direction, tokens=tokens, heads=heads, dim=dim, area=area)
    assert found == pytest.approx(plain, rel=1e-9)
    flops = (4 if direction == "forward" else 10) * heads * tokens**2 * area * dim
    assert found >= flops / on.peak_flops


@pytest.mark.parametrize("direction", DIRECTIONS)
@given(TOKENS, st.integers(1, 300), st.floats(1, 10))
def test_attention_on_faster_parts_and_with_more_heads(
    direction: Direction, tokens: int, heads: int, factor: float
) -> None:
    before = attention_seconds(machine(), direction, tokens=tokens, heads=heads, dim=128, area=0.5)
    for faster in (machine(peak=40e12 * factor), machine(dram=1e12 * factor)):
        assert attention_seconds(faster, direction, tokens=tokens, heads=heads, dim=128, area=0.5) <= before
    assert attention_seconds(machine(), direction, tokens=tokens, heads=heads + 1, dim=128, area=0.5) > before


def test_few_heads_cannot_fill_the_device() -> None:
    hardware = CATALOGUE["h200"]
    on = Machine(hardware.device, hardware.efficiency, 989.5e12)
    one, two, many = (
        attention_seconds(on, "forward", tokens=4096, heads=heads, dim=128, area=0.5) for heads in (1, 2, 128)
    )
    assert two < 1.3 * one
    assert many < 0.5 * 128 * one


def test_attention_bounds_have_names() -> None:
    on = machine()
    times = attention_times(
        on.device,
        on.efficiency,
        "forward",
        flops=[1e15, 1e3, 1e3],
        moved_bytes=[1e3, 1e12, 1.0],
        heads=64,
        tokens=4096,
        head_dim=128,
        peak_flops=on.peak_flops,
    )
    assert [ATTENTION_CAUSES[index] for index in times.bound()] == ["compute", "dram", "launch"]


def test_share_of_the_peak_rises_with_length_and_width() -> None:
    efficiency = CATALOGUE["h200"].efficiency
    for direction in DIRECTIONS:
        by_length = attention_share(efficiency.attention, direction, 2.0 ** np.arange(6, 20), 128)
        assert np.all(np.diff(by_length) >= 0)
        by_width = attention_share(efficiency.attention, direction, 4096, [32, 64, 96, 128, 256])
        assert np.all(np.diff(by_width) >= 0)


@given(st.floats(0, 1e12), st.integers(1, 50), st.floats(1, 10))
def test_streaming_is_launches_plus_bytes(moved: float, kernels: int, factor: float) -> None:
    on, faster = machine(), machine(dram=1e12 * factor)
    found = float(streaming_times(on.device, on.efficiency, moved, kernels=kernels).seconds)
    plain = sum(3e-6 + (moved / kernels + 1e6) / 0.85e12 for _ in range(kernels))
    assert found == pytest.approx(plain, rel=1e-9)
    assert float(streaming_times(faster.device, faster.efficiency, moved, kernels=kernels).seconds) <= found


def test_streaming_at_half_rate() -> None:
    on = machine(launch_s=0.0)
    half = on.efficiency.memory.half_bytes
    times = streaming_times(on.device, on.efficiency, [half, 1e6 * half])
    rates = np.array([half, 1e6 * half]) / times.seconds
    assert rates[0] / rates[1] == pytest.approx(0.5, rel=1e-5)
    assert list(streaming_times(on.device, machine(launch_s=1e-3).efficiency, [1.0, 1e12]).bound()) == [1, 0]
