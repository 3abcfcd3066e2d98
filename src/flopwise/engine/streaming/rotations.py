"""Heads, turned with their tokens' positions."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.heads import Turn
from flopwise.engine.streaming.rows import Rows
from flopwise.engine.streaming.values import Gradients, Values
from flopwise.work.op import Streaming
from flopwise.work.transformer import Transformer


class Rotations:
    """A model's rotations of heads, run."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    @property
    def with_norms(self) -> bool:
        """Whether norms of heads turn them too, so that nothing is left to do for the rotation behind them."""
        return self.model.qk_norm and self.model.qk_norm_over == "head"

    def forward(self, op: Streaming, values: Values, rows: Rows, wanted: Collection[str]) -> None:
        if self.with_norms:
            return
        for source, target in zip(op.inputs, op.outputs, strict=True):
            if target in wanted:
                tensor = values[source]
                out = values.allocate(target, tuple(tensor.shape), tensor.dtype)
                self._turn(tensor, rows, out=out, inverse=False)

    def backward(self, op: Streaming, gradients: Gradients, rows: Rows) -> None:
        if self.with_norms:
            return
        for source, target in zip(op.inputs, op.outputs, strict=True):
            gradient = gradients[target]
            self._turn(gradient, rows, out=gradients.replace(target, source), inverse=True)

    def turn_of(self, rows: Rows) -> Turn:
        """How norms turn heads."""
        rotation = rows.rotation
        assert rotation is not None, "only blocks with rotary positions turn"
        return Turn(
            positions=rows.positions,
            frequencies=rotation.frequencies,
            scale=rotation.scale,
            neighbours=rotation.neighbours,
        )

    def by_head(self, tensor: Tensor) -> Tensor:
        """Rows, heads and their channels."""
        return tensor.view(tensor.shape[0], -1, self.model.head_dim)

    def _turn(self, source: Tensor, rows: Rows, *, out: Tensor, inverse: bool) -> None:
        """Heads turned, all of their channels or the first ones."""
        rotation = rows.rotation
        assert rotation is not None, "only blocks with rotary positions turn"
        source, out = self.by_head(source), self.by_head(out)
        turned = rotation.channels
        if turned < self.model.head_dim and out is not source and out.data_ptr() != source.data_ptr():
            out[..., turned:].copy_(source[..., turned:])
        dispatch.rotate(
            source[..., :turned],
            rows.positions,
            rotation.frequencies,
            out=out[..., :turned],
            inverse=inverse,
            scale=rotation.scale,
            neighbours=rotation.neighbours,
        )
