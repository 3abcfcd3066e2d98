"""A round's tokens on the device: identifiers, labels and positions, and which of them each chunk has."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import NO_LABEL, Batch
from flopwise.engine.streaming.block import Chunk
from flopwise.records.plan import Plan

KINDS = 3
"""Identifier, label and position of a token, 4 bytes each."""


class Inputs:
    """Room for the tokens of a round, and the micro-batch in it."""

    def __init__(self, plan: Plan, buffer: Tensor, *, vocabulary: int, classifies: bool, causal: bool) -> None:
        self.plan, self.vocabulary, self.classifies, self.causal = plan, vocabulary, classifies, causal
        self.tokens = plan.tokens_per_round
        size = 4 * self.tokens
        parts = [buffer[index * size : (index + 1) * size].view(torch.int32) for index in range(KINDS)]
        self._ids, self._labels, self._positions = parts
        self.width = plan.sequence_tokens
        self.batch: Batch | None = None
        self._lengths: Tensor | None = None

    @property
    def bytes(self) -> int:
        return KINDS * 4 * self.tokens

    def bring(self, batch: Batch) -> None:
        """A micro-batch of at most a round's sequences."""
        sequences, width = batch.ids.shape
        if sequences > self.plan.sequences_per_round or width > self.plan.sequence_tokens:
            raise FlopwiseError(
                f"a micro-batch of {sequences} sequences of {width:,} tokens does not fit the plan",
                why=f"a round has {self.plan.sequences_per_round} of {self.plan.sequence_tokens:,}",
                hint="plan again for this batch",
            )
        if self.plan.chunks_per_sequence > 1 and width != self.plan.sequence_tokens:
            batch, width = _filled_up(batch, self.plan.sequence_tokens), self.plan.sequence_tokens
        count = sequences * width
        self.batch, self.width = batch, width
        self._bring(batch.ids, self._ids)
        one = torch.arange(width, dtype=torch.int32, device=self._positions.device)
        self._positions[:count].view(sequences, width).copy_(one)
        self._bring(batch.labels, self._labels)
        self._lengths = None
        # Behind a causal model's sequence there is only padding, which none of its tokens sees.
        if batch.lengths is not None and not self.causal and int(batch.lengths.min()) < width:
            self._lengths = torch.from_numpy(np.ascontiguousarray(batch.lengths)).to(self._ids.device)

    def check(self, batch: Batch) -> None:
        """Refuse tokens that the model has no row for: kernels would read and write what lies behind the table."""
        numbers = [batch.ids] if self.classifies else [batch.ids, batch.labels[batch.labels != NO_LABEL]]
        least = min((int(each.min()) for each in numbers if each.size), default=0)
        most = max((int(each.max()) for each in numbers if each.size), default=0)
        if least < 0 or most >= self.vocabulary:
            raise FlopwiseError(
                f"token {least if least < 0 else most:,} is none of the model's {self.vocabulary:,}",
                why="the data was made with another tokenizer than the model's",
                hint="--tokenizer with the model's own, or a model with a larger `vocab`",
            )

    @staticmethod
    def _bring(values: np.ndarray, target: Tensor) -> None:
        """Numbers to the beginning of a buffer. From pinned memory, so that nobody waits for what is under way."""
        flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
        if target.is_cuda:
            flat = flat.pin_memory()
        target[: flat.numel()].copy_(flat, non_blocking=True)

    def chunk(self, number: int) -> Chunk | None:
        """The tokens of a chunk; None where the micro-batch has none for it."""
        assert self.batch is not None
        first, count, sequence, sequences, begin = self._span(number)
        if not count:
            return None
        lengths = None if self._lengths is None else self._lengths[sequence : sequence + sequences]
        return Chunk(sequences, count // sequences, begin, self._positions[first : first + count], lengths)

    def _span(self, number: int) -> tuple[int, int, int, int, int]:
        """First row, rows, first sequence, sequences, place within the sequence."""
        assert self.batch is not None
        plan, present = self.plan, self.batch.sequences
        parts = plan.chunks_per_sequence
        if parts > 1:
            sequence, part = divmod(number, parts)
            begin = part * plan.chunk_tokens
            count = plan.tokens_of(number) if sequence < present else 0
            return sequence * self.width + begin, count, sequence, 1, begin
        each = plan.sequences_per_round // plan.chunks_per_round
        sequence = number * each
        sequences = max(0, min(each, present - sequence))
        return sequence * self.width, sequences * self.width, sequence, max(1, sequences), 0

    def ids(self, number: int) -> Tensor:
        """Identifiers of a chunk."""
        first, count, *_ = self._span(number)
        return self._ids[first : first + count]

    def labels(self, number: int) -> Tensor:
        """A label for each token of a chunk, or for each sequence that begins in it."""
        first, count, sequence, sequences, begin = self._span(number)
        if not self.classifies:
            return self._labels[first : first + count]
        return self._labels[sequence : sequence + sequences] if begin == 0 else self._labels[:0]


def _filled_up(batch: Batch, tokens: int) -> Batch:
    """The same sequences with padding behind, as chunks of one size want them."""
    sequences, width = batch.ids.shape
    ids = np.zeros((sequences, tokens), dtype=np.int32)
    ids[:, :width] = batch.ids
    labels = batch.labels
    if labels.ndim > 1:
        labels = np.full((sequences, tokens), -1, dtype=np.int32)
        labels[:, :width] = batch.labels
    lengths = batch.lengths if batch.lengths is not None else np.full(sequences, width, dtype=np.int32)
    return Batch(ids, labels, lengths)
