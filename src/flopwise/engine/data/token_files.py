"""Files of token identifiers, made by others: NumPy's arrays, and bare numbers as nanoGPT writes them."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.engine.data.cache import Facts, Writer
from flopwise.engine.data.request import TokenNumbers
from flopwise.engine.data.sources import DataSource, Entry, ReadingProgress, index_of, unreadable
from flopwise.engine.data.tokenizer import Tokenizer, token_type
from flopwise.engine.data.used import Used

PIECE_TOKENS = 2**20


def write_tokens(
    writer: Writer, tokenizer: Tokenizer, entries: Iterable[Entry], numbers: TokenNumbers, progress: ReadingProgress
) -> Facts:
    """The identifiers of all files, one after the other, as they are."""
    used = Used(tokenizer.size)
    files = 0
    of_files: list[int] = []
    writer.begin("tokens", token_type(tokenizer.size))
    for entry in entries:
        found = _read(entry, numbers)
        for piece in _pieces(found):
            _check_known(piece, entry, tokenizer)
            writer.append(piece)
            used.add(piece)
        progress.add(entry.size_bytes)
        files += bool(found.size)
        of_files.append(int(found.size))
    return {"documents": files, "vocabulary_used": used.count, "of_files": of_files}


MEGATRON_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, the numbers' kind, sequences, and bounds of documents."""
MEGATRON_KINDS: dict[int, type[np.generic]] = {
    **{1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64},
    8: np.uint16,
}


def check_indexed(sources: Collection[DataSource]) -> bool:
    """Whether these are Megatron's files; refused where only some are."""
    indexed = [source for source in sources if source.form == "megatron"]
    if indexed and len(indexed) < len(sources):
        other = next(source for source in sources if source.form != "megatron")
        raise FlopwiseError(
            f"{indexed[0].path} has an index of Megatron's, and {other.path} has none",
            why="tokens of one kind follow each other in a training",
            hint="files of one kind",
        )
    return bool(indexed)


def write_megatron(writer: Writer, tokenizer: Tokenizer, entries: Iterable[Entry], progress: ReadingProgress) -> Facts:
    """The documents of Megatron's files, one after the other, each with the end of a text behind it."""
    used = Used(tokenizer.size)
    kind = token_type(tokenizer.size)
    documents, of_files = 0, []
    writer.begin("tokens", kind)
    for entry in entries:
        written = 0
        for document in _documents(entry):
            _check_known(document, entry, tokenizer)
            ends = tokenizer.end is None or (document.size and document[-1] == tokenizer.end)
            pieces = [document] if ends else [document, np.array([tokenizer.end])]
            for piece in pieces:
                writer.append(piece)
                used.add(piece.astype(kind))
                written += piece.size
            documents += bool(document.size)
        progress.add(entry.size_bytes)
        of_files.append(written)
    return {"documents": documents, "vocabulary_used": used.count, "of_files": of_files}


def _documents(entry: Entry) -> Iterator[NDArray[Any]]:
    """A document is some sequences that lie behind each other."""
    path = entry.source.path
    index = index_of(path)
    assert index is not None
    try:
        content = np.fromfile(index, dtype=np.uint8)
        _, _, code, sequences, bounds = MEGATRON_HEADER.unpack(content[: MEGATRON_HEADER.size].tobytes())
        numbers = np.dtype(MEGATRON_KINDS[code])
        rest = content[MEGATRON_HEADER.size :].tobytes()
        lengths = np.frombuffer(rest, "<i4", sequences)
        places = np.frombuffer(rest, "<i8", sequences, 4 * sequences)
        edges = np.frombuffer(rest, "<i8", bounds, 12 * sequences)
        tokens = np.memmap(path, dtype=numbers.newbyteorder("<"), mode="r")
        begins = places // numbers.itemsize
        if (lengths < 0).any() or (begins < 0).any() or (begins + lengths > tokens.size).any():
            raise ValueError("it points beyond the file of tokens")
        if not bounds or edges[0] or edges[-1] != sequences or (np.diff(edges) < 0).any():
            raise ValueError("its documents are not in order")
    except (KeyError, ValueError, struct.error, OSError) as error:
        raise FlopwiseError(
            f"{index} is no index of Megatron's that can be read", why=str(error)[:200], hint="make it again"
        ) from None
    for first, last in pairwise(edges.tolist()):
        parts = [tokens[begins[each] : begins[each] + lengths[each]] for each in range(first, last)]
        yield np.concatenate(parts) if parts else tokens[:0]


def _check_known(piece: NDArray[Any], entry: Entry, tokenizer: Tokenizer) -> None:
    """Refuse identifiers that the tokenizer does not have."""
    if not piece.size:
        return
    least, most = int(piece.min()), int(piece.max())
    if least < 0 or most >= tokenizer.size:
        raise FlopwiseError(
            f"{entry.source.path}: {least if least < 0 else most:,} is no token of {tokenizer.name}",
            why=f"it knows {tokenizer.size:,}; the file was made with another one, or holds other numbers",
            hint="--tokenizer and --data-format with those that the file was made with",
        )


def _pieces(found: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for first in range(0, found.size, PIECE_TOKENS):
        yield np.asarray(found[first : first + PIECE_TOKENS])


def _read(entry: Entry, numbers: TokenNumbers) -> NDArray[Any]:
    path = entry.source.path
    try:
        if path.suffix.lower() == ".npy":
            found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            found = np.memmap(path, dtype=np.dtype(numbers).newbyteorder("<"), mode="r")
    except OSError as error:
        raise unreadable(error, path) from None
    except ValueError as error:
        raise FlopwiseError(
            f"{path} holds no tokens of the format tokens-{numbers}",
            why=str(error)[:200],
            hint="--data-format tokens-uint16 | tokens-uint32, as the file was written",
        ) from None
    if found.ndim != 1 or found.dtype.kind not in "ui":
        raise FlopwiseError(
            f"{path} holds no tokens",
            why=f"it is an array of {found.ndim} dimensions of {found.dtype}; tokens are whole numbers in a row",
            hint="an array of one dimension, `tokens.astype(numpy.uint32).reshape(-1)`",
        )
    return found
