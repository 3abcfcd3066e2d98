"""DoRA's magnitudes: rows of W + scale · B·A at the lengths that a trained vector has for them (arXiv 2402.09353).

A product's result u, made by V = W + scale · B·A, becomes m ÷ |V| · u; a bias is added behind that. |V| is no part of
the gradient, as in the paper and in PEFT.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flopwise.engine.streaming.arena import Arena
from flopwise.work.adapters import DOWN, MAGNITUDE, MAGNITUDE_PIECE
from flopwise.work.op import Gemm, Op, Streaming


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """One result of a product that magnitudes scale: where its matrices are."""

    source: str
    """What the product and the adapter have made."""
    made: str
    magnitudes: str
    matrix: str
    bias: str
    down: str
    up: str
    rows: slice
    """Of the product's matrix and bias."""
    low_rows: slice
    """Of its adapters' first matrices."""


def scaled_rows(op: Streaming, ops: tuple[Op, ...], columns: dict[str, slice]) -> tuple[ScaledRows, ...]:
    """What an operator of magnitudes scales. `columns`: rows of the product's matrix, by its results."""
    product = op.name.removesuffix(f"_{MAGNITUDE}")
    lower = next(other for other in ops if other.name == f"{product}_{DOWN}")
    assert isinstance(lower, Gemm)
    rank = lower.columns // len(lower.outputs)
    found = []
    for source, made, weight in zip(op.inputs, op.outputs, op.weights, strict=True):
        upper = next(other for other in ops if isinstance(other, Gemm) and other.adds and other.outputs == (source,))
        first = lower.outputs.index(upper.inputs[0]) * rank
        found.append(
            ScaledRows(
                source=source,
                made=made,
                magnitudes=weight.name,
                matrix=f"{product}.weight",
                bias=f"{product}.bias",
                down=f"{lower.name}.weight",
                up=f"{upper.name}.weight",
                rows=columns[source],
                low_rows=slice(first, first + rank),
            )
        )
    return tuple(found)


def take_norms(matrix: Tensor, down: Tensor, up: Tensor, *, scale: float, out: Tensor, arena: Arena) -> None:
    """|W + scale · B·A| of every row, from |W|² + scale · (2 · W·Aᵀ + scale · B·A·Aᵀ)·B: the sum itself is never made.

    Rows of zeros get the least number there is: whatever they are divided by stays zero.
    """
    torch.linalg.vector_norm(matrix, dim=1, dtype=out.dtype, out=out).square_()
    narrow = arena.take(tuple(down.shape), matrix.dtype).copy_(down)
    across = arena.take(tuple(up.shape), matrix.dtype)
    torch.mm(matrix, narrow.t(), out=across)
    lower, upper = (arena.take(tuple(each.shape), out.dtype).copy_(each) for each in (down, up))
    inner = arena.take(tuple(up.shape), out.dtype)
    torch.mm(upper, torch.mm(lower, lower.t()), out=inner)
    inner.mul_(scale).add_(across, alpha=2.0).mul_(upper)
    beside = arena.take(tuple(out.shape), out.dtype)
    torch.sum(inner, 1, out=beside)
    out.add_(beside, alpha=scale).clamp_(min=0.0).sqrt_().clamp_(min=torch.finfo(out.dtype).tiny)
    for room in (beside, inner, upper, lower, across, narrow):
        arena.give(room)


def scale_columns(source: Tensor, factors: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
    """Each column of what is not bias times its factor."""
    torch.mul(source, factors, out=out)
    if bias is not None:
        out.add_(bias - bias * factors)


def magnitude_gradient(
    gradient: Tensor, source: Tensor, bias: Tensor | None, norms: Tensor, *, total: Tensor, arena: Arena
) -> None:
    """`total` gets Σ gradient · (u − bias) ÷ |V| of each column added, summed in the norms' format."""
    count, columns = source.shape
    step = max(1, min(count, MAGNITUDE_PIECE // columns))
    piece, sums, part = (arena.take(shape, norms.dtype) for shape in ((step, columns), (columns,), (columns,)))
    sums.zero_()
    for first in range(0, count, step):
        rows = slice(first, min(count, first + step))
        numbers = piece[: rows.stop - first].copy_(source[rows])
        if bias is not None:
            numbers.sub_(bias)
        torch.sum(numbers.mul_(gradient[rows]), 0, out=part)
        sums.add_(part)
    total.add_(sums.div_(norms))
    for room in (part, sums, piece):
        arena.give(room)
