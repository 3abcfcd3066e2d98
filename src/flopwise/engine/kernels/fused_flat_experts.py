"""Products of experts whose matrices a descriptor copies, by as many programs as a GPU has multiprocessors.

A program makes tile after tile: the loop over tiles and that over a tile's depth are one to Triton's compiler, so that
the next tile's numbers are on their way while this one's are written. Gate and up are one product, of twice as many
columns.
"""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found, unused-ignore]

from flopwise.engine.kernels.expert_tiles import ExpertTile, within
from flopwise.engine.kernels.experts import Routed
from flopwise.engine.kernels.fused_activations import gated_value
from flopwise.engine.kernels.jit import column_block, kernel, multiprocessors


@kernel()
def _count_tiles(starts: tl.tensor, experts: tl.tensor, height: tl.constexpr, experts_block: tl.constexpr) -> tl.tensor:
    """Tiles of all experts that have rows."""
    each = tl.arange(0, experts_block)
    inside = each < experts
    first = tl.load(starts + each, mask=inside, other=0)
    rows = tl.load(starts + each + 1, mask=inside, other=0) - first
    return tl.sum((rows + (height - 1)) // height, 0)


@kernel()
def _flat_product_kernel(
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
    bias_expert: tl.tensor,
    out_row: tl.tensor,
    gathers: tl.constexpr,
    biased: tl.constexpr,
    adds: tl.constexpr,
    back: tl.constexpr,
    whole_depth: tl.constexpr,
    experts_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
) -> None:
    across = tl.cdiv(columns, block_columns)
    tiles = _count_tiles(starts, experts, block_rows, experts_block) * across
    inner = tl.arange(0, block_depth)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile = number // across
        first_column = (number % across) * block_columns
        expert, first = tl.load(tile_experts + tile), tl.load(tile_rows + tile)
        row = first + tl.arange(0, block_rows)
        there = row < tl.load(starts + expert + 1)
        # Rows behind the expert's last read one that is there, and are not written.
        row = tl.where(there, row, first)
        if gathers:
            place = left + tl.load(index + row).to(tl.int64)[:, None] * left_row + inner[None, :]
        total = tl.zeros((block_rows, block_columns), dtype=tl.float32)
        for begin in range(0, depth, block_depth):
            if gathers and whole_depth:
                one = tl.load(place + begin)
            elif gathers:
                one = tl.load(place + begin, mask=(inner < depth - begin)[None, :], other=0.0)
            else:
                one = left.load([first, begin])
            if back:
                other = right.load([expert, begin, first_column]).reshape(block_depth, block_columns)
            else:
                other = tl.trans(right.load([expert, first_column, begin]).reshape(block_columns, block_depth))
            total = tl.dot(one, other, total)
        column = first_column + tl.arange(0, block_columns)
        inside = column < columns
        if biased:
            total += tl.load(bias + expert * bias_expert + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        target = out + row.to(tl.int64)[:, None] * out_row + column[None, :]
        if adds:
            total += tl.load(target, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
        tl.store(target, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@kernel()
def store_activated(
    gates: tl.tensor,
    ups: tl.tensor,
    gate_place: tl.tensor,
    up_place: tl.tensor,
    place: tl.tensor,
    written: tl.tensor,
    kind: tl.constexpr,
) -> None:
    """Gate, up, and what the activation makes of them, which reads what is kept, so that backward makes the same."""
    kept_gate, kept_up = gates.to(gate_place.dtype.element_ty), ups.to(up_place.dtype.element_ty)
    tl.store(gate_place, kept_gate, mask=written)
    tl.store(up_place, kept_up, mask=written)
    result = gated_value(kept_gate.to(tl.float32), kept_up.to(tl.float32), kind)
    tl.store(place, result.to(place.dtype.element_ty), mask=written)


@kernel()
def _flat_gated_kernel(
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
    bias_expert: tl.tensor,
    gate_row: tl.tensor,
    up_row: tl.tensor,
    activated_row: tl.tensor,
    kind: tl.constexpr,
    biased: tl.constexpr,
    whole_depth: tl.constexpr,
    experts_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
) -> None:
    across = tl.cdiv(columns, block_columns)
    tiles = _count_tiles(starts, experts, block_rows, experts_block) * across
    inner = tl.arange(0, block_depth)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile = number // across
        first_column = (number % across) * block_columns
        expert, first = tl.load(tile_experts + tile), tl.load(tile_rows + tile)
        row = first + tl.arange(0, block_rows)
        there = row < tl.load(starts + expert + 1)
        row = tl.where(there, row, first)
        place = left + tl.load(index + row).to(tl.int64)[:, None] * left_row + inner[None, :]
        both = tl.zeros((block_rows, 2 * block_columns), dtype=tl.float32)
        for begin in range(0, depth, block_depth):
            if whole_depth:
                one = tl.load(place + begin)
            else:
                one = tl.load(place + begin, mask=(inner < depth - begin)[None, :], other=0.0)
            halves = right.load([expert, 0, first_column, begin]).reshape(2 * block_columns, block_depth)
            both = tl.dot(one, tl.trans(halves), both)
        gates, ups = tl.split(tl.permute(both.reshape(block_rows, 2, block_columns), (0, 2, 1)))
        column = first_column + tl.arange(0, block_columns)
        inside = column < columns
        if biased:
            shift = bias + expert * bias_expert + column
            gates += tl.load(shift, mask=inside, other=0.0).to(tl.float32)[None, :]
            ups += tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        written, line = there[:, None] & inside[None, :], row.to(tl.int64)[:, None]
        gate_place, up_place = gate + line * gate_row + column[None, :], up + line * up_row + column[None, :]
        store_activated(
            gates, ups, gate_place, up_place, activated + line * activated_row + column[None, :], written, kind
        )


def product(
    source: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    routed: Routed,
    *,
    out: Tensor,
    gathers: bool,
    back: bool,
    add: bool,
    tile: ExpertTile,
) -> None:
    """See `plain_experts.product`."""
    tiles, columns, depth = routed.cut(tile.rows), out.shape[1], source.shape[1]
    tile = tile._replace(columns=within(tile.columns, columns), depth=within(tile.depth, depth))
    block = [1, tile.depth, tile.columns] if back else [1, tile.columns, tile.depth]
    programs = min(multiprocessors(out.device), tiles.count * triton.cdiv(columns, tile.columns))
    _flat_product_kernel[(programs,)](
        source if gathers else TensorDescriptor.from_tensor(source, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(matrix, block),
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
        0 if bias is None else bias.stride(0),
        out.stride(0),
        gathers=gathers,
        biased=bias is not None,
        adds=add,
        back=back,
        whole_depth=depth % tile.depth == 0,
        experts_block=column_block(routed.experts, 1 << 30),
        block_rows=tile.rows,
        block_columns=tile.columns,
        block_depth=tile.depth,
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
    tile: ExpertTile,
) -> None:
    """See `plain_experts.gated_product`."""
    tiles, columns, depth = routed.cut(tile.rows), gate.shape[1], source.shape[1]
    programs = min(multiprocessors(gate.device), tiles.count * triton.cdiv(columns, tile.columns))
    halves = matrix.view(routed.experts, 2, columns, depth)
    _flat_gated_kernel[(programs,)](
        source,
        TensorDescriptor.from_tensor(halves, [1, 2, tile.columns, tile.depth]),
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
        0 if bias is None else bias.stride(0),
        gate.stride(0),
        up.stride(0),
        activated.stride(0),
        kind=kind,
        biased=bias is not None,
        whole_depth=depth % tile.depth == 0,
        experts_block=column_block(routed.experts, 1 << 30),
        block_rows=tile.rows,
        block_columns=tile.columns,
        block_depth=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
