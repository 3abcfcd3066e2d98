"""Products that have the activation of a gated feed-forward in them, where there are kernels for that.

Gate and up then lie in pairs (see `kernels.plain_gated`), in the place where they lay beside each other before: nothing
takes more memory. Forward, one call makes gate, up and what the activation makes of them; backward, one call makes the
gradients of gate and up from that of the feed-forward's result, in their places, and the activation's result again.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flopwise.engine.kernels import plain_gated
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.products import Products

__all__ = ["GatedKernels", "GatedProducts", "join_pairs", "largest_error"]

LARGEST_ERROR = 0.02
"""Of the check's results, beside those of plain products in float32: several times what bf16 rounds away."""


class GatedKernels(Protocol):
    """What `kernels.plain_gated` has in plain form."""

    def forward(self, source: Tensor, matrix: Tensor, *, pairs: Tensor, activated: Tensor | None) -> None: ...
    def backward(self, gradient: Tensor, matrix: Tensor, *, pairs: Tensor, activated: Tensor) -> None: ...
    def dgrad(self, gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None: ...
    def wgrad(self, gradient: Tensor, source: Tensor, *, total: Tensor) -> None: ...


class GatedProducts(Products):
    """Products of gradients with gate and up's matrix; `kernels` has those with the activation in them as well."""

    def __init__(self, arena: Arena, kernels: GatedKernels) -> None:
        super().__init__(arena)
        self.kernels = kernels

    def dgrad(self, gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None:
        self.kernels.dgrad(gradient, matrix, out=out, add=add)

    def wgrad(self, gradient: Tensor, source: Tensor, *, total: Tensor) -> None:
        self.kernels.wgrad(gradient, source, total=total)


def largest_error(
    kernels: GatedKernels,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int = 200,
    hidden: int = 256,
    inner: int = 320,
    sums: torch.dtype | None = None,
) -> float:
    """Of all results beside those of plain products in float32: ‖difference‖ ÷ ‖result‖. NaN where one is none.

    `sums`: of the matrices' gradients; None: as all other tensors.
    """
    generator = torch.Generator(device=device).manual_seed(1)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).mul_(scale).to(dtype)

    given = (
        drawn(tokens, hidden),
        drawn(2 * inner, hidden, scale=hidden**-0.5),
        drawn(hidden, inner, scale=inner**-0.5),
        drawn(tokens, hidden),
    )
    found = _all_results(kernels, *given, sums=sums or dtype)
    wanted = _all_results(plain_gated, *(each.float() for each in given), sums=torch.float32)
    errors = [float((one.float() - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True)]
    return float(torch.tensor(errors).max())


def _all_results(
    kernels: GatedKernels,
    source: Tensor,
    up_matrix: Tensor,
    down_matrix: Tensor,
    gradient: Tensor,
    *,
    sums: torch.dtype,
) -> list[Tensor]:
    """Everything that a feed-forward's forward and backward make, into places full of what is none of it."""
    tokens, inner = source.shape[0], down_matrix.shape[1]
    pairs, again = source.new_full((tokens, 2 * inner), torch.nan), source.new_full((tokens, 2 * inner), torch.nan)
    activated, made = source.new_full((tokens, inner), torch.nan), source.new_full((tokens, inner), torch.nan)
    dgrad, total = torch.full_like(source, torch.nan), torch.ones_like(up_matrix, dtype=sums)
    kernels.forward(source, up_matrix, pairs=pairs, activated=activated)
    kernels.forward(source, up_matrix, pairs=again, activated=None)
    results = [pairs.clone(), again, activated]
    kernels.backward(gradient, down_matrix, pairs=pairs, activated=made)
    kernels.dgrad(pairs, up_matrix, out=dgrad, add=False)
    kernels.wgrad(pairs, source, total=total)
    results += [pairs, made, dgrad, total]
    added = torch.ones_like(source)
    kernels.dgrad(pairs, up_matrix, out=added, add=True)
    results.append(added)
    return results


def join_pairs(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up that lie in pairs, as those."""
    rows, inner = gate.shape
    follows = up.data_ptr() == gate.data_ptr() + gate.element_size()
    assert follows and gate.stride(1) == 2 and up.stride() == gate.stride(), "gate and up do not lie in pairs"
    return gate.as_strided((rows, 2 * inner), (gate.stride(0), 1))
