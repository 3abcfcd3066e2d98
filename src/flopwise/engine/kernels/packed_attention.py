"""Attention over sequences of uneven length that lie behind each other, without padding.

Query, output and their gradients are (rows, heads, channels), keys and values (rows, key and value heads, channels);
`logsumexp` is (heads, rows). Torch's flash kernel takes all sequences in one call,
and so do ours; elsewhere they are taken one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flopwise.engine.kernels.attention import (
    Kernel,
    a_library_takes,
    attention_backward,
    attention_forward,
    choose_kernel,
    flash_options,
    takes_ours,
    widened,
)
from flopwise.engine.kernels.dropout import DropMask
from flopwise.engine.kernels.plain_attention import AttentionMask, Saved
from flopwise.predict.simulate.own_kernels import SHORT_ROWS


class Packed(NamedTuple):
    """Where sequences begin and end."""

    starts: Tensor
    """int32: the first row of each sequence, and the end of the last; what begins where it ends is empty."""
    longest: int
    """No sequence has more rows, nor has any of those that fill up."""


def takes_all(device: torch.device, dtype: torch.dtype, mask: AttentionMask, *, drops: bool = False) -> bool:
    """Whether one call does it: of torch's flash kernel, or of ours."""
    return takes_ours(device, dtype, mask) or (not drops and a_library_takes(device, dtype, mask))


def _is_ours(query: Tensor, mask: AttentionMask, packed: Packed, drop: DropMask | None) -> bool:
    """Whether our kernels take it: where no other does, and short rows."""
    device, dtype = query.device, query.dtype
    alone = drop is not None or not a_library_takes(device, dtype, mask)
    return (alone or packed.longest <= SHORT_ROWS) and takes_ours(device, dtype, mask)


def _rows_of_each(packed: Packed) -> Iterator[slice]:
    ends = packed.starts.tolist()
    for first, last in pairwise(ends):
        if first < last:
            yield slice(first, last)


def packed_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    packed: Packed,
    *,
    out: Tensor,
    logsumexp: Tensor,
    drop: DropMask | None = None,
) -> None:
    """Each query's mean of the values of its own sequence that it sees, without the weights that are dropped."""
    if out.shape[-1] < query.shape[-1]:
        wide = out.new_empty(query.shape)
        packed_forward(query, key, widened(value, key), mask, packed, out=wide, logsumexp=logsumexp, drop=drop)
        out.copy_(wide[..., : out.shape[-1]])
        return
    if _is_ours(query, mask, packed, drop):
        from flopwise.engine.kernels import fused_attention

        fused_attention.packed_forward(query, key, value, mask, drop, packed, out=out, logsumexp=logsumexp)
        return
    if drop is None and a_library_takes(query.device, query.dtype, mask):
        found = torch.ops.aten._flash_attention_forward(
            *(query, key, value, packed.starts, packed.starts),
            *(packed.longest, packed.longest, 0.0, mask.causal, False),
            **flash_options(mask),
        )
        out.copy_(found[0])
        logsumexp.copy_(found[1])
        return
    for rows in _rows_of_each(packed):
        tokens = rows.stop - rows.start
        attention_forward(
            *(query[None, rows], key[None, rows], value[None, rows], mask),
            out=out[None, rows],
            logsumexp=logsumexp[None, :, rows],
            kernel=_kernel(query, mask, tokens, drop),
            drop=None if drop is None else replace(drop, tokens=drop.tokens[rows]),
        )


def _kernel(query: Tensor, mask: AttentionMask, tokens: int, drop: DropMask | None) -> Kernel:
    """Of one sequence alone."""
    drops = drop is not None
    return choose_kernel(query.device, query.dtype, mask, tokens, tokens, padded=False, deterministic=True, drops=drops)


def packed_backward(
    saved: Saved,
    mask: AttentionMask,
    packed: Packed,
    *,
    query_gradient: Tensor,
    key_gradient: Tensor,
    value_gradient: Tensor,
    drop: DropMask | None = None,
) -> None:
    """The gradients of query, key and value, which are overwritten, from what the forward wrote."""
    if saved.value.shape[-1] < saved.key.shape[-1]:
        wide = torch.empty_like(saved.key)
        of_values = {name: widened(getattr(saved, name), saved.key) for name in ("gradient", "value", "out")}
        packed_backward(
            *(saved._replace(**of_values), mask, packed),
            query_gradient=query_gradient,
            key_gradient=key_gradient,
            value_gradient=wide,
            drop=drop,
        )
        value_gradient.copy_(wide[..., : value_gradient.shape[-1]])
        return
    if _is_ours(saved.query, mask, packed, drop):
        from flopwise.engine.kernels import fused_attention

        gradients = (query_gradient, key_gradient, value_gradient)
        fused_attention.packed_backward(saved, mask, drop, packed, gradients)
        return
    if drop is None and a_library_takes(saved.query.device, saved.query.dtype, mask):
        unused = torch.zeros(2, dtype=torch.int64, device=saved.query.device)
        found = torch.ops.aten._flash_attention_backward(
            *saved._replace(logsumexp=saved.logsumexp.contiguous()),
            *(packed.starts, packed.starts, packed.longest, packed.longest, 0.0, mask.causal, unused, unused),
            **flash_options(mask),
        )
        for target, result in zip((query_gradient, key_gradient, value_gradient), found, strict=True):
            target.copy_(result)
        return
    for rows in _rows_of_each(packed):
        tokens = rows.stop - rows.start
        attention_backward(
            saved.gradient[None, rows],
            saved.query[None, rows],
            saved.key[None, rows],
            saved.value[None, rows],
            saved.out[None, rows],
            saved.logsumexp[None, :, rows],
            mask,
            query_gradient=query_gradient[None, rows],
            key_gradient=key_gradient[None, rows],
            value_gradient=value_gradient[None, rows],
            accumulate=False,
            kernel=_kernel(saved.query, mask, tokens, drop),
            drop=None if drop is None else replace(drop, tokens=drop.tokens[rows]),
        )
