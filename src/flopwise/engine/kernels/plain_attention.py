"""Attention in plain torch, tile by tile: any device and floating type, windows, padded sequences, chunks of queries.

Scores live one tile at a time, so that temporaries stay within `TILE_BYTES` whatever the length; tiles that the mask
hides are not computed. The backward recomputes the scores from their logsumexp. Sums run in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flopwise.engine.kernels.blocks import add_rounded, compute_type
from flopwise.engine.kernels.dropout import DropMask, attention_scales
from flopwise.work.transformer import Transformer

TILE_BYTES = 8 << 20
"""What the temporaries of a tile may take together."""

_MOST_KEYS = 1024
"""Keys of a tile: up to here a backward needs each tile once, beyond it twice."""


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Heads, what a query sees, and what becomes of its scores."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None
    """The last so many keys are seen, the query's own included; None: all before it. Where tokens look ahead, as many
    ahead."""
    scaled_by: float | None = None
    """What scores are multiplied by; None: one over the root of the channels."""
    cap: float | None = None
    """Scores s, scaled, become cap · tanh(s / cap)."""
    slopes: tuple[float, ...] = ()
    """ALiBi: what each head's scores lose with each token of distance; empty: nothing."""
    rounded: bool = False
    """Whether a key's bias is rounded to bf16, and then scaled as the scores are."""

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, "query heads share key and value heads evenly"
        assert len(self.slopes) in (0, self.heads), "a slope is a head's"

    @property
    def group(self) -> int:
        """Query heads that read one key and value head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.scaled_by is None else self.scaled_by

    @property
    def looks_around(self) -> bool:
        """Whether a window reaches both ways."""
        return self.window is not None and not self.causal

    @property
    def changes_scores(self) -> bool:
        """Whether scores are more than scaled products, which no library's kernel takes."""
        return self.cap is not None or bool(self.slopes)


def mask_for(model: Transformer) -> AttentionMask:
    """That of a model whose blocks are of one kind."""
    return AttentionMask(
        model.heads,
        model.kv_heads,
        model.head_dim,
        model.causal,
        model.window,
        scaled_by=model.attention_scale,
        cap=model.attention_cap,
        slopes=model.alibi_slopes,
        rounded=model.alibi_rounded,
    )


def alibi_biases(mask: AttentionMask, places: Tensor, origin: int, dtype: torch.dtype) -> Tensor:
    """What ALiBi adds to each head's scores of keys at some places, less what it adds at `origin`, (heads, places)."""
    slopes = torch.tensor(mask.slopes, dtype=torch.float64, device=places.device)
    if not mask.rounded:
        return (slopes[:, None] * (places - origin)).to(dtype)
    near, here = (slopes[:, None].bfloat16() * each for each in (places, places.new_tensor([origin])))
    return (near.to(dtype) - here.to(dtype)) * mask.scale


class Saved(NamedTuple):
    """What a backward starts from: the gradient of the output, and what the forward had and wrote."""

    gradient: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    logsumexp: Tensor


class _Biases(NamedTuple):
    """ALiBi of a tile, (key and value heads, group, keys or queries)."""

    keys: Tensor
    queries: Tensor
    """What is taken from all scores of a query."""


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How one sequence is cut: key and value heads, queries and keys of a tile, and which tiles see each other."""

    mask: AttentionMask
    queries: int
    keys: int
    seen: int
    """Keys before the sequence's end; those beyond it are padding."""
    wide: torch.dtype
    drop: DropMask | None = None
    """What of the softmax's weights is dropped, with the tokens of this sequence's queries."""
    ahead: int = 0
    """Keys behind the one at which the last query stands."""

    @property
    def places(self) -> int:
        """The first query's, among the keys."""
        return self.keys - self.queries - self.ahead

    @property
    def keys_step(self) -> int:
        return min(max(1, self.keys), _MOST_KEYS)

    @property
    def queries_step(self) -> int:
        # Of a head's tile: scores, weights and their gradients, and the query, output and gradient rows they are from.
        tiles = 3 if self.mask.cap is None else 5
        row_bytes = self.mask.group * (tiles * self.keys_step + 5 * self.mask.head_dim) * self.wide.itemsize
        # The hash takes a few integers of 8 bytes for each score.
        row_bytes += 0 if self.drop is None else 32 * self.mask.group * self.keys_step
        return max(1, min(self.queries, (TILE_BYTES // 2) // row_bytes))

    def heads(self) -> Iterator[slice]:
        """Key and value heads of a tile: as many as fit beside each other."""
        tiles = 3 if self.mask.cap is None else 5
        of_queries = self.queries_step * self.mask.group * (tiles * self.keys_step + 5 * self.mask.head_dim)
        of_keys = 5 * self.keys_step * self.mask.head_dim
        step = max(1, TILE_BYTES // ((of_queries + of_keys) * self.wide.itemsize))
        for first in range(0, self.mask.kv_heads, step):
            yield slice(first, min(self.mask.kv_heads, first + step))

    def key_tiles(self) -> list[slice]:
        step = self.keys_step
        return [slice(first, min(self.keys, first + step)) for first in range(0, self.keys, step)]

    def query_tiles(self) -> list[slice]:
        step = self.queries_step
        return [slice(first, min(self.queries, first + step)) for first in range(0, self.queries, step)]

    def visible(self, rows: slice, tile: slice) -> slice:
        """Keys of a tile that some of the queries see; an empty slice at its start where there are none."""
        last, first = self.seen, 0
        if self.mask.causal:
            last = min(last, self.places + rows.stop)
        if self.mask.window is not None:
            first = self.places + rows.start - self.mask.window + 1
            last = min(last, self.places + rows.stop + self.mask.window - 1)
        first, last = max(first, tile.start), min(last, tile.stop)
        return slice(first, last) if first < last else slice(tile.start, tile.start)

    def hidden(self, rows: slice, columns: slice, device: torch.device) -> Tensor | None:
        """Which query does not see which key; None where each sees all."""
        places = self.places
        if self.mask.window is not None and not self.mask.causal:
            query = torch.arange(places + rows.start, places + rows.stop, device=device)[:, None]
            key = torch.arange(columns.start, columns.stop, device=device)
            return (key - query).abs() >= self.mask.window
        if not self.mask.causal:
            return None
        oldest = columns.start if self.mask.window is None else places + rows.stop - self.mask.window
        if columns.stop - 1 <= places + rows.start and oldest <= columns.start:
            return None
        query = torch.arange(places + rows.start, places + rows.stop, device=device)[:, None]
        key = torch.arange(columns.start, columns.stop, device=device)
        later = key > query
        return later if self.mask.window is None else later | (key <= query - self.mask.window)

    def biases(self, heads: slice, rows: slice, columns: slice, device: torch.device) -> _Biases | None:
        """What ALiBi does to a tile's scores; None: nothing.

        A bias counts from the query's own place, so that it does not depend on how a sequence is cut; both parts count
        from the tile's first query, so that their difference is of small numbers.
        """
        if not self.mask.slopes:
            return None
        first = self.places + rows.start
        places = (torch.arange(columns.start, columns.stop), torch.arange(first, first + rows.stop - rows.start))
        of_keys, of_queries = (
            torch.unflatten(
                alibi_biases(self.mask, each.to(device), first, self.wide), 0, (self.mask.kv_heads, self.mask.group)
            )[heads]
            for each in places
        )
        return _Biases(of_keys, of_queries)

    def scales(self, heads: slice, rows: slice, columns: slice) -> Tensor:
        """What a tile's weights are multiplied by, (key and value heads, group · rows, keys)."""
        assert self.drop is not None
        numbers = torch.arange(self.mask.heads, device=self.drop.tokens.device)
        of_tile = numbers.view(self.mask.kv_heads, self.mask.group)[heads]
        found = attention_scales(
            self.drop, rows, of_tile.reshape(-1), columns, all_heads=self.mask.heads, dtype=self.wide
        )
        return found.view(of_tile.shape[0], -1, columns.stop - columns.start)


def _tilings(  # noqa: PLR0917
    query: Tensor, key: Tensor, mask: AttentionMask, lengths: Tensor | None, drop: DropMask | None, ahead: int
) -> Iterator[tuple[int, _Tiling]]:
    sequences, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    seen = [keys] * sequences if lengths is None else [min(keys, length) for length in lengths.tolist()]
    for sequence in range(sequences):
        of_sequence = drop
        if drop is not None:
            of_sequence = replace(drop, tokens=drop.tokens[sequence * queries : (sequence + 1) * queries])
        yield sequence, _Tiling(mask, queries, keys, seen[sequence], compute_type(query.dtype), of_sequence, ahead)


def _rows_of(tensor: Tensor, heads: slice, mask: AttentionMask, wide: torch.dtype) -> Tensor:
    """(rows, query heads, channels) → (key and value heads, group · rows, channels), of the heads of a tile."""
    taken = torch.unflatten(tensor, 1, (mask.kv_heads, mask.group))[:, heads]
    return taken.to(wide).permute(1, 2, 0, 3).flatten(1, 2)


def _put_rows(target: Tensor, heads: slice, mask: AttentionMask, values: Tensor) -> None:
    """The way back of `_rows_of`."""
    torch.unflatten(target, 1, (mask.kv_heads, mask.group))[:, heads] = torch.unflatten(
        values, 1, (mask.group, -1)
    ).permute(2, 0, 1, 3)


def _scores(
    query: Tensor, key: Tensor, hidden: Tensor | None, mask: AttentionMask, biases: _Biases | None
) -> tuple[Tensor, Tensor | None]:
    """Products of scaled queries (heads, group · rows, channels) and keys (heads, keys, channels), −∞ where hidden.

    Where they are capped, with the slope of the cap.
    """
    scores, slope = torch.bmm(query, key.transpose(1, 2)), None
    if mask.cap is not None:
        share = scores.div_(mask.cap).tanh_()
        slope = 1.0 - share * share
        scores.mul_(mask.cap)
    if biases is not None:
        by_head = torch.unflatten(scores, 1, (mask.group, -1))
        by_head.add_(biases.keys[:, :, None]).sub_(biases.queries[..., None])
    if hidden is not None:
        torch.unflatten(scores, 1, (mask.group, -1)).masked_fill_(hidden, -torch.inf)
    return scores, slope


def plain_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    *,
    out: Tensor,
    logsumexp: Tensor,
    lengths: Tensor | None,
    drop: DropMask | None = None,
    ahead: int = 0,
) -> None:
    """Attention's output, and the logsumexp of each query's scores (−∞ for one that sees nothing)."""
    for sequence, tiling in _tilings(query, key, mask, lengths, drop, ahead):
        for heads in tiling.heads():
            for rows in tiling.query_tiles():
                tensors = (query[sequence, rows], key[sequence], value[sequence])
                values, sums = _forward_tile(tensors, tiling, heads, rows)
                _put_rows(out[sequence, rows], heads, mask, values)
                by_head = torch.unflatten(logsumexp[sequence], 0, (mask.kv_heads, mask.group))
                by_head[heads, :, rows] = torch.unflatten(sums, 1, (mask.group, -1)).squeeze(-1)


def _forward_tile(
    tensors: tuple[Tensor, Tensor, Tensor], tiling: _Tiling, heads: slice, rows: slice
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of some queries: the softmax is rescaled whenever a tile of keys brings a larger score."""
    query, key, value = tensors
    mask, wide = tiling.mask, tiling.wide
    queries = _rows_of(query, heads, mask, wide) * mask.scale
    total = queries.new_zeros(*queries.shape[:2], value.shape[-1])
    largest = queries.new_full((*queries.shape[:2], 1), -torch.inf)
    weights = torch.zeros_like(largest)
    for tile in tiling.key_tiles():
        columns = tiling.visible(rows, tile)
        if columns.start == columns.stop:
            continue
        keys, values = (each[columns, heads].to(wide).transpose(0, 1) for each in (key, value))
        biases = tiling.biases(heads, rows, columns, query.device)
        scores = _scores(queries, keys, tiling.hidden(rows, columns, query.device), mask, biases)[0]
        larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
        # A query that has seen nothing yet has no largest score: any finite one keeps its weights at zero.
        base = torch.where(larger == -torch.inf, 0.0, larger)
        scores.sub_(base).exp_()
        shrunk = torch.exp(largest - base)
        weights = weights * shrunk + scores.sum(-1, keepdim=True)
        if tiling.drop is not None:
            scores *= tiling.scales(heads, rows, columns)
        total = torch.baddbmm(total.mul_(shrunk), scores, values)
        largest = larger
    nothing = weights == 0.0
    total /= weights.masked_fill(nothing, 1.0)
    return total, largest + torch.log(weights)


def plain_backward(
    saved: Saved,
    mask: AttentionMask,
    *,
    query_gradient: Tensor,
    key_gradient: Tensor,
    value_gradient: Tensor,
    accumulate: bool,
    lengths: Tensor | None,
    drop: DropMask | None = None,
    ahead: int = 0,
) -> None:
    """Gradients of query, key and value. Each is summed in the type of the arithmetic and rounded once."""
    for sequence, tiling in _tilings(saved.query, saved.key, mask, lengths, drop, ahead):
        backward = _Backward(tiling, Saved(*(each[sequence] for each in saved)))
        for heads in tiling.heads():
            backward.of_keys(
                heads, query_gradient[sequence], key_gradient[sequence], value_gradient[sequence], accumulate=accumulate
            )
            backward.of_queries(heads, query_gradient[sequence])


class _Rows(NamedTuple):
    """Some queries as a tile takes them."""

    queries: Tensor
    """Scaled."""
    above: Tensor
    """The gradient of their outputs."""
    delta: Tensor
    """The product of that with the outputs."""
    sums: Tensor
    """The logsumexp of their scores."""


@dataclass(frozen=True, slots=True)
class _Backward:
    """One sequence's backward."""

    tiling: _Tiling
    saved: Saved

    def of_keys(
        self, heads: slice, query_gradient: Tensor, key_gradient: Tensor, value_gradient: Tensor, *, accumulate: bool
    ) -> None:
        """The gradients of keys and values; with one tile of keys, that of the queries too."""
        tiles = self.tiling.key_tiles()
        for tile in tiles:
            keys, values = self._keys(tile, heads)
            key_sum, value_sum = torch.zeros_like(keys), torch.zeros_like(values)
            for rows in self.tiling.query_tiles():
                columns = self.tiling.visible(rows, tile)
                if columns.start == columns.stop and len(tiles) > 1:
                    continue
                within = slice(columns.start - tile.start, columns.stop - tile.start)
                taken = self._queries(rows, heads)
                weights, changes = self._tile(taken, keys[:, within], values[:, within], (heads, rows, columns))
                value_sum[:, within].baddbmm_(weights.transpose(1, 2), taken.above)
                key_sum[:, within].baddbmm_(changes.transpose(1, 2), taken.queries)
                if len(tiles) == 1:
                    below = torch.bmm(changes, keys[:, within]).mul_(self.tiling.mask.scale)
                    _put_rows(query_gradient[rows], heads, self.tiling.mask, below)
            for given, found in ((key_gradient, key_sum), (value_gradient, value_sum)):
                if accumulate:
                    add_rounded(given[tile, heads], found.transpose(0, 1))
                else:
                    given[tile, heads] = found.transpose(0, 1)

    def of_queries(self, heads: slice, query_gradient: Tensor) -> None:
        """The gradient of the queries where there are several tiles of keys: summed over them, tile by tile."""
        tiles = self.tiling.key_tiles()
        if len(tiles) == 1:
            return
        for rows in self.tiling.query_tiles():
            taken = self._queries(rows, heads)
            below = torch.zeros_like(taken.queries)
            for tile in tiles:
                columns = self.tiling.visible(rows, tile)
                if columns.start < columns.stop:
                    keys, values = self._keys(columns, heads)
                    changes = self._tile(taken, keys, values, (heads, rows, columns))[1]
                    below.baddbmm_(changes, keys)
            _put_rows(query_gradient[rows], heads, self.tiling.mask, below.mul_(self.tiling.mask.scale))

    def _keys(self, columns: slice, heads: slice) -> tuple[Tensor, Tensor]:
        wide = self.tiling.wide
        return (
            self.saved.key[columns, heads].to(wide).transpose(0, 1),
            self.saved.value[columns, heads].to(wide).transpose(0, 1),
        )

    def _queries(self, rows: slice, heads: slice) -> _Rows:
        mask, wide, saved = self.tiling.mask, self.tiling.wide, self.saved
        queries = _rows_of(saved.query[rows], heads, mask, wide) * mask.scale
        above = _rows_of(saved.gradient[rows], heads, mask, wide)
        delta = (above * _rows_of(saved.out[rows], heads, mask, wide)).sum(-1, keepdim=True)
        by_head = torch.unflatten(saved.logsumexp, 0, (mask.kv_heads, mask.group))[heads, :, rows]
        sums = by_head.to(wide).flatten(1, 2)[:, :, None]
        # A query that sees nothing has a logsumexp of −∞, and scores of −∞ alone.
        return _Rows(queries, above, delta, sums.masked_fill(sums == -torch.inf, 0.0))

    def _tile(
        self, taken: _Rows, keys: Tensor, values: Tensor, place: tuple[slice, slice, slice]
    ) -> tuple[Tensor, Tensor]:
        """A tile's weights as they multiplied the values, and the gradient of its scores."""
        hidden = self.tiling.hidden(*place[1:], keys.device)
        biases = self.tiling.biases(*place, keys.device)
        scores, slope = _scores(taken.queries, keys, hidden, self.tiling.mask, biases)
        weights = scores.sub_(taken.sums).exp_()
        changes = torch.bmm(taken.above, values.transpose(1, 2))
        scales = None if self.tiling.drop is None else self.tiling.scales(*place)
        if scales is not None:
            changes.mul_(scales)
        changes.sub_(taken.delta).mul_(weights)
        if slope is not None:
            changes.mul_(slope)
        return (weights if scales is None else weights * scales), changes
