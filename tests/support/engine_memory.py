"""How much memory a call takes at once, counted tensor by tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of new storages, and takes them off again when they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        self.total = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if torch.is_tensor(leaf):
                self._add(leaf.untyped_storage(), before)
        return results

    def _add(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = storage._cdata
        if key in before or key in self.alive:
            return
        self.alive[key] = storage.nbytes()
        self.total += storage.nbytes()
        self.peak = max(self.peak, self.total)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.total -= self.alive.pop(key)


def peak_bytes(call: Callable[[], None]) -> int:
    """The most bytes that tensors made within the call held at one time."""
    counting = _Counting()
    with counting:
        call()
    return counting.peak
