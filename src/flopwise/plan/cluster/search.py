"""Search all legal strategies for the fastest that fits.

Every strategy is costed by the same arrays that cost a single prediction. What does not fit is dropped after its
memory, and what its kernels alone make slower than `WITHIN` times the best after a bound on its time. Nothing is
dropped by guess and nothing is random: the answer is that of timing every candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.plan.cluster.candidates import CandidateBatch, batch_of, layouts, parallel_of, spreads
from flopwise.predict.choose import capacity_bytes, check_link, recompute_policies, settle_sizes
from flopwise.predict.cluster.collectives import check_reach
from flopwise.predict.cluster.costing import PLAIN, Costed, evaluate, least_seconds, peak_bytes
from flopwise.predict.cluster.strategies import Listed, check_depth
from flopwise.predict.kernels.calls import Floats
from flopwise.records.cluster_plan import FoundStrategy
from flopwise.setup.setup import SettledSetup, Setup
from flopwise.setup.written import write_setup

AT_ONCE = 16384
"""Strategies that are costed together: enough to keep numpy busy, few enough to stay in its caches."""

WITHIN = 1.5
"""How much slower than the best a strategy may be and still be told about."""

KEPT = 64
"""Best strategies that are remembered of each layout; far more than are ever shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundStrategies:
    """The answer: strategies from the fastest on, one for each way of spreading the model."""

    options: tuple[FoundStrategy, ...]
    evaluated: int
    """Strategies whose memory was computed."""
    fitting: int
    """Those of them that fit."""
    timed: int
    """Those of them whose time was computed; a bound says that the others are too slow to be told of."""
    smallest: FoundStrategy
    """The one that takes the least memory."""


Progress = Callable[[int, int], None]
"""Told how many layouts of how many are done."""


def fastest(setup: Setup, devices: int, *, offload: bool = False, progress: Progress | None = None) -> FoundStrategies:
    """Try every strategy for so many devices; with `offload`, state and activations may go to host memory."""
    model, hardware = setup.model, setup.hardware
    check_reach(hardware.name, hardware.networks, devices)
    check_depth([model])
    if offload:
        check_link(hardware)
    base, _ = settle_sizes(setup)
    every = list(layouts(model, devices, base.sequence_tokens))
    options: list[FoundStrategy] = []
    evaluated = fitting = timed = 0
    least: FoundStrategy | None = None
    best_s = np.inf
    for done, layout in enumerate(every):
        ways = spreads(model, hardware, devices, base.batch_sequences, layout, offload=offload)
        tried = batch_of(base, layout, ways, policies=recompute_policies(setup), micro=setup.micro_batch_sequences)
        if len(tried):
            found = _try_batch(base, tried, best_s)
            options += found.options
            best_s = min([best_s, *(option.step_s for option in found.options)])
            evaluated, fitting = evaluated + found.evaluated, fitting + found.fitting
            timed += found.timed
            if least is None or found.smallest.device_bytes < least.device_bytes:
                least = found.smallest
        if progress is not None:
            progress(done + 1, len(every))
    if least is None:
        raise _nothing_legal(base, devices)
    kept = [option for option in options if option.step_s <= WITHIN * best_s]
    kept.sort(key=lambda option: option.step_s)
    return FoundStrategies(options=tuple(kept), evaluated=evaluated, fitting=fitting, timed=timed, smallest=least)


def _nothing_legal(base: SettledSetup, devices: int) -> FlopwiseError:
    return FlopwiseError(
        f"{base.model.name} cannot be spread over {devices:,} devices",
        why=f"no split of its layers, heads and the batch of {base.batch_sequences:,} sequences uses all of them",
        hint="another --gpus, or a larger --batch-tokens",
    )


def _try_batch(base: SettledSetup, batch: CandidateBatch, best_s: float) -> FoundStrategies:
    """The best strategies of one layout, as far as they may be near `best_s`, the best of those before."""
    hardware, stack = base.hardware, base.stack or PLAIN
    everything = np.arange(len(batch))
    parts = _slices(batch.listed, everything)
    memory = np.concatenate([peak_bytes(part, hardware, stack) for part in parts])
    fits = np.flatnonzero(memory <= capacity_bytes(base))
    bound = least_seconds(batch.listed, hardware, stack)
    step_s, timed = np.full(len(batch), np.inf), 0
    # From the lowest bound on, so that what comes later is mostly too slow to be looked at.
    for rows in _pieces_of(fits[np.argsort(bound[fits], kind="stable")]):
        near = rows[bound[rows] <= WITHIN * best_s]
        if near.size:
            found = evaluate(_rows(batch, near), hardware, stack)
            step_s[near] = found.step_s
            timed += near.size
            best_s = min(best_s, float(found.step_s.min()))
    best = _best_of_each(batch, step_s, fits[step_s[fits] <= WITHIN * best_s])
    shown = np.append(best, int(np.argmin(memory)))
    found = evaluate(_rows(batch, shown), hardware, stack)
    options = [_option(base, batch, row, found, place) for place, row in enumerate(shown.tolist())]
    return FoundStrategies(
        options=tuple(options[:-1]), evaluated=len(batch), fitting=int(fits.size), timed=timed, smallest=options[-1]
    )


def _rows(batch: CandidateBatch, rows: NDArray[np.intp]) -> Listed:
    return Listed(batch.listed.strategies.taken(rows), batch.listed.table)


def _best_of_each(batch: CandidateBatch, step_s: Floats, fits: NDArray[np.intp]) -> NDArray[np.intp]:
    """Of each spread the fastest recompute and micro-batch; ties go to what was listed first."""
    order = fits[np.argsort(step_s[fits], kind="stable")]
    _, first = np.unique(batch.spread[order], return_index=True)
    return order[np.sort(first)][:KEPT]


def _pieces_of(rows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    return [rows[start : start + AT_ONCE] for start in range(0, rows.size, AT_ONCE)]


def _slices(listed: Listed, rows: NDArray[np.intp]) -> list[Listed]:
    return [Listed(listed.strategies.taken(part), listed.table) for part in _pieces_of(rows)]


def _option(base: SettledSetup, batch: CandidateBatch, row: int, found: Costed, place: int) -> FoundStrategy:
    setup = replace(
        base,
        parallel=parallel_of(batch.layout, batch.spreads[int(batch.spread[row])]),
        recompute=batch.policies[int(batch.policy[row])],
        micro_batch_sequences=int(batch.micro[row]),
    )
    return FoundStrategy(
        **write_setup(setup),
        step_s=float(found.step_s[place]),
        device_bytes=int(found.device_bytes[place]),
        parts={name: float(values[place]) for name, values in found.parts.items()},
    )
