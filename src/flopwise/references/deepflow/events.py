"""What the reference prints while it computes, as numbers. The order of the events is the order of its lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Place = Literal[
    "hidden forward",
    "hidden backward",
    "softmax forward",
    "softmax backward",
    "split hidden backward",
    "split softmax forward",
    "split softmax backward",
]
"""Where a pointwise part is told of; each has its own wording. (A split cell's forward pass goes unmentioned.)"""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A kernel held against the roofline."""

    flops: float
    dram_bytes: float
    seconds: float
    inflection: float

    @property
    def intensity(self) -> float:
        return self.flops / self.dram_bytes


@dataclass(frozen=True, slots=True)
class Reloads:
    """How often a product's operands come from one memory level; its result always moves once."""

    level: Literal["dram", "l2"]
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product in the faster of its two orientations."""

    name: str
    flops: float
    dram_bytes: float
    l2_bytes: float
    transposed: bool
    straight_s: float
    """As given; the print-out names this time even where the transpose is faster."""


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Element by element work."""

    place: Place
    flops: float
    moved_bytes: float
    seconds: float
    product_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reduction:
    """Summing or gathering over devices: the local work of one of its rounds."""

    flops: float
    moved_bytes: float


@dataclass(frozen=True, slots=True)
class Update:
    """Clipping one matrix's gradients and applying them."""

    name: str
    clip: Roofline
    apply: Roofline


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of the embedding read or added to."""

    backward: bool
    moved_bytes: float


Event = Roofline | Reloads | Product | Pointwise | Reduction | Update | Lookup


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, and what was computed on the way."""

    seconds: float
    events: tuple[Event, ...]


def events_of(costs: Iterable[Cost]) -> tuple[Event, ...]:
    """The events of several costs, one after the other."""
    return tuple(event for cost in costs for event in cost.events)
