"""Products in fp8 with scales of the moment: each operand comes to e4m3 by its own largest numbers and is multiplied.

Every operand is scaled along what is summed, one scale for each row or column that is not: a token's activations and an
output's weights going forward, a token's gradients and an input's weights on the way to the inputs' gradients. For the
matrix' own gradient tokens are summed, so that activations and gradients have a scale for each of their columns.

All are e4m3. e5m2 has a wider range and one bit less; it is for gradients that share one scale in a whole tensor. A
column's own scale costs no more, since either way the tensor is read once for its largest numbers and once to be
written, and channels with small gradients keep their bits, which Adam makes steps as large as others of.

The result of a product is written in the format of the activations. Matrix units cannot add to what is there, so that a
sum is made of a product beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.engine.kernels import fp8
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.products import Products

LEAST_CAPABILITY = (8, 9)
"""Of a GPU with matrix units for fp8: Ada and Hopper were the first."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """An operand (rows, inner) in fp8, and the scale of each row."""

    values: Tensor
    scales: Tensor


class Fp8Products(Products):
    """Products in fp8 where their sides are multiples of sixteen, the others in the format of the activations."""

    def __init__(
        self, arena: Arena, *, weight_gradient: Literal["fp8", "bf16"] = "fp8", fast_sums: bool = True
    ) -> None:
        """`fast_sums`: sums of forward products stay in the matrix unit, with fewer bits; gradients' never do."""
        super().__init__(arena)
        check_device(arena.room.device)
        self.weight_gradient = weight_gradient
        self.fast_sums = fast_sums
        self.in_fp8 = 0
        """Products that were made in fp8."""
        self.in_compute = 0
        """Those that were not."""

    def forward(self, source: Tensor, matrix: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
        if not self._fits(source.shape[0], source.shape[1], matrix.shape[0]):
            super().forward(source, matrix, bias, out=out)
            return
        left, right = self._rows(source), self._rows(matrix)
        self._multiply(left, right, bias, out, add=False, fast_sums=self.fast_sums)
        self._give(right)
        self._give(left)

    def dgrad(self, gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None:
        if not self._fits(gradient.shape[0], gradient.shape[1], matrix.shape[1]):
            super().dgrad(gradient, matrix, out=out, add=add)
            return
        left, right = self._rows(gradient), self._columns(matrix)
        self._multiply(left, right, None, out, add=add)
        self._give(right)
        self._give(left)

    def wgrad(self, gradient: Tensor, source: Tensor, *, total: Tensor) -> None:
        fits = self.weight_gradient == "fp8" and self._fits(gradient.shape[1], gradient.shape[0], source.shape[1])
        if not fits:
            super().wgrad(gradient, source, total=total)
            return
        left, right = self._columns(gradient), self._columns(source)
        product = self.arena.take(tuple(total.shape), gradient.dtype)
        self._multiply(left, right, None, product, add=False)
        self._give(right)
        self._give(left)
        total.add_(product)
        self.arena.give(product)

    # -- operands -------------------------------------------------------------------------------------------------

    def _fits(self, rows: int, inner: int, columns: int) -> bool:
        found = fp8.fits(rows, inner, columns)
        self.in_fp8 += found
        self.in_compute += not found
        return found

    def _rows(self, tensor: Tensor) -> Scaled:
        scaled = self._take(tensor.shape[0], tensor.shape[1])
        fp8.quantise_rows(tensor, out=scaled.values, scales=scaled.scales)
        return scaled

    def _columns(self, tensor: Tensor) -> Scaled:
        scaled = self._take(tensor.shape[1], tensor.shape[0])
        fp8.quantise_columns(tensor, out=scaled.values, scales=scaled.scales)
        return scaled

    def _take(self, rows: int, inner: int) -> Scaled:
        return Scaled(self.arena.take((rows, inner), fp8.FLOAT8), self.arena.take((rows,), torch.float32))

    def _give(self, scaled: Scaled) -> None:
        self.arena.give(scaled.scales)
        self.arena.give(scaled.values)

    def _multiply(
        self, left: Scaled, right: Scaled, bias: Tensor | None, out: Tensor, *, add: bool, fast_sums: bool = False
    ) -> None:
        target = self.arena.take(tuple(out.shape), out.dtype) if add else out
        operands = (left.values, left.scales, right.values, right.scales)
        fp8.multiply(*operands, bias=bias, out=target, fast_sums=fast_sums)
        if add:
            out.add_(target)
            self.arena.give(target)


def check_device(device: torch.device) -> None:
    """Refuse a GPU without matrix units for fp8."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise FlopwiseError(
            f"{torch.cuda.get_device_name(device)} cannot multiply in fp8",
            why="its matrix units are older than that format",
            hint="--precision bf16",
        )
