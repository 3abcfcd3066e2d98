"""What is before the blocks and behind them: embedding and head, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flopwise.engine.batch import NO_LABEL
from flopwise.engine.kernels import dispatch
from flopwise.engine.kernels.dispatch import NO_TERMS, LossTerms
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.block import Chunk
from flopwise.engine.streaming.dropping import RowDrops, mask_of
from flopwise.engine.streaming.operators import Operators
from flopwise.engine.streaming.products import padded_width
from flopwise.engine.streaming.rows import Rows
from flopwise.engine.streaming.trained import Sums, Trained, Weights, plain_weight
from flopwise.engine.streaming.values import Gradients, Values
from flopwise.work.end_ops import CHOOSE, POOL
from flopwise.work.op import Op, Streaming
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

    def __init__(self, model: Transformer, work: Work, operators: Operators, terms: LossTerms = NO_TERMS) -> None:
        self.model, self.operators, self.terms = model, operators, terms
        self.before, _, self.behind = op_groups(work)
        # Which rows the head is computed for is the caller's to know.
        self.behind = tuple(op for op in self.behind if op.name not in (CHOOSE, "loss"))
        self.classifies = model.head == "classifier"
        self.normed: tuple[Op, ...] = ()
        """What is done to all rows before a classifier takes their mean."""
        if self.classifies and model.pooling == "mean":
            at = next(index for index, op in enumerate(self.behind) if op.name == POOL)
            self.normed, self.behind = self.behind[:at], self.behind[at + 1 :]

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
            types = plain_weight(weights, "token_types.weight")
            if chunk.types is None:
                out.add_(types[0])
            else:
                dispatch.embedding_add(chunk.types, types, out=out)

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
            self._types_backward(gradient, chunk, sums["token_types.weight"])
        if self.model.embedding_scale != 1.0:
            # Nobody reads the gradient any more.
            gradient.mul_(self._scale)
        dispatch.embedding_backward(ids, gradient, table_gradient=sums[self._table])

    def _types_backward(self, gradient: Tensor, chunk: Chunk, total: Tensor) -> None:
        """The few rows of the types' table each have the sum of very many."""
        if chunk.types is None:
            dispatch.add_column_sums(gradient, total=total[0])
            return
        of_type = self.operators.arena.take(tuple(gradient.shape), gradient.dtype)
        for number in range(total.shape[0]):
            torch.mul(gradient, (chunk.types == number)[:, None], out=of_type)
            dispatch.add_column_sums(of_type, total=total[number])
        self.operators.arena.give(of_type)

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
        values[self._entry] = residual
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
        # An evaluation is of the right answers alone.
        terms = self.terms if sums is not None else NO_TERMS
        dispatch.cross_entropy(logits, labels, scale=scale, loss=loss.total, cap=self.model.logit_cap, terms=terms)
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
            dropped = mask_of(rows.drops, op.outputs[0]) if isinstance(op, Streaming) and op.kind == "norm" else None
            if dropped is not None:
                gradient = gradients[op.outputs[0]]
                dispatch.dropout(gradient, dropped, out=gradient)
            self.operators.backward(op, values, gradients, trained, rows)
            if op is self.behind[-1]:
                values.drop(("logits",))
        residual.copy_(gradients[self._entry])
        gradients.drop(self._entry)

    # -- the mean of a sequence's rows, for a classifier ------------------------------------------------------------

    def pool(self, residual: Tensor, chunk: Chunk, weights: Weights, *, out: Tensor) -> None:
        """Each sequence's mean of its rows, normed where the model has a norm behind its blocks."""
        values = self._normed_rows(residual, chunk, weights)
        rows = values[self._pooled_from]
        _, shares = shares_of(chunk, out.shape[0], self.operators.statistics)
        # In fp32, some columns at a time.
        for first in range(0, rows.shape[1], POOLED_COLUMNS):
            part = slice(first, first + POOLED_COLUMNS)
            out[:, part] = _sums_by_sequence(rows[:, part].to(shares.dtype) * shares[:, None], chunk, out.shape[0])
        values.close()

    def _normed_rows(self, residual: Tensor, chunk: Chunk, weights: Weights) -> Values:
        values = Values(self.operators.arena)
        values["last"] = residual
        for op in self.normed:
            self.operators.forward(op, values, weights, Rows(chunk.positions), op.outputs)
        return values

    @property
    def _pooled_from(self) -> str:
        return self.normed[-1].outputs[0] if self.normed else "last"

    def pool_backward(self, gradient: Tensor, residual: Tensor, chunk: Chunk, trained: Trained) -> None:
        """From the gradient of the means to that of the rows, which is written over them."""
        index, shares = shares_of(chunk, gradient.shape[0], self.operators.statistics)
        if not self.normed:
            torch.index_select(gradient, 0, index, out=residual)
            residual.mul_(shares[:, None])
            return
        values = self._normed_rows(residual, chunk, trained.weights)
        gradients = Gradients(self.operators.arena)
        above, _ = gradients.target(self._pooled_from, tuple(residual.shape), residual.dtype)
        torch.index_select(gradient, 0, index, out=above)
        above.mul_(shares[:, None])
        for op in reversed(self.normed):
            self.operators.backward(op, values, gradients, trained, Rows(chunk.positions))
        residual.copy_(gradients["last"])
        gradients.drop("last")
        values.close()


POOLED_COLUMNS = 128
"""Of which a classifier's means are summed at once."""


def shares_of(chunk: Chunk, sequences: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row's sequence, and its share of that sequence's mean: nothing of what is padding, or only fills up."""
    assert chunk.starts is not None
    rows = torch.arange(chunk.count, dtype=torch.int32, device=chunk.positions.device)
    if chunk.packed:
        ends = chunk.starts[1 : sequences + 1]
        index = torch.searchsorted(ends, rows, right=True).clamp_(max=sequences - 1)
        lengths, seen = torch.diff(chunk.starts[: sequences + 1]), rows < ends[-1]
    else:
        index = (rows // chunk.tokens).long()
        lengths = chunk.lengths if chunk.lengths is not None else rows.new_full((sequences,), chunk.tokens)
        seen = chunk.positions < lengths[index]
    return index, seen.to(dtype) / lengths[index].to(dtype)


def _sums_by_sequence(rows: Tensor, chunk: Chunk, sequences: int) -> Tensor:
    """In the order of the rows, so that bits do not depend on chance."""
    if not chunk.packed:
        return torch.unflatten(rows, 0, (sequences, -1)).sum(1)
    assert chunk.starts is not None
    sums: Tensor = torch.segment_reduce(rows, "sum", offsets=chunk.starts[: sequences + 1].long(), axis=0, unsafe=True)
    return sums
