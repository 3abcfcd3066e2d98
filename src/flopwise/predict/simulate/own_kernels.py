"""How flopwise's own kernels do beside the libraries' that a hardware file describes, as traces of one H200 show it.

Shares are those of the rate that a product of the same sides has by `[efficiency.gemm]`. They are of the kernels in
`benchmarks/results/experts_h200/second/kernels_30b-a3b-8bit.csv` (Qwen3-30B-A3B, 32,768 tokens a chunk, routing as it
falls with random weights). Today's products take 0.83 to 0.96 of those kernels' time and no cell was traced whole with
them: two that were measured (folder `third`) are foreseen within 2 % by these shares, and 1 and 8 % too fast by shares
of the products alone. What is too slow here stands for gaps between kernels that nothing here counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from flopwise.predict.kernels.calls import TILE_QUERIES, AttentionCall, GemmCall, Phase, typical_square
from flopwise.setup.hardware import Hardware
from flopwise.work.lengths import Lengths
from flopwise.work.model import Model
from flopwise.work.op import Attention, Op
from flopwise.work.optimizers import Optimizer
from flopwise.work.transformer import Transformer

OWN_ATTENTION = "flopwise"
"""The family of attention kernels for what no library's does."""

FORWARD, AGAIN, TO_INPUT, TO_WEIGHT = 0.87, 0.96, 0.98, 0.71
"""Experts' products forward, the activation in one of them; recomputed; to their inputs; to matrices, the tokens' rows
laid out for one of them."""
WEIGHED = 1.26
"""The activation's backward, which also weighs rows, over what its bytes take as they are counted."""
WITHIN = {("dispatch", Phase.FORWARD), ("activation", Phase.FORWARD), ("combine", Phase.BACKWARD)}
"""What is no kernel of its own: products read the tokens' rows where they lie, and mostly activate what they write."""
ROUTING_S = 0.4e-3
"""Some 12 kernels choose, sort and weigh a chunk's experts, there and back."""
ROUTING_FORWARD = 1 / 3
"""Of them."""
CODES = 2.34
"""An update of moments in 8 bits over what its bytes take: it finds each number's code by arithmetic."""


SHORT_ROWS = 128
"""Up to so many tokens of the longest our kernels take less time than torch's, whose tiles are for longer ones: on an
H200 a step of BERT-base over 256 rows, 24 tokens in the mean and 128 at most, 12.2 ms (with dropout) and 14.1."""
OWN_TILE = 64
"""Queries, and keys, that it takes at least."""


def calls_own_attention(model: Model, packed: Lengths | None) -> bool:
    """Whether weights are dropped, scores changed, or all of uneven sequences short."""
    if not isinstance(model, Transformer):
        return False
    dropped = model.dropout is not None and model.dropout.attention > 0
    short = packed is not None and packed.longest <= SHORT_ROWS
    return dropped or short or bool(model.attention_cap) or model.positions == "alibi"


def with_own_attention(hardware: Hardware) -> Hardware:
    """The same with our attention's rates before all others, where they are known."""
    attention = hardware.efficiency.attention.preferring((OWN_ATTENTION,))
    return replace(hardware, efficiency=replace(hardware.efficiency, attention=attention))


def in_own_tiles(call: AttentionCall, kind: Attention) -> AttentionCall:
    """A call over sequences of uneven length by tiles of ours, which are smaller than those of libraries."""
    tokens, pairs, area = typical_square(kind, OWN_TILE)
    _, library, _ = typical_square(kind, TILE_QUERIES)
    return replace(call, tokens=tokens, area_share=area, flops=call.flops * pairs / library)


def slower_experts(call: GemmCall, hardware: Hardware) -> float:
    """What a product of experts takes over what a library would."""
    if call.groups == 1 or hardware.device.kind != "gpu":
        return 1.0
    if call.accumulate:
        return 1.0 / TO_WEIGHT
    return 1.0 / {Phase.FORWARD: FORWARD, Phase.RECOMPUTE: AGAIN}.get(call.phase, TO_INPUT)


def experts_activate(ops: Sequence[Op], model: Transformer) -> bool:
    """Whether experts' first products activate what they write: gate and up at once, of tokens where they lie, with
    nothing of an adapter to be added before."""
    if not model.experts or not model.gated or model.routing.on_inputs:
        return False
    return any(before.name == "gate_up" and op.name == "activation" for before, op in pairwise(ops))


def slower_rows(op: str, phase: Phase, model: Transformer, hardware: Hardware, *, activates: bool) -> float:
    """What an operator around the products of experts takes over what its bytes would.

    `activates`: whether the products do (`experts_activate`).
    """
    if hardware.device.kind != "gpu" or not model.experts or (op == "dispatch" and model.routing.on_inputs):
        return 1.0
    if op == "activation" and phase != Phase.BACKWARD and not activates:
        return 1.0
    if (op, Phase.FORWARD if phase == Phase.RECOMPUTE else phase) in WITHIN:
        return 0.0
    return WEIGHED if (op, phase) == ("activation", Phase.BACKWARD) else 1.0


def slower_update(optimizer: Optimizer, hardware: Hardware) -> float:
    """What an update takes over what its bytes do."""
    return CODES if optimizer == "adamw-8bit" and hardware.device.kind == "gpu" else 1.0
