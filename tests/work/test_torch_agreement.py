"""FLOPs and parameters against plain torch modules on the meta device, over random shapes of every family.

Where torch counts otherwise than we do, and why, is written beside the number.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import (
    FlopCounterMode,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from flopwise.work.describe import describe
from flopwise.work.lstm import Lstm
from flopwise.work.op import Attention, AttentionKernel, Gemm
from flopwise.work.transformer import Transformer
from flopwise.work.work import Work
from tests.support.strategies import FAMILIES, recurrent, transformers
from tests.support.torch_reference import RecurrentReference, Reference, eager_attention, flash_attention

# The CPU's fused attention has no formula in torch: without one its products count as nothing.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@register_flop_formula(_flash)
def _count_flash(query: list[int], key: list[int], value: list[int], *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


@register_flop_formula(_flash_backward)
def _count_flash_backward(
    gradient: list[int], query: list[int], key: list[int], value: list[int], *_: object, **__: object
) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


def counted(module: nn.Module, batch: int, tokens: int) -> tuple[int, int]:
    """FLOPs of forward, and of forward and backward, by torch's own counter."""
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as forward:
        loss = module(ids)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


def described(work: Work, batch: int) -> tuple[int, int]:
    """The same from our operators; torch counts attention's full square whatever the mask."""
    forward = total = 0
    for op in work.ops:
        assert not op.forward_flops() or isinstance(op, Gemm | Attention)
        forward += batch * op.forward_flops("square")
        total += batch * (op.forward_flops("square") + op.backward_flops(work.kernel, "square"))
    return forward, total


@pytest.mark.parametrize("kernel", ["flash", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_transformer_counts_equal_torch(family: str, kernel: AttentionKernel, data: st.DataObject) -> None:
    model = data.draw(transformers(family))
    # Experts share the tokens evenly in the reference, so the number of tokens must divide.
    tokens = 2 * data.draw(st.integers(1, 12))
    batch = data.draw(st.integers(1, 3))
    _check_transformer(model, tokens, batch, kernel)


def _check_transformer(model: Transformer, tokens: int, batch: int, kernel: AttentionKernel) -> None:
    with torch.device("meta"):
        module = Reference(model, tokens, flash_attention if kernel == "flash" else eager_attention)
    work = describe(model, tokens, kernel)
    assert work.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert described(work, batch) == counted(module, batch, tokens)


@settings(max_examples=25, deadline=None)
@given(model=recurrent(), tokens=st.integers(1, 6), batch=st.integers(1, 3))
def test_lstm_counts_equal_torch(model: Lstm, tokens: int, batch: int) -> None:
    with torch.device("meta"):
        module = RecurrentReference(model)
    work = describe(model, tokens)
    assert work.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert described(work, batch) == counted(module, batch, tokens)
