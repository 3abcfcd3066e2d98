"""Triton's compiler as a decorator with a type, which Triton's own lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


class Kernel(Protocol):
    """A function that runs on the GPU: called from another one, or launched over a grid of programs."""

    def __call__(self, *arguments: tl.tensor) -> tl.tensor: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


def kernel(unspecialized: Sequence[str] = ()) -> Callable[[Callable[..., object]], Kernel]:
    """Compiles a function; anew for each type and for round values of arguments, but for those `unspecialized`."""

    def compiled(function: Callable[..., object]) -> Kernel:
        made: Kernel = triton.jit(function, do_not_specialize=list(unspecialized))
        return made

    return compiled
