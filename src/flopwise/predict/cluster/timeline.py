"""Two streams of one device, layer by layer: kernels on one, the collectives of sharded data parallelism beside them.

Forward, a layer's kernels wait for the one before and for their weights; weights are gathered `prefetch` layers
ahead, in order, and no farther: a gather waits until the layer is done that lies `prefetch` + 1 before its own, so that
no more than 1 + `prefetch` layers lie gathered, as the limiter of PyTorch's FSDP has it. Backward, weights are gathered
ahead again unless they were kept, and a layer's gradients are reduced once its kernels are done. Gathers and reductions
share one stream, in the order in which a framework issues them: the gather for the layer after next comes behind the
reduction of the layer before, as in PyTorch's FSDP.

What is exposed is what this recursion says: the kernels' stream ends later than its kernels take. Everything is an
array over strategies, so that one pass over the layers plays thousands of timelines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flopwise.predict.cluster.strategies import Booleans
from flopwise.predict.kernels.calls import Floats


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """When each stream is free."""

    kernels: Floats
    collectives: Floats

    @property
    def end(self) -> Floats:
        return np.maximum(self.kernels, self.collectives)


def played(
    start: StreamTimes,
    kernels: Sequence[Floats],
    gathers: Sequence[Floats],
    reductions: Sequence[Floats],
    prefetch: int,
) -> StreamTimes:
    """Play one pass over the layers, in the order given; each sequence has one array a layer.

    A layer without a gather or a reduction has zeros there.
    """
    done, busy = start.kernels, start.collectives
    count = len(kernels)
    gathered: list[Floats] = []
    gathers_where, reduces_where = _where_any(gathers), _where_any(reductions)

    def gather(index: int, earliest: Floats) -> None:
        nonlocal busy
        if (where := gathers_where[index]) is not None:
            busy = np.where(where, np.maximum(busy, earliest) + gathers[index], busy)
        gathered.append(busy)

    for index in range(count):
        # Issued before the kernels of this layer start, so they lie behind it only if they take longer. The first ones
        # are issued behind what came before the pass; each later one takes the place of the layer just done.
        earliest = done if index or not prefetch else start.collectives
        while len(gathered) < min(count, index + 1 + prefetch):
            gather(len(gathered), earliest)
        # A layer without a gather waits for nothing, however late the collectives are.
        if (where := gathers_where[index]) is not None:
            done = np.where(where, np.maximum(done, gathered[index]), done)
        done = done + kernels[index]
        if (where := reduces_where[index]) is not None:
            busy = np.where(where, np.maximum(busy, done) + reductions[index], busy)
    return StreamTimes(done, busy)


def _where_any(seconds: Sequence[Floats]) -> list[Booleans | None]:
    """Where each layer has some; None: nowhere. Layers are mostly the same array again, which is looked at once."""
    each = {id(array): array > 0 for array in seconds}
    found = {key: mask if mask.any() else None for key, mask in each.items()}
    return [found[id(array)] for array in seconds]


def started(like: Floats) -> StreamTimes:
    """Both streams free at zero."""
    return StreamTimes(np.zeros_like(like), np.zeros_like(like))
