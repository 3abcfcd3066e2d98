"""`PreferenceData`: pairs of answers, of which one is better, and how likely the reference finds them.

sequence    pairs behind each other, as many as fit: each is two documents, the better answer first, with its prompt
score       the logarithm of how likely what is learned of an answer is: the reference's are kept beside the tokens
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import MOST_DOCUMENTS, NO_LABEL, Batch
from flopwise.engine.data.cache import Facts, Writer, open_cache
from flopwise.engine.data.corpus import Opened, describe_data, fingerprint
from flopwise.engine.data.examples import ExampleData, ExamplePieces, Numbers, open_examples, pack
from flopwise.engine.data.request import DataRequest, Tell
from flopwise.engine.data.tokenizer import Tokens, load_tokenizer

Scores = tuple[NDArray[np.float64], ...]
"""Of each sequence, those of its documents."""
Score = Callable[[Iterable[Batch]], Iterator[Scores]]
"""Scores the answers of batches with the reference."""


def open_preference_data(request: DataRequest, *, tell: Tell | None = None) -> PreferenceData:
    """Pairs of answers, from their cache where there is one."""
    tokenizer = load_tokenizer(request.tokenizer, request.vocab)
    training = open_examples(request, request.sources, tokenizer, tell)
    evaluation = open_examples(request, request.evaluation, tokenizer, tell) if request.evaluation else None
    return PreferenceData(request, tokenizer, training, evaluation)


class Pairs(ExamplePieces):
    """Pairs of a cache as far as they fit a sequence; those of which nothing could be learned are left out."""

    def __init__(self, opened: Opened, sequence_tokens: int) -> None:
        self._open(opened)
        kept: list[tuple[int, int, int]] = []
        learned: list[int] = []
        self.cut = self.nothing = 0
        lengths = np.diff(self._bounds).tolist()
        for first in range(0, len(lengths), 2):
            better, worse = (max(0, lengths[answer] - 1) for answer in (first, first + 1))
            if better + worse > sequence_tokens:
                # The longer of the two gives way to the other, as far as half of the sequence.
                most = max(sequence_tokens // 2, sequence_tokens - min(better, worse))
                better, worse = min(better, most), min(worse, most)
                self.cut += 1
            marks = [self._marks(first)[1 : better + 1], self._marks(first + 1)[1 : worse + 1]]
            if all(each.any() for each in marks) and not self._same(first, better, worse):
                kept.append((first, better, worse))
                learned.append(sum(int(each.sum()) for each in marks))
            else:
                self.nothing += 1
        found = np.array(kept, dtype=np.int64).reshape(-1, 3)
        self.owners, self._reads, self.reads = found[:, 0], found[:, 1:], found[:, 1:].sum(1)
        self.learned = np.array(learned, dtype=np.int64)
        self.references = np.full(self._reads.shape, np.nan)
        """The reference's scores of each pair."""

    def _same(self, first: int, better: int, worse: int) -> bool:
        """Whether nothing is left by which two answers differ."""
        one, other = (int(self._bounds[answer]) for answer in (first, first + 1))
        return better == worse and bool(
            np.array_equal(self.tokens[one : one + better + 1], self.tokens[other : other + worse + 1])
        )

    def answers(self, number: int) -> list[tuple[Tokens, NDArray[np.int32]]]:
        """Of both answers, the better one first, tokens that are read and what each should foretell."""
        return [self._read(int(self.owners[number]) + side, 0, int(self._reads[number, side])) for side in (0, 1)]


class PreferenceData(ExampleData):
    """Pairs of answers in sequences; `lay_out` says whether several pairs may share one."""

    _pieces: Pairs
    _judged: Pairs

    def _cut(self, opened: Opened) -> Pairs:
        return Pairs(opened, self._request.sequence_tokens)

    def _notes(self, opened: Opened, pieces: ExamplePieces) -> list[str]:
        facts, length = opened.cache.facts, self._request.sequence_tokens
        found = [f"rows with nothing to compare were left out ({facts['blank'] // 2:,})"] * bool(facts["blank"])
        if pieces.cut:
            pairs = f"{pieces.cut:,} of {facts['documents'] // 2:,} pairs"
            found.append(f"{pairs} have over {length:,} tokens, both answers and their prompts together, and were cut")
        if pieces.nothing:
            found.append(f"{pieces.nothing:,} pairs do not differ within {length:,} tokens and were left out")
        return found

    def _empty(self, opened: Opened) -> FlopwiseError:
        return FlopwiseError(
            f"there is nothing to compare in {', '.join(opened.named[:3])}",
            why=f"no pair has two answers that differ within {self._request.sequence_tokens:,} tokens, prompts counted",
            hint="a longer --seq, or rows whose answers differ",
        )

    def _share(self, pieces: ExamplePieces, chosen: Numbers) -> list[list[int]]:
        if not self.packed:
            return [[int(number)] for number in chosen]
        rows = pack(pieces.reads[chosen], self._request.sequence_tokens, MOST_DOCUMENTS // 2)
        return [[int(chosen[place]) for place in row] for row in rows]

    def describe(self) -> dict[str, Any]:
        """Plain values for the record of a run."""
        return {
            "task": "dpo",
            **describe_data(self._request, self._training, self._tokenizer),
            "pairs": self.examples,
            "sequences": self.count,
            "packed": self.packed,
            "evaluation_sources": list(self._evaluation.named) if self._evaluation is not None else None,
            "evaluation_pairs": self.evaluation_count,
            "fingerprint": fingerprint(self._request, self._training, self._evaluation, self.packed, "pairs"),
        }

    def _fill(self, pieces: ExamplePieces, rows: list[list[int]]) -> Batch:
        assert isinstance(pieces, Pairs)
        documents = [[answer for number in row for answer in pieces.answers(number)] for row in rows]
        counts = tuple(np.array([read.size for read, _ in row], dtype=np.int32) for row in documents)
        lengths = np.array([each.sum() for each in counts], dtype=np.int32)
        width = self._request.sequence_tokens if self.packed else int(lengths.max())
        ids = np.full((len(rows), width), self._tokenizer.pad, dtype=np.int32)
        labels = np.full((len(rows), width), NO_LABEL, dtype=np.int32)
        for row, (length, answers) in enumerate(zip(lengths, documents, strict=True)):
            ids[row, :length] = np.concatenate([read for read, _ in answers])
            labels[row, :length] = np.concatenate([foretold for _, foretold in answers])
        references = tuple(pieces.references[row].reshape(-1) for row in rows)
        return Batch(ids, labels, lengths, counts, references=references)

    # -- the reference --------------------------------------------------------------------------------------------

    def refer(self, score: Score, made_by: dict[str, Any], *, sequences: int, seen: int) -> str:
        """Have the pairs of the first `seen` sequences, and those that are held out, scored by the reference.

        `made_by`: what decides its scores, beside the tokens. Returns what there is to tell of it.
        """
        trained = np.unique(self._order.at(0, min(seen, self.count)))
        wanted = ((self._pieces, [self._rows[row] for row in trained.tolist()]), (self._judged, self._judged_rows))
        pairs = sum(self._refer(*each, score=score, made_by=made_by, sequences=sequences) for each in wanted)
        return f"the reference has scored {pairs:,} pairs, once" if pairs else "the reference's scores were there"

    def _refer(
        self, pairs: Pairs, rows: list[list[int]], *, score: Score, made_by: dict[str, Any], sequences: int
    ) -> int:
        """How many pairs had to be scored."""
        opened = self._training if pairs is self._pieces else self._evaluation or self._training
        numbers = np.array([number for row in rows for number in row], dtype=np.int64)
        if not numbers.size:
            return 0
        scored = [0]

        def build(writer: Writer) -> Facts:
            # Answers are scored whether a reference is known of them or not.
            groups = [rows[first : first + sequences] for first in range(0, len(rows), sequences)]
            writer.begin("scores", np.float64)
            for found in score(self._fill(pairs, group) for group in groups):
                told = np.concatenate(found)
                writer.append(told)
                scored[0] += told.size // 2
            return {}

        ingredients = {
            "kind": "references",
            "tokens": opened.cache.checksum,
            "sequence_tokens": self._request.sequence_tokens,
            "pairs": hashlib.sha256(numbers.tobytes()).hexdigest(),
            **made_by,
        }
        cache, _ = open_cache(self._request.cache_folder(), ingredients, build)
        pairs.references[numbers] = cache.arrays["scores"].reshape(-1, 2)
        return scored[0]
