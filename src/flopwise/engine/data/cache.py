"""Tokens in a memory-mapped file that is named after everything that made them.

The arrays come first, each at a multiple of 64 bytes, then a description in JSON that repeats what the key was made of
and holds a checksum of all before it, then the description's length and its own checksum. So a file can be written in
one go, and one that was cut off or changed anywhere is known by its end.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import entry_kind
from flopwise.engine.data.known import Known

FORMAT = 3
"""Counted up whenever the same ingredients would make another file."""
MAGIC = b"flopwise tokens\n"
ALIGNMENT_BYTES = 64
TRAILER = struct.Struct(f"<Q32s{len(MAGIC)}s")
"""Length of the description, its SHA-256, and the magic again."""

Ingredients = dict[str, Any]
Facts = dict[str, Any]
"""What else was found while the tokens were made, such as the labels."""

FOLDER_HINT = "name another folder for the cache, or set XDG_CACHE_HOME"


@dataclass(frozen=True, slots=True)
class TokenCache:
    """An open cache."""

    path: Path
    arrays: dict[str, NDArray[Any]]
    facts: Facts
    checksum: str
    """SHA-256 of the arrays: the same for the same tokens, wherever they came from."""


class DamagedError(Exception):
    """Why a file is no cache that can be used."""


class Writer:
    """Arrays one after the other, each in as many pieces as it takes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.size_bytes = 0
        self.sections: list[dict[str, Any]] = []
        self._put(MAGIC)

    def _put(self, content: bytes | memoryview) -> None:
        self._stream.write(content)
        self._digest.update(content)
        self.size_bytes += len(content)

    def begin(self, name: str, kind: type[np.generic]) -> None:
        """The next array."""
        self._put(bytes(-self.size_bytes % ALIGNMENT_BYTES))
        kind_name = np.dtype(kind).newbyteorder("<").str
        self.sections.append({"name": name, "type": kind_name, "first": self.size_bytes, "count": 0})

    def append(self, values: NDArray[Any]) -> None:
        """More of the array that was begun last."""
        section = self.sections[-1]
        self._put(values.astype(section["type"]).tobytes())
        section["count"] += values.size

    @property
    def checksum(self) -> str:
        return self._digest.hexdigest()


Build = Callable[[Writer], Facts]


def key_of(ingredients: Ingredients) -> str:
    """A digest of everything that decides what is in a cache."""
    whole = {"format": FORMAT, **ingredients}
    return hashlib.sha256(msgspec.json.encode(whole, order="deterministic")).hexdigest()


def open_cache(folder: Path, ingredients: Ingredients, build: Build) -> tuple[TokenCache, tuple[str, ...]]:
    """The cache of these ingredients, built where there is none or none that is whole; and a note if it was damaged.

    Two processes may build the same one at once: each writes a file of its own and renames it, and both hold the same.
    """
    path = folder / f"{ingredients['kind']}-{key_of(ingredients)}.tokens"
    notes: tuple[str, ...] = ()
    try:
        return _read(path, ingredients), ()
    except FileNotFoundError:
        pass
    except DamagedError as damage:
        notes = (f"the token cache {path.name} was damaged ({damage}) and was built again",)
    except OSError as error:
        raise FlopwiseError(f"the token cache {path} cannot be read", why=error.strerror, hint=FOLDER_HINT) from None
    with _alone(path):
        # Of several that begin at once one makes it, and the others wait.
        if notes or entry_kind(path) != "file":
            _write(path, ingredients, build)
    try:
        return _read(path, ingredients), notes
    except (DamagedError, OSError) as error:
        raise FlopwiseError(
            f"the token cache {path} cannot be read back", why=str(error), hint=f"check its disk; {FOLDER_HINT}"
        ) from None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes of this machine from making the same cache meanwhile, as far as the file system can."""
    waiting = path.parent / f".{path.name[:24]}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = waiting.open("wb")
    except OSError:
        # What is wrong with the folder is told by whoever writes to it.
        yield
        return
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Who comes now makes another one, and finds the cache there.
            waiting.unlink(missing_ok=True)


def _write(path: Path, ingredients: Ingredients, build: Build) -> None:
    """Write beside the target and rename into place: under the final name nothing ever is half a cache."""
    temporary: Path | None = None
    writer: Writer | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:24]}.")
        temporary = Path(name)
        with os.fdopen(handle, "wb") as stream:
            writer = Writer(stream)
            facts = build(writer)
            stream.write(_description(writer, ingredients, facts))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        # What is wrong with the files that are read has been told by then: this is the cache's own.
        raise _unwritable(path, writer, error) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _description(writer: Writer, ingredients: Ingredients, facts: Facts) -> bytes:
    description = msgspec.json.encode(
        {
            "format": FORMAT,
            "ingredients": ingredients,
            "sections": writer.sections,
            "size_bytes": writer.size_bytes,
            "checksum": writer.checksum,
            "facts": facts,
        }
    )
    return description + TRAILER.pack(len(description), hashlib.sha256(description).digest(), MAGIC)


def _unwritable(path: Path, writer: Writer | None, error: OSError) -> FlopwiseError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        written = f" after {writer.size_bytes:,} bytes" if writer is not None else ""
        return FlopwiseError(
            f"the disk is full: the token cache cannot be written{written}",
            why=f"{path.parent}: {error.strerror}; what was written is removed",
            hint=f"free some space, or {FOLDER_HINT}",
        )
    return FlopwiseError(f"the token cache {path} cannot be written", why=error.strerror, hint=FOLDER_HINT)


def _read(path: Path, ingredients: Ingredients) -> TokenCache:
    """A cache that was checked from end to end."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < len(MAGIC) + TRAILER.size:
            raise DamagedError("it is too short")
        # Mapped from the open file: another process may put a new one in its place meanwhile.
        whole = np.memmap(stream, dtype=np.uint8, mode="r")
    body, description = _parts(whole)
    if description["format"] != FORMAT or description["ingredients"] != _as_read(ingredients):
        raise DamagedError("it was made of something else")
    if Known(path.parent).digest(path, lambda: hashlib.sha256(body.data).hexdigest()) != description["checksum"]:
        raise DamagedError("its tokens are not those that were written")
    arrays = {}
    for section in description["sections"]:
        kind = np.dtype(section["type"])
        content = body[section["first"] : section["first"] + section["count"] * kind.itemsize]
        arrays[section["name"]] = content.view(kind).view(np.ndarray)
    return TokenCache(path, arrays, description["facts"], description["checksum"])


def _parts(whole: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    """The arrays' bytes and the description of a file."""
    length, digest, magic = TRAILER.unpack(whole[-TRAILER.size :].tobytes())
    if magic != MAGIC or length > whole.size - TRAILER.size:
        raise DamagedError("its end is missing")
    start = whole.size - TRAILER.size - length
    content = whole[start : start + length].tobytes()
    if hashlib.sha256(content).digest() != digest:
        raise DamagedError("its description is not the one that was written")
    description: dict[str, Any] = msgspec.json.decode(content)
    if description["size_bytes"] != start:
        raise DamagedError("bytes are missing or too many")
    return whole[:start], description


def _as_read(ingredients: Ingredients) -> Any:  # noqa: ANN401
    """As JSON gives it back: tuples are lists there."""
    return msgspec.json.decode(msgspec.json.encode(ingredients))
