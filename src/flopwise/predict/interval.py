"""The interval around a predicted step time that held-out errors on measured steps support.

A measured step differs from its prediction for three reasons, which are added and not multiplied, in logarithms:

    half-width = √(within² + unseen · BETWEEN²) + EACH_DOUBLING · doublings outside

1. *Within a table.* Which tables count: those of the stack. Without one (`kernels`), and for flopwise's own stack,
   which nobody has measured: compiled modules on one device, and for several devices every measured
   framework held against what its kernels and network allow. A stack without data, and one of a file, takes the same
   tables as no stack at all. Of a stack's tables those count that the set-up is least outside of, and of these the rows
   whose weights are sharded (ZeRO 3), or are not, as the set-up's. `within` is half of what lies between the bounds of
   four rows in five.
2. *Between tables.* Frameworks, architectures and years differ in their level by about ±25 % (BETWEEN), however well
   each is predicted by constants of its own. Every set-up outside gets that spread once for each thing that the tables
   lack: the stack, the device's architecture, sharded weights, a feature (context or expert parallelism, hybrid
   sharding, interleaved stages, offload, mixtures, recurrent models). Without a framework on several devices the
   framework is always one of them.
3. *Far outside.* For each factor of two that a dimension (parameters, sequence, devices, tensor ranks, stages, tokens
   of a micro-batch) lies beyond the data, EACH_DOUBLING more.

The middle is that of the interval as it stands. Without a framework on several devices it is what a set-up is expected
to take: around the mean of the tables' medians, cut where the ceiling is, which no framework reaches. The less is
known, the farther the middle of what is left lies from the ceiling. The uncut mean was tried: on tables left out it is
1.08 times too fast in the mean, where this is 0.97 (median errors of 21 % instead of 10 on mpt, 11 instead of 5 on
torchtitan). A prediction with a stack never lies outside its own interval. No interval is wider than MOST_WIDE from end
to end, and none begins before what is possible (`least`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from flopwise.records.evidence import Evidence, Span
from flopwise.setup.stack import NO_STACK

OWN_STACK = "flopwise"
"""Not measured yet; its constants are neutral, so that it is predicted as the kernels are."""
SHARDED = 3
"""The ZeRO stage that shards weights."""
BETWEEN = math.log(1.25)
"""Four of five tables lie within this of the mean level (a test holds it to the shipped ones)."""
EACH_DOUBLING = 0.035
"""nanotron's constants of 8 and 16 GPUs were 5, 9, 14 and 18 % off at 32, 64, 128, 256: 3 to 4 % a doubling."""
MOST_WIDE = math.log(4.0)

WORDS = {
    "parameters": "parameters",
    "sequence_tokens": "sequence length",
    "devices": "number of devices",
    "tensor": "tensor ranks",
    "pipeline": "pipeline stages",
    "micro_tokens": "tokens of a micro-batch",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SupportedInterval:
    """Where a measured step is expected: 8 of 10 of them inside the data."""

    low: float
    """Share of the predicted seconds."""
    high: float
    basis: tuple[str, ...]
    """The tables whose held-out errors these are."""
    outside: tuple[str, ...]
    """What of the set-up lies outside the data, in words; none: all of it is inside."""

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scatter:
    """How rows of such set-ups lie around a stack's predictions of them."""

    within: float
    """Four in five are no farther, in logarithms."""
    doublings: float
    """How far the set-up lies beyond them, over all dimensions."""


@dataclass(frozen=True, slots=True)
class _Errors:
    """Of the tables that count, in logarithms of measured ÷ predicted."""

    middle: float
    within: float
    doublings: float
    """Outside, over all dimensions."""
    lacking: tuple[str, ...]
    far: tuple[str, ...]
    basis: tuple[str, ...]


def interval(
    evidence: Sequence[Evidence],
    *,
    stack: str,
    architecture: str,
    parameters: int,
    sequence_tokens: int,
    devices: int,
    tensor: int,
    pipeline: int,
    zero: int = 0,
    features: Sequence[str] = (),
    micro_tokens: int | None = None,
    least: float = 0.0,
) -> SupportedInterval | None:
    """The interval of a set-up, by the rule above; None where there is no evidence at all.

    `least`: the share of the predicted seconds that no device, or no kernel, can be faster than.
    """
    asked = {
        "parameters": parameters,
        "sequence_tokens": sequence_tokens,
        "devices": devices,
        "tensor": tensor,
        "pipeline": pipeline,
        **({} if micro_tokens is None else {"micro_tokens": micro_tokens}),
    }
    own = [] if is_bare(stack) else [entry for entry in evidence if entry.stack == stack]
    if own:
        found = _nearest(own, asked, architecture, features, zero)
        return _bounded(found, len(found.lacking), holds=True, least=least)
    pool = _bare_entries(evidence, several=devices > 1 or not is_bare(stack))
    if not pool:
        return None
    found = _pooled(pool, asked, architecture, features)
    if is_bare(stack):
        return _bounded(found, len(found.lacking) + (devices > 1), holds=False, least=least)
    told = _Errors(0.0, found.within, found.doublings, (*found.lacking, f"stack {stack}"), found.far, found.basis)
    return _bounded(told, len(told.lacking), holds=True, least=least)


def scatter(
    evidence: Sequence[Evidence],
    *,
    stack: str,
    architecture: str,
    asked: Mapping[str, int],
    zero: int,
    features: Sequence[str],
) -> Scatter | None:
    """How rows of the stack's tables lie around it; None where it has none, or none of such a set-up."""
    own = [] if is_bare(stack) else [entry for entry in evidence if entry.stack == stack]
    found = _nearest(own, asked, architecture, features, zero) if own else None
    return None if found is None or found.lacking else Scatter(within=found.within, doublings=found.doublings)


def is_bare(stack: str) -> bool:
    """Whether no framework is in the way of the prediction: what the kernels and the network allow."""
    return stack in (NO_STACK, OWN_STACK)


def _bare_entries(evidence: Sequence[Evidence], *, several: bool) -> list[Evidence]:
    """Those of no framework, on one device or on several."""
    return [entry for entry in evidence if entry.stack == NO_STACK and (entry.devices.most > 1) == several]


def _bounded(found: _Errors, unseen: int, *, holds: bool, least: float) -> SupportedInterval:
    """The bounds; with `holds` the prediction lies between them."""
    half = math.sqrt(found.within**2 + unseen * BETWEEN**2) + EACH_DOUBLING * found.doublings
    half = min(half, MOST_WIDE / 2)
    low, high = found.middle - half, found.middle + half
    if holds:
        low, high = min(0.0, low), max(0.0, high)
        over = max(0.0, high - low - MOST_WIDE)
        # The side that lies farther from the prediction gives way.
        low, high = (low + over, high) if -low > high else (low, high - over)
    low = max(low, math.log(least)) if least > 0 else low
    return SupportedInterval(
        low=math.exp(low), high=math.exp(max(low, high)), basis=found.basis, outside=(*found.far, *found.lacking)
    )


def _nearest(
    entries: Sequence[Evidence], asked: Mapping[str, int], architecture: str, features: Sequence[str], zero: int
) -> _Errors:
    """The tables of a stack that the set-up is least outside of; the outermost bounds, where several are as near."""
    alike = [entry for entry in entries if (entry.zero == SHARDED) == (zero == SHARDED)]
    unseen = () if alike else (f"ZeRO stage {zero}" if zero else "no sharding",)
    each = [(entry, _lacking(entry, architecture, features), *_far(entry, asked)) for entry in alike or entries]
    costs = [len(lacking) * BETWEEN + doublings * EACH_DOUBLING for _, lacking, doublings, _ in each]
    near = [one for one, cost in zip(each, costs, strict=True) if cost == min(costs)]
    low = min(math.log1p(entry.low) for entry, *_ in near)
    high = max(math.log1p(entry.high) for entry, *_ in near)
    return _Errors(
        middle=(low + high) / 2,
        within=(high - low) / 2,
        doublings=near[0][2],
        lacking=(*dict.fromkeys(word for _, words, _, _ in near for word in words), *unseen),
        far=tuple(dict.fromkeys(word for *_, words in near for word in words)),
        basis=tuple(dict.fromkeys(entry.table for entry, *_ in near)),
    )


def _pooled(
    entries: Sequence[Evidence], asked: Mapping[str, int], architecture: str, features: Sequence[str]
) -> _Errors:
    """All tables together, each counting once: the means of their levels and of their spreads."""
    tables: dict[str, list[Evidence]] = {}
    for entry in entries:
        tables.setdefault(entry.table, []).append(entry)
    levels = [fmean(math.log1p(entry.level) for entry in mine) for mine in tables.values()]
    spreads = [fmean(_spread(entry) for entry in mine) for mine in tables.values()]
    doublings, far = min((_far(entry, asked) for entry in entries), key=lambda one: one[0])
    lacking = [set(_lacking(entry, architecture, features)) for entry in entries]
    everywhere = set.intersection(*lacking)
    return _Errors(
        middle=fmean(levels),
        within=fmean(spreads),
        doublings=doublings,
        lacking=tuple(word for word in _lacking(entries[0], architecture, features) if word in everywhere),
        far=far,
        basis=tuple(tables),
    )


def _spread(entry: Evidence) -> float:
    """Half of what lies between its bounds."""
    return (math.log1p(entry.high) - math.log1p(entry.low)) / 2


def _far(entry: Evidence, asked: Mapping[str, int]) -> tuple[float, tuple[str, ...]]:
    """How many doublings a set-up lies beyond an entry's data, over all dimensions, and in which."""
    ratios = {name: beyond(getattr(entry, name), value) for name, value in asked.items()}
    words = tuple(f"{WORDS[name]} {asked[name]:,}" for name, ratio in ratios.items() if ratio > 1.0)
    return sum(math.log2(ratio) for ratio in ratios.values()), words


def _lacking(entry: Evidence, architecture: str, features: Sequence[str]) -> tuple[str, ...]:
    """What of a set-up an entry's data have nothing of."""
    known = {name.lower() for name in entry.architectures}
    missing = [f"architecture {architecture}"] if architecture.lower() not in known else []
    return (*missing, *(feature for feature in features if feature not in entry.features))


def beyond(span: Span, value: int) -> float:
    """How many times farther out a value lies than the data: 1 inside."""
    return max(1.0, span.least / value, value / span.most)
