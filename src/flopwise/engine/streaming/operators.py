"""The description's operators, run: each forward, and backward from the gradients of what it made.

Values and gradients have the names of the description, a row for each token. A product writes each of its results on
its own, so that one of them can be recomputed without the others and comes out the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeGuard

import torch
from torch import Tensor

from flopwise.engine.formats import TYPES, statistics_type
from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.experts import gate_backward, gate_forward
from flopwise.engine.kernels.quantised import Quantised
from flopwise.engine.kernels.thin import Thin
from flopwise.engine.streaming.adapters import (
    DownProducts,
    activate_sums,
    activate_sums_backward,
    add_product,
    scaled_dgrad,
    scaled_wgrad,
)
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.carrying import CARRYING, Carrying
from flopwise.engine.streaming.casts import ALL, Casts, stored_rows
from flopwise.engine.streaming.dropping import mask_of
from flopwise.engine.streaming.fp8_products import Fp8Products
from flopwise.engine.streaming.gated import GatedKernels, GatedProducts, join_pairs
from flopwise.engine.streaming.latents import spread_key, spread_key_backward
from flopwise.engine.streaming.magnitudes import Magnitudes
from flopwise.engine.streaming.mixture import (
    AROUND,
    Beside,
    ExpertKernels,
    Matrices,
    Mixture,
    by_expert,
    expert_kernels,
)
from flopwise.engine.streaming.norms import Norms
from flopwise.engine.streaming.products import Products
from flopwise.engine.streaming.rotary import temperatures_of
from flopwise.engine.streaming.rotations import Rotations
from flopwise.engine.streaming.rows import Rows
from flopwise.engine.streaming.trained import Trained, Weights, plain_weight
from flopwise.engine.streaming.values import Gradients, Values, join_columns
from flopwise.work.adapters import DOWN, MAGNITUDE
from flopwise.work.attention_ops import SPREAD_KEY, TEMPERATURE
from flopwise.work.formats import Formats
from flopwise.work.fusion import is_activation
from flopwise.work.op import Gemm, Op, Streaming
from flopwise.work.parameters import op_groups
from flopwise.work.transformer import Transformer
from flopwise.work.work import Work

SCALED = ("projected_scale", "projected_normed_scale", "fed_scale", "fed_normed_scale", TEMPERATURE)
"""Operators that scale a branch's result on its way to the residual stream, or queries."""
CORRECTION = "routing.bias"
"""What is added to the experts' shares for the choice, among a block's weights."""
SHARED_SUM = "shared_sum"
"""What experts made and what shared ones did, as much as their gate lets through."""


def _expert_sums(op: Op, trained: Trained) -> Matrices | None:
    """Where the gradients of a product of experts are summed; None where it is frozen."""
    weight = trained.sums.get(f"{op.name}.weight")
    return None if weight is None else by_expert(weight, trained.sums.get(f"{op.name}.bias"))


@dataclass(frozen=True, slots=True)
class _Part:
    """Results of a product with the rows of its weight, and their gradient."""

    names: tuple[str, ...]
    rows: slice
    gradient: Tensor


class Operators:
    """All operators but attention, for one model in one set of formats."""

    def __init__(
        self,
        model: Transformer,
        work: Work,
        formats: Formats,
        arena: Arena,
        *,
        products: Products,
        head_products: Products | None = None,
        packs: bool = False,
        gated: GatedKernels | None = None,
        experts: ExpertKernels | None = None,
    ) -> None:
        """`experts`: what runs a mixture's products; None: the fastest that there is."""
        self.packs = packs
        """Whether results that one product makes lie beside each other, so that it is one call."""
        self.gated = None if gated is None else GatedProducts(arena, gated)
        """Products with the activation in them, where gate and up lie in pairs."""
        self.model, self.work, self.arena, self.device = model, work, arena, arena.room.device
        self.compute, self.statistics = TYPES[formats.compute], statistics_type(formats)
        kernels = experts or expert_kernels(self.device, self.compute)
        self.mixture = Mixture(model, self.statistics, kernels)
        self.carrying = Carrying(model, work.sequence_tokens)
        self.adapter_scale = 1.0 if model.adapters is None else model.adapters.scale
        self.adapts = True
        """Whether adapters add what they have learned: the reference of preferences is the model without them."""
        ops = op_groups(work)[1]
        self.casts = Casts(arena, self.compute)
        self.rotations = Rotations(model)
        self.norms = Norms(model, work, self.casts, self.statistics, self.rotations)
        self.magnitudes = Magnitudes(
            ops, self.columns, scale=self.adapter_scale, casts=self.casts, statistics=self.statistics
        )
        self._columns: dict[tuple[str, tuple[str, ...]], list[tuple[str, int, int]]] = {}
        self._lows = {name: op.outputs for op in ops if op.name.endswith(f"_{DOWN}") for name in op.outputs}
        """An adapter's inner result → all those that one product makes."""
        self._last_up = {op.inputs[0]: op.name for op in ops if isinstance(op, Gemm) and op.adds}
        """An adapter's inner result → the last product that reads it."""
        self._plain_products, self._down_products = products, DownProducts(arena)
        self._head_products = head_products or products
        self._block_products = Fp8Products(arena) if formats.matrix == "fp8" else self._plain_products

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(self, op: Op, values: Values, weights: Weights, rows: Rows, wanted: Collection[str]) -> None:
        """Make the wanted results of an operator."""
        if isinstance(op, Gemm):
            product = self._adapter_product if op.adds else self._product
            product(op, values, weights, wanted)
            return
        if op.name in CARRYING:
            self.carrying.forward(op, values, weights, rows.sequences)
            return
        assert isinstance(op, Streaming)
        if self.norms.turns(op, rows):
            self.norms.turn(op, values, weights, rows)
        elif op.kind == "norm":
            self.norms.forward(op, values, weights, rows)
        elif op.kind == "residual":
            self._add(op, values, rows)
        elif op.pairwise:
            self._make_each(op, values, weights, rows, wanted)
        elif is_activation(op):
            gate, up = self._gate_and_up(op, values)
            dispatch.activation_forward(
                self.model.activation, gate, up, out=values.allocate(op.outputs[0], tuple(up.shape), up.dtype)
            )
        elif op.name in AROUND:
            self.mixture.forward(op, values, self._correction(weights))
        elif op.name in (SHARED_SUM, SPREAD_KEY):
            make = self._shared_sum if op.name == SHARED_SUM else partial(spread_key, model=self.model)
            make(op, values)
        elif op.name in SCALED:
            source = values[op.inputs[0]]
            out = values.allocate(op.outputs[0], tuple(source.shape), source.dtype)
            torch.mul(source, self._scale_of(op, rows), out=out)
        else:
            source = values[op.inputs[0]]
            out = values.allocate(op.outputs[0], tuple(source.shape), source.dtype)
            dispatch.activation_forward(op.function, None, source, out=out)

    def _adapter_product(self, op: Gemm, values: Values, weights: Weights, wanted: Collection[str]) -> None:
        """What an adapter adds."""
        if self.adapts and op.outputs[0] in wanted:
            matrix = self.casts.cast(weights[f"{op.name}.weight"])
            thin = Thin(values[op.inputs[0]], matrix.t())
            add_product(thin, scale=self.adapter_scale, out=values[op.outputs[0]])
            self.casts.drop(matrix, weights[f"{op.name}.weight"])

    def activate_sums(self, op: Op, sums: Sequence[Gemm], values: Values, weights: Weights) -> None:
        """An activation behind what adapters add to what it reads."""
        stored = {each.outputs[0]: weights[f"{each.name}.weight"] for each in sums} if self.adapts else {}
        matrices = {name: self.casts.cast(matrix) for name, matrix in stored.items()}
        lows = {each.outputs[0]: values[each.inputs[0]] for each in sums}
        thin = {name: Thin(lows[name], matrix.t()) for name, matrix in matrices.items()}
        gate, up = self._gate_and_up(op, values)
        activate_sums(
            self.model.activation,
            gate,
            up,
            thin=(None if gate is None else thin.get(op.inputs[0]), thin.get(op.inputs[-1])),
            scale=self.adapter_scale,
            out=values.allocate(op.outputs[0], tuple(up.shape), up.dtype),
        )
        for name, matrix in matrices.items():
            self.casts.drop(matrix, stored[name])

    def _scale_of(self, op: Op, rows: Rows) -> Tensor | float:
        """What a branch's result is multiplied by, or each row's query, a column."""
        if op.name != TEMPERATURE:
            return self.model.residual_scale
        return temperatures_of(self.model, rows.positions, self.statistics)[:, None]

    @staticmethod
    def _shared_sum(op: Op, values: Values) -> None:
        """What experts made, and what a gate lets through of shared ones."""
        other, made, gate = (values[name] for name in op.inputs)
        gate_forward(made, gate, other, out=values.allocate(op.outputs[0], tuple(made.shape), made.dtype))

    def _correction(self, weights: Weights) -> Tensor | None:
        """The terms of what is added to the experts' shares for the choice."""
        return plain_weight(weights, CORRECTION) if self.model.routing.correction else None

    def _add(self, op: Op, values: Values, rows: Rows) -> None:
        """The residual stream and what is kept of the branches beside it."""
        source = values[op.inputs[0]]
        out = values.allocate(op.outputs[0], tuple(source.shape), source.dtype)
        for name in op.inputs[1:]:
            mask = mask_of(rows.drops, name)
            if mask is None:
                torch.add(source, values[name], out=out)
            else:
                dispatch.dropout(values[name], mask, out=out, other=source)
            source = out

    def is_paired(self, op: Op) -> bool:
        """Whether an operator makes gate and up in pairs."""
        return self.gated is not None and op.name == "gate_up"

    def paired_product(self, op: Op, values: Values, weights: Weights, *, activates: bool) -> None:
        """Gate and up, which have their places, and with `activates` what the activation makes of them."""
        assert self.gated is not None
        stored = weights[f"{op.name}.weight"]
        source, matrix = values[op.inputs[0]], self.casts.cast(stored)
        shape = (source.shape[0], matrix.shape[0] // 2)
        gate, up = (values.allocate(name, shape, self.compute) for name in op.outputs)
        out = values.allocate("activated", shape, self.compute) if activates else None
        self.gated.kernels.forward(source, matrix, pairs=join_pairs(gate, up), activated=out)
        self.casts.drop(matrix, stored)

    def is_of_experts(self, op: Op) -> TypeGuard[Gemm]:
        """Whether an operator is a product of a mixture's experts."""
        return self.mixture.has(op)

    def expert_product(
        self, op: Gemm, values: Values, weights: Weights, wanted: Collection[str], *, activates: bool
    ) -> None:
        """A product of experts; with `activates` also what the activation makes of its results."""
        if op.adds and not self.adapts:
            return
        with self._of_experts(op, weights) as matrices:
            self.mixture.product(op, values, matrices, self.columns(op), wanted, activates=activates)

    @contextmanager
    def _of_experts(self, op: Gemm, weights: Weights) -> Iterator[Matrices]:
        """A product's matrices and biases, as products read them."""
        stored, shift = weights[f"{op.name}.weight"], weights.get(f"{op.name}.bias")
        matrix, bias = self.casts.cast(stored), None if shift is None else self.casts.cast(shift)
        if not op.adds:
            yield by_expert(matrix, bias)
        else:
            # Narrow: a scaled copy of it is read sooner than results are scaled.
            scaled = self.arena.take(tuple(matrix.shape), matrix.dtype)
            yield by_expert(torch.mul(matrix, self.adapter_scale, out=scaled), None)
            self.arena.give(scaled)
        self.casts.drop(matrix, stored)
        self.casts.drop(bias, shift)

    def _gate_and_up(self, op: Op, values: Values) -> tuple[Tensor | None, Tensor]:
        return (values[op.inputs[0]] if self.model.gated else None), values[op.inputs[-1]]

    def _product(self, op: Gemm, values: Values, weights: Weights, wanted: Collection[str]) -> None:
        source = values[op.inputs[0]]
        columns = self.columns(op)
        if self.packs and len(columns) > 1 and all(name in wanted for name in op.outputs):
            places = [values.places[name] for name in op.outputs if name in values.places]
            joined = join_columns(places) if len(places) == len(columns) else None
            if joined is not None:
                for name, first, last in columns:
                    values.allocate(name, (source.shape[0], last - first), self.compute)
                self._multiply(op, values, weights, ALL, joined)
                return
            if op.outputs[0] not in values.places:
                self._packed_product(op, values, weights)
                return
        for name, first, last in columns:
            if name in wanted:
                out = values.allocate(name, (source.shape[0], last - first), self.compute)
                self._multiply(op, values, weights, slice(first, last), out)

    def _packed_product(self, op: Gemm, values: Values, weights: Weights) -> None:
        """All results at once; those that have a place are brought there."""
        source, columns = values[op.inputs[0]], self.columns(op)
        packed = values.pack(op.outputs, [last - first for _, first, last in columns], source.shape[0], self.compute)
        self._multiply(op, values, weights, ALL, packed)
        for name, first, last in columns:
            if name in values.places:
                out = values.allocate(name, (source.shape[0], last - first), self.compute)
                dispatch.copy_rows(packed[:, first:last], out=out)

    def _multiply(self, op: Gemm, values: Values, weights: Weights, rows: slice, out: Tensor) -> None:
        """A product with some rows of the weight."""
        stored, shift = stored_rows(weights[f"{op.name}.weight"], rows), weights.get(f"{op.name}.bias")
        assert not isinstance(shift, Quantised), "biases are not quantised"
        shift = None if shift is None else shift[rows]
        matrix, bias = self.casts.cast(stored), None if shift is None else self.casts.cast(shift)
        self._products(op).forward(values[op.inputs[0]], matrix, bias, out=out)
        self.casts.drop(matrix, stored)
        self.casts.drop(bias, shift)

    def _products(self, op: Gemm) -> Products:
        if self.gated is not None and self.is_paired(op):
            return self.gated
        if op.name.endswith(f"_{DOWN}"):
            return self._down_products
        if op.in_block:
            return self._block_products
        return self._head_products if op.name == "head" else self._plain_products

    def columns(self, op: Gemm) -> list[tuple[str, int, int]]:
        """Each result of a product with its rows of the weight."""
        found = self._columns.get((op.name, op.outputs))
        if found is None:
            ends = list(accumulate(self.work.tensors[name].elements // op.rows for name in op.outputs))
            assert ends[-1] == op.columns
            found = self._columns[op.name, op.outputs] = list(zip(op.outputs, [0, *ends[:-1]], ends, strict=True))
        return found

    def _make_each(self, op: Streaming, values: Values, weights: Weights, rows: Rows, wanted: Collection[str]) -> None:
        """What makes each of its results from one of its inputs: those that are wanted."""
        if op.function == MAGNITUDE:
            self.magnitudes.forward(op, values, weights, wanted, adapts=self.adapts)
        else:
            self.rotations.forward(op, values, rows, wanted)

    # -- backward -------------------------------------------------------------------------------------------------

    def backward(self, op: Op, values: Values, gradients: Gradients, trained: Trained, rows: Rows) -> None:
        """From the gradients of an operator's results to those of its inputs; its weights' are added to their sums."""
        if isinstance(op, Gemm):
            self._product_backward(op, values, gradients, trained)
            return
        if op.name in CARRYING:
            self.carrying.backward(op, values, gradients, (trained.weights, trained.sums), rows.sequences)
            return
        assert isinstance(op, Streaming)
        if self.norms.turns(op, rows):
            self.norms.turn_backward(op, values, gradients, trained, rows)
        elif op.kind == "norm":
            self.norms.backward(op, values, gradients, trained, rows)
        elif op.kind == "residual":
            self._residual_backward(op, gradients, rows)
        elif op.function == MAGNITUDE:
            self.magnitudes.backward(op, values, gradients, trained)
        elif op.name == "rotary":
            self.rotations.backward(op, gradients, rows)
        elif is_activation(op):
            self._activation_backward(op, values, gradients)
        elif op.name in AROUND:
            self.mixture.backward(op, values, gradients)
        elif op.name == SHARED_SUM:
            self._shared_backward(op, values, gradients)
        elif op.name == SPREAD_KEY:
            spread_key_backward(op, gradients, self.model)
        else:
            self._pointwise_backward(op, values, gradients, rows)

    def _residual_backward(self, op: Op, gradients: Gradients, rows: Rows) -> None:
        """A sum's gradient is that of each of its terms, and of a branch what the mask keeps of it."""
        gradient, whole = gradients[op.outputs[0]], [op.inputs[0]]
        for name in op.inputs[1:]:
            mask = mask_of(rows.drops, name)
            if mask is None:
                whole.append(name)
            elif name not in gradients:
                # A norm behind the sum has made it already.
                dropped, _ = gradients.target(name, tuple(gradient.shape), gradient.dtype)
                dispatch.dropout(gradient, mask, out=dropped)
        gradients.share(op.outputs[0], whole)

    def experts_backward(
        self,
        ops: tuple[Op, Gemm, Op],
        values: Values,
        gradients: Gradients,
        trained: Trained,
        *,
        beside: tuple[Gemm, Gemm] | None = None,
    ) -> None:
        """From the gradient of what experts made together to those of gate and up, which take the values' places.

        `ops`: what sums the experts' results, their down product and its activation; `beside`: that product's adapter.
        """
        combine, down, activation = ops
        totals = _expert_sums(down, trained)
        with self._of_experts(down, trained.weights) as matrices:
            back = partial(
                self.mixture.back_to_inner, (combine, activation), values, gradients, matrices, totals=totals
            )
            if beside is None:
                back()
                return
            first, second = beside
            first_sums, second_sums = (_expert_sums(each, trained) for each in beside)
            assert first_sums is not None and second_sums is not None
            with self._of_experts(first, trained.weights) as lower, self._of_experts(second, trained.weights) as higher:
                back(
                    beside=Beside(
                        first=lower,
                        second=higher,
                        low=first.outputs[0],
                        first_total=first_sums.weight,
                        second_total=second_sums.weight,
                        scale=self.adapter_scale,
                    )
                )

    def _expert_adapter_backward(self, op: Gemm, values: Values, gradients: Gradients, trained: Trained) -> None:
        """Of an adapter's second product beside the experts' first one."""
        totals, lows = _expert_sums(op, trained), self._lows[op.inputs[0]]
        assert totals is not None
        if self.packs and len(lows) > 1 and op.inputs[0] not in gradients:
            gradient = gradients[op.outputs[0]]
            gradients.pack(lows, [op.depth] * len(lows), gradient.shape[0], gradient.dtype)
        with self._of_experts(op, trained.weights) as matrix:
            self.mixture.adapter_backward(
                op,
                values,
                gradients,
                matrix,
                total=totals.weight,
                scale=self.adapter_scale,
                add=op.name != self._last_up[op.inputs[0]],
            )

    def _product_backward(self, op: Gemm, values: Values, gradients: Gradients, trained: Trained) -> None:
        if op.adds:
            beside = self._expert_adapter_backward if self.is_of_experts(op) else self._adapter_backward
            beside(op, values, gradients, trained)
            return
        if self.is_of_experts(op):
            columns, totals = self.columns(op), _expert_sums(op, trained)
            with self._of_experts(op, trained.weights) as matrices:
                self.mixture.product_backward(op, values, gradients, matrices, columns, totals=totals)
            return
        is_trained = f"{op.name}.weight" in trained.sums
        # One result after another, so that each one's gradient goes as soon as it is used.
        for part in self._parts(op, gradients):
            if is_trained:
                self._wgrad(op, part, values[op.inputs[0]], trained)
            self._dgrad(op, part, gradients, trained)
            for name in part.names:
                gradients.drop(name)

    def _adapter_backward(self, op: Gemm, values: Values, gradients: Gradients, trained: Trained) -> None:
        """Of the product behind an adapter's inner result; the gradient that it reads is the matrix' beside it too."""
        name, inner = f"{op.name}.weight", op.inputs[0]
        gradient, scale = gradients[op.outputs[0]], self.adapter_scale
        scaled_wgrad(gradient, values[inner], scale=scale, total=trained.sums[name])
        matrix = self.casts.cast(trained.weights[name])
        lows = self._lows[inner]
        if self.packs and len(lows) > 1 and inner not in gradients:
            # Beside each other, so that what leads back from all of them is one product.
            gradients.pack(lows, [op.depth] * len(lows), gradient.shape[0], gradient.dtype)
        target, _ = gradients.target(inner, (gradient.shape[0], op.depth), gradient.dtype)
        # Results of one layer share an inner one: the last of them, which comes first here, begins its gradient.
        scaled_dgrad(gradient, matrix, scale=scale, out=target, add=op.name != self._last_up[inner])
        self.casts.drop(matrix, trained.weights[name])

    def dgrad(self, op: Gemm, gradients: Gradients, trained: Trained) -> None:
        """Only the gradient of a product's input; `wgrad` does the rest."""
        for part in self._parts(op, gradients):
            self._dgrad(op, part, gradients, trained)

    def wgrad(self, op: Gemm, source: Tensor, gradients: Gradients, trained: Trained) -> None:
        """What a product's weight and bias get, from the product's input; its results' gradients go."""
        for part in self._parts(op, gradients):
            if f"{op.name}.weight" in trained.sums:
                self._wgrad(op, part, source, trained)
            for name in part.names:
                gradients.drop(name)

    def _parts(self, op: Gemm, gradients: Gradients) -> list[_Part]:
        """A product's results whose gradients can be used together: all that lie beside each other, or each alone."""
        if self.is_paired(op):
            gate, up = (gradients[name] for name in op.outputs)
            return [_Part(op.outputs, ALL, join_pairs(gate, up))]
        columns = self.columns(op)
        joined = join_columns([gradients[name] for name in op.outputs]) if self.packs else None
        if joined is not None:
            return [_Part(op.outputs, ALL, joined)]
        return [_Part((name,), slice(first, last), gradients[name]) for name, first, last in columns]

    def _wgrad(self, op: Gemm, part: _Part, source: Tensor, trained: Trained) -> None:
        sums = trained.sums
        products = self._products(op)
        products.wgrad(part.gradient, source, total=sums[f"{op.name}.weight"][part.rows])
        if f"{op.name}.bias" in sums:
            products.bias_gradient(part.gradient, total=sums[f"{op.name}.bias"][part.rows])

    def _dgrad(self, op: Gemm, part: _Part, gradients: Gradients, trained: Trained) -> None:
        stored = stored_rows(trained.weights[f"{op.name}.weight"], part.rows)
        matrix = self.casts.cast(stored)
        shape = (part.gradient.shape[0], op.depth)
        target, there = gradients.target(op.inputs[0], shape, part.gradient.dtype)
        self._products(op).dgrad(part.gradient, matrix, out=target, add=there)
        self.casts.drop(matrix, stored)

    def activated_backward(
        self, op: Gemm, activation: Op, values: Values, gradients: Gradients, trained: Trained
    ) -> Tensor:
        """From the gradient of a product's result to those that its input's activation read, in one call.

        They take the places of gate and up. Returns the activation's result, recomputed.
        """
        assert self.gated is not None
        stored = trained.weights[f"{op.name}.weight"]
        gradient, matrix = gradients[op.outputs[0]], self.casts.cast(stored)
        made, there = gradients.target(activation.outputs[0], (gradient.shape[0], op.depth), gradient.dtype)
        assert not there
        gate, up = (values[name] for name in activation.inputs)
        self.gated.kernels.backward(gradient, matrix, pairs=join_pairs(gate, up), activated=made)
        self.casts.drop(matrix, stored)
        for name in activation.inputs:
            gradients.put(name, values[name])
        return made

    def activate_sums_backward(
        self, op: Gemm, activation: Op, values: Values, gradients: Gradients, trained: Trained
    ) -> Tensor:
        """Back through an adapter's first product and the activation that it reads, whose gradient others began.

        Gradients take the places of what the activation read. Returns the activation's result, recomputed.
        """
        stored = trained.weights[f"{op.name}.weight"]
        made, matrix = gradients[activation.outputs[0]], self.casts.cast(stored)
        gate, up = self._gate_and_up(activation, values)
        thin = Thin(gradients[op.outputs[0]], matrix)
        activate_sums_backward(self.model.activation, made, gate, up, thin=thin)
        self.casts.drop(matrix, stored)
        for name in activation.inputs:
            gradients.put(name, values[name])
        return made

    def backward_recomputing(
        self, op: Op, values: Values, gradients: Gradients, trained: Trained, rows: Rows
    ) -> Tensor:
        """The backward of a norm or an activation that recomputes its result, in the place of its gradient.

        An activation's gradients take the places of its inputs.
        """
        made = gradients[op.outputs[0]]
        if not is_activation(op):
            self.norms.backward(op, values, gradients, trained, rows, recompute=True)
            return made
        gate, up = self._gate_and_up(op, values)
        dispatch.activation_backward(self.model.activation, made, gate, up, gate_out=gate, up_out=up, recompute=True)
        for name in op.inputs:
            gradients.put(name, values[name])
        return made

    def _shared_backward(self, op: Op, values: Values, gradients: Gradients) -> None:
        """Of a sum with what a gate lets through of shared experts."""
        _, made_name, gate_name = op.inputs
        made, gate = values[made_name], values[gate_name]
        gate_backward(
            gradients[op.outputs[0]],
            made,
            gate,
            made_out=gradients.target(made_name, tuple(made.shape), made.dtype)[0],
            gate_out=gradients.target(gate_name, tuple(gate.shape), gate.dtype)[0],
        )
        gradients.share(op.outputs[0], op.inputs[:1])

    def _activation_backward(self, op: Streaming, values: Values, gradients: Gradients) -> None:
        gate, up = self._gate_and_up(op, values)
        gradient = gradients[op.outputs[0]]
        gate_out = None
        if gate is not None:
            gate_out, _ = gradients.target(op.inputs[0], tuple(gate.shape), gate.dtype)
        up_out = gradients.replace(op.outputs[0], op.inputs[-1])
        dispatch.activation_backward(self.model.activation, gradient, gate, up, gate_out=gate_out, up_out=up_out)

    def _pointwise_backward(self, op: Streaming, values: Values, gradients: Gradients, rows: Rows) -> None:
        name = op.inputs[0]
        gradient = gradients[op.outputs[0]]
        out = gradients.replace(op.outputs[0], name)
        if op.name in SCALED:
            torch.mul(gradient, self._scale_of(op, rows), out=out)
            return
        mask = mask_of(rows.drops, op.outputs[0])
        if mask is not None:
            # The result is there as the last product read it, without what was dropped.
            dispatch.dropout(gradient, mask, out=out)
            gradient = out
        elif op.function == "tanh":
            # From the result: 1 − tanh².
            out.copy_(torch.ops.aten.tanh_backward(gradient, values[op.outputs[0]]))
            return
        dispatch.activation_backward(op.function, gradient, None, values[name], gate_out=None, up_out=out)
