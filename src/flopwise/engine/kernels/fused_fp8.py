"""Quantising to fp8 as kernels of Triton: one that reads rows, and two that read columns and write them as rows.

They have the bits of the plain forms. Magnitudes are compared as integers: without their sign the bits of float32 have
the order of the numbers, with infinity and then NaN above all others, so that neither is lost in a maximum.
"""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from flopwise.engine.kernels.fp8 import LEAST_AMAX, SHARE_OF_LARGEST
from flopwise.engine.kernels.jit import ARITHMETIC, kernel, warps_for

WIDEST_ROW = 32768
"""Numbers of a row that a program holds in its registers, so that it is read once."""
AMAX_ROWS = 32
AMAX_COLUMNS = 128
AMAX_LOOPS = 16
TILE_ROWS = 128
TILE_COLUMNS = 64
"""A tile's rows and columns are 128 bytes, those of bf16 that are read and those of fp8 that are written."""


@kernel()
def _magnitudes(values: tl.tensor) -> tl.tensor:
    return values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@kernel()
def _scale(magnitude: tl.tensor, least: tl.constexpr, share: tl.constexpr) -> tl.tensor:
    """A scale from the bits of the largest magnitude."""
    amax = magnitude.to(tl.float32, bitcast=True)
    # A NaN is not less than anything.
    return tl.where(amax < least, least, amax) * share


@kernel()
def _quantise_rows_kernel(
    source: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    out_stride: tl.tensor,
    least: tl.constexpr,
    share: tl.constexpr,
    whole: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One row a program: read once where a block is a whole row, else twice."""
    row = tl.program_id(0).to(tl.int64)
    source += row * source_stride
    out += row * out_stride
    columns = tl.arange(0, block)
    if whole:
        values = tl.load(source + columns, mask=columns < width, other=0.0)
        scale = _scale(tl.max(_magnitudes(values), 0), least, share)
        scaled = values.to(tl.float32) * tl.div_rn(1.0, scale)
        tl.store(out + columns, scaled.to(out.dtype.element_ty), mask=columns < width)
    else:
        most = tl.zeros((block,), tl.int32)
        for first in range(0, width, block):
            place = first + columns
            most = tl.maximum(most, _magnitudes(tl.load(source + place, mask=place < width, other=0.0)))
        scale = _scale(tl.max(most, 0), least, share)
        reciprocal = tl.div_rn(1.0, scale)
        for first in range(0, width, block):
            place = first + columns
            scaled = tl.load(source + place, mask=place < width, other=0.0).to(tl.float32) * reciprocal
            tl.store(out + place, scaled.to(out.dtype.element_ty), mask=place < width)
    tl.store(scales + row, scale)


@kernel()
def _quantise_columns_amax_kernel(
    source: tl.tensor,
    most: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    loops: tl.constexpr,
    row_block: tl.constexpr,
    column_block: tl.constexpr,
) -> None:
    """Some rows of some columns a program. A maximum is the same in whatever order programs come to it."""
    columns = tl.program_id(0) * column_block + tl.arange(0, column_block)
    row = tl.program_id(1).to(tl.int64) * (loops * row_block) + tl.arange(0, row_block)
    found = tl.zeros((row_block, column_block), tl.int32)
    for _ in range(loops):
        inside = (row < rows)[:, None] & (columns < width)[None, :]
        place = source + row[:, None] * source_stride + columns[None, :]
        found = tl.maximum(found, _magnitudes(tl.load(place, mask=inside, other=0.0)))
        row += row_block
    tl.atomic_max(most + columns, tl.max(found, 0), mask=columns < width)


@kernel()
def _quantise_columns_kernel(
    source: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    out_stride: tl.tensor,
    row_block: tl.constexpr,
    column_block: tl.constexpr,
) -> None:
    """A tile a program: read by its rows, written by its columns."""
    columns = tl.program_id(0) * column_block + tl.arange(0, column_block)
    row = tl.program_id(1).to(tl.int64) * row_block + tl.arange(0, row_block)
    inside = (row < rows)[:, None] & (columns < width)[None, :]
    values = tl.load(source + row[:, None] * source_stride + columns[None, :], mask=inside, other=0.0)
    scale = tl.load(scales + columns, mask=columns < width, other=1.0)
    scaled = values.to(tl.float32) * tl.div_rn(1.0, scale)[None, :]
    turned = tl.trans(scaled.to(out.dtype.element_ty))
    target = out + columns.to(tl.int64)[:, None] * out_stride + row[None, :]
    tl.store(target, turned, mask=(columns < width)[:, None] & (row < rows)[None, :])


def quantise_rows(source: Tensor, *, out: Tensor, scales: Tensor) -> None:
    """See `fp8.quantise_rows`."""
    rows, width = source.shape
    assert source.stride(1) == out.stride(1) == 1
    block = min(WIDEST_ROW, triton.next_power_of_2(width))
    _quantise_rows_kernel[(rows,)](
        source,
        out,
        scales,
        width,
        source.stride(0),
        out.stride(0),
        least=LEAST_AMAX,
        share=SHARE_OF_LARGEST,
        whole=block >= width,
        block=block,
        num_warps=warps_for(block),
        **ARITHMETIC,
    )


def quantise_columns(source: Tensor, *, out: Tensor, scales: Tensor) -> None:
    """See `fp8.quantise_columns`. The scales' room holds the largest magnitudes first."""
    rows, width = source.shape
    assert source.stride(1) == out.stride(1) == 1
    most = scales.view(torch.int32).zero_()
    _quantise_columns_amax_kernel[(triton.cdiv(width, AMAX_COLUMNS), triton.cdiv(rows, AMAX_ROWS * AMAX_LOOPS))](
        source,
        most,
        rows,
        width,
        source.stride(0),
        loops=AMAX_LOOPS,
        row_block=AMAX_ROWS,
        column_block=AMAX_COLUMNS,
        num_warps=4,
        **ARITHMETIC,
    )
    scales.clamp_(min=LEAST_AMAX).mul_(SHARE_OF_LARGEST)
    _quantise_columns_kernel[(triton.cdiv(width, TILE_COLUMNS), triton.cdiv(rows, TILE_ROWS))](
        source,
        out,
        scales,
        rows,
        width,
        source.stride(0),
        out.stride(0),
        row_block=TILE_ROWS,
        column_block=TILE_COLUMNS,
        num_warps=8,
        **ARITHMETIC,
    )
