"""Products with SwiGLU in them, in plain torch: what the fast ones are held against.

Gate and up lie in pairs: a token's row is gate 0, up 0, gate 1, up 1 and so on. Their matrix is what it always is, all
rows of the gate and then all rows of up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flopwise.engine.kernels import activations
from flopwise.engine.kernels.activations import activation_forward


def split_pairs(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up of rows of pairs, as they lie."""
    gate, up = pairs.view(pairs.shape[0], -1, 2).unbind(2)
    return gate, up


def apart(pairs: Tensor) -> Tensor:
    """A copy with the gate in the first half of each row and up in the second."""
    return torch.cat(split_pairs(pairs), 1)


def forward(source: Tensor, matrix: Tensor, *, pairs: Tensor, activated: Tensor | None) -> None:
    """`pairs` gets source · matrixᵀ, `activated` silu(gate) · up of it."""
    gate, up = split_pairs(pairs)
    product = source @ matrix.t()
    gate.copy_(product[:, : gate.shape[1]])
    up.copy_(product[:, gate.shape[1] :])
    if activated is not None:
        activation_forward("silu", gate, up, out=activated)


def backward(gradient: Tensor, matrix: Tensor, *, pairs: Tensor, activated: Tensor) -> None:
    """From the gradient of activated · matrixᵀ to those of gate and up, in their places; `activated` is recomputed."""
    torch.mm(gradient, matrix, out=activated)
    gate, up = split_pairs(pairs)
    activations.activation_backward("silu", activated, gate, up, gate_out=gate, up_out=up, recompute=True)


def dgrad(gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None:
    """`out` gets the product of the pairs' gradient and the matrix, with `add` added to it."""
    if add:
        out.addmm_(apart(gradient), matrix)
    else:
        torch.mm(apart(gradient), matrix, out=out)


def wgrad(gradient: Tensor, source: Tensor, *, total: Tensor) -> None:
    """`total`, the sum of the matrix' gradients, gets gradientᵀ · source added."""
    total.add_((apart(gradient).t() @ source).to(total.dtype))
