"""Products with SwiGLU in them from quack-kernels: an activation there reads and writes no memory of its own.

They make and read gate and up in pairs; a matrix whose first half of rows is the gate's and whose second half is up's
they read, and add to, as it lies.
"""

from __future__ import annotations

from torch import Tensor

from flopwise.engine.kernels.quack import ALTERNATING_WIDE, cut, get_calls, multiply


def forward(source: Tensor, matrix: Tensor, *, pairs: Tensor, activated: Tensor | None) -> None:
    """See `plain_gated.forward`."""
    if activated is None:
        multiply(source, matrix.t(), out=pairs, tile=ALTERNATING_WIDE, halves=("B",))
        return
    get_calls().activated(
        source,
        matrix.t(),
        activation="swiglu",
        preact_out=pairs,
        postact_out=activated,
        config=cut(ALTERNATING_WIDE),
        tuned=False,
        concat_layout=("B",),
    )


def backward(gradient: Tensor, matrix: Tensor, *, pairs: Tensor, activated: Tensor) -> None:
    """See `plain_gated.backward`. A tile of gate and up is read before its gradients are written over it."""
    get_calls().activated_backward(
        gradient,
        matrix,
        pairs,
        activation="swiglu",
        dx_out=pairs,
        postact_out=activated,
        config=cut(ALTERNATING_WIDE),
        tuned=False,
        dynamic_scheduler=False,
    )


def dgrad(gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None:
    """See `plain_gated.dgrad`."""
    multiply(gradient, matrix, out=out, add=add, halves=("B",))


def wgrad(gradient: Tensor, source: Tensor, *, total: Tensor) -> None:
    """See `plain_gated.wgrad`."""
    multiply(gradient.t(), source, out=total, add=True, halves=("out",))
