"""Open a file of another tool: plain or gzipped (whatever its name says), in bounded memory, with errors in words."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import open_file

Tell = Callable[[str, int, int], None]
"""Takes what is being done, how many bytes of the file are read, and how many there are."""

BLOCK_BYTES = 2**20
BUFFER_BYTES = 2**18
"""What `TraceFile.head` can tell of a file is within it."""
MOST_BYTES = 64 * 2**30
"""After unpacking; more is refused, since a few megabytes can be made to unpack into anything."""

_GZIP = b"\x1f\x8b"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class _Blocks(io.RawIOBase):
    """Blocks as a stream; a read is short at their end only."""

    def __init__(self, name: str, blocks: Iterator[bytes]) -> None:
        self.name = name
        self._blocks = blocks
        self._ahead = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - the writable buffer that io passes
        done = 0
        while done < len(buffer):
            if not self._ahead:
                block = next(self._blocks, None)
                if block is None:
                    break
                self._ahead = memoryview(block)
            part = self._ahead[: len(buffer) - done]
            buffer[done : done + len(part)] = part
            self._ahead = self._ahead[len(part) :]
            done += len(part)
        return done


class TraceFile(io.BufferedReader):
    """The unpacked bytes of one file, read once from its beginning to its end."""

    def __init__(self, name: str, blocks: Iterator[bytes], warnings: list[str] | None = None) -> None:
        super().__init__(_Blocks(name, blocks), BUFFER_BYTES)
        self.warnings: list[str] = [] if warnings is None else warnings
        """What is missing or damaged, complete only when everything is read."""

    def head(self, size: int) -> bytes:
        """What the first `read` begins with; nothing is taken."""
        return self.peek(size)[:size]

    def blocks(self) -> Iterator[bytes]:
        """All that is left, in blocks."""
        while block := self.read(BLOCK_BYTES):
            yield block


@contextmanager
def open_trace(path: Path, tell: Tell | None = None) -> Iterator[TraceFile]:
    """The file's content, unpacked; `tell` hears of the bytes of the file itself, packed ones where it is packed."""
    name = path.name or str(path)
    with _open_file(path) as file:
        warnings: list[str] = []
        source = TraceFile(name, _raw_blocks(file, name, tell), warnings)
        if not source.head(1):
            raise FlopwiseError(f"{path} is empty", hint="was the program that writes it still running, or killed?")
        if source.head(2) == _GZIP:
            source = TraceFile(name, _gunzip(source, warnings), warnings)
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


def _open_file(path: Path) -> BinaryIO:
    hint = "name a file that a profiler wrote"
    try:
        return open_file(path)
    except FlopwiseError as error:
        raise error.within(str(path), hint="name one file in it, or write what it gives to one") from None
    except FileNotFoundError:
        raise FlopwiseError(f"there is no file {path}", hint=hint) from None
    except PermissionError:
        raise FlopwiseError(f"{path} may not be read", hint=f"`ls -l {path}` shows who may") from None
    except (OSError, ValueError) as error:
        raise FlopwiseError(f"{str(path)!r} cannot be opened", why=str(error), hint=hint) from None


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


def _gunzip(packed: TraceFile, warnings: list[str]) -> Iterator[bytes]:
    """Members one after the other; what a damaged or cut one gives before the damage, with a warning."""
    unpacker = gzip.GzipFile(fileobj=packed)
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
