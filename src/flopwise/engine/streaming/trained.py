"""A part's weights as its operators find them, and where their gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from flopwise.engine.kernels.quantised import Quantised

Stored = Tensor | Quantised
Weights = Mapping[str, Stored]
"""Tensors of a part by their names in the description; frozen matrices may be quantised."""
Sums = Mapping[str, Tensor]
"""Where gradients are summed, of those tensors that are trained."""


def plain_weight(weights: Weights, name: str) -> Tensor:
    """A tensor that is never quantised: a table, a norm's scale."""
    found = weights[name]
    assert isinstance(found, Tensor)
    return found


@dataclass(frozen=True, slots=True)
class Trained:
    """A part's weights, and where their gradients are summed."""

    weights: Weights
    sums: Sums
