"""What one device of a layout does, in pieces: embedding, one layer, head; forward, backward, recompute.

The pieces are what thousands of strategies have in common. A layer's seconds do not depend on how many stages or
replicas there are, so they are costed once for each layout, recompute policy and micro-batch size, and a strategy
only says how the pieces are strung together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flopwise.predict.kernels.calls import Floats, Phase, StepCalls, calls_for, kernels_of
from flopwise.predict.kernels.costs import step_costs
from flopwise.setup.setup import SettledSetup
from flopwise.setup.words import Fusion
from flopwise.work.describe import describe
from flopwise.work.exchange import (
    exchange,
    parameters_by_part,
    parts_of,
    product_parameters_by_part,
    tied_parameters,
    trained_by_part,
)
from flopwise.work.formats import Formats
from flopwise.work.held import dropout_bytes, logits_bytes, temporary_bytes, with_all_logits
from flopwise.work.layout import Layout
from flopwise.work.model import Model
from flopwise.work.op import AttentionKernel, Gemm
from flopwise.work.traffic import tensor_bytes
from flopwise.work.transformer import Transformer
from flopwise.work.work import Recompute, Work

EMBEDDING, BLOCK, HEAD = 0, 1, 2
"""Parts of a model; the block is one layer."""
UPDATE = 3
"""Behind the parts, where kernels are counted."""
PRODUCTS, ATTENTION, STREAMING, ROWWISE = 0, 1, 2, 3
"""Classes of kernels, each with a factor of its own in a stack: rowwise are casts with a scale for each row."""
CLASSES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """One row for each set-up and micro-batch; bytes are for the whole micro-batch."""

    seconds: Floats
    """rows × part × phase (forward, backward, recompute) × class."""
    kernels: Floats
    """rows × (part, update): those that the host starts one by one; none of a step that is replayed."""
    saved_bytes: Floats
    """rows × part: kept from forward to backward."""
    product_bytes: Floats
    """Results of a layer's products that recompute `attention` makes again; 0 of the other policies."""
    logits_bytes: Floats
    logits_width: Floats
    """Bytes of one of them."""
    loss_bytes: Floats
    """What a loss that is not one kernel holds beside the logits."""
    dropout_bytes: Floats
    """What dropout would keep more in one layer."""
    temporary_bytes: Floats
    parameters: Floats
    """rows × part, experts not counted."""
    product_parameters: Floats
    """The same of those that matrix products read."""
    expert_parameters: Floats
    """Of one layer."""
    tied_parameters: Floats
    trained: Floats
    """rows × part, of the parameters: those that are trained."""
    trained_experts: Floats
    """Of one layer."""
    layers: Floats
    stream_bytes: Floats
    gathered_stream_bytes: Floats
    largest_bytes: Floats
    reductions: Floats
    reductions_again: Floats
    ring_bytes: Floats
    dispatch_bytes: Floats
    shared_bytes: Floats
    dispatches_again: Floats
    experts: Floats
    """Of a layer, all ranks' together, like the next two."""
    experts_per_token: Floats
    groups_kept: Floats
    """Groups of experts that a token's are in; as many as it has experts where there are none."""


def pieces(setup: SettledSetup, layout: Layout, sequences: Sequence[int], accumulate: Sequence[bool]) -> Pieces:
    """Cost a device of a layout for several micro-batch sizes at once.

    `accumulate`: of each size, whether gradients are added to those of an earlier micro-batch.
    """
    batch = np.array(sequences, dtype=np.float64)
    # By its parts: a hardware description has no hash, and a set-up's sizes would only miss.
    static = _static(
        setup.model,
        sequence_tokens=setup.sequence_tokens,
        attention=setup.attention,
        fusion=setup.fusion,
        formats=setup.formats,
        policy=setup.recompute,
        layout=layout,
    )
    ones = np.ones_like(batch)
    return Pieces(
        seconds=_seconds(setup, layout, batch, accumulate),
        kernels=ones[:, None] * _kernels(setup, layout),
        saved_bytes=batch[:, None] * np.array(static.saved),
        product_bytes=batch * static.made_again,
        logits_bytes=batch * static.logits,
        logits_width=ones * setup.formats.compute_bytes,
        loss_bytes=batch * static.loss,
        dropout_bytes=batch * static.dropout,
        temporary_bytes=batch * static.temporary,
        parameters=ones[:, None] * np.array(static.parameters, dtype=np.float64),
        product_parameters=ones[:, None] * np.array(static.products, dtype=np.float64),
        expert_parameters=ones * static.experts,
        tied_parameters=ones * static.tied,
        trained=ones[:, None] * np.array(static.trained, dtype=np.float64),
        trained_experts=ones * static.trained_experts,
        layers=ones * setup.model.layers,
        stream_bytes=batch * static.stream,
        gathered_stream_bytes=batch * static.gathered_stream,
        largest_bytes=ones * static.largest,
        reductions=ones * static.reductions,
        reductions_again=ones * static.reductions_again,
        ring_bytes=batch * static.ring,
        dispatch_bytes=batch * static.dispatch,
        shared_bytes=batch * static.shared,
        dispatches_again=ones * static.dispatches_again,
        experts=ones * static.routed[0],
        experts_per_token=ones * static.routed[1],
        groups_kept=ones * static.routed[2],
    )


def joined_pieces(parts: Sequence[Pieces]) -> Pieces:
    """Several tables as one."""
    return Pieces(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Pieces)}
    )


def taken(table: Pieces, rows: NDArray[np.intp]) -> Pieces:
    """The given rows of a table."""
    return Pieces(**{field.name: getattr(table, field.name)[rows] for field in fields(Pieces)})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Static:
    """Counts for one sequence, whatever the device."""

    saved: tuple[float, float, float]
    made_again: float
    logits: float
    loss: float
    dropout: float
    temporary: float
    parameters: tuple[float, float, float]
    products: tuple[float, float, float]
    experts: float
    tied: int
    trained: tuple[float, float, float]
    trained_experts: float
    stream: float
    gathered_stream: float
    largest: float
    reductions: float
    reductions_again: float
    ring: float
    dispatch: float
    shared: float
    dispatches_again: int
    routed: tuple[int, int, int]


@lru_cache(maxsize=4096)
def _static(
    model: Model,
    *,
    sequence_tokens: int,
    attention: AttentionKernel,
    fusion: Fusion,
    formats: Formats,
    policy: Recompute,
    layout: Layout,
) -> _Static:
    work = describe(model, sequence_tokens, attention, layout)
    widest = describe(with_all_logits(model), sequence_tokens, attention, layout)
    parameters, experts = parameters_by_part(work)
    trained, trained_experts = trained_by_part(work)
    tokens = sequence_tokens // layout.context
    passed = exchange(work, policy, formats, hidden=model.hidden, stream_tokens=tokens, layout=layout)
    return _Static(
        saved=_saved_by_part(work, policy, formats, model.layers),
        made_again=_products_made_again(work, policy, formats, model.layers),
        logits=logits_bytes(widest, formats, fused=True),
        dropout=dropout_bytes(work, policy, formats),
        loss=logits_bytes(widest, formats, fused=fusion == "fused") - logits_bytes(widest, formats, fused=True),
        temporary=temporary_bytes(work, policy, formats),
        parameters=parameters,
        products=product_parameters_by_part(work),
        experts=experts,
        tied=tied_parameters(work),
        trained=trained,
        trained_experts=trained_experts,
        stream=passed.stream_bytes,
        gathered_stream=passed.gathered_bytes,
        largest=passed.largest_bytes,
        reductions=passed.reductions,
        reductions_again=passed.reductions_again,
        ring=passed.ring_bytes,
        dispatch=passed.dispatch_bytes,
        shared=passed.shared_bytes,
        dispatches_again=passed.dispatches_again,
        routed=_routed(model),
    )


def _routed(model: Model) -> tuple[int, int, int]:
    """Experts of a layer, those of a token, and the groups that they are in at most."""
    if not isinstance(model, Transformer) or not model.experts:
        return 1, 1, 1
    grouped = model.routing.groups > 1
    return model.experts, model.experts_per_token, model.routing.groups_kept if grouped else model.experts_per_token


def _saved_by_part(work: Work, policy: Recompute, formats: Formats, layers: int) -> tuple[float, float, float]:
    inside = {name for op in work.ops if op.in_block for name in (*op.inputs, *op.outputs)}
    before = {
        name
        for op, part in zip(work.ops, parts_of(work), strict=True)
        if part == EMBEDDING
        for name in (*op.inputs, *op.outputs)
    }
    found = [0.0, 0.0, 0.0]
    for tensor in work.saved(policy):
        size = work.copies_of(tensor) * tensor_bytes(tensor, formats)
        if tensor.name in inside:
            found[BLOCK] += size / layers
        else:
            found[EMBEDDING if tensor.name in before else HEAD] += size
    return found[0], found[1], found[2]


def _products_made_again(work: Work, policy: Recompute, formats: Formats, layers: int) -> float:
    if policy != "attention":
        return 0.0
    kept = {tensor.name for tensor in work.saved(policy)}
    results = {name for op in work.ops if op.in_block and isinstance(op, Gemm) for name in op.outputs} - kept
    return (
        sum(work.copies_of(work.tensors[name]) * tensor_bytes(work.tensors[name], formats) for name in results) / layers
    )


def kernel_classes(calls: StepCalls, ops: NDArray[np.intp]) -> NDArray[np.intp]:
    """The class of each call, as `step_costs` orders them; `ops`: their operators."""
    kinds = np.array(
        [{"gemm": PRODUCTS, "scan": PRODUCTS, "attention": ATTENTION}.get(kind, STREAMING) for kind in calls.kinds]
    )
    found = kinds[ops]
    begin = len(calls.gemms)
    casts = np.array([call.rowwise_cast for call in calls.streams], dtype=np.bool_)
    np.copyto(found[begin : begin + casts.size], ROWWISE, where=casts)
    return found


def _calls(setup: SettledSetup, layout: Layout) -> StepCalls:
    return calls_for(
        setup.model,
        sequence_tokens=setup.sequence_tokens,
        kernel=setup.attention,
        formats=setup.formats,
        policy=setup.recompute,
        fusion=setup.fusion,
        optimizer=setup.optimizer,
        layout=layout,
        plain=setup.hardware.efficiency.plain is not None,
    )


def _kernels(setup: SettledSetup, layout: Layout) -> Floats:
    found = np.zeros(4)
    if not setup.cuda_graphs:
        work = describe(setup.model, setup.sequence_tokens, setup.attention, layout)
        np.add.at(found, [*parts_of(work), UPDATE], kernels_of(_calls(setup, layout)))
        found[BLOCK] /= setup.model.layers
    return found


def _seconds(setup: SettledSetup, layout: Layout, sequences: Floats, accumulate: Sequence[bool]) -> Floats:
    work = describe(setup.model, setup.sequence_tokens, setup.attention, layout)
    calls = _calls(setup, layout)
    costs = step_costs(calls, setup.hardware, sequences, accumulate, setup.flash_kernels)
    parts = np.array([*parts_of(work), -1])[costs.op]
    classes = kernel_classes(calls, costs.op)
    found = np.zeros((3, 3, CLASSES, sequences.size))
    mine = costs.phase != Phase.UPDATE
    np.add.at(found, (parts[mine], costs.phase[mine], classes[mine]), costs.seconds[mine])
    found[BLOCK] /= setup.model.layers
    return np.ascontiguousarray(np.moveaxis(found, -1, 0))
