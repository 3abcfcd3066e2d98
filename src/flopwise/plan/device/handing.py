"""The host's part of a step: what handing kernels over takes, and when a step is better captured once and replayed.

Kernels of large models last so long that the host is far ahead of the device. Those of a BERT of 1,024 tokens last
microseconds: handed over one by one, the device waits for each of them.
"""

from __future__ import annotations

from flopwise.records.plan import Plan
from flopwise.setup.hardware import Hardware

HOST = "kernels handed over"
GRAPH = "the graph's start"
"""What a device waits for where its kernels are shorter than the host takes to launch them."""

REPLAY_S = 0.25e-3
"""What it takes for a step that is replayed: the tokens are laid out, the graph is handed over, its end is awaited."""
MUCH = 0.5
"""Above this share of the device's time the host's is worth a graph: waits of single kernels add up."""
MUCH_ALONE = 0.15
"""The same of a step without copies over the link, which hide no wait: of one that took the card 126 ms one machine's
host was done after 78, another's after 163."""

BLOCK_KERNELS, ENDS_KERNELS, HEAD_KERNELS, UPDATE_KERNELS = 52, 24, 20, 2
"""Kernels of a (layer, chunk) there and back, of a chunk's embedding, of a piece of the head, of a part's update, as
counted in traces of BERT and GPT-2."""
MOST_KERNELS = 16384
"""A graph of more takes seconds to be made, and memory that nobody has planned: such steps last long anyway."""


def kernels_of(plan: Plan) -> int:
    """That a step launches."""
    heads = sum(-(-plan.tokens_of(chunk) // plan.head_chunk_tokens) for chunk in range(plan.chunks_per_round))
    each = plan.chunks_per_round * (plan.layers * BLOCK_KERNELS + ENDS_KERNELS) + heads * HEAD_KERNELS
    return plan.rounds_per_step * each + UPDATE_KERNELS * (plan.layers + 2)


def handing_s(plan: Plan, hardware: Hardware) -> float:
    """What the host takes to hand over a step kernel by kernel."""
    return kernels_of(plan) * hardware.call_s


def is_replayed(plan: Plan, hardware: Hardware, step_s: float) -> bool:
    """Whether a step whose kernels take `step_s` is captured and replayed.

    Updates on the host cannot be: they are no work of the device.
    """
    if hardware.device.kind == "cpu" or plan.update_place == "host" or kernels_of(plan) > MOST_KERNELS:
        return False
    return handing_s(plan, hardware) > (MUCH_ALONE if _stays(plan) else MUCH) * step_s


def _stays(plan: Plan) -> bool:
    """Whether weights, optimizer state and what backward keeps stay on the device."""
    state = (plan.weights, plan.optimizer_state)
    return all(each.blocks == plan.layers for each in state) and "".join(plan.saves).isupper()


def host_waits(plan: Plan, hardware: Hardware, step_s: float) -> dict[str, float]:
    """What a device waits for whose step takes so long by itself, and how long; nothing where the host is ahead."""
    if hardware.device.kind == "cpu":
        return {}
    if plan.replay:
        return {GRAPH: REPLAY_S}
    waited_s = handing_s(plan, hardware) - step_s
    return {HOST: waited_s} if waited_s > 0 else {}
