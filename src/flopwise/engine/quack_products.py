"""Products by quack-kernels, where they are large and lie as its kernels read them; the others stay cuBLAS's."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from flopwise.core.formats import Formats
from flopwise.core.fusion import has_plain_swiglu
from flopwise.core.transformer import Transformer
from flopwise.engine.arena import Arena
from flopwise.engine.formats import TYPES
from flopwise.engine.gated import LARGEST_ERROR, GatedKernels, largest_error
from flopwise.engine.kernels import quack, quack_gated
from flopwise.engine.products import HALVES, Products


class QuackProducts(Products):
    """Products in the format of the activations."""

    def __init__(self, arena: Arena, *, always: bool = False) -> None:
        """`always`: those as well that torch's are faster for."""
        super().__init__(arena)
        self.always = always

    def forward(self, source: Tensor, matrix: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
        if bias is None and self._takes(source, matrix, out, depth=source.shape[1]):
            quack.multiply(source, matrix.t(), out=out)
        else:
            super().forward(source, matrix, bias, out=out)

    def to_source(self, gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None:
        if self._takes(gradient, matrix, out, depth=gradient.shape[1]):
            quack.multiply(gradient, matrix, out=out, add=add)
        else:
            super().to_source(gradient, matrix, out=out, add=add)

    def to_matrix(self, gradient: Tensor, source: Tensor, *, total: Tensor) -> None:
        enough = self.always or quack.tiles_of(total.shape[0], source) >= quack.LEAST_TILES
        if enough and self._takes(gradient, source, total, depth=gradient.shape[0]):
            quack.multiply(gradient.t(), source, out=total, add=True)
        else:
            super().to_matrix(gradient, source, total=total)

    def _takes(self, left: Tensor, right: Tensor, out: Tensor, *, depth: int) -> bool:
        halves = left.dtype == right.dtype and left.dtype in HALVES and out.dtype in (left.dtype, torch.float32)
        large = self.always or 2.0 * out.numel() * depth >= quack.LEAST_FLOPS
        return halves and large and quack.takes(left, right, out)


@cache
def are_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the package is there and gives right results on a device; asked once, it says what is wrong."""
    if dtype not in HALVES or not quack.fits_device(device):
        return False
    try:
        error = max(largest_error(quack_gated, device, dtype, every_form=False), _plain_error(device, dtype))
        wrong = "" if error < LARGEST_ERROR else f"is {error:.1%} off in a check"
    except Exception as failed:  # whatever a package's compiler may raise, training goes on without it
        wrong = f"does not work here ({type(failed).__name__}: {str(failed)[:200]})"
    if wrong:
        told = f"quack-kernels is installed and {wrong}: products are cuBLAS's"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
    return not wrong


def _plain_error(device: torch.device, dtype: torch.dtype) -> float:
    """Of the three products as training calls them, beside those in float32: the largest ‖difference‖ ÷ ‖result‖."""
    generator = torch.Generator(device=device).manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    source, matrix, gradient = drawn(264, 200), drawn(328, 200), drawn(264, 328)
    out, to_source, total = torch.full_like(gradient, torch.nan), torch.full_like(source, torch.nan), drawn(328, 200)
    before = total.float()
    products = QuackProducts(Arena(torch.empty(0, dtype=torch.uint8, device=device)), always=True)
    products.forward(source, matrix, None, out=out)
    products.to_source(gradient, matrix, out=to_source, add=False)
    products.to_matrix(gradient, source, total=total)
    wide = [each.float() for each in (source, matrix, gradient)]
    wanted = (wide[0] @ wide[1].t(), wide[2] @ wide[1], before + wide[2].t() @ wide[0])
    found = (out.float(), to_source.float(), total.float())
    errors = [(one - other).norm() / other.norm() for one, other in zip(found, wanted, strict=True)]
    return float(torch.stack(errors).max())


def products_for(device: torch.device, dtype: torch.dtype, arena: Arena) -> Products:
    """The fastest products that a device has for a format."""
    return QuackProducts(arena) if are_right(device, dtype) else Products(arena)


def gated_kernels(model: Transformer, formats: Formats, device: torch.device) -> GatedKernels | None:
    """Products with activations in them for a model; None: activations run on their own."""
    compute = TYPES[formats.compute]
    takes = has_plain_swiglu(model) and not (model.hidden % quack.WIDTH_MULTIPLE or model.ffn % quack.WIDTH_MULTIPLE)
    sums = TYPES[formats.gradients] in (torch.float32, compute)
    plain = formats.matrix == formats.compute and sums
    return quack_gated if takes and plain and are_right(device, compute) else None
