"""Attention sinks as kernels of Triton: what `sinks` does in blocks of rows, in a launch each way."""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from flopwise.engine.kernels.fused import add_rows
from flopwise.engine.kernels.jit import ARITHMETIC, column_block, kernel

_NUMBERS = 4096
"""Of a head that a program takes at once."""
_SUMMED = 16
"""Blocks of rows whose parts of a sink's gradient a program adds."""


@kernel()
def _add_sinks_kernel(
    sinks: tl.tensor,
    out: tl.tensor,
    logsumexp: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    sums_head: tl.tensor,
    lines: tl.constexpr,
    block: tl.constexpr,
) -> None:
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * lines + tl.arange(0, lines)
    channel = tl.arange(0, block)
    there = row < rows
    score = tl.load(sinks + head).to(tl.float32)
    place = logsumexp + head * sums_head + row
    total = tl.load(place, mask=there, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(score - total))
    target = out + row[:, None] * out_row + head * out_head + channel[None, :]
    inside = there[:, None] & (channel < channels)[None, :]
    found = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (found * share[:, None]).to(out.dtype.element_ty), mask=inside)
    larger, less = tl.maximum(total, score), tl.minimum(total, score)
    tl.store(place, larger + tl.log(1.0 + tl.exp(less - larger)), mask=there)


@kernel()
def _sinks_backward_kernel(
    gradient: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    logsumexp: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    gradient_row: tl.tensor,
    gradient_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    sums_head: tl.tensor,
    lines: tl.constexpr,
    block: tl.constexpr,
    summed: tl.constexpr,
) -> None:
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, block)
    score = tl.load(sinks + head).to(tl.float32)
    found = tl.zeros((lines,), dtype=tl.float32)
    for part in range(summed):
        row = (tl.program_id(0).to(tl.int64) * summed + part) * lines + tl.arange(0, lines)
        there = row < rows
        inside = there[:, None] & (channel < channels)[None, :]
        place = row[:, None] * gradient_row + head * gradient_head + channel[None, :]
        above = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        place = row[:, None] * out_row + head * out_head + channel[None, :]
        made = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(logsumexp + head * sums_head + row, mask=there, other=float("inf")).to(tl.float32)
        found -= tl.exp(score - total) * tl.sum(above * made, 1)
    tl.store(partial + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head, tl.sum(found, 0))


def _cut(channels: int) -> tuple[int, int]:
    """Rows of a program, and its columns."""
    block = column_block(channels, 1 << 16)
    return max(1, _NUMBERS // block), block


def add_sinks(sinks: Tensor, *, out: Tensor, logsumexp: Tensor) -> None:
    """See `sinks.add_sinks`."""
    rows, heads, channels = out.shape
    lines, block = _cut(channels)
    assert out.stride(2) == logsumexp.stride(1) == 1
    _add_sinks_kernel[(triton.cdiv(rows, lines), heads)](
        sinks, out, logsumexp, rows, channels, *out.stride()[:2], logsumexp.stride(0),
        lines=lines, block=block, num_warps=4, **ARITHMETIC,
    )  # fmt: skip


def sinks_backward(gradient: Tensor, sinks: Tensor, *, out: Tensor, logsumexp: Tensor, total: Tensor) -> None:
    """See `sinks.sinks_backward`."""
    rows, heads, channels = out.shape
    lines, block = _cut(channels)
    assert gradient.stride(2) == out.stride(2) == logsumexp.stride(1) == 1
    programs = triton.cdiv(rows, lines * _SUMMED)
    partial = torch.empty(programs, heads, dtype=torch.float32, device=out.device)
    _sinks_backward_kernel[(programs, heads)](
        gradient, sinks, out, logsumexp, partial, rows, channels,
        *gradient.stride()[:2], *out.stride()[:2], logsumexp.stride(0),
        lines=lines, block=block, summed=_SUMMED, num_warps=4, **ARITHMETIC,
    )  # fmt: skip
    add_rows(partial, total)
