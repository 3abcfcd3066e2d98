"""Thousands of predictions at once: those of `flopwise.predict.step`, what they have in common being costed once.

A kernel's sizes are linear in the micro-batch, so that every micro-batch of a model, sequence, format and recompute
policy is costed in one go; set-ups on several devices are laid out as the arrays that `plan` searches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.predict.choose import PLAIN, Request, auto_policies, base_workload, capacity_bytes, micro_batch_sizes
from flopwise.predict.cluster.collectives import check_reach
from flopwise.predict.cluster.costing import evaluate, peak_bytes
from flopwise.predict.cluster.step import BOUNDS
from flopwise.predict.cluster.strategies import listed, micro_batches
from flopwise.predict.kernels.calls import Floats, Phase, calls_for
from flopwise.predict.kernels.costs import BOUND_NAMES, CAUSES, step_costs
from flopwise.predict.kernels.memory import memory_line
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel
from flopwise.setup.workload import Workload
from flopwise.sweep.auto_batch import largest
from flopwise.work.describe import describe
from flopwise.work.model import Model
from flopwise.work.work import Recompute, Work

AT_ONCE = 8192
"""Strategies over several devices that are costed together."""
CLASSES = {"gemm": "products", "attention": "attention"}
"""Kind of an operator → the part of a step that it belongs to; others stream."""

Key = tuple[int, int, str, str, bool]
"""Model, sequence, formats, recompute, whether gradients are accumulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One set-up: everything but the recompute policy, and perhaps the micro-batch, is given."""

    model: Model
    hardware: Hardware
    request: Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What of a `Prediction` a sweep's table holds."""

    workload: Workload
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

    def outcomes(self, cases: Sequence[Case]) -> list[Outcome]:
        """Of every case, in their order."""
        several = [index for index, case in enumerate(cases) if not case.request.is_plain]
        found: dict[int, Outcome] = {}
        candidates = {index: self._candidates(case) for index, case in enumerate(cases) if case.request.is_plain}
        self._cost([(cases[index].model, one) for index, some in candidates.items() for one in some])
        for index, some in candidates.items():
            found[index] = self._plain(cases[index], some)
        for group in self._groups(cases, several):
            found |= self._several(cases, group)
        return [found[index] for index in range(len(cases))]

    def largest_micro_batch(self, case: Case, most: int) -> int:
        """The most sequences that fit each device at once with any recompute policy; 0: not even one."""
        capacity = capacity_bytes(self.hardware, case.request)
        lines = self._all_lines(case)
        guess = max(1 + (capacity - one) // max(1, each) for one, each in lines)
        return largest(lambda count: min(one + (count - 1) * each for one, each in lines) <= capacity, guess, most)

    def least_bytes(self, case: Case) -> int:
        """What one sequence at once takes with the policy that keeps the least."""
        return min(one for one, _ in self._all_lines(case))

    def _all_lines(self, case: Case) -> list[tuple[int, int]]:
        """Of every policy: bytes with one sequence at once, and of each further one, on each device."""
        if case.request.is_plain:
            return [self._line(case, policy) for policy in self._policies(case)]
        sized = replace(case.request, batch_sequences=2 * case.request.parallel.data, micro_batch_sequences=None)
        base, _ = base_workload(case.model, self.hardware, sized)
        parallel, model = case.request.parallel, self._number(case.model)
        key = (model, base.sequence_tokens, base.formats.name, parallel.devices)
        if key not in self.shared_lines:
            tried = [
                (case.model, parallel, replace(base, recompute=policy, micro_batch_sequences=count))
                for policy in self._policies(case)
                for count in (1, 2)
            ]
            taken = peak_bytes(listed(tried, self.hardware), self.hardware, PLAIN).tolist()
            pairs = zip(taken[::2], taken[1::2], strict=True)
            self.shared_lines[key] = [(ceil(one), ceil(two) - ceil(one)) for one, two in pairs]
        return self.shared_lines[key]

    @staticmethod
    def _policies(case: Case) -> tuple[Recompute, ...]:
        return (case.request.recompute,) if case.request.recompute else auto_policies(case.request.attention)

    def _number(self, model: Model) -> int:
        return self.models.setdefault(model, len(self.models))

    # -- one device -----------------------------------------------------------------------------------------------

    def _candidates(self, case: Case) -> list[Workload]:
        """Of each recompute policy the largest micro-batch that fits; where none does, the one that takes the least."""
        base, _ = base_workload(case.model, self.hardware, case.request)
        capacity = capacity_bytes(self.hardware, case.request)
        found: list[Workload] = []
        for policy in self._policies(case):
            one, each = self._line(case, policy)
            micro = case.request.micro_batch_sequences
            if micro is None:
                micro = min(base.batch_sequences, max(1, 1 + (capacity - one) // each))
            last = replace(base, recompute=policy, micro_batch_sequences=micro)
            if one + (micro - 1) * each <= capacity:
                found.append(last)
        return found or [last]

    def _line(self, case: Case, policy: Recompute) -> tuple[int, int]:
        """Bytes with one sequence at once, and of each further one."""
        base, _ = base_workload(case.model, self.hardware, case.request)
        key = (self._number(case.model), base.sequence_tokens, base.formats.name, policy)
        if key not in self.lines:
            self.lines[key] = memory_line(self._work(case.model, base), replace(base, recompute=policy))
        return self.lines[key]

    @staticmethod
    def _work(model: Model, workload: Workload) -> Work:
        return describe(model, workload.sequence_tokens, workload.attention)

    def _plain(self, case: Case, candidates: Sequence[Workload]) -> Outcome:
        seconds = [self._seconds(case.model, one) for one in candidates]
        chosen = candidates[int(np.argmin(seconds))]
        one, each = self._line(case, chosen.recompute)
        columns = self.columns[self._key(case.model, chosen)]
        spent = sum(count * columns[size].kernels for size, count in chosen.micro_batches())
        return self._outcome(
            case,
            chosen,
            step_s=min(seconds),
            taken=one + (chosen.micro_batch_sequences - 1) * each,
            bound=_longest(_by_cause(spent + columns[chosen.micro_batch_sequences].update)),
        )

    def _seconds(self, model: Model, workload: Workload) -> float:
        columns = self.columns[self._key(model, workload)]
        kernels = sum(count * columns[size].kernels_s for size, count in workload.micro_batches())
        return kernels + columns[workload.micro_batch_sequences].update_s

    # -- several devices ------------------------------------------------------------------------------------------

    def _groups(self, cases: Sequence[Case], indices: Sequence[int]) -> list[list[tuple[int, list[Workload]]]]:
        """Cases with their candidates, as many at once as are costed together."""
        groups: list[list[tuple[int, list[Workload]]]] = []
        size = AT_ONCE
        for index in indices:
            some = self._spread(cases[index])
            if size + len(some) > AT_ONCE:
                groups.append([])
                size = 0
            groups[-1].append((index, some))
            size += len(some)
        return groups

    def _spread(self, case: Case) -> list[Workload]:
        parallel, given = case.request.parallel, case.request.micro_batch_sequences
        base, _ = base_workload(case.model, self.hardware, replace(case.request, micro_batch_sequences=given or 1))
        parallel.check(case.model, base.sequence_tokens)
        check_reach(self.hardware.name, self.hardware.networks, parallel.devices)
        if base.batch_sequences < parallel.data:
            raise FlopwiseError(
                f"{parallel.data:,} devices for a batch of {base.batch_sequences:,}", hint=f"--batch {parallel.data}"
            )
        sizes = [given] if given else micro_batch_sizes(-(-base.batch_sequences // parallel.data))
        return [
            replace(base, recompute=policy, micro_batch_sequences=size)
            for policy in self._policies(case)
            for size in sizes
        ]

    def _several(self, cases: Sequence[Case], group: Sequence[tuple[int, list[Workload]]]) -> dict[int, Outcome]:
        tried = [(cases[index].model, cases[index].request.parallel, one) for index, some in group for one in some]
        found = evaluate(listed(tried, self.hardware), self.hardware, PLAIN)
        taken, begin, chosen = found.device_bytes, 0, {}
        for index, some in group:
            rows = slice(begin, begin + len(some))
            fits = taken[rows] <= capacity_bytes(self.hardware, cases[index].request)
            order = np.lexsort((found.step_s[rows], np.where(fits, 0.0, taken[rows])))
            chosen[index] = (begin + int(order[0]), some[int(order[0])])
            begin += len(some)
        # The kernels of a device are those of one that has all of the model, for its part of the batch.
        mine = {index: self._own(one, cases[index].request.parallel) for index, (_, one) in chosen.items()}
        self._cost([(cases[index].model, one) for index, one in mine.items()])
        outcomes = {}
        for index, (row, workload) in chosen.items():
            parts = {name: float(values[row]) for name, values in found.parts.items()}
            outcomes[index] = self._outcome(
                cases[index],
                workload,
                step_s=float(found.step_s[row]),
                taken=round(float(taken[row])),
                bound=self._shared_bound(cases[index].model, mine[index], parts),
            )
        return outcomes

    @staticmethod
    def _own(workload: Workload, parallel: Parallel) -> Workload:
        whole, _, count = micro_batches(workload, parallel.data)
        return replace(workload, batch_sequences=whole * count, micro_batch_sequences=whole)

    def _shared_bound(self, model: Model, mine: Workload, parts: dict[str, float]) -> str:
        """What most of a step over several devices waits for: operators share out the parts that are kernels."""
        key = self._key(model, mine)
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

    def _outcome(self, case: Case, workload: Workload, *, step_s: float, taken: int, bound: str) -> Outcome:
        key = (self._number(case.model), workload.sequence_tokens, workload.recompute)
        if key not in self.flops:
            work = self._work(case.model, workload)
            self.flops[key] = work.model_flops("causal"), work.total_hardware_flops("causal", workload.recompute)
        model_flops, hardware_flops = self.flops[key]
        capacity = capacity_bytes(self.hardware, case.request)
        peak = self.hardware.device.peak_flops[workload.formats.matrix].value * case.request.parallel.devices
        return Outcome(
            workload=workload,
            fits=taken <= capacity,
            device_bytes=taken,
            capacity_bytes=capacity,
            step_s=step_s,
            mfu=workload.batch_sequences * model_flops / (step_s * peak),
            hfu=workload.batch_sequences * hardware_flops / (step_s * peak),
            bound=bound,
        )

    def _key(self, model: Model, workload: Workload) -> Key:
        again = workload.accumulation_steps > 1
        return self._number(model), workload.sequence_tokens, workload.formats.name, workload.recompute, again

    def _cost(self, wanted: Sequence[tuple[Model, Workload]]) -> None:
        """Cost the micro-batches that were not seen yet, those of one list of kernels together."""
        groups: dict[Key, tuple[Model, Workload, dict[int, None]]] = {}
        for model, workload in wanted:
            key = self._key(model, workload)
            known = self.columns.setdefault(key, {})
            sizes = groups.setdefault(key, (model, workload, {}))[2]
            sizes.update({size: None for size, _ in workload.micro_batches() if size not in known})
        for key, (model, workload, sizes) in groups.items():
            if sizes:
                self._cost_group(key, model, workload, list(sizes))

    def _cost_group(self, key: Key, model: Model, workload: Workload, sizes: list[int]) -> None:
        calls = calls_for(
            model,
            sequence_tokens=workload.sequence_tokens,
            kernel=workload.attention,
            formats=workload.formats,
            policy=workload.recompute,
            fusion=workload.fusion,
            optimizer=workload.optimizer,
            accumulate=workload.accumulation_steps > 1,
        )
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
