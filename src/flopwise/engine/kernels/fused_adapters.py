"""Triton's forms of a product as thin as an adapter's rank that is added to a wide result: one read, one write of it.

cuBLAS takes 1.6 times as long for it on an H200 (see docs/log.md), where all other thin products run at the memory's
rate. Where an activation reads what was added to, or leads back to it, both are one kernel.
"""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from flopwise.engine.kernels.fused_activations import gated_back, gated_value, value_and_slope
from flopwise.engine.kernels.jit import ARITHMETIC, kernel
from flopwise.engine.kernels.thin import Thin

LINES, COLUMNS, WARPS = 32, 128, 4
"""Of the result that a program adds to."""
LEAST_DEPTH = 16
"""What a matrix unit takes at once."""


@kernel()
def _thin_product(
    low: tl.tensor,
    matrix: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    low_row: tl.tensor,
    matrix_column: tl.tensor,
    matrix_row: tl.tensor,
    depth: tl.constexpr,
    depth_block: tl.constexpr,
) -> tl.tensor:
    """A tile of low · matrix, in fp32."""
    inner = tl.arange(0, depth_block)
    real = inner < depth
    first = tl.load(
        low + row[:, None] * low_row + inner[None, :], mask=(row < rows)[:, None] & real[None, :], other=0.0
    )
    place = inner[:, None] * matrix_row + column.to(tl.int64)[None, :] * matrix_column
    second = tl.load(matrix + place, mask=(column < width)[None, :] & real[:, None], other=0.0)
    return tl.dot(first, second)


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
    there = (row < rows)[:, None] & (column < width)[None, :]
    target = out + row[:, None] * out_row + column[None, :]
    total = tl.load(target, mask=there, other=0.0).to(tl.float32)
    total += scale * _thin_product(
        low, matrix, row, column, rows, width, low_row, matrix_column, matrix_row, depth, depth_block
    )
    tl.store(target, total.to(out.dtype.element_ty), mask=there)


def add_thin_product(thin: Thin, *, scale: float, out: Tensor) -> None:
    """`out` gets scale · low · matrix added; a row's numbers of `out` lie beside each other."""
    rows, width = out.shape
    _add_thin_product_kernel[(triton.cdiv(width, COLUMNS), triton.cdiv(rows, LINES))](
        *thin,
        out,
        rows,
        width,
        scale,
        *thin.strides,
        out.stride(0),
        depth=_depth(thin),
        depth_block=_depth_block(_depth(thin)),
        lines=LINES,
        block=COLUMNS,
        num_warps=WARPS,
        **ARITHMETIC,
    )


@kernel()
def _sums_activation_forward_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    gate_low: tl.tensor,
    gate_matrix: tl.tensor,
    up_low: tl.tensor,
    up_matrix: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    gate_row: tl.tensor,
    up_row: tl.tensor,
    out_row: tl.tensor,
    gate_low_row: tl.tensor,
    gate_matrix_column: tl.tensor,
    gate_matrix_row: tl.tensor,
    up_low_row: tl.tensor,
    up_matrix_column: tl.tensor,
    up_matrix_row: tl.tensor,
    kind: tl.constexpr,
    gated: tl.constexpr,
    gate_depth: tl.constexpr,
    gate_block: tl.constexpr,
    up_depth: tl.constexpr,
    up_block: tl.constexpr,
    lines: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """A depth of 0: nothing is added there."""
    row = tl.program_id(1).to(tl.int64) * lines + tl.arange(0, lines)
    column = tl.program_id(0) * block + tl.arange(0, block)
    there = (row < rows)[:, None] & (column < width)[None, :]
    place = up + row[:, None] * up_row + column[None, :]
    result = tl.load(place, mask=there, other=0.0).to(tl.float32)
    if up_depth:
        result += scale * _thin_product(
            up_low, up_matrix, row, column, rows, width, up_low_row, up_matrix_column, up_matrix_row, up_depth, up_block
        )
        # The activation reads what is kept, as a kernel behind this one would.
        kept = result.to(up.dtype.element_ty)
        tl.store(place, kept, mask=there)
        result = kept.to(tl.float32)
    if gated:
        place = gate + row[:, None] * gate_row + column[None, :]
        gates = tl.load(place, mask=there, other=0.0).to(tl.float32)
        if gate_depth:
            gates += scale * _thin_product(
                gate_low,
                gate_matrix,
                row,
                column,
                rows,
                width,
                gate_low_row,
                gate_matrix_column,
                gate_matrix_row,
                gate_depth,
                gate_block,
            )
            kept = gates.to(gate.dtype.element_ty)
            tl.store(place, kept, mask=there)
            gates = kept.to(tl.float32)
        result = gated_value(gates, result, kind)
    else:
        result, _ = value_and_slope(result, kind)
    tl.store(out + row[:, None] * out_row + column[None, :], result.to(out.dtype.element_ty), mask=there)


def activation_sums(
    kind: str, gate: Tensor | None, up: Tensor, *, thin: tuple[Thin | None, Thin | None], scale: float, out: Tensor
) -> None:
    """See `adapters.activate_sums`."""
    rows, width = up.shape
    of_gate, of_up = thin
    given = up if gate is None else gate
    _sums_activation_forward_kernel[(triton.cdiv(width, COLUMNS), triton.cdiv(rows, LINES))](
        given,
        up,
        out,
        *(tensor for each in thin for tensor in (each or Thin(up, up))),
        rows,
        width,
        scale,
        given.stride(0),
        up.stride(0),
        out.stride(0),
        *(step for each in thin for step in (each or Thin(up, up)).strides),
        kind=kind,
        gated=gate is not None,
        gate_depth=_depth(of_gate),
        gate_block=_depth_block(_depth(of_gate)),
        up_depth=_depth(of_up),
        up_block=_depth_block(_depth(of_up)),
        lines=LINES,
        block=COLUMNS,
        num_warps=WARPS,
        **ARITHMETIC,
    )


def _depth(thin: Thin | None) -> int:
    return 0 if thin is None else thin.low.shape[1]


def _depth_block(depth: int) -> int:
    return max(LEAST_DEPTH, 1 << max(0, depth - 1).bit_length())


@kernel()
def _sums_activation_backward_kernel(
    gradient: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    low: tl.tensor,
    matrix: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    gradient_row: tl.tensor,
    gate_row: tl.tensor,
    up_row: tl.tensor,
    low_row: tl.tensor,
    matrix_column: tl.tensor,
    matrix_row: tl.tensor,
    kind: tl.constexpr,
    gated: tl.constexpr,
    depth: tl.constexpr,
    depth_block: tl.constexpr,
    lines: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64) * lines + tl.arange(0, lines)
    column = tl.program_id(0) * block + tl.arange(0, block)
    there = (row < rows)[:, None] & (column < width)[None, :]
    of_result = gradient + row[:, None] * gradient_row + column[None, :]
    above = tl.load(of_result, mask=there, other=0.0).to(tl.float32)
    above += _thin_product(
        low, matrix, row, column, rows, width, low_row, matrix_column, matrix_row, depth, depth_block
    )
    above = above.to(gradient.dtype.element_ty).to(tl.float32)
    of_up = up + row[:, None] * up_row + column[None, :]
    values = tl.load(of_up, mask=there, other=0.0).to(tl.float32)
    if gated:
        of_gate = gate + row[:, None] * gate_row + column[None, :]
        gates = tl.load(of_gate, mask=there, other=0.0).to(tl.float32)
        to_gate, to_up, result = gated_back(above, gates, values, kind)
        tl.store(of_gate, to_gate.to(gate.dtype.element_ty), mask=there)
    else:
        result, slope = value_and_slope(values, kind)
        to_up = above * slope
    tl.store(of_result, result.to(gradient.dtype.element_ty), mask=there)
    tl.store(of_up, to_up.to(up.dtype.element_ty), mask=there)


def activation_sums_backward(kind: str, gradient: Tensor, gate: Tensor | None, up: Tensor, *, thin: Thin) -> None:
    """See `adapters.activate_sums_backward`."""
    rows, width = up.shape
    given = up if gate is None else gate
    _sums_activation_backward_kernel[(triton.cdiv(width, COLUMNS), triton.cdiv(rows, LINES))](
        gradient,
        given,
        up,
        *thin,
        rows,
        width,
        gradient.stride(0),
        given.stride(0),
        up.stride(0),
        *thin.strides,
        kind=kind,
        gated=gate is not None,
        depth=_depth(thin),
        depth_block=_depth_block(_depth(thin)),
        lines=LINES,
        block=COLUMNS,
        num_warps=WARPS,
        **ARITHMETIC,
    )
