"""The least memory with which a plan exists, for when none fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flopwise.base.errors import DoesNotFit
from flopwise.base.units import exact_tokens, show_bytes
from flopwise.plan.device.estimate import Choice, Floats, Shape
from flopwise.plan.device.memory import plan_bytes
from flopwise.plan.device.search import Candidate, fitting_plan
from flopwise.plan.device.tight import tight_choices, tight_shapes
from flopwise.setup.setup import CappedSetup
from flopwise.work.parameters import Place

SHORTER = 4
"""A hint shortens the sequence by this factor."""
SHORTEST = 64
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Least:
    """A cap with which something fits, and what it is taken by."""

    bytes: int
    by_owner: dict[str, int]


def least_device(setup: CappedSetup) -> Least | None:
    """The least device memory with the host's cap as it is; None: no amount helps."""
    return _least(setup, "device")


def least_host(setup: CappedSetup) -> Least | None:
    """The least host memory with the device's cap as it is."""
    return _least(setup, "host")


def _least(setup: CappedSetup, place: Place) -> Least | None:
    """Of the choices that need the least by their figures, the one that does as a plan, in whole chunks."""
    found: list[tuple[float, Candidate]] = []
    for shape in tight_shapes(setup):
        choices = tight_choices(shape)
        needed = _needed(shape, choices, setup, place)
        for slots in np.unique(choices.slots):
            of_these = np.where(choices.slots == slots, needed, np.inf)
            index = int(np.argmin(of_these))
            if np.isfinite(of_these[index]):
                found.append((float(of_these[index]), Candidate(shape, choices.at(index), 0.0)))
    least: Least | None = None
    for size, candidate in sorted(found, key=lambda one: one[0]):
        if least is not None and size >= least.bytes:
            break
        there = _rounded(candidate, int(size) + 1, setup, place)
        if there is not None and (least is None or there.bytes < least.bytes):
            least = there
    return least


def _rounded(candidate: Candidate, cap: int, setup: CappedSetup, place: Place) -> Least | None:
    """What the candidate takes as a plan, for which a little more may be needed."""
    for _ in range(8):
        device, host = (cap, setup.host_cap_bytes) if place == "device" else (setup.device_cap_bytes, cap)
        plan = fitting_plan(candidate, setup.hardware, device, host)
        if plan is not None:
            taken = plan_bytes(plan, candidate.shape.sizes)[place]
            return Least(sum(taken.values()), taken)
        cap += candidate.shape.slot
    return None


def _needed(shape: Shape, choices: Choice, setup: CappedSetup, place: Place) -> Floats:
    """Bytes of the place that each choice needs, the other place having what it has."""
    held = shape.state_on_host(choices)
    slots = np.clip(choices.slots, shape.least_slots, shape.pairs)
    in_slots = slots * shape.slot
    least = (shape.pairs - slots) / shape.plan.chunks_per_sequence * shape.curve.least_bytes
    # The state that passes at the end of a step does so where activations were, as far as there are so many.
    piece = shape.passing_piece(choices)
    if place == "device":
        room = setup.host_cap_bytes - held
        activations = in_slots + np.maximum(0.0, least - np.maximum(room, 0.0))
        lending = np.maximum(activations, np.minimum(piece, in_slots + least))
        needed = [shape.state_on_device(choices, there) + there for there in (activations, lending)]
        return np.where(room >= 0, np.minimum(*needed), np.inf)
    activations = setup.device_cap_bytes - shape.state_on_device(choices, np.inf)
    lends = np.minimum(activations, in_slots + least) >= piece
    room = np.where(lends, activations, setup.device_cap_bytes - shape.state_on_device(choices, in_slots)) - in_slots
    return np.where(room >= 0, held + np.maximum(0.0, least - np.maximum(room, 0.0)), np.inf)


def does_not_fit(setup: CappedSetup, *, elsewhere: bool = True) -> DoesNotFit:
    """Why nothing fits, and the smallest change that would help; `elsewhere`: another device may be one."""
    model = setup.model.name
    device, host = least_device(setup), least_host(setup)
    what = (
        f"no plan fits {model} on {setup.hardware.name} in {show_bytes(setup.device_cap_bytes)} of device memory and"
        f" {show_bytes(setup.host_cap_bytes)} of host memory"
    )
    hints = []
    if device is not None and device.bytes <= setup.hardware.device.dram.size_bytes.value:
        hints.append(f"--device-mem {_round_up(device.bytes)}")
    if host is not None:
        hints.append(f"--host-mem {_round_up(host.bytes)}")
    shorter = _fitting_sequence(setup)
    if shorter:
        hints.append(f"--seq {exact_tokens(shorter)}")
    if elsewhere and setup.hardware.device.kind == "cpu":
        hints.append("another device, as --on h200 (`flopwise ls hardware`)")
    return DoesNotFit(
        what,
        why=_why(device, host),
        hint=", or ".join(hints) or "more memory of both kinds, or a smaller model",
        needed_bytes=device.bytes if device else host.bytes if host else None,
        place="device" if device or not host else "host",
    )


def _fitting_sequence(setup: CappedSetup) -> int:
    """A shorter sequence that fits, found by quartering; 0: not even the shortest does."""

    def fits(tokens: int) -> bool:
        less = least_device(replace(setup, sequence_tokens=tokens))
        return less is not None and less.bytes <= setup.device_cap_bytes

    shorter = []
    tokens = setup.sequence_tokens // SHORTER
    while tokens >= SHORTEST:
        shorter.append(tokens)
        tokens //= SHORTER
    # Where the state alone is too much, no sequence is short enough: one look tells.
    if not shorter or not fits(shorter[-1]):
        return 0
    return next(tokens for tokens in shorter if fits(tokens))


def _why(device: Least | None, host: Least | None) -> str:
    found = device or host
    if found is None:
        return "the state and the smallest chunks do not fit host and device together"
    place = "device" if device is not None else "host"
    parts = ", ".join(f"{owner} {show_bytes(size)}" for owner, size in found.by_owner.items())
    return f"the smallest plan needs {show_bytes(found.bytes)} of {place} memory: {parts}"


def _round_up(size: int) -> str:
    """Whole GiB, or MiB where it is little."""
    if size > 4 * GIB:
        return f"{-(-size // GIB)}GiB"
    return f"{-(-size // 2**20)}MiB"
