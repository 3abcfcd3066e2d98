"""Which tokens an operator is run for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flopwise.engine.streaming.carrying import SequenceRows
from flopwise.engine.streaming.dropping import RowDrops
from flopwise.engine.streaming.rotary import Rotation


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens, one after another."""

    positions: Tensor
    """Of each token within its sequence, int32."""
    drops: RowDrops | None = None
    """What dropout drops; None: nothing."""
    rotation: Rotation | None = None
    """How the block's heads turn with them."""
    sequences: SequenceRows | None = None
    """Which they are of, where none is cut."""

    @property
    def count(self) -> int:
        return int(self.positions.shape[0])
