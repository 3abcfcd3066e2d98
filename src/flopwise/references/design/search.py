"""The fastest device for a model that a technology and a power allow: descent over shares, from several starts.

The reference (DeepFlow's architecture search) raises each share by half in turn, takes the difference in time for a
slope, steps along the slopes with momentum, and divides the shares by their sum. So does this, with what it takes to
arrive:

  - a raised share is paid for by the others, so that no trial overspends, and a slope is one along the budget;
  - the step has a length of its own, whatever the slopes' size, and a trial that is better than the step is taken;
  - where nothing of this helps, each share is lowered in turn; if that does not either, the momentum is dropped and
    the step and the raise are made smaller: tiles that are powers of two make the time a staircase, and the best
    designs stand at the edges of its stairs;
  - the best of everything that was tried is what comes back.

A division that cannot be built costs infinitely much. Equal arguments give equal results.

Memory decides first. Where some division of the power buys DRAM enough for the step, only such devices count; where
none does, the step is timed as if it fitted, the whole batch at once, as the reference does, and that is noted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.predict.step import step
from flopwise.records.prediction import Prediction
from flopwise.references import deepflow
from flopwise.references.design.technology import Budget, Shares, Technology, from_deepflow, hardware_from_technology
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import Setup

Objective = Callable[[Mapping[str, float]], float]
"""Shares by name → seconds; infinite, or a FlopwiseError, for what cannot be built."""

Ask = Callable[[Hardware], Setup]
"""What is to run, on a device that is yet to be found."""

Floats = NDArray[np.float64]

SMALLEST_STEP = 1e-4
"""Of the budget. A descent ends where its steps are shorter: no part is designed more exactly."""
SHRINK = 0.6
"""The step, and how much a share is raised, after a step that did not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """How to search."""

    iterations: int = 100
    """Of each start, at most."""
    starts: int = 4
    """The given shares first, then random ones."""
    seed: int = 0
    perturbation: float = 1.5
    """By what a share is multiplied to see what it is worth."""
    step: float = 0.1
    """Length of the first steps, as a share of the budget."""
    momentum: float = 0.5
    """Part of the last direction that is kept."""
    least_share: float = 0.002
    """No part gets less, as a share of the budget."""
    budget: float = 1.0
    """What the shares add up to."""

    def __post_init__(self) -> None:
        for name in ("iterations", "starts"):
            if getattr(self, name) < 1:
                raise FlopwiseError(f"{name} must be at least 1, got {shown(getattr(self, name))}", hint=f"{name} = 4")
        ranges = {
            "perturbation": (self.perturbation > 1 and math.isfinite(self.perturbation), "above 1", "1.5"),
            "step": (0 < self.step <= 1, "above 0 and at most 1", "0.1"),
            "momentum": (0 <= self.momentum < 1, "between 0 and 1", "0.5"),
            "least_share": (0 < self.least_share < 0.5, "above 0 and below 0.5", "0.002"),
            "budget": (0 < self.budget <= 1, "above 0 and at most 1", "1.0"),
        }
        for name, (fine, words, example) in ranges.items():
            if not fine:
                raise FlopwiseError(f"{name} must be {words}, got {shown(getattr(self, name))}", hint=example)


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignTrial:
    """Where a descent stood after one iteration; iteration 0 is its start."""

    start: int
    iteration: int
    shares: dict[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """What was found."""

    shares: dict[str, float]
    seconds: float
    """Of the best shares; of everything that was evaluated, nothing was faster."""
    start_seconds: float
    """Of the shares that the search was given, divided by their sum; infinite when they cannot be built."""
    evaluations: int
    history: tuple[DesignTrial, ...]


def search_design(objective: Objective, start: Mapping[str, float], search: Search | None = None) -> Design:
    """The fastest division of a budget among the parts that `start` names."""
    search = search or Search()
    names = tuple(start)
    first = _first(start, search)
    evaluator = _Evaluator(objective, names)
    generator = np.random.default_rng(search.seed)
    origins = [first, *(generator.dirichlet(np.ones(len(names))) for _ in range(search.starts - 1))]
    history: list[DesignTrial] = []
    for number, origin in enumerate(origins):
        history += _descend(evaluator, _spend(origin, search), search, number)
    if not math.isfinite(evaluator.best_s):
        raise FlopwiseError(
            "none of the divisions that were tried can be built",
            why=evaluator.refusal or "the objective is infinite everywhere",
            hint="other shares to start from, more starts, or a larger budget",
        )
    return Design(
        shares=evaluator.name_shares(evaluator.best),
        seconds=evaluator.best_s,
        start_seconds=history[0].seconds,
        evaluations=evaluator.count,
        history=tuple(history),
    )


def deepflow_objective(configuration: deepflow.Configuration) -> Objective:
    """The reference model's time of a step with other shares of its power: core, dram, l2, shared, network."""
    known = tuple(item.name for item in fields(configuration.power) if item.name != "budget_w")

    def seconds(shares: Mapping[str, float]) -> float:
        _check_names(shares, known)
        return deepflow.step_s(replace(configuration, power=replace(configuration.power, **shares)))

    return seconds


def step_objective(
    ask: Ask,
    technology: Technology,
    budget: Budget,
    *,
    area: Shares | None = None,
    must_fit: bool = False,
) -> Objective:
    """The physical method's time of a step on what the shares of power buy.

    `must_fit`: a device whose memory does not hold the step is no answer.
    """
    known = tuple(item.name for item in fields(Shares))

    def seconds(shares: Mapping[str, float]) -> float:
        _check_names(shares, known)
        prediction = step(ask(hardware_from_technology(technology, budget, Shares(**shares), area)))
        return prediction.step_s if prediction.fits or not must_fit else math.inf

    return seconds


def _check_names(shares: Mapping[str, float], known: tuple[str, ...]) -> None:
    for name in shares:
        if name not in known:
            raise unknown_name("part of a device", name, known, hint=f"shares of {', '.join(known)}")


def _first(start: Mapping[str, float], search: Search) -> Floats:
    if len(start) < 2:
        raise FlopwiseError("there is nothing to divide", why=f"{len(start)} parts", hint="shares of two parts or more")
    if len(start) * search.least_share >= search.budget:
        raise FlopwiseError(
            f"{len(start)} parts of at least {search.least_share:g} are more than {search.budget:g}",
            hint="a smaller least_share",
        )
    for name, share in start.items():
        if not 0 < share < math.inf:
            raise FlopwiseError(
                f"the search cannot start with {shown(share)} for {name}",
                why="a share is raised by a factor, so it has to be above 0",
                hint=f"{name} = 0.25",
            )
    return np.array(list(start.values()), dtype=np.float64)


def _spend(shares: Floats, search: Search) -> Floats:
    """The shares, none too small, divided so that they add up to the budget."""
    scaled = shares * (search.budget / shares.sum())
    raised: Floats = np.maximum(scaled, search.least_share)
    raised *= search.budget / raised.sum()
    return raised


@dataclass(slots=True)
class _Evaluator:
    """Counts what is tried and remembers the best of it."""

    objective: Objective
    names: tuple[str, ...]
    count: int = 0
    best_s: float = math.inf
    best: Floats = field(default_factory=lambda: np.empty(0))
    refusal: str | None = None
    """Why the last division that could not be built could not."""

    def __call__(self, shares: Floats) -> float:
        self.count += 1
        try:
            seconds = float(self.objective(self.name_shares(shares)))
        except FlopwiseError as error:
            self.refusal = error.what
            seconds = math.inf
        if math.isnan(seconds):
            seconds = math.inf
        if seconds < self.best_s:
            self.best_s, self.best = seconds, shares
        return seconds

    def name_shares(self, shares: Floats) -> dict[str, float]:
        return {name: float(share) for name, share in zip(self.names, shares, strict=False)}


def _descend(evaluate: _Evaluator, shares: Floats, search: Search, start: int) -> list[DesignTrial]:
    seconds = evaluate(shares)
    history = [DesignTrial(start=start, iteration=0, shares=evaluate.name_shares(shares), seconds=seconds)]
    velocity = np.zeros_like(shares)
    step_length, raise_by = search.step * search.budget, search.perturbation - 1.0
    for iteration in range(1, search.iterations + 1):
        trials = [_spend(_raise_share(shares, index, 1.0 + raise_by), search) for index in range(len(shares))]
        times = [evaluate(trial) for trial in trials]
        velocity = search.momentum * velocity + _direction(shares, seconds, trials, times)
        moved = _spend(np.maximum(shares + step_length * velocity, 0.0), search)
        candidates = [(evaluate(moved), moved), *zip(times, trials, strict=True)]
        if min(candidates, key=_time)[0] >= seconds:
            lowered = [
                _spend(_raise_share(shares, index, 1.0 / (1.0 + raise_by)), search) for index in range(len(shares))
            ]
            candidates += [(evaluate(trial), trial) for trial in lowered]
        best_s, best = min(candidates, key=_time)
        if best_s < seconds:
            seconds, shares = best_s, best
        else:
            velocity = np.zeros_like(shares)
            step_length, raise_by = SHRINK * step_length, SHRINK * raise_by
        history.append(
            DesignTrial(start=start, iteration=iteration, shares=evaluate.name_shares(shares), seconds=seconds)
        )
        if step_length < SMALLEST_STEP * search.budget:
            break
    return history


def _time(candidate: tuple[float, Floats]) -> float:
    return candidate[0]


def _raise_share(shares: Floats, index: int, factor: float) -> Floats:
    raised = shares.copy()
    raised[index] *= factor
    return raised


def _direction(shares: Floats, seconds: float, trials: list[Floats], times: list[float]) -> Floats:
    """Seconds saved for each unit of share, less their mean so that the sum stays, at length 1; 0 on a plateau."""
    slopes = np.zeros_like(shares)
    for index, (trial, time) in enumerate(zip(trials, times, strict=True)):
        if math.isfinite(seconds) and math.isfinite(time):
            slopes[index] = (seconds - time) / (trial[index] - shares[index])
        elif math.isfinite(seconds) != math.isfinite(time):
            slopes[index] = 0.0 if math.isfinite(seconds) else 1.0
    slopes -= slopes.mean()
    length = float(np.linalg.norm(slopes))
    return slopes / length if length > 0 else slopes


PARTS = ("core", "shared", "l2", "dram")
"""What the power of a single device is divided among; its network would be idle."""
ALONE = "a single device: its network gets no power, and the other shares are divided by their sum"
ON_PAPER = "efficiencies are estimated: nobody has written kernels for a device on paper"
HALVINGS = 20
"""Of the way from a start without memory enough to the division with the most."""

Watch = Callable[[Objective], Objective]
"""Given the objective, one that also tells how far the search is."""


def _leave_as_is(objective: Objective) -> Objective:
    return objective


@dataclass(frozen=True, kw_only=True, slots=True)
class Blueprint:
    """What can be built, of how much, and the shares to start from: a technology's file in our own names."""

    technology: Technology
    budget: Budget
    shares: Shares | None = None
    """Of the power; None: the same for each part."""
    area: Shares | None = None
    """Of the chip, where the technology's areas and the budget's are known."""
    source: str | None = None


def blueprint_of(configuration: deepflow.Configuration) -> Blueprint:
    """The same of a configuration of the reference, whose shares are divided by the sum of those of a single device."""
    technology, budget = from_deepflow(configuration)
    shares = {name: getattr(configuration.power, name) for name in PARTS}
    total = sum(shares.values())
    shares = {name: share / total for name, share in shares.items()}
    return Blueprint(technology=technology, budget=budget, shares=Shares(**shares))


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignedDevice:
    """What a search found, and the devices of its start and its end."""

    design: Design
    start_shares: dict[str, float]
    start: Hardware | None
    """None when the shares to start from cannot be built."""
    found: Hardware
    prediction: Prediction | None
    """Of the found device, by the physical method."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignQuestion:
    """What is built and what it is to run, by the physical method."""

    blueprint: Blueprint
    ask: Ask

    def device(self, shares: Mapping[str, float]) -> Hardware:
        blueprint = self.blueprint
        return hardware_from_technology(blueprint.technology, blueprint.budget, Shares(**shares), blueprint.area)

    def buildable(self, shares: Mapping[str, float]) -> Hardware | None:
        try:
            return self.device(shares)
        except FlopwiseError:
            return None

    def fits(self, shares: Mapping[str, float]) -> bool:
        device = self.buildable(shares)
        return device is not None and step(self.ask(device)).fits


def design_by_step(question: DesignQuestion, search: Search, watch: Watch = _leave_as_is) -> DesignedDevice:
    """The division of the power among `PARTS` on which the physical method's step is fastest."""
    blueprint = question.blueprint
    first = _divide({name: getattr(blueprint.shares, name) if blueprint.shares else 1.0 for name in PARTS}, search)
    question, holds, notes = _settle_memory(question, first, search)
    if holds and not question.fits(first):
        first = _with_memory(question, first, search)
        notes.append(
            f"the given shares buy too little memory for the step; the search began with {first['dram']:.1%} for DRAM"
        )
    objective = step_objective(
        question.ask,
        blueprint.technology,
        blueprint.budget,
        area=blueprint.area,
        must_fit=holds,
    )
    design = search_design(watch(objective), first, search)
    found = question.device(design.shares)
    return DesignedDevice(
        design=design,
        start_shares=design.history[0].shares,
        start=question.buildable(design.history[0].shares),
        found=found,
        prediction=step(question.ask(found)),
        notes=(ALONE, *notes, ON_PAPER),
    )


def design_by_deepflow(
    configuration: deepflow.Configuration, search: Search, watch: Watch = _leave_as_is
) -> DesignedDevice:
    """The division on which the reference's formulas are fastest; with parallel degrees the network gets a share."""
    power = configuration.power
    several = configuration.parallel.grid_dimensions > 0
    start = {item.name: getattr(power, item.name) for item in fields(Shares) if item.name in PARTS or several}
    design = search_design(watch(deepflow_objective(configuration)), start, search)
    technology, budget = from_deepflow(configuration)
    found, first = (
        hardware_from_technology(technology, budget, Shares(**shares))
        for shares in (design.shares, design.history[0].shares)
    )
    result = deepflow.run(replace(configuration, power=replace(power, **design.shares)))
    notes = [] if several else [ALONE]
    if result.device_overflow > 1:
        overflow = f"one device needs {result.device_overflow:.1f} times its memory"
        notes.append(f"{overflow}, of which the reference's time takes no notice")
    return DesignedDevice(
        design=design,
        start_shares=design.history[0].shares,
        start=first,
        found=found,
        prediction=None,
        notes=tuple(notes),
    )


def _settle_memory(
    question: DesignQuestion, first: Mapping[str, float], search: Search
) -> tuple[DesignQuestion, bool, list[str]]:
    """Whether any division holds the step; if none does, the question without regard to memory."""
    device = question.buildable(first) or question.buildable(_roomiest(search))
    if device is None:
        raise FlopwiseError(
            f"{question.blueprint.budget.power_w:g} W buy no device",
            why=_refusal(question, first),
            hint="another power, or other energies",
        )
    # Whatever is wrong with the model's side of the question is told here, not taken for a device that cannot be.
    asked = step(question.ask(device))
    if question.fits(_roomiest(search)):
        return question, True, []
    micro, recompute = asked.batch_sequences, "none"

    def ask(device: Hardware) -> Setup:
        return replace(question.ask(device), micro_batch_sequences=micro, recompute="none")

    state = asked.device_bytes
    needed = (state.weights + state.gradients + state.optimizer) / 2**30
    note = (
        f"no division of {question.blueprint.budget.power_w:g} W buys memory enough (the state alone is "
        f"{needed:,.1f} GiB): the step is timed as if it fitted, as by --micro {micro} --recompute {recompute}"
    )
    return replace(question, ask=ask), False, [note]


def _refusal(question: DesignQuestion, shares: Mapping[str, float]) -> str | None:
    try:
        question.device(shares)
    except FlopwiseError as error:
        return error.what
    return None


def _divide(shares: Mapping[str, float], search: Search) -> dict[str, float]:
    total = sum(shares.values())
    return {name: search.budget * share / total for name, share in shares.items()}


def _roomiest(search: Search) -> dict[str, float]:
    """The division with the most DRAM."""
    rest = {name: search.least_share for name in PARTS if name != "dram"}
    return {**rest, "dram": search.budget - sum(rest.values())}


def _with_memory(question: DesignQuestion, first: Mapping[str, float], search: Search) -> dict[str, float]:
    """The division that holds the step nearest to `first` on the way to the one with the most DRAM."""
    most = _roomiest(search)
    too_little, enough = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (too_little + enough) / 2
        if question.fits(_between(first, most, middle)):
            enough = middle
        else:
            too_little = middle
    return _between(first, most, enough)


def _between(first: Mapping[str, float], last: Mapping[str, float], way: float) -> dict[str, float]:
    return {name: (1 - way) * first[name] + way * last[name] for name in first}
