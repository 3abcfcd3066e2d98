"""`StreamedData`: text that is trained on while the rest of it is still tokenized.

part    a few pieces from all over the text (`spans`): its sequences are mixed, and come before those of the next part

Which pieces make a part, and in which order its sequences come, follows from the seed and from the files alone, never
from what happens to be tokenized: a part that is not there yet is waited for. Each piece has a cache of its own, which
serves every length, seed and later training.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import show_bytes
from flopwise.engine.batch import Batch
from flopwise.engine.data.cache import Facts, TokenCache, Writer, open_cache
from flopwise.engine.data.corpus import ingredients_of, open_text, write_text
from flopwise.engine.data.known import Known
from flopwise.engine.data.language import MOST_HELD_OUT, LanguageData
from flopwise.engine.data.order import Order
from flopwise.engine.data.request import DataRequest, Tell
from flopwise.engine.data.sources import ReadingProgress, find_sources
from flopwise.engine.data.spans import Piece, digest_of, hold_out, passages_of, pieces_of, sample, spans_of
from flopwise.engine.data.tokenizer import Tokenizer, load_tokenizer

PIECE_BYTES = 2**23
"""Tokenized in seconds; of a large text there are thousands, so that any few are from all over it."""
PART_BYTES = 2**26
"""Mixed with each other: some thousand long sequences, tokenized within a minute on two cores."""
AHEAD_PARTS = 3
"""Tokenized beyond the one that is trained on, and no more: a training of some steps reads what it needs."""
MOST_OPEN = 64
"""Pieces that are mapped at once: those of a few parts."""
STREAMED_FROM_BYTES = 2**32
"""A smaller text is tokenized within a minute or two, and mixed as a whole."""
HELD_BYTES_PER_TOKEN = 8
"""Of a range that is held out: a sequence lies in it, and a little more."""
LEAST_HELD_BYTES, MOST_HELD_BYTES = 2**16, 2**24
"""Of one range, so that documents begin in it; and of all, which are tokenized before the first step."""
LEAST_RANGES = 8
"""Of a small text, so many ranges rather than long ones."""
READ_WHOLE = "since these files are not read from the middle"
MIXED = 3
"""Draws of the order within a part; those of other orders and of what is hidden are 0 to 2."""


def is_streamed(request: DataRequest) -> bool:
    """Whether the text is so large that a training begins before all of it is tokenized."""
    if not request.sources or request.tokens is not None:
        return False
    sources, _ = find_sources(request.sources, labelled=False)
    plain = all(source.times == 1 and source.form != "megatron" for source in sources)
    return plain and sum(source.path.stat().st_size for source in sources) >= STREAMED_FROM_BYTES


def open_streamed_data(request: DataRequest, *, tell: Tell | None = None) -> StreamedData:
    """Text of which the first part is tokenized, and the rest while it is trained on."""
    return StreamedData(request, load_tokenizer(request.tokenizer, request.vocab), tell)


class StreamedData:
    """Sequences of a text, part by part.

    Where no evaluation files are named, ranges at even distances are held out, whatever the seed is.
    """

    def __init__(self, request: DataRequest, tokenizer: Tokenizer, tell: Tell | None) -> None:
        self._request, self._tokenizer = request, tokenizer
        sources, notes = find_sources(request.sources, labelled=False)
        _check_plain(request, any(source.times != 1 or source.form == "megatron" for source in sources))
        self._sources = sources
        self._spans = spans = spans_of(sources, PIECE_BYTES)
        self._bytes = sum(span.size_bytes for span in spans)
        share = 0.0 if request.evaluation else request.evaluation_share
        least = min(LEAST_HELD_BYTES, int(share * self._bytes) // LEAST_RANGES)
        held = max(least, HELD_BYTES_PER_TOKEN * (request.sequence_tokens + 1))
        trained, judged = hold_out(spans, share, max(1, min(MOST_HELD_OUT, MOST_HELD_BYTES // held)), held)
        self._pieces = pieces_of(trained, PIECE_BYTES)
        self._judged: Piece = tuple(judged)
        self._known = Known(request.cache_folder())
        self._order = Order(max(1, len(self._pieces)), request.seed)
        self._starts, self._starting = [0], threading.Lock()
        """Where each part begins in the endless order of pieces, as far as it was asked for."""
        self._opened = lru_cache(maxsize=MOST_OPEN)(self._open)
        self._part = lru_cache(maxsize=2)(self._read_part)
        self._ends: list[int] = []
        """Sequences up to the end of each part, as far as they are known."""
        self._sample = sample(sources) if self._bytes else ""
        self._ahead = Ahead(self._sequences_of_part, first=1)
        self.notes: tuple[str, ...] = (*notes, *self._own_notes())
        self._open_first(tell)
        self._evaluation = open_evaluation(request, tokenizer, tell)

    def _own_notes(self) -> list[str]:
        first = sum(self._size_of(number) for number in self._numbers_of(0)) if self._pieces else 0
        told = [
            f"steps begin before all text is tokenized: it is mixed in parts, the first of {show_bytes(first)} from all"
            " over it (--no-stream-data mixes it as a whole)"
        ]
        long = {span.source.name for span in self._spans if span.source.form == "text" and span.first}
        if long:
            one = len(long) == 1
            told.append(
                f"{len(long):,} text{' is' if one else 's are'} longer than {show_bytes(PIECE_BYTES)}, and"
                f" {'is' if one else 'are'} cut there, between lines: no sequence goes over a cut"
            )
        if not self._request.evaluation and not self._judged and self._request.evaluation_share:
            why = "it is too little" if all(span.can_be_cut for piece in self._pieces for span in piece) else READ_WHOLE
            told.append(f"nothing is held out for an evaluation, {why}: --eval-data FOLDER")
        if self._tokenizer.end is None:
            told.append(f"{self._tokenizer.name} has no token for the end of a text: documents follow without one")
        return told

    def _open_first(self, tell: Tell | None) -> None:
        """Tokenize the first part, and what is held out, before anything else."""
        first = [self._pieces[number] for number in self._numbers_of(0)] if self._pieces else []
        size = sum(span.size_bytes for piece in (*first, self._judged) for span in piece)
        progress = ReadingProgress(tell, "tokenize", size)
        for piece in first:
            self._open(piece, progress)
        if not first or not self._sequences_of_part(0):
            raise FlopwiseError(
                f"there is too little text for a sequence of {self._request.sequence_tokens:,} tokens in a part of it",
                why=f"{', '.join(self._request.sources[:3])}: parts have about {show_bytes(PART_BYTES)}",
                hint="--no-stream-data, a shorter --seq, or more text",
            )
        if self._judged:
            self._open(self._judged, progress)
        self._ends.append(self._sequences_of_part(0))

    # -- pieces and parts ---------------------------------------------------------------------------------------------

    def _numbers_of(self, part: int) -> list[int]:
        """The pieces of a part: those that come next in an endless order of all, until they are large enough."""
        with self._starting:
            while len(self._starts) < part + 2:
                begin = end = self._starts[-1]
                size = 0
                while size < PART_BYTES - PIECE_BYTES // 2 and end - begin < len(self._pieces):
                    size += self._size_of(int(self._order.at(end, 1)[0]))
                    end += 1
                self._starts.append(end)
            begin, end = self._starts[part : part + 2]
        found: list[int] = self._order.at(begin, end - begin).tolist()
        return found

    def _size_of(self, number: int) -> int:
        return sum(span.size_bytes for span in self._pieces[number])

    def _open(self, piece: Piece, progress: ReadingProgress | None = None) -> TokenCache:
        digests = [digest_of(span, self._known) for span in piece]

        def build(writer: Writer) -> Facts:
            found = (
                (0, passage)
                for span, digest in zip(piece, digests, strict=True)
                for passage in passages_of(span, digest, self._request.text_column, progress)
            )
            return write_text(writer, self._tokenizer, self._ahead.unless_closed(found), 1)

        content = [span.ingredient(digest) for span, digest in zip(piece, digests, strict=True)]
        key = self._request.of_any_length()
        ingredients = ingredients_of("pieces", key, self._tokenizer, content)
        cache, _ = open_cache(self._request.cache_folder(), ingredients, build)
        return cache

    def _sequences_of_part(self, part: int) -> int:
        tokens = sum(int(self._opened(self._pieces[number]).arrays["tokens"].size) for number in self._numbers_of(part))
        return max(0, tokens - 1) // self._request.sequence_tokens

    def _read_part(self, part: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The tokens of a part, and the order of its sequences."""
        found = [self._opened(self._pieces[number]).arrays["tokens"] for number in self._numbers_of(part)]
        key = np.array([self._request.seed, part], dtype=np.uint64)
        draws = np.random.Philox(key=key, counter=np.array([0, 0, 0, MIXED], dtype=np.uint64))
        sequences = self._ends[part] - (self._ends[part - 1] if part else 0)
        return np.concatenate(found), np.argsort(draws.random_raw(sequences), kind="stable")

    def _part_with(self, position: int) -> int:
        """The part that a place of the endless order lies in; waits for parts that are not tokenized yet."""
        while self._ends[-1] <= position:
            self._ends.append(self._ends[-1] + self._ahead.take(len(self._ends)))
        part = int(np.searchsorted(self._ends, position, side="right"))
        # While this one is trained on.
        self._ahead.want(part + 1)
        return part

    # -- what a training asks -------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Training sequences of an epoch: about so many, by the first part's tokens for each byte."""
        first = sum(self._size_of(number) for number in self._numbers_of(0))
        every = sum(self._size_of(number) for number in range(len(self._pieces)))
        return max(1, round(self._ends[0] * every / max(1, first)))

    @property
    def lengths(self) -> None:
        """All sequences are as long as may be."""
        return None

    @property
    def end_token(self) -> int | None:
        """What the tokenizer ends a text with."""
        return self._tokenizer.end

    @property
    def waited_s(self) -> float:
        """How long steps have waited for text."""
        return self._ahead.waited_s

    @property
    def evaluation_count(self) -> int:
        """Sequences that are held out."""
        return self._evaluation.evaluation_count if self._evaluation is not None else int(self._held().shape[0])

    def describe(self) -> dict[str, Any]:
        """Plain values for the record of a run."""
        request = self._request
        made_of = [self._sample, self._tokenizer.ingredients(), request.text_column, request.sequence_tokens]
        made_of += [PIECE_BYTES, PART_BYTES, len(self._pieces), request.evaluation_share]
        judged = self._evaluation.describe()["fingerprint"] if self._evaluation is not None else None
        return {
            "task": "language",
            "sources": list(request.sources),
            "files": len(self._sources),
            "bytes": self._bytes,
            "tokenizer": self._tokenizer.name,
            "tokenizer_tokens": self._tokenizer.size,
            "sequence_tokens": request.sequence_tokens,
            "seed": request.seed,
            "sequences_about": self.count,
            "pieces": len(self._pieces),
            "evaluation_sources": list(request.evaluation) or None,
            "evaluation_sequences": self.evaluation_count,
            "fingerprint": hashlib.sha256(repr([*made_of, judged]).encode()).hexdigest(),
        }

    def batch(self, position: int, sequences: int) -> Batch:
        """The sequences at so many places of the endless order from `position` on; the same whenever it is asked."""
        length = self._request.sequence_tokens
        windows = np.empty((sequences, length + 1), dtype=np.int32)
        for row in range(sequences):
            part = self._part_with(position + row)
            tokens, order = self._part(part)
            first = int(order[position + row - (self._ends[part - 1] if part else 0)]) * length
            windows[row] = tokens[first : first + length + 1]
        return _shifted(windows)

    def evaluation(self, sequences: int) -> Iterator[Batch]:
        """What is held out, once, so many sequences at a time."""
        if self._evaluation is not None:
            yield from self._evaluation.evaluation(sequences)
            return
        held = self._held()
        for first in range(0, held.shape[0], sequences):
            yield _shifted(held[first : first + sequences])

    def _held(self) -> NDArray[np.int32]:
        length = self._request.sequence_tokens
        if not self._judged:
            return np.empty((0, length + 1), dtype=np.int32)
        tokens = self._opened(self._judged).arrays["tokens"]
        there = max(0, tokens.size - 1) // length
        kept = min(there, MOST_HELD_OUT)
        firsts = (np.arange(kept) * 2 + 1) * there // (2 * max(1, kept)) * length
        return np.array([tokens[first : first + length + 1] for first in firsts], dtype=np.int32).reshape(
            -1, length + 1
        )

    def close(self) -> None:
        """Tokenize no further; what is done stays for the next training."""
        self._ahead.close()


def open_evaluation(request: DataRequest, tokenizer: Tokenizer, tell: Tell | None) -> LanguageData | None:
    """What is named for an evaluation, which is tokenized whole."""
    if not request.evaluation:
        return None
    opened = open_text(request, request.evaluation, tokenizer, tell)
    return LanguageData(request, tokenizer, opened, opened)


def _check_plain(request: DataRequest, odd: bool) -> None:
    if odd or request.tokens is not None or not request.sources:
        raise FlopwiseError(
            "--stream-data is for text that is read once an epoch",
            why="weights of files and token files are not read in parts",
            hint="without it, which tokenizes everything first",
        )


def _shifted(windows: NDArray[np.int32]) -> Batch:
    return Batch(np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:]))


class _ClosedError(Exception):
    """Nobody wants the tokens any more."""


class Ahead:
    """Makes parts in a thread of its own, one after the other, a few beyond the one that was asked for last."""

    def __init__(self, make: Callable[[int], int], first: int) -> None:
        self._make, self._first = make, first
        self._changed = threading.Condition()
        self._made: dict[int, int | BaseException] = {}
        self._wanted = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self.waited_s = 0.0

    def take(self, part: int) -> int:
        """How many sequences a part has, once it is made."""
        begun = time.perf_counter()
        self.want(part)
        with self._changed:
            while part not in self._made:
                if self._closed:
                    raise RuntimeError("tokens of data that is closed")
                self._changed.wait()
            made = self._made[part]
        self.waited_s += time.perf_counter() - begun
        if isinstance(made, BaseException):
            raise made
        return made

    def want(self, part: int) -> None:
        """Have a part made, and the next ones, without waiting for them."""
        with self._changed:
            wanted = part + AHEAD_PARTS
            if wanted <= self._wanted:
                return
            self._wanted = wanted
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tokenize", daemon=True)
                atexit.register(self.close)
                self._thread.start()
            self._changed.notify_all()

    def unless_closed(self, found: Iterator[Any]) -> Iterator[Any]:
        """What is found, as long as anybody wants it."""
        for each in found:
            if self._closed:
                raise _ClosedError
            yield each

    def close(self) -> None:
        """End the thread within moments; a piece that is half done is left out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        for part in count(self._first):
            with self._changed:
                while part >= self._wanted and not self._closed:
                    self._changed.wait()
            if self._closed:
                return
            made: int | BaseException
            try:
                made = self._make(part)
            except _ClosedError:
                return
            except BaseException as error:
                # Raised where the part is asked for.
                made = error
            with self._changed:
                self._made[part] = made
                self._changed.notify_all()
            if isinstance(made, BaseException):
                return
