"""Of every row of a table: the interval that would be printed, what simple rules say, and what an anchor would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import median

import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_stack
from flopwise.predict.anchor import anchored_stack, find_anchor
from flopwise.predict.cluster.costing import PLAIN, evaluate
from flopwise.predict.cluster.strategies import listed
from flopwise.predict.expected import ceiling_seconds, scatter_of, supported
from flopwise.predict.interval import SupportedInterval, is_bare
from flopwise.predict.kernels.calls import Floats
from flopwise.predict.kernels.costs import peak_flops
from flopwise.records.evidence import Evidence
from flopwise.references.validate.fitting import Predicted, lay_out
from flopwise.references.validate.protocol import Case
from flopwise.references.validate.validation import ValidatedRow, Validation, peer_of
from flopwise.setup.setup import SettledSetup
from flopwise.setup.stack import NO_STACK, Stack
from flopwise.work.describe import describe
from flopwise.work.model import Model

RULE = 0.4
"""The MFU that people reckon with who predict nothing."""
MOST_ANCHORS = 16
"""Rows that are anchors in turn, evenly spread over the table: each is a prediction of all others."""


def row_interval(
    case: Case, stack: str, evidence: Sequence[Evidence], step_s: float | None = None
) -> SupportedInterval | None:
    """The interval around a row's predicted seconds, as shares of them; without a stack they are computed here."""
    setup = case.setup
    if is_bare(stack):
        plain_s, ceiling_s = _plain(setup)
        least = ceiling_s / plain_s
    else:
        assert step_s is not None
        least = _least_seconds(setup) / step_s
    return supported(
        setup,
        evidence,
        stack=stack,
        parameters=_parameters(setup.model, setup.sequence_tokens),
        sequence_tokens=setup.sequence_tokens,
        micro_batch_sequences=setup.micro_batch_sequences,
        least=least,
    )


def _plain(setup: SettledSetup) -> tuple[float, float]:
    """Seconds without a framework, and the kernels' ceiling."""
    costed = evaluate(listed([setup]), setup.hardware, PLAIN)
    parts = {name: float(values[0]) for name, values in costed.parts.items()}
    return float(costed.step_s[0]), ceiling_seconds(float(costed.step_s[0]), parts, setup.parallel.devices)


@cache
def _parameters(model: Model, sequence_tokens: int) -> int:
    return describe(model, sequence_tokens).parameters


def _least_seconds(setup: SettledSetup) -> float:
    """Of all that is executed, at the peak."""
    work = describe(setup.model, setup.sequence_tokens, setup.attention)
    flops = setup.batch_sequences * work.total_hardware_flops("causal", setup.recompute)
    return flops / _peak(setup)


def _peak(setup: SettledSetup) -> float:
    """Of all devices."""
    return peak_flops(setup.hardware, setup.formats.matrix) * setup.parallel.devices


# -- simple rules ----------------------------------------------------------------------------------------------------


def best_seconds(cases: Sequence[Case]) -> Floats:
    """Seconds of every row at 100 % MFU."""
    return np.array([_needed(case.setup) / _peak(case.setup) for case in cases])


def _needed(setup: SettledSetup) -> float:
    return setup.batch_sequences * describe(setup.model, setup.sequence_tokens).model_flops("causal")


def median_rule(cases: Sequence[Case]) -> Floats:
    """Every row at one MFU: the median of the rows of all other sizes, or of all other rows where there is one size."""
    best = best_seconds(cases)
    shares = [None if case.step_s is None else at_once / case.step_s for case, at_once in zip(cases, best, strict=True)]
    one = len({case.size for case in cases}) == 1
    found = np.full(len(cases), np.nan)
    known: dict[str, float] = {}
    for place, case in enumerate(cases):
        if one or case.size not in known:
            others = [
                share
                for number, (other, share) in enumerate(zip(cases, shares, strict=True))
                if share is not None and (number != place if one else other.size != case.size)
            ]
            known[case.size] = median(others) if others else np.nan
        found[place] = best[place] / known[case.size]
    return found


def share_rule(cases: Sequence[Case]) -> Floats:
    """Every row at the MFU that people reckon with."""
    return best_seconds(cases) / RULE


# -- one row as the anchor -------------------------------------------------------------------------------------------


def anchored_errors(cases: Sequence[Case], stack: Stack | None, evidence: Sequence[Evidence]) -> Floats:
    """|measured ÷ predicted − 1| of rows that were predicted from another row of the table, row after row.

    A row whose time cannot be of its set-up (a node out of order) is no anchor.
    """
    timed = [case for case in cases if case.step_s is not None]
    laid_out, measured = lay_out(timed, stack or PLAIN), np.array([case.step_s for case in timed])
    found = []
    for place in np.unique(np.linspace(0, len(timed) - 1, min(MOST_ANCHORS, len(timed))).astype(int)):
        case = timed[place]
        assert case.step_s is not None
        try:
            scatter = scatter_of(case.setup, evidence, stack.name if stack else NO_STACK)
            anchor = find_anchor(replace(case.setup, stack=stack), case.step_s, f"row {case.row}", scatter)
        except FlopwiseError:
            continue
        predicted = np.empty(len(timed))
        for hardware, group, places in laid_out.groups:
            predicted[list(places)] = evaluate(group, hardware, anchored_stack(anchor, hardware)).step_s
        found.append(np.delete(np.abs(measured / predicted - 1), place))
    return np.concatenate(found) if found else np.zeros(0)


def own_predictions(cases: Sequence[Case], evidence: Sequence[Evidence]) -> Predicted:
    """Predict every row as `predict` does, by the stack that it names."""
    step_s, fits = np.empty(len(cases)), np.zeros(len(cases), dtype=np.bool_)
    for name in dict.fromkeys(case.stack for case in cases):
        places = [place for place, case in enumerate(cases) if case.stack == name]
        stack = PLAIN if name == NO_STACK else load_stack(name)
        laid_out = lay_out([cases[place] for place in places], stack)
        step_s[places], fits[places] = laid_out.seconds(stack), laid_out.fits(stack)
    for place, case in enumerate(cases):
        if is_bare(case.stack) and case.setup.parallel.devices > 1:
            around = row_interval(case, case.stack, evidence, step_s[place])
            step_s[place] *= around.middle if around else 1.0
    return Predicted(step_s=step_s, fits=fits, held_out=np.ones(len(cases), dtype=np.bool_))


# -- all of it -------------------------------------------------------------------------------------------------------


def with_intervals(
    found: Validation, cases: Sequence[Case], evidence: Sequence[Evidence], stacks: Sequence[str]
) -> Validation:
    """The validation with every row's interval, how many rows lie in theirs, and how simple rules do.

    `stacks`: the name that each row's measurements go by. The table itself is left out of the evidence a second time.
    """
    others = [entry for entry in evidence if entry.table != found.table]
    rows, without = _around(found.rows, cases, evidence, stacks), _around(found.rows, cases, others, stacks)
    peers = {"one MFU for all": median_rule(cases), f"{RULE:.0%} MFU": share_rule(cases)}
    errors = {name: _errors(found.rows, step_s) for name, step_s in peers.items()}
    return replace(
        found,
        rows=rows,
        inside=_inside(rows),
        inside_without=_inside(without) if len(others) < len(evidence) else None,
        peers=tuple(peer for name, values in errors.items() if (peer := peer_of(name, values))),
    )


def with_anchors(
    found: Validation, cases: Sequence[Case], stack: Stack | None, evidence: Sequence[Evidence]
) -> Validation:
    """The same with the errors of rows that were predicted from another row, by the stack and by the kernels alone.

    `evidence`: what was known of the stack beside its constants.
    """
    counted = [case for case, row in zip(cases, found.rows, strict=True) if row.counted]
    if sum(case.step_s is not None for case in counted) < 2:
        raise FlopwiseError(
            f"--anchor with one measured row of {found.table}",
            why="each row is predicted from another one",
            hint="more rows, or without --anchor",
        )
    ways = {stack.name: stack} if stack else {}
    each = {name: anchored_errors(counted, way, evidence) for name, way in {**ways, NO_STACK: None}.items()}
    return replace(found, anchored=tuple(peer for name, values in each.items() if (peer := peer_of(name, values))))


def _around(
    rows: Sequence[ValidatedRow], cases: Sequence[Case], evidence: Sequence[Evidence], stacks: Sequence[str]
) -> tuple[ValidatedRow, ...]:
    found = []
    for row, case, stack in zip(rows, cases, stacks, strict=True):
        around = None if row.predicted_s is None else row_interval(case, stack, evidence, row.predicted_s)
        if around is None or row.predicted_s is None:
            found.append(row)
            continue
        plain_s = _plain(case.setup)[0] if is_bare(stack) else row.predicted_s
        found.append(replace(row, low_s=plain_s * around.low, high_s=plain_s * around.high))
    return tuple(found)


def _inside(rows: Sequence[ValidatedRow]) -> float | None:
    known = [
        row.low_s <= row.measured_s <= row.high_s
        for row in rows
        if row.counted and row.measured_s is not None and row.low_s is not None and row.high_s is not None
    ]
    return sum(known) / len(known) if known else None


def _errors(rows: Sequence[ValidatedRow], step_s: Floats) -> list[float]:
    """|measured ÷ predicted − 1|: of both metrics the same, so that rules and predictions are alike."""
    return [
        abs(row.measured_s / seconds - 1)
        for row, seconds in zip(rows, step_s.tolist(), strict=True)
        if row.counted and row.measured_s is not None
    ]
