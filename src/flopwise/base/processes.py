"""Processes of our own: Python that finds modules where they are installed, not in the working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PATH = "PYTHONPATH"


def python_words(module: str, *words: str, python: str | None = None) -> list[str]:
    """`python -m module words…`, which imports nothing that merely lies in the working directory."""
    return [python or sys.executable, "-P", "-m", module, *words]


def search_path() -> dict[str, str]:
    """The variable that such a process needs where flopwise is not installed, but was found beside what runs now."""
    ours = Path(__file__).resolve().parents[2]
    if sys.flags.safe_path or Path(sys.path[0]).resolve() != ours:
        return {}
    if any(Path(entry).resolve() == ours for entry in sys.path[1:] if entry):
        return {}
    others = os.environ.get(PATH, "")
    return {PATH: f"{ours}{os.pathsep}{others}" if others else str(ours)}
