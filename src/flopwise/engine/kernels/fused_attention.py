"""Attention that no library's kernel does, as kernels of Triton: capped scores, ALiBi, weights that dropout drops.

Sequences lie behind each other: even ones, the queries of each being the last of its keys, or packed ones of uneven
length. Scores live one tile at a time, sums run in a fixed order, and nothing is kept but the logsumexp. Masks are
drawn where scores are: a weight's place in the hash that `dropout` documents is (token · heads + head, key). Backward
makes every tile twice, once for the queries' gradients and once for those of keys and values, so that no program adds
to what another one has written.
"""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from flopwise.engine.kernels.attention import MOST_CHANNELS
from flopwise.engine.kernels.dropout import DropMask
from flopwise.engine.kernels.fused_dropout import keep_some, lower_hash, upper_hash
from flopwise.engine.kernels.jit import ARITHMETIC, bounded_tanh, column_block, kernel
from flopwise.engine.kernels.plain_attention import AttentionMask, Saved


class PassCut(NamedTuple):
    """How a kernel's work is cut, and how many threads take a piece of it."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


Pass = Literal["forward", "of queries", "of keys"]
CUTS: dict[Pass, PassCut] = {
    "forward": PassCut(64, 64, stages=3),
    "of queries": PassCut(64, 32),
    "of keys": PassCut(32, 64),
}
"""Of heads of up to 64 channels, as measured on an H200 with those of GPT-2, with dropout: forward took 0.88 of what it
takes by squares of 64; backward 0.85, as its two kernels add up that were timed one at a time."""
_SQUARE, _NARROW = PassCut(64, 64), 64
_WIDE_CUT, _WIDE = PassCut(32, 32, stages=1), 128
"""Of heads of more channels than the last, whose rows fill what a multiprocessor shares."""
_LEAST_CHANNELS = 16
"""The matrix unit takes no fewer."""


class _Layout(NamedTuple):
    """How sequences lie among the rows."""

    queries: int
    """Of a sequence; of packed ones the most."""
    keys: int
    sequences: int
    starts: Tensor | None = None
    lengths: Tensor | None = None


@kernel()
def _bounds(
    starts: tl.tensor,
    lengths: tl.tensor,
    sequence: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    packed: tl.constexpr,
    padded: tl.constexpr,
) -> tl.tensor:
    """A sequence's first query and first key among the rows, its queries, its keys, and those of them that are seen."""
    if packed:
        first = tl.load(starts + sequence)
        count = tl.load(starts + sequence + 1) - first
        first_key = first
        key_count = count
        seen = count
    else:
        first = sequence * queries
        first_key = sequence * keys
        # Not as they came: a number that is 1 is no tensor.
        count = sequence * 0 + queries
        key_count = sequence * 0 + keys
        seen = key_count
        if padded:
            seen = tl.minimum(seen, tl.load(lengths + sequence))
    return first.to(tl.int64), first_key.to(tl.int64), count, key_count, seen


@kernel()
def _place_of(tiles: tl.tensor, heads: tl.tensor) -> tl.tensor:
    """A program's tile, head and sequence. In one row: a grid has room for 65,535 sequences elsewhere."""
    number = tl.program_id(0)
    return number % tiles, number // tiles % heads, number // tiles // heads


@kernel()
def _visible(
    query: tl.tensor, column: tl.tensor, seen: tl.tensor, causal: tl.constexpr, window: tl.constexpr
) -> tl.tensor:
    """Whether queries (a column of their places) see keys (a row of theirs)."""
    visible = (column < seen) & (query >= 0)
    if causal:
        visible &= column <= query
    if window > 0:
        visible &= column > query - window
    return visible


@kernel()
def _slope_of(slopes: tl.tensor, head: tl.tensor, biased: tl.constexpr) -> tl.tensor:
    """A head's slope of ALiBi; zero where there is none."""
    slope = 0.0
    if biased:
        slope = tl.load(slopes + head)
    return slope


@kernel()
def _change_scores(
    scores: tl.tensor,
    query: tl.tensor,
    column: tl.tensor,
    slope: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    capped: tl.constexpr,
    biased: tl.constexpr,
    rounded: tl.constexpr,
) -> tl.tensor:
    """Scores after the cap, cap · tanh(scores ÷ cap), and what ALiBi adds; and the slope of the cap.

    ALiBi goes by the distance of keys, or by the difference of two places' biases that are rounded.
    """
    steepness = scores
    if capped:
        share = bounded_tanh(scores / cap)
        scores = cap * share
        steepness = 1.0 - share * share
    if biased:
        if rounded:
            steep = slope.to(tl.bfloat16).to(tl.float32)
            near = (steep * column.to(tl.float32).to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
            here = (steep * query.to(tl.float32).to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
            scores += (near - here) * scale
        else:
            scores += slope * (column - query).to(tl.float32)
    return scores, steepness


@kernel()
def _upper_of(
    tokens: tl.tensor,
    words: tl.tensor,
    place: tl.tensor,
    there: tl.tensor,
    heads: tl.tensor,
    head: tl.tensor,
    drops: tl.constexpr,
) -> tl.tensor:
    """The hash of queries, where anything is dropped."""
    upper = place
    if drops:
        number = tl.load(tokens + place, mask=there, other=0).to(tl.uint32, bitcast=True)
        upper = upper_hash(number * heads + head, words)
    return upper


@kernel()
def _lower_of(column: tl.tensor, words: tl.tensor, drops: tl.constexpr) -> tl.tensor:
    """That of keys."""
    lower = column
    if drops:
        lower = lower_hash(column, words)
    return lower


@kernel()
def _kept(
    values: tl.tensor,
    lower: tl.tensor,
    upper: tl.tensor,
    scale: tl.tensor,
    drops: tl.constexpr,
    threshold: tl.constexpr,
) -> tl.tensor:
    """What is kept of weights: all, or by the hashes of their places."""
    if drops:
        values = keep_some(values, lower, upper, scale, threshold)
    return values


@kernel()
def _attention_forward_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    tokens: tl.tensor,
    words: tl.tensor,
    slopes: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    channels: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    scale: tl.tensor,
    drop_scale: tl.tensor,
    cap: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    sums_sequence: tl.tensor,
    sums_head: tl.tensor,
    causal: tl.constexpr,
    window: tl.constexpr,
    packed: tl.constexpr,
    padded: tl.constexpr,
    drops: tl.constexpr,
    threshold: tl.constexpr,
    capped: tl.constexpr,
    biased: tl.constexpr,
    rounded: tl.constexpr,
    tile_queries: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_channels: tl.constexpr,
) -> None:
    """A tile of a head's queries a program."""
    tile, head, sequence = _place_of(tl.cdiv(queries, tile_queries), heads)
    first, first_key, count, key_count, seen = _bounds(starts, lengths, sequence, queries, keys, packed, padded)
    begin = tile * tile_queries
    row = begin + tl.arange(0, tile_queries)
    there = row < count
    channel = tl.arange(0, tile_channels)
    across = channel < channels
    place = first + row
    inside = there[:, None] & across[None, :]
    taken = tl.load(query + place[:, None] * query_row + head * query_head + channel[None, :], mask=inside, other=0.0)
    upper = _upper_of(tokens, words, place, there, heads, head, drops)
    slope = _slope_of(slopes, head, biased)
    shift = key_count - count
    last = seen
    if causal:
        last = tl.minimum(last, shift + begin + tile_queries)
    least = 0
    if window > 0:
        least = tl.maximum(0, shift + begin - window + 1) // tile_keys * tile_keys
    # Programs beyond a short sequence's end have nothing to do.
    last = tl.where(begin < count, last, 0)
    largest = tl.full((tile_queries,), -float("inf"), tl.float32)
    weights = tl.zeros((tile_queries,), tl.float32)
    total = tl.zeros((tile_queries, tile_channels), tl.float32)
    own = head // group
    for start in range(least, last, tile_keys):
        column = start + tl.arange(0, tile_keys)
        known = (column < key_count)[:, None] & across[None, :]
        line = first_key + column
        read = key + line[:, None] * key_row + own * key_head + channel[None, :]
        scores = tl.dot(taken, tl.trans(tl.load(read, mask=known, other=0.0))) * scale
        scores, _ = _change_scores(
            scores, (shift + row)[:, None], column[None, :], slope, scale, cap, capped, biased, rounded
        )
        visible = _visible((shift + row)[:, None], column[None, :], seen, causal, window)
        scores = tl.where(visible, scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        # A query that has seen nothing yet has no largest score: any finite one keeps its weights at zero.
        base = tl.where(larger == -float("inf"), 0.0, larger)
        shares = tl.exp(scores - base[:, None])
        shrunk = tl.exp(largest - base)
        weights = weights * shrunk + tl.sum(shares, 1)
        shares = _kept(shares, _lower_of(column, words, drops)[None, :], upper[:, None], drop_scale, drops, threshold)
        read = value + line[:, None] * value_row + own * value_head + channel[None, :]
        values = tl.load(read, mask=known, other=0.0)
        total = total * shrunk[:, None] + tl.dot(shares.to(values.dtype), values)
        largest = larger
    nothing = weights == 0.0
    total /= tl.where(nothing, 1.0, weights)[:, None]
    write = out + place[:, None] * out_row + head * out_head + channel[None, :]
    tl.store(write, total.to(out.dtype.element_ty), mask=inside)
    # Of packed sequences all sums lie in one row a head.
    target = row + first if packed else row.to(tl.int64)
    found = tl.where(nothing, -float("inf"), largest + tl.log(tl.where(nothing, 1.0, weights)))
    tl.store(sums + sequence.to(tl.int64) * sums_sequence + head * sums_head + target, found, mask=there)


@kernel()
def _sums_of(sums: tl.tensor, place: tl.tensor, there: tl.tensor) -> tl.tensor:
    """The logsumexp of queries; any finite number where they see nothing, whose scores are −∞ alone."""
    found = tl.load(sums + place, mask=there, other=0.0)
    return tl.where(found == -float("inf"), 0.0, found)


@kernel()
def _attention_query_gradients_kernel(
    gradient: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    query_gradient: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    tokens: tl.tensor,
    words: tl.tensor,
    slopes: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    channels: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    scale: tl.tensor,
    drop_scale: tl.tensor,
    cap: tl.tensor,
    gradient_row: tl.tensor,
    gradient_head: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    sums_sequence: tl.tensor,
    sums_head: tl.tensor,
    below_row: tl.tensor,
    below_head: tl.tensor,
    causal: tl.constexpr,
    window: tl.constexpr,
    packed: tl.constexpr,
    padded: tl.constexpr,
    drops: tl.constexpr,
    threshold: tl.constexpr,
    capped: tl.constexpr,
    biased: tl.constexpr,
    rounded: tl.constexpr,
    tile_queries: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_channels: tl.constexpr,
) -> None:
    """A tile of a head's queries a program."""
    tile, head, sequence = _place_of(tl.cdiv(queries, tile_queries), heads)
    first, first_key, count, key_count, seen = _bounds(starts, lengths, sequence, queries, keys, packed, padded)
    begin = tile * tile_queries
    row = begin + tl.arange(0, tile_queries)
    there = row < count
    channel = tl.arange(0, tile_channels)
    across = channel < channels
    place = first + row
    inside = there[:, None] & across[None, :]
    taken = tl.load(query + place[:, None] * query_row + head * query_head + channel[None, :], mask=inside, other=0.0)
    given = gradient + place[:, None] * gradient_row + head * gradient_head + channel[None, :]
    above = tl.load(given, mask=inside, other=0.0)
    made = tl.load(out + place[:, None] * out_row + head * out_head + channel[None, :], mask=inside, other=0.0)
    delta = tl.sum(above.to(tl.float32) * made.to(tl.float32), 1)
    upper = _upper_of(tokens, words, place, there, heads, head, drops)
    slope = _slope_of(slopes, head, biased)
    target = row + first if packed else row.to(tl.int64)
    total_sum = _sums_of(sums, sequence.to(tl.int64) * sums_sequence + head * sums_head + target, there)
    shift = key_count - count
    last = seen
    if causal:
        last = tl.minimum(last, shift + begin + tile_queries)
    least = 0
    if window > 0:
        least = tl.maximum(0, shift + begin - window + 1) // tile_keys * tile_keys
    last = tl.where(begin < count, last, 0)
    below = tl.zeros((tile_queries, tile_channels), tl.float32)
    own = head // group
    for start in range(least, last, tile_keys):
        column = start + tl.arange(0, tile_keys)
        known = (column < key_count)[:, None] & across[None, :]
        line = first_key + column
        keyed = tl.load(key + line[:, None] * key_row + own * key_head + channel[None, :], mask=known, other=0.0)
        read = value + line[:, None] * value_row + own * value_head + channel[None, :]
        values = tl.load(read, mask=known, other=0.0)
        scores = tl.dot(taken, tl.trans(keyed)) * scale
        scores, steepness = _change_scores(
            scores, (shift + row)[:, None], column[None, :], slope, scale, cap, capped, biased, rounded
        )
        visible = _visible((shift + row)[:, None], column[None, :], seen, causal, window) & there[:, None]
        shares = tl.where(visible, tl.exp(scores - total_sum[:, None]), 0.0)
        changes = tl.dot(above, tl.trans(values))
        lower = _lower_of(column, words, drops)
        changes = _kept(changes, lower[None, :], upper[:, None], drop_scale, drops, threshold)
        changes = shares * (changes - delta[:, None])
        if capped:
            changes *= steepness
        below += tl.dot(changes.to(keyed.dtype), keyed)
    write = query_gradient + place[:, None] * below_row + head * below_head + channel[None, :]
    tl.store(write, (below * scale).to(query_gradient.dtype.element_ty), mask=inside)


@kernel()
def _store_or_add(target: tl.tensor, values: tl.tensor, inside: tl.tensor, adds: tl.constexpr) -> None:
    if adds:
        values += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, values.to(target.dtype.element_ty), mask=inside)


@kernel()
def _attention_key_gradients_kernel(
    gradient: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    key_gradient: tl.tensor,
    value_gradient: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    tokens: tl.tensor,
    words: tl.tensor,
    slopes: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    channels: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    scale: tl.tensor,
    drop_scale: tl.tensor,
    cap: tl.tensor,
    gradient_row: tl.tensor,
    gradient_head: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    sums_sequence: tl.tensor,
    sums_head: tl.tensor,
    of_key_row: tl.tensor,
    of_key_head: tl.tensor,
    of_value_row: tl.tensor,
    of_value_head: tl.tensor,
    causal: tl.constexpr,
    window: tl.constexpr,
    packed: tl.constexpr,
    padded: tl.constexpr,
    adds: tl.constexpr,
    drops: tl.constexpr,
    threshold: tl.constexpr,
    capped: tl.constexpr,
    biased: tl.constexpr,
    rounded: tl.constexpr,
    tile_queries: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_channels: tl.constexpr,
) -> None:
    """A tile of a key and value head's keys a program, with the query heads that share it one after another."""
    tile, own, sequence = _place_of(tl.cdiv(keys, tile_keys), heads // group)
    first, first_key, count, key_count, seen = _bounds(starts, lengths, sequence, queries, keys, packed, padded)
    start = tile * tile_keys
    column = start + tl.arange(0, tile_keys)
    channel = tl.arange(0, tile_channels)
    across = channel < channels
    line = first_key + column
    known = (column < key_count)[:, None] & across[None, :]
    keyed = tl.load(key + line[:, None] * key_row + own * key_head + channel[None, :], mask=known, other=0.0)
    values = tl.load(value + line[:, None] * value_row + own * value_head + channel[None, :], mask=known, other=0.0)
    lower = _lower_of(column, words, drops)
    shift = key_count - count
    least, last = 0, count
    if causal:
        least = tl.maximum(0, start - shift) // tile_queries * tile_queries
    if window > 0:
        last = tl.minimum(count, start + tile_keys - 1 + window - shift)
    last = tl.where(start < seen, last, 0)
    of_keys = tl.zeros((tile_keys, tile_channels), tl.float32)
    of_values = tl.zeros((tile_keys, tile_channels), tl.float32)
    for head in range(own * group, own * group + group):
        slope = _slope_of(slopes, head, biased)
        for begin in range(least, last, tile_queries):
            row = begin + tl.arange(0, tile_queries)
            there = row < count
            place = first + row
            inside = there[:, None] & across[None, :]
            read = query + place[:, None] * query_row + head * query_head + channel[None, :]
            taken = tl.load(read, mask=inside, other=0.0)
            read = gradient + place[:, None] * gradient_row + head * gradient_head + channel[None, :]
            above = tl.load(read, mask=inside, other=0.0)
            made = tl.load(out + place[:, None] * out_row + head * out_head + channel[None, :], mask=inside, other=0.0)
            delta = tl.sum(above.to(tl.float32) * made.to(tl.float32), 1)
            target = row + first if packed else row.to(tl.int64)
            total_sum = _sums_of(sums, sequence.to(tl.int64) * sums_sequence + head * sums_head + target, there)
            scores = tl.dot(keyed, tl.trans(taken)) * scale
            scores, steepness = _change_scores(
                scores, (shift + row)[None, :], column[:, None], slope, scale, cap, capped, biased, rounded
            )
            visible = _visible((shift + row)[None, :], column[:, None], seen, causal, window) & there[None, :]
            shares = tl.where(visible, tl.exp(scores - total_sum[None, :]), 0.0)
            upper = _upper_of(tokens, words, place, there, heads, head, drops)
            kept = _kept(shares, lower[:, None], upper[None, :], drop_scale, drops, threshold)
            changes = _kept(
                tl.dot(values, tl.trans(above)), lower[:, None], upper[None, :], drop_scale, drops, threshold
            )
            of_values += tl.dot(kept.to(above.dtype), above)
            changes = shares * (changes - delta[None, :])
            if capped:
                changes *= steepness
            of_keys += tl.dot(changes.to(taken.dtype), taken)
    write = key_gradient + line[:, None] * of_key_row + own * of_key_head + channel[None, :]
    _store_or_add(write, of_keys * scale, known, adds)
    write = value_gradient + line[:, None] * of_value_row + own * of_value_head + channel[None, :]
    _store_or_add(write, of_values, known, adds)


# -- calls ------------------------------------------------------------------------------------------------------------


def _rows(tensor: Tensor) -> Tensor:
    """Sequences behind each other, as rows of heads; never a copy."""
    return tensor.view(-1, *tensor.shape[2:])


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    drop: DropMask | None,
    *,
    lengths: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
) -> None:
    """See `attention.attention_forward`."""
    layout = _Layout(query.shape[1], key.shape[1], query.shape[0], lengths=lengths)
    _forward([_rows(each) for each in (query, key, value, out)], logsumexp, logsumexp.stride(0), mask, drop, layout)


def packed_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    drop: DropMask | None,
    packed: tuple[Tensor, int],
    *,
    out: Tensor,
    logsumexp: Tensor,
) -> None:
    """See `packed_attention.packed_forward`."""
    starts, longest = packed
    _forward([query, key, value, out], logsumexp, 0, mask, drop, _Layout(longest, longest, len(starts) - 1, starts))


def _forward(
    rows: list[Tensor], sums: Tensor, sums_sequence: int, mask: AttentionMask, drop: DropMask | None, layout: _Layout
) -> None:
    query, cut = rows[0], cut_of(mask, "forward")
    assert sums.stride(-1) == 1
    _attention_forward_kernel[(triton.cdiv(layout.queries, cut.queries) * mask.heads * layout.sequences,)](
        *(*rows, sums),
        *_asked(query, mask, drop, layout),
        *(side for each in rows for side in each.stride()[:2]),
        *(sums_sequence, sums.stride(-2)),
        **_chosen(mask, drop, layout, cut),
    )


def _asked(query: Tensor, mask: AttentionMask, drop: DropMask | None, layout: _Layout) -> tuple[object, ...]:
    """What every kernel is told of sequences, heads and masks; of what it is not to use, anything."""
    unused = query
    slopes = _slopes_on(mask.slopes, query.device) if mask.slopes else unused
    tokens, words = (unused, unused) if drop is None else (drop.tokens, drop.keys)
    starts = unused if layout.starts is None else layout.starts
    lengths = unused if layout.lengths is None else layout.lengths
    sizes = (layout.queries, layout.keys, query.shape[-1], mask.heads, mask.group)
    drop_scale, cap = 1.0 if drop is None else drop.scale, 1.0 if mask.cap is None else mask.cap
    return (starts, lengths, tokens, words, slopes, *sizes, mask.scale, drop_scale, cap)


@lru_cache(maxsize=64)
def _slopes_on(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """ALiBi's slopes where a captured step finds them again."""
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _chosen(mask: AttentionMask, drop: DropMask | None, layout: _Layout, cut: PassCut) -> dict[str, object]:
    """What kernels are compiled for."""
    return {
        "causal": mask.causal,
        "window": mask.window or 0,
        "packed": layout.starts is not None,
        "padded": layout.lengths is not None,
        "drops": drop is not None,
        "threshold": 0 if drop is None else drop.threshold,
        "capped": mask.cap is not None,
        "biased": bool(mask.slopes),
        "rounded": mask.rounded,
        "tile_queries": cut.queries,
        "tile_keys": cut.keys,
        "tile_channels": max(_LEAST_CHANNELS, column_block(mask.head_dim, MOST_CHANNELS)),
        "num_warps": cut.warps,
        "num_stages": cut.stages,
        **ARITHMETIC,
    }


def cut_of(mask: AttentionMask, which: Pass) -> PassCut:
    """For heads of a width."""
    if mask.head_dim > _WIDE:
        return _WIDE_CUT
    return CUTS[which] if mask.head_dim <= _NARROW else _SQUARE


def backward(
    saved: Saved,
    mask: AttentionMask,
    drop: DropMask | None,
    gradients: tuple[Tensor, Tensor, Tensor],
    *,
    lengths: Tensor | None,
    accumulate: bool,
) -> None:
    """See `attention.attention_backward`; `gradients`: of query, key and value."""
    query, key = saved.query, saved.key
    layout = _Layout(query.shape[1], key.shape[1], query.shape[0], lengths=lengths)
    found = [_rows(each) for each in (*saved[:5], *gradients)]
    _backward(found, saved.logsumexp, saved.logsumexp.stride(0), mask, drop, layout, adds=accumulate)


def packed_backward(
    saved: Saved,
    mask: AttentionMask,
    drop: DropMask | None,
    packed: tuple[Tensor, int],
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """See `packed_attention.packed_backward`."""
    starts, longest = packed
    layout = _Layout(longest, longest, len(starts) - 1, starts)
    _backward([*saved[:5], *gradients], saved.logsumexp, 0, mask, drop, layout, adds=False)


def _backward(
    rows: list[Tensor],
    sums: Tensor,
    sums_sequence: int,
    mask: AttentionMask,
    drop: DropMask | None,
    layout: _Layout,
    *,
    adds: bool,
) -> None:
    read, (of_query, of_key, of_value) = rows[:5], rows[5:]
    assert sums.stride(-1) == 1
    asked = _asked(read[1], mask, drop, layout)
    sides = (*(side for each in read for side in each.stride()[:2]), sums_sequence, sums.stride(-2))
    cut = cut_of(mask, "of queries")
    _attention_query_gradients_kernel[(triton.cdiv(layout.queries, cut.queries) * mask.heads * layout.sequences,)](
        *(*read, sums, of_query, *asked, *sides, *of_query.stride()[:2]), **_chosen(mask, drop, layout, cut)
    )
    cut = cut_of(mask, "of keys")
    _attention_key_gradients_kernel[(triton.cdiv(layout.keys, cut.keys) * mask.kv_heads * layout.sequences,)](
        *(*read, sums, of_key, of_value, *asked, *sides, *of_key.stride()[:2], *of_value.stride()[:2]),
        adds=adds,
        **_chosen(mask, drop, layout, cut),
    )
