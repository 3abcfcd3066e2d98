"""DoRA's magnitudes: rows of W + scale · B·A at the lengths that a trained vector has for them (arXiv 2402.09353).

A product's result u, made by V = W + scale · B·A, becomes m ÷ |V| · u; a bias is added behind that. |V| is no part of
the gradient, as in the paper and in PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.casts import Casts, stored_rows
from flopwise.engine.streaming.trained import Trained, Weights, plain_weight
from flopwise.engine.streaming.values import Gradients, Values
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


class Magnitudes:
    """Operators of magnitudes, run."""

    def __init__(
        self,
        ops: tuple[Op, ...],
        columns: Callable[[Gemm], list[tuple[str, int, int]]],
        *,
        scale: float,
        casts: Casts,
        statistics: torch.dtype,
    ) -> None:
        """`ops`: a block's; `columns`: each result of a product with its rows of the weight; `scale`: adapters'."""
        self.ops, self.columns, self.scale = ops, columns, scale
        self.casts, self.arena, self.statistics = casts, casts.arena, statistics
        self._scaled_rows: dict[str, tuple[ScaledRows, ...]] = {}

    def forward(
        self, op: Streaming, values: Values, weights: Weights, wanted: Collection[str], *, adapts: bool
    ) -> None:
        """`adapts`: whether the results are those of the matrix with its adapter."""
        for rows in self._scaled(op):
            if rows.made not in wanted:
                continue
            source = values[rows.source]
            out = values.allocate(rows.made, tuple(source.shape), source.dtype)
            if not adapts:
                out.copy_(source)
                continue
            with self._norms_of(rows, weights) as (_, factors, bias):
                scale_columns(source, factors, bias, out=out)

    def backward(self, op: Streaming, values: Values, gradients: Gradients, trained: Trained) -> None:
        for rows in self._scaled(op):
            gradient, source = gradients[rows.made], values[rows.source]
            with self._norms_of(rows, trained.weights) as (norms, factors, bias):
                total = trained.sums[rows.magnitudes]
                magnitude_gradient(gradient, source, bias, norms, total=total, arena=self.arena)
                torch.mul(gradient, factors, out=gradients.replace(rows.made, rows.source))

    def _scaled(self, op: Streaming) -> tuple[ScaledRows, ...]:
        """What an operator scales."""
        found = self._scaled_rows.get(op.name)
        if found is None:
            product = next(other for other in self.ops if op.name == f"{other.name}_{MAGNITUDE}")
            assert isinstance(product, Gemm)
            columns = {name: slice(first, last) for name, first, last in self.columns(product)}
            found = self._scaled_rows[op.name] = scaled_rows(op, self.ops, columns)
        return found

    @contextmanager
    def _norms_of(self, rows: ScaledRows, weights: Weights) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """The norms of a matrix' rows with its adapter, what its results are multiplied by, and their bias."""
        stored = stored_rows(weights[rows.matrix], rows.rows)
        bias = plain_weight(weights, rows.bias)[rows.rows] if rows.bias in weights else None
        matrix, shift = self.casts.cast(stored), None if bias is None else self.casts.cast(bias)
        count = matrix.shape[0]
        norms, factors = (self.arena.take((count,), self.statistics) for _ in range(2))
        down, up = plain_weight(weights, rows.down)[rows.low_rows], plain_weight(weights, rows.up)
        take_norms(matrix, down, up, scale=self.scale, out=norms, arena=self.arena)
        self.casts.drop(matrix, stored)
        torch.div(plain_weight(weights, rows.magnitudes), norms, out=factors)
        yield norms, factors, shift
        self.arena.give(factors)
        self.arena.give(norms)
        self.casts.drop(shift, bias)
