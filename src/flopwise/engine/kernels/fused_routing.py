"""Routing of mixtures as kernels of Triton: what `experts` does in many small ones of torch, in few.

    route             1 launch   shares, the choice and its weights; a token's are in one program
    route_backward    1
    sort_by_expert    3          how many of each block of choices an expert has ▶ how many before ▶ places
    tiles             1          for each height that is asked
    weights_to        1

Sorting is by counting: whole numbers alone, so that the order is that of a stable sort, whatever the blocks are.
"""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from flopwise.engine.kernels.experts import SIGMOID_EPSILON, Routed, Tiles
from flopwise.engine.kernels.jit import column_block, kernel
from flopwise.work.routing import Routing

_NUMBERS = 1024
"""Scores that a program reads, and no fewer than a token's."""
_SORTED_TOGETHER = 128
"""Choices that are counted, and compared with each other, by one program."""
_NOTHING = tl.constexpr(-(2**63))
"""A key below those of all shares."""


@kernel()
def _shares(scores: tl.tensor, sigmoid: tl.constexpr) -> tl.tensor:
    """See `experts.shares_of`; of −∞, which stands where there is no expert, 0."""
    if sigmoid:
        return 1.0 / (1.0 + tl.exp(-scores))
    powers = tl.exp(scores - tl.max(scores, 1)[:, None])
    return powers / tl.sum(powers, 1)[:, None]


@kernel()
def _keys(values: tl.tensor, places_left: tl.tensor) -> tl.tensor:
    """Whole numbers in the order of fp32 ones, of equal ones the first with the most places left. All of them differ.

    What is no number has a key as well, so that whatever comes in, experts are chosen that there are, each once.
    """
    bits = values.to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return (bits.to(tl.int64) << 32) | places_left.to(tl.int64)


@kernel()
def _value(key: tl.tensor) -> tl.tensor:
    bits = (key >> 32).to(tl.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return bits.to(tl.float32, bitcast=True)


@kernel()
def _of_best_groups(
    keys: tl.tensor,
    lines: tl.constexpr,
    groups: tl.constexpr,
    kept_groups: tl.constexpr,
    best_two: tl.constexpr,
    groups_block: tl.constexpr,
    group_block: tl.constexpr,
) -> tl.tensor:
    """The keys of the groups that are kept, of which a token's experts are."""
    grouped = tl.reshape(keys, (lines, groups_block, group_block))
    best = tl.max(grouped, 2)
    score = _value(best)
    if best_two:
        others = tl.where(grouped == best[:, :, None], _NOTHING, grouped)
        score += _value(tl.max(others, 2))
    group = tl.arange(0, groups_block)
    left = tl.where(group[None, :] < groups, _keys(score, (groups_block - group)[None, :]), _NOTHING)
    kept = tl.zeros((lines, groups_block), dtype=tl.int32)
    for _ in range(kept_groups):
        chosen = left == tl.max(left, 1)[:, None]
        kept += chosen.to(tl.int32)
        left = tl.where(chosen, _NOTHING, left)
    grouped = tl.where(kept[:, :, None] > 0, grouped, _NOTHING)
    return tl.reshape(grouped, (lines, groups_block * group_block))


@kernel()
def _route_forward_kernel(
    scores: tl.tensor,
    correction: tl.tensor,
    weights: tl.tensor,
    index: tl.tensor,
    tokens: tl.tensor,
    scores_row: tl.tensor,
    scale: tl.tensor,
    epsilon: tl.tensor,
    experts: tl.constexpr,
    choices: tl.constexpr,
    groups: tl.constexpr,
    kept_groups: tl.constexpr,
    best_two: tl.constexpr,
    sigmoid: tl.constexpr,
    by_scores: tl.constexpr,
    normalised: tl.constexpr,
    terms: tl.constexpr,
    lines: tl.constexpr,
    groups_block: tl.constexpr,
    group_block: tl.constexpr,
    choices_block: tl.constexpr,
) -> None:
    """Columns are experts, each group's behind each other and filled up to a power of two."""
    columns: tl.constexpr = groups_block * group_block
    each: tl.constexpr = experts // groups
    token = tl.program_id(0) * lines + tl.arange(0, lines)
    there = token < tokens
    column = tl.arange(0, columns)
    expert = column // group_block * each + column % group_block
    real = (column // group_block < groups) & (column % group_block < each)
    # Those behind the last token read it as well, and write nothing.
    row = tl.minimum(token, tokens - 1).to(tl.int64)
    read = tl.load(scores + row[:, None] * scores_row + expert[None, :], mask=real[None, :], other=float("-inf"))
    shares = _shares(read.to(tl.float32), sigmoid)
    ranked = read.to(tl.float32) if by_scores else shares
    if terms > 0:
        total = tl.zeros((columns,), dtype=tl.float32)
        for term in tl.static_range(terms):
            of_term = correction + (terms - 1 - term) * experts + expert
            total += tl.load(of_term, mask=real, other=0.0).to(tl.float32)
        ranked += total[None, :]
    left = tl.where(real[None, :], _keys(ranked, (columns - column)[None, :]), _NOTHING)
    if groups > 1:
        left = _of_best_groups(left, lines, groups, kept_groups, best_two, groups_block, group_block)
    slot = tl.arange(0, choices_block)
    found = tl.zeros((lines, choices_block), dtype=tl.float32)
    chosen = tl.zeros((lines, choices_block), dtype=tl.int32)
    for choice in range(choices):
        best = tl.max(left, 1)
        taken = left == best[:, None]
        share = tl.sum(tl.where(taken, shares, 0.0), 1)
        place = columns - (best & 0xFFFFFFFF).to(tl.int32)
        here = (slot == choice)[None, :]
        found = tl.where(here, share[:, None], found)
        chosen = tl.where(here, (place // group_block * each + place % group_block)[:, None], chosen)
        left = tl.where(taken, _NOTHING, left)
    if normalised:
        found = found / (tl.sum(found, 1) + epsilon)[:, None]
    target = token.to(tl.int64)[:, None] * choices + slot[None, :]
    written = there[:, None] & (slot < choices)[None, :]
    tl.store(weights + target, (found * scale).to(weights.dtype.element_ty), mask=written)
    tl.store(index + target, chosen.to(index.dtype.element_ty), mask=written)


@kernel()
def _route_backward_kernel(
    gradient: tl.tensor,
    scores: tl.tensor,
    index: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    scores_row: tl.tensor,
    out_row: tl.tensor,
    scale: tl.tensor,
    epsilon: tl.tensor,
    experts: tl.constexpr,
    choices: tl.constexpr,
    sigmoid: tl.constexpr,
    normalised: tl.constexpr,
    lines: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    token = tl.program_id(0) * lines + tl.arange(0, lines)
    column = tl.arange(0, columns)
    real = column < experts
    row = tl.minimum(token, tokens - 1).to(tl.int64)
    read = tl.load(scores + row[:, None] * scores_row + column[None, :], mask=real[None, :], other=float("-inf"))
    shares = _shares(read.to(tl.float32), sigmoid)
    slope = tl.zeros((lines, columns), dtype=tl.float32)
    chosen = tl.zeros((lines, columns), dtype=tl.float32)
    for choice in range(choices):
        expert = tl.load(index + row * choices + choice)
        above = tl.load(gradient + row * choices + choice).to(tl.float32) * scale
        mine = column[None, :] == expert[:, None]
        slope += tl.where(mine, above[:, None], 0.0)
        chosen += tl.where(mine, 1.0, 0.0)
    if normalised:
        total = tl.sum(chosen * shares, 1) + epsilon
        mean = tl.sum(slope * shares, 1) / total
        slope = (slope - mean[:, None]) / total[:, None] * chosen
    slope = slope * (1.0 - shares) if sigmoid else slope - tl.sum(slope * shares, 1)[:, None]
    found = slope * shares
    target = out + row[:, None] * out_row + column[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & real[None, :])


@kernel()
def _sort_counts_kernel(
    index: tl.tensor,
    counts: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    block: tl.constexpr,
    experts_block: tl.constexpr,
) -> None:
    """`counts`: of each block of choices and expert."""
    row = tl.program_id(0) * block + tl.arange(0, block)
    chosen = tl.load(index + row, mask=row < rows, other=-1).to(tl.int32)
    expert = tl.arange(0, experts_block)
    found = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0).to(tl.int64) * experts + expert, found, mask=expert < experts)


@kernel(unspecialized=["blocks"])
def _sort_offsets_kernel(
    counts: tl.tensor, blocks: tl.tensor, experts: tl.tensor, lines: tl.constexpr, width: tl.constexpr
) -> None:
    """Of some experts: counts become how many there are in the blocks before; behind the last, in all of them."""
    expert = tl.program_id(0) * width + tl.arange(0, width)
    inside = expert < experts
    total = tl.zeros((width,), dtype=tl.int32)
    for first in range(0, blocks, lines):
        block = first + tl.arange(0, lines)
        place = counts + block.to(tl.int64)[:, None] * experts + expert[None, :]
        there = (block < blocks)[:, None] & inside[None, :]
        found = tl.load(place, mask=there, other=0)
        tl.store(place, total[None, :] + tl.cumsum(found, 0) - found, mask=there)
        total += tl.sum(found, 0)
    tl.store(counts + blocks.to(tl.int64) * experts + expert, total, mask=inside)


@kernel(unspecialized=["blocks"])
def _sort_places_kernel(
    index: tl.tensor,
    counts: tl.tensor,
    choices: tl.tensor,
    tokens: tl.tensor,
    places: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    blocks: tl.tensor,
    count: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    experts_block: tl.constexpr,
) -> None:
    """A choice's place: behind all of the experts before, of its own in the blocks before, and of those in its own."""
    first = tl.program_id(0) * block
    row = first + tl.arange(0, block)
    there = row < rows
    chosen = tl.load(index + row, mask=there, other=0).to(tl.int32)
    totals = counts + blocks.to(tl.int64) * experts
    before = tl.zeros((block, width), dtype=tl.int32)
    for begin in range(0, experts_block, width):
        expert = begin + tl.arange(0, width)
        total = tl.load(totals + expert, mask=expert < experts, other=0)
        before += tl.where(expert[None, :] < chosen[:, None], total[None, :], 0)
    for begin in range(0, block, width):
        other = first + begin + tl.arange(0, width)
        taken = tl.load(index + other, mask=other < rows, other=0).to(tl.int32)
        before += ((taken[None, :] == chosen[:, None]) & (other[None, :] < row[:, None])).to(tl.int32)
    place = tl.load(counts + tl.program_id(0).to(tl.int64) * experts + chosen) + tl.sum(before, 1)
    tl.store(places + row, place, mask=there)
    tl.store(choices + place, row.to(tl.int64), mask=there)
    tl.store(tokens + place, row // count, mask=there)
    if tl.program_id(0) == 0:
        each = tl.arange(0, experts_block)
        ends = tl.cumsum(tl.load(totals + each, mask=each < experts, other=0), 0)
        tl.store(starts + each + 1, ends, mask=each < experts)
        tl.store(starts, 0)


@kernel()
def _cut_tiles_kernel(
    starts: tl.tensor,
    tile_experts: tl.tensor,
    tile_rows: tl.tensor,
    tiles: tl.tensor,
    experts: tl.tensor,
    height: tl.constexpr,
    block: tl.constexpr,
    experts_block: tl.constexpr,
) -> None:
    tile = tl.program_id(0) * block + tl.arange(0, block)
    expert = tl.arange(0, experts_block)
    inside = expert < experts
    first = tl.load(starts + expert, mask=inside, other=0)
    rows = tl.load(starts + expert + 1, mask=inside, other=0) - first
    each = (rows + (height - 1)) // height
    passed = (tl.cumsum(each, 0)[None, :] <= tile[:, None]) & inside[None, :]
    begun = tl.sum(tl.where(passed, each[None, :], 0), 1)
    start = tl.sum(tl.where(passed, rows[None, :], 0), 1)
    tl.store(tile_experts + tile, tl.sum(passed.to(tl.int32), 1), mask=tile < tiles)
    tl.store(tile_rows + tile, start + (tile - begun) * height, mask=tile < tiles)


@kernel()
def _gather_sums_kernel(
    sums: tl.tensor, places: tl.tensor, out: tl.tensor, rows: tl.tensor, block: tl.constexpr
) -> None:
    row = tl.program_id(0) * block + tl.arange(0, block)
    there = row < rows
    found = tl.load(sums + tl.load(places + row, mask=there, other=0), mask=there, other=0.0)
    tl.store(out + row, found.to(out.dtype.element_ty), mask=there)


# -- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FusedRouted(Routed):
    """The same, on a GPU."""

    def weights_to(self, rows: Tensor, *, out: Tensor) -> None:
        """See `Routed.weights_to`."""
        block = 512
        _gather_sums_kernel[(triton.cdiv(self.rows, block),)](rows, self.places, out, self.rows, block=block)

    def cut_anew(self, tile_rows: int) -> Tiles:
        """See `Routed.cut_anew`."""
        most, block = self.most_tiles(tile_rows), 16
        of, first = (torch.empty(most, dtype=torch.int32, device=self.starts.device) for _ in range(2))
        _cut_tiles_kernel[(triton.cdiv(most, block),)](
            self.starts, of, first, most, self.experts,
            height=tile_rows, block=block, experts_block=_power(self.experts),
        )  # fmt: skip
        return Tiles(of, first)


def _power(count: int) -> int:
    """The power of two that holds so many."""
    return column_block(count, 1 << 30)


def _lines(columns: int) -> int:
    """Tokens of a program."""
    return max(1, min(64, _NUMBERS // columns))


def route(scores: Tensor, routing: Routing, *, correction: Tensor | None, weights: Tensor, index: Tensor) -> None:
    """See `experts.route`. Of equal shares the first expert's, or group's, is taken."""
    (tokens, experts), choices = scores.shape, weights.shape[1]
    assert scores.stride(1) == 1 and weights.is_contiguous() and index.is_contiguous()
    groups_block, group_block = _power(routing.groups), _power(experts // routing.groups)
    lines = _lines(groups_block * group_block)
    terms = None if correction is None else correction.view(-1, experts)
    _route_forward_kernel[(triton.cdiv(tokens, lines),)](
        scores,
        scores if terms is None else terms,
        weights,
        index,
        tokens,
        scores.stride(0),
        float(routing.scale),
        SIGMOID_EPSILON if routing.scores == "sigmoid" else 0.0,
        experts=experts,
        choices=choices,
        groups=routing.groups,
        kept_groups=routing.groups_kept,
        best_two=routing.group_by == "best two",
        sigmoid=routing.scores == "sigmoid",
        by_scores=routing.on_inputs,
        normalised=routing.normalised,
        terms=0 if terms is None else terms.shape[0],
        lines=lines,
        groups_block=groups_block,
        group_block=group_block,
        choices_block=_power(choices),
        num_warps=4,
    )


def route_backward(gradient: Tensor, scores: Tensor, index: Tensor, routing: Routing, *, out: Tensor) -> None:
    """See `experts.route_backward`."""
    (tokens, experts), choices = scores.shape, index.shape[1]
    assert scores.stride(1) == out.stride(1) == 1 and gradient.is_contiguous() and index.is_contiguous()
    columns = _power(experts)
    lines = _lines(columns)
    _route_backward_kernel[(triton.cdiv(tokens, lines),)](
        gradient,
        scores,
        index,
        out,
        tokens,
        scores.stride(0),
        out.stride(0),
        float(routing.scale),
        SIGMOID_EPSILON if routing.scores == "sigmoid" else 0.0,
        experts=experts,
        choices=choices,
        sigmoid=routing.scores == "sigmoid",
        normalised=routing.normalised,
        lines=lines,
        columns=columns,
        num_warps=4,
    )


def sort_by_expert(index: Tensor, experts: int) -> FusedRouted:
    """See `experts.sort_by_expert`."""
    tokens, count = index.shape
    rows, device, block, width = tokens * count, index.device, _SORTED_TOGETHER, 8
    chosen, blocks, experts_block = index.contiguous(), triton.cdiv(rows, block), _power(experts)
    counts = torch.empty(blocks + 1, experts, dtype=torch.int32, device=device)
    choices = torch.empty(rows, dtype=torch.int64, device=device)
    of_rows, starts = (torch.empty(size, dtype=torch.int32, device=device) for size in (rows, experts + 1))
    places = torch.empty(tokens, count, dtype=torch.int32, device=device)
    _sort_counts_kernel[(blocks,)](chosen, counts, rows, experts, block=block, experts_block=experts_block)
    _sort_offsets_kernel[(triton.cdiv(experts, width),)](
        counts, blocks, experts, lines=column_block(blocks, 1024), width=width, num_warps=8
    )
    _sort_places_kernel[(blocks,)](
        chosen, counts, choices, of_rows, places, starts, rows, experts, blocks,
        count=count, block=block, width=min(32, experts_block), experts_block=experts_block, num_warps=8,
    )  # fmt: skip
    return FusedRouted(choices, of_rows, places, starts)
