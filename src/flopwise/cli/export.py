"""`flopwise export`: a plan for another trainer."""

from __future__ import annotations


def export() -> None:
    """A plan for another trainer."""
    raise NotImplementedError
