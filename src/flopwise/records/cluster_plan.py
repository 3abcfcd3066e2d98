"""What planning hands on: `ClusterPlan`, the file, and `Answer`, the best strategy among those that were tried."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from flopwise.base.errors import FlopwiseError
from flopwise.base.shown import Shown
from flopwise.records.outcome import WRITTEN_BY, Outcome, check_expected
from flopwise.records.prediction import Prediction
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import SettledSetup
from flopwise.setup.stack import Stack
from flopwise.setup.words import Fusion
from flopwise.setup.written import WrittenStrategy, read_setup
from flopwise.work.model import Model
from flopwise.work.op import AttentionKernel
from flopwise.work.optimizers import Optimizer
from flopwise.work.work import Recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlan(WrittenStrategy):
    """What `plan.toml` holds beside the model's description."""

    hardware: str
    devices: int
    sequence_tokens: int
    batch_sequences: int
    micro_batch_sequences: int
    precision: str
    recompute: Recompute
    attention: AttentionKernel
    fusion: Fusion
    optimizer: Optimizer
    stack: str
    parallel: Parallel
    expected: Outcome | None = None
    """None where the devices are not described well enough to be predicted, such as processes on one CPU."""
    device_memory_bytes: int | None = None
    """The cap that it was made for; None: all of the device."""

    def __post_init__(self) -> None:
        check_expected(self.expected)
        for name in ("sequence_tokens", "batch_sequences", "micro_batch_sequences"):
            if getattr(self, name) < 1:
                raise FlopwiseError(f"{name} of a plan must be at least 1, got {getattr(self, name)}", hint=WRITTEN_BY)
        if self.devices != self.parallel.devices:
            raise FlopwiseError(
                f"the plan is for {self.devices:,} devices, its [parallel] for {self.parallel.devices:,}",
                why="the degrees multiplied are the number of devices",
                hint=WRITTEN_BY,
            )

    def setup(self, model: Model, hardware: Hardware, stack: Stack | None = None) -> SettledSetup:
        """What it is a plan of; `stack`: what its name stands for, None where no framework is in the way."""
        return read_setup(self, SettledSetup, model, hardware, hardware_name=self.hardware, stack=stack)


def plan_of(prediction: Prediction, hardware: str, device_memory_bytes: int | None) -> ClusterPlan:
    """The plan of what was predicted; `hardware`: the name by which its file is to find it."""
    words = {field.name: getattr(prediction, field.name) for field in fields(WrittenStrategy)}
    # What a framework keeps on the host is no part of its plan.
    expected = replace(prediction.expected, host_bytes=None)
    return ClusterPlan(**words | {"hardware": hardware}, expected=expected, device_memory_bytes=device_memory_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundStrategy(Outcome):
    """What is known of a strategy by which a search tells it from others."""

    micro_batch_sequences: int
    recompute: Recompute
    parallel: Parallel
    step_s: float
    device_bytes: int
    parts: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loser:
    """A strategy that lost, and where."""

    option: FoundStrategy
    slower: float
    """Share of the best's time that it takes longer."""
    lost: dict[str, float]
    """By part of the step, shares of the best's time that it takes longer there (negative: that it gains)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The best strategy of a changed question."""

    devices: int
    capacity_bytes: int
    option: FoundStrategy | None
    """None: nothing fits, or nothing legal."""
    speed: float | None
    """Tokens per second over those of the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The best, the rest, and how many were tried."""

    best: FoundStrategy
    losers: tuple[Loser, ...]
    what_if: tuple[WhatIf, ...]
    evaluated: int
    fitting: int
    timed: int


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlannedCluster(Shown):
    """The best strategy, predicted in full and as a plan that can be run; `answer` tells what it was chosen from."""

    prediction: Prediction
    """With its interval."""
    plan: ClusterPlan
    answer: Answer

    @property
    def figures(self) -> dict[str, str]:
        others = f"{self.answer.evaluated:,} strategies, {self.answer.fitting:,} fit"
        return self.prediction.figures | {"the best of": others}
