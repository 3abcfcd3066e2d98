"""Thousands of predictions at once: those of `flopwise.predict.step`, what they have in common being costed once.

A kernel's sizes are linear in the micro-batch, so that every micro-batch of a model, sequence, format and recompute
policy is costed in one go; set-ups on several devices are laid out as the arrays that `plan` searches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from flopwise.predict.choose import PLAIN, capacity_bytes, recompute_policies, settle_sizes, spread_candidates
from flopwise.predict.cluster.costing import evaluate, peak_bytes
from flopwise.predict.cluster.step import BOUNDS
from flopwise.predict.cluster.strategies import listed
from flopwise.predict.kernels.calls import Floats, Phase, calls_of
from flopwise.predict.kernels.costs import BOUND_NAMES, CAUSES, step_costs
from flopwise.predict.kernels.memory import memory_line
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import ONE_DEVICE, SettledSetup, Setup
from flopwise.sweep.auto_batch import largest
from flopwise.work.describe import describe
from flopwise.work.model import Model

AT_ONCE = 8192
"""Strategies over several devices that are costed together."""
CLASSES = {"gemm": "products", "attention": "attention"}
"""Kind of an operator → the part of a step that it belongs to; others stream."""

Key = tuple[int, int, str, str, bool]
"""Model, sequence, formats, recompute, whether gradients are accumulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What of a `Prediction` a sweep's table holds."""

    setup: SettledSetup
    fits: bool
    device_bytes: int
    capacity_bytes: int
    step_s: float
    mfu: float
    hfu: float
    bound: str


@dataclass(frozen=True, slots=True)
class _Column:
    """The kernels of one micro-batch: seconds of each operator by cause, the step's update apart."""

    kernels: Floats
    update: Floats
    kernels_s: float
    update_s: float


class Predictor:
    """Predictions on one hardware; it remembers what further ones may share."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.models: dict[Model, int] = {}
        self.columns: dict[Key, dict[int, _Column]] = {}
        self.kinds: dict[Key, tuple[str, ...]] = {}
        self.lines: dict[tuple[int, int, str, str], tuple[int, int]] = {}
        self.shared_lines: dict[tuple[int, int, str, int], list[tuple[int, int]]] = {}
        self.flops: dict[tuple[int, int, str], tuple[int, int]] = {}

    def outcomes(self, setups: Sequence[Setup]) -> list[Outcome]:
        """Of every set-up, in their order."""
        several = [index for index, setup in enumerate(setups) if not setup.is_plain]
        found: dict[int, Outcome] = {}
        candidates = {index: self._candidates(setup) for index, setup in enumerate(setups) if setup.is_plain}
        self._cost([one for some in candidates.values() for one in some])
        for index, some in candidates.items():
            found[index] = self._plain(some)
        for group in self._groups(setups, several):
            found |= self._several(group)
        return [found[index] for index in range(len(setups))]

    def largest_micro_batch(self, setup: Setup, most: int) -> int:
        """The most sequences that fit each device at once with any recompute policy; 0: not even one."""
        capacity = capacity_bytes(setup)
        lines = self._all_lines(setup)
        guess = max(1 + (capacity - one) // max(1, each) for one, each in lines)
        return largest(lambda count: min(one + (count - 1) * each for one, each in lines) <= capacity, guess, most)

    def least_bytes(self, setup: Setup) -> int:
        """What one sequence at once takes with the policy that keeps the least."""
        return min(one for one, _ in self._all_lines(setup))

    def _all_lines(self, setup: Setup) -> list[tuple[int, int]]:
        """Of every policy: bytes with one sequence at once, and of each further one, on each device."""
        base, _ = settle_sizes(replace(setup, batch_sequences=2 * setup.parallel.data, micro_batch_sequences=None))
        if setup.is_plain:
            return [self._line(replace(base, recompute=policy)) for policy in recompute_policies(setup)]
        key = (self._number(base.model), base.sequence_tokens, base.formats.name, base.parallel.devices)
        if key not in self.shared_lines:
            tried = [
                replace(base, recompute=policy, micro_batch_sequences=count)
                for policy in recompute_policies(setup)
                for count in (1, 2)
            ]
            taken = peak_bytes(listed(tried), self.hardware, PLAIN).tolist()
            pairs = zip(taken[::2], taken[1::2], strict=True)
            self.shared_lines[key] = [(ceil(one), ceil(two) - ceil(one)) for one, two in pairs]
        return self.shared_lines[key]

    def _number(self, model: Model) -> int:
        return self.models.setdefault(model, len(self.models))

    # -- one device -----------------------------------------------------------------------------------------------

    def _candidates(self, setup: Setup) -> list[SettledSetup]:
        """Of each recompute policy the largest micro-batch that fits; where none does, the one that takes the least."""
        base, _ = settle_sizes(setup)
        capacity = capacity_bytes(setup)
        found: list[SettledSetup] = []
        for policy in recompute_policies(setup):
            last = replace(base, recompute=policy)
            one, each = self._line(last)
            if setup.micro_batch_sequences is None:
                micro = min(base.batch_sequences, max(1, 1 + (capacity - one) // each))
                last = replace(last, micro_batch_sequences=micro)
            if one + (last.micro_batch_sequences - 1) * each <= capacity:
                found.append(last)
        return found or [last]

    def _line(self, setup: SettledSetup) -> tuple[int, int]:
        """Bytes with one sequence at once, and of each further one."""
        key = (self._number(setup.model), setup.sequence_tokens, setup.formats.name, setup.recompute)
        if key not in self.lines:
            self.lines[key] = memory_line(setup)
        return self.lines[key]

    def _plain(self, candidates: Sequence[SettledSetup]) -> Outcome:
        seconds = [self._seconds(one) for one in candidates]
        chosen = candidates[int(np.argmin(seconds))]
        one, each = self._line(chosen)
        columns = self.columns[self._key(chosen)]
        spent = sum(count * columns[size].kernels for size, count in chosen.micro_batches())
        return self._outcome(
            chosen,
            step_s=min(seconds),
            taken=one + (chosen.micro_batch_sequences - 1) * each,
            bound=_longest(_by_cause(spent + columns[chosen.micro_batch_sequences].update)),
        )

    def _seconds(self, setup: SettledSetup) -> float:
        columns = self.columns[self._key(setup)]
        kernels = sum(count * columns[size].kernels_s for size, count in setup.micro_batches())
        return kernels + columns[setup.micro_batch_sequences].update_s

    # -- several devices ------------------------------------------------------------------------------------------

    @staticmethod
    def _groups(setups: Sequence[Setup], indices: Sequence[int]) -> list[list[tuple[int, list[SettledSetup]]]]:
        """Set-ups' places with their candidates, as many at once as are costed together."""
        groups: list[list[tuple[int, list[SettledSetup]]]] = []
        size = AT_ONCE
        for index in indices:
            base, _ = settle_sizes(setups[index])
            some = spread_candidates(base, setups[index])
            if size + len(some) > AT_ONCE:
                groups.append([])
                size = 0
            groups[-1].append((index, some))
            size += len(some)
        return groups

    def _several(self, group: Sequence[tuple[int, list[SettledSetup]]]) -> dict[int, Outcome]:
        found = evaluate(listed([one for _, some in group for one in some]), self.hardware, PLAIN)
        taken, begin, chosen = found.device_bytes, 0, {}
        for index, some in group:
            rows = slice(begin, begin + len(some))
            fits = taken[rows] <= capacity_bytes(some[0])
            order = np.lexsort((found.step_s[rows], np.where(fits, 0.0, taken[rows])))
            chosen[index] = (begin + int(order[0]), some[int(order[0])])
            begin += len(some)
        # The kernels of a device are those of one that has all of the model, for its part of the batch.
        mine = {index: self._own(one) for index, (_, one) in chosen.items()}
        self._cost(list(mine.values()))
        outcomes = {}
        for index, (row, setup) in chosen.items():
            parts = {name: float(values[row]) for name, values in found.parts.items()}
            outcomes[index] = self._outcome(
                setup,
                step_s=float(found.step_s[row]),
                taken=round(float(taken[row])),
                bound=self._shared_bound(mine[index], parts),
            )
        return outcomes

    @staticmethod
    def _own(setup: SettledSetup) -> SettledSetup:
        whole = setup.micro_batch_sequences * setup.accumulation_steps
        return replace(setup, parallel=ONE_DEVICE, batch_sequences=whole)

    def _shared_bound(self, mine: SettledSetup, parts: dict[str, float]) -> str:
        """What most of a step over several devices waits for: operators share out the parts that are kernels."""
        key = self._key(mine)
        kernels = self.columns[key][mine.micro_batch_sequences].kernels
        classes = np.array([CLASSES.get(kind, "streaming") for kind in self.kinds[key]])
        scaled = kernels.copy()
        for name in ("products", "attention", "streaming"):
            total = float(kernels[classes == name].sum())
            if total:
                scaled[classes == name] *= parts[name] / total
        spent = _by_cause(scaled)
        spent["memory"] = spent.get("memory", 0.0) + parts["update"]
        for name, bound in BOUNDS.items():
            spent[bound] = spent.get(bound, 0.0) + parts[name]
        return _longest(spent)

    # -- both -----------------------------------------------------------------------------------------------------

    def _outcome(self, setup: SettledSetup, *, step_s: float, taken: int, bound: str) -> Outcome:
        key = (self._number(setup.model), setup.sequence_tokens, setup.recompute)
        if key not in self.flops:
            work = describe(setup.model, setup.sequence_tokens, setup.attention)
            self.flops[key] = work.model_flops("causal"), work.total_hardware_flops("causal", setup.recompute)
        model_flops, hardware_flops = self.flops[key]
        capacity = capacity_bytes(setup)
        peak = self.hardware.device.peak_flops[setup.formats.matrix].value * setup.parallel.devices
        return Outcome(
            setup=setup,
            fits=taken <= capacity,
            device_bytes=taken,
            capacity_bytes=capacity,
            step_s=step_s,
            mfu=setup.batch_sequences * model_flops / (step_s * peak),
            hfu=setup.batch_sequences * hardware_flops / (step_s * peak),
            bound=bound,
        )

    def _key(self, setup: SettledSetup) -> Key:
        again = setup.accumulation_steps > 1
        return self._number(setup.model), setup.sequence_tokens, setup.formats.name, setup.recompute, again

    def _cost(self, wanted: Sequence[SettledSetup]) -> None:
        """Cost the micro-batches that were not seen yet, those of one list of kernels together."""
        groups: dict[Key, tuple[SettledSetup, dict[int, None]]] = {}
        for setup in wanted:
            key = self._key(setup)
            known = self.columns.setdefault(key, {})
            sizes = groups.setdefault(key, (setup, {}))[1]
            sizes.update({size: None for size, _ in setup.micro_batches() if size not in known})
        for key, (setup, sizes) in groups.items():
            if sizes:
                self._cost_group(key, setup, list(sizes))

    def _cost_group(self, key: Key, setup: SettledSetup, sizes: list[int]) -> None:
        calls = calls_of(setup)
        self.kinds[key] = calls.kinds
        costs = step_costs(calls, self.hardware, np.array(sizes, dtype=np.float64))
        update = costs.phase == Phase.UPDATE
        for place, size in enumerate(sizes):
            kernels, updated = np.zeros((len(calls.names), len(CAUSES))), np.zeros((len(calls.names), len(CAUSES)))
            seconds = costs.seconds[:, place]
            for mine, table in ((~update, kernels), (update, updated)):
                np.add.at(table, (costs.op[mine], costs.cause[mine, place]), seconds[mine])
            self.columns[key][size] = _Column(kernels, updated, float(kernels.sum()), float(updated.sum()))


def _by_cause(seconds: Floats) -> dict[str, float]:
    """Seconds of operators by what binds each of them."""
    found: dict[str, float] = {}
    for cause, total in zip(np.argmax(seconds, axis=1).tolist(), seconds.sum(axis=1).tolist(), strict=True):
        name = BOUND_NAMES[CAUSES[cause]]
        found[name] = found.get(name, 0.0) + total
    return found


def _longest(seconds: dict[str, float]) -> str:
    return max(seconds, key=lambda name: seconds[name])
