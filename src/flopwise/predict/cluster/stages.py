"""Device memory by owner, for the stages of a pipeline whose state is sharded or not.

Three stages stand for all: the first (embedding, most micro-batches in flight), the second, and the last (head and
logits). Without a pipeline the first has everything and the others nothing; with two stages the second has nothing.

State follows ZeRO's arithmetic (Rajbhandari et al., arXiv 1910.02054): of the stage's parameters, every device holds
all or 1/shard of the weights, gradients and optimizer state by the stage of sharding. A device that shards its weights
also holds the layers that are gathered, and the whole gradients of the layer in backward. Gradients that a stack only
reduces after the last micro-batch are not sharded before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flopwise.predict.cluster.pieces import BLOCK, EMBEDDING, HEAD, Pieces
from flopwise.predict.cluster.pipeline import GPIPE, held_micro_batches
from flopwise.predict.cluster.strategies import Booleans, Strategies
from flopwise.predict.kernels.calls import Floats
from flopwise.predict.kernels.memory import LIBRARY_WORKSPACE_BYTES
from flopwise.setup.stack import Stack

PLAIN_LOSS, FP32_BYTES = 3.0, 4.0

FIRST, SECOND, LAST = 0, 1, 2
"""The stages that stand for all."""


@dataclass(frozen=True, slots=True)
class StageShape:
    """What one of the three stages holds: layers, and whether the embedding and the head."""

    layers: Floats
    embedding: Floats
    head: Floats
    place: Floats
    """Its number in the pipeline."""

    def taken(self, rows: NDArray[np.intp]) -> StageShape:
        """Of some of the strategies."""
        return StageShape(self.layers[rows], self.embedding[rows], self.head[rows], self.place[rows])


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes by owner of one stage."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    logits: Floats
    workspace: Floats

    @property
    def total(self) -> Floats:
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.logits + self.workspace


def stage_shapes(strategies: Strategies, table: Pieces) -> tuple[StageShape, StageShape, StageShape]:
    """Deal the layers out: equal parts, what is over to the stages between the first and the last.

    Embedding and head are work of their own, so the ends get no more layers than they must. Dealt out by time, the last
    stage gives up layers for the head's sake, as far as that makes the slowest stage faster.
    """
    layers, pipeline = table.layers, strategies.pipeline
    alone = pipeline == 1
    work = table.seconds.sum(axis=(2, 3))
    head = work[:, HEAD] / work[:, BLOCK]
    base = np.floor(layers / pipeline)
    others = np.maximum(pipeline - 1, 1.0)

    def slowest(kept: Floats) -> Floats:
        return np.asarray(np.maximum(kept + head, np.ceil((layers - kept) / others)), dtype=np.float64)

    # Both sides of the even split, whole layers only; no worse than equal numbers.
    even = np.clip((layers - head * others) / pipeline, 0.0, base)
    relieved = np.where(slowest(np.ceil(even)) <= slowest(np.floor(even)), np.ceil(even), np.floor(even))
    relieved = np.where(slowest(base) <= slowest(relieved), base, relieved)
    last = np.where(alone, 0.0, np.where(strategies.by_time, relieved, base))
    each = np.floor((layers - last) / others)
    over = layers - last - each * others
    # With two stages nothing is over: the first has what the last leaves.
    first = np.where(alone, layers, each)
    second = np.where(pipeline > 2, each + (over > 0), 0.0)
    ones, zeros = np.ones_like(layers), np.zeros_like(layers)
    return (
        StageShape(first, ones, alone * ones, zeros),
        StageShape(second, zeros, zeros, np.minimum(ones, pipeline - 1)),
        StageShape(last, zeros, ~alone * ones, pipeline - 1),
    )


def stage_bytes(strategies: Strategies, table: Pieces, shape: StageShape, stack: Stack) -> StageBytes:
    """Peak bytes by owner of one stage; `table` has the rows of the strategies' whole micro-batches."""
    held, learned = stage_parameters(table, shape), stage_trained(table, shape)
    # The largest unit whose gradients are whole before they are scattered: a layer, or an end.
    ends = (shape.embedding * table.trained[:, EMBEDDING], shape.head * table.trained[:, HEAD])
    unit = np.maximum.reduce([(shape.layers > 0) * (table.trained[:, BLOCK] + table.trained_experts), *ends])
    zero = strategies.zero
    # Gradients that are reduced after the last micro-batch alone are summed whole until then.
    scattered = (zero == 2) | ((zero == 3) & (reduced_always(strategies, stack) | (strategies.micro_batches == 1)))
    partial = np.where(scattered & (strategies.shard > 1), unit * strategies.gradient_bytes, 0.0)
    gathered, cast = _copies(strategies, table, shape)
    # With all forwards first, the head's results wait for their backward like all others.
    at_head = shape.head * np.where(strategies.schedule == GPIPE, strategies.micro_batches, 1.0)
    # Two fp32 copies beside the logits, and the gradient of one.
    plain = PLAIN_LOSS * table.logits_bytes * (FP32_BYTES / table.logits_width)
    each_logits = table.logits_bytes + (plain if stack.plain_loss else 0.0 if stack.fused_loss else table.loss_bytes)
    logits = at_head * each_logits
    # The blocks' temporaries take the logits' place; only what goes beyond it is memory of its own.
    beyond = np.maximum(0.0, table.temporary_bytes - shape.head * each_logits)
    on_host = strategies.offload_optimizer
    return StageBytes(
        weights=_sharded(strategies, *held, zero == 3) * strategies.weight_bytes + gathered,
        gradients=_sharded(strategies, *learned, scattered) * strategies.gradient_bytes + partial,
        optimizer=np.where(on_host, 0.0, _sharded(strategies, *learned, zero >= 1) * strategies.optimizer_bytes),
        activations=(_kept(strategies, table, shape, stack) + at_head * table.saved_bytes[:, HEAD])
        * stack.value("activations"),
        logits=logits,
        workspace=beyond + cast + LIBRARY_WORKSPACE_BYTES,
    )


def reduced_always(strategies: Strategies, stack: Stack) -> Booleans:
    """Where gradients of sharded weights are reduced after each micro-batch."""
    return np.asarray(stack.reduce_always & (stack.reduce_staged | (strategies.pipeline == 1)), dtype=np.bool_)


def host_bytes(strategies: Strategies, table: Pieces, shape: StageShape, stack: Stack) -> Floats:
    """Bytes that one device of a stage keeps in host memory: optimizer state, activations, whichever is offloaded."""
    state = _sharded(strategies, *stage_trained(table, shape), strategies.zero >= 1) * strategies.optimizer_bytes
    on_device = replace(strategies, offload_activations=np.zeros_like(strategies.offload_activations))
    moved = _kept(on_device, table, shape, stack) - _kept(strategies, table, shape, stack)
    return np.where(strategies.offload_optimizer, state, 0.0) + moved * stack.value("activations")


def _copies(strategies: Strategies, table: Pieces, shape: StageShape) -> tuple[Floats, Floats]:
    """Bytes of weights that lie gathered from their shards, and of others' copies in the products' format.

    Gathered are the layers in use and ahead, or all of them when they are kept until backward, and the ends.
    """
    gathers = (strategies.zero == 3) & (strategies.shard > 1)
    # Experts are only sharded as far as expert ranks have not dealt them out.
    gathers_experts = gathers & (strategies.shard > strategies.dealt)
    ahead = np.where(strategies.reshard, np.minimum(shape.layers, 1.0 + strategies.prefetch), shape.layers)
    layers = gathers * table.parameters[:, BLOCK] + gathers_experts * table.expert_parameters
    # Also of those that are cast before: torchtitan's rows that keep them reserve more than the whole.
    gathered = (gathers * _ends(table, shape) + ahead * layers) * strategies.gathered_bytes
    products = (
        shape.embedding * table.product_parameters[:, EMBEDDING]
        + shape.layers * table.product_parameters[:, BLOCK]
        + shape.head * table.product_parameters[:, HEAD]
    )
    cast = ~gathers * products + ~gathers_experts * shape.layers * table.expert_parameters
    return gathered, cast * strategies.cast_bytes


def _kept(strategies: Strategies, table: Pieces, shape: StageShape, stack: Stack) -> Floats:
    """Bytes that the embedding and the layers of a stage keep from forward to backward."""
    held = held_micro_batches(
        strategies.schedule, strategies.chunks, strategies.micro_batches, strategies.pipeline, shape.place
    )
    # Each product behind a norm has such an input, as many as there are reductions.
    gathered_inputs = table.reductions * table.stream_bytes * (strategies.sequence & stack.gathered_kept)
    each = table.saved_bytes[:, BLOCK] + gathered_inputs + (table.dropout_bytes if stack.dropout else 0.0)
    each = each + stack.kept_products * table.product_bytes
    saved = shape.layers * each * held
    # Offloaded activations leave two layers' worth of buffers behind.
    saved = np.where(strategies.offload_activations, np.minimum(saved, 2 * each), saved)
    return saved + shape.embedding * table.saved_bytes[:, EMBEDDING] * held


def stage_parameters(table: Pieces, shape: StageShape) -> tuple[Floats, Floats]:
    """Parameters of one stage on one device before sharding: dense ones, and experts."""
    dense = shape.layers * table.parameters[:, BLOCK] + _ends(table, shape)
    return dense, shape.layers * table.expert_parameters


def stage_trained(table: Pieces, shape: StageShape) -> tuple[Floats, Floats]:
    """The same of those that are trained."""
    ends = shape.embedding * table.trained[:, EMBEDDING] + shape.head * table.trained[:, HEAD]
    dense = shape.layers * table.trained[:, BLOCK] + ends - shape.embedding * shape.head * trained_twice(table)
    return dense, shape.layers * table.trained_experts


def trained_twice(table: Pieces) -> Floats:
    """Parameters of a tied matrix, which stand in embedding and head, where it is trained."""
    return table.tied_parameters * (table.trained[:, HEAD] > 0)


def _ends(table: Pieces, shape: StageShape) -> Floats:
    ends = shape.embedding * table.parameters[:, EMBEDDING] + shape.head * table.parameters[:, HEAD]
    # One device that holds both uses of a tied matrix holds it once.
    return ends - shape.embedding * shape.head * table.tied_parameters


def _sharded(strategies: Strategies, dense: Floats, experts: Floats, where: Booleans) -> Floats:
    """Parameters of a device that holds a shard of them `where` so, else all."""
    shard = np.where(where, strategies.shard, 1.0)
    # Expert ranks are part of the shards: what they have dealt out cannot be dealt out again.
    return dense / shard + experts / np.maximum(1.0, shard / strategies.dealt)
