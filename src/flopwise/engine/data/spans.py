"""Which parts of large files are read together, where they are not read from end to end before the first step.

span    a range of a file's bytes: the lines that begin in it. Of files that are not read from their middle, all of it
piece   spans of about 8 MiB together, in the order of the files
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import BinaryIO

from flopwise.base.errors import FlopwiseError
from flopwise.engine.data.known import Known
from flopwise.engine.data.records import Passage, passages, text_passages
from flopwise.engine.data.sources import COMPRESSED, DataSource, Entry, ReadingProgress, decode_text

LONGEST_LINE = 2**28
SAMPLES, SAMPLE_BYTES = 1024, 2**12
"""Of a text that was not read yet, what tells it from others beside its files' names and sizes."""
CUT_FORMS = ("text", "jsonl")
"""Files that can be read from the middle: from the next line on."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of a file."""

    source: DataSource
    first: int
    last: int
    """The byte behind it."""

    @property
    def size_bytes(self) -> int:
        return self.last - self.first

    @property
    def can_be_cut(self) -> bool:
        return self.source.form in CUT_FORMS and self.source.path.suffix.lower() not in COMPRESSED

    def ingredient(self, digest: str) -> dict[str, object]:
        """What a cache's key is made of."""
        return {"name": self.source.name, "form": self.source.form, "range": [self.first, self.last], "sha256": digest}


Piece = tuple[ByteRange, ...]


def spans_of(sources: Iterable[DataSource], piece_bytes: int) -> list[ByteRange]:
    """All that is in the files, in ranges of at most `piece_bytes` where they can be cut."""
    found: list[ByteRange] = []
    for source in sources:
        whole = ByteRange(source, 0, source.path.stat().st_size)
        step = piece_bytes if whole.can_be_cut else max(1, whole.size_bytes)
        found += [
            replace(whole, first=first, last=min(first + step, whole.last)) for first in range(0, whole.last, step)
        ]
    return found


def hold_out(
    spans: Sequence[ByteRange], share: float, most: int, each_bytes: int
) -> tuple[list[ByteRange], list[ByteRange]]:
    """What is trained on, and ranges at even distances that are not; nothing of files that are read whole."""
    total = sum(span.size_bytes for span in spans)
    count = min(most, int(share * total / each_bytes))
    ends = list(accumulate(span.size_bytes for span in spans))
    trained: list[ByteRange] = []
    held: list[ByteRange] = []
    wanted = iter([(2 * number + 1) * total // (2 * count) for number in range(count)])
    place = next(wanted, None)
    for span, end in zip(spans, ends, strict=True):
        begin = span.first
        while place is not None and place < end:
            first = max(begin, span.first + place - (end - span.size_bytes))
            last = min(first + each_bytes, span.last)
            if span.can_be_cut and first < last:
                trained += [replace(span, first=begin, last=first)] if begin < first else []
                held.append(replace(span, first=first, last=last))
                begin = last
            place = next(wanted, None)
        trained += [replace(span, first=begin)] if begin < span.last else []
    return trained, held


def pieces_of(spans: Iterable[ByteRange], piece_bytes: int) -> list[Piece]:
    """Spans together, until they are as large as a piece."""
    found: list[Piece] = []
    together: list[ByteRange] = []
    size = 0
    for span in spans:
        if together and size + span.size_bytes > piece_bytes:
            found.append(tuple(together))
            together, size = [], 0
        together.append(span)
        size += span.size_bytes
    return [*found, tuple(together)] if together else found


def digest_of(span: ByteRange, known: Known) -> str:
    """Of what is in a span, remembered where its file is large and has not changed since."""
    if not span.can_be_cut:
        return known.digest(span.source.path, lambda: _digest_of_file(span))
    return known.digest(
        span.source.path, lambda: hashlib.sha256(_content(span)[1]).hexdigest(), f"{span.first}-{span.last}"
    )


def _digest_of_file(span: ByteRange) -> str:
    with span.source.path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sample(sources: Sequence[DataSource]) -> str:
    """A digest of the files' names and sizes and of a little of them all: they were not read yet."""
    sizes = [source.path.stat().st_size for source in sources]
    named = [(source.name, source.form, size) for source, size in zip(sources, sizes, strict=True)]
    found = hashlib.sha256(repr(named).encode())
    ends, total = list(accumulate(sizes)), sum(sizes)
    file = 0
    for number in range(SAMPLES):
        place = number * total // SAMPLES
        while place >= ends[file]:
            file += 1
        with sources[file].path.open("rb") as stream:
            stream.seek(place - (ends[file] - sizes[file]))
            found.update(stream.read(SAMPLE_BYTES))
    return found.hexdigest()


def passages_of(span: ByteRange, digest: str, text_column: str, progress: ReadingProgress | None) -> Iterator[Passage]:
    """The documents that begin in a span; a text file's span is one."""
    path = span.source.path
    if not span.can_be_cut:
        yield from passages(Entry(span.source, span.size_bytes, digest), text_column, progress)
        return
    begin, content = _content(span)
    if hashlib.sha256(content).hexdigest() != digest:
        raise FlopwiseError(
            f"{path} changed while it was read", why="its tokens would not be those of any one file", hint="try again"
        )
    try:
        yield from text_passages(span.source, decode_text(path, content, begin), text_column)
    except FlopwiseError as error:
        raise error if not span.first else error.within(f"from byte {span.first:,} on") from None
    if progress is not None:
        progress.add(span.size_bytes)


def _content(span: ByteRange) -> tuple[int, bytes]:
    """The lines that begin in a span, and where the first of them does."""
    with span.source.path.open("rb") as stream:
        if span.first:
            stream.seek(span.first - 1)
            _to_line_end(stream, span)
        begin = stream.tell()
        if begin >= span.last:
            return begin, b""
        content = stream.read(span.last - begin)
        return begin, content if content.endswith(b"\n") else content + _to_line_end(stream, span)


def _to_line_end(stream: BinaryIO, span: ByteRange) -> bytes:
    rest = stream.readline(LONGEST_LINE)
    if len(rest) == LONGEST_LINE:
        raise FlopwiseError(
            f"{span.source.path} has a line of more than {LONGEST_LINE:,} bytes",
            why="it is read from the middle, from the beginning of a line on",
            hint="--no-stream-data",
        )
    return rest
