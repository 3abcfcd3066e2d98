"""Products of experts as kernels of Triton: what `plain_experts` does, without asking the device anything.

A program makes a tile of one expert's rows; as many tiles are started as the worst routing needs, and those behind the
last one end at once. Rows that are gathered are read where they lie among the tokens. Tiles of one expert follow each
other, so that its matrix and its rows are read from the second-level cache. What lies in lines of 16 bytes is copied to
a multiprocessor as tiles, by a descriptor (from Hopper on, where a multiprocessor has room): products of such matrices
are those of `fused_flat_experts`. Everything else is read number by number.
"""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found, unused-ignore]

from flopwise.engine.kernels import fused_flat_experts
from flopwise.engine.kernels.expert_tiles import (
    BIAS_TILE,
    FLAT_GATED_TILE,
    FLAT_TILE,
    GATED_TILE,
    GATHERED_WGRAD_TILE,
    LAID_WGRAD_TILE,
    PRODUCT_TILE,
    WGRAD_TILE,
    ExpertTile,
    is_described,
    tile_for,
    within,
)
from flopwise.engine.kernels.experts import Routed
from flopwise.engine.kernels.fused_activations import gated_back, value_and_slope
from flopwise.engine.kernels.fused_flat_experts import store_activated
from flopwise.engine.kernels.jit import column_block, kernel


@kernel()
def _product_kernel(
    left: tl.tensor,
    right: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    index: tl.tensor,
    starts: tl.tensor,
    tile_experts: tl.tensor,
    tile_rows: tl.tensor,
    experts: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    left_row: tl.tensor,
    right_expert: tl.tensor,
    right_column: tl.tensor,
    right_depth: tl.tensor,
    bias_expert: tl.tensor,
    out_row: tl.tensor,
    gathers: tl.constexpr,
    biased: tl.constexpr,
    adds: tl.constexpr,
    whole_depth: tl.constexpr,
    whole_columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    across = tl.cdiv(columns, block_columns)
    tile = tl.program_id(0) // across
    first_column = (tl.program_id(0) % across) * block_columns
    column = first_column + tl.arange(0, block_columns)
    expert, first = tl.load(tile_experts + tile), tl.load(tile_rows + tile)
    if expert < experts:
        row = first + tl.arange(0, block_rows)
        there = row < tl.load(starts + expert + 1)
        # Rows behind the expert's last read one that is there, and are not written.
        row = tl.where(there, row, first)
        source = tl.load(index + row) if gathers else row
        inside = column < columns
        inner = tl.arange(0, block_depth)
        left_place = left + source.to(tl.int64)[:, None] * left_row + inner[None, :]
        place = column.to(tl.int64)[None, :] * right_column + inner.to(tl.int64)[:, None] * right_depth
        right_place = right + expert.to(tl.int64) * right_expert + place
        total = tl.zeros((block_rows, block_columns), dtype=tl.float32)
        for begin in range(0, depth, block_depth):
            if whole_depth:
                one = tl.load(left_place)
            else:
                one = tl.load(left_place, mask=(inner < depth - begin)[None, :], other=0.0)
            if whole_depth and whole_columns:
                other = tl.load(right_place)
            else:
                other = tl.load(right_place, mask=(inner < depth - begin)[:, None] & inside[None, :], other=0.0)
            total = tl.dot(one, other, total, input_precision=precision)
            left_place += block_depth
            right_place += block_depth * right_depth
        if biased:
            total += tl.load(bias + expert * bias_expert + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        target = out + row.to(tl.int64)[:, None] * out_row + column[None, :]
        if adds:
            total += tl.load(target, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
        tl.store(target, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@kernel()
def _gated_kernel(
    left: tl.tensor,
    right: tl.tensor,
    bias: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    activated: tl.tensor,
    index: tl.tensor,
    starts: tl.tensor,
    tile_experts: tl.tensor,
    tile_rows: tl.tensor,
    experts: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    left_row: tl.tensor,
    right_expert: tl.tensor,
    right_column: tl.tensor,
    right_half: tl.tensor,
    bias_expert: tl.tensor,
    gate_row: tl.tensor,
    up_row: tl.tensor,
    activated_row: tl.tensor,
    kind: tl.constexpr,
    biased: tl.constexpr,
    whole_depth: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    across = tl.cdiv(columns, block_columns)
    tile = tl.program_id(0) // across
    first_column = (tl.program_id(0) % across) * block_columns
    column = first_column + tl.arange(0, block_columns)
    expert, first = tl.load(tile_experts + tile), tl.load(tile_rows + tile)
    if expert < experts:
        row = first + tl.arange(0, block_rows)
        there = row < tl.load(starts + expert + 1)
        row = tl.where(there, row, first)
        source = tl.load(index + row)
        inside = column < columns
        inner = tl.arange(0, block_depth)
        left_place = left + source.to(tl.int64)[:, None] * left_row + inner[None, :]
        # Columns behind the last read the first one, and are not written.
        real_column = tl.where(inside, column, 0)
        place = real_column.to(tl.int64)[None, :] * right_column + inner[:, None]
        gate_place = right + expert.to(tl.int64) * right_expert + place
        up_place = gate_place + right_half
        gates = tl.zeros((block_rows, block_columns), dtype=tl.float32)
        ups = tl.zeros((block_rows, block_columns), dtype=tl.float32)
        for begin in range(0, depth, block_depth):
            if whole_depth:
                one = tl.load(left_place)
                gate_matrix = tl.load(gate_place)
                up_matrix = tl.load(up_place)
            else:
                real = inner < depth - begin
                one = tl.load(left_place, mask=real[None, :], other=0.0)
                gate_matrix = tl.load(gate_place, mask=real[:, None], other=0.0)
                up_matrix = tl.load(up_place, mask=real[:, None], other=0.0)
            gates = tl.dot(one, gate_matrix, gates, input_precision=precision)
            ups = tl.dot(one, up_matrix, ups, input_precision=precision)
            left_place += block_depth
            gate_place += block_depth
            up_place += block_depth
        if biased:
            shift = bias + expert * bias_expert + column
            gates += tl.load(shift, mask=inside, other=0.0).to(tl.float32)[None, :]
            ups += tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        written = there[:, None] & inside[None, :]
        line = row.to(tl.int64)[:, None]
        gate_target, up_target = gate + line * gate_row + column[None, :], up + line * up_row + column[None, :]
        store_activated(
            gates, ups, gate_target, up_target, activated + line * activated_row + column[None, :], written, kind
        )


@kernel()
def _weigh_backward_kernel(
    made: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    weights: tl.tensor,
    sums: tl.tensor,
    width: tl.tensor,
    made_row: tl.tensor,
    gate_row: tl.tensor,
    up_row: tl.tensor,
    kind: tl.constexpr,
    gated: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(weights + row).to(tl.float32)
    found = tl.zeros((block,), dtype=tl.float32)
    for begin in range(0, width, block):
        column = begin + tl.arange(0, block)
        inside = column < width
        above = tl.load(made + row * made_row + column, mask=inside, other=0.0).to(tl.float32)
        ups = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
        weighted = above * share
        if gated:
            gates = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
            of_gate, of_up, result = gated_back(weighted, gates, ups, kind)
            tl.store(gate + row * gate_row + column, of_gate.to(gate.dtype.element_ty), mask=inside)
        else:
            result, slope = value_and_slope(ups, kind)
            of_up = weighted * slope
        found += above * result.to(made.dtype.element_ty).to(tl.float32)
        tl.store(up + row * up_row + column, of_up.to(up.dtype.element_ty), mask=inside)
        tl.store(made + row * made_row + column, (result * share).to(made.dtype.element_ty), mask=inside)
    tl.store(sums + row, tl.sum(found, 0))


@kernel()
def _wgrad_kernel(
    left: tl.tensor,
    right: tl.tensor,
    left_tiles: tl.tensor,
    right_tiles: tl.tensor,
    total: tl.tensor,
    index: tl.tensor,
    starts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    left_row: tl.tensor,
    right_row: tl.tensor,
    total_expert: tl.tensor,
    total_row: tl.tensor,
    gathers_left: tl.constexpr,
    gathers_right: tl.constexpr,
    described: tl.constexpr,
    whole: tl.constexpr,
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
    block_rows: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    across = tl.cdiv(inputs, block_inputs)
    tiles = tl.cdiv(outputs, block_outputs) * across
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    if first < last:
        first_output, first_column = (tile // across) * block_outputs, (tile % across) * block_inputs
        output, column = first_output + tl.arange(0, block_outputs), first_column + tl.arange(0, block_inputs)
        of_output, of_column = output < outputs, column < inputs
        found = tl.zeros((block_outputs, block_inputs), dtype=tl.float32)
        if described:
            # Whole tiles of rows; what is left of them, beside which another expert's lie, is read number by number.
            rest = first + (last - first) // block_rows * block_rows
            for begin in range(first, rest, block_rows):
                one = left_tiles.load([begin, first_output])
                other = right_tiles.load([begin, first_column])
                found = tl.dot(tl.trans(one), other, found, input_precision=precision)
            first = rest
        for begin in range(first, last, block_rows):
            row = begin + tl.arange(0, block_rows)
            there = row < last
            place = tl.load(index + row, mask=there, other=0) if gathers_left or gathers_right else row
            left_place = place if gathers_left else row
            right_place = place if gathers_right else row
            lefts = left + left_place.to(tl.int64)[:, None] * left_row + output[None, :]
            rights = right + right_place.to(tl.int64)[:, None] * right_row + column[None, :]
            if whole:
                one = tl.load(lefts, mask=there[:, None], other=0.0)
                other = tl.load(rights, mask=there[:, None], other=0.0)
            else:
                one = tl.load(lefts, mask=there[:, None] & of_output[None, :], other=0.0)
                other = tl.load(rights, mask=there[:, None] & of_column[None, :], other=0.0)
            found = tl.dot(tl.trans(one), other, found, input_precision=precision)
        target = total + expert.to(tl.int64) * total_expert + output.to(tl.int64)[:, None] * total_row
        target += column[None, :]
        written = of_output[:, None] & of_column[None, :]
        found += tl.load(target, mask=written, other=0.0).to(tl.float32)
        tl.store(target, found.to(total.dtype.element_ty), mask=written)


@kernel()
def _gathered_wgrad_kernel(
    left: tl.tensor,
    right: tl.tensor,
    total: tl.tensor,
    index: tl.tensor,
    starts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    gathered_row: tl.tensor,
    total_expert: tl.tensor,
    total_row: tl.tensor,
    gathers_left: tl.constexpr,
    whole: tl.constexpr,
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    across = tl.cdiv(inputs, block_inputs)
    tiles = tl.cdiv(outputs, block_outputs) * across
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    if first < last:
        first_output, first_column = (tile // across) * block_outputs, (tile % across) * block_inputs
        output, column = first_output + tl.arange(0, block_outputs), first_column + tl.arange(0, block_inputs)
        of_output, of_column = output < outputs, column < inputs
        target = total + expert.to(tl.int64) * total_expert + output.to(tl.int64)[:, None] * total_row
        target += column[None, :]
        written = None if whole else of_output[:, None] & of_column[None, :]
        # What is there is asked for first, so that it comes while the first rows do.
        found = tl.load(target, mask=written).to(tl.float32)
        # A tile's rows of another expert, on the side that is not gathered, meet zeros on the other one.
        for begin in range(first, last, block_rows):
            row = begin + tl.arange(0, block_rows)
            there = row < last
            place = tl.load(index + row, mask=there, other=0).to(tl.int64)[:, None] * gathered_row
            if gathers_left:
                read = there[:, None] if whole else there[:, None] & of_output[None, :]
                one = tl.load(left + place + output[None, :], mask=read, other=0.0)
                other = right.load([begin, first_column])
            else:
                read = there[:, None] if whole else there[:, None] & of_column[None, :]
                one = left.load([begin, first_output])
                other = tl.load(right + place + column[None, :], mask=read, other=0.0)
            found = tl.dot(tl.trans(one), other, found)
        tl.store(target, found.to(total.dtype.element_ty), mask=written)


@kernel()
def _bias_gradient_kernel(
    gradient: tl.tensor,
    weights: tl.tensor,
    total: tl.tensor,
    index: tl.tensor,
    starts: tl.tensor,
    width: tl.tensor,
    gradient_row: tl.tensor,
    total_expert: tl.tensor,
    weighted: tl.constexpr,
    lines: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    expert = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    first, last = tl.load(starts + expert), tl.load(starts + expert + 1)
    found = tl.zeros((lines, block), dtype=tl.float32)
    for begin in tl.range(first, last, lines, num_stages=stages):
        row = begin + tl.arange(0, lines)
        there = row < last
        place = tl.load(index + row, mask=there, other=0) if weighted else row
        read = there[:, None] & (column < width)[None, :]
        source = gradient + place.to(tl.int64)[:, None] * gradient_row + column[None, :]
        one = tl.load(source, mask=read, other=0.0).to(tl.float32)
        if weighted:
            one *= tl.load(weights + row, mask=there, other=0.0).to(tl.float32)[:, None]
        found += one
    target = total + expert * total_expert + column
    summed = tl.sum(found, 0) + tl.load(target, mask=column < width, other=0.0).to(tl.float32)
    tl.store(target, summed.to(total.dtype.element_ty), mask=column < width)


@kernel()
def _sum_rows_kernel(
    rows: tl.tensor,
    places: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    rows_row: tl.tensor,
    out_row: tl.tensor,
    choices: tl.constexpr,
    weighted: tl.constexpr,
    accumulate: tl.constexpr,
    block: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    target = out + token * out_row + column
    total = tl.zeros((block,), dtype=tl.float32)
    if accumulate:
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(choices):
        row = tl.load(places + token * choices + choice).to(tl.int64)
        value = tl.load(rows + row * rows_row + column, mask=inside, other=0.0).to(tl.float32)
        if weighted:
            value *= tl.load(weights + token * choices + choice).to(tl.float32)
        total += value
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@kernel()
def _lay_out_kernel(
    source: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    width: tl.tensor,
    source_row: tl.tensor,
    out_row: tl.tensor,
    choices: tl.constexpr,
    block: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    # Read once, however many experts have it.
    found = tl.load(source + token * source_row + column, mask=inside, other=0.0)
    for choice in tl.static_range(choices):
        row = tl.load(places + token * choices + choice).to(tl.int64)
        tl.store(out + row * out_row + column, found, mask=inside)


def lay_out(source: Tensor, routed: Routed, *, out: Tensor) -> None:
    """See `plain_experts.lay_out`."""
    (tokens, choices), width = routed.places.shape, source.shape[1]
    block = column_block(width, 2048)
    _lay_out_kernel[(tokens, triton.cdiv(width, block))](
        source,
        out,
        routed.places,
        width,
        source.stride(0),
        out.stride(0),
        choices=choices,
        block=block,
        num_warps=4,
    )


def sum_rows(rows: Tensor, routed: Routed, weights: Tensor | None, *, out: Tensor, accumulate: bool) -> None:
    """See `plain_experts.sum_rows`."""
    tokens, width = out.shape
    block = column_block(width, 1024)
    _sum_rows_kernel[(tokens, triton.cdiv(width, block))](
        rows,
        routed.places,
        routed.places if weights is None else weights,
        out,
        width,
        rows.stride(0),
        out.stride(0),
        choices=routed.places.shape[1],
        weighted=weights is not None,
        accumulate=accumulate,
        block=block,
        num_warps=4,
    )


def product(
    source: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    routed: Routed,
    *,
    out: Tensor,
    gathers: bool = False,
    back: bool = False,
    add: bool = False,
    tile: ExpertTile | None = None,
) -> None:
    """See `plain_experts.product`."""
    if is_described(matrix) and (gathers or is_described(source)):
        fused_flat_experts.product(
            source, matrix, bias, routed, out=out, gathers=gathers, back=back, add=add, tile=tile or FLAT_TILE
        )
        return
    tile, precision = tile_for(tile or PRODUCT_TILE, source)
    tiles, columns, depth = routed.cut(tile.rows), out.shape[1], source.shape[1]
    tile = tile._replace(columns=within(tile.columns, columns), depth=within(tile.depth, depth))
    of_expert, of_output, of_input = matrix.stride()
    _product_kernel[(tiles.count * triton.cdiv(columns, tile.columns),)](
        source,
        matrix,
        matrix if bias is None else bias,
        out,
        routed.tokens,
        routed.starts,
        tiles.experts,
        tiles.first_rows,
        routed.experts,
        columns,
        depth,
        source.stride(0),
        of_expert,
        of_input if back else of_output,
        of_output if back else of_input,
        0 if bias is None else bias.stride(0),
        out.stride(0),
        gathers=gathers,
        biased=bias is not None,
        adds=add,
        whole_depth=depth % tile.depth == 0,
        whole_columns=columns % tile.columns == 0,
        block_rows=tile.rows,
        block_columns=tile.columns,
        block_depth=tile.depth,
        precision=precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def gated_product(
    source: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    routed: Routed,
    *,
    kind: str,
    gate: Tensor,
    up: Tensor,
    activated: Tensor,
    tile: ExpertTile | None = None,
) -> None:
    """See `plain_experts.gated_product`."""
    assert matrix.stride(2) == 1
    if is_described(matrix):
        fused_flat_experts.gated_product(
            source, matrix, bias, routed, kind=kind, gate=gate, up=up, activated=activated, tile=tile or FLAT_GATED_TILE
        )
        return
    tile, precision = tile_for(tile or GATED_TILE, source)
    tiles, columns, depth = routed.cut(tile.rows), gate.shape[1], source.shape[1]
    _gated_kernel[(tiles.count * triton.cdiv(columns, tile.columns),)](
        source,
        matrix,
        matrix if bias is None else bias,
        gate,
        up,
        activated,
        routed.tokens,
        routed.starts,
        tiles.experts,
        tiles.first_rows,
        routed.experts,
        columns,
        depth,
        source.stride(0),
        matrix.stride(0),
        matrix.stride(1),
        columns * matrix.stride(1),
        0 if bias is None else bias.stride(0),
        gate.stride(0),
        up.stride(0),
        activated.stride(0),
        kind=kind,
        biased=bias is not None,
        whole_depth=depth % tile.depth == 0,
        block_rows=tile.rows,
        block_columns=tile.columns,
        block_depth=tile.depth,
        precision=precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def weigh_backward(kind: str, made: Tensor, gate: Tensor | None, up: Tensor, weights: Tensor) -> Tensor:
    """See `plain_experts.weigh_backward`."""
    rows, width = made.shape
    sums = torch.empty(rows, dtype=torch.float32, device=made.device)
    given = up if gate is None else gate
    _weigh_backward_kernel[(rows,)](
        made,
        given,
        up,
        weights,
        sums,
        width,
        made.stride(0),
        given.stride(0),
        up.stride(0),
        kind=kind,
        gated=gate is not None,
        block=column_block(width, 1024),
        num_warps=4,
    )
    return sums


def wgrad(
    gradient: Tensor, source: Tensor, routed: Routed, *, total: Tensor, gathers: str, tile: ExpertTile | None = None
) -> None:
    """See `plain_experts.wgrad`."""
    lying = [each for each, name in ((gradient, "gradient"), (source, "source")) if name != gathers]
    described = all(is_described(each) for each in lying)
    if gathers and described:
        _wgrad_gathered(gradient, source, routed, total=total, gathers=gathers, tile=tile or GATHERED_WGRAD_TILE)
        return
    tile, precision = tile_for(tile or (LAID_WGRAD_TILE if described else WGRAD_TILE), gradient)
    tile, programs, whole = _cut_matrices(tile, total)
    _wgrad_kernel[(programs,)](
        gradient,
        source,
        TensorDescriptor.from_tensor(gradient, [tile.depth, tile.rows]) if described else gradient,
        TensorDescriptor.from_tensor(source, [tile.depth, tile.columns]) if described else source,
        total,
        routed.tokens,
        routed.starts,
        *total.shape[1:],
        gradient.stride(0),
        source.stride(0),
        total.stride(0),
        total.stride(1),
        gathers_left=gathers == "gradient",
        gathers_right=gathers == "source",
        described=described,
        whole=whole,
        block_outputs=tile.rows,
        block_inputs=tile.columns,
        block_rows=tile.depth,
        precision=precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _wgrad_gathered(
    gradient: Tensor, source: Tensor, routed: Routed, *, total: Tensor, gathers: str, tile: ExpertTile
) -> None:
    """As `wgrad`, by a descriptor of the side that is not gathered."""
    tile, programs, whole = _cut_matrices(tile, total)
    of_left = gathers == "gradient"
    _gathered_wgrad_kernel[(programs,)](
        gradient if of_left else TensorDescriptor.from_tensor(gradient, [tile.depth, tile.rows]),
        TensorDescriptor.from_tensor(source, [tile.depth, tile.columns]) if of_left else source,
        total,
        routed.tokens,
        routed.starts,
        *total.shape[1:],
        (gradient if of_left else source).stride(0),
        total.stride(0),
        total.stride(1),
        gathers_left=of_left,
        whole=whole,
        block_outputs=tile.rows,
        block_inputs=tile.columns,
        block_rows=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _cut_matrices(tile: ExpertTile, total: Tensor) -> tuple[ExpertTile, int, bool]:
    """A tile no larger than a matrix, how many of them all matrices take, and whether they cover these exactly."""
    experts, outputs, inputs = total.shape
    assert total.stride(2) == 1
    tile = tile._replace(rows=within(tile.rows, outputs), columns=within(tile.columns, inputs))
    programs = experts * triton.cdiv(outputs, tile.rows) * triton.cdiv(inputs, tile.columns)
    return tile, programs, outputs % tile.rows == 0 and inputs % tile.columns == 0


def bias_gradient(gradient: Tensor, routed: Routed, *, weights: Tensor | None, total: Tensor) -> None:
    """See `plain_experts.bias_gradient`."""
    tile, width = BIAS_TILE, total.shape[1]
    _bias_gradient_kernel[(routed.experts, triton.cdiv(width, tile.columns))](
        gradient,
        gradient if weights is None else weights,
        total,
        routed.tokens,
        routed.starts,
        width,
        gradient.stride(0),
        total.stride(0),
        weighted=weights is not None,
        lines=tile.rows,
        block=tile.columns,
        stages=tile.stages,
        num_warps=tile.warps,
    )
