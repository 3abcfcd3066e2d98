"""Rounding to bf16 by chance: up with the probability of what lies between, so that small steps are not lost.

The random bits of a number come from a hash of the seed, the step, the tensor and the number's place among all
numbers; rounding takes the upper sixteen of them, dropout (`dropout`) all. They do not depend on how the numbers are
cut into pieces, on the device, or on what was rounded before. The hash is integer arithmetic of 32 bits, written out
once here and once in the fused form:

    mix(x):  x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= x >> 13;  x *= 0xC2B2AE35;  x ^= x >> 16
    bits(i): mix(mix(low(i) ^ key0) ^ (high(i) * 0x9E3779B1) ^ key1)

where low and high are the halves of the place's 64 bits, and the two keys are halves of a hash of seed, step and
tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
"""Odd numbers of the 32-bit mix."""
HIGH_MULTIPLIER = 0x9E3779B1
"""Spreads the upper half of a place over all bits."""

WEIGHTS, FIRST, SECOND = range(3)
"""Which tensor of a parameter is rounded; each has random bits of its own."""

_LOW = 0xFFFFFFFF
_ALL = (1 << 64) - 1
_STEP, _WIDE_MIX = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class Seed:
    """Where the random bits of a training come from."""

    value: int

    def keys(self, step: int, tensor: int) -> tuple[int, int]:
        """Two keys of 32 bits for one tensor at one step."""
        key = _mix_wide(self._key_of(step) ^ (tensor & _ALL))
        return key & _LOW, key >> 32

    def many_keys(self, step: int, tensors: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """The same for many tensors, two columns of words."""
        key = tensors ^ np.uint64(self._key_of(step))
        key = key + np.uint64(_STEP)
        for shift, multiplier in _WIDE_MIX:
            key = (key ^ (key >> np.uint64(shift))) * np.uint64(multiplier)
        key ^= key >> np.uint64(31)
        return np.stack([key & np.uint64(_LOW), key >> np.uint64(32)], axis=1).astype(np.uint32)

    def _key_of(self, step: int) -> int:
        return _mix_wide(_mix_wide(self.value & _ALL) ^ (step & _ALL))


def _mix_wide(value: int) -> int:
    value = (value + _STEP) & _ALL
    for shift, multiplier in _WIDE_MIX:
        value = ((value ^ (value >> shift)) * multiplier) & _ALL
    return value ^ (value >> 31)


def random_bits(keys: tuple[int, int], first: int, count: int, device: torch.device) -> Tensor:
    """Sixteen random bits, as int64, for each of the places from `first` on."""
    places = torch.arange(first, first + count, dtype=torch.int64, device=device)
    low = _hash_low(places & _LOW, keys[0])
    high = _hash_high(places.bitwise_right_shift_(32), keys[1])
    return _mix(low.bitwise_xor_(high)).bitwise_right_shift_(16)


def place_bits(low: Tensor, high: Tensor, keys: Tensor) -> Tensor:
    """32 random bits, as int64, for places with these lower halves and these upper ones, each modulo 2³²."""
    return _mix(_hash_low(low.clone(), keys[0]) ^ _hash_high(high.clone(), keys[1]))


def _hash_low(values: Tensor, key: int | Tensor) -> Tensor:
    """In place."""
    return _mix(values.bitwise_xor_(key).bitwise_and_(_LOW))


def _hash_high(values: Tensor, key: int | Tensor) -> Tensor:
    """In place. It may be multiplied as a 64-bit number: what overflows is cut off together with the upper half."""
    return values.mul_(HIGH_MULTIPLIER).bitwise_xor_(key).bitwise_and_(_LOW)


def _mix(values: Tensor) -> Tensor:
    """The 32-bit mix, in place."""
    values ^= values >> 16
    values.mul_(MULTIPLIERS[0]).bitwise_and_(_LOW)
    values ^= values >> 13
    values.mul_(MULTIPLIERS[1]).bitwise_and_(_LOW)
    values ^= values >> 16
    return values


def round_by_chance(values: Tensor, bits: Tensor) -> Tensor:
    """float32 values in bf16: cut after random bits were added below the last that stays. Infinities and NaN stay."""
    added = values.view(torch.int32) + bits.to(torch.int32)
    rounded = added.bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
