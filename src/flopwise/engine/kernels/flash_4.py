"""FlashAttention-4 (`flopwise[hopper]`): the fastest attention there is for Hopper GPUs, where it is installed.

It writes results where it is told to. Its kernels are compiled when they are first called, a few seconds each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from flopwise.engine.kernels.optional import find_in

HEAD_DIMENSIONS = (64, 96, 128)
"""Those that both of its kernels take."""


class _FlashCalls(NamedTuple):
    forward: Callable[..., object]
    backward: Callable[..., object]


@cache
def _calls() -> _FlashCalls | None:
    """The package's two calls that take tensors for their results; None where it cannot be loaded."""

    def find() -> _FlashCalls:
        module = import_module("flash_attn.cute.interface")
        return _FlashCalls(module._flash_attn_fwd, module._flash_attn_bwd)

    found = find_in("flash_attn", find, name="FlashAttention-4", without="attention is cuDNN's")
    if found is not None:
        # It tells of an argument that its compiler takes as a constant, which it may.
        warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    return found


def is_installed() -> bool:
    """Whether it can be called; asking takes seconds once, for it is imported."""
    return _calls() is not None


@cache
def fits_device(device: torch.device) -> bool:
    """Whether a device is one that it is chosen for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and is_installed()


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    out: Tensor,
    logsumexp: Tensor,
) -> None:
    """Queries are the last of those that see the keys. `scale`: of scores; None: one over the root of the channels."""
    calls = _calls()
    assert calls is not None
    calls.forward(query, key, value, softmax_scale=scale, causal=causal, out=out, lse=logsumexp)


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *,
    logsumexp: Tensor,
    causal: bool,
    scale: float | None = None,
    query_gradient: Tensor,
    key_gradient: Tensor,
    value_gradient: Tensor,
) -> None:
    """Gradients of queries, keys and values, in their type."""
    calls = _calls()
    assert calls is not None
    calls.backward(
        query,
        key,
        value,
        out,
        gradient,
        logsumexp,
        softmax_scale=scale,
        causal=causal,
        dq=query_gradient,
        dk=key_gradient,
        dv=value_gradient,
    )


def backward_bytes(query: Tensor, key: Tensor) -> int:
    """What a backward allocates: fp32 sums of queries' gradients, and of keys' and values' where heads share them."""
    shared = 2 * 4 * key.numel() if key.shape[2] != query.shape[2] else 0
    rows = 2 * 4 * query.numel() // query.shape[3]
    return 4 * query.numel() + shared + rows
