"""Attention sinks around the kernels, against a softmax with one more column in float64 and autograd's gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flopwise.engine.kernels.attention import (
    AttentionMask,
    Kernel,
    attention_backward,
    attention_forward,
    choose_kernel,
)
from flopwise.engine.kernels.sinks import add_sinks, sinks_backward

MASK = AttentionMask(heads=6, kv_heads=2, head_dim=8, causal=True, window=None)


def expected(mask: AttentionMask, tensors: tuple[Tensor, ...], gradient: Tensor) -> list[Tensor]:
    """Output and the gradients of queries, keys, values and sinks."""
    leaves = [each.double().cpu().clone().requires_grad_() for each in tensors]
    query, key, value = (each.transpose(1, 2) for each in leaves[:3])
    key, value = (each.repeat_interleave(mask.group, dim=1) for each in (key, value))
    queries, keys = query.shape[2], key.shape[2]
    places, back = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    seen = (back <= places) & (back > places - (mask.window or keys))
    scores = (query @ key.transpose(2, 3)) * mask.head_dim**-0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    column = leaves[3][:, None, None].expand(*scores.shape[:3], 1)
    out = (torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ value).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient.double().cpu())]


def found(mask: AttentionMask, tensors: tuple[Tensor, ...], gradient: Tensor, kernel: Kernel) -> list[Tensor]:
    query, key, value, sinks = tensors
    out = torch.empty_like(query)
    sums_type = torch.float64 if query.dtype == torch.float64 else torch.float32
    sums = torch.empty((query.shape[0], mask.heads, query.shape[1]), dtype=sums_type, device=query.device)
    attention_forward(query, key, value, mask, out=out, logsumexp=sums, kernel=kernel)
    for number in range(query.shape[0]):
        add_sinks(sinks, out=out[number], logsumexp=sums[number])
    gradients = [torch.empty_like(each) for each in (query, key, value)]
    attention_backward(
        *(gradient, query, key, value, out, sums, mask),
        query_gradient=gradients[0],
        key_gradient=gradients[1],
        value_gradient=gradients[2],
        accumulate=False,
        kernel=kernel,
    )
    total = torch.zeros(mask.heads, dtype=sums_type, device=query.device)
    for number in range(query.shape[0]):
        sinks_backward(gradient[number], sinks, out=out[number], logsumexp=sums[number], total=total)
    return [out, *gradients, total]


def random_tensors(
    mask: AttentionMask, queries: int, keys: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, ...], Tensor]:
    torch.manual_seed(queries)
    sizes = ((queries, mask.heads), (keys, mask.kv_heads), (keys, mask.kv_heads))
    tensors = [torch.randn(2, rows, heads, mask.head_dim).to(dtype) for rows, heads in sizes]
    # One sink takes nearly everything, one nearly nothing.
    sinks = torch.randn(mask.heads)
    sinks[:2] = torch.tensor([9.0, -30.0])
    return (*tensors, sinks.to(dtype)), torch.randn(2, queries, mask.heads, mask.head_dim).to(dtype)


@pytest.mark.parametrize(
    ("queries", "keys", "window"), [(7, 7, None), (5, 12, None), (9, 9, 3), (4, 11, 2), (1, 1, None)]
)
@pytest.mark.parametrize("plain", [True, False])
def test_kernels_with_sinks_give_the_softmax_with_one_more_column(
    queries: int, keys: int, window: int | None, plain: bool
) -> None:
    mask = replace(MASK, window=window)
    tensors, gradient = random_tensors(mask, queries, keys, torch.float64)
    chosen = choose_kernel(gradient.device, gradient.dtype, mask, queries, keys, padded=False, deterministic=True)
    results = found(mask, tensors, gradient, "plain" if plain else chosen)
    for one, other in zip(results, expected(mask, tensors, gradient), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("queries", "keys", "window"), [(257, 257, None), (256, 511, None), (300, 300, 128)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_fast_kernels_with_sinks_agree(queries: int, keys: int, window: int | None, deterministic: bool) -> None:
    mask = replace(MASK, head_dim=64, window=window)
    tensors, gradient = random_tensors(mask, queries, keys, torch.bfloat16)
    cuda = tuple(each.cuda() for each in tensors)
    kernel = choose_kernel(
        cuda[0].device, gradient.dtype, mask, queries, keys, padded=False, deterministic=deterministic
    )
    assert kernel not in ("plain", "cpu-flash")
    results = found(mask, cuda, gradient.cuda(), kernel)
    for one, other in zip(results, expected(mask, tensors, gradient), strict=True):
        scale = float(other.abs().max())
        assert float((one.double().cpu() - other).abs().max()) < 0.02 * scale
