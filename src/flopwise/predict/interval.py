"""The interval around a predicted step time that held-out errors on measured steps support.

The rule, in full:

1. Which data. Those of the stack. Without a framework (`kernels`), and for flopwise's own stack, which nobody has
   measured yet: steps of compiled modules on one device, and for several devices the measured frameworks of the same
   kind (data parallelism alone, or tensor ranks and stages too) held against what their kernels and network allow. For
   a stack without data: all that was measured. Of these, the rows whose weights are sharded (ZeRO 3) or are not, as the
   set-up's are, if there are any.
2. Outside. Every dimension (parameters, sequence, devices, tensor ranks, stages, tokens of a micro-batch) stretches the
   interval by half its width for each factor of two beyond the data: 1 + ½·log2(ratio), 1 inside. A device of an
   architecture, a stack, sharded weights or a feature (context or expert parallelism, hybrid sharding, interleaved
   stages, offload, mixtures, recurrent models) that is not in the data stretches by 1.5. The stretches are multiplied,
   and the tables that the set-up is nearest to, those with the least stretch, are the ones that count.
3. The interval inside their data: from p10 to p90 of measured ÷ predicted (the lowest and the highest, where several
   tables are as near), and 1 itself, so that a prediction never lies outside its own interval.
4. Widths are of logarithms, and grow on both sides alike; so an interval outside a table's data always contains the one
   inside, and the farther outside the wider it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flopwise.records.evidence import Evidence, Span
from flopwise.setup.stack import NO_STACK

OWN_STACK = "flopwise"
"""Not measured yet; its constants are neutral, so that it is predicted as the kernels are."""
SHARDED = 3
"""The ZeRO stage that shards weights."""
UNSEEN = 1.5
"""Stretch for an architecture or a stack that the data lack."""
EACH_DOUBLING = 0.5
WIDEST = math.log(100.0)
"""No bound is farther off than this factor; beyond it an interval says that nothing is known."""

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
    """Share of the predicted seconds, at most 1."""
    high: float
    """At least 1."""
    basis: tuple[str, ...]
    """The tables whose held-out errors these are."""
    outside: tuple[str, ...]
    """What of the set-up lies outside the data, in words; none: all of it is inside."""


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
) -> SupportedInterval | None:
    """The interval of a set-up, by the rule above; None where there is no evidence at all."""
    entries = _of_stack(evidence, stack, several=devices > 1, split=tensor > 1 or pipeline > 1)
    unseen = () if entries else (f"stack {stack}",)
    entries = entries or [entry for entry in evidence if entry.measured and entry.stack != NO_STACK]
    if not entries:
        return None
    alike = [entry for entry in entries if (entry.zero == SHARDED) == (zero == SHARDED)]
    if not alike:
        unseen = (*unseen, f"ZeRO stage {zero}" if zero else "no sharding")
    asked = {
        "parameters": parameters,
        "sequence_tokens": sequence_tokens,
        "devices": devices,
        "tensor": tensor,
        "pipeline": pipeline,
        **({} if micro_tokens is None else {"micro_tokens": micro_tokens}),
    }
    far = [_far(entry, asked, architecture, features) for entry in alike or entries]
    stretch = min(each for each, _ in far)
    nearest = [(entry, words) for entry, (each, words) in zip(alike or entries, far, strict=True) if each == stretch]
    stretch *= UNSEEN ** len(unseen)
    low = math.log(min(1.0, *(1.0 + entry.low for entry, _ in nearest)))
    high = math.log(max(1.0, *(1.0 + entry.high for entry, _ in nearest)))
    more = (stretch - 1.0) * (high - low) / 2
    return SupportedInterval(
        low=math.exp(max(-WIDEST, low - more)),
        high=math.exp(min(WIDEST, high + more)),
        basis=tuple(dict.fromkeys(entry.table for entry, _ in nearest)),
        outside=(*dict.fromkeys(word for _, words in nearest for word in words), *unseen),
    )


def _far(
    entry: Evidence, asked: Mapping[str, int], architecture: str, features: Sequence[str]
) -> tuple[float, tuple[str, ...]]:
    """By how much a set-up outside of an entry's data stretches its interval, and in what it is outside."""
    ratios = {name: beyond(getattr(entry, name), value) for name, value in asked.items()}
    words = [f"{WORDS[name]} {asked[name]:,}" for name, ratio in ratios.items() if ratio > 1.0]
    known = {name.lower() for name in entry.architectures}
    missing = [f"architecture {architecture}"] if architecture.lower() not in known else []
    missing += [feature for feature in features if feature not in entry.features]
    stretch = math.prod(1.0 + EACH_DOUBLING * math.log2(ratio) for ratio in ratios.values())
    return stretch * UNSEEN ** len(missing), (*words, *missing)


def _of_stack(evidence: Sequence[Evidence], stack: str, *, several: bool, split: bool) -> list[Evidence]:
    """The entries of a stack; without one, those of as many devices and of the same kind of parallelism."""
    if stack not in (NO_STACK, OWN_STACK):
        return [entry for entry in evidence if entry.stack == stack]
    return [
        entry
        for entry in evidence
        if entry.stack == NO_STACK
        and (entry.devices.most > 1) == several
        and (entry.tensor.most > 1 or entry.pipeline.most > 1) == split
    ]


def beyond(span: Span, value: int) -> float:
    """How many times farther out a value lies than the data: 1 inside."""
    return max(1.0, span.least / value, value / span.most)
