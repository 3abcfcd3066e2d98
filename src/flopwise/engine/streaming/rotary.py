"""Angles of rotary positions, in fp32 as the published models were trained with."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi

import torch
from torch import Tensor

from flopwise.work.attention_kinds import RotaryScaling
from flopwise.work.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Rotation:
    """How the heads of a kind of block turn with their tokens' positions."""

    frequencies: Tensor
    """Radians per token of each pair of channels."""
    scale: float
    """What turned channels are multiplied by."""
    neighbours: bool
    """Whether neighbouring channels are a pair, not one of each half."""

    @property
    def channels(self) -> int:
        """Of a head, the first ones: those that are turned."""
        return 2 * int(self.frequencies.shape[0])


def rotation_of(model: Transformer, tokens: int, device: torch.device) -> Rotation | None:
    """The rotation of a model whose blocks are of one kind, for sequences of so many tokens; None where it has none."""
    if model.positions != "rotary":
        return None
    scale = 1.0 if model.rotary_scaling is None else model.rotary_scaling.attention_scale
    return Rotation(rotary_frequencies(model, tokens).to(device), scale, model.rotary_pairs == "neighbours")


def temperatures_of(model: Transformer, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """What queries at these positions are multiplied by, where blocks of one kind have a temperature."""
    assert model.temperature is not None
    floors = torch.floor((positions.to(torch.float32) + 1.0) / model.temperature.floor)
    return (torch.log1p(floors) * model.temperature.scale + 1.0).to(dtype)


def rotary_frequencies(model: Transformer, tokens: int) -> Tensor:
    """Radians per token of each pair of channels, (turned channels ÷ 2,), in fp32 on the CPU.

    In fp32 throughout, as `transformers` does: with the same operations in the same order the same numbers come out.
    Two scalings ask how long sequences are, which is here `tokens` for all of a training's.
    """
    channels = model.turned_channels
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    frequencies: Tensor = 1.0 / model.rotary_base**exponents
    scaling = model.rotary_scaling
    if scaling is None:
        return frequencies
    if scaling.method == "dynamic":
        assert scaling.original_context is not None
        longer = max(tokens, scaling.original_context) / scaling.original_context
        base = model.rotary_base * (scaling.factor * longer - (scaling.factor - 1)) ** (channels / (channels - 2))
        return torch.reciprocal(base**exponents)
    if scaling.method == "longrope":
        return 1.0 / (_own_factors(scaling, tokens, channels // 2) * model.rotary_base**exponents)
    if scaling.method == "yarn":
        return _yarn_frequencies(scaling, model.rotary_base, exponents)
    if scaling.method == "linear":
        return frequencies / scaling.factor
    assert scaling.original_context is not None
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_context / (2 * pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1) if low < high else (turns > high).to(turns.dtype)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _own_factors(scaling: RotaryScaling, tokens: int, pairs: int) -> Tensor:
    assert scaling.original_context is not None
    factors = scaling.long_factors if tokens > scaling.original_context else scaling.short_factors
    assert len(factors) == pairs, "the description has checked that there is one for each pair"
    return torch.tensor(factors, dtype=torch.float32)


def _yarn_frequencies(scaling: RotaryScaling, base: float, exponents: Tensor) -> Tensor:
    """Frequencies divided by the factor where they turn slowly, as they were where they turn fast."""
    pairs = exponents.shape[0]
    powers = base**exponents
    ends = [_pair_that_turns(turns, scaling, base, 2 * pairs) for turns in (scaling.beta_fast, scaling.beta_slow)]
    if scaling.truncate:
        ends = [floor(ends[0]), ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], 2 * pairs - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _pair_that_turns(turns: float, scaling: RotaryScaling, base: float, channels: int) -> float:
    """The pair, counted in fractions, that turns so many times in the original context."""
    assert scaling.original_context is not None
    return channels * log(scaling.original_context / (turns * 2 * pi)) / (2 * log(base))
