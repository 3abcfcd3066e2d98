"""Number formats as torch knows them."""

from __future__ import annotations

import torch

from flopwise.core.errors import FlopwiseError
from flopwise.core.formats import Formats

TYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def check_formats(formats: Formats) -> None:
    """Refuse formats that nothing here computes in."""
    if "fp16" in (formats.compute, formats.weights, formats.gradients):
        raise FlopwiseError(
            f"{formats.name} cannot be trained in",
            why="gradients in fp16 vanish unless the loss is scaled, which is not done here",
            hint="--precision bf16-mixed",
        )
    if formats.matrix == "fp8" and formats.compute != "bf16":
        raise FlopwiseError(
            f"{formats.name} cannot be trained in",
            why=f"products in fp8 read activations in bf16 and write them, and these are in {formats.compute}",
            hint="--precision fp8",
        )
    for role in ("matrix", "compute", "weights", "gradients", "moments", "master"):
        name = getattr(formats, role)
        if name is not None and name not in TYPES and (role, name) != ("matrix", "fp8"):
            raise FlopwiseError(
                f"{formats.name} cannot be trained in yet",
                why=f"there are no kernels for {'matrix products' if role == 'matrix' else role} in {name}",
                hint="--precision bf16",
            )


def statistics_type(formats: Formats) -> torch.dtype:
    """Of what norms and attention keep beside their results, and of sums over chunks."""
    return torch.float64 if formats.compute == "fp64" else torch.float32
