"""Matrix products of a layer with its trained matrix: forward, to the inputs' gradients, to the matrix' own.

Rows are tokens. A trained matrix is (outputs, inputs). Everything is written into tensors that are given, which may be
columns of wider ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flopwise.engine.streaming.arena import Arena

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
