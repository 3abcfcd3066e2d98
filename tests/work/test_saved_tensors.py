"""Bytes kept for backward, against what autograd really keeps of a plain module's step on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.work.describe import describe
from flopwise.work.formats import POLICIES
from flopwise.work.op import AttentionKernel
from flopwise.work.traffic import saved_bytes
from flopwise.work.transformer import Transformer
from tests.support.strategies import transformers
from tests.support.torch_reference import Reference, eager_attention, flash_attention


def kept_by_autograd(module: Reference, ids: torch.Tensor) -> int:
    """Bytes of the floating-point storages that one forward keeps, each once, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters and tensor.numel() > 1:
            # The tensor is held too, so that its address cannot be given to another meanwhile.
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(ids)
    loss.backward()
    return sum(size for size, _ in kept.values())


def check(model: Transformer, kernel: AttentionKernel, data: st.DataObject) -> None:
    """Policy `none` in fp32 against autograd, both in bytes; ids are left out on both sides."""
    tokens, batch = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 3))
    module = Reference(model, tokens, flash_attention if kernel == "flash" else eager_attention)
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    work = describe(model, tokens, kernel)
    index_bytes = 4 * tokens
    assert kept_by_autograd(module, ids) == batch * (saved_bytes(work, "none", POLICIES["fp32"]) - index_bytes)


@pytest.mark.parametrize("kernel", ["flash", "eager"])
@pytest.mark.parametrize("family", ["gpt2", "mpt", "bert_masked"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_nothing_recomputed_keeps_what_autograd_keeps(
    family: str, kernel: AttentionKernel, data: st.DataObject
) -> None:
    """Families whose every operator is one kernel in plain torch; the others fuse, which is the point of fusing."""
    check(data.draw(transformers(family)), kernel, data)


@pytest.mark.parametrize("kernel", ["flash", "eager"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_parallel_residual_keeps_what_autograd_keeps(kernel: AttentionKernel, data: st.DataObject) -> None:
    """GPT-NeoX with learned positions, since plain torch turns queries and keys in several kernels."""
    model = data.draw(transformers("gpt_neox"))
    check(replace(model, parallel_residual=True, positions="learned"), kernel, data)


@pytest.mark.parametrize("kernel", ["flash", "eager"])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_norms_of_queries_and_keys_keep_what_autograd_keeps(
    family: str, kernel: AttentionKernel, data: st.DataObject
) -> None:
    """What a norm over each head keeps beside what attention does: the product's result and its statistics."""
    model = data.draw(transformers(family))
    check(replace(model, qk_norm=True, positions="learned"), kernel, data)
