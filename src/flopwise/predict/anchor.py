"""One measured step as the anchor of all others: by how much its kernels, its network and its host are off.

A step's seconds cannot tell which of its parts took longer than predicted. What is known is how far each kind of work
is off in general (SPREADS, of logarithms) and how much of this step it is (g: how the step's logarithm follows its
own). The likeliest factors that make the predicted step the measured one are those of least Σ (x ÷ spread)², which is

    x = spread² · g · (ln measured − ln predicted) ÷ Σ spread² · g²

So a step that is all products says that products are slower and nothing of the network; one of long sequences tells of
attention. The step is not a product of powers, so the same is done again from where it leads.

Where rows of such set-ups were held against the stack (`Scatter`), not all of what a step is off by is the level of
others: rows of one table lie round their level by `noise`, for reasons of their own. What an anchor is off by counts as
far as it lies beyond that scatter (James and Stein's estimate),

    share = level² ÷ (level² + noise²),  level² = (ln measured − ln predicted)² − noise², no less than 0

or than what the set-up's distance from those rows allows. The anchor's own set-up takes what it took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flopwise.base.errors import FlopwiseError
from flopwise.predict.cluster.costing import PLAIN, evaluate
from flopwise.predict.cluster.strategies import listed
from flopwise.predict.expected import features, peak_share
from flopwise.predict.interval import BETWEEN, MOST_WIDE, SHARDED, Scatter
from flopwise.predict.interval import EACH_DOUBLING as EACH_BEYOND
from flopwise.predict.step import least_seconds
from flopwise.records.outcome import Interval
from flopwise.records.prediction import Prediction
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import SettledSetup
from flopwise.setup.stack import Stack
from flopwise.work.describe import describe

KINDS: dict[str, tuple[str, ...]] = {
    "products": ("products",),
    "attention": ("attention",),
    "streaming": ("streaming",),
    "network": ("network",),
    "host": ("host_layer_s", "tensor_call_s", "tensor_rank_s", "step_s"),
}
"""Kind of work → the constants of a stack that scale it."""
SPREADS = {"products": 0.15, "attention": 0.35, "streaming": 0.25, "network": 0.4, "host": 0.3}
"""How far each kind is off, as a standard deviation of logarithms."""
ROUNDS = 4
HALVINGS = 28
FARTHEST = math.log(100.0)
CLOSE = 1e-3
DIFFERENCE = 1e-3
SAY_WHAT = "say what was measured: --anchor 'tokens_per_s_per_gpu=6667@gpus=8 seq=8k batch=16'"
LARGEST = 8.0
"""A step so many times off is of another set-up than the one it is said to be of."""
FOUR_OF_FIVE = 1.2816
"""Standard deviations either way."""
NOISE = 0.05
"""Of a step with just the anchor's parts; with EACH_DOUBLING it covers four of five rows of the tables, each row of
which was predicted from each of a dozen others (benchmarks/validation.py)."""


Seconds = Callable[[Mapping[str, float]], float]
"""Factors → a step's seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """A measured step, and what it says of the predictions it is held against."""

    setup: SettledSetup
    """What was measured, with the stack that it is predicted by, if any."""
    step_s: float
    name: str
    """Where it comes from, for people."""
    factors: Mapping[str, float]
    """Kind of work → how many times as long it takes as predicted, for other set-ups."""
    own: Mapping[str, float]
    """The same for its own set-up, which takes what was measured."""
    counted: float
    """The share of what it is off by that is the level of others as well."""
    noise: float
    """How far rows of one table lie from their level, as a standard deviation of logarithms."""
    sure: float
    """How far each kind is off, over SPREADS: less where the stack's level is known."""
    shares: Mapping[str, float]
    """Kind of work → the share of the measured step that follows it."""
    off: float
    """Measured ÷ predicted seconds."""


def find_anchor(setup: SettledSetup, step_s: float, name: str, scatter: Scatter | None = None) -> Anchor:
    """What a measured step of the set-up says; `scatter`: of rows of such set-ups around the stack's predictions."""
    laid_out, hardware = listed([setup]), setup.hardware
    base = (setup.stack or PLAIN).on(hardware.device.architecture)

    def seconds(factors: Mapping[str, float]) -> float:
        return float(evaluate(laid_out, hardware, scaled(base, factors)).step_s[0])

    first = seconds({})
    off = step_s / first
    if not 1 / LARGEST <= off <= LARGEST:
        raise _too_far(step_s, first)
    _check_peak(setup, step_s)
    logs, own, counted, sure = dict.fromkeys(KINDS, 0.0), {}, 0.0, 1.0
    shares: dict[str, float] = {}
    for _ in range(ROUNDS):
        shares = _slopes(seconds, logs)
        most = max(SPREADS[kind] ** 2 * share for kind, share in shares.items())
        if most <= 0:
            raise _too_far(step_s, first)
        counted, sure = _counted(math.log(off), shares, scatter)
        # As far along the likeliest direction as the step is that counts; the largest factor goes at most this far.
        along = {kind: SPREADS[kind] ** 2 * share / most for kind, share in shares.items()}
        logs, own = _met(seconds, along, first * off**counted), _met(seconds, along, step_s)
    if abs(math.log(seconds(_exp(own)) / step_s)) > CLOSE:
        raise _too_far(step_s, first)
    return Anchor(
        setup=setup,
        step_s=step_s,
        name=name,
        factors=_exp(logs),
        own=_exp(own),
        counted=counted,
        noise=scatter.within / FOUR_OF_FIVE if scatter else NOISE,
        sure=sure,
        shares=shares,
        off=off,
    )


def _counted(off: float, shares: Mapping[str, float], scatter: Scatter | None) -> tuple[float, float]:
    """The share of what a step is off by that is a level, and how far kinds are off over what they are in general."""
    if scatter is None:
        return 1.0, 1.0
    noise, beyond = scatter.within / FOUR_OF_FIVE, EACH_BEYOND * scatter.doublings / FOUR_OF_FIVE
    level = max(beyond**2, off**2 - noise**2)
    general = sum(SPREADS[kind] ** 2 * share**2 for kind, share in shares.items())
    return level / (level + noise**2) if level else 0.0, min(1.0, math.sqrt(level / general))


def _slopes(seconds: Seconds, logs: Mapping[str, float]) -> dict[str, float]:
    """How the logarithm of a step follows that of each kind of work, from the factors that there are."""
    now = math.log(seconds(_exp(logs)))
    return {
        kind: max(0.0, math.log(seconds(_exp({**logs, kind: logs[kind] + DIFFERENCE}))) - now) / DIFFERENCE
        for kind in KINDS
    }


def _met(seconds: Seconds, along: Mapping[str, float], step_s: float) -> dict[str, float]:
    """The factors along a direction with which the step takes so long: more of any kind never makes it shorter."""
    low, high = -FARTHEST, FARTHEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        there = {kind: middle * share for kind, share in along.items()}
        low, high = (middle, high) if seconds(_exp(there)) < step_s else (low, middle)
    return {kind: (low + high) / 2 * share for kind, share in along.items()}


def _check_peak(setup: SettledSetup, step_s: float) -> None:
    """Refuse a step of more than 100 % MFU."""
    least_s = least_seconds(setup)
    if step_s < least_s:
        raise FlopwiseError(
            f"the anchor's step took {step_s:.3g} s, and {least_s:.3g} s are the least that its FLOPs take",
            why=f"so many take {setup.parallel.devices} × {setup.hardware.name} at their peaks",
            hint=SAY_WHAT,
        )


def _too_far(step_s: float, predicted_s: float) -> FlopwiseError:
    return FlopwiseError(
        f"the anchor's step took {step_s:.3g} s, and {predicted_s:.3g} s are predicted of it",
        why="so far off are predictions of another set-up, or of one that waits for its host and not for its kernels",
        hint=SAY_WHAT,
    )


def _exp(logs: Mapping[str, float]) -> dict[str, float]:
    return {kind: math.exp(value) for kind, value in logs.items()}


def scaled(stack: Stack, factors: Mapping[str, float]) -> Stack:
    """A stack, of one architecture, whose kinds of work take so many times as long."""
    values = {name: stack.value(name) * factor for kind, factor in factors.items() for name in KINDS[kind]}
    return stack.with_values({name: value for name, value in values.items() if value})


def anchored_stack(anchor: Anchor, hardware: Hardware) -> Stack:
    """What other set-ups on some hardware are predicted by."""
    return scaled((anchor.setup.stack or PLAIN).on(hardware.device.architecture), anchor.factors)


def own_stack(anchor: Anchor) -> Stack:
    """What its own set-up is predicted by."""
    return scaled((anchor.setup.stack or PLAIN).on(anchor.setup.hardware.device.architecture), anchor.own)


# -- what is left unknown of another step ----------------------------------------------------------------------------

EACH_DOUBLING = 0.012


def anchored_interval(
    anchor: Anchor, prediction: Prediction, setup: SettledSetup, hardware: Hardware, scatter: Scatter | None = None
) -> Interval:
    """Where a step may lie that was predicted from the anchor; `scatter`: of rows of such set-ups around the stack.

    What the anchor tells of it is what their logarithms have in common: of a step with the same parts nothing but the
    noise is left, of one with parts that the anchor had little of their own spread.
    """
    slopes = part_slopes(setup, anchored_stack(anchor, hardware))
    prior = sum(SPREADS[kind] ** 2 * slope**2 for kind, slope in slopes.items())
    shared = sum(SPREADS[kind] ** 2 * slope * anchor.shares[kind] for kind, slope in slopes.items())
    told = sum(SPREADS[kind] ** 2 * slope**2 for kind, slope in anchor.shares.items())
    lacking = _lacking(anchor.setup, setup)
    left = anchor.sure**2 * max(0.0, prior - shared**2 / told)
    variance = left + max(NOISE, anchor.noise) ** 2 + len(lacking) * (BETWEEN / FOUR_OF_FIVE) ** 2
    half = FOUR_OF_FIVE * math.sqrt(variance) + EACH_DOUBLING * _doublings(anchor.setup, setup)
    if scatter is not None:
        # What the anchor had nothing of, the stack's rows had: theirs is the scatter, and the level is as sure as told.
        known = left + (scatter.within / FOUR_OF_FIVE) ** 2 + (anchor.counted * anchor.noise) ** 2
        half = min(half, FOUR_OF_FIVE * math.sqrt(known) + EACH_BEYOND * scatter.doublings)
    half = min(half, MOST_WIDE / 2)
    low_s = max(prediction.step_s * math.exp(-half), prediction.step_s * peak_share(prediction))
    return Interval(
        low_s=low_s,
        high_s=max(low_s, prediction.step_s * math.exp(half)),
        basis=f"the measured step {anchor.name}",
        outside=() if scatter is not None else lacking,
    )


def part_slopes(setup: SettledSetup, stack: Stack) -> dict[str, float]:
    """How the logarithm of a step follows that of each kind of work."""
    laid_out, hardware = listed([setup]), setup.hardware

    def seconds(factors: Mapping[str, float]) -> float:
        return float(evaluate(laid_out, hardware, scaled(stack, factors)).step_s[0])

    return _slopes(seconds, dict.fromkeys(KINDS, 0.0))


def _doublings(one: SettledSetup, other: SettledSetup) -> float:
    """How many factors of two lie between two set-ups, over all dimensions."""
    pairs = zip(_dimensions(one), _dimensions(other), strict=True)
    return sum(abs(math.log2(first / second)) for first, second in pairs)


def _dimensions(setup: SettledSetup) -> tuple[int, ...]:
    parallel, micro = setup.parallel, setup.micro_batch_sequences * setup.sequence_tokens
    parameters = describe(setup.model, setup.sequence_tokens).parameters
    return (parameters, setup.sequence_tokens, parallel.devices, parallel.tensor, parallel.pipeline, micro)


def _lacking(anchor: SettledSetup, setup: SettledSetup) -> tuple[str, ...]:
    """What of a set-up the anchor had nothing of."""
    known, here = _kinds(anchor), _kinds(setup)
    return tuple(word for word in here if word not in known)


def _kinds(setup: SettledSetup) -> tuple[str, ...]:
    parallel = setup.parallel
    told = {
        f"architecture {setup.hardware.device.architecture}": True,
        "sharded weights": parallel.zero == SHARDED,
        "tensor ranks": parallel.tensor > 1,
        "pipeline stages": parallel.pipeline > 1,
        "several devices": parallel.devices > 1,
        f"products in {setup.formats.matrix}": True,
    }
    return (*(word for word, there in told.items() if there), *features(setup))
