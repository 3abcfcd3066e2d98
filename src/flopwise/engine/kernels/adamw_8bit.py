"""AdamW whose moments are kept in 8 bits, in blocks (arXiv 2110.02861), in plain torch.

Of 256 neighbours the largest absolute value is kept in fp32 as their scale, and of each number the place of its share
of that in a table of 256 values: the "dynamic" tables of bitsandbytes' `create_dynamic_map`, one with signs for the
first moment and one without for the second. The seven decades below 1 have 1, 2, 4 … 64 values of each sign (twice as
many without signs), evenly spaced; 0 and 1 belong to both. A number becomes the nearest value, of two as near the lower
one.

The update itself is that of `adamw`, from the moments as they were read and before they are rounded again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flopwise.engine.kernels.adamw import advance
from flopwise.engine.kernels.blocks import row_blocks
from flopwise.engine.kernels.updating import UpdateSettings, store_weights, update_type
from flopwise.work.optimizers import QUANTISED_BLOCK

DECADES = 7
VALUES = 256


@dataclass(frozen=True, slots=True)
class Codes:
    """Both moments of neighbouring numbers: places in the tables, and scales of the blocks."""

    first: Tensor
    first_scale: Tensor
    second: Tensor
    second_scale: Tensor


@lru_cache(maxsize=16)
def table(device: torch.device, *, signed: bool) -> Tensor:
    """The values in ascending order, in fp32."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float32)
        means = 10.0 ** (decade - DECADES + 1) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means.tolist(), *((-means).tolist() if signed else [])]
    assert len(values) == VALUES
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def borders(device: torch.device, *, signed: bool) -> Tensor:
    """Halfway between neighbouring values: up to each of them, itself included, a number becomes the lower one."""
    values = table(device, signed=signed)
    return (values[:-1] + values[1:]) / 2


def dequantise(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The numbers of whole blocks, of which the last may be short, in fp32."""
    values = table(codes.device, signed=signed)[codes.int()]
    return values.mul_(scales.repeat_interleave(QUANTISED_BLOCK)[: len(codes)])


def quantise(values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
    """Write the codes and the scales of whole blocks, of which the last may be short."""
    filled_up = values.new_zeros(len(scales) * QUANTISED_BLOCK, dtype=torch.float32)
    filled_up[: len(values)] = values
    blocks = filled_up.view(len(scales), QUANTISED_BLOCK)
    torch.amax(blocks.abs(), dim=1, out=scales)
    # Of a block of zeros every share is 0.
    blocks.div_(torch.where(scales > 0, scales, 1.0)[:, None])
    codes.copy_(torch.bucketize(filled_up[: len(values)], borders(values.device, signed=signed), out_int32=True))


def adamw_8bit(
    weights: Tensor,
    gradients: Tensor,
    codes: Codes,
    master: Tensor | None,
    *,
    settings: UpdateSettings,
    offset: int,
) -> None:
    """One step over a piece that begins with a block, and whose first number is number `offset` of all."""
    wide = update_type(weights, master)
    start = master if master is not None else weights
    for block in row_blocks(len(codes.first_scale), QUANTISED_BLOCK * wide.itemsize, 12):
        place = slice(block.start * QUANTISED_BLOCK, min(len(weights), block.stop * QUANTISED_BLOCK))
        scales = codes.first_scale[block], codes.second_scale[block]
        mean = dequantise(codes.first[place], scales[0], signed=True).to(wide)
        square = dequantise(codes.second[place], scales[1], signed=False).to(wide)
        updated = advance(gradients[place], mean, square, start[place], settings)
        quantise(mean, codes.first[place], scales[0], signed=True)
        quantise(square, codes.second[place], scales[1], signed=False)
        store_weights(weights, master, place, updated, settings=settings, offset=offset)
