"""What data hands to an executor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_LABEL = -1
"""The label of a token that has no loss: padding, the last of a sequence, what was masked."""
MOST_DOCUMENTS = 64
"""Of a sequence: room for where they begin is taken in advance."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one length, the shorter ones filled up behind."""

    ids: NDArray[np.int32]
    """(sequences, tokens)."""
    labels: NDArray[np.int32]
    """(sequences, tokens): what each token should foretell, or NO_LABEL. For a classifier (sequences,): the class."""
    lengths: NDArray[np.int32] | None = None
    """(sequences,): tokens that are no padding; None: all are."""

    documents: tuple[NDArray[np.int32], ...] | None = None
    """Of each sequence, how long the documents are that lie behind each other in it: attention and positions know
    nothing of the ones before. None: each sequence is one."""
    types: NDArray[np.int32] | None = None
    """(sequences, tokens): which text of a pair each token is of; None: all are of the first."""

    references: tuple[NDArray[np.float64], ...] | None = None
    """Of each sequence, the logarithm of how likely the reference finds its documents: they are pairs of answers then,
    the better one first. None: there are no pairs."""

    @property
    def sequences(self) -> int:
        return int(self.ids.shape[0])

    @property
    def tokens(self) -> int:
        """Of all sequences together, padding left out."""
        return int(self.ids.size if self.lengths is None else self.lengths.sum())

    @property
    def with_loss(self) -> int:
        """Tokens, samples of a classifier or pairs of answers that have a loss."""
        if self.references is not None:
            return sum(each.size // 2 for each in self.references)
        return int((self.labels != NO_LABEL).sum())

    def lengths_counted(self) -> list[tuple[int, int]]:
        """(tokens, sequences or documents that have so many)."""
        lengths = self.lengths if self.documents is None else np.concatenate(self.documents)
        if lengths is None:
            return [(int(self.ids.shape[1]), self.sequences)]
        return list(zip(*(each.tolist() for each in np.unique(lengths, return_counts=True)), strict=True))

    def part(self, first: int, last: int) -> Batch:
        """Some of the sequences."""
        lengths = None if self.lengths is None else self.lengths[first:last]
        documents = None if self.documents is None else self.documents[first:last]
        references = None if self.references is None else self.references[first:last]
        types = None if self.types is None else self.types[first:last]
        return Batch(self.ids[first:last], self.labels[first:last], lengths, documents, types, references)

    def micro_batches(self, sequences: int) -> Iterator[Batch]:
        """In pieces of at most so many sequences: 48 in elevens is four of 11 and one of 4."""
        for first in range(0, self.sequences, sequences):
            yield self.part(first, min(first + sequences, self.sequences))
