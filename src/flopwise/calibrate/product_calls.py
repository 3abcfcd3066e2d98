"""The engine's products as calls that can be timed: by the kernels that a training would choose, on random numbers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flopwise.engine.formats import TYPES
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.quack_products import QuackProducts, products_for
from flopwise.records.calibration import ProductCall, ProductKind


def product_calls(
    *, kind: ProductKind, rows: int, depth: int, columns: int, number_format: str, device: str
) -> ProductCall:
    """A layer's product, (rows × depth)·(depth × columns); every call adds to the matrix' gradient."""
    dtype = TYPES[number_format]

    def numbers(*sides: int) -> Tensor:
        return torch.randn(*sides, device=device, dtype=dtype)

    out = torch.zeros(rows, columns, device=device, dtype=dtype)
    products = products_for(out.device, dtype, dtype, Arena(torch.empty(0, dtype=torch.uint8, device=device)))
    if kind == "forward":
        source, matrix = numbers(rows, depth), numbers(columns, depth)
        run = partial(products.forward, source, matrix, None, out=out)
    elif kind == "to_source":
        gradient, matrix = numbers(rows, depth), numbers(depth, columns)
        run = partial(products.dgrad, gradient, matrix, out=out, add=False)
    else:
        gradient, source = numbers(depth, rows), numbers(depth, columns)
        run = partial(products.wgrad, gradient, source, total=out)
    of_torch = "cublas" if out.is_cuda else "torch"
    return ProductCall(run=run, kernel="quack" if isinstance(products, QuackProducts) else of_torch)
