"""Weights, gradients and optimizer state in a program: what stays, what is in flight, what the host holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from flopwise.plan.program.builder import Builder
from flopwise.plan.program.sizes import Sizes, State, activation_bytes
from flopwise.records.plan import Plan, Residency
from flopwise.records.program import Buffer, Owner, Value
from flopwise.work.parameters import ENDS, End, Part


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
    """The ends that hold weights: one where they share a matrix."""
    return {end: state for end in ENDS if (state := sizes.of(end)).weights}


def parts_of(sizes: Sizes) -> dict[Part, State]:
    """All parts with weights: layers and ends."""
    return {**{layer: sizes.of(layer) for layer in range(sizes.layers)}, **ends_of(sizes)}


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


def copy_state(
    builder: Builder,
    kind: Literal["load", "store"],
    what: Owner,
    part: Part,
    round_: int,
    *,
    source: int,
    target: int,
    size: int,
    first: int = 0,
) -> None:
    """A part's state over the link, the same value in both places then."""
    builder.task(
        kind,
        "copy-in" if kind == "load" else "copy-out",
        reads=(source,),
        writes=((target, builder.require(source)),),
        round_=round_,
        **place_of(part),
        what=what,
        size=size,
        first=first,
    )


class Kept:
    """Weights or gradients of every part."""

    def __init__(
        self, builder: Builder, plan: Plan, sizes: Sizes, kind: Literal["weights", "gradients"], residency: Residency
    ) -> None:
        self.builder = builder
        self.kind: Literal["weights", "gradients"] = kind
        self.parts = {part: state for part, state in parts_of(sizes).items() if getattr(state, kind)}
        staying = residency.staying(sizes.layers)
        self.staying = {part for part in (*staying, *residency.ends) if part in self.parts}
        self.first_reached, self.updates_at_end = sizes.first_reached, plan.update_when == "end"
        self.slot: dict[Part, int] = {}
        self.host: dict[Part, int] = {}
        for part in self.parts:
            if part in self.staying:
                home = Buffer(kind, "device", "home", self.size(part), part)
                self.slot[part] = builder.buffer(home, self._at_start(part))
        self._slots_in_flight(residency, loaded=plan.update_place == "device")
        for part in self.parts:
            if kept_on_host(plan, kind, stays=part in self.staying, end=not isinstance(part, int)):
                home = Buffer(kind, "host", "home", self.size(part), part)
                self.host[part] = builder.buffer(home, self._at_start(part))

    def size(self, part: Part) -> int:
        """Bytes of a part."""
        found: int = getattr(self.parts[part], self.kind)
        return found

    def _at_start(self, part: Part) -> Value | None:
        """What a part's home holds when a step begins: weights, but no gradient yet."""
        return Value("weights", part) if self.kind == "weights" else None

    def _slots_in_flight(self, residency: Residency, *, loaded: bool) -> None:
        """Layer after layer takes the next slot, down again in backward: so every layer always has the same one.

        `loaded`: backward ends with the lowest layers, so a step begins with their weights on the device. Where the
        host updates them, they are out of date by then.
        """

        def slot(size: int, number: int | None, first: Part) -> int:
            buffer = Buffer(self.kind, "device", "slot", size, number=number)
            return self.builder.buffer(buffer, self._at_start(first) if loaded else None)

        in_flight = [part for part in self.parts if isinstance(part, int) and part not in self.staying]
        count = min(residency.passing, len(in_flight))
        largest = max(map(self.size, in_flight), default=0)
        for number in range(count):
            mine = in_flight[number::count]
            # Where a step ends: with the lowest layer that is updated behind all of backward, or that backward comes
            # to, or where it comes to none with the highest.
            updated = [part for part in mine if self.parts[part].parameters and self.updates_at_end]
            last = (*updated, *(part for part in mine if part >= self.first_reached), mine[-1])[0]
            self.slot.update(dict.fromkeys(mine, slot(largest, number, last)))
        ends = [part for part in self.parts if not isinstance(part, int) and part not in self.staying]
        if ends:
            # The last one that a step needs: the embedding for its update, or the head's backward before it.
            trained = [end for end in ends if self.parts[end].parameters]
            shared = slot(max(self.size(part) for part in ends), None, (trained or ends[-1:])[0])
            self.slot.update(dict.fromkeys(ends, shared))

    def here(self, part: Part) -> bool:
        """Whether the part's value is on the device now."""
        value = self.builder.value(self.slot[part])
        return value is not None and value.part == part

    def bring(self, part: Part, round_: int) -> int:
        """The buffer that holds the part, loaded if it was not there."""
        slot = self.slot[part]
        if not self.here(part):
            size = self.size(part)
            copy_state(self.builder, "load", self.kind, part, round_, source=self.host[part], target=slot, size=size)
        return slot

    def send(self, part: Part, round_: int) -> None:
        """Store the part's value in its place on the host."""
        source, target, size = self.slot[part], self.host[part], self.size(part)
        if self.kind == "weights":
            # What is frozen is there already, behind what is not.
            size = self.parts[part].trained
        copy_state(self.builder, "store", self.kind, part, round_, source=source, target=target, size=size)


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
        for part, state in parts_of(sizes).items():
            stays = part in staying and not on_host
            whole = stays or on_host or isinstance(part, int)
            self.pieces[part] = [
                self._piece(plan, part, index, parameters, size, stays=stays)
                for index, (parameters, size) in enumerate(_pieces(state, whole=whole))
            ]
        self.slots: list[int] = []
        if any(piece.device is None for pieces in self.pieces.values() for piece in pieces) and not on_host:
            size = max(piece.size for pieces in self.pieces.values() for piece in pieces if piece.device is None)
            borrowed = borrowed_slots(plan, sizes, size)
            self.slots = [
                builder.buffer(Buffer("optimizer", "device", "slot", size, number=number, borrowed=number < borrowed))
                for number in range(max(1, residency.passing))
            ]
        self._next = 0

    def _piece(self, plan: Plan, part: Part, index: int, parameters: int, size: int, *, stays: bool) -> Piece:
        value = Value("optimizer", part, index)
        device = host = None
        if stays:
            device = self.builder.buffer(Buffer("optimizer", "device", "home", size, part, index), value)
        if kept_on_host(plan, "optimizer", stays=stays, end=not isinstance(part, int)):
            host = self.builder.buffer(Buffer("optimizer", "host", "home", size, part, index), value)
        return Piece(parameters, size, device, host)

    def slot(self) -> int:
        """The slot whose turn it is."""
        self._next += 1
        return self.slots[(self._next - 1) % len(self.slots)]


def _pieces(state: State, *, whole: bool) -> list[tuple[int, int]]:
    """(parameters, bytes) of the pieces that a part's state lies in."""
    if whole:
        return [(state.parameters, state.optimizer)] if state.parameters else []
    return [(piece.parameters, piece.bytes) for piece in state.pieces]


def borrowed_slots(plan: Plan, sizes: Sizes, slot: int) -> int:
    """Slots for optimizer state that lie where activations were: at the end of a step there are none any more."""
    if plan.update_when == "backward" or not slot:
        return 0
    return min(max(1, plan.optimizer_state.passing), activation_bytes(sizes, plan)["device"] // slot)
