"""`LanguageData`: text packed into sequences, each token's label the one behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import Batch
from flopwise.engine.data.corpus import Opened, describe_data, fingerprint, no_text, open_text
from flopwise.engine.data.order import Order
from flopwise.engine.data.request import DataRequest, Tell
from flopwise.engine.data.tokenizer import Tokenizer, load_tokenizer

MOST_HELD_OUT = 64
"""Sequences: enough to tell, and soon evaluated. What `--eval-data` names is evaluated whole."""


def open_language_data(request: DataRequest, *, tell: Tell | None = None) -> LanguageData:
    """Text as packed sequences, from its cache where there is one.

    `tell` hears of the progress: what is done, bytes so far, and of how many.
    """
    tokenizer = load_tokenizer(request.tokenizer, request.vocab)
    training = open_text(request, request.sources, tokenizer, tell)
    evaluation = open_text(request, request.evaluation, tokenizer, tell) if request.evaluation else None
    return LanguageData(request, tokenizer, training, evaluation)


class LanguageData:
    """Sequences of a text.

    Sequence i is the tokens from i × `sequence_tokens` on; its last token's label is the first token of the sequence
    behind it. Where no evaluation files are named, sequences at even distances are held out, whatever the seed is.
    """

    def __init__(self, request: DataRequest, tokenizer: Tokenizer, training: Opened, evaluation: Opened | None) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._training = training
        self._evaluation = evaluation
        notes = [*training.notes, *(evaluation.notes if evaluation is not None else ())]
        count = _sequences(training, request.sequence_tokens)
        if evaluation is not None:
            self._trained = np.arange(count)
            self._held_out = np.arange(_sequences(evaluation, request.sequence_tokens))
            if evaluation.cache.checksum == training.cache.checksum:
                notes.append("the evaluation has the same text as the training")
        else:
            held = _hold_out(count, request.evaluation_share)
            if not held.size and request.evaluation_share:
                notes.append("the text is a single sequence: nothing is held out for an evaluation")
            self._held_out = held
            self._trained = np.setdiff1d(np.arange(count), held)
        if tokenizer.end is None and training.cache.facts["documents"] > 1:
            notes.append(f"{tokenizer.name} has no token for the end of a text: documents follow without one")
        begins = np.arange(count, dtype=np.int64) * request.sequence_tokens
        self._trained = training.repeat(self._trained, begins, request.seed)
        self._order = Order(self._trained.size, request.seed)
        self.notes: tuple[str, ...] = tuple(notes)

    @property
    def count(self) -> int:
        """Training sequences of an epoch."""
        return self._order.count

    @property
    def lengths(self) -> None:
        """All sequences are as long as may be."""
        return None

    @property
    def end_token(self) -> int | None:
        """What the tokenizer ends a text with."""
        return self._tokenizer.end

    @property
    def evaluation_count(self) -> int:
        """Sequences that are held out."""
        return int(self._held_out.size)

    def describe(self) -> dict[str, Any]:
        """Plain values for the record of a run."""
        return {
            "task": "language",
            **describe_data(self._request, self._training, self._tokenizer),
            "documents": self._training.cache.facts["documents"],
            "sequences": self.count,
            "evaluation_sources": list(self._evaluation.named) if self._evaluation is not None else None,
            "evaluation_sequences": self.evaluation_count,
            "fingerprint": fingerprint(self._request, self._training, self._evaluation),
        }

    def batch(self, position: int, sequences: int) -> Batch:
        """The sequences at so many places of the endless order from `position` on; the same whenever it is asked."""
        return self._windows(self._training, self._trained[self._order.at(position, sequences)])

    def evaluation(self, sequences: int) -> Iterator[Batch]:
        """What is held out, once, so many sequences at a time."""
        opened = self._evaluation if self._evaluation is not None else self._training
        for first in range(0, self._held_out.size, sequences):
            yield self._windows(opened, self._held_out[first : first + sequences])

    def _windows(self, opened: Opened, chosen: NDArray[np.int64]) -> Batch:
        tokens = opened.cache.arrays["tokens"]
        length = self._request.sequence_tokens
        windows = np.empty((chosen.size, length + 1), dtype=np.int32)
        for row, first in zip(windows, chosen * length, strict=True):
            row[:] = tokens[first : first + length + 1]
        return Batch(np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:]))


def _sequences(opened: Opened, length: int) -> int:
    tokens = int(opened.cache.arrays["tokens"].size)
    if not opened.cache.facts["documents"]:
        raise no_text(opened.named)
    if tokens <= length:
        shorter = f"sequences of at most {tokens - 1:,} tokens, or more text" if tokens > 1 else "more text"
        raise FlopwiseError(
            f"there is too little text for one sequence of {length:,} tokens",
            why=f"{', '.join(opened.named[:3])}: {tokens:,} tokens; a sequence needs one more than its length",
            hint=shorter,
        )
    return (tokens - 1) // length


def _hold_out(count: int, share: float) -> NDArray[np.int64]:
    """Sequences at even distances: every source has some, and runs with other seeds are judged by the same."""
    held = min(max(1, round(count * share)), MOST_HELD_OUT, count - 1) if share else 0
    return (np.arange(held) * 2 + 1) * count // (2 * max(1, held))
