"""The optimizers' kernels of Triton, with rounding by chance, and sums of squares."""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

from functools import lru_cache

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from flopwise.engine.kernels.adamw_8bit import VALUES, Codes, borders, table
from flopwise.engine.kernels.jit import ARITHMETIC, kernel
from flopwise.engine.kernels.updating import UpdateSettings
from flopwise.work.optimizers import QUANTISED_BLOCK

_SQUARES_PROGRAMS, _UPDATE_BLOCK = 1024, 1024


@kernel()
def mix(values: tl.tensor) -> tl.tensor:
    """The 32-bit mix that `rounding` describes."""
    values ^= values >> 16
    values *= 0x85EBCA6B
    values ^= values >> 13
    values *= 0xC2B2AE35
    values ^= values >> 16
    return values


@kernel()
def _store(
    target: tl.tensor,
    values: tl.tensor,
    inside: tl.tensor,
    place: tl.tensor,
    keys: tl.tensor,
    chance: tl.constexpr,
) -> None:
    """Rounded to the nearest, or by chance to bf16 as `rounding` describes."""
    if chance:
        low = place.to(tl.uint32)
        high = (place >> 32).to(tl.uint32) * 0x9E3779B1
        key0, key1 = tl.load(keys).to(tl.uint32, bitcast=True), tl.load(keys + 1).to(tl.uint32, bitcast=True)
        random = mix(mix(low ^ key0) ^ high ^ key1) >> 16
        bits = values.to(tl.int32, bitcast=True)
        added = (bits + random.to(tl.int32)) & -65536
        is_finite = (bits & 0x7F800000) != 0x7F800000
        values = tl.where(is_finite, added.to(tl.float32, bitcast=True), values)
    tl.store(target, values.to(target.dtype.element_ty), mask=inside)


@kernel()
def _number(numbers: tl.tensor, place: tl.constexpr) -> tl.tensor:
    """An fp32 number among words of 32 bits."""
    return tl.load(numbers + place).to(tl.float32, bitcast=True)


@kernel(unspecialized=["offset_low", "offset_high"])
def adamw_kernel(
    weights: tl.tensor,
    gradients: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    master: tl.tensor,
    gradient_scale: tl.tensor,
    count: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    epsilon: tl.tensor,
    numbers: tl.tensor,
    offset_low: tl.tensor,
    offset_high: tl.tensor,
    has_master: tl.constexpr,
    chance_weights: tl.constexpr,
    chance_first: tl.constexpr,
    chance_second: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """A block of numbers a program; the piece's first place comes in a lower part of 31 bits and an upper one.

    `numbers`: `UpdateSettings.bits_of_step`, read from memory so that a captured step has the settings of its own.
    """
    kept, step_size, root_scale = _number(numbers, 0), _number(numbers, 1), _number(numbers, 2)
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    place = index + offset_low.to(tl.int64) + (offset_high.to(tl.int64) << 31)
    scale = tl.load(gradient_scale).to(tl.float32)
    gradient = tl.load(gradients + index, mask=inside, other=0.0).to(tl.float32) * scale
    mean = tl.load(first + index, mask=inside, other=0.0).to(tl.float32) * beta1 + gradient * rest1
    square = tl.load(second + index, mask=inside, other=0.0).to(tl.float32) * beta2 + gradient * gradient * rest2
    root = tl.sqrt_rn(square) * root_scale + epsilon
    start = master if has_master else weights
    updated = tl.load(start + index, mask=inside, other=0.0).to(tl.float32) * kept
    updated -= tl.div_rn(mean, root) * step_size
    _store(first + index, mean, inside, place, numbers + 8, chance_first)
    _store(second + index, square, inside, place, numbers + 10, chance_second)
    if has_master:
        tl.store(master + index, updated, mask=inside)
    _store(weights + index, updated, inside, place, numbers + 6, chance_weights)


@kernel(unspecialized=["offset_low", "offset_high"])
def lion_kernel(
    weights: tl.tensor,
    gradients: tl.tensor,
    first: tl.tensor,
    master: tl.tensor,
    gradient_scale: tl.tensor,
    count: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    numbers: tl.tensor,
    offset_low: tl.tensor,
    offset_high: tl.tensor,
    has_master: tl.constexpr,
    chance_weights: tl.constexpr,
    chance_first: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """As `adamw_kernel`."""
    kept, rate = _number(numbers, 0), _number(numbers, 3)
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    place = index + offset_low.to(tl.int64) + (offset_high.to(tl.int64) << 31)
    gradient = tl.load(gradients + index, mask=inside, other=0.0).to(tl.float32)
    gradient *= tl.load(gradient_scale).to(tl.float32)
    mean = tl.load(first + index, mask=inside, other=0.0).to(tl.float32)
    mixed = mean * beta1 + gradient * rest1
    sign = (mixed > 0.0).to(tl.float32) - (mixed < 0.0).to(tl.float32)
    start = master if has_master else weights
    updated = tl.load(start + index, mask=inside, other=0.0).to(tl.float32) * kept - sign * rate
    _store(first + index, mean * beta2 + gradient * rest2, inside, place, numbers + 8, chance_first)
    if has_master:
        tl.store(master + index, updated, mask=inside)
    _store(weights + index, updated, inside, place, numbers + 6, chance_weights)


@kernel(unspecialized=["offset_low", "offset_high"])
def sgd_kernel(
    weights: tl.tensor,
    gradients: tl.tensor,
    first: tl.tensor,
    master: tl.tensor,
    gradient_scale: tl.tensor,
    count: tl.tensor,
    momentum: tl.tensor,
    weight_decay: tl.tensor,
    numbers: tl.tensor,
    offset_low: tl.tensor,
    offset_high: tl.tensor,
    has_first: tl.constexpr,
    nesterov: tl.constexpr,
    has_master: tl.constexpr,
    chance_weights: tl.constexpr,
    chance_first: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """As `adamw_kernel`."""
    rate = _number(numbers, 3)
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    place = index + offset_low.to(tl.int64) + (offset_high.to(tl.int64) << 31)
    start = master if has_master else weights
    before = tl.load(start + index, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + index, mask=inside, other=0.0).to(tl.float32)
    gradient = gradient * tl.load(gradient_scale).to(tl.float32) + before * weight_decay
    if has_first:
        mean = tl.load(first + index, mask=inside, other=0.0).to(tl.float32) * momentum + gradient
        _store(first + index, mean, inside, place, numbers + 8, chance_first)
        gradient = gradient + mean * momentum if nesterov else mean
    updated = before - gradient * rate
    if has_master:
        tl.store(master + index, updated, mask=inside)
    _store(weights + index, updated, inside, place, numbers + 6, chance_weights)


@kernel()
def _looked_up(values: tl.tensor, places: tl.tensor, rows: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    """Entries of a table of which a program holds all."""
    found = tl.gather(values, tl.reshape(places, (rows * width,)), 0)
    return tl.reshape(found, (rows, width))


@kernel()
def _shares(values: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Values over their row's scale, with the bits of a division, which takes three times as many instructions.

    With the divisor's reciprocal rounded to the nearest, what a product with it lacks, added twice, leaves the quotient
    rounded to the nearest (P. Markstein, 1990), where no difference is too small: powers of two take care of that.
    """
    power = tl.where(scale < 1e-18, 18446744073709551616.0, tl.where(scale > 1e18, 5.421010862427522e-20, 1.0))
    divisor = (tl.where(scale > 0.0, scale, 1.0) * power)[:, None]
    inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    values *= power[:, None]
    found = values * inverse
    found = tl.fma(tl.fma(-found, divisor, values), inverse, found)
    return tl.fma(tl.fma(-found, divisor, values), inverse, found)


@kernel()
def _ramp(values: tl.tensor, slope: tl.constexpr) -> tl.tensor:
    """The part of a decade's width that lies below: in one instruction."""
    return tl.minimum(tl.maximum(tl.fma(values, slope, -1.0 / 9.0), 0.0), 1.0)


@kernel()
def _borders_below(size: tl.tensor, each: tl.constexpr, start: tl.constexpr) -> tl.tensor:
    """`start`, and how many borders are between 0 and a share, of which the lowest decade has `each`; with a fraction.

    Values of a decade are evenly spaced, twice as many of them in the one above. It is off by a quarter at most, so
    that the nearest border is told, and no more than all, whatever comes in.
    """
    found = tl.fma(_ramp(size, 1e6 / 0.9), each, start)
    found = tl.fma(_ramp(size, 1e5 / 0.9), 2.0 * each, found)
    found = tl.fma(_ramp(size, 1e4 / 0.9), 4.0 * each, found)
    found = tl.fma(_ramp(size, 1e3 / 0.9), 8.0 * each, found)
    found = tl.fma(_ramp(size, 1e2 / 0.9), 16.0 * each, found)
    found = tl.fma(_ramp(size, 1e1 / 0.9), 32.0 * each, found)
    return tl.fma(_ramp(size, 1.0 / 0.9), 64.0 * each, found)


@kernel()
def _nearest(
    shares: tl.tensor, borders: tl.tensor, signed: tl.constexpr, rows: tl.constexpr, width: tl.constexpr
) -> tl.tensor:
    """The code of each share of a scale: the number of borders below it, of which it is compared with the nearest.

    `borders` begin with that below code 0, which is −∞.
    """
    if signed:
        sign = ((shares.to(tl.int32, bitcast=True) & -2147483648) | 0x3F800000).to(tl.float32, bitcast=True)
        place = tl.fma(_borders_below(tl.abs(shares), 1.0, 0.5), sign, 127.5)
    else:
        place = _borders_below(shares, 2.0, 1.0)
    # Added to 1.5 · 2²³, a number is rounded to a whole one, in the lowest bits.
    code = (place + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return code - (shares <= _looked_up(borders, code, rows, width)).to(tl.int32)


@kernel(unspecialized=["offset_low", "offset_high"])
def adamw_8bit_kernel(
    weights: tl.tensor,
    gradients: tl.tensor,
    first: tl.tensor,
    first_scale: tl.tensor,
    second: tl.tensor,
    second_scale: tl.tensor,
    master: tl.tensor,
    tables: tl.tensor,
    gradient_scale: tl.tensor,
    count: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    epsilon: tl.tensor,
    numbers: tl.tensor,
    offset_low: tl.tensor,
    offset_high: tl.tensor,
    has_master: tl.constexpr,
    chance_weights: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """As `adamw_kernel`, a row for each block of codes that share a scale."""
    kept, step_size, root_scale = _number(numbers, 0), _number(numbers, 1), _number(numbers, 2)
    begin = tl.program_id(0).to(tl.int64) * (rows * width)
    left = tl.minimum(count - begin, rows * width).to(tl.int32)
    row, column = tl.arange(0, rows), tl.arange(0, width)
    index = row[:, None] * width + column[None, :]
    inside, begun = index < left, row * width < left
    place = index + (begin + offset_low.to(tl.int64) + (offset_high.to(tl.int64) << 31))
    clip = tl.load(gradient_scale).to(tl.float32)
    gradient = tl.load(gradients + begin + index, mask=inside, other=0.0).to(tl.float32) * clip
    scales = first_scale + tl.program_id(0) * rows + row
    square_scales = second_scale + tl.program_id(0) * rows + row
    # Behind the last number are codes of 0, so that what is there stays 0.
    code = tl.load(first + begin + index, mask=inside, other=127).to(tl.int32)
    mean = _looked_up(tl.load(tables + column), code, rows, width)
    mean *= tl.load(scales, mask=begun, other=0.0)[:, None]
    code = tl.load(second + begin + index, mask=inside, other=0).to(tl.int32)
    square = _looked_up(tl.load(tables + 2 * width + column), code, rows, width)
    square *= tl.load(square_scales, mask=begun, other=0.0)[:, None]
    mean = mean * beta1 + gradient * rest1
    square = square * beta2 + gradient * gradient * rest2
    root = tl.sqrt_rn(square) * root_scale + epsilon
    start = master if has_master else weights
    updated = tl.load(start + begin + index, mask=inside, other=0.0).to(tl.float32) * kept
    updated -= tl.div_rn(mean, root) * step_size
    scale = tl.max(tl.abs(mean), 1)
    tl.store(scales, scale, mask=begun)
    code = _nearest(_shares(mean, scale), tl.load(tables + width + column), True, rows, width)
    tl.store(first + begin + index, code.to(tl.uint8), mask=inside)
    scale = tl.max(square, 1)
    tl.store(square_scales, scale, mask=begun)
    code = _nearest(_shares(square, scale), tl.load(tables + 3 * width + column), False, rows, width)
    tl.store(second + begin + index, code.to(tl.uint8), mask=inside)
    if has_master:
        tl.store(master + begin + index, updated, mask=inside)
    _store(weights + begin + index, updated, inside, place, numbers + 6, chance_weights)


@kernel(unspecialized=["count"])
def squares_kernel(
    values: tl.tensor, partial: tl.tensor, count: tl.tensor, stride: tl.tensor, block: tl.constexpr
) -> None:
    """Every so manieth block a program."""
    program = tl.program_id(0)
    columns = program.to(tl.int64) * block + tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    # In 64 bits: the last step goes beyond the count.
    for first in range(0, count.to(tl.int64), stride):
        place = first + columns
        piece = tl.load(values + place, mask=place < count, other=0.0).to(tl.float32)
        total += piece * piece
    tl.store(partial + program, tl.sum(total, 0))


# -- calls ------------------------------------------------------------------------------------------------------------


def sum_of_squares(values: Tensor, *, out: Tensor) -> None:
    """See `dispatch.sum_of_squares`."""
    flat = values.reshape(-1)
    programs = min(_SQUARES_PROGRAMS, triton.cdiv(len(flat), _UPDATE_BLOCK))
    if not programs:
        return
    partial = torch.empty(programs, dtype=torch.float32, device=values.device)
    squares_kernel[(programs,)](
        flat, partial, len(flat), programs * _UPDATE_BLOCK, block=_UPDATE_BLOCK, num_warps=4, **ARITHMETIC
    )
    out += partial.sum(dtype=torch.float64).to(out.dtype)


@lru_cache(maxsize=16)
def scalar_on(value: float, device: torch.device) -> Tensor:
    """A number on the device, which every update asks for again."""
    return torch.full((), value, dtype=torch.float32, device=device)


def _of_step(settings: UpdateSettings, device: torch.device) -> tuple[Tensor, Tensor]:
    """What gradients are multiplied by and the step's numbers, on the device."""
    scale, numbers = settings.gradient_scale, settings.numbers
    if not isinstance(scale, Tensor):
        scale = scalar_on(float(scale), device)
    if numbers is None:
        numbers = torch.from_numpy(settings.bits_of_step()).to(device)
    return scale, numbers


def adamw(
    weights: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    master: Tensor | None,
    *,
    settings: UpdateSettings,
    offset: int,
) -> None:
    """See `dispatch.adamw`."""
    if not len(weights):
        return
    scale, numbers = _of_step(settings, weights.device)
    chance = [settings.rounding is not None and each.dtype == torch.bfloat16 for each in (weights, first, second)]
    adamw_kernel[(triton.cdiv(len(weights), _UPDATE_BLOCK),)](
        weights,
        gradients,
        first,
        second,
        weights if master is None else master,
        scale,
        len(weights),
        settings.beta1,
        1.0 - settings.beta1,
        settings.beta2,
        1.0 - settings.beta2,
        settings.epsilon,
        numbers,
        offset & 0x7FFFFFFF,
        offset >> 31,
        has_master=master is not None,
        chance_weights=chance[0] and master is None,
        chance_first=chance[1],
        chance_second=chance[2],
        block=_UPDATE_BLOCK,
        num_warps=4,
        **ARITHMETIC,
    )


def lion(
    weights: Tensor, gradients: Tensor, first: Tensor, master: Tensor | None, *, settings: UpdateSettings, offset: int
) -> None:
    """See `dispatch.lion`."""
    if not len(weights):
        return
    scale, numbers = _of_step(settings, weights.device)
    chance = [settings.rounding is not None and each.dtype == torch.bfloat16 for each in (weights, first)]
    lion_kernel[(triton.cdiv(len(weights), _UPDATE_BLOCK),)](
        weights,
        gradients,
        first,
        weights if master is None else master,
        scale,
        len(weights),
        settings.beta1,
        1.0 - settings.beta1,
        settings.beta2,
        1.0 - settings.beta2,
        numbers,
        offset & 0x7FFFFFFF,
        offset >> 31,
        has_master=master is not None,
        chance_weights=chance[0] and master is None,
        chance_first=chance[1],
        block=_UPDATE_BLOCK,
        num_warps=4,
        **ARITHMETIC,
    )


def sgd(
    weights: Tensor,
    gradients: Tensor,
    first: Tensor | None,
    master: Tensor | None,
    *,
    settings: UpdateSettings,
    offset: int,
) -> None:
    """See `dispatch.sgd`."""
    if not len(weights):
        return
    scale, numbers = _of_step(settings, weights.device)
    by_chance = settings.rounding is not None
    sgd_kernel[(triton.cdiv(len(weights), _UPDATE_BLOCK),)](
        weights,
        gradients,
        weights if first is None else first,
        weights if master is None else master,
        scale,
        len(weights),
        settings.momentum,
        settings.weight_decay,
        numbers,
        offset & 0x7FFFFFFF,
        offset >> 31,
        has_first=first is not None,
        nesterov=settings.nesterov,
        has_master=master is not None,
        chance_weights=by_chance and weights.dtype == torch.bfloat16 and master is None,
        chance_first=by_chance and first is not None and first.dtype == torch.bfloat16,
        block=_UPDATE_BLOCK,
        num_warps=4,
        **ARITHMETIC,
    )


@lru_cache(maxsize=16)
def _tables(device: torch.device) -> Tensor:
    """Values and the borders below them, of the table with signs, then of the one without."""
    found = torch.full((4, VALUES), -torch.inf, dtype=torch.float32, device=device)
    for index, signed in enumerate((True, False)):
        found[2 * index] = table(device, signed=signed)
        found[2 * index + 1, 1:] = borders(device, signed=signed)
    return found


def adamw_8bit(
    weights: Tensor, gradients: Tensor, codes: Codes, master: Tensor | None, *, settings: UpdateSettings, offset: int
) -> None:
    """See `dispatch.adamw_8bit`."""
    if not len(weights):
        return
    scale, numbers = _of_step(settings, weights.device)
    by_chance = settings.rounding is not None and weights.dtype == torch.bfloat16
    rows = _UPDATE_BLOCK // QUANTISED_BLOCK
    adamw_8bit_kernel[(triton.cdiv(len(weights), _UPDATE_BLOCK),)](
        weights,
        gradients,
        codes.first,
        codes.first_scale,
        codes.second,
        codes.second_scale,
        weights if master is None else master,
        _tables(weights.device),
        scale,
        len(weights),
        settings.beta1,
        1.0 - settings.beta1,
        settings.beta2,
        1.0 - settings.beta2,
        settings.epsilon,
        numbers,
        offset & 0x7FFFFFFF,
        offset >> 31,
        has_master=master is not None,
        chance_weights=by_chance and master is None,
        rows=rows,
        width=QUANTISED_BLOCK,
        num_warps=4,
        **ARITHMETIC,
    )
