"""Attention sinks: a score of each head that takes part in the softmax beside the keys', and has no value.

They come after any attention kernel, whose output is that without them: with a logsumexp l of a query's scores and a
sink s the output shrinks to its share σ(l − s), and the logsumexp becomes that of all scores. A kernel's backward that
is given both then finds the exact gradients of queries, keys and values, since it makes its weights from the logsumexp
and subtracts the product of output and gradient from theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flopwise.engine.kernels.blocks import compute_type, row_blocks


def add_sinks(sinks: Tensor, *, out: Tensor, logsumexp: Tensor) -> None:
    """`out` (rows, heads, channels) and `logsumexp` (heads, rows) without sinks become those with them."""
    scores = sinks.to(logsumexp.dtype)[:, None]
    share = torch.sigmoid(logsumexp - scores)
    out.mul_(share.t()[..., None])
    torch.logaddexp(logsumexp, scores, out=logsumexp)


def sinks_backward(gradient: Tensor, sinks: Tensor, *, out: Tensor, logsumexp: Tensor, total: Tensor) -> None:
    """`total` gets the sinks' gradients added, from the output's and from what `add_sinks` left.

    A sink's weight multiplies no value, so that only what it takes from the others counts: −p · (gradient · output).
    """
    wide = compute_type(out.dtype)
    weights = torch.exp(sinks.to(logsumexp.dtype)[:, None] - logsumexp)
    found = torch.zeros_like(sinks, dtype=wide)
    for block in row_blocks(out.shape[0], out.shape[1] * out.shape[2] * wide.itemsize, 3):
        products = (gradient[block].to(wide) * out[block]).sum(-1)
        found -= (weights[:, block].t() * products).sum(0)
    total.add_(found)
