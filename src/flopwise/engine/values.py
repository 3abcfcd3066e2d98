"""Tensors by the names that the description gives them, while a task runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flopwise.engine.arena import Arena


class Values:
    """Name → tensor. Some have a place that was prepared for them, the others get one of the arena."""

    def __init__(self, arena: Arena, places: dict[str, Tensor] | None = None) -> None:
        self.arena = arena
        self.places = dict(places or {})
        """Where a value is written when it is made."""
        self._held: dict[str, Tensor] = {}
        self._owned: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        return self._held[name]

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        assert name not in self._held
        self._held[name] = tensor

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Where a value is to be written."""
        tensor = self.places.get(name)
        if tensor is None:
            tensor = self.arena.take(shape, dtype)
            self._owned.add(name)
        else:
            tensor = tensor.view(shape)
        self._held[name] = tensor
        return tensor

    def reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Take the room of a value before its turn."""
        self.places[name] = self.arena.take(shape, dtype)
        self._owned.add(name)

    def drop(self, names: Iterable[str]) -> None:
        """Forget values, and give back the room of those that were temporaries."""
        for name in names:
            tensor = self._held.pop(name, None)
            if tensor is not None and name in self._owned:
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

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def __getitem__(self, name: str) -> Tensor:
        return self._held[name]

    def put(self, name: str, tensor: Tensor) -> None:
        """A gradient that lies outside of the arena."""
        assert name not in self._held
        self._held[name] = tensor

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
        if address in self._owned and not any(other.data_ptr() == address for other in self._held.values()):
            self._owned.discard(address)
            self.arena.give(tensor)
