"""`flopwise serve`: the page, live."""

from __future__ import annotations


def serve() -> None:
    """The page, live."""
    raise NotImplementedError
