"""Updates of a piece of a part's numbers, on the device or on the host, and the norm that clips them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flopwise.engine.formats import TYPES
from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.dispatch import AdamW, Seed
from flopwise.engine.streaming.layout import moment_fields
from flopwise.setup.training import Training
from flopwise.work.formats import Formats
from flopwise.work.parameters import Parameter, Part

NORM_EPSILON = 1e-6
"""Added to the norm before it divides, as torch does."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring numbers of a part that are treated alike."""

    first: int
    last: int
    decays: bool


class PartNumbers:
    """A part's trained numbers in a row: how many, where they begin among all, and which of them decay."""

    def __init__(self, parameters: Iterable[Parameter], offset: int) -> None:
        self.parameters = tuple(parameters)
        self.offset = offset
        self.count = sum(parameter.elements for parameter in self.parameters)
        runs: list[Run] = []
        for parameter in self.parameters:
            last = parameter.first + parameter.elements
            if runs and runs[-1].decays == parameter.decays:
                runs[-1] = replace(runs[-1], last=last)
            else:
                runs.append(Run(parameter.first, last, parameter.decays))
        self.runs = tuple(runs)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name within the part → its tensor, of all its numbers in a row."""
        return {
            parameter.local: flat[parameter.first : parameter.first + parameter.elements].view(parameter.shape)
            for parameter in self.parameters
        }


def numbers_by_part(parameters: Iterable[Parameter]) -> dict[Part, PartNumbers]:
    """All parts of a model."""
    grouped: dict[Part, list[Parameter]] = {}
    for parameter in parameters:
        grouped.setdefault(parameter.part, []).append(parameter)
    found: dict[Part, PartNumbers] = {}
    offset = 0
    for part, listed in grouped.items():
        found[part] = PartNumbers(listed, offset)
        offset += found[part].count
    return found


class Updates:
    """AdamW over pieces, with this step's settings."""

    def __init__(self, training: Training, formats: Formats, numbers: dict[Part, PartNumbers]) -> None:
        self.training, self.formats, self.numbers = training, formats, numbers
        self.settings: AdamW | None = None

    def begin(self, step: int) -> None:
        """Settings of a step, counted from 0."""
        training = self.training
        self.settings = AdamW(
            rate=training.rate_at(step),
            beta1=training.beta1,
            beta2=training.beta2,
            epsilon=training.epsilon,
            weight_decay=training.weight_decay,
            step=step + 1,
            rounding=Seed(training.seed) if training.stochastic_rounding else None,
        )

    def clip(self, squares: Tensor) -> Tensor:
        """From the parts' sums of squares: what to multiply gradients by. Returns their norm."""
        assert self.settings is not None
        assert self.training.clip_norm is not None
        norm = squares.sum().sqrt()
        scale = (self.training.clip_norm / (norm + NORM_EPSILON)).clamp(max=1.0)
        self.settings = replace(self.settings, gradient_scale=scale)
        return norm

    def update(self, part: Part, weights: Tensor, gradients: Tensor, state: Tensor, *, first: int, count: int) -> None:
        """Numbers `first` … of a part; all three are bytes, `state` those of this piece alone."""
        assert self.settings is not None
        numbers, settings = self.numbers[part], self.settings
        if isinstance(settings.gradient_scale, Tensor) and settings.gradient_scale.device != weights.device:
            settings = replace(settings, gradient_scale=settings.gradient_scale.to(weights.device))
        flat = as_numbers(weights, TYPES[self.formats.weights], numbers.count)
        sums = as_numbers(gradients, TYPES[self.formats.gradients], numbers.count)
        moments = {name: field.of(state) for name, field in moment_fields(count, self.formats).items()}
        for run in numbers.runs:
            begin, end = max(run.first, first), min(run.last, first + count)
            if begin >= end:
                continue
            piece = slice(begin - first, end - first)
            master = moments.get("master")
            dispatch.adamw(
                flat[begin:end],
                sums[begin:end],
                moments["first"][piece],
                moments["second"][piece],
                None if master is None else master[piece],
                settings=settings if run.decays else replace(settings, weight_decay=0.0),
                offset=numbers.offset + begin,
            )


def as_numbers(buffer: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """The first numbers of a buffer."""
    return buffer[: count * dtype.itemsize].view(dtype)
