"""Products of adapters: as thin as their rank, by the device's own library where that keeps up with its memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.blocks import has_triton
from flopwise.engine.kernels.thin import Thin
from flopwise.engine.streaming.products import HALVES, Products

NARROW = 8
"""Up to as many columns the CPU's library takes one by one what lies beside each other: four to five times as long."""
MOST_FUSED_DEPTH = 64
"""Up to which depth a product is added by a kernel of our own."""


def add_product(thin: Thin, *, scale: float, out: Tensor) -> None:
    """`out` gets scale · low · matrix added."""
    if _has_kernel(thin, out):
        from flopwise.engine.kernels.fused_adapters import add_thin_product

        add_thin_product(thin, scale=scale, out=out)
    else:
        out.addmm_(*thin, alpha=scale)


def _has_kernel(thin: Thin, out: Tensor) -> bool:
    halves = out.dtype in HALVES and thin.low.dtype == thin.matrix.dtype == out.dtype
    return out.is_cuda and halves and thin.low.shape[1] <= MOST_FUSED_DEPTH and has_triton()


def _has_activation(kind: str, out: Tensor, sums: Iterable[Thin]) -> bool:
    """Whether an activation with such sums is a kernel."""
    if not all(_has_kernel(each, out) for each in sums):
        return False
    from flopwise.engine.kernels.fused_activations import ACTIVATIONS

    return kind in ACTIVATIONS


def activate_sums(
    kind: str, gate: Tensor | None, up: Tensor, *, thin: tuple[Thin | None, Thin | None], scale: float, out: Tensor
) -> None:
    """An activation of gate and up, which get what adapters add to them first: `thin`, of each where there is one."""
    sums = [each for each in thin if each is not None]
    if sums and _has_activation(kind, up, sums):
        from flopwise.engine.kernels.fused_adapters import activation_sums

        activation_sums(kind, gate, up, thin=thin, scale=scale, out=out)
        return
    for each, target in zip(thin, (gate, up), strict=True):
        if each is not None and target is not None:
            add_product(each, scale=scale, out=target)
    dispatch.activation_forward(kind, gate, up, out=out)


def activate_sums_backward(kind: str, gradient: Tensor, gate: Tensor | None, up: Tensor, *, thin: Thin) -> None:
    """An activation's backward once `thin` is added to its gradient, in whose place its result is made again.

    Gradients take the places of gate and up.
    """
    if _has_activation(kind, gradient, [thin]):
        from flopwise.engine.kernels.fused_adapters import activation_sums_backward

        activation_sums_backward(kind, gradient, gate, up, thin=thin)
        return
    add_product(thin, scale=1.0, out=gradient)
    dispatch.activation_backward(kind, gradient, gate, up, gate_out=gate, up_out=up, recompute=True)


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
            add_product(Thin(gradient, matrix), scale=1.0, out=out)
        else:
            super().dgrad(gradient, matrix, out=out, add=False)
