"""A mixture's operators, run: routing, products of experts, their sum, and all of it backward.

Nobody lays tokens out by expert: what `dispatch` hands on are the tokens themselves, and the first product reads its
rows where they lie. Backward, the tokens' gradient is read the same way. No expert's result is kept: a weight's
gradient comes from what the down product read (see `kernels.plain_experts`).

Where weights multiply what experts read, as Llama 4's one expert a token, these rows are laid out after all, weighed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flopwise.engine.kernels import dispatch, experts, plain_experts
from flopwise.engine.kernels.blocks import has_triton
from flopwise.engine.kernels.dispatch import FUSED_TYPES
from flopwise.engine.kernels.experts import Routed
from flopwise.engine.streaming.routing_losses import RoutingLosses
from flopwise.engine.streaming.values import Gradients, Values, join_columns
from flopwise.work.adapters import DOWN, GROUPS, UP
from flopwise.work.op import Gemm, Op
from flopwise.work.transformer import Transformer

PRODUCTS = ("gate_up", "up", "down")
"""Of experts."""
BESIDE = {f"{name}_{DOWN}" for name in PRODUCTS} | {f"{target}_{UP}" for target in GROUPS["mlp"]}
"""Those of adapters beside them."""
DISPATCHED = "dispatched"
"""What experts read, a row of a token for each of its choices."""
AROUND = ("routing", "dispatch", "combine")
"""Operators around them."""


class ExpertKernels(Protocol):
    """What `kernels.plain_experts` has in plain form."""

    def lay_out(self, source: Tensor, routed: Routed, *, out: Tensor) -> None: ...
    def product(
        self,
        source: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        routed: Routed,
        *,
        out: Tensor,
        gathers: bool = False,
        back: bool = False,
        add: bool = False,
    ) -> None: ...
    def gated_product(
        self,
        source: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        routed: Routed,
        *,
        kind: str,
        gate: Tensor,
        up: Tensor,
        activated: Tensor,
    ) -> None: ...
    def weigh_backward(self, kind: str, made: Tensor, gate: Tensor | None, up: Tensor, weights: Tensor) -> Tensor: ...
    def wgrad(self, gradient: Tensor, source: Tensor, routed: Routed, *, total: Tensor, gathers: str) -> None: ...
    def bias_gradient(self, gradient: Tensor, routed: Routed, *, weights: Tensor | None, total: Tensor) -> None: ...
    def sum_rows(
        self, rows: Tensor, routed: Routed, weights: Tensor | None, *, out: Tensor, accumulate: bool
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Matrices:
    """One product's matrices and biases, an expert behind the other."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Beside:
    """An adapter beside the experts' last product, as its backward reads it."""

    first: Matrices
    second: Matrices
    """Scaled."""
    low: str
    """Its inner result."""
    first_total: Tensor
    second_total: Tensor
    scale: float


def by_expert(weight: Tensor, bias: Tensor | None) -> Matrices:
    """Of a single expert the weight has no dimension for the expert."""
    alone = weight.ndim == 2
    return Matrices(weight[None] if alone else weight, bias[None] if bias is not None and alone else bias)


class Mixture:
    """Runs the operators of one model's mixtures."""

    def __init__(self, model: Transformer, statistics: torch.dtype, kernels: ExpertKernels) -> None:
        self.model, self.statistics, self.kernels = model, statistics, kernels
        self.losses: RoutingLosses | None = None
        """What a training's loss has beside that of the data."""

    @property
    def gathers(self) -> bool:
        """Whether experts read the tokens where they lie."""
        return not self.model.routing.on_inputs

    def has(self, op: Op) -> bool:
        """Whether an operator is a product of experts."""
        return self.model.experts > 0 and isinstance(op, Gemm) and (op.name in PRODUCTS or op.name in BESIDE)

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(self, op: Op, values: Values, correction: Tensor | None) -> None:
        """Which experts a token has, or what they made together. `correction`: of the choice."""
        source = values[op.inputs[0]]
        if op.name == "routing":
            shape, (weights, index) = (source.shape[0], self.model.experts_per_token), op.outputs
            dispatch.route(
                source,
                self.model.routing,
                correction=correction,
                weights=values.allocate(weights, shape, self.statistics),
                index=values.allocate(index, shape, torch.int32),
            )
            if self.losses is not None:
                self.losses.count(source, values[index])
        elif op.name == "dispatch" and self.model.routing.on_inputs:
            routed = self.routed(values)
            out = values.allocate(op.outputs[0], (routed.rows, source.shape[1]), source.dtype)
            experts.weigh_rows(source, routed, values["routing_weights"], out=out)
        elif op.name == "dispatch":
            self.routed(values)
            values.alias(op.inputs[0], op.outputs[0])
        else:
            routed = self.routed(values)
            out = values.allocate(op.outputs[0], (routed.places.shape[0], source.shape[1]), source.dtype)
            weighs = None if self.model.routing.on_inputs else values["routing_weights"]
            self.kernels.sum_rows(source, routed, weighs, out=out, accumulate=False)

    def routed(self, values: Values) -> Routed:
        """Whose the experts' rows are; asked first while the index is still there."""
        if values.routed is None:
            values.routed = dispatch.sort_by_expert(values["routing_index"], self.model.experts)
        return values.routed

    def product(
        self,
        op: Gemm,
        values: Values,
        matrices: Matrices,
        columns: list[tuple[str, int, int]],
        wanted: Collection[str],
        *,
        activates: bool,
    ) -> None:
        """A product's wanted results, with `activates` also what the activation makes of them."""
        routed, source = self.routed(values), values[op.inputs[0]]
        if op.adds:
            self.kernels.product(source, matrices.weight, None, routed, out=values[op.outputs[0]], add=True)
            return
        outs = self._places(op, values, columns, wanted)
        if activates and self.gathers and self.model.gated and len(outs) == len(columns):
            gate, up = outs.values()
            self.kernels.gated_product(
                source,
                matrices.weight,
                matrices.bias,
                routed,
                kind=self.model.activation,
                gate=gate,
                up=up,
                activated=values.allocate("activated", tuple(up.shape), up.dtype),
            )
            return
        for name, first, last in columns:
            if name in outs:
                bias = None if matrices.bias is None else matrices.bias[:, first:last]
                weight = matrices.weight[:, first:last]
                gathers = op.inputs[0] == DISPATCHED and self.gathers
                self.kernels.product(source, weight, bias, routed, out=outs[name], gathers=gathers)

    def _places(
        self, op: Gemm, values: Values, columns: list[tuple[str, int, int]], wanted: Collection[str]
    ) -> dict[str, Tensor]:
        """Where the wanted results go: all of them beside each other, so that backward is one product."""
        rows, dtype = self.routed(values).rows, values[op.inputs[0]].dtype
        everything = len(columns) > 1 and all(name in wanted for name, _, _ in columns)
        if everything and not any(name in values.places for name in op.outputs):
            values.pack(op.outputs, [last - first for _, first, last in columns], rows, dtype)
            return {name: values[name] for name in op.outputs}
        return {
            name: values.allocate(name, (rows, last - first), dtype) for name, first, last in columns if name in wanted
        }

    # -- backward -------------------------------------------------------------------------------------------------

    def backward(self, op: Op, values: Values, gradients: Gradients) -> None:
        """Of what routes and hands out."""
        source, gradient = op.inputs[0], gradients[op.outputs[0]]
        if op.name == "dispatch" and self.model.routing.on_inputs:
            self._weighed_backward(op, values, gradients)
        elif op.name == "dispatch":
            tokens = gradient.shape[0] // self.model.experts_per_token
            out, there = gradients.target(source, (tokens, gradient.shape[1]), gradient.dtype)
            self.kernels.sum_rows(gradient, self.routed(values), None, out=out, accumulate=there)
        else:
            scores = values[source]
            out, _ = gradients.target(source, tuple(scores.shape), scores.dtype)
            dispatch.route_backward(
                gradients["routing_weights"],
                scores,
                values["routing_index"],
                self.model.routing,
                out=out,
            )
            if self.losses is not None:
                self.losses.add_gradient(scores, out=out)
        gradients.drop(op.outputs[0])

    def _weighed_backward(self, op: Op, values: Values, gradients: Gradients) -> None:
        """Of rows that were weighed before the experts read them."""
        source, gradient, routed = values[op.inputs[0]], gradients[op.outputs[0]], self.routed(values)
        weights = values["routing_weights"]
        into, _ = gradients.target("routing_weights", tuple(weights.shape), weights.dtype)
        routed.weights_to(experts.weigh_rows_backward(gradient, source, routed, weights.dtype), out=into)
        out, there = gradients.target(op.inputs[0], tuple(source.shape), gradient.dtype)
        self.kernels.sum_rows(gradient, routed, weights, out=out, accumulate=there)

    def back_to_inner(
        self,
        ops: tuple[Op, Op],
        values: Values,
        gradients: Gradients,
        matrices: Matrices,
        *,
        totals: Matrices | None,
        beside: Beside | None = None,
    ) -> None:
        """From the gradient of the weighted sums to those of gate and up, in their places, and of the weights.

        `ops`: what sums the experts' results, and the activation; `beside`: what is trained beside the matrices.
        """
        combine, activation = ops
        routed, gradient = self.routed(values), gradients[combine.outputs[0]]
        inner = [values[name] for name in activation.inputs]
        of_rows, out = self._weights_of_rows(values, gradients)
        made, _ = gradients.target(activation.outputs[0], tuple(inner[0].shape), inner[0].dtype)
        kernels = self.kernels
        kernels.product(gradient, matrices.weight, None, routed, out=made, gathers=True, back=True)
        gate, up = inner if self.model.gated else (None, inner[0])
        if beside is None:
            sums = kernels.weigh_backward(self.model.activation, made, gate, up, of_rows)
        else:
            sums = self._adapted_back(beside, values, gradient, gate=gate, up=up, of_rows=of_rows, made=made)
        if totals is not None:
            kernels.wgrad(gradient, made, routed, total=totals.weight, gathers="gradient")
            if totals.bias is not None:
                kernels.bias_gradient(gradient, routed, weights=of_rows, total=totals.bias)
        gradients.drop(activation.outputs[0])
        if out is not None:
            routed.weights_to(sums, out=out)
        if matrices.bias is not None and out is not None:
            self._add_shifts(gradient, matrices.bias, values, out=out)
        for name in activation.inputs:
            gradients.put(name, values[name])
        gradients.drop(combine.outputs[0])

    @staticmethod
    def _add_shifts(gradient: Tensor, bias: Tensor, values: Values, *, out: Tensor) -> None:
        """To the gradients of the tokens' weights what comes by the biases of the experts they chose."""
        index, arena = values["routing_index"], values.arena
        shifts = arena.take((gradient.shape[0], bias.shape[0]), gradient.dtype)
        torch.mm(gradient, bias.t(), out=shifts)
        places, chosen = arena.take(tuple(index.shape), torch.int64), arena.take(tuple(index.shape), shifts.dtype)
        out += torch.gather(shifts, 1, places.copy_(index), out=chosen)
        for each in (chosen, places, shifts):
            arena.give(each)

    def _weights_of_rows(self, values: Values, gradients: Gradients) -> tuple[Tensor, Tensor | None]:
        """What each row's result is multiplied by, and where the gradients of the tokens' weights go, if it is that."""
        routed = self.routed(values)
        if self.model.routing.on_inputs:
            return torch.ones(routed.rows, dtype=self.statistics, device=routed.tokens.device), None
        weights = values["routing_weights"]
        # Taken before what is given back sooner: behind it, it would part the room that gradients of all rows need.
        out, _ = gradients.target("routing_weights", tuple(weights.shape), weights.dtype)
        return routed.weights_of(weights), out

    def _adapted_back(
        self,
        beside: Beside,
        values: Values,
        gradient: Tensor,
        *,
        gate: Tensor | None,
        up: Tensor,
        of_rows: Tensor,
        made: Tensor,
    ) -> Tensor:
        """As the kernels' `weigh_backward`, with an adapter beside the last product and its gradients."""
        routed, kernels, low, arena = self.routed(values), self.kernels, values[beside.low], values.arena
        # Not yet weighted, as `made` is until its activation's backward.
        back = arena.take(tuple(low.shape), low.dtype)
        kernels.product(gradient, beside.second.weight, None, routed, out=back, gathers=True, back=True)
        kernels.product(back, beside.first.weight, None, routed, out=made, back=True, add=True)
        sums = kernels.weigh_backward(self.model.activation, made, gate, up, of_rows)
        kernels.wgrad(back, made, routed, total=beside.first_total, gathers="")
        torch.mul(low, (of_rows * beside.scale)[:, None], out=back)
        kernels.wgrad(gradient, back, routed, total=beside.second_total, gathers="gradient")
        arena.give(back)
        return sums

    def adapter_backward(
        self,
        op: Gemm,
        values: Values,
        gradients: Gradients,
        matrix: Matrices,
        *,
        total: Tensor,
        scale: float,
        add: bool,
    ) -> None:
        """Of an adapter's second product beside the first product; `matrix` is scaled. `add`: to what is there."""
        routed, gradient, low = self.routed(values), gradients[op.outputs[0]], values[op.inputs[0]]
        scaled = values.arena.take(tuple(low.shape), low.dtype)
        torch.mul(low, scale, out=scaled)
        self.kernels.wgrad(gradient, scaled, routed, total=total, gathers="")
        values.arena.give(scaled)
        target, _ = gradients.target(op.inputs[0], tuple(low.shape), gradient.dtype)
        self.kernels.product(gradient, matrix.weight, None, routed, out=target, back=True, add=add)

    def product_backward(
        self,
        op: Gemm,
        values: Values,
        gradients: Gradients,
        matrices: Matrices,
        columns: list[tuple[str, int, int]],
        *,
        totals: Matrices | None,
    ) -> None:
        """Of the first product: gate and up, which read the tokens."""
        routed = self.routed(values)
        joined = join_columns([gradients[name] for name in op.outputs])
        parts = (
            [(slice(columns[0][1], columns[-1][2]), joined)]
            if joined is not None
            else [(slice(first, last), gradients[name]) for name, first, last in columns]
        )
        for rows, gradient in parts:
            target, there = gradients.target(op.inputs[0], (routed.rows, op.depth), gradient.dtype)
            if totals is not None:
                source, gathers = values[op.inputs[0]], "source" if self.gathers else ""
                if gathers and not there:
                    # Until the rows' gradient is written its room holds the rows, which are read many times.
                    self.kernels.lay_out(source, routed, out=target)
                    source, gathers = target, ""
                self.kernels.wgrad(gradient, source, routed, total=totals.weight[:, rows], gathers=gathers)
                if totals.bias is not None:
                    self.kernels.bias_gradient(gradient, routed, weights=None, total=totals.bias[:, rows])
            self.kernels.product(gradient, matrices.weight[:, rows], None, routed, out=target, back=True, add=there)
        for name in op.outputs:
            gradients.drop(name)


def expert_kernels(device: torch.device, dtype: torch.dtype) -> ExpertKernels:
    """The fastest products of experts that a device has for a format."""
    if device.type == "cuda" and dtype in FUSED_TYPES and has_triton():
        from flopwise.engine.kernels import fused_experts

        return fused_experts
    return plain_experts
