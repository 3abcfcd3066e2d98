"""Data that every machine has: the sources of Python's standard library, as text and as a set to classify.

Which files these are follows from the version of Python alone.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.engine.data.records import TextRecord
from flopwise.engine.data.sources import DataSource

NAME = f"the standard library of Python {sys.version.split()[0]}"

MOST_TEXT_BYTES = 4_000_000
"""Enough for a small model to learn from, and tokenized within seconds."""

TEXT_MODULES = (
    "_pydecimal argparse ast asyncio base64 bdb calendar collections concurrent configparser contextlib csv "
    "dataclasses difflib dis email enum fractions functools gzip heapq http inspect json logging pathlib pdb pickle "
    "platform random shutil socket statistics subprocess tarfile tempfile textwrap threading tokenize tomllib "
    "traceback typing unittest urllib zipfile"
)
"""Well-known ones that newer versions of Python have too, in the order they are read."""

LABELS = {
    "argparse": "argparse",
    "asyncio": "asyncio",
    "decimal": "_pydecimal",
    "email": "email",
    "tarfile": "tarfile",
    "turtle": "turtle",
}
"""Modules to tell apart, and where their code is."""

SAMPLES_PER_LABEL = 300
LINES_OF_A_SAMPLE = (3, 4, 5, 6)
LEAST_CHARACTERS = 60
"""Of a sample: closing brackets and the like are nobody's."""

LEFT_OUT = re.compile(r"\s*(#|import\b|from\b.*\bimport\b)")
"""Lines that would tell too much, or nothing."""


def text_sources() -> tuple[DataSource, ...]:
    """Files of the standard library, at most MOST_TEXT_BYTES together."""
    chosen = []
    left = MOST_TEXT_BYTES
    for module in TEXT_MODULES.split():
        for path, name in _files(module):
            size = path.stat().st_size
            if size <= left and _is_text(path):
                chosen.append(DataSource(path, name, "text"))
                left -= size
    if not chosen:
        raise _absent()
    return tuple(chosen)


@cache
def snippets() -> tuple[TextRecord, ...]:
    """Lines of code, each with the module that it comes from: as many of each, and no two alike."""
    seen: set[str] = set()
    by_label = {label: list(_snippets_of(module, label, seen)) for label, module in LABELS.items()}
    by_label = {label: found for label, found in by_label.items() if found}
    if len(by_label) < 2:
        raise _absent()
    each = min(SAMPLES_PER_LABEL, *(len(found) for found in by_label.values()))
    # Spread over the whole module, since a part of it would be easier.
    return tuple(found[place * len(found) // each] for found in by_label.values() for place in range(each))


def _snippets_of(module: str, label: str, seen: set[str]) -> Iterator[TextRecord]:
    for path, name in _files(module):
        if not _is_text(path):
            continue
        lines = [
            (number, line)
            for number, line in enumerate(path.read_text("utf-8").split("\n"), 1)
            # A line with the module's own name in it gives the answer away.
            if line.strip() and not LEFT_OUT.match(line) and label not in line.lower()
        ]
        first = 0
        for count in cycle(LINES_OF_A_SAMPLE):
            taken = lines[first : first + count]
            first += count
            if len(taken) < count:
                break
            # Without indentation, of which a short sample would otherwise be full.
            text = "\n".join(line.strip() for _, line in taken)
            if len(text) >= LEAST_CHARACTERS and text not in seen:
                seen.add(text)
                yield TextRecord(text, label, f"{name}:{taken[0][0]}")


def _files(module: str) -> list[tuple[Path, str]]:
    """The files of a module or a package by name, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    single = root / f"{module}.py"
    if single.is_file():
        return [(single, single.name)]
    beneath = {path.relative_to(root).as_posix(): path for path in (root / module).rglob("*.py")}
    return [(beneath[name], name) for name in sorted(beneath) if not {"test", "tests"} & set(name.split("/"))]


def _is_text(path: Path) -> bool:
    try:
        path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _absent() -> FlopwiseError:
    return FlopwiseError(
        "there is no embedded data on this machine",
        why="the standard library of this Python is without its sources",
        hint="name files or folders to train on",
    )
