"""Files of token identifiers, made by others: NumPy's arrays, and bare numbers as nanoGPT writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.engine.data.cache import Facts, Writer
from flopwise.engine.data.request import TokenNumbers
from flopwise.engine.data.sources import Entry, ReadingProgress, unreadable
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
            least, most = int(piece.min()), int(piece.max())
            if least < 0 or most >= tokenizer.size:
                raise FlopwiseError(
                    f"{entry.source.path}: {least if least < 0 else most:,} is no token of {tokenizer.name}",
                    why=f"it knows {tokenizer.size:,}; the file was made with another one, or holds other numbers",
                    hint="--tokenizer and --data-format with those that the file was made with",
                )
            writer.append(piece)
            used.add(piece)
        progress.add(entry.size_bytes)
        files += bool(found.size)
        of_files.append(int(found.size))
    return {"documents": files, "vocabulary_used": used.count, "of_files": of_files}


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
