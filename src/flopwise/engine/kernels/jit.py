"""Triton's compiler as a decorator with a type, which Triton's own lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


class Kernel(Protocol):
    """A function that runs on the GPU: called from another one, or launched over a grid of programs."""

    def __call__(self, *arguments: tl.tensor) -> tl.tensor: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


def kernel(unspecialized: Sequence[str] = ()) -> Callable[[Callable[..., object]], Kernel]:
    """Compiles a function; anew for each type and for round values of arguments, but for those `unspecialized`."""

    def compile_kernel(function: Callable[..., object]) -> Kernel:
        made: Kernel = triton.jit(function, do_not_specialize=list(unspecialized))
        return made

    return compile_kernel


@kernel()
def bounded_tanh(values: tl.tensor) -> tl.tensor:
    """1 − 2 ÷ (1 + e²ˣ), whose ends are −1 and 1."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * values))


ARITHMETIC = {"enable_fp_fusion": False}
"""Products are rounded before they are added, as the plain forms do, whatever a version of Triton does by itself."""


def column_block(width: int, most: int) -> int:
    """Columns that a program reads at once: a power of two that holds them all, or the most."""
    return min(most, 1 << max(0, width - 1).bit_length())


def warps_for(block: int) -> int:
    """Warps of a program that reads a row of so many columns at once: sixteen numbers a thread, or fewer."""
    return min(16, max(1, block // 512))


@cache
def multiprocessors(device: torch.device) -> int:
    """The device's multiprocessors; a few where kernels are interpreted, so that programs have several tiles there."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
