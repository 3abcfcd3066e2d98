"""Digests of large files that were read before, so that the next start does not read them again.

A file is taken for the one that was read while its place on the disk, its size and the times of its last change all are
what they were: not only that of its content, which programs set as they like, but also that of its entry, which the
file system keeps. One that was changed moments before it was read is not remembered, since clocks of file systems are
coarse. What is written down is no more than that: where it is lost or damaged, files are read again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import read_bounded, write_whole

REMEMBERED = "digests.json"
FROM_BYTES = 2**26
"""Smaller files are read again: that takes a moment."""
SETTLED_NS = 2 * 10**9
"""Since a file's last change."""
MOST_BYTES = 2**26
MOST_FILES = 100_000


class Known:
    """The digests in a folder of caches."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / REMEMBERED
        self._found = _read(self._path)

    def digest(self, path: Path, make: Callable[[], str], part: str = "") -> str:
        """A file's digest, or that of a part of it, made where it is not known."""
        place = f"{path.resolve()}#{part}" if part else str(path.resolve())
        before = _state(path)
        known = self._found.get(place)
        if known is not None and known[:-1] == before:
            return known[-1]
        # Before it is read: one that is changed within a tick of the clock that has just begun looks the same after.
        settled = int(before[2]) >= FROM_BYTES and _is_settled(before)
        digest = make()
        if settled and _state(path) == before:
            self._remember(place, [*before, digest])
        return digest

    def _remember(self, place: str, entry: list[str]) -> None:
        # What other processes have found meanwhile is kept; of two that write at once one is lost, and reads again.
        self._found = _read(self._path) | {place: entry}
        if len(self._found) > MOST_FILES:
            self._found = {place: entry}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, msgspec.json.encode(self._found).decode())
        except (FlopwiseError, OSError):
            # A folder that cannot be written says so where it has to be.
            return


def _state(path: Path) -> list[str]:
    found = path.stat()
    return [str(each) for each in (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)]


def _is_settled(state: list[str]) -> bool:
    return time.time_ns() - max(int(state[3]), int(state[4])) > SETTLED_NS


def _read(path: Path) -> dict[str, list[str]]:
    try:
        found = msgspec.json.decode(read_bounded(path, MOST_BYTES), type=dict[str, list[str]])
    except (FlopwiseError, OSError, ValueError, RecursionError):
        return {}
    return {place: entry for place, entry in found.items() if len(entry) == len(_FIELDS)}


_FIELDS = ("device", "inode", "size", "changed", "entry changed", "digest")
