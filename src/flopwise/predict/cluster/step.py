"""One step over several devices, as a record: the slowest stage's operators, what else takes time, memory by stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from flopwise.predict.cluster.costing import Evaluation, evaluate
from flopwise.predict.cluster.pieces import taken
from flopwise.predict.cluster.stages import LAST, StageShape, host_bytes, stage_bytes
from flopwise.predict.cluster.strategies import Listed, listed
from flopwise.predict.kernels.calls import Floats, Phase, calls_of
from flopwise.predict.kernels.costs import BOUND_NAMES, CAUSES, Costs, step_costs
from flopwise.records.prediction import DeviceBytes, OpPrediction, StagePrediction
from flopwise.setup.setup import SettledSetup
from flopwise.setup.stack import Stack
from flopwise.work.describe import describe
from flopwise.work.exchange import parts_of
from flopwise.work.op import Convention

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
}
"""Parts of a step that are no operator → what they wait for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterStep:
    """What a prediction over several devices is made of."""

    step_s: float
    parts: dict[str, float]
    ops: tuple[OpPrediction, ...]
    stages: tuple[StagePrediction, ...]
    host_bytes: int

    @property
    def device_bytes(self) -> DeviceBytes:
        """Of the fullest stage."""
        return max((stage.device_bytes for stage in self.stages), key=lambda memory: memory.total)


def cluster_step(setup: SettledSetup, stack: Stack, convention: Convention) -> ClusterStep:
    """Cost one set-up and lay the figures out."""
    laid_out = listed([setup])
    found = evaluate(laid_out, setup.hardware, stack)
    parts = {name: float(value[0]) for name, value in found.parts.items()}
    step_s = float(found.step_s[0])
    ops = _operators(setup, convention, found)
    others = [_other(name, parts[name], step_s) for name in BOUNDS if parts[name] > 0]
    table = taken(laid_out.table, laid_out.strategies.row)
    on_host = max(float(host_bytes(laid_out.strategies, table, shape, stack)[0]) for shape in found.shapes)
    return ClusterStep(
        host_bytes=round(on_host),
        step_s=step_s,
        parts=parts,
        ops=(*ops, *others),
        stages=_stages(laid_out, found, stack, setup.parallel.pipeline),
    )


def _operators(setup: SettledSetup, convention: Convention, found: Evaluation) -> list[OpPrediction]:
    """The operators of the slowest stage; their times are shares of the step's kernels by class."""
    calls = calls_of(setup)
    costs = step_costs(calls, setup.hardware, np.array([float(setup.micro_batch_sequences)]))
    work = describe(setup.model, setup.sequence_tokens, setup.attention)
    here = describe(setup.model, setup.sequence_tokens, setup.attention, setup.parallel.layout)
    shape = found.shapes[int(found.slowest[0])]
    layers = float(shape.layers[0]) / setup.model.layers
    present = np.array([(float(shape.embedding[0]), layers, float(shape.head[0]))[part] for part in parts_of(here)])
    weights = np.append(present, 0.0)[costs.op] * (costs.phase != Phase.UPDATE)
    seconds = _scaled_to_parts(costs, weights, calls.kinds, found)
    again = work.recomputed(setup.recompute)
    rows = []
    for index, op in enumerate(work.ops):
        mine, share = costs.op == index, again.get(op.name, Fraction(0))
        rows.append(
            _operator(
                op.name,
                calls.kinds[index],
                seconds[mine],
                costs.phase[mine],
                cause=_cause(costs, seconds, mine),
                step_s=float(found.step_s[0]),
                flops=setup.batch_sequences * work.hardware_flops(op, convention, share),
                model_flops=3 * setup.batch_sequences * work.forward_flops(op, convention),
                moved=round(setup.accumulation_steps * float((costs.bytes[:, 0] * weights)[mine].sum())),
            )
        )
    update = np.array([float(found.parts["update"][0])])
    phase = np.array([Phase.UPDATE])
    rows.append(_operator("optimizer", "optimizer", update, phase, cause="memory", step_s=float(found.step_s[0])))
    return rows


def _scaled_to_parts(costs: Costs, weights: Floats, kinds: tuple[str, ...], found: Evaluation) -> Floats:
    """Seconds of each kernel over the step, so that each class adds up to its part of the step."""
    seconds = costs.seconds[:, 0] * weights
    names = {"gemm": "products", "attention": "attention"}
    classes = np.array([names.get(kind, "streaming") for kind in kinds])[costs.op]
    for name in ("products", "attention", "streaming"):
        mine = classes == name
        total = float(seconds[mine].sum())
        if total:
            seconds[mine] *= float(found.parts[name][0]) / total
    return seconds


def _cause(costs: Costs, seconds: Floats, mine: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> str:
    by_cause = [float(seconds[mine & (costs.cause[:, 0] == cause)].sum()) for cause in range(len(CAUSES))]
    return BOUND_NAMES[CAUSES[int(np.argmax(by_cause))]]


def _operator(
    name: str,
    kind: str,
    seconds: Floats,
    phases: np.ndarray[tuple[int], np.dtype[np.intp]],
    *,
    cause: str,
    step_s: float,
    flops: int = 0,
    model_flops: int = 0,
    moved: int = 0,
) -> OpPrediction:
    by_phase = [float(seconds[phases == phase].sum()) for phase in Phase]
    return OpPrediction(
        name=name,
        kind=kind,
        flops=flops,
        model_flops=model_flops,
        bytes=moved,
        least_bytes=moved,
        time_s=float(seconds.sum()),
        share=float(seconds.sum()) / step_s,
        bound=cause,
        forward_s=by_phase[Phase.FORWARD],
        backward_s=by_phase[Phase.BACKWARD],
        recompute_s=by_phase[Phase.RECOMPUTE],
        update_s=by_phase[Phase.UPDATE],
    )


def _other(name: str, seconds: float, step_s: float) -> OpPrediction:
    """A part of the step that is no operator; it belongs to no phase."""
    row = _operator(name, "other", np.zeros(0), np.zeros(0, dtype=np.intp), cause=BOUNDS[name], step_s=step_s)
    return replace(row, time_s=seconds, share=seconds / step_s)


def _stages(laid_out: Listed, found: Evaluation, stack: Stack, pipeline: int) -> tuple[StagePrediction, ...]:
    """Memory of one device of every stage."""
    first, second, last = (int(shape.layers[0]) for shape in found.shapes)
    layers = _dealt(int(laid_out.table.layers[0]), pipeline, first, last)
    assert pipeline <= LAST or max(layers[1:-1]) == second
    place = np.arange(pipeline, dtype=np.float64)
    shape = StageShape(np.array(layers, dtype=np.float64), (place == 0) * 1.0, (place == pipeline - 1) * 1.0, place)
    strategies = laid_out.strategies.taken(np.zeros(pipeline, dtype=np.intp))
    memory = stage_bytes(strategies, taken(laid_out.table, strategies.row), shape, stack)
    stages = []
    for stage in range(pipeline):
        owners = {owner: round(float(getattr(memory, owner)[stage])) for owner in memory.__dataclass_fields__}
        stages.append(
            StagePrediction(
                stage=stage,
                layers=layers[stage],
                device_bytes=DeviceBytes(**owners, total=sum(owners.values())),
            )
        )
    return tuple(stages)


def _dealt(layers: int, pipeline: int, first: int, last: int) -> list[int]:
    """Layers of every stage: what the ends leave, the larger parts first."""
    if pipeline == 1:
        return [layers]
    between = pipeline - 2
    left = layers - first - last
    middle = [left // between + (index < left % between) for index in range(between)] if between else []
    return [first, *middle, last]
