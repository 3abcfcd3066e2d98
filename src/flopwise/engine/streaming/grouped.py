"""Products of experts: the rows of each with a matrix of its own, one expert after another in one tensor."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.products import Products


class GroupedProducts(Products):
    """Matrices are (experts, outputs, inputs); rows are sorted by expert, and `ends` says where each one's end.

    Forms that ask how many rows an expert has, for devices without one kernel for all of them.
    """

    def __init__(self, arena: Arena, each: Products, ends: Tensor) -> None:
        """`each`: what runs one expert's products."""
        super().__init__(arena)
        self._each = each
        bounds = [0, *ends.tolist()]
        self._rows = [slice(first, last) for first, last in pairwise(bounds)]

    def forward(self, source: Tensor, matrix: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
        for expert, rows in enumerate(self._rows):
            if rows.start < rows.stop:
                shift = None if bias is None else bias[expert]
                self._each.forward(source[rows], matrix[expert], shift, out=out[rows])

    def dgrad(self, gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None:
        for rows, own in zip(self._rows, matrix, strict=True):
            if rows.start < rows.stop:
                self._each.dgrad(gradient[rows], own, out=out[rows], add=add)

    def wgrad(self, gradient: Tensor, source: Tensor, *, total: Tensor) -> None:
        for rows, own in zip(self._rows, total, strict=True):
            if rows.start < rows.stop:
                self._each.wgrad(gradient[rows], source[rows], total=own)

    def bias_gradient(self, gradient: Tensor, *, total: Tensor) -> None:
        for rows, own in zip(self._rows, total, strict=True):
            if rows.start < rows.stop:
                self._each.bias_gradient(gradient[rows], total=own)
