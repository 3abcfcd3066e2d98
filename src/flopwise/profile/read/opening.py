"""Open a file of another tool: plain or gzipped (whatever its name says), in bounded memory, with errors in words."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from flopwise.base.errors import FlopwiseError

Tell = Callable[[str, int, int], None]
"""Takes what is being done, how many bytes of the file are read, and how many there are."""

BLOCK_BYTES = 2**20
MOST_BYTES = 64 * 2**30
"""After unpacking; more is refused, since a few megabytes can be made to unpack into anything."""

_GZIP = b"\x1f\x8b"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Readable(Protocol):
    """What bytes come from."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""
        ...


class _Raw(io.RawIOBase):
    def __init__(self, source: Readable) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - the writable buffer that io passes
        read = self._source.read(len(buffer))
        buffer[: len(read)] = read
        return len(read)


def buffered(source: Readable) -> io.BufferedReader:
    """A source with the small reads and lines of a file."""
    return io.BufferedReader(_Raw(source), 2**18)


class TraceFile:
    """The unpacked bytes of one file, read once from its beginning to its end."""

    def __init__(self, name: str, blocks: Iterator[bytes], warnings: list[str] | None = None) -> None:
        self.name = name
        self.warnings: list[str] = [] if warnings is None else warnings
        """What is missing or damaged, complete only when everything is read."""
        self._blocks = blocks
        self._ahead = b""

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer at the end only, and none after it."""
        assert size > 0, size
        pieces = [self._ahead]
        missing = size - len(self._ahead)
        while missing > 0:
            block = next(self._blocks, None)
            if block is None:
                break
            pieces.append(block)
            missing -= len(block)
        found = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._ahead = found[size:]
        return found[:size]

    def head(self, size: int) -> bytes:
        """What the next `read` begins with; nothing is taken."""
        found = self.read(size)
        self._ahead = found + self._ahead
        return found

    def blocks(self) -> Iterator[bytes]:
        """All that is left, in blocks."""
        while block := self.read(BLOCK_BYTES):
            yield block


@contextmanager
def opened(path: Path, tell: Tell | None = None) -> Iterator[TraceFile]:
    """The file's content, unpacked; `tell` hears of the bytes of the file itself, packed ones where it is packed."""
    name = path.name or str(path)
    with _opened_file(path) as file:
        warnings: list[str] = []
        source = TraceFile(name, _raw_blocks(file, name, tell), warnings)
        if not source.head(1):
            raise FlopwiseError(f"{path} is empty", hint="was the program that writes it still running, or killed?")
        if source.head(2) == _GZIP:
            source = TraceFile(name, _gunzipped(source, warnings), warnings)
            if not source.head(1):
                raise FlopwiseError(
                    f"{path} unpacks to nothing", why="; ".join(warnings) or None, hint="make or fetch the file again"
                )
        beginning = source.head(4)
        if beginning.startswith(_GZIP):
            raise FlopwiseError(f"{path} is gzipped twice", hint="`gunzip` it and name what comes out")
        codec = next((codec for mark, codec in _MARKS if beginning.startswith(mark)), None)
        if codec is not None:
            source = TraceFile(name, _as_utf8(source.blocks(), codec), warnings)
        yield source


@contextmanager
def _opened_file(path: Path) -> Iterator[BinaryIO]:
    hint = "name a file that a profiler wrote"
    try:
        _refuse_what_is_no_file(path, path.stat())
        # Without it, opening a pipe that took the file's place in between would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FlopwiseError(f"there is no file {path}", hint=hint) from None
    except PermissionError:
        raise FlopwiseError(f"{path} may not be read", hint=f"`ls -l {path}` shows who may") from None
    except (OSError, ValueError) as error:
        raise FlopwiseError(f"{str(path)!r} cannot be opened", why=str(error), hint=hint) from None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        _refuse_what_is_no_file(path, os.fstat(descriptor))
        yield file


def _refuse_what_is_no_file(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise FlopwiseError(f"{path} is a folder, not a file", hint="name one file in it")
    raise FlopwiseError(
        f"{path} is a device, a pipe or a socket, not a file", hint="write what it gives to a file and name that"
    )


def _raw_blocks(file: BinaryIO, name: str, tell: Tell | None) -> Iterator[bytes]:
    size = os.fstat(file.fileno()).st_size
    done = 0
    while True:
        try:
            block = file.read(BLOCK_BYTES)
        except OSError as error:
            raise FlopwiseError(
                f"{name} cannot be read to its end", why=str(error), hint="copy it to another disk and try again"
            ) from None
        if not block:
            return
        done += len(block)
        if tell is not None:
            tell(f"reading {name}", done, max(size, done))
        yield block


def _gunzipped(packed: TraceFile, warnings: list[str]) -> Iterator[bytes]:
    """Members one after the other; what a damaged or cut one gives before the damage, with a warning."""
    unpacker = gzip.GzipFile(fileobj=buffered(packed))
    done = 0
    while True:
        try:
            # What one small read of the packed file gives: all that comes before the damage.
            block = unpacker.read1(BLOCK_BYTES)
        except EOFError:
            warnings.append(f"{packed.name}: its gzip stream is cut off; read up to there")
            return
        except gzip.BadGzipFile as error:
            warnings.append(f"{packed.name}: its gzip stream is damaged, or what follows it is not gzip ({error})")
            return
        except zlib.error as error:
            warnings.append(f"{packed.name}: its gzip stream is damaged ({error}); read up to there")
            return
        if not block:
            return
        done += len(block)
        if done > MOST_BYTES:
            raise FlopwiseError(
                f"{packed.name} unpacks to more than {MOST_BYTES // 2**30} GiB",
                hint="profile fewer steps: a few are enough",
            )
        yield block


def _as_utf8(blocks: Iterator[bytes], codec: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(codec)(errors="replace")
    for block in blocks:
        if text := decoder.decode(block):
            yield text.encode()
    if rest := decoder.decode(b"", final=True):
        yield rest.encode()
