"""AdamW over flat pieces of a model's numbers, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwise.engine.kernels.blocks import row_blocks
from flopwise.engine.kernels.rounding import FIRST, SECOND
from flopwise.engine.kernels.updating import UpdateSettings, store, store_weights, update_type


def adamw(
    weights: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    master: Tensor | None,
    *,
    settings: UpdateSettings,
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
        store_weights(weights, master, block, updated, settings=settings, offset=offset)


def advance(gradients: Tensor, mean: Tensor, square: Tensor, start: Tensor, settings: UpdateSettings) -> Tensor:
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
