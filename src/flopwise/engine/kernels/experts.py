"""Mixtures of experts in plain torch: routing, rows laid out by expert, and what comes back, forward and backward.

Rows of experts are sorted by expert, those of one expert in the order of the tokens, so that the result of a step is
the same bits whatever an expert's share is. Nothing here asks the device how many rows an expert has.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flopwise.engine.kernels.blocks import compute_type, row_blocks
from flopwise.work.routing import CORRECTION_TERMS, Routing

SIGMOID_EPSILON = 1e-20
"""Added to the sum of shares that are sigmoids, as DeepSeek does."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the rows of all experts are cut into tiles of one expert each: as many as the worst routing needs."""

    experts: Tensor
    """Of each tile, int32; behind the last one that is needed the number of experts."""
    first_rows: Tensor
    """Of each tile that is needed, int32."""

    @property
    def count(self) -> int:
        return int(self.experts.shape[0])


@dataclass(frozen=True, slots=True)
class Routed:
    """Whose the rows of the experts are."""

    choices: Tensor
    """Of each row: which of all tokens' choices it is, token by token, int64."""
    tokens: Tensor
    """Of each row, int32."""
    places: Tensor
    """Of each token and choice its row, int32: (tokens, choices)."""
    starts: Tensor
    """The first row of each expert, and behind the last row of all, int32."""
    _tiles: dict[int, Tiles] = field(default_factory=dict, repr=False, compare=False)

    @property
    def rows(self) -> int:
        """Of all experts together."""
        return int(self.tokens.shape[0])

    @property
    def experts(self) -> int:
        return int(self.starts.shape[0]) - 1

    def weights_of(self, weights: Tensor) -> Tensor:
        """Of each row, from those of each token and choice."""
        return weights.flatten().index_select(0, self.choices)

    def weights_to(self, rows: Tensor, *, out: Tensor) -> None:
        """From a number of each row to those of each token and choice."""
        out.view(-1).index_copy_(0, self.choices, rows.to(out.dtype))

    def cut(self, tile_rows: int) -> Tiles:
        """Tiles of so many rows; asked once, without asking the device."""
        found = self._tiles.get(tile_rows)
        if found is None:
            found = self._tiles[tile_rows] = self.cut_anew(tile_rows)
        return found

    def most_tiles(self, tile_rows: int) -> int:
        """A tile more for each expert that has a row, but never more tiles than rows."""
        return min(self.rows, self.rows // tile_rows + self.experts)

    def cut_anew(self, tile_rows: int) -> Tiles:
        """What `cut` keeps."""
        starts = self.starts
        each = (starts.diff() + (tile_rows - 1)) // tile_rows
        ends = each.cumsum(0)
        tiles = torch.arange(self.most_tiles(tile_rows), device=starts.device)
        of = torch.searchsorted(ends, tiles, right=True, out_int32=True)
        expert = of.clamp(max=self.experts - 1).long()
        first = starts[expert] + ((tiles - ends[expert] + each[expert]) * tile_rows).int()
        return Tiles(of, first)


def sort_by_expert(index: Tensor, experts: int) -> Routed:
    """The rows of the experts that tokens chose, (tokens, choices)."""
    chosen = index.flatten()
    ordered, order = torch.sort(chosen, stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(order.numel(), device=order.device, dtype=torch.int32)
    each = torch.arange(experts + 1, device=index.device, dtype=ordered.dtype)
    starts = torch.searchsorted(ordered, each, out_int32=True)
    count = index.shape[1]
    return Routed(order, (order // count).int(), places.view(-1, count), starts)


def route(
    scores: Tensor, routing: Routing, *, correction: Tensor | None = None, weights: Tensor, index: Tensor
) -> None:
    """The experts of each token and their weights, from the router's scores. `correction`: or its terms."""
    shares = shares_of(scores, routing, weights.dtype)
    if correction is not None and correction.ndim > 1:
        correction = sum_terms(correction, weights.dtype)
    # Of one a token the scores decide: their sigmoids may be equal where they are not.
    chosen = choose(scores if routing.on_inputs else shares, routing, correction, weights.shape[1])
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


def weigh_rows(source: Tensor, routed: Routed, weights: Tensor, *, out: Tensor) -> None:
    """`out` gets of each of the experts' rows the token, times its weight."""
    wide, of_rows = compute_type(source.dtype), routed.weights_of(weights)
    for block in row_blocks(out.shape[0], out.shape[1] * wide.itemsize, 3):
        # Weights are as exact as the rows that they multiply, as transformers has them.
        scale = of_rows[block, None].to(source.dtype)
        torch.mul(source.index_select(0, routed.tokens[block]), scale, out=out[block])


def weigh_rows_backward(gradient: Tensor, source: Tensor, routed: Routed, dtype: torch.dtype) -> Tensor:
    """The gradient of each row's weight, from that of the weighed rows."""
    wide = compute_type(source.dtype)
    found = torch.empty(routed.rows, dtype=dtype, device=source.device)
    for block in row_blocks(routed.rows, source.shape[1] * wide.itemsize, 3):
        rows = source.index_select(0, routed.tokens[block]).to(wide)
        found[block] = rows.mul_(gradient[block]).sum(-1)
    return found


def gate_forward(made: Tensor, gate: Tensor, other: Tensor, *, out: Tensor) -> None:
    """`other` and as much of what is made as a gate lets through, by its score, one a token."""
    wide = compute_type(made.dtype)
    for block in row_blocks(made.shape[0], made.shape[1] * wide.itemsize, 3):
        out[block].copy_(made[block] * torch.sigmoid(gate[block].to(wide)) + other[block])


def gate_backward(gradient: Tensor, made: Tensor, gate: Tensor, *, made_out: Tensor, gate_out: Tensor) -> None:
    """From the gradient of what a gate lets through to those of what it weighs and of its score."""
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
