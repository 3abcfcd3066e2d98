"""AdamW over flat pieces of a model's numbers, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flopwise.engine.kernels.blocks import row_blocks
from flopwise.engine.kernels.rounding import FIRST, SECOND, WEIGHTS, Seed, random_bits, round_by_chance

BITS_OF_STEP = 9
"""Words that `AdamW.bits_of_step` has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """One step's settings."""

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    step: int
    """Counted from 1: what the moments' bias is corrected by."""
    gradient_scale: Tensor | float = 1.0
    """What gradients are multiplied by first, to clip them; a tensor of no dimensions where only the device knows."""
    rounding: Seed | None = None
    """Whether weights and moments kept in bf16 are rounded by chance; None: to the nearest."""
    numbers: Tensor | None = None
    """`bits_of_step` on the device that updates, where a captured step finds those of its own; None: as arguments."""

    @property
    def kept(self) -> float:
        """What weight decay leaves of a weight."""
        return 1.0 - self.rate * self.weight_decay

    @property
    def step_size(self) -> float:
        return self.rate / (1.0 - self.beta1**self.step)

    @property
    def root_scale(self) -> float:
        """What the root of the second moment is multiplied by."""
        return 1.0 / sqrt(1.0 - self.beta2**self.step)

    def bits_of_step(self) -> NDArray[np.int32]:
        """What changes from step to step as words of 32 bits: three fp32 numbers, then two keys for each tensor."""
        numbers = np.array([self.kept, self.step_size, self.root_scale], dtype=np.float32)
        keys = [
            self.rounding.keys(self.step, tensor) if self.rounding else (0, 0) for tensor in (WEIGHTS, FIRST, SECOND)
        ]
        return np.concatenate([numbers.view(np.int32), np.array(keys, dtype=np.uint32).reshape(-1).view(np.int32)])


def update_type(weights: Tensor, master: Tensor | None) -> torch.dtype:
    """What the update runs in: float64 where weights or their master are, else float32."""
    wide = torch.float64 in (weights.dtype, None if master is None else master.dtype)
    return torch.float64 if wide else torch.float32


def adamw(
    weights: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    master: Tensor | None,
    *,
    settings: AdamW,
    offset: int,
) -> None:
    """One step over a piece whose first number is number `offset` of all. From the master where there is one."""
    wide = update_type(weights, master)
    kept = master if master is not None else weights
    # With the random bits, which are of 8 bytes each, no more than ten temporaries are alive at once.
    for block in row_blocks(len(weights), wide.itemsize, 10):
        # Where they are kept as wide as they are computed, moments and weights are changed where they lie.
        mean, square = first[block].to(wide), second[block].to(wide)
        updated = advance(gradients[block], mean, square, kept[block], settings)
        place = offset + block.start
        store(first[block], mean, FIRST, settings, place)
        store(second[block], square, SECOND, settings, place)
        if master is not None:
            master[block] = updated
            weights[block] = updated
        else:
            store(weights[block], updated, WEIGHTS, settings, place)


def advance(gradients: Tensor, mean: Tensor, square: Tensor, start: Tensor, settings: AdamW) -> Tensor:
    """Both moments a step on, where they lie; returns the updated weights, in the moments' type."""
    gradient = gradients.to(mean.dtype) * settings.gradient_scale
    mean.mul_(settings.beta1)
    mean += gradient * (1.0 - settings.beta1)
    square.mul_(settings.beta2)
    square += gradient.mul_(gradient).mul_(1.0 - settings.beta2)
    root = square.sqrt().mul_(settings.root_scale).add_(settings.epsilon)
    updated = start.to(mean.dtype).mul_(settings.kept)
    updated -= torch.div(mean, root, out=root).mul_(settings.step_size)
    return updated


def store(target: Tensor, values: Tensor, tensor: int, settings: AdamW, place: int) -> None:
    """Write numbers as they are kept: to the nearest, or by chance."""
    if target.dtype == values.dtype:
        # `to` made no copy: they are there.
        return
    if settings.rounding is not None and target.dtype == torch.bfloat16:
        keys = settings.rounding.keys(settings.step, tensor)
        bits = random_bits(keys, place, len(values), values.device)
        target.copy_(round_by_chance(values.to(torch.float32), bits))
    else:
        target.copy_(values)
