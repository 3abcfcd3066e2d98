"""The words of a step that are no numbers: its optimizer, and how its kernels are put together."""

from __future__ import annotations

from typing import Literal, get_args

Optimizer = Literal["adamw", "lion", "sgd"]
MOMENTS: dict[Optimizer, int] = {"adamw": 2, "lion": 1, "sgd": 0}
"""Numbers that each optimizer remembers for a parameter."""

Fusion = Literal["fused", "eager"]
FUSIONS: tuple[Fusion, ...] = get_args(Fusion)
"""fused: neighbouring kernels bound by bytes are one, as a compiler or hand-written kernels make them."""
