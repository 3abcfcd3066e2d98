"""Seconds of a step under any parallel set-up, for many strategies at once.

A layer's kernels come from `pieces`, its collectives from `transfers`, the order in which a device plays them from
`timeline`, and the stages' from `pipeline`. A stack's constants scale the kernels by class and the network, put a floor
under a layer (the host cannot start its kernels faster) and say what a hidden collective costs all the same.

The parts of a step (`PARTS`) add up to its seconds, on the slowest stage: what the pipeline makes it wait is a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from flopwise.predict.cluster.pieces import (
    ATTENTION,
    BLOCK,
    EMBEDDING,
    HEAD,
    PRODUCTS,
    ROWWISE,
    STREAMING,
    UPDATE,
    Pieces,
    taken,
)
from flopwise.predict.cluster.pipeline import pipeline_seconds
from flopwise.predict.cluster.stages import StageBytes, StageShape, stage_bytes, stage_shapes, stage_trained
from flopwise.predict.cluster.strategies import Booleans, Integers, Listed, Strategies, listed
from flopwise.predict.cluster.timeline import StreamTimes, played, started
from flopwise.predict.cluster.transfers import Transfers, transfers
from flopwise.predict.kernels.bandwidth import streaming_times
from flopwise.predict.kernels.calls import Floats, Phase
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import SettledSetup
from flopwise.setup.stack import NO_STACK, Stack

PARTS = (
    "products",
    "attention",
    "streaming",
    "host",
    "interference",
    "tensor",
    "context",
    "expert",
    "sharding",
    "stages",
    "bubble",
    "update",
    "offload",
    "step",
)
"""What a step's seconds are made of. products, attention, streaming: kernels. host: waiting for the host to start
them. interference: what hidden collectives cost. tensor, context, expert, sharding, stages: exposed communication of
each kind. bubble: the pipeline's waiting. update: the optimizer. offload: exposed copies to and from the host. step:
what the framework does once a step."""


PLAIN = Stack(name=NO_STACK, title="what the kernels and the network allow", source="no framework in the way")

AT_ONCE = 8192
"""Strategies that are costed together, as far as they are not searched."""

ROUNDING = 1e-12

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Costed:
    """What strategies cost; one element for each."""

    step_s: Floats
    parts: dict[str, Floats]
    stages: tuple[StageBytes, ...]
    """First, second and last."""
    shapes: tuple[StageShape, ...]
    slowest: Integers
    """Which of the three takes longest."""

    @property
    def device_bytes(self) -> Floats:
        """Of the fullest stage."""
        return _most([stage.total for stage in self.stages])


@dataclass(frozen=True, slots=True)
class _Step:
    """Strategies with micro-batches of one size, and everything that follows from the size."""

    strategies: Strategies
    table: Pieces
    moved: Transfers
    shapes: tuple[StageShape, ...]
    stack: Stack


@dataclass(frozen=True, slots=True)
class _Pass:
    """Seconds of each part of the model on the kernels' stream: arrays of part × strategy."""

    forward: Floats
    backward: Floats
    """Recompute included."""
    parts: dict[str, Floats]
    """What both are made of, by part of the step."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """Seconds of one stage for one micro-batch."""

    forward: Floats
    backward: Floats
    exposed: Floats
    """Of both, what waits for gathers and reductions."""
    tail: Floats
    """After the last backward: reductions that are still running."""

    @property
    def both(self) -> Floats:
        return self.forward + self.backward


def evaluate(laid_out: Listed, hardware: Hardware, stack: Stack) -> Costed:
    """Cost every strategy; the hardware's networks must reach all their devices."""
    strategies, stack = laid_out.strategies, stack.on(hardware.device.architecture)
    step = _step(strategies, taken(laid_out.table, strategies.row), hardware, stack)
    one = _passes(step)
    stages = [_stage(step, one, shape) for shape in step.shapes]
    longest = _most([stage.both for stage in stages])
    slowest = np.argmax(np.stack([stage.both for stage in stages]), axis=0)
    last, tail = _smaller_last(laid_out, step, hardware, longest, _tail(step, stages))
    # A smaller last micro-batch counts as a part of one, for every kind of work alike.
    count = strategies.micro_batches - 1 + last / longest
    seconds = _pipeline(step, stages, longest, count)
    parts = _parts(step, one, stages, slowest, count)
    parts["bubble"] = seconds - count * longest
    parts["sharding"] = parts["sharding"] + tail
    parts.update(_once(step, hardware, _most([stage.forward for stage in stages])))
    parts["offload"] = parts["offload"] + _host_update(step)
    step_s = sum(parts.values(), np.zeros_like(seconds))
    waits = np.maximum(0.0, _started(step, hardware) - step_s)
    parts["host"] = parts["host"] + waits
    return Costed(
        step_s=step_s + waits,
        parts={name: parts[name] for name in PARTS},
        stages=tuple(stage_bytes(strategies, step.table, shape, stack) for shape in step.shapes),
        shapes=step.shapes,
        slowest=slowest,
    )


def cost_laid_out(
    setups: Sequence[SettledSetup], cost: Callable[[Listed, Hardware, Stack], Found]
) -> Iterator[tuple[list[int], Listed, Found]]:
    """Cost set-ups on any hardware and stacks, many at once: places in `setups`, and those laid out and costed."""
    # What is filled up is computed like tokens.
    setups = [replace(one, sequence_tokens=one.width, lengths=None) if one.lengths else one for one in setups]
    alike: dict[tuple[int, int], list[int]] = {}
    for place, setup in enumerate(setups):
        # By their identity: neither description has a hash.
        alike.setdefault((id(setup.hardware), id(setup.stack)), []).append(place)
    for places in alike.values():
        for begin in range(0, len(places), AT_ONCE):
            some = places[begin : begin + AT_ONCE]
            laid_out, first = listed([setups[place] for place in some]), setups[some[0]]
            yield some, laid_out, cost(laid_out, first.hardware, first.stack or PLAIN)


def peak_bytes(laid_out: Listed, hardware: Hardware, stack: Stack) -> Floats:
    """Memory of the fullest device alone, at a tenth of the cost of `evaluate`."""
    stack = stack.on(hardware.device.architecture)
    table = taken(laid_out.table, laid_out.strategies.row)
    shapes = stage_shapes(laid_out.strategies, table)
    return _most([stage_bytes(laid_out.strategies, table, shape, stack).total for shape in shapes])


def least_seconds(laid_out: Listed, hardware: Hardware, stack: Stack) -> Floats:
    """Seconds that a step cannot be below: its blocks' kernels, dealt out evenly over the stages."""
    stack = stack.on(hardware.device.architecture)
    seconds = laid_out.table.seconds[:, BLOCK] * _factors(stack)
    # Of products made again, a stack may keep the results of some.
    kept = stack.kept_products * seconds[:, Phase.RECOMPUTE, PRODUCTS] * (laid_out.table.product_bytes > 0)
    layer = seconds.sum(axis=(1, 2)) - kept
    strategies = laid_out.strategies
    micro_batches = layer[strategies.row] * (strategies.micro_batches - 1) + layer[strategies.rest_row]
    least = micro_batches * laid_out.table.layers[strategies.row] / strategies.pipeline
    return np.asarray(least, dtype=np.float64)


def _factors(stack: Stack) -> Floats:
    """A stack's factors on the seconds of kernels, by class."""
    products, attention, streaming = (stack.value(name) for name in ("products", "attention", "streaming"))
    return np.array([products, attention, streaming, products * stack.value("rowwise")])


def _most(arrays: list[Floats]) -> Floats:
    return np.asarray(np.maximum.reduce(arrays), dtype=np.float64)


def _step(strategies: Strategies, table: Pieces, hardware: Hardware, stack: Stack) -> _Step:
    moved = transfers(strategies, table, hardware, stack)
    return _Step(strategies, table, moved, stage_shapes(strategies, table), stack)


def _passes(step: _Step) -> _Pass:
    """Kernels and what stands between them, for each part of the model."""
    moved, stack = step.moved, step.stack
    factors = _factors(stack)
    seconds = np.moveaxis(step.table.seconds, 0, -1) * factors[None, None, :, None]
    if stack.kept_products:
        again = seconds[BLOCK, Phase.RECOMPUTE, PRODUCTS]
        seconds[BLOCK, Phase.RECOMPUTE, PRODUCTS] = again * (1.0 - stack.kept_products * (step.table.product_bytes > 0))
    forward, later = seconds[:, Phase.FORWARD], seconds[:, Phase.BACKWARD] + seconds[:, Phase.RECOMPUTE]
    both = forward + later
    # Casts belong to the products that they are for.
    products = both[:, PRODUCTS] + both[:, ROWWISE]
    parts = {"products": products, "attention": both[:, ATTENTION], "streaming": both[:, STREAMING]}
    forward_s, backward_s = forward.sum(axis=1), later.sum(axis=1)
    for name, (before, after) in {
        "tensor": moved.tensor,
        "context": moved.context,
        "expert": moved.expert,
    }.items():
        forward_s, backward_s = forward_s + before, backward_s + after
        parts[name] = before + after
    # Copies to the host and the host's own work run beside a layer; it cannot end before them.
    for name, floor in (("offload", (moved.offload, moved.offload)), ("host", _host(step))):
        parts[name] = np.maximum(0.0, floor[0] - forward_s) + np.maximum(0.0, floor[1] - backward_s)
        forward_s, backward_s = np.maximum(forward_s, floor[0]), np.maximum(backward_s, floor[1])
    share = stack.value("interference")
    beside = (share * np.minimum(forward_s, moved.gather), share * np.minimum(backward_s, moved.beside_backward))
    parts["interference"] = beside[0] + beside[1]
    return _Pass(forward_s + beside[0], backward_s + beside[1], parts)


def _host(step: _Step) -> tuple[Floats, Floats]:
    """Host seconds to start the kernels of each part, an end being as much as a layer: forward, backward.

    What is made again is started again. Collectives of tensor ranks are started in the layers, each as a reduction or
    as the two that stand for it; with sequence parallelism backward gathers each product's input once more.
    """
    strategies, table, stack = step.strategies, step.table, step.stack
    each = stack.value("host_layer_s")
    again = (table.seconds[:, :, Phase.RECOMPUTE].sum(axis=-1) > 0).T * each
    forward, backward = np.full_like(again, each), each + again
    ranks = strategies.tensor * step.moved.spread
    call = np.where(strategies.tensor > 1, stack.value("tensor_call_s") + stack.value("tensor_rank_s") * ranks, 0.0)
    calls = call * np.where(strategies.sequence, 2.0, 1.0)
    forward[BLOCK] += calls * table.reductions
    backward[BLOCK] += calls * (table.reductions + table.reductions_again)
    backward[BLOCK] += call * strategies.sequence * table.reductions
    return forward, backward


def _started(step: _Step, hardware: Hardware) -> Floats:
    """Host seconds to start the kernels and collectives of a step one by one, at the stage that has the most of them.

    Of a framework its constants say it. Where kernels are replayed, which then are none, so are collectives.
    """
    strategies, moved, kernels = step.strategies, step.moved, step.table.kernels.T
    if step.stack.name != NO_STACK or hardware.device.kind != "gpu":
        return np.zeros(len(strategies))

    def most(each: Floats) -> Floats:
        stages = [
            shape.embedding * each[EMBEDDING] + shape.layers * each[BLOCK] + shape.head * each[HEAD]
            for shape in step.shapes
        ]
        return _most(stages)

    each, last = most(kernels[:UPDATE] + moved.calls) + moved.hop_calls, most(moved.calls_last) + kernels[UPDATE]
    return np.where(kernels[BLOCK] > 0, (strategies.micro_batches * each + last) * hardware.launch_s, 0.0)


def _stage(step: _Step, one: _Pass, shape: StageShape) -> _Stage:
    """Play one stage's forward and backward; strategies with the same parts in the same order are played together."""
    strategies, moved = step.strategies, step.moved
    count = len(strategies)
    forward, backward, exposed, tail = np.zeros(count), np.zeros(count), np.zeros(count), np.zeros(count)
    keys = np.stack([shape.layers, shape.embedding, shape.head, strategies.prefetch.astype(np.float64)])
    for key in np.unique(keys, axis=1).T:
        order = [EMBEDDING] * int(key[1]) + [BLOCK] * int(key[0]) + [HEAD] * int(key[2])
        if not order:
            continue
        mine = np.flatnonzero((keys == key[:, None]).all(axis=0))
        group = _Group(one, moved, mine, order, int(key[3]))
        middle = group.forward()
        # Between a micro-batch's forward and its backward a pipeline's stage has others': nothing is gathered ahead.
        rest = np.where(strategies.pipeline[mine] > 1, middle.end, middle.collectives)
        middle = StreamTimes(middle.kernels, rest)
        end = group.backward(middle, moved.reduce_each).end
        forward[mine], backward[mine] = middle.kernels, end - middle.kernels
        busy = group.total(one.forward + one.backward)
        # Sums in another order differ in their last digits, which is not a wait.
        exposed[mine] = np.where(end - busy > ROUNDING * end, end - busy, 0.0)
        if moved.reduce_last[:, mine].any():
            behind = group.total(moved.reduce_last)
            if step.stack.gradient_overlap:
                behind = group.backward(middle, moved.reduce_each + moved.reduce_last).end - end
            tail[mine] = behind
    # Hops beside kernels are only waited for while the pipeline fills and empties.
    hop = np.where(_hidden_hops(step), 0.0, moved.hop) * (shape.layers + shape.head > 0)
    return _Stage(forward + hop, backward + hop, exposed, tail)


@dataclass(frozen=True, slots=True)
class _Group:
    """Strategies whose stages have the same parts in the same order."""

    one: _Pass
    moved: Transfers
    mine: Integers
    order: list[int]
    prefetch: int

    def forward(self) -> StreamTimes:
        none = [np.zeros(self.mine.size)] * len(self.order)
        kernels, gathers = self.layers(self.one.forward), self.layers(self.moved.gather)
        return played(started(none[0]), kernels, gathers, none, self.prefetch)

    def backward(self, start: StreamTimes, reductions: Floats) -> StreamTimes:
        kernels, gathers, reduces = (
            self.layers(seconds)[::-1] for seconds in (self.one.backward, self.moved.gather_again, reductions)
        )
        return played(start, kernels, gathers, reduces, self.prefetch)

    def total(self, seconds: Floats) -> Floats:
        return sum(self.layers(seconds), np.zeros(self.mine.size))

    def layers(self, seconds: Floats) -> list[Floats]:
        """Those of each part, in order; all layers of a kind are one array."""
        parts = {part: seconds[part, self.mine] for part in set(self.order)}
        return [parts[part] for part in self.order]


def _smaller_last(
    laid_out: Listed, step: _Step, hardware: Hardware, longest: Floats, tail: Floats
) -> tuple[Floats, Floats]:
    """Seconds of the last micro-batch at the slowest stage, and of the reductions that are running after it.

    They are `longest` and `tail` where it is as large as the others.
    """
    smaller = np.flatnonzero(laid_out.strategies.rest_row != laid_out.strategies.row)
    last, after = longest.copy(), tail.copy()
    if smaller.size:
        strategies = laid_out.strategies.taken(smaller)
        table = taken(laid_out.table, strategies.rest_row)
        # The layers stay where they are.
        shapes = tuple(shape.taken(smaller) for shape in step.shapes)
        rest = _Step(strategies, table, transfers(strategies, table, hardware, step.stack), shapes, step.stack)
        one = _passes(rest)
        stages = [_stage(rest, one, shape) for shape in shapes]
        last[smaller] = _most([stage.both for stage in stages])
        after[smaller] = _tail(rest, stages)
    return last, after


def _tail(step: _Step, stages: list[_Stage]) -> Floats:
    """Seconds of reductions after the step's last backward, which is the first stage's.

    Later stages are done before it, by what the stages before them take for their backward of one micro-batch.
    """
    first, second, last = stages
    ahead = first.backward / step.strategies.chunks
    before_last = ahead + _alike(step) * second.backward / step.strategies.chunks
    return _most([first.tail, second.tail - ahead, last.tail - before_last])


def _alike(step: _Step) -> Floats:
    """How many stages between the ends the second stands for: some have a layer less, so they count by layers."""
    first, second, last = step.shapes
    between = step.table.layers - first.layers - last.layers
    return np.asarray(between / np.maximum(second.layers, 1.0), dtype=np.float64)


def _pipeline(step: _Step, stages: list[_Stage], longest: Floats, micro_batches: Floats) -> Floats:
    """From the first forward to the last backward."""
    strategies, alike = step.strategies, _alike(step)
    between = np.maximum(strategies.pipeline - 2, 0.0)
    weighted = list(zip((np.ones_like(between), alike, (strategies.pipeline > 1) * 1.0), stages, strict=True))
    stages_in_all = between - alike + _hidden_hops(step) * (strategies.pipeline - between + alike)
    hops = stages_in_all * step.moved.hop
    return pipeline_seconds(
        strategies.schedule,
        strategies.chunks,
        micro_batches,
        strategies.pipeline,
        forward_sum=sum((count * stage.forward for count, stage in weighted), hops),
        backward_sum=sum((count * stage.backward for count, stage in weighted), hops),
        forward_most=_most([stage.forward for stage in stages]),
        backward_most=_most([stage.backward for stage in stages]),
        both_most=longest,
    )


def _hidden_hops(step: _Step) -> Booleans:
    return step.strategies.overlap_stages | ("stages" in step.stack.overlap)


def _parts(
    step: _Step, one: _Pass, stages: list[_Stage], slowest: Integers, micro_batches: Floats
) -> dict[str, Floats]:
    """Seconds of all micro-batches at the slowest stage."""

    def chosen(arrays: list[Floats]) -> Floats:
        return np.asarray(
            micro_batches * np.take_along_axis(np.stack(arrays), slowest[None], axis=0)[0], dtype=np.float64
        )

    found = {
        name: chosen(
            [
                shape.embedding * value[EMBEDDING] + shape.layers * value[BLOCK] + shape.head * value[HEAD]
                for shape in step.shapes
            ]
        )
        for name, value in one.parts.items()
    }
    found["sharding"] = chosen([stage.exposed for stage in stages])
    found["stages"] = np.where(_hidden_hops(step), 0.0, micro_batches * 2 * step.moved.hop)
    return found


def _updated(step: _Step) -> Floats:
    """Parameters that the busiest device updates."""
    strategies = step.strategies
    shard = np.where(strategies.zero >= 1, strategies.shard, 1.0)
    mine = []
    for shape in step.shapes:
        dense, experts = stage_trained(step.table, shape)
        mine.append(dense / shard + experts / np.maximum(1.0, shard / strategies.dealt))
    return _most(mine)


def _once(step: _Step, hardware: Hardware, forward_s: Floats) -> dict[str, Floats]:
    """The update on the device, the weights sent round after it, what the framework does besides.

    Weights that are gathered beside the next forward are only waited for as far as they take longer.
    """
    strategies, parameters = step.strategies, _updated(step)
    moved = streaming_times(hardware.device, hardware.efficiency, parameters * strategies.update_bytes)
    update = moved.seconds * step.stack.value("streaming")
    after = step.moved.gather_after_update
    hidden = strategies.overlap_weights | ("weights" in step.stack.overlap)
    after = after - hidden * np.minimum(after, forward_s)
    return {
        "update": np.where(strategies.offload_optimizer, 0.0, update) + after,
        "step": np.full_like(parameters, step.stack.value("step_s")),
    }


def _host_update(step: _Step) -> Floats:
    """The update of state that lies in host memory."""
    seconds = _updated(step) * step.moved.update_s_per_parameter
    return np.where(step.strategies.offload_optimizer, seconds, 0.0)
