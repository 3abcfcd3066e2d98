"""The fastest device for a model that a technology and a power allow: the search, with what it takes to ask it well.

Memory decides first. Where some division of the power buys DRAM enough for the step, only such devices count; where
none does, the step is timed as if it fitted, the whole batch at once, as the reference does, and that is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from flopwise.base.errors import FlopwiseError
from flopwise.predict.step import step
from flopwise.records.prediction import Prediction
from flopwise.references import deepflow
from flopwise.references.design.search import (
    Ask,
    Design,
    Objective,
    Search,
    deepflow_objective,
    search_design,
    step_objective,
)
from flopwise.references.design.technology import Budget, Shares, Technology, from_deepflow, hardware_from_technology
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import Setup

PARTS = ("core", "shared", "l2", "dram")
"""What the power of a single device is divided among; its network would be idle."""
ALONE = "a single device: its network gets no power, and the other shares are divided by their sum"
ON_PAPER = "efficiencies are estimated: nobody has written kernels for a device on paper"
HALVINGS = 20
"""Of the way from a start without memory enough to the division with the most."""

Watch = Callable[[Objective], Objective]
"""Given the objective, one that also tells how far the search is."""


def _unwatched(objective: Objective) -> Objective:
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


def design_by_step(question: DesignQuestion, search: Search, watch: Watch = _unwatched) -> DesignedDevice:
    """The division of the power among `PARTS` on which the physical method's step is fastest."""
    blueprint = question.blueprint
    first = _divided({name: getattr(blueprint.shares, name) if blueprint.shares else 1.0 for name in PARTS}, search)
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
    configuration: deepflow.Configuration, search: Search, watch: Watch = _unwatched
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


def _divided(shares: Mapping[str, float], search: Search) -> dict[str, float]:
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
