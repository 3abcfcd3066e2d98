"""`Evidence`: how far measured steps lay from held-out predictions, and what set-ups they were of."""

from __future__ import annotations

from dataclasses import dataclass

from flopwise.base.errors import FlopwiseError


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The least and the most that the data hold of something."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise FlopwiseError(f"a span from {self.least} to {self.most} holds nothing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The held-out errors of one table's rows that shard alike."""

    table: str
    stack: str
    """Catalogue name of the framework that was measured."""
    architectures: tuple[str, ...]
    """Of the devices."""
    zero: int
    """Their ZeRO stage."""
    features: tuple[str, ...]
    """What some of them have that not all set-ups do (`Parallel.features`)."""
    measured: bool
    """False: the table's times were themselves computed, and say nothing about other frameworks."""
    n: int
    low: float
    """Measured ÷ predicted − 1 of a step's seconds: eight rows of ten lie between this and `high`."""
    high: float
    level: float
    """The median of the same."""
    parameters: Span
    sequence_tokens: Span
    devices: Span
    tensor: Span
    """Tensor ranks."""
    pipeline: Span
    """Stages."""
    micro_tokens: Span
    """Tokens of a micro-batch on one data rank."""
    how: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceBook:
    """All that the catalogue holds."""

    entries: tuple[Evidence, ...]
