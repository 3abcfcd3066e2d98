"""Number formats as torch knows them."""

from __future__ import annotations

import torch

from flopwise.work.formats import Formats
from flopwise.work.optimizers import CODE_FORMAT

TYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


STATE_TYPES = TYPES | {CODE_FORMAT: torch.uint8}
"""Of what an optimizer remembers."""


def statistics_type(formats: Formats) -> torch.dtype:
    """Of what norms and attention keep beside their results, and of sums over chunks."""
    return torch.float64 if formats.compute == "fp64" else torch.float32
