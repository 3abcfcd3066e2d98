"""Updates that look at one number at a time and remember one of it or nothing, in plain torch: Lion and SGD."""

from __future__ import annotations

from torch import Tensor

from flopwise.engine.kernels.blocks import row_blocks
from flopwise.engine.kernels.rounding import FIRST
from flopwise.engine.kernels.updating import UpdateSettings, store, store_weights, update_type


def lion(
    weights: Tensor, gradients: Tensor, first: Tensor, master: Tensor | None, *, settings: UpdateSettings, offset: int
) -> None:
    """One step over a piece whose first number is number `offset` of all: Algorithm 2 of arXiv 2302.06675.

    The weights go by the sign of the moment mixed with the gradient by β1; what is remembered is mixed by β2.
    """
    wide = update_type(weights, master)
    start = master if master is not None else weights
    for block in row_blocks(len(weights), wide.itemsize, 8):
        gradient = gradients[block].to(wide) * settings.gradient_scale
        mean = first[block].to(wide)
        sign = (mean * settings.beta1).add_(gradient, alpha=1.0 - settings.beta1).sign_()
        updated = start[block].to(wide) * settings.kept
        updated -= sign.mul_(settings.rate)
        mean = (mean * settings.beta2).add_(gradient, alpha=1.0 - settings.beta2)
        store(first[block], mean, FIRST, settings, offset + block.start)
        store_weights(weights, master, block, updated, settings=settings, offset=offset)


def sgd(
    weights: Tensor,
    gradients: Tensor,
    first: Tensor | None,
    master: Tensor | None,
    *,
    settings: UpdateSettings,
    offset: int,
) -> None:
    """The same of torch's SGD, whose weight decay is a part of the gradient; with momentum where there is a moment."""
    wide = update_type(weights, master)
    start = master if master is not None else weights
    for block in row_blocks(len(weights), wide.itemsize, 6):
        before = start[block].to(wide)
        gradient = gradients[block].to(wide) * settings.gradient_scale
        gradient = gradient.add_(before, alpha=settings.weight_decay)
        if first is not None:
            mean = (first[block].to(wide) * settings.momentum).add_(gradient)
            store(first[block], mean, FIRST, settings, offset + block.start)
            gradient = gradient.add_(mean, alpha=settings.momentum) if settings.nesterov else mean
        updated = before - gradient * settings.rate
        store_weights(weights, master, block, updated, settings=settings, offset=offset)
