"""`flopwise report`: runs as a table, files or a page."""

from __future__ import annotations


def report() -> None:
    """Runs as a table, files or a page."""
    raise NotImplementedError
