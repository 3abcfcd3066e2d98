"""Attention on random numbers with every kernel that is installed: the engine's own choice, cuDNN, FlashAttention-4."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flopwise.engine.kernels.attention import AttentionMask, attention_backward, attention_forward, choose_kernel
from flopwise.work.op import Attention


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel, ready to be called; backward uses what the last forward left."""

    name: str
    forward: Callable[[], object]
    backward: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Given:
    """What all kernels are given: (sequences, tokens, heads, channels)."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor


def candidates(op: Attention, sequences: int, dtype: torch.dtype, generator: torch.Generator) -> list[Candidate]:
    """The kernels that work here, each called once so that none has to be compiled later."""

    def drawn(heads: int) -> Tensor:
        shape = (sequences, op.tokens, heads, op.head_dim)
        return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)

    given = Given(drawn(op.heads), drawn(op.kv_heads), drawn(op.kv_heads), drawn(op.heads))
    makers = [of_engine, of_cudnn, of_flash_4] if generator.device.type == "cuda" else [of_engine]
    found = []
    for make in makers:
        try:
            candidate = make(op, given)
            candidate.forward()
            candidate.backward()
        except Exception as error:
            # A kernel that is not there, or not for this card, is no reason to measure none.
            print(f"  attention by {make.__name__}: {type(error).__name__}: {str(error)[:160]}", file=sys.stderr)
            continue
        found.append(candidate)
    assert found, "no kernel of attention works here"
    return found


def of_engine(op: Attention, given: Given) -> Candidate:
    """What training calls."""
    mask = AttentionMask(op.heads, op.kv_heads, op.head_dim, op.causal, op.window)
    query, key, value = given.query, given.key, given.value
    kernel = choose_kernel(
        query.device, query.dtype, mask, op.tokens, op.tokens, padded=False, deterministic=False
    )  # fmt: skip
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out, sums = (
        torch.empty_like(query),
        torch.empty(query.shape[0], op.heads, op.tokens, dtype=wide, device=query.device),
    )
    gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]

    def backward() -> None:
        attention_backward(
            given.gradient, query, key, value, out, sums, mask, query_gradient=gradients[0], key_gradient=gradients[1],
            value_gradient=gradients[2], accumulate=False, kernel=kernel,
        )  # fmt: skip

    return Candidate(
        f"engine {kernel}",
        lambda: attention_forward(query, key, value, mask, out=out, logsumexp=sums, kernel=kernel),
        backward,
    )


def of_cudnn(op: Attention, given: Given) -> Candidate:
    """cuDNN through torch, for all heads at once and without copies."""
    query, key, value, gradient = (
        each.transpose(1, 2) for each in (given.query, given.key, given.value, given.gradient)
    )
    made: list[Any] = []

    def forward() -> None:
        made[:] = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, op.causal, False
        )

    # Without dropout the random state is not read, but a tensor is asked for.
    unused = torch.zeros((), dtype=torch.int64, device=query.device)

    def backward() -> None:
        sums = made[1].reshape(query.shape[:3])[..., None]
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            gradient, query, key, value, made[0], sums, unused, unused, None, None, None, op.tokens, op.tokens, 0.0,
            op.causal,
        )  # fmt: skip

    return Candidate("cudnn", forward, backward)


def of_flash_4(op: Attention, given: Given) -> Candidate:
    """FlashAttention-4 as its package offers it."""
    call = import_module("flash_attn.cute").flash_attn_func
    inputs = [tensor.detach().requires_grad_() for tensor in (given.query, given.key, given.value)]
    made: list[Tensor] = []

    def forward() -> None:
        found = call(*inputs, causal=op.causal)
        made[:] = [found[0] if isinstance(found, tuple) else found]

    return Candidate("flash-4", forward, lambda: torch.autograd.grad(made[0], inputs, given.gradient))
