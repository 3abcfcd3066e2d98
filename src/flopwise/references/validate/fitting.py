"""Fit a stack's constants to measured steps, and predict steps that were left out of the fit.

The fit makes Σ √(r² + 0.01²) small, r = ln(predicted ÷ measured): the sum of relative errors, smooth where they are
below a per cent, so that a few odd rows do not pull the constants. Constants are positive and enter by their logarithm.
Gauss–Newton steps with weights 1/√(r² + 0.01²), damped as by Levenberg and Marquardt; no randomness.

Memory has one constant of its own, found by itself: the least Σ|ln(predicted ÷ reserved bytes)|, by golden section.

Held out means that the constants are fitted once for every size, from the protocol's start values, to the rows of all
other sizes, and then predict that size. A stack's shipped constants are the same fit to all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.predict.cluster.costing import evaluate, peak_bytes
from flopwise.predict.cluster.strategies import Booleans, Listed, listed
from flopwise.predict.kernels.calls import Floats
from flopwise.predict.kernels.memory import usable_bytes
from flopwise.references.validate.protocol import Case, Protocol, Skipped
from flopwise.references.validate.validation import Validation, validate
from flopwise.setup.hardware import Hardware
from flopwise.setup.stack import Stack

SMOOTH = 0.01
ROUNDS = 40
DIFFERENCE = 1e-3
LARGEST_STEP = 1.0
CONVERGED = 1e-6
TRIES = 8

SMALLEST, LARGEST = 1e-9, 1e3
LOWEST = math.log(SMALLEST)
LEAST = {"streaming": 0.8}
"""Kernels bound by bytes are described at about that share of their memory's rate: none goes beyond all of it."""

GOLDEN = (5**0.5 - 1) / 2
MEMORY_REACH = 4.0
"""Memory's constant is looked for within this factor of its start, either way."""
MEMORY_ROUNDS = 24
"""Each leaves 0.62 of the bracket: 24 of them a hundred-thousandth."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Cases laid out for prediction, device by device."""

    groups: tuple[tuple[Hardware, Listed, tuple[int, ...]], ...]
    count: int

    def seconds(self, stack: Stack) -> Floats:
        """Predicted seconds of every case."""
        return self._each(lambda listed, hardware: evaluate(listed, hardware, stack).step_s)

    def device_bytes(self, stack: Stack) -> Floats:
        """Predicted peak memory of every case."""
        return self._each(lambda listed, hardware: peak_bytes(listed, hardware, stack))

    def fits(self, stack: Stack) -> Booleans:
        """Whether each case fits its device by prediction."""
        capacity = self._each(lambda listed, hardware: np.full(len(listed.strategies), float(usable_bytes(hardware))))
        return self.device_bytes(stack) <= capacity

    def _each(self, cost: Callable[[Listed, Hardware], Floats]) -> Floats:
        found = np.empty(self.count)
        for hardware, group, places in self.groups:
            found[list(places)] = cost(group, hardware)
        return found


def lay_out(cases: Sequence[Case], stack: Stack) -> MeasuredStep:
    """Lay cases out, with the attention kernels that the stack calls."""
    places: dict[str, list[int]] = {}
    for index, case in enumerate(cases):
        places.setdefault(case.setup.hardware.name, []).append(index)
    groups = []
    for mine in places.values():
        setups = [replace(cases[index].setup, stack=stack) for index in mine]
        groups.append((setups[0].hardware, listed(setups), tuple(mine)))
    return MeasuredStep(tuple(groups), len(cases))


def fit_stack(
    laid_out: MeasuredStep, stack: Stack, step_s: Floats, rows: Booleans, start: Mapping[str, float]
) -> Stack:
    """The stack with the constants of `start` fitted to the given rows of `step_s`."""
    names, truth = list(start), np.log(step_s[rows])

    def residuals(logarithms: Floats) -> Floats:
        values = dict(zip(names, np.exp(logarithms).tolist(), strict=True))
        return np.asarray(np.log(laid_out.seconds(stack.with_values(values))[rows]) - truth, dtype=np.float64)

    lowest = np.array([LEAST.get(name.partition(".")[0], SMALLEST) for name in names])
    found = least(residuals, np.log(np.array([start[name] for name in names])), np.log(lowest))
    return stack.with_values(dict(zip(names, np.exp(found).tolist(), strict=True)))


def fit_memory(
    laid_out: MeasuredStep, stack: Stack, reserved_bytes: Floats, rows: Booleans, start: Mapping[str, float]
) -> Stack:
    """The stack with the one constant of `start` fitted to the memory that the given rows reserved."""
    ((name, value),) = start.items()
    truth = np.log(reserved_bytes[rows])

    def loss(logarithm: float) -> float:
        found = laid_out.device_bytes(stack.with_values({name: float(np.exp(logarithm))}))[rows]
        return float(np.abs(np.log(found) - truth).sum())

    low, high = np.log(value) - np.log(MEMORY_REACH), np.log(value) + np.log(MEMORY_REACH)
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = loss(left), loss(right)
    for _ in range(MEMORY_ROUNDS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = loss(right)
    return stack.with_values({name: float(np.exp((low + high) / 2))})


def least(residuals: Callable[[Floats], Floats], start: Floats, lowest: Floats | float = LOWEST) -> Floats:
    """Where Σ √(r² + 0.01²) is small, from `start` on and nowhere below `lowest`."""
    place, now = start, residuals(start)
    damping = 1e-2
    for _ in range(ROUNDS):
        slopes = np.stack(
            [(residuals(place + DIFFERENCE * unit) - now) / DIFFERENCE for unit in np.eye(place.size)], axis=1
        )
        weights = 1.0 / np.sqrt(now**2 + SMOOTH**2)
        square, pull = slopes.T @ (weights[:, None] * slopes), slopes.T @ (weights * now)
        before = _loss(now)
        for _ in range(TRIES):
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -pull)
            step = np.clip(step, -LARGEST_STEP, LARGEST_STEP)
            there = np.clip(place + step, lowest, np.log(LARGEST))
            then = residuals(there)
            if _loss(then) < before:
                place, now, damping = there, then, max(damping / 5, 1e-6)
                break
            damping *= 5
        if before - _loss(now) < CONVERGED * before:
            break
    return place


def _loss(residual: Floats) -> float:
    return float(np.sqrt(residual**2 + SMOOTH**2).sum())


# -- a table predicted by its protocol -------------------------------------------------------------------------------

Progress = Callable[[str, int, int], None]
"""Told the size that is done, how many are, and of how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """One element for each case."""

    step_s: Floats
    fits: Booleans
    held_out: Booleans
    """Whether nothing was fitted to the row or to any of its size."""


@dataclass(frozen=True, slots=True)
class StackFit:
    """The rows that a protocol fits constants to, laid out for prediction."""

    protocol: Protocol
    stack: Stack
    cases: tuple[Case, ...]
    timed: MeasuredStep
    sized: MeasuredStep | None
    """The rows with reserved memory, where a constant is fitted to them."""

    @property
    def timed_cases(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.step_s is not None)

    @property
    def sized_cases(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.reserved_bytes is not None)

    def without(self, size: str | None) -> Stack:
        """The stack with every constant of the protocol fitted to all rows but those of a size."""
        timed, bare = self.timed_cases, replace(self.stack, constants={})
        step_s = np.array([case.step_s for case in timed], dtype=np.float64)
        rows = np.array([case.size != size for case in timed], dtype=np.bool_)
        if not rows.any():
            raise FlopwiseError(
                f"no row is left to fit the stack {self.stack.name} to",
                why=f"without {size} there is none with a step time" if size else "none has a step time",
                hint="a table with several sizes, or the shipped constants: leave --leave-out away",
            )
        found = fit_stack(self.timed, bare, step_s, rows, self.protocol.start)
        if self.sized is None:
            return found
        sized = self.sized_cases
        rows = np.array([case.size != size for case in sized], dtype=np.bool_)
        if not rows.any():
            return found
        reserved = np.array([case.reserved_bytes for case in sized], dtype=np.float64)
        return fit_memory(self.sized, found, reserved, rows, self.protocol.memory)


def fit_of(protocol: Protocol, cases: Sequence[Case], stack: Stack) -> StackFit:
    """Lay out the rows that may be fitted to."""
    mine = tuple(case for case in cases if case.fitted)
    fit = StackFit(protocol, stack, mine, lay_out([case for case in mine if case.step_s is not None], stack), None)
    if not protocol.memory or not fit.sized_cases:
        return fit
    return replace(fit, sized=lay_out(fit.sized_cases, stack))


def shipped_predictions(cases: Sequence[Case], fitted_cases: Sequence[Case], stack: Stack) -> Predicted:
    """Predict with the stack as it is; `fitted_cases` are the rows that its constants were fitted to."""
    laid_out = lay_out(cases, stack)
    known = {case.size for case in fitted_cases if case.fitted}
    return Predicted(
        step_s=laid_out.seconds(stack),
        fits=laid_out.fits(stack),
        held_out=np.array([case.size not in known for case in cases], dtype=np.bool_),
    )


def held_out_predictions(fit: StackFit, cases: Sequence[Case], progress: Progress | None = None) -> Predicted:
    """Predict every size with constants that were fitted to the others."""
    laid_out = lay_out(cases, fit.stack)
    step_s, fits = np.full(len(cases), np.nan), np.zeros(len(cases), dtype=np.bool_)
    sizes = folds(fit.protocol, cases)
    for number, size in enumerate(sizes, start=1):
        stack = fit.without(size)
        mine = np.array([case.size == size for case in cases], dtype=np.bool_)
        step_s[mine], fits[mine] = laid_out.seconds(stack)[mine], laid_out.fits(stack)[mine]
        if progress:
            progress(size, number, len(sizes))
    return Predicted(step_s=step_s, fits=fits, held_out=np.ones(len(cases), dtype=np.bool_))


def folds(protocol: Protocol, cases: Sequence[Case]) -> list[str]:
    """The protocol's sizes as far as there are rows of them, then any other size."""
    found = list(dict.fromkeys(case.size for case in cases))
    known = [size for size in protocol.sizes if size in found]
    return [*known, *(size for size in found if size not in known)]


def validate_table(
    protocol: Protocol, cases: Sequence[Case], predicted: Predicted, *, words: str, skipped: Sequence[Skipped] = ()
) -> Validation:
    """Predictions against the table; `words` say what was fitted to what."""
    parts = [words, *([protocol.remark] if protocol.remark else [])]
    return validate(
        protocol.table,
        cases,
        predicted.step_s,
        predicted.fits.tolist(),
        protocol="; ".join(parts),
        metric=protocol.metric,
        held_out=predicted.held_out,
        counted=[protocol.counts(case) for case in cases],
        skipped=skipped,
    )
