"""Triton's form of a product as thin as an adapter's rank that is added to a wide result: one read and one write of it.

cuBLAS takes 1.6 times as long for it on an H200 (see docs/log.md), where all other thin products run at the memory's
rate.
"""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from flopwise.engine.kernels.jit import ARITHMETIC, kernel

LINES, COLUMNS = 32, 128
"""Of the result that a program adds to."""
LEAST_DEPTH, MOST_DEPTH = 16, 64
"""What a matrix unit takes at once, and what a program holds; deeper products are the library's."""


@kernel()
def _add_thin_product_kernel(
    low: tl.tensor,
    matrix: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    low_row: tl.tensor,
    matrix_column: tl.tensor,
    matrix_row: tl.tensor,
    out_row: tl.tensor,
    depth: tl.constexpr,
    depth_block: tl.constexpr,
    lines: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64) * lines + tl.arange(0, lines)
    column = tl.program_id(0) * block + tl.arange(0, block)
    inner = tl.arange(0, depth_block)
    there, inside, real = (row < rows)[:, None], (column < width)[None, :], inner < depth
    first = tl.load(low + row[:, None] * low_row + inner[None, :], mask=there & real[None, :], other=0.0)
    place = inner[:, None] * matrix_row + column.to(tl.int64)[None, :] * matrix_column
    second = tl.load(matrix + place, mask=inside & real[:, None], other=0.0)
    target = out + row[:, None] * out_row + column[None, :]
    total = tl.load(target, mask=there & inside, other=0.0).to(tl.float32)
    total += tl.dot(first, second) * scale
    tl.store(target, total.to(out.dtype.element_ty), mask=there & inside)


def add_thin_product(low: Tensor, matrix: Tensor, *, scale: float, out: Tensor) -> None:
    """`out` gets scale · low · matrix added; a row's numbers of `low` and `out` lie beside each other."""
    rows, width = out.shape
    depth = low.shape[1]
    _add_thin_product_kernel[(triton.cdiv(width, COLUMNS), triton.cdiv(rows, LINES))](
        low,
        matrix,
        out,
        rows,
        width,
        scale,
        low.stride(0),
        matrix.stride(1),
        matrix.stride(0),
        out.stride(0),
        depth=depth,
        depth_block=max(LEAST_DEPTH, triton.next_power_of_2(depth)),
        lines=LINES,
        block=COLUMNS,
        num_warps=4,
        **ARITHMETIC,
    )
