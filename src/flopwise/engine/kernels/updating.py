"""What one step of an optimizer goes by, and how it writes the numbers that it has changed."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flopwise.engine.kernels.blocks import row_blocks
from flopwise.engine.kernels.rounding import FIRST, SECOND, WEIGHTS, Seed, random_bits, round_by_chance

STEP_NUMBERS = ("kept", "step_size", "root_scale", "rate", "mixed_in", "relative_rate")
"""What changes from step to step, in the order in which kernels find it."""
BITS_OF_STEP = len(STEP_NUMBERS) + 6
"""Words that `UpdateSettings.bits_of_step` has."""

MIXED_IN_POWER = -0.8
"""Of the step: what Adafactor's means take of a gradient (arXiv 1804.04235, section 7.2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateSettings:
    """One step's settings; each optimizer reads those that it has."""

    rate: float
    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float
    average_kept: float = 0.0
    """What a mean of the weights keeps of itself, where there is one."""
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
        """Of AdamW, corrected by the first moment's bias."""
        return self.rate / (1.0 - self.beta1**self.step)

    @property
    def root_scale(self) -> float:
        """What the root of the second moment is multiplied by."""
        return 1.0 / sqrt(1.0 - self.beta2**self.step)

    @property
    def mixed_in(self) -> float:
        """What Adafactor's means take of this step's gradient."""
        return float(self.step**MIXED_IN_POWER)

    @property
    def relative_rate(self) -> float:
        """Of Adafactor, the rate in units of a matrix' own size; it falls with the steps at least."""
        return min(self.rate, 1.0 / sqrt(self.step))

    def number(self, name: str) -> Tensor | float:
        """One of the step's numbers, from the device where it lies there."""
        if self.numbers is None:
            return float(getattr(self, name))
        return self.numbers[STEP_NUMBERS.index(name)].view(torch.float32)

    def bits_of_step(self) -> NDArray[np.int32]:
        """What changes from step to step as words of 32 bits: fp32 numbers, then two keys for each tensor."""
        numbers = np.array([getattr(self, name) for name in STEP_NUMBERS], dtype=np.float32)
        keys = [
            self.rounding.keys(self.step, tensor) if self.rounding else (0, 0) for tensor in (WEIGHTS, FIRST, SECOND)
        ]
        return np.concatenate([numbers.view(np.int32), np.array(keys, dtype=np.uint32).reshape(-1).view(np.int32)])


def update_type(weights: Tensor, master: Tensor | None) -> torch.dtype:
    """What the update runs in: float64 where weights or their master are, else float32."""
    wide = torch.float64 in (weights.dtype, None if master is None else master.dtype)
    return torch.float64 if wide else torch.float32


def store(target: Tensor, values: Tensor, tensor: int, settings: UpdateSettings, place: int) -> None:
    """Write numbers as they are kept: to the nearest, or by chance."""
    if target.data_ptr() == values.data_ptr():
        # They were changed where they lie.
        return
    if settings.rounding is not None and target.dtype == torch.bfloat16:
        keys = settings.rounding.keys(settings.step, tensor)
        bits = random_bits(keys, place, len(values), values.device)
        target.copy_(round_by_chance(values.to(torch.float32), bits))
    else:
        target.copy_(values)


def follow(average: Tensor, weights: Tensor, kept: float) -> None:
    """The mean of the weights moves towards what they are now."""
    for block in row_blocks(len(average), average.dtype.itemsize, 2):
        average[block].lerp_(weights[block].to(average.dtype), 1.0 - kept)


def store_weights(
    weights: Tensor, master: Tensor | None, block: slice, updated: Tensor, *, settings: UpdateSettings, offset: int
) -> None:
    """Write some updated weights of a piece whose first number is number `offset` of all."""
    if master is None:
        store(weights[block], updated, WEIGHTS, settings, offset + block.start)
        return
    master[block] = updated
    weights[block] = updated
