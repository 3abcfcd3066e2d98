"""The words of a step that are no numbers: how its kernels are put together."""

from __future__ import annotations

from typing import Literal, get_args

Fusion = Literal["fused", "eager"]
FUSIONS: tuple[Fusion, ...] = get_args(Fusion)
"""fused: neighbouring kernels bound by bytes are one, as a compiler or hand-written kernels make them."""
