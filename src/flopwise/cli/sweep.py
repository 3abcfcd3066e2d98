"""`flopwise sweep`: many set-ups, predicted and run."""

from __future__ import annotations


def sweep() -> None:
    """Many set-ups, predicted and run."""
    raise NotImplementedError
