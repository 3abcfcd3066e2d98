"""Room for temporaries: pieces of one preallocated buffer, handed out and given back in the order of the program.

The same calls get the same addresses in every step. What does not fit is allocated beside it and counted, so that a
plan that was too small is told and not hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from flopwise.records.program import aligned

MOST_VIEWS = 4096


class Arena:
    """First fit over a list of free ranges; neighbours join when they are given back."""

    def __init__(self, room: Tensor, spill: Arena | None = None) -> None:
        self.spill = spill
        """Where to look for room first when there is none here."""
        self._spilled: set[int] = set()
        assert room.dtype == torch.uint8
        assert room.dim() == 1
        self.room = room
        self._free: list[tuple[int, int]] = [(0, room.numel())] if room.numel() else []
        self._taken: dict[int, tuple[int, int]] = {}
        self._begins = room.data_ptr()
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}
        """Tensors that were handed out before: every step asks for the same ones."""
        self._beside: dict[int, int] = {}
        self.peak_bytes = 0
        """Of the room itself."""
        self.beside_bytes = 0
        self.peak_beside_bytes = 0
        """What did not fit, at its most."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of that shape with whatever lies there."""
        shape = tuple(shape)
        elements = prod(shape)
        assert elements, "what is empty has no place to be told by"
        size = elements * dtype.itemsize
        needed = aligned(max(1, size))
        for index, (start, length) in enumerate(self._free):
            if length >= needed:
                if length == needed:
                    del self._free[index]
                else:
                    self._free[index] = (start + needed, length - needed)
                tensor = self._views.get((start, shape, dtype))
                if tensor is None:
                    tensor = self.room[start : start + size].view(dtype).view(shape)
                    if len(self._views) < MOST_VIEWS:
                        self._views[start, shape, dtype] = tensor
                self._taken[start] = (start, needed)
                self.peak_bytes = max(self.peak_bytes, start + needed)
                return tensor
        if self.spill is not None:
            tensor = self.spill.take(shape, dtype)
            self._spilled.add(tensor.data_ptr())
            return tensor
        tensor = torch.empty(shape, dtype=dtype, device=self.room.device)
        self._beside[tensor.data_ptr()] = size
        self.beside_bytes += size
        self.peak_beside_bytes = max(self.peak_beside_bytes, self.beside_bytes)
        return tensor

    def give(self, tensor: Tensor) -> None:
        """Take a tensor back, or a view that begins where it does."""
        if self.spill is not None and tensor.data_ptr() in self._spilled:
            self._spilled.discard(tensor.data_ptr())
            self.spill.give(tensor)
            return
        start = tensor.data_ptr() - self._begins
        found = self._taken.pop(start, None)
        if found is None:
            self.beside_bytes -= self._beside.pop(tensor.data_ptr())
            return
        self._insert(*found)

    def clear(self) -> None:
        """Take everything back: what a task that failed had taken is nobody's any more."""
        self._free = [(0, self.room.numel())] if self.room.numel() else []
        self._taken.clear()
        self._beside.clear()
        self._spilled.clear()
        self.beside_bytes = 0

    def _insert(self, start: int, length: int) -> None:
        free = self._free
        index = next((place for place, (other, _) in enumerate(free) if other > start), len(free))
        free.insert(index, (start, length))
        if index + 1 < len(free) and start + length == free[index + 1][0]:
            free[index : index + 2] = [(start, length + free[index + 1][1])]
        if index and free[index - 1][0] + free[index - 1][1] == start:
            before, size = free[index - 1]
            free[index - 1 : index + 1] = [(before, size + free[index][1])]

    @property
    def empty(self) -> bool:
        """Whether everything was given back."""
        return not self._taken and not self._beside
