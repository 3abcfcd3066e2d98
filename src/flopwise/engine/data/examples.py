"""`ExampleData`: conversations, prompts and other rows of which a part is learned, packed into sequences.

example     tokens, and which of them are learned; one that is longer than a sequence is cut
sequence    examples behind each other, as many as fit: none sees another, and positions begin anew with each
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import MOST_DOCUMENTS, NO_LABEL, Batch
from flopwise.engine.data.cache import Facts, Writer, open_cache
from flopwise.engine.data.corpus import GROUP_TEXTS, Opened, describe_data, fingerprint, ingredients_of
from flopwise.engine.data.order import Order
from flopwise.engine.data.records import check_row, first_columns, table_rows
from flopwise.engine.data.request import DataRequest, Tell
from flopwise.engine.data.rows import (
    COLUMNS,
    Completion,
    Conversation,
    Identifiers,
    Row,
    Whole,
    check_pairs,
    kind_of,
    read_pair,
    read_row,
)
from flopwise.engine.data.sources import TOKEN_FORMS, DataSource, Entry, ReadingProgress, find_sources, survey
from flopwise.engine.data.tokenizer import BYTES, Tokenizer, Tokens, load_tokenizer, token_type
from flopwise.engine.data.used import Used
from flopwise.work.lengths import Lengths, count_lengths

MOST_HELD_OUT = 256
"""Examples: they are shorter than sequences of text are."""
Numbers = NDArray[np.int64]
Marked = tuple[Tokens, NDArray[np.bool_]]
"""Tokens, and which of them are learned."""


def kind_of_source(source: DataSource, text_column: str) -> str:
    """What the rows of a file are; `text` also where it is no table."""
    if source.form in ("text", *TOKEN_FORMS):
        return "text"
    return kind_of(first_columns(source), text_column, named=text_column != "text")


def holds_examples(request: DataRequest) -> bool:
    """Whether any of the sources has rows of which a part is learned."""
    sources, _ = find_sources(
        (*request.sources, *request.evaluation), labelled=False, tokens=request.tokens is not None
    )
    return any(kind_of_source(source, request.text_column) != "text" for source in sources)


def check_template(kind: str, tokenizer: Tokenizer, where: str) -> None:
    """Refuse conversations where nothing says how they are written."""
    if kind in ("messages", "conversations") and tokenizer.template is None:
        raise FlopwiseError(
            f"{where} holds conversations, and {tokenizer.name} has no chat template",
            why="how a model reads a conversation is told by its tokenizer_config.json or its chat_template.jinja",
            hint="--tokenizer with the folder of a model that chats"
            if tokenizer.name == BYTES
            else "the files of an instructed model beside tokenizer.json, or rows of prompt and completion",
        )


def open_example_data(request: DataRequest, *, tell: Tell | None = None) -> ExampleData:
    """Rows as examples, from their cache where there is one."""
    tokenizer = load_tokenizer(request.tokenizer, request.vocab)
    training = open_examples(request, request.sources, tokenizer, tell)
    evaluation = open_examples(request, request.evaluation, tokenizer, tell) if request.evaluation else None
    return ExampleData(request, tokenizer, training, evaluation)


def open_examples(request: DataRequest, named: tuple[str, ...], tokenizer: Tokenizer, tell: Tell | None) -> Opened:
    """Rows as tokens and marks of what is learned; of pairs the chosen answer, then the rejected one."""
    sources, notes = find_sources(named, labelled=False)
    tables = [source for source in sources if source.form != "text"]
    left_out = [source.name for source in sources if source.form == "text"]
    if left_out:
        more = f" and {len(left_out) - 1:,} more" if len(left_out) > 1 else ""
        notes = (*notes, f"{left_out[0]}{more}: plain text is left out beside rows of examples")
    beside = [
        source.name
        for source in tables
        if request.text_column in first_columns(source) and kind_of_source(source, request.text_column) != "text"
    ]
    if beside:
        kind = kind_of_source(next(source for source in tables if source.name == beside[0]), request.text_column)
        read = " and ".join(COLUMNS[kind][0])  # type: ignore[index]
        notes = (*notes, f"{beside[0]}: {read} are read, not {request.text_column} beside them")
    entries = survey(tables, tell, request.cache_folder())
    size = sum(entry.size_bytes for entry in entries)

    def build(writer: Writer) -> Facts:
        progress = ReadingProgress(tell, "tokenize", size)
        found = (
            (number, *row) for number, entry in enumerate(entries) for row in _rows(entry, request, tokenizer, progress)
        )
        return _write(writer, tokenizer, found, answers=request.train_on == "answers", files=len(entries))

    # Examples are kept whole: one cache serves sequences of every length.
    key = request.of_any_length()
    content = [entry.ingredient() for entry in entries]
    ingredients = ingredients_of("pairs" if request.pairs else "examples", key, tokenizer, content)
    cache, damage = open_cache(request.cache_folder(), ingredients | {"train_on": request.train_on}, build)
    times = tuple(entry.source.times for entry in entries)
    return Opened(cache, named, len(entries), size, (*notes, *damage), times)


def _rows(
    entry: Entry, request: DataRequest, tokenizer: Tokenizer, progress: ReadingProgress
) -> Iterator[tuple[str, Row | None]]:
    """(place, example) of every row of a file; None: it is blank."""
    path = entry.source.path
    if request.pairs:
        yield from _pairs(entry, progress)
        return
    kind = kind_of_source(entry.source, request.text_column)
    check_template(kind, tokenizer, str(path))
    needed, optional = ((request.text_column,), ()) if kind == "text" else COLUMNS[kind]  # type: ignore[index]
    for line, row in table_rows(entry.source, progress, entry):
        check_row(path, line, row, needed)
        values = {name: row.get(name) for name in (*needed, *optional)}
        if kind == "text":
            values = {"text": row[request.text_column]}
        try:
            yield f"{path}, line {line}", read_row(kind, values, has_template=tokenizer.template is not None)  # type: ignore[arg-type]
        except ValueError as error:
            raise no_example(path, line, error) from None


def no_example(path: Path, line: int, error: ValueError) -> FlopwiseError:
    """For a row that says nothing that could be learned."""
    return FlopwiseError(f"{path}, line {line} is no example", why=str(error), hint="correct the line, or leave it out")


def _pairs(entry: Entry, progress: ReadingProgress) -> Iterator[tuple[str, Row | None]]:
    """The same of pairs: two examples for every row."""
    path = entry.source.path
    check_pairs(first_columns(entry.source))
    needed, optional = COLUMNS["pairs"]
    for line, row in table_rows(entry.source, progress, entry):
        check_row(path, line, row, needed)
        try:
            pair = read_pair({name: row.get(name) for name in (*needed, *optional)})
        except ValueError as error:
            raise no_example(path, line, error) from None
        for each in pair or (None, None):
            yield f"{path}, line {line}", each


# -- tokens -----------------------------------------------------------------------------------------------------------


def _write(
    writer: Writer, tokenizer: Tokenizer, found: Iterable[tuple[int, str, Row | None]], *, answers: bool, files: int
) -> Facts:
    """`found`: number of the file, place and example."""
    used = Used(tokenizer.size)
    bounds, learned, blank, of_files = [0], [], 0, [0] * files
    writer.begin("tokens", token_type(tokenizer.size))
    rows = iter(found)
    while group := list(islice(rows, GROUP_TEXTS)):
        there = [(place, row) for _, place, row in group if row is not None]
        for number, _, row in group:
            of_files[number] += row is not None
        blank += len(group) - len(there)
        for (place, _), (tokens, marks) in zip(there, _encode(there, tokenizer, answers=answers), strict=True):
            _check_tokens(tokens, tokenizer, place)
            writer.append(tokens)
            used.add(tokens)
            bounds.append(bounds[-1] + tokens.size)
            learned.append(np.packbits(marks))
    writer.begin("bounds", np.int64)
    writer.append(np.array(bounds, dtype=np.int64))
    # Eight marks a byte; those of each example begin with a new one.
    writer.begin("learned", np.uint8)
    for eights in learned:
        writer.append(eights)
    return {"documents": len(bounds) - 1, "blank": blank, "of_files": of_files, "vocabulary_used": used.count}


def _check_tokens(tokens: Tokens, tokenizer: Tokenizer, place: str) -> None:
    if tokens.size and int(tokens.max()) >= tokenizer.size:
        raise FlopwiseError(
            f"{place}: token {int(tokens.max()):,} is none of the tokenizer's {tokenizer.size:,}",
            why="its input_ids were made with another tokenizer",
            hint="--tokenizer with the one that made them",
        )


def _encode(rows: list[tuple[str, Row]], tokenizer: Tokenizer, *, answers: bool) -> Iterator[Marked]:
    """Examples as tokens, in order; texts of a kind go to the tokenizer together."""
    told = [_written(place, row, tokenizer, answers=answers) for place, row in rows if isinstance(row, Conversation)]
    chats = iter(list(zip(told, tokenizer.placed([text for text, _ in told]) if told else [], strict=True)))
    texts = [part for _, row in rows for part in _texts(row)]
    plain = iter(tokenizer.documents(texts) if texts else [])
    begin = np.array(tokenizer.begin, dtype=token_type(tokenizer.size))
    end = np.array([] if tokenizer.end is None else [tokenizer.end], dtype=begin.dtype)
    for place, row in rows:
        if isinstance(row, Conversation):
            (text, spans), (tokens, characters) = next(chats)
            yield tokens, _mark(text, spans, characters, place) if answers else np.ones(tokens.size, dtype=np.bool_)
        elif isinstance(row, Identifiers):
            yield np.array(row.tokens, dtype=np.int64), np.array(row.learned) | (not answers)
        else:
            prompt = np.concatenate([begin, next(plain)]) if isinstance(row, Completion) else begin
            rest = np.concatenate([next(plain), end])
            given = prompt.size if answers and isinstance(row, Completion) else 0
            yield np.concatenate([prompt, rest]), np.arange(prompt.size + rest.size) >= given


def _texts(row: Row) -> tuple[str, ...]:
    """What of an example the tokenizer is given in parts: a completion follows its prompt as when it is generated."""
    if isinstance(row, Completion):
        return row.prompt, row.completion
    return (row.text,) if isinstance(row, Whole) else ()


def _written(
    place: str, row: Conversation, tokenizer: Tokenizer, *, answers: bool
) -> tuple[str, list[tuple[int, int]]]:
    check_template("messages", tokenizer, place)
    assert tokenizer.template is not None
    try:
        if not answers:
            return tokenizer.template.render(row.messages, tools=row.tools), []
        return tokenizer.template.answers(row.messages, tools=row.tools, first=row.first)
    except FlopwiseError as error:
        raise error.within(place) from None


def _mark(text: str, spans: list[tuple[int, int]], characters: Numbers, place: str) -> NDArray[np.bool_]:
    """Which tokens lie in what is learned; a token that lies in both cannot be told."""
    inside = np.zeros(len(text) + 1, dtype=np.int64)
    for first, last in spans:
        inside[first + 1 : last + 1] = 1
    inside = np.cumsum(inside)
    firsts, lasts = characters[:, 0], characters[:, 1]
    count, width = inside[lasts] - inside[firsts], lasts - firsts
    both = np.flatnonzero((count > 0) & (count < width))
    if both.size:
        first, last = characters[both[0]].tolist()
        raise FlopwiseError(
            f"{place}: which tokens are learned cannot be told",
            why=f"one token holds {text[first:last]!r}, a part of which is said by the assistant",
            hint="--train-on all, or a chat template with a special token between the two",
        )
    marks = (count > 0) & (width > 0)
    # Some bytes of a character have no place of their own: they are learned with what is before them.
    for empty in np.flatnonzero(width == 0):
        marks[empty] = empty > 0 and marks[empty - 1]
    return marks


# -- examples → sequences ---------------------------------------------------------------------------------------------


class ExamplePieces:
    """Examples of a cache as far as sequences of so many tokens reach, those without anything to learn left out.

    Of a piece all tokens but the last are read, and all but the first may be foretold.
    """

    def __init__(self, opened: Opened, sequence_tokens: int) -> None:
        self._open(opened)
        lengths = np.diff(self._bounds)
        firsts: list[int] = []
        reads: list[int] = []
        owners: list[int] = []
        learned: list[int] = []
        self.cut = self.nothing = 0
        for example, length in enumerate(lengths.tolist()):
            marks = self._marks(example)
            split = bool(marks.all()) and length - 1 > sequence_tokens
            self.cut += not split and length - 1 > sequence_tokens
            before = len(firsts)
            for begin in range(0, length - 1, sequence_tokens) if split else [0]:
                read = min(length - 1 - begin, sequence_tokens)
                count = int(marks[begin + 1 : begin + read + 1].sum()) if read > 0 else 0
                if count:
                    learned.append(count)
                    firsts.append(begin)
                    reads.append(read)
                    owners.append(example)
            self.nothing += len(firsts) == before
        self.learned = np.array(learned, dtype=np.int64)
        self._firsts, self.reads, self.owners = (np.array(each, dtype=np.int64) for each in (firsts, reads, owners))

    def _open(self, opened: Opened) -> None:
        arrays = opened.cache.arrays
        self.tokens, self._bounds, self._bits = arrays["tokens"], arrays["bounds"], arrays["learned"]
        self._first_bytes = np.concatenate([[0], np.cumsum(-(-np.diff(self._bounds) // 8))])

    def _marks(self, example: int) -> NDArray[np.bool_]:
        length = int(self._bounds[example + 1] - self._bounds[example])
        begin, end = self._first_bytes[example : example + 2].tolist()
        return np.unpackbits(self._bits[begin:end], count=length).astype(np.bool_)

    def piece(self, number: int) -> tuple[Tokens, NDArray[np.int32]]:
        """Tokens that are read, and what each should foretell."""
        return self._read(int(self.owners[number]), int(self._firsts[number]), int(self.reads[number]))

    def _read(self, example: int, first: int, read: int) -> tuple[Tokens, NDArray[np.int32]]:
        begin = int(self._bounds[example]) + first
        tokens = self.tokens[begin : begin + read + 1]
        marks = self._marks(example)[first + 1 : first + read + 1]
        return tokens[:-1], np.where(marks, tokens[1:].astype(np.int32), np.int32(NO_LABEL))


def pack(lengths: Numbers, room: int, most: int = MOST_DOCUMENTS) -> list[list[int]]:
    """Which of them share a sequence, `most` at most: the longest first, each where it leaves the least room."""
    rows: list[list[int]] = []
    left: list[int] = []
    """Room that some row has left, ascending."""
    waiting: dict[int, list[int]] = {}
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        place = bisect_left(left, length)
        if place == len(left):
            row, rest = len(rows), room - length
            rows.append([number])
        else:
            row = waiting[left[place]].pop()
            rest = left[place] - length
            if not waiting[left[place]]:
                del waiting[left[place]]
                left.pop(place)
            rows[row].append(number)
        if rest and len(rows[row]) < most:
            if rest not in waiting:
                insort(left, rest)
            waiting.setdefault(rest, []).append(row)
    return rows


class ExampleData:
    """Examples in sequences; `lay_out` says whether several may share one.

    Where no evaluation files are named, examples at even distances are held out.
    """

    def __init__(self, request: DataRequest, tokenizer: Tokenizer, training: Opened, evaluation: Opened | None) -> None:
        self._request, self._tokenizer, self._training, self._evaluation = request, tokenizer, training, evaluation
        notes = [*training.notes, *(evaluation.notes if evaluation is not None else ())]
        self._pieces = self._cut(training)
        notes += self._notes(training, self._pieces)
        count = self._pieces.reads.size
        if evaluation is not None:
            self._judged = self._cut(evaluation)
            self._held_out, trained = np.arange(self._judged.reads.size), np.arange(count)
            if not self._held_out.size:
                raise self._empty(evaluation)
        else:
            held = min(max(1, round(count * request.evaluation_share)), MOST_HELD_OUT, max(0, count - 1))
            held = held if request.evaluation_share else 0
            self._judged = self._pieces
            self._held_out = (np.arange(held) * 2 + 1) * count // (2 * max(1, held))
            trained = np.setdiff1d(np.arange(count), self._held_out)
        if not count:
            raise self._empty(training)
        # As mixed as they may be: equal lengths are packed in an order of the seed's.
        trained = training.repeat(trained, self._pieces.owners, request.seed)
        self._trained = trained[Order(trained.size, request.seed).at(0, trained.size)]
        self.notes: tuple[str, ...] = tuple(notes)
        self.lay_out(packed=True)

    @property
    def loss_share(self) -> float:
        """Of the tokens that are trained on, those that are learned."""
        return float(self._pieces.learned[self._trained].sum() / self._pieces.reads[self._trained].sum())

    def _cut(self, opened: Opened) -> ExamplePieces:
        return ExamplePieces(opened, self._request.sequence_tokens)

    def lay_out(self, *, packed: bool) -> None:
        """Several examples a sequence, or one."""
        self.packed = packed
        self._rows = self._share(self._pieces, self._trained)
        self._judged_rows = self._share(self._judged, self._held_out)
        self._order = Order(len(self._rows), self._request.seed)

    def _share(self, pieces: ExamplePieces, chosen: Numbers) -> list[list[int]]:
        if not self.packed:
            return [[int(number)] for number in chosen]
        rows = pack(pieces.reads[chosen], self._request.sequence_tokens)
        return [[int(chosen[place]) for place in row] for row in rows]

    def _notes(self, opened: Opened, pieces: ExamplePieces) -> list[str]:
        facts, length = opened.cache.facts, self._request.sequence_tokens
        answers = self._request.train_on == "answers"
        share = f"{100 * pieces.learned.sum() / max(1, pieces.reads.sum()):.0f} % of the tokens"
        only = f"only answers are learned, {share} (--train-on all for every token)"
        told = [only if answers else "every token is learned"]
        told += [f"rows without anything to learn were left out ({facts['blank']:,})"] * bool(facts["blank"])
        if pieces.cut:
            told.append(
                f"{pieces.cut:,} of {facts['documents']:,} examples are longer than {length:,} tokens and were cut"
            )
        if pieces.nothing:
            told.append(f"{pieces.nothing:,} examples have no answer within {length:,} tokens and were left out")
        return told

    def _empty(self, opened: Opened) -> FlopwiseError:
        return FlopwiseError(
            f"there is nothing to learn in {', '.join(opened.named[:3])}",
            why=f"no example has an answer within {self._request.sequence_tokens:,} tokens",
            hint="a longer --seq, --train-on all, or rows with answers",
        )

    @property
    def count(self) -> int:
        """Training sequences of an epoch."""
        return self._order.count

    @property
    def examples(self) -> int:
        """Training examples of an epoch."""
        return int(self._trained.size)

    @property
    def evaluation_count(self) -> int:
        """Examples that are held out."""
        return int(self._held_out.size)

    @property
    def end_token(self) -> int | None:
        """What the tokenizer ends a text with."""
        return self._tokenizer.end

    @property
    def lengths(self) -> Lengths | None:
        """Of training sequences, padding left out; None: all are as long as may be."""
        lengths = [int(self._pieces.reads[row].sum()) for row in self._rows]
        return None if min(lengths) == self._request.sequence_tokens else count_lengths(lengths)

    def describe(self) -> dict[str, Any]:
        """Plain values for the record of a run."""
        return {
            "task": "language",
            **describe_data(self._request, self._training, self._tokenizer),
            "documents": self._training.cache.facts["documents"],
            "examples": self.examples,
            "sequences": self.count,
            "packed": self.packed,
            "train_on": self._request.train_on,
            "evaluation_sources": list(self._evaluation.named) if self._evaluation is not None else None,
            "evaluation_sequences": len(self._judged_rows),
            "fingerprint": fingerprint(self._request, self._training, self._evaluation, self.packed),
        }

    def batch(self, position: int, sequences: int) -> Batch:
        """The sequences at so many places of the endless order from `position` on; the same whenever it is asked."""
        return self._fill(self._pieces, [self._rows[row] for row in self._order.at(position, sequences).tolist()])

    def evaluation(self, sequences: int) -> Iterator[Batch]:
        """What is held out, once, so many sequences at a time."""
        for first in range(0, len(self._judged_rows), sequences):
            yield self._fill(self._judged, self._judged_rows[first : first + sequences])

    def _fill(self, pieces: ExamplePieces, rows: list[list[int]]) -> Batch:
        documents = tuple(pieces.reads[row].astype(np.int32) for row in rows)
        lengths = np.array([each.sum() for each in documents], dtype=np.int32)
        width = self._request.sequence_tokens if self.packed else int(lengths.max())
        ids = np.full((len(rows), width), self._tokenizer.pad, dtype=np.int32)
        labels = np.full((len(rows), width), NO_LABEL, dtype=np.int32)
        for row, numbers in enumerate(rows):
            first = 0
            for number in numbers:
                read, foretold = pieces.piece(number)
                ids[row, first : first + read.size], labels[row, first : first + read.size] = read, foretold
                first += read.size
        return Batch(ids, labels, lengths, documents if self.packed else None)
