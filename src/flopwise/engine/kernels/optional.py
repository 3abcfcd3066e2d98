"""Packages with faster kernels that may be installed or not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def find_in(package: str, find: Callable[[], Found], *, name: str, without: str) -> Found | None:
    """What `find` imports; None where the package is not there, or, with a warning, where it cannot be loaded."""
    try:
        with warnings.catch_warnings():
            # What its own libraries deprecate is not this program's to tell.
            warnings.simplefilter("ignore", DeprecationWarning)
            return find()
    except Exception as error:  # whatever a package may raise, its kernels are not needed
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == package
        if not missing:
            told = f"{name} is installed and cannot be loaded ({error}): {without}"
            warnings.warn(told, RuntimeWarning, stacklevel=3)
        return None
