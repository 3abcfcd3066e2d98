"""FLOPs executed under torch's own activation checkpointing of every block, against our policies `input` and `full`.

torch counts attention's full square whatever the mask, so our side describes the model without its mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from flopwise.work.describe import describe
from flopwise.work.op import AttentionKernel
from flopwise.work.transformer import Transformer
from tests.support.strategies import FAMILIES, transformers
from tests.support.torch_reference import Reference, eager_attention, flash_attention
from tests.work.test_torch_agreement import counted


class Checkpointed(nn.Module):
    """A block that keeps its input alone and runs again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, value, use_reentrant=False, preserve_rng_state=False)
        return result


def executed_by_torch(model: Transformer, tokens: int, batch: int, kernel: AttentionKernel, *, early_stop: bool) -> int:
    """FLOPs of forward, recompute and backward on the meta device, by torch's counter.

    With early stop, a block's second forward ends once all that backward reads is there.
    """
    with torch.device("meta"):
        module = Reference(model, tokens, flash_attention if kernel == "flash" else eager_attention)
    module.blocks = nn.ModuleList(Checkpointed(block) for block in module.blocks)
    with set_checkpoint_early_stop(early_stop):
        return counted(module, batch, tokens)[1]


def executed_by_us(
    model: Transformer, tokens: int, batch: int, kernel: AttentionKernel, policy: Literal["none", "input", "full"]
) -> int:
    """The same from our operators, attention's full square included."""
    work = describe(replace(model, causal=False), tokens, kernel)
    return batch * work.total_hardware_flops("causal", policy)


def output_projection(model: Transformer, tokens: int, batch: int) -> int:
    """Forward FLOPs of attention's last product in all layers, 2·m·k·n by hand."""
    return 2 * batch * tokens * model.heads * model.head_dim * model.hidden * model.layers


def experts_results(model: Transformer, tokens: int, batch: int) -> int:
    """Forward FLOPs of the products that make them, by hand."""
    mixtures = model.layers - len(model.dense_blocks)
    return 2 * batch * tokens * model.experts_per_token * model.ffn * model.hidden * mixtures


@pytest.mark.parametrize("kernel", ["flash", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_checkpoint_executes_what_input_counts(family: str, kernel: AttentionKernel, data: st.DataObject) -> None:
    """torch's default, with early stop, against `input`.

    Two exceptions. With a parallel residual nothing reads attention's projection in backward, and we do not make it
    again; torch runs the block in order and cannot leave out a product in its middle, so it executes just that more.
    And gradients of the weights of experts' results are found without the results, which plain modules ask for.
    """
    model = data.draw(transformers(family))
    tokens, batch = 2 * data.draw(st.integers(1, 8)), data.draw(st.integers(1, 2))
    ours = executed_by_us(model, tokens, batch, kernel, "input")
    passed_over = output_projection(model, tokens, batch) if model.parallel_residual else 0
    passed_over += experts_results(model, tokens, batch)
    assert executed_by_torch(model, tokens, batch, kernel, early_stop=True) == ours + passed_over


@pytest.mark.parametrize("kernel", ["flash", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_checkpoint_to_the_end_executes_what_full_counts(
    family: str, kernel: AttentionKernel, data: st.DataObject
) -> None:
    """torch without early stop, which runs each block again to its end, against `full`."""
    model = data.draw(transformers(family))
    tokens, batch = 2 * data.draw(st.integers(1, 8)), data.draw(st.integers(1, 2))
    ours = executed_by_us(model, tokens, batch, kernel, "full")
    assert executed_by_torch(model, tokens, batch, kernel, early_stop=False) == ours
    # And checkpointing did take place: the same module without it executes less.
    assert ours > executed_by_us(model, tokens, batch, kernel, "none")
