"""Products of adapters: as thin as their rank, by the device's own library where that keeps up with its memory."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwise.engine.kernels.blocks import has_triton
from flopwise.engine.streaming.products import HALVES, Products

NARROW = 8
"""Up to as many columns the CPU's library takes one by one what lies beside each other: four to five times as long."""
MOST_FUSED_DEPTH = 64
"""Up to which depth a product is added by a kernel of our own."""


def add_product(low: Tensor, matrix: Tensor, *, scale: float, out: Tensor) -> None:
    """`out` gets scale · low · matrix added."""
    halves = out.dtype in HALVES and low.dtype == matrix.dtype == out.dtype
    if out.is_cuda and halves and low.shape[1] <= MOST_FUSED_DEPTH and has_triton():
        from flopwise.engine.kernels.fused_adapters import add_thin_product

        add_thin_product(low, matrix, scale=scale, out=out)
    else:
        out.addmm_(low, matrix, alpha=scale)


def scaled_dgrad(gradient: Tensor, matrix: Tensor, *, scale: float, out: Tensor, add: bool) -> None:
    """`out` gets scale · gradient · matrix, with `add` added to it."""
    if _is_narrow(matrix):
        matrix = matrix.t().contiguous().t()
    torch.addmm(out, gradient, matrix, beta=int(add), alpha=scale, out=out)


def scaled_wgrad(gradient: Tensor, low: Tensor, *, scale: float, total: Tensor) -> None:
    """`total` gets scale · gradientᵀ · low added."""
    if _is_narrow(low) and total.dtype == gradient.dtype:
        total.add_(torch.mm(low.t(), gradient).t(), alpha=scale)
    elif total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), low, alpha=scale)
    elif total.is_cuda and total.dtype == torch.float32 and gradient.dtype in HALVES:
        torch.addmm(total, gradient.t(), low, out_dtype=torch.float32, alpha=scale, out=total)
    else:
        # So narrow that what it takes beside the plan is nothing.
        total.add_(torch.mm(gradient.t(), low), alpha=scale)


def _is_narrow(matrix: Tensor) -> bool:
    return not matrix.is_cuda and matrix.shape[1] <= NARROW


class DownProducts(Products):
    """Products with the first matrices of adapters; the gradient that they add to is as wide as the model."""

    def dgrad(self, gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None:
        if add:
            add_product(gradient, matrix, scale=1.0, out=out)
        else:
            super().dgrad(gradient, matrix, out=out, add=False)
