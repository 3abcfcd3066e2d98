"""`flopwise compare`: two sets of runs, joined by cell."""

from __future__ import annotations


def compare() -> None:
    """Two sets of runs, joined by cell."""
    raise NotImplementedError
