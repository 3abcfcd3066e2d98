"""The operators of a step, each with its time and what binds it: for many set-ups with the same kernels at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from flopwise.predict.kernels.calls import Floats, Phase
from flopwise.predict.kernels.costs import BOUND_NAMES, SetupCosts
from flopwise.records.prediction import OpPrediction
from flopwise.work.describe import describe
from flopwise.work.op import Convention
from flopwise.work.optimizers import update_work
from flopwise.work.traffic import least_bytes

BOUNDS = {
    "host": "host",
    "interference": "network",
    "tensor": "network",
    "context": "network",
    "expert": "network",
    "sharding": "network",
    "stages": "network",
    "bubble": "pipeline",
    "offload": "link",
    "step": "host",
    "framework": "framework",
}
"""Parts of a step that are no operator → what they wait for."""


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Seconds of operators over a whole step and what each waits for most: arrays of set-up × operator."""

    costs: SetupCosts
    seconds: Floats
    bounds: NDArray[np.object_]
    step_s: Floats
    """What operators have a share of, one element for each set-up."""
    parts: Mapping[str, Floats]
    """What a step over several devices is made of, one element for each set-up."""

    @property
    def added_s(self) -> Floats:
        """Operators one after the other, as whoever adds up the printed ones does it."""
        return np.cumsum(self.seconds, axis=1)[:, -1]

    def bound(self, row: int) -> str:
        """What most of a set-up's step waits for."""
        waits = list(zip(self.bounds[row], self.seconds[row].tolist(), strict=True))
        waits += [(BOUNDS[name], seconds) for name, seconds in self._others(row)]
        total: dict[str, float] = {}
        for name, seconds in waits:
            total[name] = total.get(name, 0.0) + seconds
        return max(total, key=lambda name: total[name])

    def tables(self, convention: Convention) -> list[tuple[OpPrediction, ...]]:
        """Of every set-up: operators in the model's order, the update, and what is no operator at the end."""
        moved = self.costs.by_op(self.costs.bytes).tolist()
        phases = [self.costs.by_op(self.costs.seconds, phase).tolist() for phase in Phase]
        return [
            (
                *self._rows(row, convention, moved[row], [phase[row] for phase in phases]),
                *(other_part(name, seconds, float(self.step_s[row])) for name, seconds in self._others(row)),
            )
            for row in range(len(self.costs.setups))
        ]

    def _others(self, row: int) -> list[tuple[str, float]]:
        found = [(name, float(self.parts[name][row])) for name in BOUNDS if name in self.parts]
        return [(name, seconds) for name, seconds in found if seconds > 0]

    def _rows(
        self, row: int, convention: Convention, moved: list[float], phases: list[list[float]]
    ) -> list[OpPrediction]:
        setup, calls = self.costs.setups[row], self.costs.calls
        work = describe(setup.model, setup.width, setup.attention, lengths=setup.packed)
        real = describe(setup.model, setup.sequence_tokens, lengths=setup.lengths) if setup.lengths else work
        again = work.recomputed(setup.recompute)
        # The bytes of several devices' kernels are those of one micro-batch.
        rounds = 1 if setup.is_plain else setup.accumulation_steps
        found = []
        for index, name in enumerate(calls.names):
            flops = model_flops = update_flops = 0
            least = all_moved = round(rounds * moved[index])
            if index == len(work.ops):
                update_flops = update_work(work, setup.optimizer, setup.formats).flops
            if index < len(work.ops):
                op, share = work.ops[index], again.get(name, Fraction(0))
                flops = work.hardware_flops(op, convention, share)
                model_flops = real.model_flops_of(real.ops[index], convention)
                if setup.is_plain:
                    sizes = setup.micro_batches()
                    least = sum(count * least_bytes(work, op, setup.formats, size, share) for size, count in sizes)
            time_s = float(self.seconds[row, index])
            found.append(
                OpPrediction(
                    name=name,
                    kind=calls.kinds[index],
                    flops=work.of_batch(flops, setup.batch_sequences) + update_flops,
                    model_flops=real.of_batch(model_flops, setup.batch_sequences),
                    bytes=all_moved,
                    least_bytes=least,
                    time_s=time_s,
                    share=time_s / float(self.step_s[row]),
                    bound=self.bounds[row, index],
                    forward_s=phases[Phase.FORWARD][index],
                    backward_s=phases[Phase.BACKWARD][index],
                    recompute_s=phases[Phase.RECOMPUTE][index],
                    update_s=phases[Phase.UPDATE][index],
                )
            )
        return found


def add_up(costs: SetupCosts, step_s: Floats, parts: Mapping[str, Floats] | None = None) -> OperatorTimes:
    """Operators from their kernels; `parts`: what the steps of several devices are made of."""
    bounds = costs.bounds()
    if parts and "update" in parts:
        # The update's part has no kernels, and where the host does it no time.
        bounds[:, -1] = BOUND_NAMES["dram"]
    return OperatorTimes(costs, costs.by_op(costs.seconds), bounds, step_s, parts or {})


def other_part(name: str, seconds: float, step_s: float) -> OpPrediction:
    """A part of the step that is no operator; it belongs to no phase."""
    return OpPrediction(
        name=name,
        kind="other",
        flops=0,
        model_flops=0,
        bytes=0,
        least_bytes=0,
        time_s=seconds,
        share=seconds / step_s,
        bound=BOUNDS[name],
        forward_s=0.0,
        backward_s=0.0,
        recompute_s=0.0,
        update_s=0.0,
    )
