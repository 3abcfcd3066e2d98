"""Matrix products in fp8: operands in e4m3 with a scale for each row, and what multiplies them.

A row's scale is its largest number divided by 448, the largest that e4m3 holds, so that a row uses the whole range:
three bits behind the first one over a span of 28,672 to 1, and fewer below. Rows here are rows of what is multiplied,
both operands being summed along their rows: rows of the tensor that came, or its columns.

What is not finite stays so: a row with an infinity or NaN in it has a scale that is none, and its products are NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flopwise.engine.kernels.blocks import BLOCK_BYTES, has_triton, row_blocks
from flopwise.work.formats import FP8_MULTIPLE

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
SHARE_OF_LARGEST = 1.0 / LARGEST
"""Scales are products with this, which every device rounds alike; quotients by a constant are not."""
LEAST_AMAX = 2.0**-100
"""Rows with nothing larger are scaled as if they had it: the reciprocal of a scale stays finite."""
PIECE_ROWS = 512
"""Of each operand, what the plain product multiplies at once."""


def fits(rows: int, inner: int, columns: int) -> bool:
    """Whether a product (rows, inner) · (inner, columns) can be made in fp8."""
    return not any(side % FP8_MULTIPLE for side in (rows, inner, columns))


def quantise_rows(source: Tensor, *, out: Tensor, scales: Tensor) -> None:
    """`out` (rows, width) in fp8 and `scales` (rows,) in float32, of which the product is nearly `source`."""
    if source.is_cuda and has_triton():
        from flopwise.engine.kernels import fused_fp8

        fused_fp8.quantise_rows(source, out=out, scales=scales)
    else:
        plain_quantise_rows(source, out=out, scales=scales)


def quantise_columns(source: Tensor, *, out: Tensor, scales: Tensor) -> None:
    """The same of the transposed `source`: `out` (width, rows) and a scale for each column, `scales` (width,)."""
    if source.is_cuda and has_triton():
        from flopwise.engine.kernels import fused_fp8

        fused_fp8.quantise_columns(source, out=out, scales=scales)
    else:
        plain_quantise_columns(source, out=out, scales=scales)


def multiply(
    left: Tensor,
    left_scales: Tensor,
    right: Tensor,
    right_scales: Tensor,
    *,
    bias: Tensor | None,
    out: Tensor,
    fast_sums: bool,
) -> None:
    """`out` (rows, columns) gets left (rows, inner) · rightᵀ, of right (columns, inner), each times its scales.

    `fast_sums`: sums stay in the matrix units, which on Hopper keep about fourteen bits; else they are taken out of
    them to float32 every few terms.
    """
    if not left.is_cuda:
        plain_multiply(left, left_scales, right, right_scales, bias=bias, out=out)
        return
    torch._scaled_mm(
        left,
        right.t(),
        scale_a=left_scales.unsqueeze(1),
        scale_b=right_scales.unsqueeze(0),
        bias=bias,
        out_dtype=out.dtype,
        use_fast_accum=fast_sums,
        out=out,
    )


# -- plain forms -----------------------------------------------------------------------------------------------------


def scales_of(amax: Tensor) -> Tensor:
    """Scales from the largest magnitudes, written over them. NaN stays NaN."""
    return amax.clamp_(min=LEAST_AMAX).mul_(SHARE_OF_LARGEST)


def plain_quantise_rows(source: Tensor, *, out: Tensor, scales: Tensor) -> None:
    """See `quantise_rows`."""
    rows, width = source.shape
    for block in row_blocks(rows, 4 * width, 3):
        piece = source[block].float()
        scale = scales_of(piece.abs().amax(1))
        scales[block] = scale
        out[block] = piece.mul(scale.reciprocal_().unsqueeze(1)).to(FLOAT8)


def plain_quantise_columns(source: Tensor, *, out: Tensor, scales: Tensor) -> None:
    """See `quantise_columns`."""
    rows, width = source.shape
    scales.zero_()
    for block in row_blocks(rows, 4 * width, 3):
        torch.maximum(scales, source[block].float().abs().amax(0), out=scales)
    reciprocal = scales_of(scales).reciprocal()
    for block in row_blocks(rows, 4 * width, 3):
        out[:, block] = source[block].float().mul(reciprocal).to(FLOAT8).t()


def plain_multiply(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, *, bias: Tensor | None, out: Tensor
) -> None:
    """See `multiply`; sums are in float32, and the result is rounded once."""
    step = max(1, min(PIECE_ROWS, BLOCK_BYTES // (8 * left.shape[1])))
    for first in range(0, right.shape[0], step):
        columns = slice(first, first + step)
        factors = right[columns].float().t()
        for begin in range(0, left.shape[0], step):
            rows = slice(begin, begin + step)
            product = left[rows].float() @ factors
            product.mul_(left_scales[rows].unsqueeze(1)).mul_(right_scales[columns])
            if bias is not None:
                product.add_(bias[columns])
            out[rows, columns] = product
