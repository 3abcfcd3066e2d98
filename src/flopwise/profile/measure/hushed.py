"""What torch does of its own accord when steps are recorded, kept from a program: what its libraries print, what it
imports.

Standard library alone, since it runs within other people's programs. What cannot be hushed is left as it is.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINETO_LEVEL = ("libtorch_cpu.so", "_ZN9libkineto6Logger14severityLevel_E")
TORCH_LEVEL = ("libc10.so", "FLAGS_caffe2_log_level")
"""Libraries of torch, and where each keeps from which level on it logs."""
COMPILER = "_inductor"
"""What `torch` imports where it is asked for it."""
KINETO_SILENT = 6
TORCH_WITHOUT_WARNINGS = 2


@contextmanager
def hush() -> Iterator[None]:
    """While we use torch's profiler: its own warnings are not the program's, which may have made errors of them.

    Torch's tracing library reports every start and stop on stderr, at a level above errors.
    """
    with warnings.catch_warnings(), _silent_from(KINETO_LEVEL, KINETO_SILENT):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def hush_start() -> Iterator[None]:
    """While it gets ready: in any thread but the one that imported torch it complains, directly to C's `stderr`."""
    with hush(), _without_c_stderr(), _without_compiler():
        yield


@contextmanager
def _without_compiler() -> Iterator[None]:
    """torch's profiler imports its compiler, a second of work, to ask whether it captures graphs: one that a program
    has not imported captures none."""
    import torch

    found = getattr(torch, "_lazy_modules", None)
    if not isinstance(found, set) or COMPILER not in found or "torch._dynamo" in sys.modules:
        yield
        return
    found.discard(COMPILER)
    try:
        yield
    finally:
        found.add(COMPILER)


@contextmanager
def _silent_from(place: tuple[str, str], wanted: int) -> Iterator[None]:
    """Raise the level of a library's log for a moment; where it cannot be found, nothing is hushed."""
    import torch

    name, symbol = place
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)), symbol)
    except (OSError, ValueError):
        yield
        return
    kept, level.value = level.value, max(level.value, wanted)
    try:
        yield
    finally:
        # The tracing library sets its own when it is first used.
        if level.value == max(kept, wanted):
            level.value = kept


@contextmanager
def _without_c_stderr() -> Iterator[None]:
    """The C library lets a program set its streams like any variable. What Python and C++ print is not touched."""
    try:
        library = ctypes.CDLL(None)
        stream = ctypes.c_void_p.in_dll(library, "stderr")
        library.fopen.restype = ctypes.c_void_p
        nowhere = library.fopen(os.fsencode(os.devnull), b"we")
    except (OSError, ValueError, AttributeError):
        nowhere = None
    if not nowhere:
        yield
        return
    kept, stream.value = stream.value, nowhere
    try:
        yield
    finally:
        stream.value = kept
        library.fclose(ctypes.c_void_p(nowhere))


class FirstFree:
    """A block of memory from before allocations are recorded, whose release torch would log.

    Torch logs the first release of such a block and every thousandth after it. Made before, and let go while
    nothing is logged, this one is the first.
    """

    def __init__(self) -> None:
        import torch

        # No tensor: a program may watch those that are made.
        self._block = torch.UntypedStorage(64, device="cpu")  # type: ignore[no-untyped-call]

    def let_go(self) -> None:
        """Right behind the start of the recording."""
        with _silent_from(TORCH_LEVEL, TORCH_WITHOUT_WARNINGS):
            del self._block
