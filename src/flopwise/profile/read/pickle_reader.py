"""What `plain_pickle` runs in a process of its own: a pickle of stdin as plain data, written to stdout with `marshal`.

Standard library alone, so that it starts at once. What a pickle may take is bounded by the system, since no hook of the
unpickler can: an index of its memo (five bytes may ask for 64 GiB), what values take together (a byte is a set of 232),
the hash of a tuple that is used as a key (nested by reference it takes for ever, nested deep it overflows the stack).
"""

from __future__ import annotations

import marshal
import pickle
import resource
import sys
from pathlib import Path
from typing import Any, Never

NOT_PLAIN, TOO_LARGE, DAMAGED = 2, 3, 4
"""Exit codes; why stands on stderr."""


class NotPlainError(Exception):
    """The pickle is more than data, or data that nobody should walk."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Never:
        raise NotPlainError(f"it wants {module_name}.{global_name}, which is refused")

    def persistent_load(self, pid: object) -> Never:
        raise NotPlainError(f"it refers to {pid!r} outside, which is refused")


def main() -> int:
    """The exit code. Arguments: bytes and seconds that it may take beyond its start, levels of nesting."""
    memory_bytes, seconds, nesting = map(int, sys.argv[1:])
    taken, hard = _address_space_bytes(), resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = taken + memory_bytes if hard == resource.RLIM_INFINITY else min(taken + memory_bytes, hard)
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
        data = _PlainUnpickler(sys.stdin.buffer).load()
        # What follows takes as much again; members of sets, which are written one by one to be sorted, no more either.
        again = allowed + memory_bytes if hard == resource.RLIM_INFINITY else min(allowed + memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (again, hard))
        _check(data, nesting, nesting, {})
        sys.stdout.buffer.write(marshal.dumps(data))
    except MemoryError:
        return TOO_LARGE
    except NotPlainError as error:
        sys.stderr.write(str(error))
        return NOT_PLAIN
    except Exception as error:  # noqa: BLE001,RUF100 - the module promises no kinds of them
        sys.stderr.write(str(error) or type(error).__name__)
        return DAMAGED
    return 0


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def _check(value: Any, most: int, left: int, levels: dict[int, int]) -> int:  # noqa: ANN401 - anything
    """How many levels it has. Refuses what contains itself or is nested too deep: whoever walks it would not return.

    `levels` are those of containers that have been walked, 0 while they are: what is shared is walked once.
    """
    if type(value) not in (list, tuple, dict):
        return 0
    if left == 0:
        raise NotPlainError(f"it is nested more than {most} deep")
    levels[id(value)] = deepest = 0
    # Keys and members of sets cannot hold lists or dicts.
    for child in value.values() if type(value) is dict else value:
        known = levels.get(id(child)) if type(child) in (list, tuple, dict) else None
        if known == 0:
            raise NotPlainError("something in it contains itself")
        deepest = max(deepest, _check(child, most, left - 1, levels) if known is None else known)
        if deepest >= left:
            raise NotPlainError(f"it is nested more than {most} deep")
    levels[id(value)] = deepest + 1
    return deepest + 1


if __name__ == "__main__":
    sys.exit(main())
