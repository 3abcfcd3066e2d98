"""Mixtures of experts in plain torch: routing, rows laid out by expert, and what comes back, forward and backward.

Rows of experts are sorted by expert, those of one expert in the order of the tokens, so that the result of a step is
the same bits whatever an expert's share is. Nothing here asks the device how many rows an expert has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flopwise.engine.kernels.blocks import compute_type, row_blocks
from flopwise.work.routing import CORRECTION_TERMS, Routing

SIGMOID_EPSILON = 1e-20
"""Added to the sum of shares that are sigmoids, as DeepSeek does."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Whose the rows of the experts are."""

    tokens: Tensor
    """Of each row, int64."""
    slots: Tensor
    """Of each row: which of its token's choices it is, int64."""
    places: Tensor
    """Of each token and choice its row, int64: (tokens, choices)."""
    ends: Tensor
    """Behind the last row of each expert, int32."""


def sort_by_expert(index: Tensor, experts: int) -> Routed:
    """The rows of the experts that tokens chose, (tokens, choices)."""
    chosen = index.flatten()
    ordered, order = torch.sort(chosen, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    each = torch.arange(experts, device=index.device, dtype=ordered.dtype)
    ends = torch.searchsorted(ordered, each, right=True, out_int32=True)
    choices = index.shape[1]
    return Routed(order // choices, order % choices, places.view(-1, choices), ends)


def route(
    scores: Tensor, routing: Routing, *, correction: Tensor | None = None, weights: Tensor, index: Tensor
) -> None:
    """The experts of each token and their weights, from the router's scores."""
    shares = shares_of(scores, routing, weights.dtype)
    chosen = choose(shares, routing, correction, weights.shape[1])
    found = shares.gather(-1, chosen)
    if routing.normalised:
        found /= _total(found, routing)
    weights.copy_(found.mul_(routing.scale))
    index.copy_(chosen)


def shares_of(scores: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """Each expert's share of a token."""
    if routing.scores == "sigmoid":
        return torch.sigmoid(scores.to(dtype))
    return torch.softmax(scores, -1, dtype=dtype)


def choose(shares: Tensor, routing: Routing, correction: Tensor | None, count: int) -> Tensor:
    """The experts with the largest shares, corrected, of the best groups."""
    ranked = shares if correction is None else shares + correction
    if routing.groups > 1:
        by_group = torch.unflatten(ranked, -1, (routing.groups, -1))
        best = by_group.topk(2 if routing.group_by == "best two" else 1, dim=-1)[0].sum(-1)
        kept = torch.zeros_like(best).scatter_(-1, best.topk(routing.groups_kept, dim=-1)[1], 1.0)
        ranked = by_group.masked_fill(kept[..., None] == 0, -torch.inf).flatten(-2)
    return ranked.topk(count, dim=-1)[1]


def _total(chosen: Tensor, routing: Routing) -> Tensor:
    """What normalised shares are divided by; sigmoids may all be next to nothing."""
    return chosen.sum(-1, keepdim=True).add_(SIGMOID_EPSILON if routing.scores == "sigmoid" else 0.0)


def route_backward(gradient: Tensor, scores: Tensor, index: Tensor, routing: Routing, *, out: Tensor) -> None:
    """`out` gets the gradient of the scores from that of the chosen experts' weights."""
    shares = shares_of(scores, routing, gradient.dtype)
    places = index.long()
    chosen = shares.gather(-1, places)
    gradient = gradient * routing.scale
    if routing.normalised:
        total = _total(chosen, routing)
        gradient = (gradient - (gradient * chosen).sum(-1, keepdim=True) / total) / total
    slope = torch.zeros_like(shares).scatter_(-1, places, gradient)
    if routing.scores == "sigmoid":
        out.copy_(slope.mul_(shares).mul_(1.0 - shares))
        return
    mean = (gradient * chosen).sum(-1, keepdim=True)
    out.copy_(slope.sub_(mean).mul_(shares))


def dispatch(source: Tensor, routed: Routed, *, out: Tensor) -> None:
    """Each expert's rows of the tokens that chose it."""
    torch.index_select(source, 0, routed.tokens, out=out)


def dispatch_backward(gradient: Tensor, routed: Routed, *, out: Tensor, accumulate: bool) -> None:
    """A token's gradient is the sum of those of its rows, in the order of its choices."""
    _sum_rows(gradient, routed, None, out=out, accumulate=accumulate)


def combine(
    made: Tensor,
    weights: Tensor,
    routed: Routed,
    *,
    out: Tensor,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> None:
    """What a token's experts made, weighted, and what `shared` experts did, as much as a `gate` lets through."""
    if shared is None:
        _sum_rows(made, routed, weights, out=out, accumulate=False)
        return
    if gate is None:
        out.copy_(shared)
    else:
        torch.mul(shared, torch.sigmoid(gate.to(weights.dtype)), out=out)
    _sum_rows(made, routed, weights, out=out, accumulate=True)


def gate_backward(gradient: Tensor, made: Tensor, gate: Tensor, *, made_out: Tensor, gate_out: Tensor) -> None:
    """From the gradient of what a gate lets through to those of what it weighs and of its score, one a token."""
    wide = compute_type(made.dtype)
    for block in row_blocks(made.shape[0], made.shape[1] * wide.itemsize, 3):
        share = torch.sigmoid(gate[block].to(wide))
        above = gradient[block].to(wide)
        made_out[block].copy_(above * share)
        gate_out[block].copy_((above * made[block]).sum(-1, keepdim=True) * share * (1.0 - share))


def split_terms(correction: Tensor) -> Tensor:
    """A correction as terms that bf16 holds exactly, (terms, experts)."""
    rest: Tensor = correction.to(torch.float32)
    terms: list[Tensor] = []
    for _ in range(CORRECTION_TERMS):
        terms.append(rest.to(torch.bfloat16).to(torch.float32))
        rest = rest - terms[-1]
    return torch.stack(terms).to(torch.promote_types(correction.dtype, torch.float32))


def sum_terms(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """The correction that terms make up: the small ones first, so that nothing is lost."""
    total = torch.zeros_like(terms[0], dtype=dtype)
    for term in reversed(terms.unbind()):
        total += term
    return total


def _sum_rows(rows: Tensor, routed: Routed, weights: Tensor | None, *, out: Tensor, accumulate: bool) -> None:
    wide = compute_type(rows.dtype)
    for block in row_blocks(out.shape[0], out.shape[1] * wide.itemsize, 3):
        places = routed.places[block]
        total = out[block].to(wide) if accumulate else torch.zeros_like(out[block], dtype=wide)
        for slot in range(places.shape[1]):
            picked = rows.index_select(0, places[:, slot]).to(wide)
            total += picked if weights is None else picked * weights[block, slot, None]
        out[block].copy_(total)


def combine_backward(
    gradient: Tensor, made: Tensor, weights: Tensor, routed: Routed, *, made_out: Tensor, weights_out: Tensor
) -> None:
    """From the gradient of the weighted sums to those of the experts' rows and of the weights."""
    wide = compute_type(made.dtype)
    for block in row_blocks(made.shape[0], made.shape[1] * wide.itemsize, 3):
        tokens, slots = routed.tokens[block], routed.slots[block]
        picked = gradient.index_select(0, tokens).to(wide)
        weights_out[tokens, slots] = (picked * made[block]).sum(-1).to(weights_out.dtype)
        made_out[block].copy_(picked * weights[tokens, slots, None])
