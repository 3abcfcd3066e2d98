"""Attention sinks as Triton's kernels against the plain forms.

They need a GPU; with TRITON_INTERPRET=1 and Triton at hand those in float32 and float16 run, slowly, on the processor.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from flopwise.engine.kernels import fused_sinks, sinks
from tests.support.triton_device import DEVICE, IS_INTERPRETED, MARKS

pytestmark = MARKS
TYPES = (torch.float32, torch.float16) if IS_INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 1, 8), (77, 3, 64), (1200, 5, 80), (2049, 2, 128))


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal as far as a type rounds: sums are of what was rounded to it."""
    step = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    difference = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert float(difference) < step, float(difference)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_sinks_are_added_and_trained_as_plainly(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, heads, channels = shape
    wide = drawn(rows, heads, 2 * channels, seed=1, dtype=dtype)
    scores = drawn(heads, seed=2, dtype=dtype) * 3
    sums = 5 * drawn(heads, rows, seed=3)
    # A query that sees no key but the sink, and one whose keys leave the sink nothing.
    sums[0, 0], sums[-1, -1] = -1e4, 1e4
    gradient = drawn(rows, heads, channels, seed=4, dtype=dtype)
    made = []
    for form in (fused_sinks, sinks):
        # Columns of wider rows.
        out, logsumexp, total = wide.clone()[..., :channels], sums.clone(), drawn(heads, seed=5)
        form.add_sinks(scores, out=out, logsumexp=logsumexp)
        form.sinks_backward(gradient, scores, out=out, logsumexp=logsumexp, total=total)
        made.append((out, logsumexp, total))
    for found, expected in zip(*made, strict=True):
        close(found, expected, dtype)
