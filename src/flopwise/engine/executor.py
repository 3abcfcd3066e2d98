"""What the training loop asks of an executor, whether it streams on one device or shards over several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flopwise.engine.batch import Batch
from flopwise.records.measurement import MemoryRow
from flopwise.work.optimizers import Moment, StateField
from flopwise.work.parameters import Parameter


class Left(Exception):  # noqa: N818 - nothing is wrong
    """A step, or an evaluation, was given up on request."""


def never() -> bool:
    """Whether to leave a step that nobody wants to be left."""
    return False


@dataclass(frozen=True, slots=True)
class Rewards:
    """Of pairs of answers, the mean of β · log(how much likelier than the reference finds them they have become)."""

    chosen: float
    rejected: float
    accuracy: float
    """Share of pairs whose better answer gained more."""

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected


@dataclass(frozen=True, slots=True)
class RoutingFigures:
    """What a mixture's routing adds to the loss of a step, and how even it was."""

    balance_loss: float
    """As it was added to the loss of the data; so is the next."""
    z_loss: float
    busiest: float
    """Tokens of a layer's busiest expert over those of the mean one; of all layers and rounds the mean."""
    unused: float
    """Of a layer's experts the share without a token; likewise."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step leaves to be told."""

    loss: float
    """Mean over what has a loss, on all ranks."""
    with_loss: int
    gradient_norm: float | None
    waited_s: float | None
    """That computations waited for copies and for the host; None where it is not measured."""
    rewards: Rewards | None = None
    routing: RoutingFigures | None = None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A pass over held-out data."""

    loss: float
    correct: int
    with_loss: int
    sequences: int
    rewards: Rewards | None = None


class Executor(Protocol):
    """Holds a model's numbers and trains them."""

    parameters: tuple[Parameter, ...]

    def set_weights(self, values: Mapping[str, Tensor]) -> None:
        """Give parameters their values, by name; a master copy follows."""

    def set_moment(self, name: str, moment: Moment, values: Tensor) -> None:
        """Give one kind of a parameter's optimizer state its values."""

    def remembered(self) -> Iterator[tuple[Parameter, StateField]]:
        """What the optimizer's state has of each trained parameter."""

    def clear_moments(self) -> None:
        """Nothing was learned yet."""

    def weights(self) -> dict[str, Tensor]:
        """Trained parameters by name, whole: to read, not to keep."""

    def frozen_weights(self) -> Mapping[str, Tensor]:
        """Those that are not trained, each made when it is asked for: to read, not to keep."""

    def row_lengths(self, name: str) -> Tensor:
        """Of a frozen matrix, on every rank."""

    def moments(self) -> Iterator[tuple[str, Moment, Tensor]]:
        """(parameter, which, numbers) of the optimizer's state, whole: to read, not to keep."""

    def not_finite(self) -> tuple[str, ...]:
        """What of the weights and the optimizer's state holds NaN or infinity, as far as this rank holds it."""

    def step(self, batch: Batch, number: int, *, leaves: Callable[[], bool] = never) -> StepResult:
        """Train on a global batch; `number` counts steps from 0. With several ranks each is given the same batch.

        `leaves` tells whether to give the step up. It is asked again and again for as long as nothing has been updated;
        then `Left` is raised, and all numbers are those from before the step. Several ranks finish it.
        """

    def evaluate(self, batches: Iterable[Batch]) -> Evaluated:
        """The loss and the right answers of held-out data; nothing is learned from it."""

    def agree(self, asked: bool) -> bool:
        """Whether any rank was asked to stop: all have to do it after the same step."""

    def memory(self) -> tuple[MemoryRow, ...]:
        """By place and owner, as planned and as it is, and what nobody planned."""

    def close(self) -> None:
        """Give back what does not go by itself."""
