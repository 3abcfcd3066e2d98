"""Norms as kernels of Triton: rows are read in blocks of columns, which are one for rows of up to 8,192 numbers."""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from flopwise.engine.kernels.fused_dropout import keep_some, lower_hash, token_of, upper_hash
from flopwise.engine.kernels.jit import kernel


@kernel()
def _rounded_sum(values: tl.tensor, others: tl.tensor) -> tl.tensor:
    return (values.to(tl.float32) + others.to(tl.float32)).to(values.dtype)


@kernel()
def _kept(
    values: tl.tensor,
    tokens: tl.tensor,
    keys: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    scale: tl.tensor,
    threshold: tl.constexpr,
) -> tl.tensor:
    """What dropout keeps of a row's numbers, in float32."""
    upper = upper_hash(token_of(tokens, row), keys)
    return keep_some(values.to(tl.float32), lower_hash(columns, keys), upper, scale, threshold)


@kernel()
def _result(
    normal: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    out: tl.tensor,
    rms: tl.constexpr,
    biased: tl.constexpr,
) -> tl.tensor:
    """The norm's result from the normal numbers, which with rms are rounded before the weight."""
    if rms:
        normal = normal.to(out.dtype.element_ty).to(tl.float32)
    normal *= tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if biased:
        normal += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    return normal


@kernel()
def _store_normal(
    out: tl.tensor,
    normal: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    rms: tl.constexpr,
    biased: tl.constexpr,
) -> None:
    result = _result(normal, weight, bias, place, inside, out, rms, biased)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@kernel()
def _store_statistics(
    statistics: tl.tensor, row: tl.tensor, mean: tl.tensor, reciprocal: tl.tensor, rms: tl.constexpr
) -> None:
    if rms:
        tl.store(statistics + row, reciprocal)
    else:
        tl.store(statistics + 2 * row, mean)
        tl.store(statistics + 2 * row + 1, reciprocal)


@kernel()
def whole_norm_forward_kernel(
    source: tl.tensor,
    other: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    statistics: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    other_stride: tl.tensor,
    out_stride: tl.tensor,
    total_stride: tl.tensor,
    epsilon: tl.tensor,
    tokens: tl.tensor,
    keys: tl.tensor,
    drop_scale: tl.tensor,
    rms: tl.constexpr,
    biased: tl.constexpr,
    added: tl.constexpr,
    kept: tl.constexpr,
    drops_other: tl.constexpr,
    drops_out: tl.constexpr,
    threshold: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """A row a program, in one block. With `kept` it goes to `total` as well, with `added` as the sum with the other.

    Of the other, or of the result, a part may be dropped, as `fused_dropout` does.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    values = tl.load(source + row * source_stride + columns, mask=inside, other=0.0)
    if added:
        others = tl.load(other + row * other_stride + columns, mask=inside, other=0.0)
        if drops_other:
            others = _kept(others, tokens, keys, row, columns, drop_scale, threshold)
        values = _rounded_sum(values, others)
    if kept:
        tl.store(total + row * total_stride + columns, values, mask=inside)
    values = values.to(tl.float32)
    mean = 0.0
    if not rms:
        mean = tl.sum(values, 0) / width
        values = tl.where(inside, values - mean, 0.0)
    reciprocal = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + epsilon)
    result = _result(values * reciprocal, weight, bias, columns, inside, out, rms, biased)
    if drops_out:
        result = _kept(result, tokens, keys, row, columns, drop_scale, threshold)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)
    _store_statistics(statistics, row, mean, reciprocal, rms)


@kernel()
def norm_forward_kernel(
    source: tl.tensor,
    other: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    statistics: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    other_stride: tl.tensor,
    out_stride: tl.tensor,
    total_stride: tl.tensor,
    epsilon: tl.tensor,
    tokens: tl.tensor,
    keys: tl.tensor,
    drop_scale: tl.tensor,
    rms: tl.constexpr,
    biased: tl.constexpr,
    added: tl.constexpr,
    kept: tl.constexpr,
    drops_other: tl.constexpr,
    drops_out: tl.constexpr,
    threshold: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The same for rows of several blocks, which are read more than once."""
    row = tl.program_id(0).to(tl.int64)
    source += row * source_stride
    out += row * out_stride
    columns = tl.arange(0, block)
    if kept:
        total += row * total_stride
        for first in range(0, width, block):
            inside = first + columns < width
            values = tl.load(source + first + columns, mask=inside, other=0.0)
            if added:
                others = tl.load(other + row * other_stride + first + columns, mask=inside, other=0.0)
                if drops_other:
                    others = _kept(others, tokens, keys, row, first + columns, drop_scale, threshold)
                values = _rounded_sum(values, others)
            tl.store(total + first + columns, values, mask=inside)
        # What one thread has written another may read.
        tl.debug_barrier()
        source = total
    mean = 0.0
    if not rms:
        sums = tl.zeros((block,), tl.float32)
        for first in range(0, width, block):
            sums += tl.load(source + first + columns, mask=first + columns < width, other=0.0).to(tl.float32)
        mean = tl.sum(sums, 0) / width
    squares = tl.zeros((block,), tl.float32)
    for first in range(0, width, block):
        inside = first + columns < width
        values = tl.load(source + first + columns, mask=inside, other=0.0).to(tl.float32)
        values = tl.where(inside, values - mean, 0.0)
        squares += values * values
    reciprocal = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + epsilon)
    for first in range(0, width, block):
        inside = first + columns < width
        values = tl.load(source + first + columns, mask=inside, other=0.0).to(tl.float32)
        place, normal = first + columns, (values - mean) * reciprocal
        result = _result(normal, weight, bias, place, inside, out, rms, biased)
        if drops_out:
            result = _kept(result, tokens, keys, row, place, drop_scale, threshold)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    _store_statistics(statistics, row, mean, reciprocal, rms)


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
    bias: tl.tensor,
    statistics: tl.tensor,
    out: tl.tensor,
    weight_partial: tl.tensor,
    bias_partial: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    gradient_stride: tl.tensor,
    source_stride: tl.tensor,
    out_stride: tl.tensor,
    tokens: tl.tensor,
    keys: tl.tensor,
    drop_scale: tl.tensor,
    dropped: tl.tensor,
    dropped_stride: tl.tensor,
    rms: tl.constexpr,
    biased: tl.constexpr,
    accumulate: tl.constexpr,
    recompute: tl.constexpr,
    drops: tl.constexpr,
    threshold: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Every so manieth row a program, which adds its rows' weight gradients to its partial sums, for long rows.

    With `recompute` the norm's own result takes the place of its gradient. With `drops` what a mask keeps of `out` goes
    to `dropped`.
    """
    program = tl.program_id(0)
    columns = tl.arange(0, block)
    own = program.to(tl.int64) * width
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
            below = below.to(out.dtype.element_ty)
            tl.store(target, below, mask=inside)
            if drops:
                some = _kept(below, tokens, keys, row, place, drop_scale, threshold)
                tl.store(dropped + row * dropped_stride + place, some.to(dropped.dtype.element_ty), mask=inside)
            if recompute:
                _store_normal(above_row, normal, weight, bias, place, inside, rms, biased)


@kernel()
def whole_norm_backward_kernel(
    gradient: tl.tensor,
    source: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    statistics: tl.tensor,
    out: tl.tensor,
    weight_partial: tl.tensor,
    bias_partial: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    gradient_stride: tl.tensor,
    source_stride: tl.tensor,
    out_stride: tl.tensor,
    tokens: tl.tensor,
    keys: tl.tensor,
    drop_scale: tl.tensor,
    dropped: tl.tensor,
    dropped_stride: tl.tensor,
    rms: tl.constexpr,
    biased: tl.constexpr,
    accumulate: tl.constexpr,
    recompute: tl.constexpr,
    drops: tl.constexpr,
    threshold: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The same where a block is a whole row: every number is read once, a row ahead, and sums stay in registers."""
    program, step = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, block)
    inside = columns < width
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((block,), tl.float32)
    bias_sum = tl.zeros((block,), tl.float32)
    ahead = tl.full((), 0, tl.int64) + program
    next_above = tl.load(gradient + ahead * gradient_stride + columns, mask=inside, other=0.0)
    next_source = tl.load(source + ahead * source_stride + columns, mask=inside, other=0.0)
    next_total = next_above
    if accumulate:
        next_total = tl.load(out + ahead * out_stride + columns, mask=inside, other=0.0)
    for number in range(program, rows, step):
        row = tl.full((), 0, tl.int64) + number
        above, values, total = next_above.to(tl.float32), next_source.to(tl.float32), next_total.to(tl.float32)
        ahead = row + step
        there = inside & (ahead < rows)
        next_above = tl.load(gradient + ahead * gradient_stride + columns, mask=there, other=0.0)
        next_source = tl.load(source + ahead * source_stride + columns, mask=there, other=0.0)
        if accumulate:
            next_total = tl.load(out + ahead * out_stride + columns, mask=there, other=0.0)
        mean, reciprocal = _statistics(statistics, row, rms)
        normal = tl.where(inside, (values - mean) * reciprocal, 0.0)
        multiplied = normal.to(source.dtype.element_ty).to(tl.float32) if rms else normal
        weight_sum += above * multiplied
        bias_sum += above
        scaled = above * weights
        share = tl.sum(scaled * normal, 0) / width
        if not rms:
            scaled -= tl.sum(scaled, 0) / width
        below = (scaled - normal * share) * reciprocal
        below = below + total if accumulate else below
        below = below.to(out.dtype.element_ty)
        tl.store(out + row * out_stride + columns, below, mask=inside)
        if drops:
            some = _kept(below, tokens, keys, row, columns, drop_scale, threshold)
            tl.store(dropped + row * dropped_stride + columns, some.to(dropped.dtype.element_ty), mask=inside)
        if recompute:
            _store_normal(gradient + row * gradient_stride, normal, weight, bias, columns, inside, rms, biased)
    own = program.to(tl.int64) * width
    tl.store(weight_partial + own + columns, weight_sum, mask=inside)
    if biased:
        tl.store(bias_partial + own + columns, bias_sum, mask=inside)


@kernel()
def add_rows_kernel(
    rows: tl.tensor, total: tl.tensor, count: tl.tensor, width: tl.tensor, lines: tl.constexpr, block: tl.constexpr
) -> None:
    """`total` gets the sum of all rows added, a block of columns a program; so many lines are read at once."""
    columns = tl.program_id(0) * block + tl.arange(0, block)
    inside = columns < width
    own = tl.arange(0, lines)
    sums = tl.zeros((lines, block), tl.float32)
    for first in range(0, count, lines):
        place = (first + own)[:, None] * width + columns[None, :]
        sums += tl.load(rows + place, mask=((first + own) < count)[:, None] & inside[None, :], other=0.0)
    before = tl.load(total + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + columns, (before + tl.sum(sums, 0)).to(total.dtype.element_ty), mask=inside)
