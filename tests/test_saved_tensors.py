"""Bytes kept for backward, against what autograd really keeps of a plain module's step on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.core.describe import describe
from flopwise.core.formats import POLICIES
from flopwise.core.traffic import saved_bytes

from .strategies import transformers
from .torch_reference import Reference, flash_attention


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


@pytest.mark.parametrize("family", ["gpt2", "mpt", "bert_masked"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_nothing_recomputed_keeps_what_autograd_keeps(family: str, data: st.DataObject) -> None:
    """Families whose every operator is one kernel in plain torch; the others fuse, which is the point of fusing."""
    model = data.draw(transformers(family))
    tokens, batch = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 3))
    module = Reference(model, tokens, flash_attention)
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    work = describe(model, tokens)
    index_bytes = 4 * tokens
    assert kept_by_autograd(module, ids) == batch * (saved_bytes(work, "none", POLICIES["fp32"]) - index_bytes)
