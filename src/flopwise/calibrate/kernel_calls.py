"""The engine's products and attention as calls that can be timed: the kernels that a training would choose."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flopwise.engine.formats import TYPES
from flopwise.engine.kernels.attention import AttentionMask, attention_backward, attention_forward, choose_kernel
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.quack_products import QuackProducts, products_for
from flopwise.records.calibration import AttentionCalls, ProductCall, ProductKind


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


def attention_calls(
    *, sequences: int, tokens: int, heads: int, kv_heads: int, head_dim: int, number_format: str, device: str
) -> AttentionCalls:
    """Causal attention over whole sequences; the forward has run once, so that the backward can."""
    dtype = TYPES[number_format]
    mask = AttentionMask(heads=heads, kv_heads=kv_heads, head_dim=head_dim, causal=True, window=None)

    def numbers(count: int) -> torch.Tensor:
        return torch.randn(sequences, tokens, count, head_dim, device=device, dtype=dtype)

    query, gradient, out = numbers(heads), numbers(heads), numbers(heads)
    key, value = numbers(kv_heads), numbers(kv_heads)
    query_gradient, key_gradient, value_gradient = (torch.empty_like(each) for each in (query, key, value))
    logsumexp = torch.empty(sequences, heads, tokens, device=device, dtype=torch.float32)
    kernel = choose_kernel(query.device, dtype, mask, tokens, tokens, padded=False, deterministic=False)

    def forward() -> None:
        attention_forward(query, key, value, mask, out=out, logsumexp=logsumexp, kernel=kernel)

    def backward() -> None:
        attention_backward(
            gradient,
            query,
            key,
            value,
            out,
            logsumexp,
            mask,
            query_gradient=query_gradient,
            key_gradient=key_gradient,
            value_gradient=value_gradient,
            accumulate=False,
            kernel=kernel,
        )

    forward()
    return AttentionCalls(forward=forward, backward=backward, kernel=kernel)
