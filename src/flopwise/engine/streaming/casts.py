"""Weights in the format that products read, for as long as they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwise.engine.kernels.quantised import Quantised
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.trained import Stored

ALL = slice(None)
"""Of a weight's rows."""


def stored_rows(weight: Stored, rows: slice) -> Stored:
    """Some rows of a weight as it is stored."""
    if isinstance(weight, Quantised):
        return weight if rows is ALL else weight.rows(rows)
    return weight[rows]


class Casts:
    """Copies in the arena of weights that are stored otherwise."""

    def __init__(self, arena: Arena, compute: torch.dtype) -> None:
        self.arena, self.compute = arena, compute

    def cast(self, weight: Stored) -> Tensor:
        """A weight in the format that products read."""
        if isinstance(weight, Quantised):
            return weight.dequantise(out=self.arena.take(weight.shape, self.compute))
        if weight.dtype == self.compute:
            return weight
        return self.arena.take(tuple(weight.shape), self.compute).copy_(weight)

    def drop(self, cast: Tensor | None, weight: Stored | None) -> None:
        """Done with what `cast` made of a weight."""
        if cast is not None and cast is not weight:
            self.arena.give(cast)
