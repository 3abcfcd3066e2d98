"""The interval around a predicted step time that held-out errors on measured steps support.

The rule, in full:

1. Which data. Those of the stack. Without a framework (`kernels`), and for flopwise's own stack, which nobody has
   measured yet: steps of compiled modules on one device, and for several devices the measured frameworks of the same
   kind (data parallelism alone, or tensor ranks and stages too) held against what their kernels and network allow. For
   a stack without data: all that was measured, and that the stack is not in the data counts as outside.
2. The interval inside the data: from the lowest p10 to the highest p90 of measured ÷ predicted, and 1 itself, so that
   a prediction never lies outside its own interval.
3. Outside. Every dimension (parameters, sequence, devices, tensor ranks, stages, tokens of a micro-batch) stretches the
   interval by half its width for each factor of two beyond the nearest data: 1 + ½·log2(ratio), 1 inside. A device
   of an architecture, or a stack, that is not in the data stretches by 1.5. The stretches are multiplied.
4. Widths are of logarithms, and grow on both sides alike; so an interval outside the data always contains the one
   inside, and the farther outside the wider it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flopwise.core.evidence import Evidence, Span
from flopwise.core.prediction import NO_STACK

OWN_STACK = "flopwise"
"""Not measured yet; its constants are neutral, so that it is predicted as the kernels are."""
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
class Interval:
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
    micro_tokens: int | None = None,
) -> Interval | None:
    """The interval of a set-up, by the rule above; None where there is no evidence at all."""
    known = NO_STACK if stack == OWN_STACK else stack
    entries = [entry for entry in evidence if entry.stack == known]
    if known == NO_STACK:
        split = tensor > 1 or pipeline > 1
        entries = [
            entry
            for entry in entries
            if (entry.devices.most > 1) == (devices > 1) and (entry.tensor.most > 1 or entry.pipeline.most > 1) == split
        ]
    unseen_stack = not entries
    if unseen_stack:
        entries = [entry for entry in evidence if entry.measured and entry.stack != NO_STACK]
    if not entries:
        return None
    asked = {
        "parameters": parameters,
        "sequence_tokens": sequence_tokens,
        "devices": devices,
        "tensor": tensor,
        "pipeline": pipeline,
        **({} if micro_tokens is None else {"micro_tokens": micro_tokens}),
    }
    stretch, outside = 1.0, []
    for name, value in asked.items():
        ratio = min(beyond(getattr(entry, name), value) for entry in entries)
        if ratio > 1.0:
            stretch *= 1.0 + EACH_DOUBLING * math.log2(ratio)
            outside.append(f"{WORDS[name]} {value:,}")
    if not any(architecture.lower() == seen.lower() for entry in entries for seen in entry.architectures):
        stretch *= UNSEEN
        outside.append(f"architecture {architecture}")
    if unseen_stack:
        stretch *= UNSEEN
        outside.append(f"stack {stack}")
    low = math.log(min(1.0, *(1.0 + entry.low for entry in entries)))
    high = math.log(max(1.0, *(1.0 + entry.high for entry in entries)))
    more = (stretch - 1.0) * (high - low) / 2
    return Interval(
        low=math.exp(max(-WIDEST, low - more)),
        high=math.exp(min(WIDEST, high + more)),
        basis=tuple(dict.fromkeys(entry.table for entry in entries)),
        outside=tuple(outside),
    )


def beyond(span: Span, value: int) -> float:
    """How many times farther out a value lies than the data: 1 inside."""
    return max(1.0, span.least / value, value / span.most)
