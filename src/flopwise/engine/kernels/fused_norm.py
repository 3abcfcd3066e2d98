"""Norms as kernels of Triton: rows are read in blocks of columns, which are one for rows of up to 8,192 numbers."""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from flopwise.engine.kernels.jit import kernel


@kernel()
def norm_forward_kernel(
    source: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    statistics: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    out_stride: tl.tensor,
    epsilon: tl.tensor,
    rms: tl.constexpr,
    biased: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    source += row * source_stride
    out += row * out_stride
    columns = tl.arange(0, block)
    mean = 0.0
    if not rms:
        total = tl.zeros((block,), tl.float32)
        for first in range(0, width, block):
            total += tl.load(source + first + columns, mask=first + columns < width, other=0.0).to(tl.float32)
        mean = tl.sum(total, 0) / width
        tl.store(statistics + 2 * row, mean)
    squares = tl.zeros((block,), tl.float32)
    for first in range(0, width, block):
        inside = first + columns < width
        values = tl.load(source + first + columns, mask=inside, other=0.0).to(tl.float32)
        values = tl.where(inside, values - mean, 0.0)
        squares += values * values
    reciprocal = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + epsilon)
    tl.store(statistics + (row if rms else 2 * row + 1), reciprocal)
    for first in range(0, width, block):
        inside = first + columns < width
        values = tl.load(source + first + columns, mask=inside, other=0.0).to(tl.float32)
        values = (values - mean) * reciprocal
        if rms:
            values = values.to(source.dtype.element_ty).to(tl.float32)
        values *= tl.load(weight + first + columns, mask=inside, other=0.0).to(tl.float32)
        if biased:
            values += tl.load(bias + first + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + first + columns, values.to(out.dtype.element_ty), mask=inside)


@kernel()
def _statistics(statistics: tl.tensor, row: tl.tensor, rms: tl.constexpr) -> tl.tensor:
    """A row's mean and reciprocal deviation."""
    if rms:
        mean = 0.0
        reciprocal = tl.load(statistics + row)
    else:
        mean = tl.load(statistics + 2 * row)
        reciprocal = tl.load(statistics + 2 * row + 1)
    return mean, reciprocal


@kernel()
def _normal(
    source: tl.tensor, place: tl.tensor, inside: tl.tensor, mean: tl.tensor, reciprocal: tl.tensor
) -> tl.tensor:
    """A row's normal numbers, zero beyond its end."""
    values = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, (values - mean) * reciprocal, 0.0)


@kernel()
def _means(
    gradient: tl.tensor,
    source: tl.tensor,
    weight: tl.tensor,
    width: tl.tensor,
    mean: tl.tensor,
    reciprocal: tl.tensor,
    rms: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Means over a row: of the weighted gradient times the normal numbers, and of the weighted gradient."""
    columns = tl.arange(0, block)
    products = tl.zeros((block,), tl.float32)
    scaled = tl.zeros((block,), tl.float32)
    for first in range(0, width, block):
        place = first + columns
        inside = place < width
        above = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        above *= tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
        products += above * _normal(source, place, inside, mean, reciprocal)
        scaled += above
    shift = 0.0
    if not rms:
        shift = tl.sum(scaled, 0) / width
    return tl.sum(products, 0) / width, shift


@kernel()
def _add_partial(place: tl.tensor, values: tl.tensor, inside: tl.tensor) -> None:
    tl.store(place, tl.load(place, mask=inside, other=0.0) + values, mask=inside)


@kernel()
def norm_backward_kernel(
    gradient: tl.tensor,
    source: tl.tensor,
    weight: tl.tensor,
    statistics: tl.tensor,
    out: tl.tensor,
    weight_partial: tl.tensor,
    bias_partial: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    gradient_stride: tl.tensor,
    source_stride: tl.tensor,
    out_stride: tl.tensor,
    rms: tl.constexpr,
    biased: tl.constexpr,
    accumulate: tl.constexpr,
    whole: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Every so manieth row a program, which sums their weight gradients: in registers where a block is a whole row."""
    program = tl.program_id(0)
    columns = tl.arange(0, block)
    own = program.to(tl.int64) * width
    weight_sum = tl.zeros((block,), tl.float32)
    bias_sum = tl.zeros((block,), tl.float32)
    for number in range(program, rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + number
        mean, reciprocal = _statistics(statistics, row, rms)
        above_row, source_row = gradient + row * gradient_stride, source + row * source_stride
        share, shift = _means(above_row, source_row, weight, width, mean, reciprocal, rms, block)
        for first in range(0, width, block):
            place = first + columns
            inside = place < width
            normal = _normal(source_row, place, inside, mean, reciprocal)
            above = tl.load(above_row + place, mask=inside, other=0.0).to(tl.float32)
            # The norm with rms multiplied the weight with rounded numbers.
            multiplied = normal.to(source.dtype.element_ty).to(tl.float32) if rms else normal
            if whole:
                weight_sum += above * multiplied
                bias_sum += above
            else:
                _add_partial(weight_partial + own + place, above * multiplied, inside)
                if biased:
                    _add_partial(bias_partial + own + place, above, inside)
                # The next row's sums may be read by other threads than have written this one's.
                tl.debug_barrier()
            above *= tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
            below = (above - shift - normal * share) * reciprocal
            target = out + row * out_stride + place
            if accumulate:
                below += tl.load(target, mask=inside, other=0.0).to(tl.float32)
            tl.store(target, below.to(out.dtype.element_ty), mask=inside)
    if whole:
        tl.store(weight_partial + own + columns, weight_sum, mask=columns < width)
        if biased:
            tl.store(bias_partial + own + columns, bias_sum, mask=columns < width)
