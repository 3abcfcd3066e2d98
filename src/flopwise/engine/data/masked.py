"""`MaskedData`: texts of which some tokens are hidden, to be foretold from all around them.

piece       a document, or a part of a long one, between the marks that the tokenizer puts around a text
sequence    pieces behind each other, as many as fit: none sees another, and positions begin anew with each
hidden      a share of a sequence's tokens, marks left out; of ten eight give way to the mask, one to another of the
            tokenizer's tokens, and one stays as it is, as BERT has it. What is hidden is drawn anew whenever a
            sequence is seen, and follows from the seed and the sequence's place in the endless order alone
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import NO_LABEL, Batch
from flopwise.engine.data.corpus import Opened, describe_data, fingerprint, no_text, open_text
from flopwise.engine.data.examples import ExampleData, ExamplePieces
from flopwise.engine.data.records import first_columns
from flopwise.engine.data.request import DataRequest, Tell
from flopwise.engine.data.sources import find_sources
from flopwise.engine.data.tokenizer import BYTES, Tokenizer, load_tokenizer

MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1
"""Of what is hidden: what becomes the mask, and what becomes any other token. The rest stays."""
TRAINED, JUDGED = 1, 2
"""Draws of a training and of an evaluation; those of the order of sequences are 0."""


def open_masked_data(request: DataRequest, *, tell: Tell | None = None) -> MaskedData:
    """Texts as pieces to hide tokens of, from their cache where there is one."""
    tokenizer = load_tokenizer(request.tokenizer, request.vocab, masked=True)
    check_mask(tokenizer, whole_words=request.whole_words)
    training = open_text(request, request.sources, tokenizer, tell, documents=True)
    evaluation = open_text(request, request.evaluation, tokenizer, tell, documents=True) if request.evaluation else None
    return MaskedData(request, tokenizer, training, evaluation)


def check_mask(tokenizer: Tokenizer, *, whole_words: bool) -> None:
    """Refuse a tokenizer that has nothing to put in the place of what is hidden, or does not tell what a word is."""
    if whole_words and tokenizer.continues is None:
        raise FlopwiseError(
            f"{tokenizer.name} does not say which tokens are of one word",
            why="only WordPiece marks what goes on with a word (##)",
            hint="without --whole-words, or BERT's kind of tokenizer",
        )
    if tokenizer.mask is None:
        raise FlopwiseError(
            f"{tokenizer.name} has no token for what is hidden",
            why="neither it nor its tokenizer_config.json names a mask_token",
            hint="an encoder's tokenizer, which has [MASK] or <mask>"
            + (", or --tokenizer bytes" if tokenizer.name != BYTES else ""),
        )


class TextPieces(ExamplePieces):
    """Documents in pieces that a sequence has room for, with their marks."""

    def __init__(self, opened: Opened, tokenizer: Tokenizer, sequence_tokens: int) -> None:
        self.tokens = opened.cache.arrays["tokens"]
        front, back = tokenizer.frame
        self._front, self._back = (np.array(marks, dtype=np.int32) for marks in (front, back))
        added = len(front) + len(back)
        room = sequence_tokens - added
        if room < 1:
            raise FlopwiseError(
                f"sequences of {sequence_tokens:,} tokens have no room for a text",
                why=f"{tokenizer.name} puts {added:,} tokens around each",
                hint=f"--seq {max(16, added + 1)}",
            )
        bounds = opened.cache.arrays["bounds"]
        lengths = np.diff(bounds)
        counts = -(-lengths // room)
        self.cut, self.nothing = int((counts > 1).sum()), int((counts == 0).sum())
        document = np.repeat(np.arange(lengths.size), counts)
        begins = (np.arange(document.size) - np.repeat(np.cumsum(counts) - counts, counts)) * room
        self.owners = bounds[:-1][document] + begins
        """Each piece's first token."""
        self._sizes = np.minimum(lengths[document] - begins, room)
        self.reads = self._sizes + added

    def text(self, number: int) -> NDArray[np.int32]:
        """A piece with its marks."""
        first = int(self.owners[number])
        own = self.tokens[first : first + int(self._sizes[number])].astype(np.int32)
        return np.concatenate([self._front, own, self._back])


@dataclass(frozen=True, slots=True)
class Hiding:
    """What of a sequence is hidden, and behind what."""

    share: float
    mask: int
    special: NDArray[np.bool_]
    """Of each of the tokenizer's identifiers, whether it is a mark: those are never hidden, and replace nothing."""
    others: NDArray[np.int32]
    """What may stand in for something that is hidden: all that are no marks."""
    continues: NDArray[np.bool_] | None = None
    """Of each identifier, whether it goes on with the word before it: words are hidden whole. None: tokens are."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, share: float, *, whole_words: bool = False) -> Hiding:
        """How a tokenizer's texts are hidden."""
        assert tokenizer.mask is not None
        size = max(tokenizer.size, *tokenizer.special) + 1
        special = _among(tokenizer.special, size)
        others = np.flatnonzero(~special[: tokenizer.size]).astype(np.int32)
        continues = _among(tokenizer.continues or frozenset(), size) if whole_words else None
        return cls(share, tokenizer.mask, special, others, continues)

    def hide(self, ids: NDArray[np.int32], labels: NDArray[np.int32], draws: np.random.Philox) -> None:
        """Some tokens of a sequence are written over, and become the labels of their places."""
        open_to = np.flatnonzero(~self.special[ids])
        if not open_to.size:
            return
        # So many, not each by chance: the shortest text has something to learn, and steps are alike.
        count = max(1, round(self.share * open_to.size))
        chosen = self._choose(ids, open_to, count, draws)
        count = chosen.size
        labels[chosen] = ids[chosen]
        fate = (draws.random_raw(count) >> np.uint64(11)) * 2.0**-53
        others = self.others[draws.random_raw(count) % np.uint64(self.others.size)]
        hidden = np.where(fate < MASKED_SHARE, np.int32(self.mask), others)
        ids[chosen] = np.where(fate < MASKED_SHARE + RANDOM_SHARE, hidden, ids[chosen])

    def _choose(
        self, ids: NDArray[np.int32], open_to: NDArray[np.int64], count: int, draws: np.random.Philox
    ) -> NDArray[np.int64]:
        """So many places; of whole words as many as do not make more, but one."""
        if self.continues is None:
            wanted = np.argsort(draws.random_raw(open_to.size), kind="stable")[:count]
        else:
            # Behind a mark a word begins anew.
            begins = ~self.continues[ids[open_to]] | (np.diff(open_to, prepend=-2) > 1)
            words = np.cumsum(begins) - 1
            sizes = np.bincount(words)
            order = np.argsort(draws.random_raw(sizes.size), kind="stable")
            taken = order[: max(1, int(np.searchsorted(np.cumsum(sizes[order]), count, side="right")))]
            wanted = np.flatnonzero(_among(taken, sizes.size)[words])
        chosen: NDArray[np.int64] = open_to[wanted]
        return chosen


def _among(chosen: Iterable[int], size: int) -> NDArray[np.bool_]:
    """Of numbers below `size`, which are chosen."""
    found = np.zeros(size, dtype=np.bool_)
    found[np.fromiter(chosen, dtype=np.int64)] = True
    return found


def draws_of(kind: int, seed: int, place: int) -> np.random.Philox:
    """A generator of a sequence's own: its draws are the same whoever makes them, and in whatever order."""
    # The first word of the counter is what a generator counts by itself.
    counter = np.array([0, place, 0, kind], dtype=np.uint64)
    return np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=counter)


class MaskedData(ExampleData):
    """Texts with hidden tokens; `lay_out` says whether several may share a sequence.

    Where no evaluation files are named, pieces at even distances are held out. What is hidden of an evaluation is the
    same every time, whatever the seed is.
    """

    _pieces: TextPieces
    _judged: TextPieces

    def __init__(self, request: DataRequest, tokenizer: Tokenizer, training: Opened, evaluation: Opened | None) -> None:
        self.hiding = Hiding.of(tokenizer, request.mask_share, whole_words=request.whole_words)
        super().__init__(request, tokenizer, training, evaluation)

    def _cut(self, opened: Opened) -> TextPieces:
        if not opened.cache.facts["documents"]:
            raise no_text(opened.named)
        return TextPieces(opened, self._tokenizer, self._request.sequence_tokens)

    @property
    def loss_share(self) -> float:
        """Of the tokens, those that are hidden."""
        return self._request.mask_share

    def _notes(self, opened: Opened, pieces: ExamplePieces) -> list[str]:
        if opened is not self._training:
            return []
        of_words = ", words whole" if self._request.whole_words else ""
        told = [f"{100 * self._request.mask_share:g} % of all tokens are hidden{of_words} and foretold (--mask-share)"]
        labelled = _labelled(self._request)
        if labelled:
            told.append(f"{labelled}: labels are not learned, only texts: --task classification is for them")
        if pieces.cut:
            length = self._request.sequence_tokens
            told.append(
                f"{pieces.cut:,} of {opened.cache.facts['documents']:,} documents have more tokens than a sequence of"
                f" {length:,} has room for, and are in several pieces"
            )
        return told

    def _empty(self, opened: Opened) -> FlopwiseError:
        return no_text(opened.named)

    def describe(self) -> dict[str, Any]:
        """Plain values for the record of a run."""
        return {
            "task": "masked",
            **describe_data(self._request, self._training, self._tokenizer),
            "documents": self._training.cache.facts["documents"],
            "pieces": self.examples,
            "sequences": self.count,
            "packed": self.packed,
            "mask_share": self._request.mask_share,
            "whole_words": self._request.whole_words,
            "evaluation_sources": list(self._evaluation.named) if self._evaluation is not None else None,
            "evaluation_sequences": len(self._judged_rows),
            "fingerprint": fingerprint(
                self._request, self._training, self._evaluation, self.packed, "masked", *self._hidden_by
            ),
        }

    @property
    def _hidden_by(self) -> tuple[object, ...]:
        return self._request.mask_share, self._request.whole_words

    def batch(self, position: int, sequences: int) -> Batch:
        """The sequences at so many places of the endless order from `position` on; the same whenever it is asked."""
        shown = super().batch(position, sequences)
        return self._hide(shown, [draws_of(TRAINED, self._request.seed, position + row) for row in range(sequences)])

    def evaluation(self, sequences: int) -> Iterator[Batch]:
        """What is held out, once, so many sequences at a time."""
        place = 0
        for shown in super().evaluation(sequences):
            yield self._hide(shown, [draws_of(JUDGED, 0, place + row) for row in range(shown.sequences)])
            place += shown.sequences

    def _hide(self, shown: Batch, draws: list[np.random.Philox]) -> Batch:
        ids, labels = shown.ids.copy(), shown.labels.copy()
        assert shown.lengths is not None
        for row, (length, generator) in enumerate(zip(shown.lengths.tolist(), draws, strict=True)):
            self.hiding.hide(ids[row, :length], labels[row, :length], generator)
        return replace(shown, ids=ids, labels=labels)

    def _fill(self, pieces: ExamplePieces, rows: list[list[int]]) -> Batch:
        """Texts as they are, nothing hidden."""
        assert isinstance(pieces, TextPieces)
        documents = tuple(pieces.reads[row].astype(np.int32) for row in rows)
        lengths = np.array([each.sum() for each in documents], dtype=np.int32)
        width = self._request.sequence_tokens if self.packed else int(lengths.max())
        ids = np.full((len(rows), width), self._tokenizer.pad, dtype=np.int32)
        for row, (length, numbers) in enumerate(zip(lengths.tolist(), rows, strict=True)):
            ids[row, :length] = np.concatenate([pieces.text(number) for number in numbers])
        return Batch(ids, np.full_like(ids, NO_LABEL), lengths, documents if self.packed else None)


def _labelled(request: DataRequest) -> str | None:
    """A source whose rows have labels, which are not read here."""
    sources, _ = find_sources(request.sources, labelled=False)
    tables = (source for source in sources if source.form != "text")
    return next((source.name for source in tables if request.label_column in first_columns(source)), None)
