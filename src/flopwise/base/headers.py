"""The first line of a comma-separated table: what may be wrong with how it names its columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
"""What tables are separated by besides commas."""


def other_separator(names: Sequence[str]) -> str | None:
    """What separates a header that was read as a single column, in words; None: nothing does, or commas."""
    if len(names) != 1:
        return None
    return next((words for sign, words in SEPARATORS.items() if sign in names[0]), None)


def otherwise_written(wanted: Iterable[str], there: Iterable[str]) -> dict[str, str]:
    """Of columns that a header lacks, those that it has in other letters or with other signs between words."""
    known = {_plain(name): name for name in reversed(list(there))}
    return {name: known[_plain(name)] for name in wanted if _plain(name) in known and known[_plain(name)] != name}


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())
