"""Mixtures' routings at awkward sizes, with everything that their products read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flopwise.engine.kernels.experts import Routed, sort_by_expert


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes, and how tokens choose."""

    tokens: int
    experts: int
    choices: int
    hidden: int
    inner: int
    kind: str = "silu"
    biased: bool = False
    among: int | None = None
    """Of so many experts only, so that the others have no token; None: of all."""


CASES = {
    "uneven": Case(37, 5, 2, 24, 40),
    "no token for most": Case(9, 11, 2, 16, 16, among=3),
    "all of one expert": Case(35, 4, 1, 33, 7, among=1),
    "every expert of every token": Case(13, 3, 3, 17, 130),
    "narrow": Case(150, 4, 2, 64, 16),
    "one expert": Case(6, 1, 1, 8, 5),
    "one token": Case(1, 7, 3, 20, 36),
    "clamped, with biases": Case(41, 4, 2, 32, 24, kind="clamped_swiglu", biased=True),
}


@dataclass(frozen=True, slots=True)
class Mixture:
    """What the products of a case read."""

    case: Case
    routed: Routed
    index: Tensor
    weights: Tensor
    """Of each token and choice."""
    source: Tensor
    gradient: Tensor
    """Of the tokens' results."""
    first: Tensor
    second: Tensor
    first_bias: Tensor | None
    second_bias: Tensor | None

    def empty(self, width: int) -> Tensor:
        """Rows of experts, full of what is no number."""
        return self.source.new_full((self.routed.rows, width), torch.nan)


def mixture_of(case: Case, dtype: torch.dtype, device: torch.device) -> Mixture:
    """Random numbers, the same ones every time."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    order = torch.rand(case.tokens, case.among or case.experts, generator=generator).argsort(-1)
    index = order[:, : case.choices].int().to(device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # Scaled, so that results have room in float16.
    matrices = (
        drawn(case.experts, 2 * case.inner, case.hidden) * case.hidden**-0.5,
        drawn(case.experts, case.hidden, case.inner) * case.inner**-0.5,
    )
    biases = drawn(case.experts, 2 * case.inner), drawn(case.experts, case.hidden)
    return Mixture(
        case,
        sort_by_expert(index, case.experts),
        index,
        torch.rand(case.tokens, case.choices, generator=generator).to(wide).to(device),
        drawn(case.tokens, case.hidden),
        drawn(case.tokens, case.hidden),
        *matrices,
        *(biases if case.biased else (None, None)),
    )
