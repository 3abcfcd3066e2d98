"""Norms of the residual stream, of latents and of heads, which turn them too."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.dropout import DropMask
from flopwise.engine.kernels.heads import norm_and_turn, norm_and_turn_backward
from flopwise.engine.streaming.casts import Casts
from flopwise.engine.streaming.dropping import mask_of
from flopwise.engine.streaming.latents import LATENT_NORMS
from flopwise.engine.streaming.rotations import Rotations
from flopwise.engine.streaming.rows import Rows
from flopwise.engine.streaming.trained import Stored, Trained, Weights
from flopwise.engine.streaming.values import Gradients, Values
from flopwise.work.fusion import is_sum_for_norm
from flopwise.work.latent import LATENT_EPSILON
from flopwise.work.op import Op, Streaming
from flopwise.work.parameters import op_groups
from flopwise.work.transformer import Transformer
from flopwise.work.work import Work

TURNED = {"query_norm": "query", "key_norm": "key"}
"""Norms of heads → what the rotation behind them makes of their result."""


class Norms:
    """A model's norms, run."""

    def __init__(
        self, model: Transformer, work: Work, casts: Casts, statistics: torch.dtype, rotations: Rotations
    ) -> None:
        self.model, self.work, self.casts, self.arena = model, work, casts, casts.arena
        self.statistics, self.rotations = statistics, rotations
        self._ones: Tensor | None = None
        self._branches = {
            norm.name: op.inputs[1] for op, norm in pairwise(op_groups(work)[1]) if is_sum_for_norm(op, norm)
        }
        """Norms that read a sum of two → its second term."""

    def forward(self, op: Streaming, values: Values, weights: Weights, rows: Rows) -> None:
        source, total = values[op.inputs[0]], values.copies.pop(op.inputs[0], None)
        dropped = mask_of(rows.drops, "embedding") if op.name == "embedding_norm" else None
        self._normalise(op, values, weights, source, total=total, drop_out=dropped)
        if total is not None:
            values.replace(op.inputs[0], total)

    def residual_norm(
        self, residual: Op, norm: Op, values: Values, weights: Weights, rows: Rows, *, over: str | None = None
    ) -> None:
        """A sum of two and its norm in one go. `over`: the one of them whose place the norm's result takes."""
        first, second = (values[name] for name in residual.inputs)
        total = values.allocate(residual.outputs[0], tuple(first.shape), first.dtype)
        out = None if over is None else values.hand_over(over, norm.outputs[0])
        dropped = mask_of(rows.drops, residual.inputs[1])
        self._normalise(norm, values, weights, first, other=second, total=total, out=out, drop_other=dropped)

    def _normalise(
        self,
        op: Op,
        values: Values,
        weights: Weights,
        source: Tensor,
        *,
        other: Tensor | None = None,
        total: Tensor | None = None,
        out: Tensor | None = None,
        drop_other: DropMask | None = None,
        drop_out: DropMask | None = None,
    ) -> None:
        module, stored = self._norm_weight(op, weights)
        shift = weights.get(f"{module}.bias")
        scale, bias = self._norm_scale(stored), None if shift is None else self.casts.cast(shift)
        rows = source.numel() // scale.numel()
        shape = (rows, 2) if self.model.norm == "layer" else (rows,)
        if out is None:
            out = values.allocate(op.outputs[0], tuple(source.shape), source.dtype)
        dispatch.norm_forward(
            source.view(rows, -1),
            scale,
            bias,
            epsilon=LATENT_EPSILON if op.name in LATENT_NORMS else self.model.norm_epsilon,
            rms=self.model.norm == "rms",
            out=out.view(rows, -1),
            statistics=values.allocate(op.outputs[1], shape, self.statistics),
            other=other,
            total=total,
            drop_other=drop_other,
            drop_out=drop_out,
        )
        self._drop_norm_scale(scale, stored)
        self.casts.drop(bias, shift)

    def backward(
        self,
        op: Op,
        values: Values,
        gradients: Gradients,
        trained: Trained,
        rows: Rows,
        *,
        recompute: bool = False,
    ) -> None:
        """`recompute`: whether the norm's result takes the place of its gradient."""
        weights, sums = trained.weights, trained.sums
        name, source = op.inputs[0], values[op.inputs[0]]
        module, stored = self._norm_weight(op, weights)
        shift = weights.get(f"{module}.bias") if recompute else None
        scale, bias = self._norm_scale(stored), None if shift is None else self.casts.cast(shift)
        count = source.numel() // scale.numel()
        gradient = gradients[op.outputs[0]]
        there = name in gradients
        if there or recompute:
            out, _ = gradients.target(name, tuple(source.shape), source.dtype)
        else:
            out = gradients.replace(op.outputs[0], name)
        statistics = values[op.outputs[1]]
        mask, dropped = self._branch_of(op, gradients, rows, like=source)
        dispatch.norm_backward(
            gradient.view(count, -1),
            source.view(count, -1),
            scale,
            statistics.view(count, 2) if self.model.norm == "layer" else statistics.view(count),
            rms=self.model.norm == "rms",
            out=out.view(count, -1),
            weight_gradient=sums.get(f"{module}.weight"),
            bias_gradient=sums.get(f"{module}.bias"),
            accumulate=there,
            recompute=recompute,
            bias=bias,
            drop=mask,
            dropped=dropped,
        )
        if there and not recompute:
            gradients.drop(op.outputs[0])
        self._drop_norm_scale(scale, stored)
        self.casts.drop(bias, shift)

    def _branch_of(
        self, norm: Op, gradients: Gradients, rows: Rows, *, like: Tensor
    ) -> tuple[DropMask | None, Tensor | None]:
        """Of the sum that a norm reads, the branch's mask and where its gradient goes, if anything is dropped."""
        branch = self._branches.get(norm.name)
        mask = None if branch is None else mask_of(rows.drops, branch)
        if branch is None or mask is None:
            return None, None
        return mask, gradients.target(branch, tuple(like.shape), like.dtype)[0]

    def turns(self, op: Op, rows: Rows) -> bool:
        """Whether an operator is a norm of heads that turns them too."""
        return self.rotations.with_norms and rows.rotation is not None and op.name in TURNED

    def turn(self, op: Streaming, values: Values, weights: Weights, rows: Rows) -> None:
        source = values[op.inputs[0]]
        module, stored = self._norm_weight(op, weights)
        shift = weights.get(f"{module}.bias")
        scale, bias = self._norm_scale(stored), None if shift is None else self.casts.cast(shift)
        heads = source.numel() // self.model.head_dim
        norm_and_turn(
            self.rotations.by_head(source),
            scale,
            bias,
            self.rotations.turn_of(rows),
            epsilon=self.model.norm_epsilon,
            rms=self.model.norm == "rms",
            out=self.rotations.by_head(values.allocate(TURNED[op.name], tuple(source.shape), source.dtype)),
            statistics=values.allocate(
                op.outputs[1], (heads, 2) if self.model.norm == "layer" else (heads,), self.statistics
            ),
        )
        self._drop_norm_scale(scale, stored)
        self.casts.drop(bias, shift)

    def turn_backward(self, op: Streaming, values: Values, gradients: Gradients, trained: Trained, rows: Rows) -> None:
        source, statistics = values[op.inputs[0]], values[op.outputs[1]]
        module, stored = self._norm_weight(op, trained.weights)
        scale, gradient = self._norm_scale(stored), gradients[TURNED[op.name]]
        norm_and_turn_backward(
            self.rotations.by_head(gradient),
            self.rotations.by_head(source),
            scale,
            statistics.view(-1, 2) if self.model.norm == "layer" else statistics.view(-1),
            self.rotations.turn_of(rows),
            rms=self.model.norm == "rms",
            out=self.rotations.by_head(gradients.replace(TURNED[op.name], op.inputs[0])),
            weight_gradient=trained.sums.get(f"{module}.weight"),
            bias_gradient=trained.sums.get(f"{module}.bias"),
        )
        self._drop_norm_scale(scale, stored)

    def _norm_weight(self, op: Op, weights: Weights) -> tuple[str, Stored]:
        """What a norm scales channels by, and whose it is: nobody's, where norms of heads have none."""
        if op.weights:
            module = op.weights[0].module
            return module, weights[f"{module}.weight"]
        if self._ones is None:
            channels = self.model.head_dim
            if self.model.qk_norm_over == "all":
                channels *= max(self.model.heads, self.model.kv_heads)
            # Of weights that are one less than what they scale by, zeros.
            kept = 0.0 if self.model.norm_adds_one else 1.0
            self._ones = torch.full((channels,), kept, dtype=self.casts.compute, device=self.arena.room.device)
        rows = self.work.tensors[op.outputs[1]].elements // (2 if self.model.norm == "layer" else 1)
        return "", self._ones[: self.work.tensors[op.inputs[0]].elements // rows]

    def _norm_scale(self, weight: Stored) -> Tensor:
        """What a norm multiplies by: its weight, or one more."""
        if not self.model.norm_adds_one:
            return self.casts.cast(weight)
        assert isinstance(weight, Tensor), "norms are not quantised"
        return self.arena.take(tuple(weight.shape), self.statistics).copy_(weight).add_(1.0)

    def _drop_norm_scale(self, scale: Tensor, stored: Stored) -> None:
        if self.model.norm_adds_one:
            self.arena.give(scale)
        else:
            self.casts.drop(scale, stored)
