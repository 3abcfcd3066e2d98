"""Multi-head latent attention, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are made from a narrow row.

    A head's first `rotary_dim` channels turn with positions; its key has those in common with all heads, and makes the
    others, as its value, from the latent.
    """

    rank: int
    """Width of what keys and values are made from."""
    value_dim: int
    """Channels of a value."""
    query_rank: int = 0
    """Width of what queries are made from; 0: from the block's input itself."""


LATENT_EPSILON = 1e-6
"""What the norms of latents add to the variance, whatever the others do: their classes say none."""
