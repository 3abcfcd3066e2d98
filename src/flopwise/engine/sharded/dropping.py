"""Dropout of the plain modules by the streaming executor's masks: no mask is kept, on several devices either.

A token's number in the batch decides what is dropped of it, so that any number of ranks trains the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.attention import attention_backward, attention_forward, choose_kernel
from flopwise.engine.kernels.dropout import DropMask
from flopwise.engine.kernels.plain_attention import AttentionMask, mask_for
from flopwise.engine.streaming.dropping import Drops
from flopwise.work.transformer import Transformer


class BatchDrops:
    """What is dropped of sequences beside each other, the first of which is number `first_sequence` of the batch."""

    def __init__(
        self,
        model: Transformer,
        drops: Drops,
        *,
        first_sequence: int,
        sequences: int,
        tokens: int,
        sequence_tokens: int,
    ) -> None:
        device = drops.keys.device
        begins = torch.arange(first_sequence, first_sequence + sequences, device=device) * sequence_tokens
        self._tokens = (begins[:, None] + torch.arange(tokens, device=device)).to(torch.int32)
        self._drops = drops
        self._masks = [mask_for(model.kind_of(layer)) for layer in range(model.layers)]

    def rows(self, values: Tensor, layer: int, name: str) -> Tensor:
        """See `modules.Dropper`."""
        tokens = self._tokens[:, : values.shape[1]].reshape(-1)
        mask = self._drops.of_layer(layer, tokens).of(name)
        if mask is None:
            return values
        result: Tensor = _KeepSome.apply(values, mask)  # type: ignore[no-untyped-call]
        return result

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, layer: int) -> Tensor | None:
        """See `modules.Dropper`."""
        drop = self._drops.of_layer(layer, self._tokens.view(-1)).of("attention")
        if drop is None:
            return None
        # What is behind a causal sequence none of its tokens sees.
        mask = self._masks[layer]
        seen = None if mask.causal else lengths
        result: Tensor = _AttendSome.apply((mask, drop, seen), query, key, value)  # type: ignore[no-untyped-call]
        return result


class _KeepSome(torch.autograd.Function):
    """Values without what a mask drops."""

    @staticmethod
    def forward(context: Any, values: Tensor, mask: DropMask) -> Tensor:  # noqa: ANN401 - torch's own has no type
        context.mask = mask
        return _kept(values, mask)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _kept(gradient, context.mask), None


def _kept(values: Tensor, mask: DropMask) -> Tensor:
    rows = values.contiguous().view(-1, values.shape[-1])
    out = torch.empty_like(rows)
    dispatch.dropout(rows, mask, out=out)
    return out.view(values.shape)


class _AttendSome(torch.autograd.Function):
    """Attention without the weights that a mask drops, over (sequences, heads, tokens, channels)."""

    @staticmethod
    def forward(
        context: Any,  # noqa: ANN401
        how: tuple[AttentionMask, DropMask, Tensor | None],
        *heads: Tensor,
    ) -> Tensor:
        mask, drop, lengths = how
        query, key, value = (each.transpose(1, 2).contiguous() for each in heads)
        sequences, tokens = query.shape[:2]
        out = torch.empty_like(query)
        statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
        sums = torch.empty((sequences, mask.heads, tokens), dtype=statistics, device=query.device)
        kernel = choose_kernel(
            query.device, query.dtype, mask, tokens, tokens, padded=lengths is not None, deterministic=True, drops=True
        )
        attention_forward(query, key, value, mask, out=out, logsumexp=sums, lengths=lengths, kernel=kernel, drop=drop)
        context.save_for_backward(query, key, value, out, sums)
        context.how = *how, kernel
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, key, value, out, sums = context.saved_tensors
        mask, drop, lengths, kernel = context.how
        found = [torch.empty_like(each) for each in (query, key, value)]
        attention_backward(
            gradient.transpose(1, 2).contiguous(),
            query,
            key,
            value,
            out,
            sums,
            mask,
            query_gradient=found[0],
            key_gradient=found[1],
            value_gradient=found[2],
            accumulate=False,
            lengths=lengths,
            kernel=kernel,
            drop=drop,
        )
        return (None, *(each.transpose(1, 2) for each in found))
