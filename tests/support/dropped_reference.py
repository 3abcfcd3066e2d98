"""Dropout of the plain modules as it is documented: masks by numpy from the hash, the whole softmax, autograd."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flopwise.engine.modules import attention_mask
from flopwise.work.transformer import Transformer

SITES = ("embedding", "attention", "projected", "fed", "pooled", "first")
_ALL = (1 << 64) - 1


def _wide(value: int) -> int:
    """SplitMix64's step and mix."""
    value = (value + 0x9E3779B97F4A7C15) & _ALL
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _ALL
    return value ^ (value >> 31)


def keys_of(seed: int, step: int, layer: int, site: str) -> tuple[int, int]:
    """The halves of a hash of seed, step and the site's number, which begin at 16."""
    number = 16 + layer * len(SITES) + SITES.index(site)
    key = _wide(_wide(_wide(seed) ^ step) ^ number)
    return key & 0xFFFFFFFF, key >> 32


def _mix(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Murmur3's finalizer."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    values = (values ^ (values >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return values ^ (values >> np.uint32(16))


def bits_of(keys: tuple[int, int], high: NDArray[np.int64], low: NDArray[np.int64]) -> NDArray[np.uint32]:
    """32 random bits of places with these halves."""
    lower = _mix(low.astype(np.uint32) ^ np.uint32(keys[0]))
    upper = (high.astype(np.uint32) * np.uint32(0x9E3779B1)) ^ np.uint32(keys[1])
    return _mix(lower ^ upper)


class DocumentedDrops:
    """Masks of sequences that lie beside each other at the beginning of a batch."""

    def __init__(self, model: Transformer, *, seed: int, step: int, sequence_tokens: int) -> None:
        assert model.dropout is not None
        self.model, self.seed, self.step, self.sequence_tokens = model, seed, step, sequence_tokens
        dropout = model.dropout
        self.shares = {
            "embedding": dropout.embedding,
            "attention": dropout.attention,
            "projected": dropout.hidden if dropout.both_branches else 0.0,
            "fed": dropout.hidden,
            "pooled": dropout.of_classifier,
            "first": dropout.of_classifier if dropout.before_pooler else 0.0,
        }
        self.dropped = self.drawn = 0

    def _tokens(self, sequences: int, tokens: int) -> NDArray[np.int64]:
        return np.arange(sequences)[:, None] * self.sequence_tokens + np.arange(tokens)

    def _scales(self, high: NDArray[np.int64], low: NDArray[np.int64], layer: int, site: str) -> Tensor:
        share = self.shares[site]
        kept = bits_of(keys_of(self.seed, self.step, layer, site), high, low) >= round(share * 2**32)
        self.drawn += kept.size
        self.dropped += int(kept.size - kept.sum())
        return torch.from_numpy(kept / (1.0 - share))

    def rows(self, values: Tensor, layer: int, name: str) -> Tensor:
        sequences, tokens, width = values.shape
        scales = self._scales(self._tokens(sequences, tokens)[..., None], np.arange(width), layer, name)
        return values * scales.to(values.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, layer: int) -> Tensor | None:
        if not self.shares["attention"]:
            return None  # The plain form, which knows sinks.
        model, (sequences, heads, tokens, channels) = self.model.kind_of(layer), query.shape
        key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
        scale = channels**-0.5 if model.attention_scale is None else model.attention_scale
        scores = query @ key.transpose(-1, -2) * scale
        if model.attention_cap is not None:
            scores = model.attention_cap * torch.tanh(scores / model.attention_cap)
        seen = attention_mask(model, tokens, lengths, query.device)
        if model.causal and seen is None:
            seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if seen is not None:
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        numbers = self._tokens(sequences, tokens)[:, None, :, None] * heads + np.arange(heads)[:, None, None]
        scales = self._scales(numbers, np.arange(tokens), layer, "attention")
        weights: Tensor = scores.softmax(-1) * scales.to(scores.dtype)
        return weights @ value
