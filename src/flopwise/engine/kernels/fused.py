"""The fused forms: each operator as one kernel of Triton, on the current GPU. Repeatable: no atomics, fixed orders.

They compute what the plain forms do, in float32 with one rounding at the end; only the order of sums differs. Places in
tensors are counted in 64 bits.
"""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from flopwise.engine.kernels.dropout import DropMask
from flopwise.engine.kernels.fused_narrow_norm import narrow_norm_backward_kernel, narrow_norm_forward_kernel
from flopwise.engine.kernels.fused_norm import (
    add_rows_kernel,
    norm_backward_kernel,
    norm_forward_kernel,
    whole_norm_backward_kernel,
    whole_norm_forward_kernel,
)
from flopwise.engine.kernels.fused_update import scalar_on
from flopwise.engine.kernels.jit import ARITHMETIC, bounded_tanh, column_block, kernel, multiprocessors, warps_for
from flopwise.engine.kernels.plain import NO_TERMS, LossTerms

_NORM_WARPS = 8
"""Warps of a norm's backward on each multiprocessor, in two programs or more: those fit at once and end together."""
_TURNED_HEADS, _TURNED = 32, 2048
"""Heads, and pairs of channels, that a program turns."""
_SUMMED_COLUMNS, _SUMMED_LINES = 32, 64
_LEAST_SUMMED = 8
"""Rows that a program sums at least: what fewer rows leave to add up would take longer than their sums."""
_TILE_ROWS, _TILE_COLUMNS = 32, 64
_NARROW, _TILE = 256, 4096
"""Rows of up to so many numbers are normalised in tiles of so many."""
_MERGED_QUERIES, _COPIED_TOKENS = 16, 64


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
    """See `dispatch.norm_forward`."""
    rows, width = source.shape
    block = column_block(width, 8192)
    added, kept = source if other is None else other, out if total is None else total
    tensors = (source, added, weight, weight if bias is None else bias, out, kept, statistics)
    strides = (source.stride(0), added.stride(0), out.stride(0), kept.stride(0))
    asked = {"rms": rms, "biased": bias is not None, "added": other is not None, "kept": total is not None}
    drop = drop_other or drop_out
    if block <= _NARROW and drop is None:
        lines = _TILE // block
        narrow_norm_forward_kernel[(triton.cdiv(rows, lines),)](
            *tensors,
            rows,
            width,
            *strides,
            float(epsilon),
            **asked,
            lines=lines,
            block=block,
            num_warps=4,
            **ARITHMETIC,
        )
        return
    chosen = whole_norm_forward_kernel if block >= width else norm_forward_kernel
    chosen[(rows,)](
        *(*tensors, width, *strides, float(epsilon), *_masking(drop, statistics)),
        **asked,
        drops_other=drop_other is not None,
        drops_out=drop_out is not None,
        threshold=0 if drop is None else drop.threshold,
        block=block,
        num_warps=warps_for(block),
        **ARITHMETIC,
    )


def _masking(drop: DropMask | None, unused: Tensor) -> tuple[Tensor, Tensor, float]:
    """What kernels are told of a mask, or anything where they are told not to use it."""
    return (unused, unused, 1.0) if drop is None else (drop.tokens, drop.keys, drop.scale)


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
    """See `dispatch.norm_backward`. Programs sum the weight's gradient over their rows; a second kernel adds up."""
    rows, width = source.shape
    block = column_block(width, 8192)
    # A frozen bias is part of what is made again; what is summed for it nobody adds up.
    biased = bias_gradient is not None or bias is not None
    narrow = block <= _NARROW and drop is None
    lines = _TILE // block if narrow else 1
    whole = block >= width
    # Fewer threads with more numbers each: a few programs and the rows that they read ahead fill a multiprocessor.
    warps = 4 if narrow else max(1, warps_for(block) // 2)
    least = lines if narrow else _LEAST_SUMMED
    programs = min(
        triton.cdiv(rows, least), max(2, _NORM_WARPS // warps) * multiprocessors(source.device) * (2 if narrow else 1)
    )
    partial = torch.empty if whole else torch.zeros
    sums = partial((2 if biased else 1, programs, width), dtype=torch.float32, device=source.device)
    wide = whole_norm_backward_kernel if whole else norm_backward_kernel
    beside = out if dropped is None else dropped
    masking = () if narrow else (*_masking(drop, statistics), beside, beside.stride(0))
    masked = {} if narrow else {"drops": drop is not None, "threshold": 0 if drop is None else drop.threshold}
    chosen, tile = (narrow_norm_backward_kernel, {"lines": lines}) if narrow else (wide, {})
    chosen[(programs,)](
        gradient,
        source,
        weight,
        weight if bias is None else bias,
        statistics,
        out,
        sums,
        sums[-1],
        rows,
        width,
        gradient.stride(0),
        source.stride(0),
        out.stride(0),
        *masking,
        rms=rms,
        biased=biased,
        accumulate=accumulate,
        recompute=recompute,
        **masked,
        **tile,
        block=block,
        num_warps=warps,
        **ARITHMETIC,
    )
    for number, target in enumerate((weight_gradient, bias_gradient)):
        if target is not None:
            add_rows(sums[number], target)


def add_rows(rows: Tensor, total: Tensor) -> None:
    count, width = rows.shape
    add_rows_kernel[(triton.cdiv(width, _SUMMED_COLUMNS),)](
        rows, total, count, width, lines=_SUMMED_LINES, block=_SUMMED_COLUMNS, num_warps=4, **ARITHMETIC
    )


@kernel()
def _column_sums_kernel(
    values: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    step: tl.tensor,
    lines: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Every so manieth tile of rows, in a block of columns, a program."""
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    own = tl.program_id(0) * lines + tl.arange(0, lines)
    total = tl.zeros((lines, block), tl.float32)
    for first in range(0, rows, step):
        row = (first + own).to(tl.int64)
        place = row[:, None] * stride + columns[None, :]
        total += tl.load(values + place, mask=(row < rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0).to(tl.int64) * width + columns, tl.sum(total, 0), mask=inside)


def add_column_sums(values: Tensor, *, total: Tensor) -> None:
    """See `dispatch.add_column_sums`. Programs sum their rows; a second kernel adds up."""
    rows, width = values.shape
    block = column_block(width, _TILE_COLUMNS)
    across = triton.cdiv(width, block)
    programs = max(1, min(triton.cdiv(rows, _TILE_ROWS), 8 * multiprocessors(values.device) // across))
    sums = torch.empty((programs, width), dtype=torch.float32, device=values.device)
    _column_sums_kernel[(programs, across)](
        values,
        sums,
        rows,
        width,
        values.stride(0),
        programs * _TILE_ROWS,
        lines=_TILE_ROWS,
        block=block,
        num_warps=4,
        **ARITHMETIC,
    )
    add_rows(sums, total)


@kernel()
def _rotate_kernel(
    source: tl.tensor,
    positions: tl.tensor,
    frequencies: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    source_token: tl.tensor,
    source_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    scale: tl.tensor,
    half: tl.constexpr,
    inverse: tl.constexpr,
    neighbours: tl.constexpr,
    token_block: tl.constexpr,
    head_block: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Some heads of a few tokens a program: a token's angles are made once and turn all of them."""
    token = tl.program_id(0).to(tl.int64) * token_block + tl.arange(0, token_block)
    head = tl.program_id(1) * head_block + tl.arange(0, head_block)
    channel = tl.arange(0, block)
    there = token < tokens
    position = tl.load(positions + token, mask=there, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(frequencies + channel, mask=channel < half, other=0.0)[None, :]
    cosine, sine = (tl.cos(angle) * scale)[:, None, :], (tl.sin(angle) * scale)[:, None, :]
    if inverse:
        sine = -sine
    inside = there[:, None, None] & (head < heads)[None, :, None] & (channel < half)[None, None, :]
    step = 2 if neighbours else 1
    apart = 1 if neighbours else half
    place = head[None, :, None], channel[None, None, :] * step
    read = source + token[:, None, None] * source_token + place[0] * source_head + place[1]
    first = tl.load(read, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(read + apart, mask=inside, other=0.0).to(tl.float32)
    write = out + token[:, None, None] * out_token + place[0] * out_head + place[1]
    tl.store(write, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(write + apart, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)


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
    """See `dispatch.rotate`."""
    tokens, heads, dim = source.shape
    head_block, block = column_block(heads, _TURNED_HEADS), column_block(dim // 2, dim)
    token_block = max(1, _TURNED // (head_block * block))
    _rotate_kernel[(triton.cdiv(tokens, token_block), triton.cdiv(heads, head_block))](
        source,
        positions,
        frequencies,
        out,
        tokens,
        heads,
        source.stride(0),
        source.stride(1),
        out.stride(0),
        out.stride(1),
        scale,
        half=dim // 2,
        inverse=inverse,
        neighbours=neighbours,
        token_block=token_block,
        head_block=head_block,
        block=block,
        num_warps=4,
        **ARITHMETIC,
    )


@kernel()
def _cross_entropy_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    losses: tl.tensor,
    vocabulary: tl.tensor,
    lines: tl.tensor,
    stride_lines: tl.tensor,
    scales: tl.tensor,
    cap: tl.tensor,
    smoothing: tl.tensor,
    z_loss: tl.tensor,
    capped: tl.constexpr,
    has_terms: tl.constexpr,
    each: tl.constexpr,
    descends: tl.constexpr,
    line: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Rows are whole lines, so that they are read a line at a time: what lies behind the logits counts as hidden.

    `each`: every row has a scale of its own. `descends`: the gradient takes the place of the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    scale = tl.load(scales + row) if each else tl.load(scales)
    start = logits + row * (stride_lines * line)
    width = lines * line
    columns = tl.arange(0, block)
    if label >= 0:
        chosen = tl.load(start + label).to(tl.float32)
        if capped:
            chosen = cap * bounded_tanh(chosen / cap)
        largest = -float("inf")
        total = 0.0
        sum_of_all = 0.0
        for first in range(0, lines, block // line):
            column = first * line + columns
            values = tl.load(start + column, mask=column < width, other=-float("inf")).to(tl.float32)
            if capped:
                values = cap * bounded_tanh(values / cap)
            if has_terms:
                sum_of_all += tl.sum(tl.where(column < vocabulary, values, 0.0), 0)
            values = tl.where(column < vocabulary, values, -float("inf"))
            larger = tl.maximum(largest, tl.max(values, 0))
            # Where all so far are hidden, any finite number keeps their powers at zero.
            base = tl.where(larger == -float("inf"), 0.0, larger)
            total = total * tl.exp(largest - base) + tl.sum(tl.exp(values - base), 0)
            largest = larger
        norm = tl.log(total) + largest
        # Without terms these are products with 1 and sums with 0, which change no bit.
        rest = smoothing / vocabulary
        wanted = (1.0 - smoothing) * chosen + rest * sum_of_all
        tl.store(losses + row, norm - wanted + z_loss * norm * norm)
        if descends:
            share = 1.0 / total * (1.0 + 2.0 * z_loss * norm)
            for first in range(0, lines, block // line):
                column = first * line + columns
                values = tl.load(start + column, mask=column < width, other=0.0).to(tl.float32)
                if capped:
                    bent = bounded_tanh(values / cap)
                    values = cap * bent
                    slope = 1.0 - bent * bent
                result = tl.exp(values - largest) * share
                result = (tl.where(column == label, result - (1.0 - smoothing), result) - rest) * scale
                if capped:
                    result = result * slope
                result = tl.where(column < vocabulary, result, 0.0)
                tl.store(start + column, result.to(logits.dtype.element_ty), mask=column < width)
    else:
        tl.store(losses + row, 0.0)
        if descends:
            nothing = tl.zeros((block,), logits.dtype.element_ty)
            for first in range(0, lines, block // line):
                column = first * line + columns
                tl.store(start + column, nothing, mask=column < width)


def merge_attention(
    one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], *, out: Tensor, logsumexp: Tensor
) -> None:
    """See `dispatch.merge_attention`."""
    sequences, queries, heads, channels = out.shape
    grid = (sequences * heads, triton.cdiv(queries, _MERGED_QUERIES))
    _merge_attention_kernel[grid](
        *(one[0], one[1], other[0], other[1], out, logsumexp),
        *(one[0].stride()[:3] + one[1].stride() + other[0].stride()[:3] + other[1].stride()),
        *(out.stride()[:3] + logsumexp.stride()),
        heads,
        queries,
        channels,
        _MERGED_QUERIES,
        column_block(channels, 256),
        **ARITHMETIC,
    )


@kernel()
def _merge_attention_kernel(
    one: tl.tensor,
    one_sums: tl.tensor,
    other: tl.tensor,
    other_sums: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    one_sequence: tl.tensor,
    one_query: tl.tensor,
    one_head: tl.tensor,
    one_sums_sequence: tl.tensor,
    one_sums_head: tl.tensor,
    one_sums_query: tl.tensor,
    other_sequence: tl.tensor,
    other_query: tl.tensor,
    other_head: tl.tensor,
    other_sums_sequence: tl.tensor,
    other_sums_head: tl.tensor,
    other_sums_query: tl.tensor,
    out_sequence: tl.tensor,
    out_query: tl.tensor,
    out_head: tl.tensor,
    sums_sequence: tl.tensor,
    sums_head: tl.tensor,
    sums_query: tl.tensor,
    heads: tl.tensor,
    queries: tl.tensor,
    channels: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    sequence = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    query = tl.program_id(1).to(tl.int64) * rows + tl.arange(0, rows)
    channel = tl.arange(0, columns)
    there = query < queries
    inside = there[:, None] & (channel < channels)[None, :]
    one_sum = tl.load(
        one_sums + sequence * one_sums_sequence + head * one_sums_head + query * one_sums_query, mask=there, other=0.0
    )
    other_sum = tl.load(
        other_sums + sequence * other_sums_sequence + head * other_sums_head + query * other_sums_query,
        mask=there,
        other=0.0,
    )
    largest = tl.maximum(one_sum, other_sum)
    total = largest + tl.log(tl.exp(one_sum - largest) + tl.exp(other_sum - largest))
    place = one + sequence * one_sequence + head * one_head + query[:, None] * one_query + channel[None, :]
    merged = tl.load(place, mask=inside, other=0.0).to(tl.float32) * tl.exp(one_sum - total)[:, None]
    place = other + sequence * other_sequence + head * other_head + query[:, None] * other_query + channel[None, :]
    merged += tl.load(place, mask=inside, other=0.0).to(tl.float32) * tl.exp(other_sum - total)[:, None]
    place = out + sequence * out_sequence + head * out_head + query[:, None] * out_query + channel[None, :]
    tl.store(place, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(sums + sequence * sums_sequence + head * sums_head + query * sums_query, total, mask=there)


def _line_of(logits: Tensor) -> int:
    """Numbers of 16 bytes where rows begin at such lines and the last one's memory goes to the end of its own; else 1.

    Of 8,192 rows of 50,257 numbers each by itself took 1,220 µs, lines 640.
    """
    rows, vocabulary = logits.shape
    line = 16 // logits.element_size()
    width = -(-vocabulary // line) * line
    there = logits.untyped_storage().nbytes() // logits.element_size() - logits.storage_offset()
    fits = logits.stride(0) >= width and there >= (rows - 1) * logits.stride(0) + width
    return line if fits and logits.stride(0) % line == 0 and logits.data_ptr() % 16 == 0 else 1


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
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    scales = scale if isinstance(scale, Tensor) else scalar_on(float(scale), logits.device)
    _run_cross_entropy(logits, labels, losses, scales, cap, terms=terms, descends=True)
    loss += losses.sum(dtype=torch.float64).to(loss.dtype)


def token_losses(logits: Tensor, labels: Tensor, *, out: Tensor, cap: float | None = None) -> None:
    """See `dispatch.token_losses`."""
    _run_cross_entropy(logits, labels, out, scalar_on(1.0, logits.device), cap, descends=False)


def _run_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    scales: Tensor,
    cap: float | None,
    *,
    descends: bool,
    terms: LossTerms = NO_TERMS,
) -> None:
    rows, vocabulary = logits.shape
    line = _line_of(logits)
    block = max(line, column_block(vocabulary, 4096))
    _cross_entropy_kernel[(rows,)](
        logits,
        labels,
        losses,
        vocabulary,
        triton.cdiv(vocabulary, line),
        logits.stride(0) // line,
        scales,
        1.0 if cap is None else cap,
        float(terms.smoothing),
        float(terms.z_loss),
        capped=cap is not None,
        has_terms=terms != NO_TERMS,
        each=scales.dim() > 0,
        descends=descends,
        line=line,
        block=block,
        num_warps=warps_for(block),
        **ARITHMETIC,
    )


@kernel()
def _copy_rows_kernel(
    source: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    out_stride: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    values = tl.load(source + row * source_stride + columns, mask=inside, other=0.0)
    tl.store(out + row * out_stride + columns, values, mask=inside)


def copy_rows(source: Tensor, *, out: Tensor) -> None:
    """See `dispatch.copy_rows`."""
    rows, width = source.shape
    block = column_block(width, 2048)
    _copy_rows_kernel[(rows, triton.cdiv(width, block))](
        source, out, width, source.stride(0), out.stride(0), block=block, num_warps=warps_for(block), **ARITHMETIC
    )


@kernel()
def _copy_heads_kernel(
    source: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    source_sequence: tl.tensor,
    source_token: tl.tensor,
    source_head: tl.tensor,
    out_sequence: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    added: tl.constexpr,
    lines: tl.constexpr,
    block: tl.constexpr,
) -> None:
    sequence = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * lines + tl.arange(0, lines)
    channel = tl.arange(0, block)
    inside = (token < tokens)[:, None] & (channel < channels)[None, :]
    read = source + sequence * source_sequence + head * source_head + token[:, None] * source_token + channel[None, :]
    values = tl.load(read, mask=inside, other=0.0).to(tl.float32)
    write = out + sequence * out_sequence + head * out_head + token[:, None] * out_token + channel[None, :]
    if added:
        values += tl.load(write, mask=inside, other=0.0).to(tl.float32)
    tl.store(write, values.to(out.dtype.element_ty), mask=inside)


def copy_heads(source: Tensor, *, out: Tensor, add: bool) -> None:
    """See `dispatch.copy_heads`."""
    sequences, tokens, heads, channels = source.shape
    _copy_heads_kernel[(sequences * heads, triton.cdiv(tokens, _COPIED_TOKENS))](
        source,
        out,
        heads,
        tokens,
        channels,
        *(source.stride()[:3] + out.stride()[:3]),
        added=add,
        lines=_COPIED_TOKENS,
        block=column_block(channels, 256),
        num_warps=4,
        **ARITHMETIC,
    )


@kernel()
def _embedding_kernel(
    ids: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    added: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    entry = tl.load(ids + row).to(tl.int64)
    values = tl.load(table + entry * table_stride + columns, mask=inside, other=0.0).to(tl.float32)
    place = out + row * out_stride + columns
    if added:
        values += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, values.to(out.dtype.element_ty), mask=inside)


def embedding(ids: Tensor, table: Tensor, *, out: Tensor, add: bool) -> None:
    """See `dispatch.embedding_forward`, and with `add` `dispatch.embedding_add`."""
    width = table.shape[1]
    block = column_block(width, 1024)
    _embedding_kernel[(len(ids), triton.cdiv(width, block))](
        ids, table, out, width, table.stride(0), out.stride(0), added=add, block=block, num_warps=4, **ARITHMETIC
    )


@kernel()
def _embedding_backward_kernel(
    in_order: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    gradient: tl.tensor,
    table_gradient: tl.tensor,
    width: tl.tensor,
    gradient_stride: tl.tensor,
    table_stride: tl.tensor,
    few: tl.constexpr,
    lines: tl.constexpr,
    block: tl.constexpr,
) -> None:
    position = tl.program_id(0)
    entry = tl.load(in_order + position)
    before = tl.load(in_order + position - 1, mask=position > 0, other=-1)
    if entry != before:
        columns = tl.program_id(1) * block + tl.arange(0, block)
        inside = columns < width
        total = tl.zeros((block,), tl.float32)
        end = tl.load(ends + position).to(tl.int32)
        for current in range(position, tl.minimum(end, position + few)):
            row = tl.load(order + current)
            total += tl.load(gradient + row * gradient_stride + columns, mask=inside, other=0.0).to(tl.float32)
        # A common token has thousands of rows: of those many are read at once, instead of one after another.
        for first in range(position + few, end, lines):
            there = first + tl.arange(0, lines) < end
            row = tl.load(order + first + tl.arange(0, lines), mask=there, other=0)
            place = row[:, None] * gradient_stride + columns[None, :]
            tile = tl.load(gradient + place, mask=there[:, None] & inside[None, :], other=0.0)
            total += tl.sum(tile.to(tl.float32), 0)
        place = table_gradient + entry.to(tl.int64) * table_stride + columns
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, total.to(table_gradient.dtype.element_ty), mask=inside)


def embedding_backward(ids: Tensor, gradient: Tensor, *, table_gradient: Tensor) -> None:
    """See `dispatch.embedding_backward`. The program at the first row of each id's run sums the run."""
    rows, width = gradient.shape
    in_order, order = torch.sort(ids, stable=True)
    ends = torch.searchsorted(in_order, in_order, right=True)
    block = column_block(width, 256)
    _embedding_backward_kernel[(rows, triton.cdiv(width, block))](
        in_order,
        order,
        ends,
        gradient,
        table_gradient,
        width,
        gradient.stride(0),
        table_gradient.stride(0),
        few=4,
        lines=16,
        block=block,
        num_warps=4,
        **ARITHMETIC,
    )
