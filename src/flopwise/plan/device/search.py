"""The fastest plan for one device under two memory caps.

Every way to cut the batch into chunks is estimated with hundreds of residencies and save levels at once, the best of
them with every number of rounds too. What is then near the best is climbed to its best neighbours, made into plans and
simulated; the best of these is changed a little here and there for as long as the simulation finds that it helps.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import numpy as np

from flopwise.plan.device.cuts import (
    Cut,
    cuts,
    head_chunks,
    list_rounds,
    skeleton,
)
from flopwise.plan.device.estimate import ENDS_STAY, LINK_WEIGHT, WEIGHTS_SHARE, Choice, Shape, update_places
from flopwise.plan.device.forecast import Times, times_of, with_host
from flopwise.plan.device.handing import is_replayed
from flopwise.plan.device.levels import choose_levels
from flopwise.plan.device.memory import plan_bytes
from flopwise.plan.device.tight import tight_choices, tight_shapes
from flopwise.plan.program.sizes import level_bytes
from flopwise.records.plan import LETTERS, NO_BACKWARD, Plan
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import CappedSetup

OVERHEAD = 0.02
"""What a step may take longer, per token, than one with the best number of rounds."""

FIRST_ROUNDS = (1, 4, 32)
"""Rounds with which every cut is estimated."""
FURTHER_CUTS = 6
"""Cuts that are estimated with all rounds, head chunks and both places of the update."""

SIMULATED_TASKS = 45_000
"""Tasks that a search simulates before it stops, about half a second's worth."""
IMPROVED = 2
"""Simulated plans that are improved, the best first."""
MOST_SIMULATIONS = 12
SMALL_SHARE = 0.08
"""Of the device: where three slots for weights and gradients take less, the search begins with three."""
SLOTS = (2, 6, 1 << 30)
"""For activations at most: the fewest, some that smooth copies over, and all that there is room for."""
OF_ONE_ROUND = 2
ROUNDING_TRIES = 5
BUSY = 0.8
"""A device that computes for less of a step is short of memory: what takes the least of it is tried then too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice for a shape, with its estimate."""

    shape: Shape
    chosen: dict[str, float]
    token_s: float

    @property
    def step_tokens(self) -> int:
        return self.shape.plan.tokens_per_step


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """The best plan, and how it was found."""

    plan: Plan
    times: Times
    candidate: Candidate
    estimated: int = 0
    simulated: int = 0

    @property
    def token_s(self) -> float:
        """With hidden copies counted a little, as in the estimate."""
        copies = max(self.times.copy_in_s, self.times.copy_out_s)
        return (self.times.step_s + LINK_WEIGHT * copies) / self.plan.tokens_per_step


def fastest_plan(setup: CappedSetup) -> FoundPlan | None:
    """The fastest plan that fits both caps; None: nothing does."""
    search = _Search(setup)
    found = None
    for near in (search.near_the_best, search.tight):
        candidates = near()
        if candidates:
            with _no_collection():
                found = search.simulate_best(candidates)
        if found is not None and found.times.compute_s > BUSY * found.times.step_s:
            break
    return found


@contextmanager
def _no_collection() -> Iterator[None]:
    """Programs are tuples by the hundred thousand and never in circles: looking for those took a fifth of a search."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def best_estimate(setup: CappedSetup) -> float | None:
    """Seconds a token of the best choice, by estimate alone; None: nothing fits."""
    search = _Search(setup)
    near = search.near_the_best() or search.tight()
    return near[0].token_s if near else None


class _Search:
    def __init__(self, setup: CappedSetup) -> None:
        self.setup = setup
        self.estimated = 0
        self.found: dict[Plan, FoundPlan] = {}
        self.tasks = 0
        self._like: dict[int, Shape] = {}

    # -- estimates ------------------------------------------------------------------------------------------------

    def near_the_best(self) -> list[Candidate]:
        """Choices whose estimate is near the best one's, each climbed to its best neighbour, the best first."""
        first: dict[Cut, float] = {}
        found: list[Candidate] = []
        for cut in cuts(self.setup):
            some = list(self._best_of(self._first_shapes(cut)))
            found += some
            if some:
                first[cut] = min(candidate.token_s for candidate in some)
        for cut in sorted(first, key=lambda cut: first[cut])[:FURTHER_CUTS]:
            found += self._best_of(self._all_shapes(cut))
        if not found:
            return []
        limit = min(candidate.token_s for candidate in found) * (1 + 2 * OVERHEAD)
        found = sorted(found, key=lambda candidate: candidate.token_s)
        climbed = [climb(candidate, self.setup) for candidate in self._one_of_each(found, limit)]
        # Several may have come to one place.
        different = {(one.shape.plan, tuple(one.chosen.values())): one for one in climbed}
        return sorted(different.values(), key=lambda candidate: candidate.token_s)

    def tight(self) -> list[Candidate]:
        """Choices that fit where hardly anything does, the best of each cut."""
        found = list(self._best_of(tight_shapes(self.setup), tight_choices))
        return sorted(found, key=lambda candidate: candidate.token_s)

    def _one_of_each(self, found: Iterable[Candidate], limit: float) -> Iterator[Candidate]:
        """The best of those of equal chunks and rounds, if it is near the limit."""
        seen: set[tuple[object, ...]] = set()
        for candidate in found:
            plan = candidate.shape.plan
            cut = plan.chunk_tokens, plan.chunks_per_round, plan.attention, plan.rounds_per_step
            key = (*cut, plan.update_place, candidate.chosen["slots"])
            if candidate.token_s <= limit and key not in seen and len(seen) < 2 * MOST_SIMULATIONS:
                seen.add(key)
                yield candidate

    def _best_of(
        self, shapes: Iterable[Shape], choices_of: Callable[[Shape], Choice] | None = None
    ) -> Iterator[Candidate]:
        """The best residencies of each shape for which any fit."""
        for shape in shapes:
            choices = (choices_of or _grid)(shape)
            estimate = shape.estimate(choices, self.setup.device_cap_bytes, self.setup.host_cap_bytes)
            self.estimated += len(estimate.token_s)
            for slots in np.unique(choices.slots):
                token_s = np.where(choices.slots == slots, estimate.token_s, np.inf)
                index = int(np.argmin(token_s))
                if np.isfinite(token_s[index]):
                    yield Candidate(shape, choices.at(index), float(token_s[index]))

    def _shape(self, cut: Cut, head_chunk_tokens: int) -> Shape:
        like = self._like.get(cut.chunk_tokens)
        plan = skeleton(self.setup, cut, head_chunk_tokens)
        shape = Shape(plan, self.setup.model, self.setup.hardware, like)
        self._like.setdefault(cut.chunk_tokens, shape)
        return shape

    def _first_shapes(self, cut: Cut) -> Iterator[Shape]:
        heads = head_chunks(cut)
        shape = self._shape(cut, heads[-1])
        tried = list_rounds(self.setup, shape.plan)
        for rounds in tried if len(tried) == 1 else FIRST_ROUNDS:
            yield shape.variant(rounds, "device")

    def _all_shapes(self, cut: Cut) -> Iterator[Shape]:
        places = update_places(self.setup)
        for head_chunk_tokens in head_chunks(cut):
            shape = self._shape(cut, head_chunk_tokens)
            for rounds in list_rounds(self.setup, shape.plan):
                for place in places:
                    yield shape.variant(rounds, place)

    # -- simulations ----------------------------------------------------------------------------------------------

    def simulate_best(self, near: Sequence[Candidate]) -> FoundPlan | None:
        """Simulate the most promising, and of those within the overhead of the fastest take the smallest batch."""
        close = [candidate for candidate in near if candidate.token_s <= near[0].token_s * (1 + OVERHEAD)]
        fewest = min(candidate.step_tokens for candidate in close)
        order = sorted(near, key=lambda one: (one not in close, one.step_tokens > fewest, one.token_s))
        tried: Counter[tuple[int, int]] = Counter()
        self.tasks, before = 0, len(self.found)
        for candidate in order:
            # Not all of them of equal rounds, however near their estimates are to each other.
            round_ = candidate.shape.plan.chunk_tokens, candidate.shape.plan.chunks_per_round
            tried[round_] += 1
            if tried[round_] <= OF_ONE_ROUND:
                self._play(candidate)
            if self.tasks > SIMULATED_TASKS / 2 or len(self.found) - before >= MOST_SIMULATIONS:
                break
        if not self.found:
            return None
        first = smallest_near_the_fastest(list(self.found.values()))
        alike = [one for one in self.found.values() if one.plan.tokens_per_step == first.plan.tokens_per_step]
        begun, left = self.tasks, SIMULATED_TASKS - self.tasks
        for number, one in enumerate(sorted(alike, key=lambda one: one.token_s)[:IMPROVED]):
            self._improve(one, begun + left * (number + 1) / IMPROVED)
        best = smallest_near_the_fastest(list(self.found.values()))
        return replace(best, estimated=self.estimated, simulated=len(self.found))

    def _play(self, candidate: Candidate) -> FoundPlan | None:
        """Simulate a choice that fits, unless it has been."""
        setup = self.setup
        plan = fitting_plan(candidate, setup.hardware, setup.device_cap_bytes, setup.host_cap_bytes)
        if plan is None:
            return None
        cost = 5 * plan.layers * plan.chunks_per_round * min(5, plan.rounds_per_step)
        if self.found and self.tasks + cost > SIMULATED_TASKS:
            return self.found.get(plan)
        if plan not in self.found:
            times = times_of(plan, self.setup.model, self.setup.hardware, candidate.shape.costs)
            if not is_replayed(plan, self.setup.model, self.setup.hardware, times.compute_s):
                times = with_host(times, plan, self.setup.model, self.setup.hardware)
            self.found[plan] = FoundPlan(plan, times, candidate)
            self.tasks += cost
        return self.found[plan]

    def _improve(self, best: FoundPlan, most_tasks: float) -> None:
        """Change one figure at a time for as long as the simulation says that it helps, and tasks are left."""
        moved = True
        while moved:
            moved = False
            for name, change in REFINEMENTS:
                chosen = dict(best.candidate.chosen)
                least, most = LEAST.get(name, 0.0), self._most(best.candidate.shape, name)
                if name == "slots":
                    chosen[name] = min(chosen[name], best.plan.activation_slots)
                chosen[name] = min(max(chosen[name] + change, least), most)
                if name == "updating" and best.candidate.shape.place == "device":
                    # A slot more for state that passes takes the room of a block's that stays.
                    layers = best.candidate.shape.plan.layers
                    chosen["optimizer"] = min(max(0.0, chosen["optimizer"] - change), layers)
                if self.tasks > most_tasks:
                    return
                tried = self._play(replace(best.candidate, chosen=chosen))
                if tried is not None and tried.token_s < best.token_s * (1 - 1e-4):
                    best, moved = tried, True

    def _most(self, shape: Shape, name: str) -> float:
        if name == "optimizer" and shape.place == "host":
            return 0.0
        most = {
            "ends": float(WEIGHTS_SHARE),
            "budget": 1.0,
            "passing": 4.0,
            "updating": 3.0,
            "slots": float(shape.pairs),
        }
        return most.get(name, float(shape.plan.layers))


def smallest_near_the_fastest(found: Sequence[FoundPlan]) -> FoundPlan:
    """The fastest of those with the fewest tokens a step that are within the overhead of the fastest of all."""
    quickest = min(one.token_s for one in found)
    near = [one for one in found if one.token_s <= quickest * (1 + OVERHEAD)]
    return min(near, key=lambda one: (one.plan.tokens_per_step, one.token_s))


def fitting_plan(candidate: Candidate, hardware: Hardware, device_cap: int, host_cap: int) -> Plan | None:
    """The choice as a plan, its budget cut by what rounding made too much; None: it does not fit all the same."""
    device, host = device_cap, host_cap
    for _ in range(ROUNDING_TRIES):
        plan = plan_of(candidate, device, host)
        taken = plan_bytes(plan, candidate.shape.sizes)
        over_device = sum(taken["device"].values()) - device_cap
        over_host = sum(taken["host"].values()) - host_cap
        if over_device <= 0 and over_host <= 0:
            copies = hardware.link is None and taken["host"]
            return None if copies else plan
        # Less than part of a slot may be no level less of anything.
        least = candidate.shape.slot // ROUNDING_TRIES
        device -= max(over_device, least) if over_device > 0 else 0
        host -= max(over_host, least) if over_host > 0 else 0
    return None


REFINEMENTS: tuple[tuple[str, float], ...] = (
    ("budget", -0.05),
    ("budget", 0.05),
    ("weights", 2.0),
    ("weights", -2.0),
    ("gradients", 2.0),
    ("gradients", -2.0),
    ("passing", -1.0),
    ("passing", 1.0),
    ("slots", 2.0),
    ("slots", -2.0),
    ("updating", 1.0),
    ("updating", -1.0),
    ("optimizer", -2.0),
    ("optimizer", 2.0),
    ("budget", -0.2),
    ("ends", -3.0),
    ("ends", 1.0),
    ("ends", -1.0),
)
"""Changes that are tried on the best plan of the simulations, in this order."""
LEAST = {"passing": 1.0, "updating": 1.0}

# -- residencies -----------------------------------------------------------------------------------------------------


def _grid(shape: Shape) -> Choice:
    """A coarse grid over everything that may stay."""
    layers = shape.plan.layers
    passing = shape.sizes.block.weights + shape.sizes.block.gradients
    stored = shape.plan.rounds_per_step > 1 or shape.plan.update_when == "end"
    axes: dict[str, Sequence[float]] = {
        "weights": _steps(layers, 4),
        "gradients": _steps(layers, 3) if stored else [0],
        "optimizer": _steps(layers, 2) if shape.place == "device" else [0],
        "ends": list(range(ENDS_STAY, WEIGHTS_SHARE + 1)),
        "passing": [3 if 3 * passing < SMALL_SHARE * shape.plan.device_memory_bytes else 2],
        "updating": [1, 2] if shape.place == "device" else [1],
        "slots": sorted({min(slots, shape.pairs) for slots in SLOTS}),
        "budget": [0.0, 0.5, 1.0],
    }
    arrays = np.meshgrid(*(np.array(axes[field.name], dtype=np.float64) for field in fields(Choice)), indexing="ij")
    return Choice(*(array.ravel() for array in arrays))


def _steps(layers: int, count: int) -> list[int]:
    return sorted({round(index * layers / count) for index in range(count + 1)})


STEPS: dict[str, tuple[float, ...]] = {
    "weights": (1, 4),
    "gradients": (1, 4),
    "optimizer": (1, 4),
    "ends": (1,),
    "slots": (1, 4),
    "budget": (0.02, 0.1),
}
MOVES = [(name, sign * step) for name, steps in STEPS.items() for step in steps for sign in (-1, 1)]


def climb(candidate: Candidate, setup: CappedSetup) -> Candidate:
    """The best choice that is reached by changing one or two residencies at a time for as long as it helps."""
    shape, names = candidate.shape, [field.name for field in fields(Choice)]
    changes = np.zeros((len(MOVES) * (len(MOVES) + 1) // 2, len(names)))
    pairs = [(first, second) for first in range(len(MOVES)) for second in range(first, len(MOVES))]
    for row, pair in enumerate(pairs):
        for name, change in {MOVES[index] for index in pair}:
            changes[row, names.index(name)] += change
    most = np.full(len(names), float(shape.plan.layers))
    most[[names.index("ends"), names.index("budget")]] = WEIGHTS_SHARE, 1.0
    for name in ("passing", "updating"):
        most[names.index(name)] = candidate.chosen[name]
    most[names.index("slots")] = shape.pairs
    if shape.place == "host":
        most[names.index("optimizer")] = 0.0
    here = np.array([candidate.chosen[name] for name in names])
    best = candidate.token_s
    slots, fewer = names.index("slots"), changes[:, names.index("slots")] != 0.0
    now = shape.estimate(Choice(*here[:, None]), setup.device_cap_bytes, setup.host_cap_bytes).slots[0]
    while True:
        rows = here + changes
        # "As many as there is room for" is so many for now.
        rows[fewer, slots] -= here[slots] - now
        rows = np.clip(rows, 0.0, most)
        estimate = shape.estimate(Choice(*rows.T), setup.device_cap_bytes, setup.host_cap_bytes)
        index = int(np.argmin(estimate.token_s))
        if estimate.token_s[index] >= best * (1 - 1e-6):
            return Candidate(shape, dict(zip(names, map(float, here), strict=True)), best)
        here, best, now = rows[index], float(estimate.token_s[index]), estimate.slots[index]


# -- from a choice to a plan -----------------------------------------------------------------------------------------


def plan_of(candidate: Candidate, device_bytes: int, host_bytes: int) -> Plan:
    """The choice as a plan: the last (layer, chunk) stay, the others have the levels that their budget allows."""
    shape = candidate.shape
    plan = shape.plan
    choice = Choice(*(np.array([candidate.chosen[field.name]]) for field in fields(Choice)))
    estimate = shape.estimate(choice, device_bytes, host_bytes)
    slots = staying = int(estimate.slots[0])
    parts = plan.chunks_per_sequence
    leaving = -(-(shape.pairs - staying) // parts)
    # The budget is that of whole sequences: of the one that the last to stay cut into, only some chunks leave.
    scale = leaving * parts / max(1, shape.pairs - staying)
    rows = choose_levels(shape.curve, leaving, float(estimate.level_bytes[0]) * scale)
    letters = [letter for row in rows for letter in row][: shape.pairs - staying] + ["F"] * staying
    letters = _keep_on_device(letters, shape, float(estimate.room_bytes[0]))
    slots = letters.count("F")
    letters = [NO_BACKWARD] * (plan.layers * plan.chunks_per_round - shape.pairs) + letters
    saves = tuple(
        "".join(letters[start : start + plan.chunks_per_round])
        for start in range(0, len(letters), plan.chunks_per_round)
    )
    stays = shape.residencies(candidate.chosen)
    return replace(
        plan,
        activation_slots=slots,
        saves=saves,
        weights=stays["weights"],
        gradients=stays["gradients"],
        optimizer_state=stays["optimizer_state"],
    )


def _keep_on_device(letters: list[str], shape: Shape, room: float) -> list[str]:
    """The last ones, as many as there is room for, stay at their level."""
    found = list(letters)
    for index in reversed(range(len(found))):
        if found[index].isupper():
            continue
        tokens = shape.plan.tokens_of(index % shape.plan.chunks_per_round)
        whole = found[index] == "f"
        # One that is kept whole has a slot to itself.
        size = shape.slot if whole else level_bytes(shape.sizes, LETTERS[found[index]], tokens)
        if size <= room:
            room -= size
            found[index] = found[index].upper()
    return found
