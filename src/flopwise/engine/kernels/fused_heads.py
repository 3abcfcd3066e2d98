"""Norms of queries' or keys' heads and their rotation as one kernel of Triton each way.

One after the other they read and write every number twice forward and, over the gradients, twice backward: with the
norm's source ten passes of Qwen3-0.6B's heads a layer, where five will do.
"""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from flopwise.engine.kernels.fused import add_rows
from flopwise.engine.kernels.heads import Turn
from flopwise.engine.kernels.jit import ARITHMETIC, column_block, kernel, multiprocessors

_HEADS, _PAIRS = 32, 2048
"""Heads, and pairs of channels, that a program takes at once: a token's angles serve all of its heads."""
_PAIRS_BACK, _PROGRAMS_BACK = 1024, 8
"""Backward, by two warps, and of each multiprocessor: 32,768 tokens of 16 heads 136 → 120 µs on an H200, of 8 heads
113 → 70."""


@kernel()
def _angles(
    positions: tl.tensor,
    frequencies: tl.tensor,
    token: tl.tensor,
    channel: tl.tensor,
    tokens: tl.tensor,
    scale: tl.tensor,
    half: tl.constexpr,
) -> tl.tensor:
    """Cosine and sine of each token and pair, one for all heads."""
    position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(frequencies + channel, mask=channel < half, other=0.0)[None, :]
    return (tl.cos(angle) * scale)[:, None, :], (tl.sin(angle) * scale)[:, None, :]


@kernel()
def _pairs(read: tl.tensor, apart: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Both channels of each pair."""
    first = tl.load(read, mask=inside, other=0.0)
    return first.to(tl.float32), tl.load(read + apart, mask=inside, other=0.0).to(tl.float32)


@kernel()
def _statistics_of(statistics: tl.tensor, row: tl.tensor, rows: tl.tensor, rms: tl.constexpr) -> tl.tensor:
    """Mean and reciprocal deviation of each head."""
    if rms:
        mean = tl.zeros_like(rows).to(tl.float32)
        reciprocal = tl.load(statistics + row, mask=rows, other=0.0)
    else:
        mean = tl.load(statistics + 2 * row, mask=rows, other=0.0)
        reciprocal = tl.load(statistics + 2 * row + 1, mask=rows, other=0.0)
    return mean[:, :, None], reciprocal[:, :, None]


@kernel()
def _heads_forward_kernel(
    source: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    positions: tl.tensor,
    frequencies: tl.tensor,
    out: tl.tensor,
    statistics: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    source_token: tl.tensor,
    source_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    epsilon: tl.tensor,
    scale: tl.tensor,
    rms: tl.constexpr,
    biased: tl.constexpr,
    half: tl.constexpr,
    neighbours: tl.constexpr,
    token_block: tl.constexpr,
    head_block: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Some heads of a few tokens a program. What a norm alone would write is rounded as it would be."""
    token = tl.program_id(0).to(tl.int64) * token_block + tl.arange(0, token_block)
    head = tl.program_id(1) * head_block + tl.arange(0, head_block)
    channel = tl.arange(0, block)
    rows = (token < tokens)[:, None] & (head < heads)[None, :]
    across = channel < half
    inside = rows[:, :, None] & across[None, None, :]
    step = 2 if neighbours else 1
    apart = 1 if neighbours else half
    place = head[None, :, None], channel[None, None, :] * step
    read = source + token[:, None, None] * source_token + place[0] * source_head + place[1]
    first, second = _pairs(read, apart, inside)
    row = token[:, None] * heads + head[None, :]
    if not rms:
        mean = (tl.sum(first, 2) + tl.sum(second, 2)) / (2 * half)
        first = tl.where(inside, first - mean[:, :, None], 0.0)
        second = tl.where(inside, second - mean[:, :, None], 0.0)
        tl.store(statistics + 2 * row, mean, mask=rows)
    squares = tl.sum(first * first, 2) + tl.sum(second * second, 2)
    reciprocal = 1.0 / tl.sqrt(squares / (2 * half) + epsilon)
    tl.store(statistics + (row if rms else 2 * row + 1), reciprocal, mask=rows)
    first, second = first * reciprocal[:, :, None], second * reciprocal[:, :, None]
    kept = out.dtype.element_ty
    if rms:
        first, second = first.to(kept).to(tl.float32), second.to(kept).to(tl.float32)
    weights = weight + channel * step
    first *= tl.load(weights, mask=across, other=0.0).to(tl.float32)[None, None, :]
    second *= tl.load(weights + apart, mask=across, other=0.0).to(tl.float32)[None, None, :]
    if biased:
        shifts = bias + channel * step
        first += tl.load(shifts, mask=across, other=0.0).to(tl.float32)[None, None, :]
        second += tl.load(shifts + apart, mask=across, other=0.0).to(tl.float32)[None, None, :]
    first, second = first.to(kept).to(tl.float32), second.to(kept).to(tl.float32)
    cosine, sine = _angles(positions, frequencies, token, channel, tokens, scale, half)
    write = out + token[:, None, None] * out_token + place[0] * out_head + place[1]
    tl.store(write, (first * cosine - second * sine).to(kept), mask=inside)
    tl.store(write + apart, (second * cosine + first * sine).to(kept), mask=inside)


@kernel()
def _heads_backward_kernel(
    gradient: tl.tensor,
    source: tl.tensor,
    weight: tl.tensor,
    positions: tl.tensor,
    frequencies: tl.tensor,
    statistics: tl.tensor,
    out: tl.tensor,
    weight_partial: tl.tensor,
    bias_partial: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    gradient_token: tl.tensor,
    gradient_head: tl.tensor,
    source_token: tl.tensor,
    source_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    scale: tl.tensor,
    rms: tl.constexpr,
    biased: tl.constexpr,
    half: tl.constexpr,
    neighbours: tl.constexpr,
    token_block: tl.constexpr,
    head_block: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Every so manieth tile of tokens a program, whose sums for the weight stay in registers."""
    head = tl.program_id(1) * head_block + tl.arange(0, head_block)
    channel = tl.arange(0, block)
    across = channel < half
    step = 2 if neighbours else 1
    apart = 1 if neighbours else half
    weights = weight + channel * step
    first_weight = tl.load(weights, mask=across, other=0.0).to(tl.float32)[None, None, :]
    second_weight = tl.load(weights + apart, mask=across, other=0.0).to(tl.float32)[None, None, :]
    zeros = tl.zeros((token_block, head_block, block), tl.float32)
    first_sum, second_sum = zeros, zeros
    first_shift, second_shift = zeros, zeros
    kept = out.dtype.element_ty
    for begin in range(tl.program_id(0) * token_block, tokens, tl.num_programs(0) * token_block):
        token = tl.full((), 0, tl.int64) + begin + tl.arange(0, token_block)
        rows = (token < tokens)[:, None] & (head < heads)[None, :]
        inside = rows[:, :, None] & across[None, None, :]
        place = head[None, :, None], channel[None, None, :] * step
        read = gradient + token[:, None, None] * gradient_token + place[0] * gradient_head + place[1]
        first, second = _pairs(read, apart, inside)
        cosine, sine = _angles(positions, frequencies, token, channel, tokens, scale, half)
        # Turned back, and rounded as the rotation alone would leave it.
        first_above = (first * cosine + second * sine).to(kept).to(tl.float32)
        second_above = (second * cosine - first * sine).to(kept).to(tl.float32)
        read = source + token[:, None, None] * source_token + place[0] * source_head + place[1]
        first, second = _pairs(read, apart, inside)
        row = token[:, None] * heads + head[None, :]
        mean, reciprocal = _statistics_of(statistics, row, rows, rms)
        first = tl.where(inside, (first - mean) * reciprocal, 0.0)
        second = tl.where(inside, (second - mean) * reciprocal, 0.0)
        # A norm of squares rounds its normal rows before it multiplies them.
        first_sum += first_above * (first.to(kept).to(tl.float32) if rms else first)
        second_sum += second_above * (second.to(kept).to(tl.float32) if rms else second)
        if biased:
            first_shift += first_above
            second_shift += second_above
        first_above *= first_weight
        second_above *= second_weight
        share = (tl.sum(first_above * first, 2) + tl.sum(second_above * second, 2)) / (2 * half)
        if not rms:
            mean = ((tl.sum(first_above, 2) + tl.sum(second_above, 2)) / (2 * half))[:, :, None]
            first_above, second_above = first_above - mean, second_above - mean
        first_above = (first_above - first * share[:, :, None]) * reciprocal
        second_above = (second_above - second * share[:, :, None]) * reciprocal
        write = out + token[:, None, None] * out_token + place[0] * out_head + place[1]
        tl.store(write, first_above.to(kept), mask=inside)
        tl.store(write + apart, second_above.to(kept), mask=inside)
    own = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * (2 * half) + channel * step
    tl.store(weight_partial + own, tl.sum(tl.sum(first_sum, 0), 0), mask=across)
    tl.store(weight_partial + own + apart, tl.sum(tl.sum(second_sum, 0), 0), mask=across)
    if biased:
        tl.store(bias_partial + own, tl.sum(tl.sum(first_shift, 0), 0), mask=across)
        tl.store(bias_partial + own + apart, tl.sum(tl.sum(second_shift, 0), 0), mask=across)


def _tile_of(heads: int, dim: int, pairs: int) -> dict[str, int]:
    head_block, block = column_block(heads, _HEADS), column_block(dim // 2, dim)
    return {"token_block": max(1, pairs // (head_block * block)), "head_block": head_block, "block": block}


def forward(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    turn: Turn,
    *,
    epsilon: float,
    rms: bool,
    out: Tensor,
    statistics: Tensor,
) -> None:
    """See `heads.norm_and_turn`."""
    tokens, heads, dim = source.shape
    tile = _tile_of(heads, dim, _PAIRS)
    _heads_forward_kernel[(triton.cdiv(tokens, tile["token_block"]), triton.cdiv(heads, tile["head_block"]))](
        *(source, weight, weight if bias is None else bias, turn.positions, turn.frequencies, out, statistics),
        *(tokens, heads, *source.stride()[:2], *out.stride()[:2], float(epsilon), float(turn.scale)),
        rms=rms,
        biased=bias is not None,
        half=dim // 2,
        neighbours=turn.neighbours,
        **tile,
        num_warps=4,
        **ARITHMETIC,
    )


def backward(
    gradient: Tensor,
    source: Tensor,
    weight: Tensor,
    statistics: Tensor,
    turn: Turn,
    *,
    rms: bool,
    out: Tensor,
    weight_gradient: Tensor | None,
    bias_gradient: Tensor | None,
) -> None:
    """See `heads.norm_and_turn_backward`. Programs sum over their tokens; a second kernel adds up."""
    tokens, heads, dim = source.shape
    tile = _tile_of(heads, dim, _PAIRS_BACK)
    across, biased = triton.cdiv(heads, tile["head_block"]), bias_gradient is not None
    most = _PROGRAMS_BACK * multiprocessors(source.device) // across
    programs = max(1, min(triton.cdiv(tokens, tile["token_block"]), most))
    sums = torch.empty((2 if biased else 1, programs * across, dim), dtype=torch.float32, device=source.device)
    _heads_backward_kernel[(programs, across)](
        *(gradient, source, weight, turn.positions, turn.frequencies, statistics, out, sums[0], sums[-1]),
        *(tokens, heads, *gradient.stride()[:2], *source.stride()[:2], *out.stride()[:2], float(turn.scale)),
        rms=rms,
        biased=biased,
        half=dim // 2,
        neighbours=turn.neighbours,
        **tile,
        num_warps=2,
        **ARITHMETIC,
    )
    for number, target in enumerate((weight_gradient, bias_gradient)):
        if target is not None:
            add_rows(sums[number], target)
