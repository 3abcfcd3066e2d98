"""Frozen matrices in fewer bits: NF4 and int8 as bitsandbytes has them, made once and dequantised where they are used.

NF4 (arXiv 2305.14314): the nearest of sixteen quantiles of a normal distribution, times the largest of 64 neighbours in
a row; two to a byte, the first in its upper half. int8: a row's numbers over its largest, in 127 steps. fp8: the same
as e4m3, whose largest is 448.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from flopwise.engine.kernels.blocks import has_triton
from flopwise.work.formats import QUANTISED_BITS, QUANTISED_BLOCK, SCALE_BYTES, quantised_bytes

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""bitsandbytes' table."""
LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}
"""What a row's largest number becomes."""
AT_ONCE = 1 << 22
"""Numbers that the plain forms take at once: their temporaries are several times as large."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix (outputs, inputs) in a piece of memory, or one for each expert: codes by rows, their scales in fp32."""

    codes: Tensor
    scales: Tensor
    depth: int
    kind: str
    experts: int = 0
    """Matrices behind each other; 0: one, without a dimension for it."""

    @classmethod
    def within(cls, buffer: Tensor, shape: tuple[int, ...], kind: str) -> Quantised:
        """One of that shape in the first bytes of a buffer: its scales, and its codes behind them."""
        *lead, outputs, depth = shape
        rows = prod(lead) * outputs
        blocks = -(-depth // (QUANTISED_BLOCK[kind] or depth))
        behind = rows * blocks * SCALE_BYTES
        whole = quantised_bytes(rows, depth, kind)
        scales = buffer[:behind].view(torch.float32).view(rows, blocks)
        # Also of no rows at all, as the last ranks may have.
        width = quantised_bytes(1, depth, kind) - blocks * SCALE_BYTES
        return cls(buffer[behind:whole].view(rows, width), scales, depth, kind, *lead)

    @property
    def count(self) -> int:
        """Rows of all its matrices."""
        return self.codes.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.experts, self.count // self.experts, self.depth) if self.experts else (self.count, self.depth)

    @property
    def bytes(self) -> int:
        """Of codes and scales."""
        return quantised_bytes(self.count, self.depth, self.kind)

    def rows(self, rows: slice) -> Quantised:
        """Some of its rows."""
        return Quantised(self.codes[rows], self.scales[rows], self.depth, self.kind)

    def quantise(self, values: Tensor) -> None:
        """Take over these numbers, a few rows at a time."""
        each, values = max(1, AT_ONCE // self.depth), values.reshape(-1, self.depth)
        for first in range(0, self.count, each):
            piece = slice(first, first + each)
            codes, scales = _quantise(values[piece].float(), self.kind)
            self.codes[piece].copy_(codes)
            self.scales[piece].copy_(scales)

    def dequantise(self, *, out: Tensor) -> Tensor:
        """Its numbers, rounded to the format of `out`."""
        if self.codes.is_cuda and has_triton():
            from flopwise.engine.kernels import fused_quantised

            rows, table = out.view(-1, self.depth), nf4_table(out.device)
            fused_quantised.dequantise(self.codes, self.scales, kind=self.kind, table=table, out=rows)
            return out
        each = max(1, AT_ONCE // self.depth)
        for first in range(0, self.count, each):
            piece = self.rows(slice(first, first + each))
            out.view(-1, self.depth)[first : first + each].copy_(_dequantise(piece))
        return out


@lru_cache(maxsize=8)
def nf4_table(device: torch.device) -> Tensor:
    """The sixteen values, on a device."""
    return torch.tensor(NF4_VALUES, dtype=torch.float32, device=device)


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """(rows, blocks, numbers of a block), filled up with zeros."""
    filled = torch.nn.functional.pad(values, (0, -values.shape[1] % block))
    return filled.view(values.shape[0], -1, block)


def _quantise(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    rows, depth = values.shape
    blocks = _in_blocks(values, QUANTISED_BLOCK[kind] or depth)
    scales = blocks.abs().amax(-1)
    shares = blocks / scales.unsqueeze(-1).clamp(min=torch.finfo(torch.float32).tiny)
    if kind in LARGEST_CODE:
        steps = (shares * LARGEST_CODE[kind]).view(rows, -1)
        codes = steps.round().to(torch.int8) if kind == "int8" else steps.to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), scales
    table = nf4_table(values.device)
    # What is in the middle of two values is the lower one's.
    nearest = torch.bucketize(shares, (table[1:] + table[:-1]) / 2).to(torch.uint8).view(rows, -1)
    nearest = nearest[:, : depth + depth % 2]
    return nearest[:, 0::2] << QUANTISED_BITS["nf4"] | nearest[:, 1::2], scales


def _dequantise(matrix: Quantised) -> Tensor:
    rows, depth = matrix.count, matrix.depth
    if matrix.kind in LARGEST_CODE:
        codes = matrix.codes.view(torch.int8 if matrix.kind == "int8" else torch.float8_e4m3fn)
        return codes.float() * (matrix.scales / LARGEST_CODE[matrix.kind])
    low = torch.stack((matrix.codes >> QUANTISED_BITS["nf4"], matrix.codes & 15), dim=-1).view(rows, -1)
    block = QUANTISED_BLOCK["nf4"] or depth
    values = _in_blocks(nf4_table(matrix.codes.device)[low.int()], block) * matrix.scales.unsqueeze(-1)
    return values.view(rows, -1)[:, :depth]
