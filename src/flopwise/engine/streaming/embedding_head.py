"""What is before the blocks and behind them: embedding and head, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flopwise.engine.batch import NO_LABEL
from flopwise.engine.kernels import dispatch
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.block import Chunk
from flopwise.engine.streaming.dropping import RowDrops, mask_of
from flopwise.engine.streaming.operators import Operators, Rows, Sums, Trained, Weights, plain_weight
from flopwise.engine.streaming.products import padded_width
from flopwise.engine.streaming.values import Gradients, Values
from flopwise.work.op import Streaming
from flopwise.work.parameters import op_groups
from flopwise.work.transformer import Transformer
from flopwise.work.work import Work


@dataclass(frozen=True, slots=True)
class Loss:
    """Sums over a step, on the device."""

    total: Tensor
    correct: Tensor | None = None
    """Where it is evaluated, or answers are compared: right answers."""
    gains: Tensor | None = None
    """Of preferences, how much likelier than the reference finds them chosen and rejected answers became, times β."""

    def clear(self) -> None:
        """Nothing is counted yet."""
        for sums in (self.total, self.correct, self.gains):
            if sums is not None:
                sums.zero_()


class EmbeddingHead:
    """Embedding and head of a model."""

    def __init__(self, model: Transformer, work: Work, operators: Operators) -> None:
        self.model, self.operators = model, operators
        self.before, _, self.behind = op_groups(work)
        self.behind = tuple(op for op in self.behind if op.name != "loss")
        self.classifies = model.head == "classifier"

    # -- embedding ------------------------------------------------------------------------------------------------

    def embed(self, ids: Tensor, chunk: Chunk, weights: Weights, out: Tensor) -> None:
        """Rows of the tables, summed, to the residual stream."""
        if not self.model.embedding_norm:
            self._look_up(ids, chunk, weights, out)
            self._drop(chunk, out)
            return
        values = self._embedded(ids, chunk, weights, out)
        values.close()

    def _embedded(self, ids: Tensor, chunk: Chunk, weights: Weights, out: Tensor | None) -> Values:
        values = Values(self.operators.arena, {} if out is None else {"input": out})
        shape = (ids.numel(), self.model.hidden)
        self._look_up(ids, chunk, weights, values.allocate("embedded", shape, self.operators.compute))
        self.operators.forward(
            self.before[1], values, weights, Rows(chunk.positions, chunk.drops), self.before[1].outputs
        )
        return values

    def _look_up(self, ids: Tensor, chunk: Chunk, weights: Weights, out: Tensor) -> None:
        dispatch.embedding_forward(ids, plain_weight(weights, self._table), out=out)
        if self.model.embedding_scale != 1.0:
            out.mul_(self._scale)
        if self.model.positions == "learned":
            table = plain_weight(weights, "positions.weight")[self.model.position_offset :]
            dispatch.embedding_add(chunk.positions, table, out=out)
        if self.model.token_types:
            # Every token is of the first type.
            out.add_(plain_weight(weights, "token_types.weight")[0])

    @staticmethod
    def _drop(chunk: Chunk, rows: Tensor) -> None:
        mask = mask_of(chunk.drops, "embedding")
        if mask is not None:
            dispatch.dropout(rows, mask, out=rows)

    @property
    def _scale(self) -> float:
        """What the embedding is multiplied by: rounded as its numbers are, as `transformers` does for Gemma."""
        return float(torch.tensor(self.model.embedding_scale, dtype=self.operators.compute))

    @property
    def _table(self) -> str:
        return "head.weight" if self.model.tied else "embedding.weight"

    def embed_backward(self, ids: Tensor, chunk: Chunk, weights: Weights, sums: Sums, gradient: Tensor) -> None:
        """Add the residual stream's gradient to those of the tables."""
        self._drop(chunk, gradient)
        if self.model.embedding_norm:
            values = self._embedded(ids, chunk, weights, None)
            gradients = Gradients(self.operators.arena)
            gradients.put("input", gradient)
            norm = self.before[1]
            assert isinstance(norm, Streaming)
            self.operators.backward(norm, values, gradients, Trained(weights, sums), Rows(chunk.positions, chunk.drops))
            values.close()
        if self.model.positions == "learned":
            table_gradient = sums["positions.weight"][self.model.position_offset :]
            dispatch.embedding_backward(chunk.positions, gradient, table_gradient=table_gradient)
        if self.model.token_types:
            dispatch.add_column_sums(gradient, total=sums["token_types.weight"][0])
        if self.model.embedding_scale != 1.0:
            # Nobody reads the gradient any more.
            gradient.mul_(self._scale)
        dispatch.embedding_backward(ids, gradient, table_gradient=sums[self._table])

    # -- head -----------------------------------------------------------------------------------------------------

    def head(
        self,
        residual: Tensor,
        labels: Tensor,
        weights: Weights,
        sums: Sums | None,
        *,
        loss: Loss,
        arena: Arena,
        scale: Tensor,
        drops: RowDrops | None = None,
    ) -> None:
        """From the last block's output to the loss and back to its gradient, written over it.

        Without `sums` nothing goes back: the loss and the right answers are counted.
        """
        values = self._with_room(residual.shape[0], weights, arena)
        read = mask_of(drops, "first")
        if read is not None:
            dispatch.dropout(residual, read, out=residual)
        values["first" if self.classifies else self._entry] = residual
        rows = Rows(labels, drops)
        for op in self.behind:
            self.operators.forward(op, values, weights, rows, op.outputs)
            mask = mask_of(drops, op.outputs[0])
            if mask is not None:
                dispatch.dropout(values[op.outputs[0]], mask, out=values[op.outputs[0]])
        logits = values["logits"]
        if loss.correct is not None:
            with_loss = labels != NO_LABEL
            loss.correct.add_(((logits.argmax(-1) == labels) & with_loss).sum())
        if self.model.logit_scale != 1.0:
            logits.mul_(self.model.logit_scale)
        dispatch.cross_entropy(logits, labels, scale=scale, loss=loss.total, cap=self.model.logit_cap)
        if self.model.logit_scale != 1.0:
            logits.mul_(self.model.logit_scale)
        if sums is not None:
            self._head_backward(residual, values, Trained(weights, sums), rows)
            if read is not None:
                dispatch.dropout(residual, read, out=residual)
        values.close()

    def _with_room(self, rows: int, weights: Weights, arena: Arena) -> Values:
        """The room is planned for the logits: what is made before them must not take a part of it."""
        values = Values(arena)
        vocabulary = weights[f"{self._last_product}.weight"].shape[0]
        room = vocabulary if self.classifies else padded_width(vocabulary, self.operators.compute)
        values.reserve("logits", (rows, vocabulary), self.operators.compute, room=room)
        return values

    def score(self, residual: Tensor, labels: Tensor, weights: Weights, *, arena: Arena, out: Tensor) -> None:
        """The loss of each row of the last block's output, which stays as it is."""
        values = self._with_room(residual.shape[0], weights, arena)
        values[self._entry] = residual
        for op in self.behind:
            self.operators.forward(op, values, weights, Rows(labels), op.outputs)
        logits = values["logits"]
        if self.model.logit_scale != 1.0:
            logits.mul_(self.model.logit_scale)
        dispatch.token_losses(logits, labels, out=out, cap=self.model.logit_cap)
        values.close()

    @property
    def _last_product(self) -> str:
        return self.behind[-1].name

    @property
    def _entry(self) -> str:
        return self.behind[0].inputs[0]

    def _head_backward(self, residual: Tensor, values: Values, trained: Trained, rows: Rows) -> None:
        gradients = Gradients(values.arena)
        gradients.put("logits", values["logits"])
        for op in reversed(self.behind):
            self.operators.backward(op, values, gradients, trained, rows)
            if op is self.behind[-1]:
                values.drop(("logits",))
        name = "first" if self.classifies else self._entry
        residual.copy_(gradients[name])
        gradients.drop(name)
