"""What names, sizes and numbers of a description may be."""

from __future__ import annotations

from math import isfinite

from flopwise.base.errors import FlopwiseError, shown

LARGEST_SIDE = 2**31 - 1
"""Shapes beyond this overflow the 32-bit sizes of today's kernels; such a number is a typing mistake."""


def check_name(name: str) -> None:
    """Refuse a name that a table or a file could not print."""
    if not name.strip() or not name.isprintable():
        raise FlopwiseError(
            f"a model cannot be called {shown(name)}",
            why="a name is printed in tables: it has letters, and no line breaks or control characters",
            hint='name = "my-model"',
        )


def check_positive(owner: str, **numbers: int) -> None:
    """Refuse sizes that no tensor can have, by the name of the field."""
    for field, number in numbers.items():
        if number < 1:
            raise FlopwiseError(
                f"{owner}: {field} must be at least 1, got {shown(number)}",
                why="a size counts layers, heads, tokens or channels",
                hint=f"{field} = 1 or more",
            )
        if number > LARGEST_SIDE:
            raise FlopwiseError(
                f"{owner}: {field} = {shown(number)} is too large",
                why=f"a side of a tensor is at most {LARGEST_SIDE:,}",
                hint="check the number for a digit too many",
            )


def check_real(owner: str, **numbers: float) -> None:
    """Refuse real numbers that are not above zero or not finite, by the name of the field."""
    for field, number in numbers.items():
        if not (number > 0 and isfinite(number)):
            raise FlopwiseError(
                f"{owner}: {field} must be a number above 0, got {shown(number)}", hint=f"correct {field}"
            )
