"""Dropout as kernels of Triton: masks by the hash that `dropout` documents, in the registers of whoever writes."""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from flopwise.engine.kernels.dropout import DropMask
from flopwise.engine.kernels.fused_update import mix
from flopwise.engine.kernels.jit import ARITHMETIC, column_block, kernel


@kernel()
def lower_hash(columns: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """Of the lower halves of places."""
    return mix(columns.to(tl.uint32) ^ tl.load(keys).to(tl.uint32, bitcast=True))


@kernel()
def upper_hash(rows: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """Of the upper halves, unsigned."""
    return (rows * 0x9E3779B1) ^ tl.load(keys + 1).to(tl.uint32, bitcast=True)


@kernel()
def keep_some(
    values: tl.tensor, lower: tl.tensor, upper: tl.tensor, scale: tl.tensor, threshold: tl.constexpr
) -> tl.tensor:
    """What is kept of values by the hashes of their places, scaled."""
    return tl.where(mix(lower ^ upper) >= threshold, values * scale, 0.0)


@kernel()
def token_of(tokens: tl.tensor, row: tl.tensor) -> tl.tensor:
    """A row's number, unsigned."""
    return tl.load(tokens + row).to(tl.uint32, bitcast=True)


@kernel()
def _dropout_kernel(
    source: tl.tensor,
    other: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    keys: tl.tensor,
    scale: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    other_stride: tl.tensor,
    out_stride: tl.tensor,
    threshold: tl.constexpr,
    added: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    values = tl.load(source + row * source_stride + columns, mask=inside, other=0.0).to(tl.float32)
    values = keep_some(values, lower_hash(columns, keys), upper_hash(token_of(tokens, row), keys), scale, threshold)
    if added:
        values += tl.load(other + row * other_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), mask=inside)


def dropout(source: Tensor, mask: DropMask, *, out: Tensor, other: Tensor | None = None) -> None:
    """See `dispatch.dropout`."""
    rows, width = source.shape
    added = source if other is None else other
    block = column_block(width, 1024)
    _dropout_kernel[(rows, triton.cdiv(width, block))](
        *(source, added, out, mask.tokens, mask.keys, mask.scale, width),
        *(source.stride(0), added.stride(0), out.stride(0)),
        threshold=mask.threshold,
        added=other is not None,
        block=block,
        num_warps=4,
        **ARITHMETIC,
    )
