"""The engine's attention as calls that can be timed: the kernel that a training would choose, on random numbers."""

from __future__ import annotations

import torch

from flopwise.engine.formats import TYPES
from flopwise.engine.kernels.attention import AttentionMask, attention_backward, attention_forward, choose_kernel
from flopwise.records.calibration import AttentionCalls


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
