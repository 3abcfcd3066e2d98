"""Which masks each site of a model's dropout has at a step: their keys lie on the device, where replayed steps look."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flopwise.engine.kernels.dropout import DropMask
from flopwise.engine.kernels.rounding import Seed
from flopwise.work.transformer import Dropout, Transformer

SITES = ("embedding", "attention", "projected", "fed", "pooled", "first")
"""By what is dropped: the first block's input, attention's weights, results of attention's and the feed-forward part's
last product, what a classifier's last product reads, and what its first does. Sites of the ends have the number of
layer 0."""

FIRST_TENSOR = 16
"""Numbers below are those of the tensors that are rounded by chance, which have keys of the same kind."""


class Drops:
    """The keys of all sites of a model."""

    def __init__(self, model: Transformer, dropout: Dropout, seed: int, device: torch.device) -> None:
        of_classifier = dropout.of_classifier if model.head == "classifier" else 0.0
        self.shares: dict[str, float] = {
            "embedding": dropout.embedding,
            "attention": dropout.attention,
            "projected": dropout.hidden if dropout.both_branches else 0.0,
            "fed": dropout.hidden,
            "pooled": of_classifier,
            "first": of_classifier if dropout.before_pooler else 0.0,
        }
        count = model.layers * len(SITES)
        self._seed, self._numbers = Seed(seed), np.arange(count, dtype=np.uint64) + np.uint64(FIRST_TENSOR)
        # In lines of 16 bytes: kernels are compiled once more for tensors that begin elsewhere.
        self.keys = torch.zeros((count, 4), dtype=torch.int32, device=device)

    def begin(self, step: int) -> None:
        """Draw the keys of a step, counted from 0."""
        words = torch.zeros(self.keys.shape, dtype=torch.int32)
        words[:, :2] = torch.from_numpy(self._seed.many_keys(step, self._numbers).view(np.int32))
        self.keys.copy_(words.pin_memory() if self.keys.is_cuda else words, non_blocking=True)

    def of_layer(self, layer: int | None, tokens: Tensor) -> RowDrops:
        """Of a layer's rows, or of an end's, which are those of the tokens with these numbers in the step's batch."""
        return RowDrops(self, layer or 0, tokens)


@dataclass(frozen=True, slots=True)
class RowDrops:
    """What is dropped of some rows."""

    drops: Drops
    layer: int
    tokens: Tensor
    """int32, of each row."""

    def of(self, name: str) -> DropMask | None:
        """The mask of a tensor, or of attention's weights; None where nothing is dropped."""
        share = self.drops.shares.get(name)
        if not share:
            return None
        return DropMask(share, self.drops.keys[self.layer * len(SITES) + SITES.index(name)], self.tokens)

    def with_tokens(self, tokens: Tensor) -> RowDrops:
        """The same of other rows."""
        return replace(self, tokens=tokens)


def mask_of(drops: RowDrops | None, name: str) -> DropMask | None:
    """The mask of a tensor; None where nothing is dropped."""
    return None if drops is None else drops.of(name)
