"""Matrices in MXFP4, as gpt-oss is released, brought back exactly: four bits a number, a power of two for each 32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from flopwise.base.errors import FlopwiseError

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of what is kept of a matrix."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of a number's lower three bits (E2M1); the fourth is its sign."""
BIAS = 127
"""Of a scale's exponent."""


class Dequantised(Mapping[str, Tensor]):
    """Tensors of a file, those in MXFP4 under the names that the matrices have without it, in bf16.

    Each is brought back when it is asked for, so that no more than one lies in memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._packed = {
            name.removesuffix(BLOCKS)
            for name in tensors
            if name.endswith(BLOCKS) and f"{name.removesuffix(BLOCKS)}{SCALES}" in tensors
        }

    def __getitem__(self, name: str) -> Tensor:
        if name in self._packed:
            return dequantise(self._tensors[f"{name}{BLOCKS}"], self._tensors[f"{name}{SCALES}"], name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        hidden = {f"{name}{end}" for name in self._packed for end in (BLOCKS, SCALES)}
        yield from (name for name in self._tensors if name not in hidden)
        yield from self._packed

    def __len__(self) -> int:
        return len(self._tensors) - len(self._packed)


def dequantise(blocks: Tensor, scales: Tensor, name: str) -> Tensor:
    """(experts, outputs, blocks, 16) of two numbers a byte and a scale for each block → (experts, inputs, outputs)."""
    packed = blocks.dtype == scales.dtype == torch.uint8 and blocks.ndim == 4
    if not packed or blocks.shape[:3] != scales.shape:
        raise FlopwiseError(
            f"{name}: blocks and scales are not those of MXFP4",
            why="there are 16 bytes and one byte of scale for each 32 numbers",
            hint="save the model in bf16 with transformers: from_pretrained(…, dtype='bfloat16'), save_pretrained",
        )
    table = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.bfloat16)
    out = torch.empty((blocks.shape[0], 32 * blocks.shape[2], blocks.shape[1]), dtype=torch.bfloat16)
    for expert, (bytes_, powers) in enumerate(zip(blocks, scales, strict=True)):
        # The lower half of a byte comes first.
        pairs = torch.stack((table[(bytes_ & 15).int()], table[(bytes_ >> 4).int()]), -1).flatten(-2)
        out[expert] = torch.ldexp(pairs, powers.int().sub_(BIAS)[..., None]).flatten(-2).t()
    return out
