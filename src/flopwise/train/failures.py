"""Why a training has failed, for the sweep that began it: a word of its own in a file, so that none is read back."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from flopwise.base.errors import FlopwiseError, OutOfMemory
from flopwise.store.cells import Failure, Told
from flopwise.store.sweeps import tell_sweep

SHORT_OF_MEMORY = re.compile(
    r"(?:^|: |\b(?:CUDA|HIP|ran) )out of memory(?=$|[.:;,(]| \()|OutOfMemoryError|\bMemoryError\b"
    r"|can(?:no|')t allocate memory|std::bad_alloc|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""As torch, its libraries and the system put it: 'out of memory' within other words may be the name of a file."""


def tell_failure(store: Path, error: Exception) -> None:
    """Let the sweep know by what this process ends, where a sweep has begun it."""
    if isinstance(error, FlopwiseError):
        reason = error.what if error.why is None else f"{error.what}: {error.why}"
    else:
        reason = "".join(traceback.format_exception_only(error)).strip()
    tell_sweep(store, Told(failure=_failure_of(error, reason), reason=reason))


def _failure_of(error: Exception, reason: str) -> Failure:
    if isinstance(error, OutOfMemory | MemoryError):
        return "out-of-memory"
    if isinstance(error, FlopwiseError):
        # 1 is the exit code of those, and of no other.
        return "does-not-fit" if error.exit_code == 1 else "refused"
    return "out-of-memory" if SHORT_OF_MEMORY.search(reason) else "crashed"
