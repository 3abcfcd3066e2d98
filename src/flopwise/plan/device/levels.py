"""Which save level each (layer, chunk) is kept at: the most seconds saved per byte first.

For one chunk of a sequence the levels are points (bytes, seconds to make the rest again). Only those on the lower
convex hull are worth their bytes: with long contexts, keys and values alone save little, but attention's result much.
The hulls of all chunks together, steepest pieces first, give the seconds that any number of bytes leaves to be made
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flopwise.plan.program.sizes import Sizes, level_bytes
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.records.plan import LETTERS, Plan, spread

Floats = NDArray[np.float64]
LETTER_OF = {name: letter for letter, name in LETTERS.items()}


@dataclass(frozen=True, slots=True)
class Rise:
    """From one level of a chunk to the next one worth having."""

    part: int
    """Which chunk of the sequence."""
    letter: str
    """The level it rises to."""
    bytes: int
    seconds: float
    """That no longer have to be spent."""

    @property
    def worth(self) -> float:
        return self.seconds / self.bytes


@dataclass(frozen=True, slots=True)
class Curve:
    """A sequence's chunks in one layer: bytes kept → seconds made again, and the rises that lie between."""

    least: tuple[str, ...]
    """The level of each chunk at the fewest bytes."""
    rises: tuple[Rise, ...]
    bytes: Floats
    seconds: Floats

    def seconds_at(self, kept: Floats) -> Floats:
        """Seconds a layer with so many bytes."""
        return np.asarray(np.interp(kept, self.bytes, self.seconds), dtype=np.float64)

    @property
    def least_bytes(self) -> float:
        return float(self.bytes[0])

    @property
    def most_bytes(self) -> float:
        return float(self.bytes[-1])


def curve_of(plan: Plan, sizes: Sizes, costs: TaskSeconds) -> Curve:
    """The curve of a sequence of that plan's chunks."""
    least: list[str] = []
    rises: list[Rise] = []
    bottom_bytes = bottom_seconds = 0.0
    for part in range(plan.chunks_per_sequence):
        tokens = plan.tokens_of(part)
        points = [
            (
                level_bytes(sizes, level, tokens),
                0.0 if level == "full" else costs.recompute_s(level, tokens, part),
                level,
            )
            for level in sizes.saved
        ]
        hull = _hull(sorted(points, key=lambda point: (point[0], point[1])))
        least.append(LETTER_OF[hull[0][2]])
        bottom_bytes, bottom_seconds = bottom_bytes + hull[0][0], bottom_seconds + hull[0][1]
        for low, high in pairwise(hull):
            rises.append(Rise(part, LETTER_OF[high[2]], high[0] - low[0], low[1] - high[1]))
    rises.sort(key=lambda rise: (-rise.worth, rise.part))
    return Curve(
        least=tuple(least),
        rises=tuple(rises),
        bytes=np.cumsum([bottom_bytes, *(rise.bytes for rise in rises)]),
        seconds=bottom_seconds - np.cumsum([0.0, *(rise.seconds for rise in rises)]),
    )


def _hull(points: Sequence[tuple[int, float, str]]) -> list[tuple[int, float, str]]:
    """The points, by rising bytes, that no mixture of two others beats."""
    hull: list[tuple[int, float, str]] = []
    for point in points:
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (first, high, _), (second, low, _) = hull[-2], hull[-1]
            if (high - low) * (point[0] - second) > (low - point[1]) * (second - first):
                break
            hull.pop()
        hull.append(point)
    return hull


def choose_levels(curve: Curve, sequences: int, budget: float) -> list[list[str]]:
    """Levels of `sequences` equal sequences-in-a-layer, a letter a chunk, within a budget of bytes for all of them.

    Each rise is taken by as many of them as the budget allows, spread evenly, before the next one begins.
    """
    rows = [list(curve.least) for _ in range(sequences)]
    left = budget - sequences * curve.least_bytes
    for rise in curve.rises:
        count = min(sequences, int(left // rise.bytes)) if rise.bytes else sequences
        for index in spread(max(0, count), sequences):
            rows[index][rise.part] = rise.letter
        left -= max(0, count) * rise.bytes
        if count < sequences:
            break
    return rows
