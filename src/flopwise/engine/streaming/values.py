"""Tensors by the names that the description gives them, while a task runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flopwise.engine.kernels.experts import Routed
from flopwise.engine.streaming.arena import Arena


@dataclass(slots=True)
class Pack:
    """Neighbouring columns of one tensor of the arena, which goes back when nobody holds any of them."""

    tensor: Tensor
    left: int

    def let_go(self, arena: Arena) -> None:
        """One of them is done with."""
        self.left -= 1
        if not self.left:
            arena.give(self.tensor)


def split_columns(tensor: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Columns of a tensor beside each other."""
    return list(torch.split(tensor, list(widths), dim=1))


def join_columns(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors that are neighbouring columns of one, as that one; None where they are not."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    place, width = first.data_ptr(), 0
    for tensor in tensors:
        alike = tensor.stride() == first.stride() and tensor.shape[0] == first.shape[0] and tensor.dtype == first.dtype
        if not alike or tensor.data_ptr() != place or tensor.stride(1) != 1:
            return None
        place += tensor.shape[1] * tensor.element_size()
        width += tensor.shape[1]
    if first.stride(0) < width:
        return None
    return first.as_strided((first.shape[0], width), first.stride())


class Values:
    """Name → tensor. Some have a place that was prepared for them, the others get one of the arena."""

    def __init__(self, arena: Arena, places: dict[str, Tensor] | None = None) -> None:
        self.arena = arena
        self.places = dict(places or {})
        """Where a value is written when it is made."""
        self.copies: dict[str, Tensor] = {}
        """Where a value that is held is to be brought when it is first read."""
        self._held: dict[str, Tensor] = {}
        self._owned: set[str] = set()
        self._packs: dict[str, Pack] = {}
        self._aliases: dict[str, str] = {}
        self.routed: Routed | None = None
        """Whose the rows of a mixture's experts are, once somebody has asked."""

    def __getitem__(self, name: str) -> Tensor:
        return self._held[name]

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        assert name not in self._held
        self._held[name] = tensor

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Where a value is to be written."""
        tensor = self.places.get(name)
        if tensor is None:
            tensor = self.arena.take(shape, dtype)
            self._owned.add(name)
        else:
            tensor = tensor.view(shape)
        self._held[name] = tensor
        return tensor

    def pack(self, names: Sequence[str], widths: Sequence[int], rows: int, dtype: torch.dtype) -> Tensor:
        """Room for values beside each other; those that have a place of their own are not held there."""
        tensor = self.arena.take((rows, sum(widths)), dtype)
        held = [name for name in names if name not in self.places]
        pack = Pack(tensor, len(held))
        assert held
        for name, columns in zip(names, split_columns(tensor, widths), strict=True):
            if name in held:
                self._held[name], self._packs[name] = columns, pack
        return tensor

    def alias(self, name: str, by: str) -> None:
        """A second name for a value, whose room goes back when nobody holds either."""
        self._held[by] = self._held[name]
        self._aliases[name] = by

    def replace(self, name: str, tensor: Tensor) -> None:
        """The same value, from now on read elsewhere."""
        assert name not in self._owned
        self._held[name] = tensor

    def is_temporary(self, name: str) -> bool:
        """Whether a value has a room of its own in the arena."""
        return name in self._owned and name in self._held and name not in self.places

    def hand_over(self, name: str, by: str) -> Tensor:
        """The room of a temporary that is read for the last time while `by` is written there."""
        assert self.is_temporary(name) and by not in self.places
        tensor = self._held[by] = self._held.pop(name)
        self._owned.remove(name)
        self._owned.add(by)
        return tensor

    def reserve(self, name: str, shape: tuple[int, int], dtype: torch.dtype, *, room: int) -> None:
        """Take the room of a value before its turn, `room` numbers from row to row."""
        self.places[name] = self.arena.take((shape[0], room), dtype)[:, : shape[1]]
        self._owned.add(name)

    def drop(self, names: Iterable[str]) -> None:
        """Forget values, and give back the room of those that were temporaries."""
        for name in names:
            tensor = self._held.pop(name, None)
            if tensor is None:
                continue
            heir = self._aliases.pop(name, "")
            if heir in self._held:
                if name in self._owned:
                    self._owned.remove(name)
                    self._owned.add(heir)
            elif name in self._packs:
                self._packs.pop(name).let_go(self.arena)
            elif name in self._owned:
                self._owned.discard(name)
                self.arena.give(tensor)

    def close(self) -> None:
        """Forget all of them."""
        self.drop(list(self._held))


class Gradients:
    """Gradients by the names of what they are of. One tensor may serve several names until one of them is added to."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._held: dict[str, Tensor] = {}
        self._owned: set[int] = set()
        """Addresses of those that are of the arena."""
        self._packs: dict[int, Pack] = {}
        """By the address of each of its parts."""

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def __getitem__(self, name: str) -> Tensor:
        return self._held[name]

    def put(self, name: str, tensor: Tensor) -> None:
        """A gradient that lies outside of the arena."""
        assert name not in self._held
        self._held[name] = tensor

    def pack(self, names: Sequence[str], widths: Sequence[int], rows: int, dtype: torch.dtype) -> None:
        """Room for gradients beside each other."""
        tensor = self.arena.take((rows, sum(widths)), dtype)
        pack = Pack(tensor, len(names))
        for name, columns in zip(names, split_columns(tensor, widths), strict=True):
            assert name not in self._held
            self._held[name] = columns
            self._packs[columns.data_ptr()] = pack

    def share(self, name: str, others: Iterable[str]) -> None:
        """A sum's gradient is that of each of its terms: hand it on, or add it to what a term has already."""
        tensor = self._held.pop(name)
        used = False
        for other in others:
            if other in self._held:
                self.target(other, tuple(tensor.shape), tensor.dtype)[0].add_(tensor)
            else:
                self._held[other] = tensor
                used = True
        if not used:
            self._release(tensor)

    def target(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Where a contribution to a gradient goes, and whether there is something to add it to."""
        tensor = self._held.get(name)
        if tensor is None:
            tensor = self._held[name] = self.arena.take(shape, dtype)
            self._owned.add(tensor.data_ptr())
            return tensor, False
        if any(other is tensor for key, other in self._held.items() if key != name):
            copy = self.arena.take(tuple(tensor.shape), tensor.dtype)
            self._owned.add(copy.data_ptr())
            tensor = self._held[name] = copy.copy_(tensor)
        return tensor, True

    def replace(self, name: str, by: str) -> Tensor:
        """The tensor of `name` for the gradient of `by`, which is written over it; its own where others share it."""
        tensor = self._held.pop(name)
        if any(other is tensor for other in self._held.values()):
            tensor = self.arena.take(tuple(tensor.shape), tensor.dtype)
            self._owned.add(tensor.data_ptr())
        self._held[by] = tensor
        return tensor

    def drop(self, name: str) -> None:
        """Done with a gradient."""
        tensor = self._held.pop(name, None)
        if tensor is not None:
            self._release(tensor)

    def _release(self, tensor: Tensor) -> None:
        address = tensor.data_ptr()
        if any(other.data_ptr() == address for other in self._held.values()):
            return
        if address in self._packs:
            self._packs.pop(address).let_go(self.arena)
        elif address in self._owned:
            self._owned.discard(address)
            self.arena.give(tensor)
