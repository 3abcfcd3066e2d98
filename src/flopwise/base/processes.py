"""Processes of our own: Python that finds modules where they are installed, not in the working directory."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

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


SPINS, WAITS = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
"""How often a thread of OpenMP looks whether the others are done before it falls asleep, and in words."""


def let_threads_sleep() -> None:
    """Tell a torch that is imported after this that threads of a CPU wait asleep, unless somebody has said otherwise.

    By default they spin for a millisecond. Beside a busy process that takes one of two cores, the one that is waited
    for gets no turn until then: a chain of small products took 50 times as long.
    """
    if WAITS not in os.environ:
        os.environ.setdefault(SPINS, "1000")


def is_first_process() -> bool:
    """Whether this is the first process of a container, to which the system's own effect of signals is none."""
    return os.getpid() == 1


def end_first_process_on_request() -> None:
    """Let SIGTERM end it as it ends other processes; without a handler it would go on until it is killed."""
    if is_first_process():
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
