"""The optimizer's kernels of Triton: AdamW with rounding by chance, and sums of squares."""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from flopwise.engine.kernels.jit import kernel


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
def _nearest(shares: tl.tensor, borders: tl.tensor, signed: tl.constexpr) -> tl.tensor:
    """The code of each share of a scale: the number of borders below it.

    Its decade and the place within that tell it but for one, since values are evenly spaced there (`adamw_8bit`).
    """
    size = tl.abs(shares)
    decade = (size > 1e-6).to(tl.int32) + (size > 1e-5).to(tl.int32) + (size > 1e-4).to(tl.int32)
    decade += (size > 1e-3).to(tl.int32) + (size > 1e-2).to(tl.int32) + (size > 1e-1).to(tl.int32)
    small = tl.where(size > 1e-4, 1e3, tl.where(size > 1e-5, 1e4, tl.where(size > 1e-6, 1e5, 1e6)))
    tens = tl.where(size > 1e-1, 1.0, tl.where(size > 1e-2, 1e1, tl.where(size > 1e-3, 1e2, small)))
    doubled = decade if signed else decade + 1
    # Two to that power.
    count = ((doubled + 127) << 23).to(tl.float32, bitcast=True)
    place = tl.minimum(tl.maximum((size * tens - 0.1) * (count / 0.9), 0.0), count - 1.0).to(tl.int32)
    below = count.to(tl.int32) - 1 + place
    code = tl.where(shares < 0.0, 126 - below, 128 + below) if signed else below
    lower = tl.load(borders + tl.maximum(code - 1, 0))
    upper = tl.load(borders + code)
    code -= ((code > 0) & (shares <= lower)).to(tl.int32)
    return code + ((code < 255) & (shares > upper)).to(tl.int32)


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
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    index = row[:, None] * width + tl.arange(0, width)[None, :]
    inside, begun = index < count, row * width < count
    place = index + offset_low.to(tl.int64) + (offset_high.to(tl.int64) << 31)
    clip = tl.load(gradient_scale).to(tl.float32)
    gradient = tl.load(gradients + index, mask=inside, other=0.0).to(tl.float32) * clip
    scale = tl.load(first_scale + row, mask=begun, other=0.0)
    mean = tl.load(tables + tl.load(first + index, mask=inside, other=0).to(tl.int32)) * scale[:, None]
    scale = tl.load(second_scale + row, mask=begun, other=0.0)
    square = tl.load(tables + 2 * width + tl.load(second + index, mask=inside, other=0).to(tl.int32)) * scale[:, None]
    mean = tl.where(inside, mean * beta1 + gradient * rest1, 0.0)
    square = tl.where(inside, square * beta2 + gradient * gradient * rest2, 0.0)
    root = tl.sqrt_rn(square) * root_scale + epsilon
    start = master if has_master else weights
    updated = tl.load(start + index, mask=inside, other=0.0).to(tl.float32) * kept
    updated -= tl.div_rn(mean, root) * step_size
    scale = tl.max(tl.abs(mean), 1)
    tl.store(first_scale + row, scale, mask=begun)
    shares = tl.div_rn(mean, tl.where(scale > 0.0, scale, 1.0)[:, None] + tl.zeros_like(mean))
    tl.store(first + index, _nearest(shares, tables + width, True).to(tl.uint8), mask=inside)
    scale = tl.max(square, 1)
    tl.store(second_scale + row, scale, mask=begun)
    shares = tl.div_rn(square, tl.where(scale > 0.0, scale, 1.0)[:, None] + tl.zeros_like(square))
    tl.store(second + index, _nearest(shares, tables + 3 * width, False).to(tl.uint8), mask=inside)
    if has_master:
        tl.store(master + index, updated, mask=inside)
    _store(weights + index, updated, inside, place, numbers + 6, chance_weights)


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
