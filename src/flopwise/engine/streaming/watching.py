"""What a mixture's blocks spend their time on, and how evenly their experts are used: taken while a step is watched."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flopwise.work.op import Attention, Op

BlockPart = Literal["router", "permutation", "experts", "attention"]
Moment = torch.cuda.Event | float

OF_ROUTER = ("router", "routing")
OF_PERMUTATION = ("dispatch", "combine")


@dataclass(frozen=True, slots=True)
class MixtureUse:
    """Of a step."""

    seconds: dict[BlockPart, float]
    """Forward, recompute and backward together."""
    busiest: float
    """Rows of a block's busiest expert over those of the mean one; of all blocks and chunks the mean."""
    unused: float
    """Of a block's experts the share without a token; likewise."""


class MixtureWatch:
    """Marks around operators, and the rows of experts. Off, it costs a comparison."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on = device, False
        self._marks: list[tuple[BlockPart, Moment, Moment]] = []
        self._loads: list[Tensor] = []

    def begin(self, *, watched: bool) -> None:
        """Before a step's calls are made; those of a replayed step were made when it was captured."""
        self.on = watched
        if watched:
            self._marks.clear()
            self._loads.clear()

    def begun(self, part: BlockPart | None) -> Moment | None:
        """Before what belongs to a part; None: nobody watches it."""
        return self._moment() if self.on and part is not None else None

    def ended(self, part: BlockPart | None, begun: Moment | None) -> None:
        """Behind it."""
        if begun is not None and part is not None:
            self._marks.append((part, begun, self._moment()))

    def loaded(self, starts: Tensor) -> None:
        """Where the rows of a block's experts begin, and behind the last of all."""
        if self.on:
            self._loads.append(starts.diff())

    def _moment(self) -> Moment:
        if self.device.type != "cuda":
            return time.perf_counter()
        # In a graph an event with a time has to be a node of its own.
        captures = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(enable_timing=True, external=captures)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def use(self) -> MixtureUse | None:
        """What was found, when the device is done; None: nobody watched, or there are no experts."""
        if not self._loads:
            return None
        seconds: dict[BlockPart, float] = {}
        for part, begun, ended in self._marks:
            seconds[part] = seconds.get(part, 0.0) + _between(begun, ended)
        loads = torch.stack(self._loads).double()
        return MixtureUse(
            seconds,
            busiest=float((loads.amax(-1) / loads.mean(-1)).mean()),
            unused=float((loads == 0).double().mean()),
        )


def _between(begun: Moment, ended: Moment) -> float:
    if isinstance(begun, float) and isinstance(ended, float):
        return ended - begun
    assert isinstance(begun, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
    return float(begun.elapsed_time(ended)) / 1e3


def part_of(op: Op, *, of_experts: bool) -> BlockPart | None:
    """What of a mixture's block an operator belongs to; None: to what every block has."""
    if isinstance(op, Attention):
        return "attention"
    if of_experts or op.name == "activation":
        return "experts"
    if op.name in OF_ROUTER:
        return "router"
    return "permutation" if op.name in OF_PERMUTATION else None
