"""What a device did and when, as columns: kernels, copies and collectives, from whichever trace."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flopwise.records.profile import KERNEL_CLASSES, KernelClass

Numbers = NDArray[np.int64]
UNKNOWN_BYTES = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """One row for everything that ran, in no particular order."""

    names: tuple[str, ...]
    """Every name once; rows point at them."""
    name: Numbers
    kind: Numbers
    """Numbers in `KERNEL_CLASSES`."""
    start_ns: Numbers
    end_ns: Numbers
    stream: Numbers
    bytes: Numbers
    """Moved by a copy or a collective; UNKNOWN_BYTES where it was not said."""
    launch_ns: Numbers
    """When the host handed it over; -1 where it was not said."""

    def __len__(self) -> int:
        return len(self.name)


class ActivityBuilder:
    """Takes rows one by one, at some fifty bytes each."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._columns = {
            name: array("q") for name in ("name", "kind", "start_ns", "end_ns", "stream", "bytes", "launch_ns")
        }

    def __len__(self) -> int:
        return len(self._columns["name"])

    def add(
        self,
        name: str,
        kind: KernelClass,
        start_ns: int,
        end_ns: int,
        *,
        stream: int = 0,
        moved_bytes: int = UNKNOWN_BYTES,
        launch_ns: int = -1,
    ) -> None:
        number = self._numbers.setdefault(name, len(self._numbers))
        row = (number, KERNEL_CLASSES.index(kind), start_ns, max(start_ns, end_ns), stream, moved_bytes, launch_ns)
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)

    def built(self) -> Activity:
        """What was taken so far."""
        columns = {name: np.array(values, dtype=np.int64) for name, values in self._columns.items()}
        return Activity(names=tuple(self._numbers), **columns)
