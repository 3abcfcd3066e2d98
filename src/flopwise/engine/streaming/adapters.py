"""Products of adapters: as thin as their rank, by the device's own library, with a scale that costs nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwise.engine.streaming.products import HALVES


def add_product(low: Tensor, matrix: Tensor, *, scale: float, out: Tensor) -> None:
    """`out` gets scale · low · matrixᵀ added."""
    out.addmm_(low, matrix.t(), alpha=scale)


def scaled_dgrad(gradient: Tensor, matrix: Tensor, *, scale: float, out: Tensor) -> None:
    """`out` gets scale · gradient · matrix."""
    torch.addmm(out, gradient, matrix, beta=0, alpha=scale, out=out)


def scaled_wgrad(gradient: Tensor, low: Tensor, *, scale: float, total: Tensor) -> None:
    """`total` gets scale · gradientᵀ · low added."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), low, alpha=scale)
    elif total.is_cuda and total.dtype == torch.float32 and gradient.dtype in HALVES:
        torch.addmm(total, gradient.t(), low, out_dtype=torch.float32, alpha=scale, out=total)
    else:
        # So narrow that what it takes beside the plan is nothing.
        total.add_(torch.mm(gradient.t(), low), alpha=scale)
