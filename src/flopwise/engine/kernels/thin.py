"""A product as thin as an adapter's rank, as kernels are given it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Thin(NamedTuple):
    """(rows, depth) · (depth, width); a row of `low` lies in one piece."""

    low: Tensor
    matrix: Tensor

    @property
    def strides(self) -> tuple[int, int, int]:
        """From row to row of `low`, from column to column and from row to row of `matrix`."""
        return self.low.stride(0), self.matrix.stride(1), self.matrix.stride(0)
