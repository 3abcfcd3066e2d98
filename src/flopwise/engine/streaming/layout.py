"""Where things lie within a program's buffers: parameters of a part, what a layer keeps of a chunk, optimizer state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from flopwise.engine.formats import STATE_TYPES, TYPES, statistics_type
from flopwise.engine.kernels.plain_gated import split_pairs
from flopwise.records.plan import POLICY
from flopwise.records.program import ALIGNMENT_BYTES
from flopwise.work.formats import Formats
from flopwise.work.op import Gemm, Op, SaveLevel
from flopwise.work.optimizers import Moment, Optimizer, Stretch, stretches
from flopwise.work.parameters import Parameter
from flopwise.work.work import Work


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor within a buffer."""

    name: str
    start: int
    """In bytes."""
    elements: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def of(self, buffer: Tensor) -> Tensor:
        """Its numbers in a row."""
        return buffer[self.start : self.start + self.bytes].view(self.dtype)


def fields_in_order(wanted: Iterable[tuple[str, int, torch.dtype]]) -> dict[str, Field]:
    """One after another without gaps: first those whose bytes are whole lines, then whole halves of a line, and so on.

    So each begins at a multiple of the largest power of two that divides its own bytes: where its numbers may begin,
    and, for rows of a usual width, where the widest loads may, however many tokens there are.
    """
    found, start = {}, 0
    for name, elements, dtype in sorted(wanted, key=lambda entry: -gcd(entry[1] * entry[2].itemsize, ALIGNMENT_BYTES)):
        found[name] = Field(name, start, elements, dtype)
        start += found[name].bytes
    return found


class SavedTensors:
    """What a layer keeps of a chunk at each level.

    Among those that may begin at the same places, what a lower level keeps comes first; so a copy between levels is at
    most one piece for each power of two.
    """

    def __init__(
        self,
        work: Work,
        formats: Formats,
        *,
        packed: bool = False,
        paired: tuple[str, ...] = (),
        whole_products: bool = False,
    ) -> None:
        """`paired`: two of the results that lie together, to lie there in pairs.

        With `whole_products` so do queries, keys and values, of which lower levels keep a part: then the copies between
        two levels are no pieces of memory.
        """
        inside = {name for op in work.ops if op.in_block for name in (*op.inputs, *op.outputs)}
        self.each: dict[str, int] = {name: work.tensors[name].elements // work.sequence_tokens for name in inside}
        """Numbers a token of every tensor in a block."""
        compute, statistics = TYPES[formats.compute], statistics_type(formats)
        types = {"compute": compute, "fp32": statistics, "index": torch.int32}
        self.types = {name: types[work.tensors[name].format] for name in inside}
        self.rows = {
            name: op.rows // work.sequence_tokens
            for op in work.ops
            if op.in_block and isinstance(op, Gemm) and op.groups > 1
            for name in op.outputs
        }
        """Rows a token of what experts make: one for each of its experts. Everything else has one."""
        self._saved: dict[str, tuple[str, ...]] = {}
        for level, policy in POLICY.items():
            kept = [tensor for tensor in work.saved(policy) if tensor.name in inside]
            kept.sort(key=lambda tensor: tensor.level)
            self._saved[level] = tuple(tensor.name for tensor in kept)
        self.fields = lru_cache(maxsize=1024)(self._fields)
        highest = self._saved["full"]
        together = [_kept_together(op, work, highest if whole_products else ()) for op in work.ops if op.in_block]
        self._packs = [names for names in together if packed or names == paired or self.rows.keys() >= set(names)]
        if whole_products:
            self._saved["full"] = _neighbours(highest, self._packs)
        """Results of one product that only the highest level keeps: they lie beside each other, experts' always."""
        self._paired = paired

    def names(self, level: str) -> tuple[str, ...]:
        return self._saved[level]

    def _fields(self, level: str, tokens: int) -> dict[str, Field]:
        """Name → field, for a chunk of so many tokens."""
        return fields_in_order((name, self.each[name] * tokens, self.types[name]) for name in self._saved[level])

    def views(self, buffer: Tensor, level: str, tokens: int) -> dict[str, Tensor]:
        """Name → its numbers, a row for each token (and head, or expert)."""
        fields = self.fields(level, tokens)
        found = {name: field.of(buffer).view(tokens * self.rows.get(name, 1), -1) for name, field in fields.items()}
        for names in self._packs:
            rows = tokens * self.rows.get(names[0], 1) if names else tokens
            found.update(columns_of(fields, names, buffer, rows, paired=names == self._paired))
        return found

    def copies(
        self, level: str, other: str, tokens: int, *, without: Collection[str] = ()
    ) -> list[tuple[int, int, int]]:
        """(place at `level`, place at `other`, bytes) that bring over what `level` keeps, neighbours together."""
        here, there = self.fields(level, tokens), self.fields(other, tokens)
        found: list[tuple[int, int, int]] = []
        for name, field in here.items():
            if name in without:
                continue
            start = there[name].start
            if found and found[-1][0] + found[-1][2] == field.start and found[-1][1] + found[-1][2] == start:
                found[-1] = (found[-1][0], found[-1][1], found[-1][2] + field.bytes)
            else:
                found.append((field.start, start, field.bytes))
        return found


def _kept_together(op: Op, work: Work, kept: Collection[str]) -> tuple[str, ...]:
    """A product's results that are all of the highest level, or all `kept`."""
    alike = isinstance(op, Gemm) and (
        all(work.tensors[name].level == SaveLevel.EVERYTHING for name in op.outputs)
        or not set(op.outputs).difference(kept)
    )
    return op.outputs if alike else ()


def _neighbours(names: Sequence[str], packs: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Names in their order, with those of a pack behind its first."""
    of_pack = {name: tuple(pack) for pack in packs for name in pack}
    return tuple(dict.fromkeys(each for name in names for each in of_pack.get(name, (name,))))


def columns_of(
    fields: Mapping[str, Field], names: Sequence[str], buffer: Tensor, rows: int, *, paired: bool = False
) -> dict[str, Tensor]:
    """Fields that lie together, in whatever order, as columns of one tensor in this one; nothing where they do not.

    Two of them that are `paired` take turns there, number by number.
    """
    chosen = sorted((fields[name] for name in names if name in fields), key=lambda field: field.start)
    ends = [field.start + field.bytes for field in chosen]
    follows = all(end == field.start for end, field in zip(ends, chosen[1:], strict=False))
    if len(chosen) < 2 or len(chosen) != len(names) or not follows:
        return {}
    whole = buffer[chosen[0].start : ends[-1]].view(chosen[0].dtype).view(rows, -1)
    if paired:
        return dict(zip(names, split_pairs(whole), strict=True))
    widths = [fields[name].elements // rows for name in names]
    return dict(zip(names, torch.split(whole, widths, dim=1), strict=True))


@dataclass(frozen=True, slots=True)
class StateStretch:
    """Neighbouring numbers that one rule updates, and where their state lies within that of a piece."""

    what: Stretch
    fields: dict[Moment, Field]

    def of(self, state: Tensor) -> dict[Moment, Tensor]:
        """What is remembered, of a piece's bytes."""
        return {name: field.of(state) for name, field in self.fields.items()}


def state_layout(
    parameters: Sequence[Parameter], optimizer: Optimizer, formats: Formats, first: int, count: int
) -> tuple[StateStretch, ...]:
    """The state of a part's trained numbers `first` …, as it lies in a buffer."""
    found = stretches(parameters, optimizer, formats, first, count)
    wanted = [
        (f"{index} {field.name}", field.elements, STATE_TYPES[field.format])
        for index, stretch in enumerate(found)
        for field in stretch.fields
    ]
    places = fields_in_order(wanted)
    return tuple(
        StateStretch(stretch, {field.name: places[f"{index} {field.name}"] for field in stretch.fields})
        for index, stretch in enumerate(found)
    )
