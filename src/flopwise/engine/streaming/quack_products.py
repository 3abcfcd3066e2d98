"""Products by quack-kernels, where they are large and lie as its kernels read them; the others stay cuBLAS's."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from flopwise.engine.formats import TYPES
from flopwise.engine.kernels import quack, quack_gated
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.gated import LARGEST_ERROR, GatedKernels, largest_error
from flopwise.engine.streaming.products import HALVES, Products
from flopwise.work.formats import Formats
from flopwise.work.fusion import swiglu_in_products
from flopwise.work.transformer import Transformer


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

    def dgrad(self, gradient: Tensor, matrix: Tensor, *, out: Tensor, add: bool) -> None:
        if self._takes(gradient, matrix, out, depth=gradient.shape[1]):
            quack.multiply(gradient, matrix, out=out, add=add)
        else:
            super().dgrad(gradient, matrix, out=out, add=add)

    def wgrad(self, gradient: Tensor, source: Tensor, *, total: Tensor) -> None:
        """0.65 to 1.02 times as fast as cuBLAS, which rounds the sum alone and not the product before it."""
        if self.always and self._takes(gradient, source, total, depth=gradient.shape[0]):
            quack.multiply(gradient.t(), source, out=total, add=True)
        else:
            super().wgrad(gradient, source, total=total)

    def _takes(self, left: Tensor, right: Tensor, out: Tensor, *, depth: int) -> bool:
        halves = left.dtype == right.dtype and left.dtype in HALVES and out.dtype in (left.dtype, torch.float32)
        wide = out.shape[1] >= quack.LEAST_COLUMNS
        large = self.always or (wide and 2.0 * out.numel() * depth >= quack.LEAST_FLOPS)
        return halves and large and quack.takes(left, right, out)


@cache
def are_right(device: torch.device, dtype: torch.dtype, sums: torch.dtype) -> bool:
    """Whether the package is there and gives right results on a device; asked once, it says what is wrong.

    `sums`: of the matrices' gradients.
    """
    if dtype not in HALVES or sums not in (dtype, torch.float32) or not quack.fits_device(device):
        return False
    try:
        errors = [largest_error(quack_gated, device, dtype, sums=sums), _plain_error(device, dtype, sums)]
        # What is no number is off as well.
        off = [error for error in errors if not error < LARGEST_ERROR]
        wrong = f"is {off[0]:.1%} off in a check" if off else ""
    except Exception as failed:  # whatever a package's compiler may raise, training goes on without it
        wrong = f"does not work here ({type(failed).__name__}: {str(failed)[:200]})"
    if wrong:
        told = f"quack-kernels is installed and {wrong}: products are cuBLAS's"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
    return not wrong


def _plain_error(device: torch.device, dtype: torch.dtype, sums: torch.dtype) -> float:
    """Of products in all tiles and ways that training calls, beside float32: the largest ‖difference‖ ÷ ‖result‖."""
    generator = torch.Generator(device=device).manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    source, matrix, gradient = drawn(264, 200), drawn(328, 200), drawn(264, 328)
    errors = []

    def check(
        left: Tensor,
        right: Tensor,
        out: Tensor,
        wanted: Tensor,
        tile: quack.QuackTile,
        *,
        add: bool = False,
        halves: tuple[str, ...] = (),
    ) -> None:
        quack.multiply(left, right, out=out, tile=tile, add=add, halves=halves)
        errors.append((out.float() - wanted).norm() / wanted.norm())

    wide_source, wide_matrix, wide_gradient = source.float(), matrix.float(), gradient.float()
    of_matrix = wide_gradient.t() @ wide_source
    for tile in quack.TILES:
        out, dgrad = torch.full_like(gradient, torch.nan), torch.full_like(source, torch.nan)
        check(source, matrix.t(), out, wide_source @ wide_matrix.t(), tile)
        check(gradient, matrix, dgrad, wide_gradient @ wide_matrix, tile)
        total = drawn(328, 200).to(sums)
        check(gradient.t(), source, total, total.float() + of_matrix, tile, add=True)
    dgrad, total = torch.full_like(source, torch.nan), drawn(328, 200).to(sums)
    in_turns = wide_matrix.view(2, -1, 200).transpose(0, 1).flatten(0, 1)
    check(gradient, matrix, dgrad, wide_gradient @ in_turns, quack.TOGETHER, halves=("B",))
    by_halves = of_matrix.view(-1, 2, 200).transpose(0, 1).flatten(0, 1)
    check(gradient.t(), source, total, total.float() + by_halves, quack.TOGETHER, add=True, halves=("out",))
    return float(torch.stack(errors).max())


def products_for(device: torch.device, dtype: torch.dtype, sums: torch.dtype, arena: Arena) -> Products:
    """The fastest products that a device has for a format, with sums of the matrices' gradients in theirs."""
    return QuackProducts(arena) if are_right(device, dtype, sums) else Products(arena)


def gated_kernels(model: Transformer, formats: Formats, device: torch.device) -> GatedKernels | None:
    """Products with activations in them for a model; None: activations run on their own."""
    fits = swiglu_in_products(model, formats)
    return quack_gated if fits and are_right(device, TYPES[formats.compute], TYPES[formats.gradients]) else None
