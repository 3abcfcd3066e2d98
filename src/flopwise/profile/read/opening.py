"""Open a file of another tool: plain or gzipped (whatever its name says), in bounded memory, with errors in words."""

from __future__ import annotations

import codecs
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from flopwise.base.errors import FlopwiseError

Tell = Callable[[str, int, int], None]
"""Takes what is being done, how many bytes of the file are read, and how many there are."""

BLOCK_BYTES = 2**20
MOST_BYTES = 64 * 2**30
"""After unpacking; more is refused, since a few megabytes can be made to unpack into anything."""
MOST_LAYERS = 3

_SMALL_BYTES = 64
_GZIP = b"\x1f\x8b"
# UTF-32's little-endian mark begins with that of UTF-16, so it stands first.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Source:
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
def opened(path: Path, tell: Tell | None = None) -> Iterator[Source]:
    """The file's content, unpacked; `tell` hears of the bytes of the file itself, packed ones where it is packed."""
    name = path.name or str(path)
    with _opened_file(path) as file:
        warnings: list[str] = []
        source = Source(name, _raw_blocks(file, name, tell), warnings)
        if not source.head(1):
            raise FlopwiseError(f"{path} is empty", hint="was the program that writes it still running, or killed?")
        layers = 0
        while source.head(2) == _GZIP:
            layers += 1
            if layers > MOST_LAYERS:
                raise FlopwiseError(
                    f"{path} is gzipped more than {MOST_LAYERS} times", hint="`gunzip` it and name what comes out"
                )
            source = Source(name, _gunzipped(source.blocks(), name, warnings), warnings)
        if layers and not source.head(1):
            raise FlopwiseError(
                f"{path} unpacks to nothing", why="; ".join(warnings) or None, hint="make or fetch the file again"
            )
        beginning = source.head(4)
        codec = next((codec for mark, codec in _MARKS if beginning.startswith(mark)), None)
        if codec is not None:
            source = Source(name, _as_utf8(source.blocks(), codec), warnings)
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


def _gunzipped(packed: Iterator[bytes], name: str, warnings: list[str]) -> Iterator[bytes]:
    """One layer unpacked, members one after the other; what a damaged or cut one still gives, with a warning."""
    unpacker = zlib.decompressobj(wbits=31)
    done = 0
    is_behind_the_end = False
    for block in packed:
        waiting = block
        while waiting:
            if unpacker.eof:
                is_behind_the_end = True
                waiting = waiting.lstrip(b"\0")  # tapes and some archivers pad with zeros
                if not waiting:
                    break
                unpacker = zlib.decompressobj(wbits=31)
            before = unpacker.copy()
            try:
                unpacked = unpacker.decompress(waiting, BLOCK_BYTES)
            except zlib.error as error:
                what = f"its gzip stream is damaged ({error})"
                if is_behind_the_end:
                    what = "bytes that are not gzip follow its end"
                warnings.append(f"{name}: {what}; read up to there")
                yield from _up_to_the_damage(before, waiting)
                return
            waiting = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
            done += len(unpacked)
            if done > MOST_BYTES:
                raise FlopwiseError(
                    f"{name} unpacks to more than {MOST_BYTES // 2**30} GiB",
                    hint="profile fewer steps: a few are enough",
                )
            if unpacked:
                is_behind_the_end = False
                yield unpacked
    if not unpacker.eof:
        rest = unpacker.flush()
        warnings.append(f"{name}: its gzip stream is cut off; read up to there")
        if rest:
            yield rest


def _up_to_the_damage(unpacker: zlib._Decompress, packed: bytes) -> Iterator[bytes]:
    """What the damaged bytes unpack to before they fail: zlib gives nothing of a call that does."""
    for begin in range(0, len(packed), _SMALL_BYTES):
        try:
            yield unpacker.decompress(packed[begin : begin + _SMALL_BYTES])
        except zlib.error:
            return


def _as_utf8(blocks: Iterator[bytes], codec: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(codec)(errors="replace")
    for block in blocks:
        if text := decoder.decode(block):
            yield text.encode()
    if rest := decoder.decode(b"", final=True):
        yield rest.encode()
