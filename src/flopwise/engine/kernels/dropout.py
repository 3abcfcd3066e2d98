"""Dropout in plain torch: which numbers of a row training sets to zero, drawn anew wherever they are needed.

A number is dropped where 32 bits that are hashed from its place (see `rounding`) are below its share of 2³². The upper
half of the place is the token's number among all of the step's batch, the lower half its column; of attention's weights
token · heads + head, and the key's place in its sequence. So a mask depends neither on how a batch is cut, padded or
kept, nor on whether a step is replayed; the two keys follow from seed, step, layer and site.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flopwise.engine.kernels.blocks import compute_type, row_blocks
from flopwise.engine.kernels.rounding import place_bits


@dataclass(frozen=True, slots=True)
class DropMask:
    """What is dropped of some rows at one site."""

    share: float
    """The probability."""
    keys: Tensor
    """Two words of int32, read where they lie: a captured step finds those of its own there."""
    tokens: Tensor
    """int32: each row's token."""

    @property
    def threshold(self) -> int:
        """Bits below this are those of a number that is dropped."""
        return round(self.share * 2**32)

    @property
    def scale(self) -> float:
        """What is kept is multiplied by this, so that the mean stays."""
        return 1.0 / (1.0 - self.share)

    def scales(self, high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
        """What to multiply numbers by, `scale` or zero, from the halves of their places."""
        kept = place_bits(low, high, self.keys.to(torch.int64)) >= self.threshold
        return kept.to(dtype).mul_(self.scale)


def dropout(source: Tensor, mask: DropMask, *, out: Tensor, other: Tensor | None = None) -> None:
    """`out`, which may be `source` or `other`, gets what is kept of `source`, added to `other` where there is one."""
    rows, width = source.shape
    wide = compute_type(source.dtype)
    columns = torch.arange(width, device=source.device)
    # The hash runs in integers of 8 bytes.
    for block in row_blocks(rows, 8 * width, 4):
        values = source[block].to(wide) * row_scales(mask, block, columns, wide)
        out[block] = values if other is None else values + other[block]


def row_scales(mask: DropMask, rows: slice, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """What to multiply some rows by."""
    return mask.scales(mask.tokens[rows, None].to(torch.int64), columns, dtype)


def attention_scales(
    mask: DropMask, rows: slice, heads: Tensor, columns: slice, *, all_heads: int, dtype: torch.dtype
) -> Tensor:
    """What to multiply softmax weights by, (heads, rows, keys), by the numbers of some heads."""
    of_rows = mask.tokens[rows].to(torch.int64) * all_heads
    keys = torch.arange(columns.start, columns.stop, device=heads.device)
    return mask.scales(of_rows[None, :, None] + heads[:, None, None], keys, dtype)
