"""A published table predicted by its protocol: with the constants of the catalogue, or each model size held out.

Held out means that the constants are fitted once for every size, from the protocol's start values, to the rows of all
other sizes, and then predict that size. A stack's shipped constants are the same fit to all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.predict.cluster.strategies import Booleans
from flopwise.predict.kernels.calls import Floats
from flopwise.references.validate.case import Case
from flopwise.references.validate.fitting import MeasuredStep, fitted, fitted_memory, measured
from flopwise.references.validate.protocol import Protocol
from flopwise.references.validate.validation import Validation, validate
from flopwise.setup.stack import Stack

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
        found = fitted(self.timed, bare, step_s, rows, self.protocol.start)
        if self.sized is None:
            return found
        sized = self.sized_cases
        rows = np.array([case.size != size for case in sized], dtype=np.bool_)
        if not rows.any():
            return found
        reserved = np.array([case.reserved_bytes for case in sized], dtype=np.float64)
        return fitted_memory(self.sized, found, reserved, rows, self.protocol.memory)


def fit_of(protocol: Protocol, cases: Sequence[Case], stack: Stack) -> StackFit:
    """Lay out the rows that may be fitted to."""
    mine = tuple(case for case in cases if case.fitted)
    fit = StackFit(protocol, stack, mine, measured([case for case in mine if case.step_s is not None]), None)
    if not protocol.memory or not fit.sized_cases:
        return fit
    return replace(fit, sized=measured(fit.sized_cases))


def shipped_predictions(cases: Sequence[Case], fitted_cases: Sequence[Case], stack: Stack) -> Predicted:
    """Predict with the stack as it is; `fitted_cases` are the rows that its constants were fitted to."""
    laid_out = measured(cases)
    known = {case.size for case in fitted_cases if case.fitted}
    return Predicted(
        step_s=laid_out.seconds(stack),
        fits=laid_out.fits(stack),
        held_out=np.array([case.size not in known for case in cases], dtype=np.bool_),
    )


def held_out_predictions(fit: StackFit, cases: Sequence[Case], progress: Progress | None = None) -> Predicted:
    """Predict every size with constants that were fitted to the others."""
    laid_out = measured(cases)
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


def validated(protocol: Protocol, cases: Sequence[Case], predicted: Predicted, *, words: str) -> Validation:
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
    )
