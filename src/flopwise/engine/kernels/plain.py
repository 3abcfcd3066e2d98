"""Each operator in plain torch, for any device and any floating type: what the fused forms are held against.

Arithmetic runs in float32 (float64 for float64), and every result is rounded once. Temporaries stay within a block's
bytes, a row's result depends on that row alone, and equal calls give equal bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flopwise.engine.kernels.blocks import add_rounded, compute_type, row_blocks, row_sums
from flopwise.engine.kernels.dropout import DropMask, dropout, row_scales


def norm_forward(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    epsilon: float,
    rms: bool,
    out: Tensor,
    statistics: Tensor,
    other: Tensor | None = None,
    total: Tensor | None = None,
    drop_other: DropMask | None = None,
    drop_out: DropMask | None = None,
) -> None:
    """Normalises rows; `statistics` gets the reciprocal root (rms), or mean and reciprocal deviation, of each.

    With `other` it is their sum that is normalised; `total` gets what is.
    """
    if total is not None and other is not None and drop_other is not None:
        dropout(other, drop_other, out=total, other=source)
        source = total
    elif total is not None:
        source = total.copy_(source) if other is None else torch.add(source, other, out=total)
    rows, width = source.shape
    wide = compute_type(source.dtype)
    columns = torch.arange(width, device=source.device)
    scale, shift = weight.to(wide), None if bias is None else bias.to(wide)
    for block in row_blocks(rows, width * wide.itemsize, 3 if drop_out is None else 9):
        values = source[block].to(wide)
        if rms:
            reciprocal = torch.rsqrt(row_sums(values * values) / width + epsilon)
            statistics[block] = reciprocal[:, 0]
            # Rounded before the weight as well as after it, as the models that brought this norm do.
            values = (values * reciprocal).to(source.dtype).to(wide)
        else:
            mean = row_sums(values) / width
            values = values - mean
            reciprocal = torch.rsqrt(row_sums(values * values) / width + epsilon)
            statistics[block, 0] = mean[:, 0]
            statistics[block, 1] = reciprocal[:, 0]
            values *= reciprocal
        values = values * scale
        if shift is not None:
            values += shift
        if drop_out is not None:
            values *= row_scales(drop_out, block, columns, wide)
        out[block] = values


def norm_backward(
    gradient: Tensor,
    source: Tensor,
    weight: Tensor,
    statistics: Tensor,
    *,
    rms: bool,
    out: Tensor,
    weight_gradient: Tensor | None,
    bias_gradient: Tensor | None,
    accumulate: bool,
    recompute: bool = False,
    bias: Tensor | None = None,
    drop: DropMask | None = None,
    dropped: Tensor | None = None,
) -> None:
    """The gradient of the rows, and of weight and bias, which are added to. `out` may be `gradient` itself.

    With `recompute` the norm's own result, made from its statistics, takes the place of `gradient`. `dropped` gets what
    `drop` keeps of `out`.
    """
    rows, width = source.shape
    wide = compute_type(source.dtype)
    columns = torch.arange(width, device=source.device)
    scale = weight.to(wide)
    weight_sum = torch.zeros(width, dtype=wide, device=source.device)
    bias_sum = torch.zeros_like(weight_sum)
    for block in row_blocks(rows, width * wide.itemsize, 6 if drop is None else 12):
        above = gradient[block].to(wide)
        if rms:
            reciprocal = statistics[block, None].to(wide)
            normal = source[block].to(wide) * reciprocal
            multiplied = normal.to(source.dtype)
        else:
            reciprocal = statistics[block, 1:].to(wide)
            normal = (source[block].to(wide) - statistics[block, :1].to(wide)) * reciprocal
            multiplied = normal
        weight_sum += (above * multiplied).sum(0)
        if bias_gradient is not None:
            bias_sum += above.sum(0)
        scaled = above * scale
        if recompute:
            # From here on `above`, which may be `gradient` itself, is not read.
            result = multiplied.to(wide) * scale
            gradient[block] = result if bias is None else result + bias.to(wide)
        share = row_sums(scaled * normal) / width
        if not rms:
            scaled -= row_sums(scaled) / width
        below = normal.mul_(share).neg_().add_(scaled).mul_(reciprocal)
        if accumulate:
            add_rounded(out[block], below)
        else:
            out[block] = below
        if drop is not None and dropped is not None:
            dropped[block] = out[block].to(wide) * row_scales(drop, block, columns, wide)
    if weight_gradient is not None:
        add_rounded(weight_gradient, weight_sum)
    if bias_gradient is not None:
        add_rounded(bias_gradient, bias_sum)


def rotate(
    source: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    *,
    out: Tensor,
    inverse: bool,
    scale: float = 1.0,
    neighbours: bool = False,
) -> None:
    """Turns the halves (or `neighbours`) of each head by its token's angles. `out` may be `source` itself.

    Angles are in fp32, as the published models were trained with.
    """
    tokens, heads, dim = source.shape
    half = dim // 2
    one, other = (slice(0, dim, 2), slice(1, dim, 2)) if neighbours else (slice(0, half), slice(half, dim))
    wide = compute_type(source.dtype)
    # Every layer turns queries and keys by the same angles, there and back.
    at_most = 1 << int(positions.max()).bit_length() if tokens and source.device.type == "cpu" else 0
    table = _turns(frequencies, at_most, wide) if 0 < at_most * half * wide.itemsize <= TABLE_BYTES else None
    for block in row_blocks(tokens, heads * dim * wide.itemsize, 5):
        if table is None:
            angles = torch.outer(positions[block].to(torch.float32), frequencies)
            cosine, sine = angles.cos().to(wide), angles.sin().to(wide)
        else:
            cosine, sine = (each.index_select(0, positions[block]) for each in table)
        cosine, sine = cosine[:, None], sine[:, None]
        if scale != 1.0:
            # In fp32, as the angles are.
            cosine, sine = ((each.to(torch.float32) * scale).to(wide) for each in (cosine, sine))
        if inverse:
            sine = -sine
        first, second = source[block, :, one].to(wide), source[block, :, other].to(wide)
        turned = (first * cosine).sub_(second * sine)
        second = (second * cosine).add_(first * sine)
        out[block, :, one] = turned
        out[block, :, other] = second


TABLE_BYTES = 1 << 20
"""A table of cosines may take as much, and one of sines."""


@lru_cache(maxsize=2)
def _turns(frequencies: Tensor, positions: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles. Frequencies are known by which tensor they are, and never change."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=frequencies.device), frequencies)
    return angles.cos().to(wide), angles.sin().to(wide)


def merge_attention(
    one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], *, out: Tensor, logsumexp: Tensor
) -> None:
    """See `dispatch.merge_attention`."""
    total = torch.logaddexp(one[1], other[1])
    shares = [(sums - total).exp().transpose(1, 2).unsqueeze(-1) for _, sums in (one, other)]
    out.copy_(one[0] * shares[0] + other[0] * shares[1])
    logsumexp.copy_(total)


class LossTerms(NamedTuple):
    """What a loss has beside the right answers' cross-entropy."""

    smoothing: float = 0.0
    """The share of the wanted distribution that all answers have alike."""
    z_loss: float = 0.0
    """What the square of the logarithm of the softmax's denominator is multiplied by (PaLM, section 5)."""


NO_TERMS = LossTerms()


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    scale: Tensor | float,
    loss: Tensor,
    cap: float | None = None,
    terms: LossTerms = NO_TERMS,
) -> None:
    """See `dispatch.cross_entropy`."""
    rows, vocabulary = logits.shape
    wide = compute_type(logits.dtype)
    smoothing, z_loss = terms
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for block in row_blocks(rows, vocabulary * wide.itemsize, 2 if cap is None else 3):
        counted = labels[block, None] >= 0
        label = labels[block, None].clamp_min(0).long()
        values = logits[block].to(wide, copy=True)
        slope: Tensor | None = None
        if cap is not None:
            share = values.div_(cap).tanh_()
            slope = 1.0 - share * share
            values *= cap
        largest = values.amax(-1, keepdim=True)
        values -= largest
        chosen = values.gather(1, label)
        if smoothing:
            chosen = chosen * (1.0 - smoothing) + row_sums(values) * (smoothing / vocabulary)
        values.exp_()
        sums = row_sums(values)
        losses = sums.log() - chosen
        values /= sums
        if z_loss:
            norm = sums.log() + largest
            losses += z_loss * norm * norm
            values *= 1.0 + 2.0 * z_loss * norm
        total += torch.where(counted, losses, 0.0).sum(dtype=torch.float64)
        values.scatter_(1, label, values.gather(1, label) - (1.0 - smoothing))
        if smoothing:
            values -= smoothing / vocabulary
        values *= scale[block, None] if isinstance(scale, Tensor) and scale.dim() else scale
        if slope is not None:
            values *= slope
        values.masked_fill_(~counted, 0.0)
        logits[block] = values
    loss += total.to(loss.dtype)


def token_losses(logits: Tensor, labels: Tensor, *, out: Tensor, cap: float | None = None) -> None:
    """See `dispatch.token_losses`."""
    rows, vocabulary = logits.shape
    wide = compute_type(logits.dtype)
    for block in row_blocks(rows, vocabulary * wide.itemsize, 2):
        label = labels[block, None].clamp_min(0).long()
        values = logits[block].to(wide, copy=True)
        if cap is not None:
            values.div_(cap).tanh_().mul_(cap)
        values -= values.amax(-1, keepdim=True)
        chosen = values.gather(1, label)
        losses = row_sums(values.exp_()).log() - chosen
        out[block] = torch.where(labels[block] >= 0, losses[:, 0], 0.0)


def embedding_forward(ids: Tensor, table: Tensor, *, out: Tensor) -> None:
    """The table's row of each id."""
    for block in row_blocks(len(ids), table.shape[1] * table.dtype.itemsize, 1):
        out[block] = table.index_select(0, ids[block])


def embedding_add(ids: Tensor, table: Tensor, *, out: Tensor) -> None:
    """`out` gets the table's row of each id added."""
    wide = compute_type(out.dtype)
    for block in row_blocks(len(ids), table.shape[1] * wide.itemsize, 3):
        add_rounded(out[block], table.index_select(0, ids[block]).to(wide))


def embedding_backward(ids: Tensor, gradient: Tensor, *, table_gradient: Tensor) -> None:
    """Each id's row of the table's gradient gets the sum of its rows of `gradient` added.

    Rows are sorted by id and every id's run is summed in the rows' order, so that equal calls give equal bits. Work is
    cut by columns: a run is whole in each block, whatever its length. Nothing here depends on the number of different
    ids, which only the device knows: there are as many runs as rows, and those beyond the last repeat the last.
    """
    rows, width = gradient.shape
    if not rows:
        return
    wide = compute_type(torch.promote_types(gradient.dtype, table_gradient.dtype))
    in_order, order = torch.sort(ids, stable=True)
    numbers = torch.zeros_like(order)
    numbers[1:] = (in_order[1:] != in_order[:-1]).cumsum(0)
    starts = torch.searchsorted(numbers, torch.arange(rows + 1, device=ids.device))
    runs = torch.minimum(torch.arange(rows, device=ids.device), numbers[-1])
    targets = in_order[starts[runs]].long()
    for columns in row_blocks(width, rows * wide.itemsize, 4):
        gathered = gradient[:, columns].index_select(0, order).to(wide)
        sums = torch.segment_reduce(gathered, "sum", offsets=starts, axis=0, unsafe=True).index_select(0, runs)
        sums += table_gradient[:, columns].index_select(0, targets)
        # Rows that repeat a target repeat its value too.
        table_gradient[:, columns].index_copy_(0, targets, sums.to(table_gradient.dtype))


def add_column_sums(values: Tensor, *, total: Tensor) -> None:
    """`total` gets the sum over the rows added. A few rows at a time: a CPU makes a wide copy of what it sums."""
    wide = compute_type(values.dtype)
    sums = torch.zeros(values.shape[1], dtype=wide, device=values.device)
    for block in row_blocks(values.shape[0], values.shape[1] * wide.itemsize, 1):
        sums += values[block].sum(0, dtype=wide)
    add_rounded(total, sums)


def sum_of_squares(values: Tensor, *, out: Tensor) -> None:
    """`out` gets Σ values² added."""
    flat = values.reshape(-1)
    wide = compute_type(values.dtype)
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for block in row_blocks(len(flat), wide.itemsize, 2):
        piece = flat[block].to(wide)
        total += (piece * piece).sum()
    out += total.to(out.dtype)
