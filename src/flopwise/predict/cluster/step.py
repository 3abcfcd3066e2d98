"""Steps over several devices, laid out for their records: the slowest stage's kernels, memory by stage."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from flopwise.predict.cluster.costing import PARTS, Costed
from flopwise.predict.cluster.pieces import ATTENTION, PRODUCTS, ROWWISE, STREAMING, kernel_classes, taken
from flopwise.predict.cluster.stages import LAST, StageBytes, StageShape, host_bytes, stage_bytes
from flopwise.predict.cluster.strategies import Integers, Listed
from flopwise.predict.kernels.calls import Floats, Phase
from flopwise.predict.kernels.costs import SetupCosts
from flopwise.records.prediction import DeviceBytes, StagePrediction
from flopwise.setup.stack import Stack
from flopwise.work.describe import describe
from flopwise.work.exchange import parts_of


def slowest_stage(costs: SetupCosts, found: Costed, rows: Integers) -> SetupCosts:
    """Of one micro-batch's kernels those of the slowest stage over the step: each class adds up to its part of it.

    `rows`: of `found`, those of the set-ups. The update takes as long as its part says; bytes stay one micro-batch's.
    """
    first, update = costs.setups[0], costs.phase == Phase.UPDATE
    here = describe(first.model, first.sequence_tokens, first.attention, first.parallel.layout)

    def slowest(name: str) -> Floats:
        values = np.stack([getattr(shape, name) for shape in found.shapes])
        return np.asarray(values[found.slowest[rows], rows], dtype=np.float64)

    present = np.stack([slowest("embedding"), slowest("layers") / first.model.layers, slowest("head")], axis=1)
    weights = present[:, [*parts_of(here), 0]][:, costs.op] * ~update
    seconds, classes = costs.seconds[:, :, 0] * weights, kernel_classes(costs.calls, costs.op)
    for number in (PRODUCTS, ATTENTION, STREAMING):
        mine = (classes == number) | ((classes == ROWWISE) & (number == PRODUCTS))
        total = np.compress(mine, seconds, axis=1).sum(axis=1)
        factor = found.parts[PARTS[number]][rows] / np.where(total > 0, total, np.inf)
        seconds[:, mine] *= factor[:, None]
    seconds[:, update] = found.parts["update"][rows][:, None]
    return replace(costs, seconds=seconds[:, :, None], bytes=costs.bytes * weights[:, :, None])


def most_host_bytes(laid_out: Listed, found: Costed, stack: Stack) -> list[int]:
    """Of each set-up, what a device of the stage that keeps the most on its host keeps there."""
    table = taken(laid_out.table, laid_out.strategies.row)
    stages = [host_bytes(laid_out.strategies, table, shape, stack) for shape in found.shapes]
    return [round(size) for size in np.maximum.reduce(stages).tolist()]


def stage_tables(laid_out: Listed, found: Costed, stack: Stack) -> list[tuple[StagePrediction, ...]]:
    """Of each set-up, the memory of one device of every stage."""
    counts = laid_out.strategies.pipeline.astype(np.intp)
    rows = np.repeat(np.arange(counts.size), counts)
    place = np.concatenate([np.arange(count, dtype=np.float64) for count in counts])
    table = taken(laid_out.table, laid_out.strategies.row)
    ends = zip(table.layers, counts.tolist(), *(shape.layers for shape in found.shapes), strict=True)
    layers = [dealt for whole, *others in ends for dealt in _dealt(int(whole), *map(int, others))]
    shape = StageShape(np.array(layers, dtype=np.float64), (place == 0) * 1.0, (place == counts[rows] - 1) * 1.0, place)
    memory = stage_bytes(laid_out.strategies.taken(rows), taken(table, rows), shape, stack)
    owners = {owner.name: getattr(memory, owner.name).tolist() for owner in fields(StageBytes)}
    stages: list[list[StagePrediction]] = [[] for _ in counts]
    for index, row in enumerate(rows.tolist()):
        mine = {name: round(sizes[index]) for name, sizes in owners.items()}
        device_bytes = DeviceBytes(**mine, total=sum(mine.values()))
        stages[row].append(StagePrediction(stage=len(stages[row]), layers=layers[index], device_bytes=device_bytes))
    return [tuple(some) for some in stages]


def _dealt(layers: int, pipeline: int, first: int, second: int, last: int) -> list[int]:
    """Layers of every stage: what the ends leave, the larger parts first."""
    if pipeline == 1:
        return [layers]
    between = pipeline - 2
    left = layers - first - last
    middle = [left // between + (index < left % between) for index in range(between)] if between else []
    assert pipeline <= LAST or max(middle) == second
    return [first, *middle, last]
