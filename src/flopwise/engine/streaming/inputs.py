"""A step's tokens: laid out in pinned memory, then round by round on the device, and which of them each chunk has.

    even      every sequence has the round's width            rows  = sequences × width
    packed    sequences lie behind each other, no padding     rows  = their tokens, filled up to a round number of rows

What fills up a packed chunk are sequences without a label, so that their gradients are zeros: chunks whose rows differ
by a few tokens have the same shape, and a captured step can be replayed for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import MOST_DOCUMENTS, NO_LABEL, Batch
from flopwise.engine.streaming.block import Chunk
from flopwise.records.plan import Plan
from flopwise.work.lengths import granule_of

IDS, LABELS, POSITIONS, TOKENS = range(4)
"""Identifier, label and position of a token, where anything is dropped its number in the step's batch, behind these
where a model has several types of tokens that of each; and last, where not all have a loss, a row that has one; 4 bytes
each."""
NO_TOKEN = -1
"""The number of what fills up."""
PLACES = 32
"""Beginnings of packed sequences are looked at in multiples of so many."""


@dataclass(frozen=True, slots=True)
class RoundLayout:
    """How the sequences of a round lie in memory."""

    sequences: int
    width: int
    """Tokens of each sequence, padding included."""
    rows: tuple[int, ...] | None = None
    """Of each chunk, where sequences are packed; None: they are even."""
    padded: bool = False
    """Whether even sequences have padding that attention must not see."""
    places: tuple[int, ...] = ()
    """Of each chunk, how many beginnings and ends are looked at where sequences hold several documents; else all."""
    typed: bool = False
    """Whether not all tokens are of the first type."""
    chosen: tuple[int, ...] | None = None
    """Of each chunk, for how many rows the head is computed; None: for all."""


class Inputs:
    """Room for the tokens of a round on the device, and for those of a step where they come from."""

    def __init__(
        self,
        plan: Plan,
        buffer: Tensor,
        *,
        vocabulary: int,
        classifies: bool,
        causal: bool,
        granule: int | None = None,
        numbered: bool = False,
        marked: bool = False,
        compares: bool = False,
        chooses: bool = False,
        types: int = 0,
        longest_packed: int | None = None,
    ) -> None:
        """`numbered`: whether tokens have numbers: sequence · the plan's tokens + position, however they are cut.
        `marked`: whether what is no token has one below zero.

        `compares`: whether documents are pairs of answers. `types`: of tokens that the model has. `chooses`: whether
        the head is computed for those tokens alone that have a loss.
        `longest_packed`: tokens that a document may have that lies behind others; None: as many as a sequence.

        `granule`: what the rows of packed chunks are a multiple of; None: 1 on a CPU, a sixteenth on a GPU."""
        self.packs_all = longest_packed is None or plan.sequence_tokens <= longest_packed
        """Whether sequences of any length may lie behind each other."""
        self.plan, self.vocabulary, self.classifies, self.causal = plan, vocabulary, classifies, causal
        self.tokens = plan.tokens_per_round
        self.numbered, self.marked, self.compares, self.token_types = numbered, marked, compares, types
        self.chooses = chooses
        self.kinds = TOKENS + numbered + (types > 1) + compares + chooses
        """Numbers of a token that come from the host."""
        self._types = TOKENS + numbered
        self._answers = self._types + (types > 1)
        numbers = buffer[: self.bytes].view(torch.int32)
        self._block = numbers[: self.kinds * self.tokens].view(self.kinds, self.tokens)
        self._weights = numbers[self.kinds * self.tokens :].view(torch.float32)
        self.each = max(1, plan.sequences_per_round // plan.chunks_per_round)
        """Sequences of a chunk, where it holds whole ones."""
        by_device = granule_of(self.each * plan.sequence_tokens) if buffer.is_cuda else 1
        self.granule = by_device if granule is None else granule
        # Where each sequence of a chunk begins, then those that fill it up, none longer than others may be, and an end.
        alone = plan.chunks_per_round == plan.rounds_per_step == 1
        fillers = -(-(self.granule - 1) // plan.sequence_tokens) if alone else self.each
        places = self.each * MOST_DOCUMENTS + fillers + 1
        self._starts = torch.zeros((plan.chunks_per_round, places), dtype=torch.int32, device=buffer.device)
        self._lengths = torch.zeros(plan.sequences_per_round, dtype=torch.int32, device=buffer.device)
        # Of a chunk's answers, how likely the reference finds them; NaN where there is none.
        self.references = torch.full(self._starts.shape, torch.nan, dtype=torch.float64, device=buffer.device)
        self._host: tuple[Tensor, ...] | None = None
        self._layouts: tuple[RoundLayout, ...] = ()
        self.layout = RoundLayout(0, plan.sequence_tokens)

    @property
    def bytes(self) -> int:
        return (self.kinds + self.compares) * 4 * self.tokens

    # -- a step's tokens in pinned memory ---------------------------------------------------------------------------

    def prepare(self, rounds: Sequence[Batch]) -> tuple[RoundLayout, ...]:
        """Lay out the micro-batches of a step; `bring` then takes one of them to the device.

        All packed chunks of a step that is replayed have as many rows as the fullest: few graphs serve all steps.
        """
        for batch in rounds:
            self._check_size(batch)
        host, starts, lengths, references = self._host_rooms(len(rounds))
        packs = [self._packs(batch) for batch in rounds]
        alike = self.plan.replay and self.granule > 1
        rows = self._packed_rows([batch for batch, packed in zip(rounds, packs, strict=True) if packed and alike])
        found = []
        for number, (batch, packed) in enumerate(zip(rounds, packs, strict=True)):
            places = host[number].numpy(), starts[number].numpy()
            first = number * self.plan.sequences_per_round
            if packed:
                found.append(self._lay_packed(batch, *places, rows=rows, first_sequence=first))
                if self.compares:
                    self._lay_references(batch, references[number].numpy())
            else:
                found.append(self._lay_even(batch, *places, lengths[number].numpy(), first_sequence=first))
        if self.chooses:
            found = self._choose(found, host.numpy(), alike=alike)
        self._layouts = tuple(found)
        return self._layouts

    def _choose(self, layouts: Sequence[RoundLayout], host: NDArray[np.int32], *, alike: bool) -> list[RoundLayout]:
        """Lay out which rows of each chunk have a loss, from the chunk's first; what fills up are rows without one.

        Chunks of a step that is replayed have as many as the fullest, a round number: few graphs serve all steps.
        """
        spans = [[self._span(layout, chunk)[:2] for chunk in range(self.plan.chunks_per_round)] for layout in layouts]
        with_loss = [
            [block[LABELS, first : first + count] != NO_LABEL for first, count in round_spans]
            for block, round_spans in zip(host, spans, strict=False)
        ]
        counts = [[int(each.sum()) for each in round_chunks] for round_chunks in with_loss]
        most = self._filled_up(max((max(each) for each in counts), default=0)) if alike else 0
        found = []
        for number, layout in enumerate(layouts):
            chosen = []
            for (first, rows), there, count in zip(spans[number], with_loss[number], counts[number], strict=True):
                wanted = min(rows, max(most, count))
                places = host[number, -1, first : first + wanted]
                places[:count], places[count:] = np.flatnonzero(there), np.flatnonzero(~there)[: wanted - count]
                chosen.append(wanted)
            found.append(replace(layout, chosen=tuple(chosen)))
        return found

    def _check_size(self, batch: Batch) -> None:
        sequences, width = batch.ids.shape
        if sequences > self.plan.sequences_per_round or width > self.plan.sequence_tokens:
            raise FlopwiseError(
                f"a micro-batch of {sequences} sequences of {width:,} tokens does not fit the plan",
                why=f"a round has {self.plan.sequences_per_round} of {self.plan.sequence_tokens:,}",
                hint="plan again for this batch",
            )

    def _host_rooms(self, rounds: int) -> tuple[Tensor, ...]:
        if self._host is None:
            # Room for a whole step, once: a captured step reads it where it lay when it was captured.
            rounds, pinned = max(rounds, self.plan.rounds_per_step), self._block.is_cuda
            self._host = tuple(
                torch.zeros((rounds, *room.shape), dtype=room.dtype, pin_memory=pinned) for room in self._rooms
            )
        return self._host

    @property
    def _rooms(self) -> tuple[Tensor, ...]:
        """What of a round is brought from the host."""
        return self._block, self._starts, self._lengths, self.references

    def _packs(self, batch: Batch) -> bool:
        """Whether padding is left out: where there is any, and chunks hold whole sequences."""
        whole = self.plan.chunks_per_sequence == 1
        if not self.packs_all:
            return False
        if batch.documents is not None:
            assert whole, "documents lie behind each other in whole sequences alone"
            return True
        return whole and batch.lengths is not None and int(batch.lengths.min()) < batch.ids.shape[1]

    def _packed_rows(self, batches: Sequence[Batch]) -> int:
        """Rows of the fullest packed chunk, filled up."""
        most = 0
        for batch in batches:
            assert batch.lengths is not None
            most = max(most, *(int(batch.lengths[first:last].sum()) for first, last in self._chunk_spans(batch)))
        return self._filled_up(most)

    def _filled_up(self, rows: int) -> int:
        """No more than a chunk has room for."""
        return min(-(-rows // self.granule) * self.granule, self.each * self.plan.sequence_tokens)

    def _chunk_spans(self, batch: Batch) -> list[tuple[int, int]]:
        return [(first, min(first + self.each, batch.sequences)) for first in range(0, batch.sequences, self.each)]

    def _lay_packed(
        self, batch: Batch, block: NDArray[np.int32], starts: NDArray[np.int32], *, rows: int, first_sequence: int
    ) -> RoundLayout:
        assert batch.lengths is not None
        width, room = batch.ids.shape[1], self.each * self.plan.sequence_tokens
        places = np.arange(width, dtype=np.int32)
        counts, looked_at = [], []
        for chunk, (first, last) in enumerate(self._chunk_spans(batch)):
            lengths = batch.lengths[first:last]
            there = places < lengths[:, None]
            total = int(lengths.sum())
            count = max(rows, self._filled_up(total))
            begin = chunk * room
            block[IDS, begin : begin + total] = batch.ids[first:last][there]
            if batch.documents is not None:
                lengths = np.concatenate(batch.documents[first:last])
            ends = np.cumsum(lengths)
            block[POSITIONS, begin : begin + total] = np.arange(total) - np.repeat(ends - lengths, lengths)
            if not self.classifies:
                block[LABELS, begin : begin + total] = batch.labels[first:last][there]
            if self.numbered:
                block[TOKENS, begin : begin + total] = self._numbers(first_sequence + first, there.shape)[there]
            if batch.types is not None:
                block[self._types, begin : begin + total] = batch.types[first:last][there]
            if self.compares:
                block[self._answers, begin : begin + total] = np.repeat(np.arange(lengths.size), lengths)
            block[:, begin + total : begin + count] = np.array([0, NO_LABEL, 0, 0, 0, 0, 0])[: self.kinds, None]
            if self.marked:
                block[TOKENS, begin + total : begin + count] = NO_TOKEN
            behind = lengths.size + 1
            starts[chunk, 0], starts[chunk, 1:behind] = 0, ends
            fillers = starts.shape[1] - behind
            starts[chunk, behind:] = np.minimum(total + self.plan.sequence_tokens * np.arange(1, fillers + 1), count)
            counts.append(count)
            needed = behind + -(-(count - total) // self.plan.sequence_tokens)
            usual = behind + -(-(self.granule - 1) // self.plan.sequence_tokens)
            if batch.documents is not None or needed > usual:
                # Kernels have work for every beginning: few shapes, and not many more than there are.
                usual = -(-needed // PLACES) * PLACES
            looked_at.append(min(usual, starts.shape[1]))
        if self.classifies:
            block[LABELS, : batch.sequences] = batch.labels
        return RoundLayout(
            batch.sequences,
            self.plan.sequence_tokens,
            tuple(counts),
            places=tuple(looked_at),
            typed=batch.types is not None,
        )

    def _lay_references(self, batch: Batch, references: NDArray[np.float64]) -> None:
        """Of each chunk's answers."""
        assert batch.references is not None
        references[:] = np.nan
        for chunk, (first, last) in enumerate(self._chunk_spans(batch)):
            told = np.concatenate(batch.references[first:last])
            references[chunk, : told.size] = told

    def _numbers(self, first_sequence: int, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """Tokens' numbers in the step's batch, modulo 2³²: the same whatever the sequences are filled up to."""
        sequences = np.arange(first_sequence, first_sequence + shape[0])[:, None] * self.plan.sequence_tokens
        return (sequences + np.arange(shape[1])).astype(np.int32)

    def _lay_even(
        self,
        batch: Batch,
        block: NDArray[np.int32],
        starts: NDArray[np.int32],
        lengths: NDArray[np.int32],
        *,
        first_sequence: int,
    ) -> RoundLayout:
        if self.plan.chunks_per_sequence > 1 and batch.ids.shape[1] != self.plan.sequence_tokens:
            batch = _fill_up(batch, self.plan.sequence_tokens)
        sequences, width = batch.ids.shape
        count = sequences * width
        block[IDS, :count] = batch.ids.reshape(-1)
        block[LABELS, : batch.labels.size] = batch.labels.reshape(-1)
        block[POSITIONS, :count] = np.tile(np.arange(width, dtype=np.int32), sequences)
        if self.numbered:
            numbers = self._numbers(first_sequence, (sequences, width))
            if self.marked and batch.lengths is not None:
                numbers[np.arange(width) >= batch.lengths[:, None]] = NO_TOKEN
            block[TOKENS, :count] = numbers.reshape(-1)
        if batch.types is not None:
            block[self._types, :count] = batch.types.reshape(-1)
        starts[:] = np.arange(starts.shape[1], dtype=np.int32) * width
        # Behind a causal model's sequence there is only padding, which none of its tokens sees.
        if batch.lengths is None or self.causal or int(batch.lengths.min()) == width:
            return RoundLayout(sequences, width, typed=batch.types is not None)
        lengths[:sequences] = batch.lengths
        return RoundLayout(sequences, width, padded=True, typed=batch.types is not None)

    def check(self, batch: Batch) -> None:
        """Refuse tokens that the model has no row for: kernels would read and write what lies behind the table."""
        if self.compares and batch.references is None:
            raise FlopwiseError(
                "a batch without pairs of answers",
                why="the model is trained on preferences",
                hint="rows with chosen and rejected",
            )
        if batch.documents is not None and not self.packs_all:
            raise FlopwiseError(
                "several documents in a sequence that is longer than attention's chunks",
                why="where documents begin is not brought together with where chunks do",
                hint="--no-packing, or a shorter --seq",
            )
        if batch.lengths is not None and batch.lengths.size and int(batch.lengths.min()) < 1:
            raise FlopwiseError(
                "a sequence without a token", why="there is nothing to train on", hint="leave such rows out of the data"
            )
        if batch.types is not None and not 0 <= int(batch.types.min()) <= int(batch.types.max()) < self.token_types:
            raise FlopwiseError(
                f"a token of the type {int(batch.types.max())} is none of the model's {self.token_types}",
                why="the model has no row for the second text of a pair",
                hint="data without `types`",
            )
        numbers = [batch.ids] if self.classifies else [batch.ids, batch.labels[batch.labels != NO_LABEL]]
        least = min((int(each.min()) for each in numbers if each.size), default=0)
        most = max((int(each.max()) for each in numbers if each.size), default=0)
        if least < 0 or most >= self.vocabulary:
            raise FlopwiseError(
                f"token {least if least < 0 else most:,} is none of the model's {self.vocabulary:,}",
                why="the data was made with another tokenizer than the model's",
                hint="--tokenizer with the model's own, or a model with a larger `vocab`",
            )

    # -- a round's tokens on the device -----------------------------------------------------------------------------

    def bring(self, number: int) -> None:
        """A round of those that were prepared. From pinned memory, so that nobody waits for what is under way."""
        assert self._host is not None
        self.layout = self._layouts[number]
        for target, source in zip(self._rooms, self._host, strict=True):
            target.copy_(source[number], non_blocking=True)

    def chunk(self, number: int) -> Chunk | None:
        """The tokens of a chunk; None where the micro-batch has none for it."""
        layout = self.layout
        first, count, sequence, sequences, begin = self._span(layout, number)
        if not count:
            return None
        places = layout.places[number] if layout.places else 0
        return Chunk(
            sequences,
            layout.width if self.plan.chunks_per_sequence == 1 else count,
            begin,
            self._block[POSITIONS, first : first + count],
            self._lengths[sequence : sequence + sequences] if layout.padded else None,
            self._starts[number if self.plan.chunks_per_sequence == 1 else 0][: places or None],
            packed=layout.rows is not None,
            types=self._block[self._types, first : first + count] if layout.typed else None,
        )

    def _span(self, layout: RoundLayout, number: int) -> tuple[int, int, int, int, int]:
        """Of a chunk: first row, rows, first sequence, sequences, place within the sequence."""
        plan = self.plan
        parts = plan.chunks_per_sequence
        if parts > 1:
            sequence, part = divmod(number, parts)
            begin = part * plan.chunk_tokens
            count = plan.tokens_of(number) if sequence < layout.sequences else 0
            return sequence * layout.width + begin, count, sequence, 1, begin
        sequence = number * self.each
        sequences = max(0, min(self.each, layout.sequences - sequence))
        if layout.rows is None:
            return sequence * layout.width, sequences * layout.width, sequence, max(1, sequences), 0
        count = layout.rows[number] if sequences else 0
        return number * self.each * plan.sequence_tokens, count, sequence, max(1, sequences), 0

    def tokens_of(self, number: int) -> Tensor:
        """Numbers of a chunk's tokens in the step's batch."""
        first, count, *_ = self._span(self.layout, number)
        return self._block[TOKENS, first : first + count]

    def answers(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of a chunk: each token's answer, room for what its gradient is weighed by, and the reference's answers."""
        first, count, *_ = self._span(self.layout, number)
        places = slice(first, first + count)
        return self._block[self._answers, places], self._weights[places], self.references[number]

    def chosen(self, number: int) -> Tensor | None:
        """Rows of a chunk that the head is computed for, from the chunk's first; None: all."""
        if self.layout.chosen is None:
            return None
        first, *_ = self._span(self.layout, number)
        return self._block[-1, first : first + self.layout.chosen[number]]

    def ids(self, number: int) -> Tensor:
        """Identifiers of a chunk."""
        first, count, *_ = self._span(self.layout, number)
        return self._block[IDS, first : first + count]

    def labels(self, number: int) -> Tensor:
        """A label for each token of a chunk, or for each sequence that begins in it."""
        first, count, sequence, sequences, begin = self._span(self.layout, number)
        if not self.classifies:
            return self._block[LABELS, first : first + count]
        return self._block[LABELS, sequence : sequence + (sequences if begin == 0 else 0)]


def _fill_up(batch: Batch, tokens: int) -> Batch:
    """The same sequences with padding behind, as chunks of one size want them."""
    sequences, width = batch.ids.shape
    ids = np.zeros((sequences, tokens), dtype=np.int32)
    ids[:, :width] = batch.ids
    labels = batch.labels
    if labels.ndim > 1:
        labels = np.full((sequences, tokens), NO_LABEL, dtype=np.int32)
        labels[:, :width] = batch.labels
    types = None
    if batch.types is not None:
        types = np.zeros((sequences, tokens), dtype=np.int32)
        types[:, :width] = batch.types
    lengths = batch.lengths if batch.lengths is not None else np.full(sequences, width, dtype=np.int32)
    return Batch(ids, labels, lengths, types=types)
