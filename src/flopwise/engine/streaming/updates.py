"""Updates of a piece of a part's numbers, on the device or on the host, and the norm that clips them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flopwise.engine.formats import TYPES
from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.dispatch import Codes, Room, Seed, UpdatePiece, UpdateSettings
from flopwise.engine.kernels.quantised import Quantised
from flopwise.engine.kernels.updating import BITS_OF_STEP, follow
from flopwise.engine.streaming.layout import StateStretch, state_layout
from flopwise.engine.streaming.trained import Stored
from flopwise.records.program import aligned
from flopwise.setup.training import Training
from flopwise.work.formats import QUANTISED_BITS, Formats
from flopwise.work.optimizers import BY_NUMBER, Moment, Optimizer, Rule, matrices_in
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
    """A part's trained numbers in a row: how many, where they begin among all, and which of them decay.

    What is not trained lies behind them in the part's weights, each tensor at a line.
    """

    def __init__(self, parameters: Sequence[Parameter], offset: int, formats: Formats) -> None:
        self.parameters = tuple(parameter for parameter in parameters if parameter.trained)
        self.frozen = tuple(parameter for parameter in parameters if not parameter.trained)
        self.formats = formats
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

    def weights(self, buffer: Tensor) -> dict[str, Stored]:
        """Name within the part → its tensor in a buffer of the part's weights, trained or not."""
        dtype = TYPES[self.formats.weights]
        found: dict[str, Stored] = {**self.views(as_numbers(buffer, dtype, self.count))}
        start = aligned(self.count * dtype.itemsize)
        for parameter in self.frozen:
            kept = self.formats.kept_as(in_block=isinstance(parameter.part, int), matrix=parameter.role == "matrix")
            if kept in QUANTISED_BITS:
                matrix = Quantised.within(buffer[start:], parameter.shape, kept)
                found[parameter.local] = matrix
                start += aligned(matrix.bytes)
            else:
                own = as_numbers(buffer[start:], TYPES[kept], parameter.elements)
                found[parameter.local] = own.view(parameter.shape)
                start += aligned(own.numel() * own.itemsize)
        return found


def numbers_by_part(parameters: Iterable[Parameter], formats: Formats) -> dict[Part, PartNumbers]:
    """All parts of a model."""
    grouped: dict[Part, list[Parameter]] = {}
    for parameter in parameters:
        grouped.setdefault(parameter.part, []).append(parameter)
    found: dict[Part, PartNumbers] = {}
    offset = 0
    for part, listed in grouped.items():
        found[part] = PartNumbers(listed, offset, formats)
        offset += found[part].count
    return found


class Updates:
    """The optimizer over pieces, with this step's settings."""

    def __init__(
        self,
        training: Training,
        formats: Formats,
        numbers: dict[Part, PartNumbers],
        device: torch.device,
        optimizer: Optimizer = "adamw",
    ) -> None:
        self.training, self.formats, self.numbers, self.optimizer = training, formats, numbers, optimizer
        self._layouts: dict[tuple[Part, int, int], tuple[StateStretch, ...]] = {}
        self._settings: dict[bool, UpdateSettings] = {}
        """Of this step, by whether a parameter decays."""
        self._words = (
            torch.zeros((2, BITS_OF_STEP), dtype=torch.int32, device=device) if device.type == "cuda" else None
        )

    def begin(self, step: int) -> None:
        """Settings of a step, counted from 0; on a GPU they lie where a captured step looks for them."""
        training = self.training
        decayed = UpdateSettings(
            rate=training.rate_at(step),
            beta1=training.beta1,
            beta2=training.beta2,
            epsilon=training.epsilon,
            momentum=training.momentum,
            nesterov=training.nesterov,
            weight_decay=training.weight_decay,
            average_kept=training.ema,
            step=step + 1,
            rounding=Seed(training.seed) if training.stochastic_rounding else None,
        )
        self._settings = {False: replace(decayed, weight_decay=0.0), True: decayed}
        if self._words is not None:
            words = torch.from_numpy(np.stack([settings.bits_of_step() for settings in self._settings.values()]))
            self._words.copy_(words.pin_memory(), non_blocking=True)
            self._settings = {key: replace(each, numbers=self._words[int(key)]) for key, each in self._settings.items()}

    def settings(self, *, decays: bool) -> UpdateSettings:
        """Of parameters that decay, or do not."""
        return self._settings[decays]

    def clip(self, squares: Tensor) -> Tensor:
        """From the parts' sums of squares: what to multiply gradients by. Returns their norm."""
        assert self.training.clip_norm is not None
        norm = squares.sum().sqrt()
        scale = (self.training.clip_norm / (norm + NORM_EPSILON)).clamp(max=1.0)
        self._settings = {key: replace(each, gradient_scale=scale) for key, each in self._settings.items()}
        return norm

    def update(
        self, part: Part, weights: Tensor, gradients: Tensor, state: Tensor, *, first: int, count: int, room: Room
    ) -> None:
        """Numbers `first` … of a part; all three are bytes, `state` those of this piece alone."""
        numbers = self.numbers[part]
        flat = as_numbers(weights, TYPES[self.formats.weights], numbers.count)
        sums = as_numbers(gradients, TYPES[self.formats.gradients], numbers.count)
        for stretch in self.layout(part, first, count):
            moments = stretch.of(state)
            for run in numbers.runs:
                begin, end = max(run.first, stretch.what.first), min(run.last, stretch.what.last)
                if begin < end:
                    run_update(
                        stretch,
                        flat[begin:end],
                        sums[begin:end],
                        _cut(stretch, moments, begin, end),
                        settings=self._settings_on(weights.device, decays=run.decays),
                        offset=numbers.offset + begin,
                        room=room,
                    )

    def layout(self, part: Part, first: int, count: int) -> tuple[StateStretch, ...]:
        """Where the state of a piece lies."""
        found = self._layouts.get((part, first, count))
        if found is None:
            parameters = self.numbers[part].parameters
            found = state_layout(parameters, self.optimizer, self.formats, first, count)
            self._layouts[part, first, count] = found
        return found

    def _settings_on(self, device: torch.device, *, decays: bool) -> UpdateSettings:
        settings = self._settings[decays]
        scale = settings.gradient_scale
        if isinstance(scale, Tensor) and scale.device != device:
            settings = replace(settings, gradient_scale=scale.to(device))
        return settings


def _cut(stretch: StateStretch, moments: dict[Moment, Tensor], begin: int, end: int) -> dict[Moment, Tensor]:
    """Of a stretch's state, that of some of its numbers."""
    if (begin, end) == (stretch.what.first, stretch.what.last):
        return moments
    piece = slice(begin - stretch.what.first, end - stretch.what.first)
    return {name: values[piece] for name, values in moments.items()}


def run_update(
    stretch: StateStretch,
    weights: Tensor,
    gradients: Tensor,
    moments: dict[Moment, Tensor],
    *,
    settings: UpdateSettings,
    offset: int,
    room: Room,
) -> None:
    """Update neighbouring numbers by the rule of their stretch."""
    _update(stretch, weights, gradients, moments, settings=settings, offset=offset, room=room)
    if "average" in moments:
        follow(moments["average"], moments.get("master", weights), settings.average_kept)


def _update(
    stretch: StateStretch,
    weights: Tensor,
    gradients: Tensor,
    moments: dict[Moment, Tensor],
    *,
    settings: UpdateSettings,
    offset: int,
    room: Room,
) -> None:
    rule = stretch.what.rule
    if rule in BY_NUMBER:
        update_numbers(rule, weights, gradients, moments, settings=settings, offset=offset)
        return
    master = moments.get("master")
    if rule == "adamw-8bit":
        codes = Codes(moments["first"], moments["first_scale"], moments["second"], moments["second_scale"])
        dispatch.adamw_8bit(weights, gradients, codes, master, settings=settings, offset=offset)
        return
    piece = UpdatePiece(weights, gradients, master, _matrices(stretch.what.parameters[0]))
    if rule == "muon":
        dispatch.muon(piece, moments["first"], settings=settings, offset=offset, room=room)
    elif "row" in moments:
        dispatch.adafactor(piece, moments["row"], moments["column"], settings=settings, offset=offset)
    else:
        dispatch.adafactor_vector(piece, moments["second"], settings=settings, offset=offset)


def update_numbers(
    rule: Rule,
    weights: Tensor,
    gradients: Tensor,
    moments: Mapping[Moment, Tensor],
    *,
    settings: UpdateSettings,
    offset: int,
) -> None:
    """Update neighbouring numbers by a rule that looks at one at a time."""
    master, first = moments.get("master"), moments.get("first")
    if rule in ("sgd", "sgd-momentum"):
        dispatch.sgd(weights, gradients, first, master, settings=settings, offset=offset)
        return
    assert first is not None
    if rule == "lion":
        dispatch.lion(weights, gradients, first, master, settings=settings, offset=offset)
    else:
        dispatch.adamw(weights, gradients, first, moments["second"], master, settings=settings, offset=offset)


def _matrices(parameter: Parameter) -> tuple[tuple[int, int], ...]:
    """Of a vector, one row."""
    if len(parameter.shape) == 1:
        return ((1, parameter.elements),)
    return matrices_in(parameter.shape, parameter.weight.parts)


def as_numbers(buffer: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """The first numbers of a buffer."""
    return buffer[: count * dtype.itemsize].view(dtype)
