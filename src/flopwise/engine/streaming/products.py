"""Matrix products of a layer with its trained matrix: forward, to the inputs' gradients, to the matrix' own.

Rows are tokens. A trained matrix is (outputs, inputs). Everything is written into tensors that are given, which may be
columns of wider ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flopwise.engine.kernels import dispatch
from flopwise.engine.streaming.arena import Arena
from flopwise.records.program import LOGITS_ALIGNMENT_BYTES
from flopwise.work.parameters import Parameter

HALVES = (torch.bfloat16, torch.float16)


class Products:
    """Products in the format of the activations."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def forward(self, source: Tensor, matrix: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
        """`out` gets source · matrixᵀ + bias."""
        if bias is not None:
            torch.addmm(bias, source, matrix.t(), out=out)
        else:
            torch.mm(source, matrix.t(), out=out)

    def dgrad(self, gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None:
        """`out` gets gradient · matrix, with `add` added to it."""
        if add:
            out.addmm_(gradient, matrix)
        else:
            torch.mm(gradient, matrix, out=out)

    def wgrad(self, gradient: Tensor, source: Tensor, *, total: Tensor) -> None:
        """`total`, the sum of the matrix' gradients, gets gradientᵀ · source added."""
        if total.dtype == gradient.dtype:
            total.addmm_(gradient.t(), source)
            return
        if total.is_cuda and total.dtype == torch.float32 and gradient.dtype in HALVES:
            # The matrix unit sums in fp32 anyway.
            torch.addmm(total, gradient.t(), source, out_dtype=torch.float32, out=total)
            return
        product = self.arena.take(tuple(total.shape), gradient.dtype)
        torch.mm(gradient.t(), source, out=product)
        total.add_(product)
        self.arena.give(product)

    def bias_gradient(self, gradient: Tensor, *, total: Tensor) -> None:
        """`total`, the sum of the bias' gradients, gets those of all rows added."""
        dispatch.add_column_sums(gradient, total=total)


class HeadProducts(Products):
    """Products of a head with a vocabulary such as 50,257, at which a matrix unit would run at a seventh of its speed.

    They are made for a few more rows of the matrix, those of the table that lies behind it: nobody reads their logits,
    and their gradients are zeros. Rows of logits have room for them.
    """

    def __init__(self, arena: Arena, rows: int) -> None:
        super().__init__(arena)
        self.rows = rows

    def forward(self, source: Tensor, matrix: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
        assert bias is None
        super().forward(source, self._taller(matrix), None, out=self._wider(out))

    def dgrad(self, gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None:
        wider = self._wider(gradient)
        wider[:, gradient.shape[1] :].zero_()
        super().dgrad(wider, self._taller(matrix), out=out, add=add)

    def _taller(self, matrix: Tensor) -> Tensor:
        return matrix.as_strided((self.rows, matrix.shape[1]), matrix.stride())

    def _wider(self, logits: Tensor) -> Tensor:
        # One row alone may say any distance to the next.
        assert len(logits) == 1 or logits.stride(0) == self.rows
        return logits.as_strided((logits.shape[0], self.rows), (self.rows, 1))


def rows_read_by_head(parameters: Sequence[Parameter], dtype: torch.dtype) -> int | None:
    """Rows that the head's matrix is read with: a multiple of 16 bytes of logits; None: its own, or none lie behind."""
    place, head = next(
        ((place, each) for place, each in enumerate(parameters) if each.local == "head.weight"), (0, None)
    )
    if head is None or any(each.local == "head.bias" for each in parameters):
        return None
    rows = padded_width(head.shape[0], dtype)
    behind = sum(each.elements for each in parameters[place + 1 :])
    return rows if head.shape[0] < rows and (rows - head.shape[0]) * head.shape[1] <= behind else None


def padded_width(width: int, dtype: torch.dtype) -> int:
    """Numbers of a row of logits with the room behind it."""
    whole = LOGITS_ALIGNMENT_BYTES // dtype.itemsize
    return -(-width // whole) * whole
