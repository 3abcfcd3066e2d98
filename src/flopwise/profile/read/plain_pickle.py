"""A pickle read as plain data: None, bool, int, float, str, bytes, lists, tuples, dicts and sets, and nothing else.

`pickle.Unpickler` reads it, with everything refused that could import a name, in a process of its own that the system
keeps within limits of memory and time (`pickle_reader`).
"""

from __future__ import annotations

import io
import marshal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import show_bytes
from flopwise.profile.read import pickle_reader


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much a pickle may ask for."""

    file_bytes: int = 2**30
    memory_bytes: int = 4 * 2**30
    """Of all that it builds; and no more than `built_per_byte` of them for each byte of the pickle."""
    built_per_byte: int = 96
    """Snapshots of torch, whose texts and stacks are given once and then referred to, build 20 to 45."""
    small_bytes: int = 16 * 2**20
    """That any pickle may build, however short it is."""
    small_s: int = 5
    """Of a processor, that any pickle may take; beyond that a second for each MiB, of which torch's take a tenth."""
    nesting: int = 100


def plain_data(source: io.BufferedIOBase, limits: Limits | None = None) -> Any:  # noqa: ANN401 - whatever the file holds
    """The data of a pickle; what follows its end is left alone. Raises for anything that is no plain data."""
    limits = limits or Limits()
    with tempfile.TemporaryFile() as whole, tempfile.TemporaryFile() as plain:
        while block := source.read(2**20):
            whole.write(block)
            if whole.tell() > limits.file_bytes:
                raise _too_large(f"it has more than {show_bytes(limits.file_bytes)}")
        memory_bytes = min(limits.memory_bytes, limits.small_bytes + limits.built_per_byte * whole.tell())
        seconds = limits.small_s + whole.tell() // 2**20
        whole.seek(0)
        settings = map(str, (memory_bytes, seconds, limits.nesting))
        # Our own module, read by the interpreter that runs us.
        command = [sys.executable, "-I", "-S", pickle_reader.__file__, *settings]
        done = subprocess.run(command, stdin=whole, stdout=plain, stderr=subprocess.PIPE, check=False)  # noqa: S603
        if done.returncode == 0:
            plain.seek(0)
            return marshal.loads(plain.read())  # noqa: S302 - written by `pickle_reader`
    raise _refusal(done.returncode, done.stderr.decode(errors="replace")[-200:], memory_bytes, seconds)


def _refusal(code: int, why: str, memory_bytes: int, seconds: int) -> FlopwiseError:
    if code == pickle_reader.NOT_PLAIN:
        hint = "only None, bool, int, float, str, bytes, list, tuple, dict and set are read"
        return FlopwiseError("a pickle that is not plain data", why=why, hint=hint)
    if code == pickle_reader.TOO_LARGE:
        return _too_large(f"it would take more than {show_bytes(memory_bytes)}, far more than its own size")
    if code == pickle_reader.DAMAGED:
        return FlopwiseError("a damaged pickle", why=why, hint="write the file again")
    return _too_large(f"reading it was ended by signal {-code}, after {seconds} s at the most")


def _too_large(why: str) -> FlopwiseError:
    return FlopwiseError("a pickle too large to read", why=why, hint="record fewer events or shorter stacks")
