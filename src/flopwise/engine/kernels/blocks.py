"""How the plain forms stay small: work is cut into blocks of rows, and sums of a row never depend on the cut."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

BLOCK_BYTES = 4 << 20
"""What the temporaries of one block may take; a single row may exceed it."""

_SUMMED_AT_ONCE = 16384
"""Columns that one reduction takes: torch splits larger ones among its threads where there is but one row."""


@cache
def has_triton() -> bool:
    """Whether the fused forms can be compiled here."""
    return find_spec("triton") is not None


def compute_type(stored: torch.dtype) -> torch.dtype:
    """What arithmetic runs in: float64 for float64, else float32."""
    return torch.float64 if stored == torch.float64 else torch.float32


def row_blocks(rows: int, row_bytes: int, temporaries: int) -> Iterator[slice]:
    """Slices of rows, of which so many temporaries of `row_bytes` each fit in a block."""
    step = max(1, BLOCK_BYTES // max(1, row_bytes * temporaries))
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))


def row_sums(values: Tensor) -> Tensor:
    """Sums over the last dimension, kept as a column. A row's sum is the same in whichever block it is taken."""
    total = values[:, :_SUMMED_AT_ONCE].sum(-1, keepdim=True)
    for first in range(_SUMMED_AT_ONCE, values.shape[1], _SUMMED_AT_ONCE):
        total += values[:, first : first + _SUMMED_AT_ONCE].sum(-1, keepdim=True)
    return total


def add_rounded(target: Tensor, summand: Tensor) -> None:
    """target += summand, rounded once; `summand` comes in the type that arithmetic runs in."""
    if target.dtype == summand.dtype:
        target += summand
    else:
        target.copy_(target.to(torch.promote_types(target.dtype, summand.dtype)) + summand)
