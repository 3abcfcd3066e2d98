"""Weights, gradients and optimizer state in a program: what stays, what passes through slots, what the host holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from flopwise.plan.program.builder import Builder
from flopwise.plan.program.sizes import Sizes, State, activation_bytes
from flopwise.records.plan import Plan, Residency
from flopwise.records.program import Owner, aligned
from flopwise.work.parameters import ENDS, End

Part = int | Literal["embedding", "head"]
"""A layer, or one of the ends."""


class PlaceOf(TypedDict):
    """Which part a task is of."""

    layer: int | None
    end: End | None


def place_of(part: Part) -> PlaceOf:
    """A part as a task tells it: its layer, or its end."""
    if isinstance(part, int):
        return {"layer": part, "end": None}
    return {"layer": None, "end": part}


def ends_of(sizes: Sizes) -> dict[Part, State]:
    """The ends that hold parameters: one where they share a matrix."""
    return {end: state for end in ENDS if (state := getattr(sizes, end)).parameters}


def kept_on_host(plan: Plan, kind: Owner, *, stays: bool, end: bool = False) -> bool:
    """Whether the host needs room for a part's state: what passes, what it updates, and what a rule copies.

    A rule that copies everything copies the weights alone of ends that stay.
    """
    if plan.update_place == "host":
        return True
    if plan.host_copies:
        return not (end and stays) or kind == "weights"
    if stays:
        return False
    if kind != "gradients":
        return True
    # A gradient that is made and used up within one round never leaves the device.
    return plan.rounds_per_step > 1 or plan.update_when == "end"


class Kept:
    """One kind of state of every part."""

    def __init__(self, builder: Builder, plan: Plan, sizes: Sizes, kind: Owner, residency: Residency) -> None:
        self.builder = builder
        self.kind = kind
        self.parts: dict[Part, State] = {**dict.fromkeys(range(sizes.layers), sizes.block), **ends_of(sizes)}
        staying = residency.staying(sizes.layers)
        self.staying: set[Part] = {*staying, *(end for end in residency.ends if end in self.parts)}
        self.slot: dict[Part, int] = {}
        self.host: dict[Part, int] = {}
        first = "" if kind == "gradients" else "v0"
        for part in self.parts:
            if part in self.staying:
                holds = f"{kind} {part} {first}" if first else ""
                name = f"{kind} {part}"
                self.slot[part] = builder.buffer(name, kind, "device", self.size(part), holds=holds)
        self._passing_slots(residency, "v0" if kind == "weights" and plan.update_place == "device" else "")
        for part in self.parts:
            if kept_on_host(plan, kind, stays=part in self.staying, end=not isinstance(part, int)):
                holds = f"{kind} {part} {first}" if first else ""
                self.host[part] = builder.buffer(f"host {kind} {part}", kind, "host", self.size(part), holds=holds)

    def size(self, part: Part) -> int:
        """Bytes of a part."""
        found: int = getattr(self.parts[part], self.kind)
        return found

    def _passing_slots(self, residency: Residency, version: str) -> None:
        """Layer after layer takes the next slot, down again in backward: so every layer always has the same one."""
        passing = [part for part in self.parts if isinstance(part, int) and part not in self.staying]
        slots = []
        for number in range(min(residency.passing, len(passing))):
            # Backward ends with the lowest layers, so a step begins with them on the device.
            holds = f"{self.kind} {passing[number]} {version}" if version else ""
            name = f"{self.kind} slot {number}"
            slots.append(self.builder.buffer(name, self.kind, "device", self.size(passing[number]), holds=holds))
        for index, part in enumerate(passing):
            if slots:
                self.slot[part] = slots[index % len(slots)]
        ends = [part for part in self.parts if not isinstance(part, int) and part not in self.staying]
        if ends:
            holds = f"{self.kind} {ends[0]} {version}" if version else ""
            most = max(self.size(part) for part in ends)
            slot = self.builder.buffer(f"{self.kind} slot of the ends", self.kind, "device", most, holds=holds)
            self.slot.update(dict.fromkeys(ends, slot))

    def here(self, part: Part) -> bool:
        """Whether the part's value is on the device now."""
        return self.builder.values[self.slot[part]].startswith(f"{self.kind} {part} ")

    def bring(self, part: Part, round_: int) -> int:
        """The buffer that holds the part, loaded if it was not there."""
        slot = self.slot[part]
        if not self.here(part):
            host = self.host[part]
            self.builder.task(
                "load",
                "copy-in",
                reads=(host,),
                writes=((slot, self.builder.values[host]),),
                round_=round_,
                **place_of(part),
                what=self.kind,
                size=self.size(part),
            )
        return slot

    def send(self, part: Part, round_: int) -> None:
        """Store the part's value in its place on the host."""
        slot = self.slot[part]
        self.builder.task(
            "store",
            "copy-out",
            reads=(slot,),
            writes=((self.host[part], self.builder.values[slot]),),
            round_=round_,
            **place_of(part),
            what=self.kind,
            size=self.size(part),
        )


@dataclass(slots=True)
class Piece:
    """A part's optimizer state, or as much of it as fits a slot."""

    parameters: int
    size: int
    device: int | None
    """Its own buffer where it stays."""
    host: int | None


class OptimizerState:
    """Optimizer state of every part, that of the ends in pieces which pass through the slots of the blocks."""

    def __init__(self, builder: Builder, plan: Plan, sizes: Sizes) -> None:
        self.builder = builder
        self.pieces: dict[Part, list[Piece]] = {}
        residency = plan.optimizer_state
        staying = {*residency.staying(sizes.layers), *residency.ends}
        on_host = plan.update_place == "host"
        parts: dict[Part, State] = {**dict.fromkeys(range(sizes.layers), sizes.block), **ends_of(sizes)}
        for part, state in parts.items():
            stays = part in staying and not on_host
            whole = stays or on_host or isinstance(part, int)
            self.pieces[part] = [
                self._piece(
                    plan, part, index, parameters,
                    state.optimizer if whole else aligned(parameters * state.optimizer_each),
                    stays=stays,
                )
                for index, parameters in enumerate([state.parameters] if whole else sizes.pieces(state))
            ]  # fmt: skip
        self.slots: list[int] = []
        if any(piece.device is None for pieces in self.pieces.values() for piece in pieces) and not on_host:
            size = max(piece.size for pieces in self.pieces.values() for piece in pieces if piece.device is None)
            borrowed = borrowed_slots(plan, sizes, size)
            self.slots = [
                builder.buffer(f"optimizer slot {number}", "optimizer", "device", size, borrowed=number < borrowed)
                for number in range(max(1, residency.passing))
            ]
        self._next = 0

    def _piece(self, plan: Plan, part: Part, index: int, parameters: int, size: int, *, stays: bool) -> Piece:
        name, value = f"optimizer {part}.{index}", f"optimizer {part}.{index} v0"
        device = self.builder.buffer(name, "optimizer", "device", size, holds=value) if stays else None
        host = None
        if kept_on_host(plan, "optimizer", stays=stays, end=not isinstance(part, int)):
            host = self.builder.buffer(f"host {name}", "optimizer", "host", size, holds=value)
        return Piece(parameters, size, device, host)

    def slot(self) -> int:
        """The slot whose turn it is."""
        self._next += 1
        return self.slots[(self._next - 1) % len(self.slots)]


def borrowed_slots(plan: Plan, sizes: Sizes, slot: int) -> int:
    """Slots for optimizer state that lie where activations were: at the end of a step there are none any more."""
    if plan.update_when == "backward" or not slot:
        return 0
    return min(max(1, plan.optimizer_state.passing), activation_bytes(sizes, plan)["device"] // slot)
