"""A plan's memory by owner and place, from its figures alone: what its program's buffers add up to."""

from __future__ import annotations

from flopwise.plan.program.sizes import Sizes, State, activation_bytes, largest_piece, working_bytes
from flopwise.plan.program.state import borrowed_slots, ends_of, kept_on_host
from flopwise.records.plan import Plan, Residency
from flopwise.records.program import Owner
from flopwise.work.parameters import Place

KINDS: tuple[Owner, ...] = ("weights", "gradients", "optimizer")


def plan_bytes(plan: Plan, sizes: Sizes) -> dict[Place, dict[str, int]]:
    """Place → owner → bytes; owners without any are left out."""
    device: dict[Owner, int] = {}
    host: dict[Owner, int] = {}
    for kind in KINDS:
        residency = plan.optimizer_state if kind == "optimizer" else getattr(plan, kind)
        device[kind], host[kind] = _state_bytes(plan, sizes, kind, residency)
    kept = activation_bytes(sizes, plan)
    device["activations"], host["activations"] = kept["device"], kept["host"]
    device.update(working_bytes(sizes, plan))
    return {
        "device": {owner: size for owner, size in device.items() if size},
        "host": {owner: size for owner, size in host.items() if size},
    }


def _state_bytes(plan: Plan, sizes: Sizes, kind: Owner, residency: Residency) -> tuple[int, int]:
    """Of one kind of state, on the device and on the host."""

    def size(state: State) -> int:
        found: int = getattr(state, kind)
        return found

    on_host = kind == "optimizer" and plan.update_place == "host"
    layers = frozenset() if on_host else residency.staying(sizes.layers)
    blocks = [size(sizes.of(layer)) for layer in sorted(layers)]
    in_flight = [mine for layer in range(sizes.layers) if layer not in layers and (mine := size(sizes.of(layer)))]
    ends = ends_of(sizes)
    staying = [state for end, state in ends.items() if end in residency.ends and not on_host]
    passing = [state for end, state in ends.items() if end not in residency.ends or on_host]
    device = sum(blocks) + sum(size(state) for state in staying)
    if kind != "optimizer":
        device += min(residency.passing, len(in_flight)) * max(in_flight, default=0)
        device += max((size(state) for state in passing), default=0)
    elif not on_host:
        piece = _largest_piece(sizes, passing, some_blocks=bool(in_flight))
        device += piece and (max(1, residency.passing) - borrowed_slots(plan, sizes, piece)) * piece
    host = 0
    if kept_on_host(plan, kind, stays=False):
        host += sum(in_flight) + sum(size(state) for state in passing)
    if kept_on_host(plan, kind, stays=True):
        host += sum(blocks)
    if kept_on_host(plan, kind, stays=True, end=True):
        host += sum(size(state) for state in staying)
    return device, host


def _largest_piece(sizes: Sizes, ends: list[State], *, some_blocks: bool) -> int:
    """The slot through which optimizer state passes: a block's, or the largest piece of an end's."""
    pieces = [sizes.block.optimizer] if some_blocks else []
    return max((*pieces, *(largest_piece(end) for end in ends)), default=0)
