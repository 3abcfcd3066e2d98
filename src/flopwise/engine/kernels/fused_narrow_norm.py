"""Norms of narrow rows, such as those of heads, as kernels of Triton: a tile of rows a program.

A row of 128 numbers is too little work for a program: 524,288 of them took three times as long as their bytes do.
"""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from flopwise.engine.kernels.jit import kernel


@kernel()
def _normal_to_result(
    normal: tl.tensor, weights: tl.tensor, shift: tl.tensor, out: tl.tensor, rms: tl.constexpr
) -> tl.tensor:
    """With rms the normal numbers are rounded before the weight."""
    if rms:
        normal = normal.to(out.dtype.element_ty).to(tl.float32)
    return (normal * weights[None, :] + shift[None, :]).to(out.dtype.element_ty)


@kernel()
def narrow_norm_forward_kernel(
    source: tl.tensor,
    other: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    statistics: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    other_stride: tl.tensor,
    out_stride: tl.tensor,
    total_stride: tl.tensor,
    epsilon: tl.tensor,
    rms: tl.constexpr,
    biased: tl.constexpr,
    added: tl.constexpr,
    kept: tl.constexpr,
    lines: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """See `fused_norm.whole_norm_forward_kernel`."""
    row = tl.program_id(0).to(tl.int64) * lines + tl.arange(0, lines)
    columns = tl.arange(0, block)
    across = columns < width
    inside = (row < rows)[:, None] & across[None, :]
    weights = tl.load(weight + columns, mask=across, other=0.0).to(tl.float32)
    shift = tl.zeros((block,), tl.float32)
    if biased:
        shift = tl.load(bias + columns, mask=across, other=0.0).to(tl.float32)
    values = tl.load(source + row[:, None] * source_stride + columns[None, :], mask=inside, other=0.0)
    if added:
        others = tl.load(other + row[:, None] * other_stride + columns[None, :], mask=inside, other=0.0)
        values = (values.to(tl.float32) + others.to(tl.float32)).to(values.dtype)
    if kept:
        tl.store(total + row[:, None] * total_stride + columns[None, :], values, mask=inside)
    values = values.to(tl.float32)
    if not rms:
        mean = tl.sum(values, 1) / width
        values = tl.where(inside, values - mean[:, None], 0.0)
        tl.store(statistics + 2 * row, mean, mask=row < rows)
    reciprocal = 1.0 / tl.sqrt(tl.sum(values * values, 1) / width + epsilon)
    tl.store(statistics + (row if rms else 2 * row + 1), reciprocal, mask=row < rows)
    result = _normal_to_result(values * reciprocal[:, None], weights, shift, out, rms)
    tl.store(out + row[:, None] * out_stride + columns[None, :], result, mask=inside)


@kernel()
def narrow_norm_backward_kernel(
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
    rms: tl.constexpr,
    biased: tl.constexpr,
    accumulate: tl.constexpr,
    recompute: tl.constexpr,
    lines: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """See `fused_norm.whole_norm_backward_kernel`: every so manieth tile a program, whose sums stay in registers."""
    program, step = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, block)
    across = columns < width
    weights = tl.load(weight + columns, mask=across, other=0.0).to(tl.float32)
    shift = tl.zeros((block,), tl.float32)
    if recompute and biased:
        shift = tl.load(bias + columns, mask=across, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((lines, block), tl.float32)
    bias_sum = tl.zeros((lines, block), tl.float32)
    for first in range(program * lines, rows, step * lines):
        row = tl.full((), 0, tl.int64) + first + tl.arange(0, lines)
        there = row < rows
        inside = there[:, None] & across[None, :]
        above_place = gradient + row[:, None] * gradient_stride + columns[None, :]
        out_place = out + row[:, None] * out_stride + columns[None, :]
        above = tl.load(above_place, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(source + row[:, None] * source_stride + columns[None, :], mask=inside, other=0.0)
        reciprocal = tl.load(statistics + (row if rms else 2 * row + 1), mask=there, other=0.0)
        normal = values.to(tl.float32)
        if not rms:
            normal -= tl.load(statistics + 2 * row, mask=there, other=0.0)[:, None]
        normal = tl.where(inside, normal * reciprocal[:, None], 0.0)
        multiplied = normal.to(source.dtype.element_ty).to(tl.float32) if rms else normal
        weight_sum += above * multiplied
        bias_sum += above
        scaled = above * weights[None, :]
        share = tl.sum(scaled * normal, 1) / width
        if not rms:
            scaled -= (tl.sum(scaled, 1) / width)[:, None]
        below = (scaled - normal * share[:, None]) * reciprocal[:, None]
        if accumulate:
            below += tl.load(out_place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_place, below.to(out.dtype.element_ty), mask=inside)
        if recompute:
            tl.store(above_place, _normal_to_result(normal, weights, shift, gradient, rms), mask=inside)
    own = program.to(tl.int64) * width
    tl.store(weight_partial + own + columns, tl.sum(weight_sum, 0), mask=across)
    if biased:
        tl.store(bias_partial + own + columns, tl.sum(bias_sum, 0), mask=across)
