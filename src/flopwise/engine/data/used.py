"""`Used`: how much of a vocabulary occurs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Used:
    """Which identifiers occur."""

    def __init__(self, size: int) -> None:
        self._seen = np.zeros(size, dtype=np.bool_)

    def add(self, tokens: NDArray[Any]) -> None:
        self._seen[tokens] = True

    @property
    def count(self) -> int:
        return int(self._seen.sum())
