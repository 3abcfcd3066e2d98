"""Angles of rotary positions, in fp32 as the published models were trained with."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from flopwise.work.transformer import Transformer


def rotary_frequencies(model: Transformer) -> Tensor:
    """Radians per token of each pair of channels, (head_dim ÷ 2,), in fp32 on the CPU.

    In fp32 throughout, as `transformers` does: with the same operations in the same order the same numbers come out.
    """
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
    frequencies = 1.0 / model.rotary_base**exponents
    scaling = model.rotary_scaling
    if scaling is None:
        return frequencies
    if scaling.original_context is None:
        return frequencies / scaling.factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_context / (2 * pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
