"""The least memory with which a plan exists, for when none fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flopwise.base.errors import DoesNotFit
from flopwise.base.units import exact_tokens, show_bytes
from flopwise.plan.device.cuts import DeviceQuestion
from flopwise.plan.device.estimate import Choice, Floats, Shape
from flopwise.plan.device.memory import plan_bytes
from flopwise.plan.device.search import Candidate, fitting_plan
from flopwise.plan.device.tight import tight_choices, tight_shapes
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


def least_device(question: DeviceQuestion) -> Least | None:
    """The least device memory with the host's cap as it is; None: no amount helps."""
    return _least(question, "device")


def least_host(question: DeviceQuestion) -> Least | None:
    """The least host memory with the device's cap as it is."""
    return _least(question, "host")


def _least(question: DeviceQuestion, place: Place) -> Least | None:
    found: tuple[float, Candidate] | None = None
    for shape in tight_shapes(question):
        choices = tight_choices(shape)
        needed = _needed(shape, choices, question, place)
        index = int(np.argmin(needed))
        if np.isfinite(needed[index]) and (found is None or needed[index] < found[0]):
            found = float(needed[index]), Candidate(shape, choices.at(index), 0.0)
    if found is None:
        return None
    # A little more, so that what is rounded to whole chunks fits too.
    cap = int(found[0]) + 1
    for _ in range(8):
        wider = replace(question, device_bytes=cap) if place == "device" else replace(question, host_bytes=cap)
        plan = fitting_plan(found[1], wider)
        if plan is not None:
            taken = plan_bytes(plan, found[1].shape.sizes)[place]
            return Least(sum(taken.values()), taken)
        cap += found[1].shape.slot
    return None


def _needed(shape: Shape, choices: Choice, question: DeviceQuestion, place: Place) -> Floats:
    """Bytes of the place that each choice needs, the other place having what it has."""
    fixed = shape.state_on_device(choices) + shape.least_slots * shape.slot
    held = shape.state_on_host(choices)
    all_in_slots = shape.pairs <= shape.least_slots
    least = 0.0 if all_in_slots else shape.sequences * shape.curve.least_bytes
    if place == "device":
        room = question.host_bytes - held
        return np.where(room >= 0, fixed + np.maximum(0.0, least - np.maximum(room, 0.0)), np.inf)
    room = question.device_bytes - fixed
    return np.where(room >= 0, held + np.maximum(0.0, least - np.maximum(room, 0.0)), np.inf)


def does_not_fit(question: DeviceQuestion, *, elsewhere: bool = True) -> DoesNotFit:
    """Why nothing fits, and the smallest change that would help; `elsewhere`: another device may be one."""
    model = question.model.name
    device, host = least_device(question), least_host(question)
    what = (
        f"no plan fits {model} on {question.hardware.name} in {show_bytes(question.device_bytes)} of device memory and"
        f" {show_bytes(question.host_bytes)} of host memory"
    )
    hints = []
    if device is not None and device.bytes <= question.hardware.device.dram.size_bytes.value:
        hints.append(f"--device-mem {_rounded_up(device.bytes)}")
    if host is not None:
        hints.append(f"--host-mem {_rounded_up(host.bytes)}")
    shorter = _fitting_sequence(question)
    if shorter:
        hints.append(f"--seq {exact_tokens(shorter)}")
    if elsewhere and question.hardware.device.kind == "cpu":
        hints.append("another device, as --on h200 (`flopwise ls hardware`)")
    return DoesNotFit(
        what,
        why=_why(device, host),
        hint=", or ".join(hints) or "more memory of both kinds, or a smaller model",
        needed_bytes=device.bytes if device else host.bytes if host else None,
        place="device" if device or not host else "host",
    )


def _fitting_sequence(question: DeviceQuestion) -> int:
    """A shorter sequence that fits, found by quartering; 0: not even the shortest does."""

    def fits(tokens: int) -> bool:
        less = least_device(replace(question, sequence_tokens=tokens))
        return less is not None and less.bytes <= question.device_bytes

    shorter = []
    tokens = question.sequence_tokens // SHORTER
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


def _rounded_up(size: int) -> str:
    """Whole GiB, or MiB where it is little."""
    if size > 4 * GIB:
        return f"{-(-size // GIB)}GiB"
    return f"{-(-size // 2**20)}MiB"
