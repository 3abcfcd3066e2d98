"""Optimizers as others have them: torch's own, and published formulas written out plainly."""

from __future__ import annotations

import torch
from torch import Tensor

SIGNED_VALUES = {
    0: -0.992968738079071,
    1: -0.9789062738418579,
    7: -0.89453125,
    36: -0.48671871423721313,
    63: -0.10703125596046448,
    64: -0.09859374910593033,
    95: -0.011406250298023224,
    96: -0.009718749672174454,
    111: -0.001281249918974936,
    112: -0.0009437500848434865,
    119: -0.00015625001105945557,
    120: -8.874999912222847e-05,
    124: -7.749999895168003e-06,
    125: -3.250000190746505e-06,
    126: -5.500000384017767e-07,
    127: 0.0,
    128: 5.500000384017767e-07,
    129: 3.250000190746505e-06,
    130: 7.749999895168003e-06,
    131: 2.1249998098937795e-05,
    150: 0.0052187503315508366,
    191: 0.10703125596046448,
    253: 0.9789062738418579,
    254: 0.992968738079071,
    255: 1.0,
}
"""Place → value of bitsandbytes' table with signs, as it is listed in models quantised with it."""


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """The place of the nearest of a table's values, of two as near the lower one."""
    return (values[:, None].double() - table[None, :].double()).abs().argmin(dim=1)


class BlockwiseAdamW:
    """AdamW of one tensor with both moments in 8 bits, a block of 256 at a time."""

    def __init__(self, count: int, tables: tuple[Tensor, Tensor]) -> None:
        self.tables = tables
        blocks = -(-count // 256)
        self.codes = [torch.zeros(count, dtype=torch.uint8) for _ in tables]
        self.scales = [torch.zeros(blocks, dtype=torch.float32) for _ in tables]

    def step(self, weights: Tensor, gradient: Tensor, *, step: int, rate: float, betas: tuple[float, float]) -> Tensor:
        """The weights a step on, with epsilon 1e-8 and a weight decay of 0.1."""
        updated = weights.clone()
        for block in range(len(self.scales[0])):
            place = slice(256 * block, 256 * (block + 1))
            mean, square = (
                table[codes[place].long()] * scales[block]
                for table, codes, scales in zip(self.tables, self.codes, self.scales, strict=True)
            )
            each = gradient[place]
            mean = mean.to(each.dtype) * betas[0] + each * (1 - betas[0])
            square = square.to(each.dtype) * betas[1] + each * each * (1 - betas[1])
            root = square.sqrt() * (1 / (1 - betas[1] ** step) ** 0.5) + 1e-8
            updated[place] = weights[place] * (1 - rate * 0.1) - mean / root * (rate / (1 - betas[0] ** step))
            for index, moment in enumerate((mean.float(), square.float())):
                scale = moment.abs().max()
                self.scales[index][block] = scale
                shares = moment / scale if scale > 0 else torch.zeros_like(moment)
                self.codes[index][place] = nearest(shares, self.tables[index]).to(torch.uint8)
        return updated
