"""An endless order of sequences that can be taken up anywhere."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class Order:
    """Epoch after epoch, each a permutation of all sequences that follows from the seed and its number alone."""

    def __init__(self, count: int, seed: int) -> None:
        assert count >= 1
        self.count = count
        self.seed = seed
        # A batch at the end of an epoch needs two of them.
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        # Raw numbers of a generator stay the same in every version of numpy; its `permutation` need not.
        generator = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64))
        return np.argsort(generator.random_raw(self.count), kind="stable")

    def at(self, position: int, sequences: int) -> NDArray[np.int64]:
        """Which sequences lie at the places from `position` on."""
        assert position >= 0 and sequences >= 1
        pieces = []
        end = position + sequences
        while position < end:
            epoch, place = divmod(position, self.count)
            taken = min(self.count - place, end - position)
            pieces.append(self._epoch(epoch)[place : place + taken])
            position += taken
        return np.concatenate(pieces)
