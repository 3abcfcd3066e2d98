"""Rows of one of our matrices that lie in another order in a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flopwise.work.recurrence import Recurrence
from flopwise.work.transformer import Transformer


class RowOrder(Protocol):
    """How rows change their order on the way to a file and back."""

    def to_file(self, value: Tensor) -> Tensor: ...
    def from_file(self, value: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Together:
    """Some ranges of our rows, which a file has by head: of each range the first head's, then the next one's."""

    heads: int
    ranges: tuple[tuple[int, int], ...]
    """First row and rows of each, in the order that a head has them in the file."""

    @property
    def rows(self) -> int:
        return sum(count for _, count in self.ranges)


@dataclass(frozen=True, slots=True)
class Regrouped:
    """Groups of rows that lie together by head; they follow each other in the file."""

    groups: tuple[Together, ...]

    def to_file(self, value: Tensor) -> Tensor:
        return torch.cat(list(self._written(value)))

    def _written(self, value: Tensor) -> Iterator[Tensor]:
        for group in self.groups:
            parts = (value[first : first + count] for first, count in group.ranges)
            yield torch.cat([torch.unflatten(part, 0, (group.heads, -1)) for part in parts], 1).flatten(0, 1)

    def from_file(self, value: Tensor) -> Tensor:
        found, begin = torch.empty_like(value), 0
        for group in self.groups:
            by_head = torch.unflatten(value[begin : begin + group.rows], 0, (group.heads, -1))
            widths = [count // group.heads for _, count in group.ranges]
            for (first, count), part in zip(group.ranges, torch.split(by_head, widths, 1), strict=True):
                found[first : first + count] = part.flatten(0, 1)
            begin += group.rows
        return found


def gated_heads(model: Transformer) -> Regrouped:
    """Queries, keys, values and gates, where a file has each head's query and gate together."""
    queries, keys = model.query_width, model.kv_width
    gates = (queries + 2 * keys, queries)
    return Regrouped(
        (
            Together(model.heads, ((0, queries), gates)),
            Together(1, ((queries, keys),)),
            Together(1, ((queries + keys, keys),)),
        )
    )


def states_by_key(recurrence: Recurrence) -> Regrouped:
    """Qwen3-Next's: each key head's query, key, values and gates together, and its shares and steps."""
    width, keys, heads = recurrence.width, recurrence.key_width, recurrence.heads
    mixed = ((width, keys), (width + keys, keys), (width + 2 * keys, width), (0, width))
    steps = 2 * width + 2 * keys
    return Regrouped(
        (
            Together(recurrence.key_heads, mixed),
            Together(recurrence.key_heads, ((steps, heads), (steps + heads, heads))),
        )
    )
