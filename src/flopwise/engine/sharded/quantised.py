"""Frozen matrices in few bits among the shards.

A row's scales and codes lie behind each other as bytes, so that FSDP deals out and gathers whole rows as they are, and
casts none. A product dequantises its matrix, forward and backward, and keeps the bytes alone.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from flopwise.engine.kernels.quantised import Quantised
from flopwise.work.formats import QUANTISED_BLOCK, SCALE_BYTES, quantised_bytes


def quantise_rows(values: Tensor, kind: str) -> Tensor:
    """Numbers (…, depth) as bytes (…, those of a row)."""
    depth = values.shape[-1]
    rows, wide = values.numel() // max(1, depth), _scale_bytes(depth, kind)
    room = torch.empty(rows * quantised_bytes(1, depth, kind), dtype=torch.uint8, device=values.device)
    matrix = Quantised.within(room, (rows, depth), kind)
    matrix.quantise(values)
    found = torch.cat((matrix.scales.view(torch.uint8).view(rows, wide), matrix.codes), 1)
    return found.view(*values.shape[:-1], found.shape[1])


def dequantise_rows(rows: Tensor, depth: int, kind: str, dtype: torch.dtype) -> Tensor:
    """The numbers of such bytes."""
    flat, wide = rows.reshape(-1, rows.shape[-1]), _scale_bytes(depth, kind)
    # A copy always: a single row would be taken for whole numbers wherever it begins, and none has a stride to go by.
    scales = torch.empty_like(flat[:, :wide], memory_format=torch.contiguous_format).copy_(flat[:, :wide])
    matrix = Quantised(flat[:, wide:].contiguous(), scales.view(torch.float32), depth, kind)
    return matrix.dequantise(out=torch.empty((flat.shape[0], depth), dtype=dtype, device=rows.device)).view(
        *rows.shape[:-1], depth
    )


def _scale_bytes(depth: int, kind: str) -> int:
    return SCALE_BYTES * -(-depth // (QUANTISED_BLOCK[kind] or depth))


class _Kept(torch.autograd.function.FunctionCtx):
    """What backward finds of a product."""

    saved_tensors: tuple[Tensor, ...]
    depth: int
    kind: str


class _Product(torch.autograd.Function):
    """x · Wᵀ; nothing of W is trained."""

    @staticmethod
    def forward(ctx: _Kept, value: Tensor, rows: Tensor, depth: int, kind: str) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.depth, ctx.kind = depth, kind
        return functional.linear(value, dequantise_rows(rows, depth, kind, value.dtype))

    @staticmethod
    def backward(ctx: _Kept, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,), (gradient,) = ctx.saved_tensors, gradients
        return gradient @ dequantise_rows(rows, ctx.depth, ctx.kind, gradient.dtype), None, None, None


class QuantisedLinear(nn.Module):
    """A frozen linear layer, or one for each expert, in the place of a plain one."""

    def __init__(self, plain: nn.Module, kind: str) -> None:
        super().__init__()
        weight = plain.get_parameter("weight")
        *lead, self.depth = weight.shape
        self.kind = kind
        size = quantised_bytes(1, self.depth, kind)
        room = torch.empty((*lead, size), dtype=torch.uint8, device=weight.device)
        self.weight = nn.Parameter(room, requires_grad=False)
        self.bias = cast("nn.Parameter | None", getattr(plain, "bias", None))

    def forward(self, value: Tensor, expert: int | None = None) -> Tensor:
        rows: Tensor = self.weight
        bias: Tensor | None = self.bias
        if expert is not None and rows.ndim == 3:
            rows, bias = rows[expert], None if bias is None else bias[expert]
        made: Tensor = _Product.apply(value, rows, self.depth, self.kind)  # type: ignore[no-untyped-call]
        return made if bias is None else made + bias

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Its numbers."""
        return dequantise_rows(self.weight, self.depth, self.kind, dtype)
