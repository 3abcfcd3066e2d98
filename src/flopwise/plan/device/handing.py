"""The host's part of a step: what handing kernels over takes, and when a step is better captured once and replayed.

Kernels of large models last so long that the host is far ahead of the device. Those of a BERT of 1,024 tokens last
microseconds: handed over one by one, the device waits for each of them.
"""

from __future__ import annotations

from collections import Counter
from math import ceil

from flopwise.predict.kernels.calls import calls_for
from flopwise.predict.kernels.calls import kernels_of as listed_kernels
from flopwise.predict.simulate.tasks import BESIDE_KERNELS
from flopwise.records.plan import LETTERS, NO_BACKWARD, POLICY, Plan
from flopwise.setup.hardware import Hardware
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats
from flopwise.work.model import Model
from flopwise.work.parameters import op_groups
from flopwise.work.work import Recompute

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

UPDATE_KERNELS = 2
"""Of a part's update, as counted in traces of BERT and GPT-2."""
MOST_KERNELS = 16384
"""A graph of more takes seconds to be made, and memory that nobody has planned: such steps last long anyway."""


def kernels_of(plan: Plan, model: Model) -> int:
    """That a step launches: those of the description at each save level, and what the engine launches beside them."""
    levels = Counter("".join(plan.saves).lower().replace(NO_BACKWARD, ""))
    embed, block, head = _listed(plan, model, "none")
    block += BESIDE_KERNELS["forward"] + BESIDE_KERNELS["backward"]
    # What every level recomputes is recomputed within the kernels of backward.
    within = _listed(plan, model, POLICY["full"])[1]
    again = {letter: _listed(plan, model, POLICY[LETTERS[letter]])[1] - within for letter in levels}
    blocks = sum(count * (block + again[letter]) for letter, count in levels.items())
    embed += BESIDE_KERNELS["embed-backward"]
    head += BESIDE_KERNELS["head"]
    share = getattr(model, "loss_share", 1.0)
    heads = sum(ceil(share * plan.tokens_of(chunk) / plan.head_chunk_tokens) for chunk in range(plan.chunks_per_round))
    each = plan.chunks_per_round * embed + blocks + heads * head
    return round(plan.rounds_per_step * each) + UPDATE_KERNELS * (plan.layers + 2)


def _listed(plan: Plan, model: Model, policy: Recompute) -> tuple[float, float, float]:
    """Kernels that a description lists there and back: before the blocks, of one block in the mean, behind them."""
    calls = calls_for(
        model,
        sequence_tokens=plan.sequence_tokens,
        kernel="flash",
        formats=parse_formats(plan.precision),
        policy=policy,
        fusion="fused",
        optimizer=plan.optimizer,
        lengths=plan.packed,
    )
    work = describe(model, plan.sequence_tokens, lengths=plan.packed)
    groups = op_groups(work)
    counts = iter(listed_kernels(calls))
    embed, blocks, head = (float(sum(next(counts) for _ in group)) for group in groups)
    return embed, blocks / plan.layers, head


def handing_s(plan: Plan, model: Model, hardware: Hardware) -> float:
    """What the host takes to hand over a step kernel by kernel."""
    return kernels_of(plan, model) * hardware.call_s


def is_replayed(plan: Plan, model: Model, hardware: Hardware, step_s: float) -> bool:
    """Whether a step whose kernels take `step_s` is captured and replayed.

    Updates on the host cannot be: they are no work of the device. Nor is what asks autograd for gradients.
    """
    if hardware.device.kind == "cpu" or plan.update_place == "host" or getattr(model, "carries", False):
        return False
    kernels = kernels_of(plan, model)
    enough = kernels * hardware.call_s > (MUCH_ALONE if _stays(plan) else MUCH) * step_s
    return enough and kernels <= MOST_KERNELS


def _stays(plan: Plan) -> bool:
    """Whether weights, optimizer state and what backward keeps stay on the device."""
    state = (plan.weights, plan.optimizer_state)
    return all(each.blocks == plan.layers for each in state) and "".join(plan.saves).isupper()


def host_waits(plan: Plan, model: Model, hardware: Hardware, step_s: float) -> dict[str, float]:
    """What a device waits for whose step takes so long by itself, and how long; nothing where the host is ahead."""
    if hardware.device.kind == "cpu":
        return {}
    if plan.replay:
        return {GRAPH: REPLAY_S}
    waited_s = handing_s(plan, model, hardware) - step_s
    return {HOST: waited_s} if waited_s > 0 else {}
