"""How products of experts are cut into tiles, and whose tiles a descriptor copies."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver  # type: ignore[import-not-found, unused-ignore]

from flopwise.engine.kernels.jit import column_block


class ExpertTile(NamedTuple):
    """How a product of experts is cut."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FLAT_TILE = ExpertTile(128, 256, 64, 8, 4)
FLAT_GATED_TILE = ExpertTile(128, 128, 64, 8, 4)
"""Of gate and of up each."""
PRODUCT_TILE = ExpertTile(128, 256, 64, 8, 3)
GATED_TILE = ExpertTile(128, 128, 64, 8, 3)
"""Where no descriptor copies."""
LAID_WGRAD_TILE = ExpertTile(128, 128, 64, 4, 3)
GATHERED_WGRAD_TILE = ExpertTile(128, 256, 64, 8, 5)
"""Of a matrix, and of rows at a time. Indices are read before the rows: with five stages three tiles lie ready."""
WGRAD_TILE = ExpertTile(128, 128, 32, 4, 5)
"""Where no descriptor copies."""
WIDE_TILE = ExpertTile(32, 64, 32, 4, 2)
"""Of float32, whose products are no matrix unit's."""
BIAS_TILE = ExpertTile(128, 64, 0, 4, 3)
"""Rows and columns that a program adds up at once."""


def tile_for(tile: ExpertTile, source: Tensor) -> tuple[ExpertTile, str]:
    """A tile as the numbers' type allows, and how exactly they are multiplied."""
    return (WIDE_TILE, "ieee") if source.dtype == torch.float32 else (tile, "tf32")


def within(block: int, side: int) -> int:
    """A block no wider than what it covers: adapters are 16 wide, where a tile is 256. A matrix unit takes 16."""
    return column_block(max(16, side), block)


FLAT_BYTES = 225 << 10
"""Of a multiprocessor's memory, for four stages of 48 KiB each and 32 KiB of results on their way out."""


@cache
def has_room(device: torch.device) -> bool:
    """Whether a GPU copies tiles by descriptors and has room for those of `fused_flat_experts`.

    Hopper's and the large cards of Blackwell have 227 KiB, the small ones 99.
    """
    card = driver.active.utils.get_device_properties(device.index)
    return torch.cuda.get_device_capability(device)[0] >= 9 and card["max_shared_mem"] >= FLAT_BYTES


LINE_BYTES = 16
"""Rows that are copied as tiles begin at multiples of this."""


def is_described(tensor: Tensor) -> bool:
    """Whether a tensor's tiles can be copied by a descriptor."""
    if tensor.dtype == torch.float32 or tensor.stride(-1) != 1:
        return False
    if tensor.is_cuda and not has_room(tensor.device):
        return False
    lines = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1])]
    return all(place % LINE_BYTES == 0 for place in lines)
