"""States carried along a sequence, in chunks, as plain products: Mamba-2's rule and the gated delta rule.

Everything here is differentiable and runs where it is called; numbers are computed in the type they come in. Within a
chunk all tokens are taken at once, weighed by how far a state fades from one to the other; from chunk to chunk goes one
state for each head. Tokens that fill up the last chunk neither change a state nor let it fade.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flopwise.work.recurrence import Recurrence

UNIT_EPSILON = 1e-6
"""What the delta rule adds to the squared length of a key or query before it brings it to length 1."""


def convolve(value: Tensor, filters: Tensor, bias: Tensor | None) -> Tensor:
    """SiLU of a causal convolution, each channel by itself: (sequences, tokens, channels), filters (channels, taps)."""
    tokens, taps = value.shape[1], filters.shape[1]
    padded = functional.pad(value, (0, 0, taps - 1, 0))
    summed = padded[:, :tokens] * filters[:, 0]
    for tap in range(1, taps):
        summed = summed + padded[:, tap : tap + tokens] * filters[:, tap]
    return functional.silu(summed if bias is None else summed + bias)


def normalise_gated(recurrence: Recurrence, value: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Mamba-2 gates and then norms, the delta rule norms each head and then gates: (…, width)."""
    delta = recurrence.rule == "gated_delta"
    gated = value if delta else value * functional.silu(gate)
    parts = torch.unflatten(gated, -1, (-1, recurrence.norm_width))
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + epsilon)
    if delta:
        return (normed * weight).flatten(-2) * functional.silu(gate)
    return normed.flatten(-2) * weight


class PerHead(NamedTuple):
    """What a scan knows of its heads, a number for each."""

    bias: Tensor
    """Of the steps."""
    decay: Tensor
    """The logarithm of how fast a state fades."""
    skip: Tensor | None = None
    """The part of the values that goes past the state."""


def scan(recurrence: Recurrence, mixed: Tensor, steps: Tensor, heads: PerHead) -> Tensor:
    """What is read of the states, (sequences, tokens, width), from what the convolution made and the steps."""
    bias, decay, skip = heads
    widths = [recurrence.key_width, recurrence.key_width, recurrence.width]
    if recurrence.rule == "mamba2":
        value, key, query = torch.split(mixed, widths[::-1], -1)
        sizes = functional.softplus(steps + bias).clamp(recurrence.least_step, recurrence.most_step)
        fading = -decay.exp() * sizes
    else:
        query, key, value = torch.split(mixed, widths, -1)
        shares, sizes = torch.split(steps, recurrence.heads, -1)
        sizes, fading = shares.sigmoid(), -decay.exp() * functional.softplus(sizes + bias)
    value = torch.unflatten(value, -1, (recurrence.heads, -1))
    query, key = (torch.unflatten(each, -1, (recurrence.key_heads, -1)) for each in (query, key))
    # (sequences, heads, chunks, tokens of a chunk, channels)
    values, keys, queries = (_chunks(each, recurrence.chunk) for each in (value, key, query))
    faded = _chunks(fading[..., None], recurrence.chunk)[..., 0].cumsum(-1)
    sized = _chunks(sizes[..., None], recurrence.chunk)
    if recurrence.rule == "mamba2":
        read = _mamba2(queries, keys, values * sized, faded)
    else:
        read = _delta(_unit(queries), _unit(keys), values, sized, faded)
    result = read.flatten(2, 3).transpose(1, 2)[:, : mixed.shape[1]]
    return (result if skip is None else result + value * skip[:, None]).flatten(-2)


def _chunks(value: Tensor, size: int) -> Tensor:
    """(sequences, tokens, heads, channels) by heads and chunks, the last one filled up with zeros."""
    filled = functional.pad(value, (0, 0, 0, 0, 0, -value.shape[1] % size))
    return torch.unflatten(filled.transpose(1, 2), 2, (-1, size))


def _unit(value: Tensor) -> Tensor:
    return value * torch.rsqrt(value.square().sum(-1, keepdim=True) + UNIT_EPSILON)


def _between(faded: Tensor) -> Tensor:
    """How much is left at each token of a chunk of what an earlier one did; nothing of later ones."""
    size = faded.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=faded.device).triu(1)
    return (faded[..., :, None] - faded[..., None, :]).masked_fill(later, -torch.inf).exp()


def _by_head(value: Tensor, heads: int) -> Tensor:
    """Keys or queries of each head, from those that serve several."""
    return value.repeat_interleave(heads // value.shape[1], 1)


def _mamba2(queries: Tensor, keys: Tensor, values: Tensor, faded: Tensor) -> Tensor:
    """Values times their steps, read through the states: heads by chunks, (…, tokens, channels)."""
    heads = values.shape[1]
    scores = _by_head(queries @ keys.transpose(-1, -2), heads) * _between(faded)
    left, to_end = faded.exp()[..., None], (faded[..., -1:] - faded).exp()[..., None]
    gained = (_by_head(keys, heads) * to_end).transpose(-1, -2) @ values
    states = _states_before(gained, faded[..., -1])
    return scores @ values + (_by_head(queries, heads) * left) @ states


def _states_before(gained: Tensor, fading: Tensor) -> Tensor:
    """The state that each chunk begins with, from what each of those before it adds and lets fade."""
    # Exponents of sums over the chunks between two, as between the tokens of one.
    total = functional.pad(fading, (1, 0))[..., :-1].cumsum(-1)
    ends = total + fading
    count = fading.shape[-1]
    later = torch.ones(count, count, dtype=torch.bool, device=fading.device).triu()
    left = (total[..., :, None] - ends[..., None, :]).masked_fill(later, -torch.inf).exp()
    return torch.unflatten(left @ gained.flatten(-2), -1, gained.shape[-2:])


def _delta(queries: Tensor, keys: Tensor, values: Tensor, shares: Tensor, faded: Tensor) -> Tensor:
    """What of each value is new to the state goes into it, by chunks that follow each other."""
    heads = values.shape[1]
    scale = float(queries.shape[-1] ** -0.5)
    queries, keys = _by_head(queries, heads) * scale, _by_head(keys, heads)
    between, left = _between(faded), faded.exp()[..., None]
    shared = keys * shares
    system = (shared @ keys.transpose(-1, -2)) * between
    solved = torch.linalg.solve_triangular(
        system, torch.cat((values * shares, shared * left), -1), upper=False, unitriangular=True
    )
    new, told = torch.split(solved, [values.shape[-1], keys.shape[-1]], -1)
    scores = (queries @ keys.transpose(-1, -2)) * between
    queries, keys = queries * left, keys * (faded[..., -1:] - faded).exp()[..., None]
    # A chunk takes a state to so much of it as is left, less what its keys find there already, and adds what is new.
    keys = keys.transpose(-1, -2)
    kept = faded[..., -1].exp()[..., None, None] * torch.eye(keys.shape[-2], dtype=keys.dtype, device=keys.device)
    states = _states_after(kept - keys @ told, keys @ new)
    return queries @ states + scores @ (new - told @ states)


def _states_after(factors: Tensor, summands: Tensor) -> Tensor:
    """The state that each chunk begins with, of S ← factor · S + summand from chunk to chunk.

    Two chunks are one with the factors' product: half as many chunks each time, all of them at once, and back. That is
    a few products more than to go from chunk to chunk, and a few kernels instead of some for each chunk.
    """
    count = factors.shape[2]
    if count == 1:
        return torch.zeros_like(summands)
    if count % 2:
        factors, summands = (functional.pad(each, (0, 0, 0, 0, 0, 1)) for each in (factors, summands))
    (first, then), (begun, added) = (torch.unflatten(each, 2, (-1, 2)).unbind(3) for each in (factors, summands))
    before = _states_after(then @ first, then @ begun + added)
    between = first @ before + begun
    return torch.stack((before, between), 3).flatten(2, 3)[:, :, :count]
