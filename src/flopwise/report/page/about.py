"""What a run was asked for, with what it was made, and what it wrote down: words for the page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import PurePath

from flopwise.records.measurement import RunRecord
from flopwise.report.words import safe

LONGEST_VALUE = 160
MOST_LOG_LINES = 40
LEFT_OUT = ("saves", "expected", "model")
"""Of the free tables: what other panels show, or what is as long as the model is deep."""

Pairs = tuple[tuple[str, str], ...]


def setup_pairs(record: RunRecord) -> Pairs:
    """Everything that was asked for and settled, one name each; a name of two tables is told once."""
    tables: tuple[Mapping[str, object], ...] = (record.plan, record.request, asdict(record.training), record.data)
    found: dict[str, str] = {}
    for table in tables:
        for name, words in _flat("", table):
            found.setdefault(name, words)
    return tuple(found.items())


def version_pairs(record: RunRecord) -> Pairs:
    """What it ran with."""
    return tuple(
        (safe(name, 40), safe(_without_folders(str(value)), LONGEST_VALUE))
        for name, value in record.environment.items()
    )


def log_lines(text: str) -> tuple[str, ...]:
    """The last lines of a log; where files lie is nobody else's business."""
    return tuple(safe(_without_folders(line), 240) for line in text.splitlines()[-MOST_LOG_LINES:])


def _flat(prefix: str, table: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if name in LEFT_OUT or (not value and not isinstance(value, bool | int | float)):
            continue
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield safe(f"{prefix}{name}", 60), safe(_without_folders(_words(value)), LONGEST_VALUE)


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _without_folders(text: str) -> str:
    """Of every path in a text its last name alone: pages are passed on."""
    return " ".join(
        PurePath(word).name if word.startswith(os.sep) and len(word) > 1 else word for word in text.split(" ")
    )
