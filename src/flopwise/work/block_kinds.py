"""The kinds of blocks of a transformer, each as a description of which all blocks are alike."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING

from flopwise.work.adapters import BLOCKS, HEAD
from flopwise.work.recurrence import FEEDING, RECURRENT
from flopwise.work.routing import USUAL_ROUTING, Routing

if TYPE_CHECKING:
    from flopwise.work.transformer import Transformer

DENSE, MIXTURE = "dense", "mixture"
"""Kinds of blocks, where some of a mixture's have no experts."""


@lru_cache(maxsize=256)
def kinds_of(model: Transformer) -> tuple[Transformer, ...]:
    """Each kind once, in the order of the blocks."""
    return tuple(dict.fromkeys(model.kind_of(layer) for layer in range(model.layers)))


@lru_cache(maxsize=256)
def built_alike(model: Transformer, kind: str) -> Transformer:
    """The same network with blocks of one kind."""
    blocks = tuple(range(model.layers))
    recurrent = kind == RECURRENT
    return replace(
        model,
        recurrence=model.recurrence if recurrent else None,
        recurrent_blocks=blocks if recurrent else (),
        feed_blocks=blocks if kind == FEEDING else (),
        routing=_of_a_kind(model.routing),
    )


def _of_a_kind(routing: Routing) -> Routing:
    """With one row of shares, the mean of those measured: a kind's description has other blocks than they are of."""
    rows = [[share / sum(row) for share in row] for row in routing.shares]
    if len(rows) < 2:
        return routing
    return replace(routing, shares=(tuple(fmean(shares) for shares in zip(*rows, strict=True)),))


def fed_alike(model: Transformer, dense: bool) -> Transformer:
    """The same network with one kind of feed-forward part."""
    if not model.dense_blocks:
        return model
    found = replace(model, dense_blocks=(), dense_ffn=0, routing=_of_a_kind(model.routing))
    if not dense:
        return found
    return replace(
        found,
        ffn=model.dense_ffn,
        experts=0,
        experts_per_token=0,
        shared_ffn=0,
        shared_gate=False,
        routing=USUAL_ROUTING,
    )


@lru_cache(maxsize=256)
def adapted_alike(model: Transformer, adapted: bool) -> Transformer:
    """The same network with adapters in all blocks, or with none beside blocks and a head that are frozen."""
    if model.adapters is None or model.frozen is None:
        return model
    if adapted:
        return replace(model, frozen=None)
    # A head of its own, so that it can be frozen while the gradient passes through the blocks.
    return replace(model, adapters=None, frozen=(BLOCKS, HEAD), tied=False)


@lru_cache(maxsize=256)
def of_kind(model: Transformer, other: bool, dense: bool, normed: bool) -> Transformer:
    """The same network with one kind of attention, of feed-forward part and of norm before attention."""
    attention, found = model.other_attention, fed_alike(model, dense)
    if model.unnormed_attention == "first":
        found = replace(found, unnormed_attention="none" if normed else "all")
    if attention is not None:
        found = replace(found, other_attention=None, other_blocks=())
    if attention is None or not other:
        return found
    return replace(
        found,
        window=attention.window,
        rotary_base=attention.rotary_base,
        rotary_scaling=attention.rotary_scaling,
        positions=model.positions if attention.rotary else "none",
        attention_chunk=attention.attention_chunk,
        temperature=attention.temperature,
        qk_norm=model.qk_norm and attention.qk_norm,
    )
