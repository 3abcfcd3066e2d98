"""`Workload`: what one training step does with a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flopwise.base.errors import FlopwiseError
from flopwise.work.formats import Formats
from flopwise.work.op import AttentionKernel
from flopwise.work.work import Recompute

Optimizer = Literal["adamw", "lion", "sgd"]
MOMENTS: dict[Optimizer, int] = {"adamw": 2, "lion": 1, "sgd": 0}
"""Numbers that each optimizer remembers for a parameter."""

Fusion = Literal["fused", "eager"]
"""fused: neighbouring kernels bound by bytes are one, as a compiler or hand-written kernels make them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One optimizer step over a batch of equal sequences, in micro-batches whose gradients are summed."""

    sequence_tokens: int
    batch_sequences: int
    micro_batch_sequences: int
    formats: Formats
    recompute: Recompute = "none"
    attention: AttentionKernel = "flash"
    fusion: Fusion = "fused"
    optimizer: Optimizer = "adamw"

    def __post_init__(self) -> None:
        for field in ("sequence_tokens", "batch_sequences", "micro_batch_sequences"):
            if getattr(self, field) < 1:
                raise FlopwiseError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.micro_batch_sequences > self.batch_sequences:
            raise FlopwiseError(
                f"a micro-batch of {self.micro_batch_sequences} is larger than the batch of {self.batch_sequences}",
                why="a step runs the batch in micro-batches",
                hint=f"--micro {self.batch_sequences} or less",
            )

    @property
    def batch_tokens(self) -> int:
        return self.batch_sequences * self.sequence_tokens

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches in a step, the last one perhaps smaller."""
        return -(-self.batch_sequences // self.micro_batch_sequences)

    def micro_batches(self) -> tuple[tuple[int, int], ...]:
        """(sequences, how many such micro-batches): 48 in elevens is four of 11 and one of 4."""
        whole, rest = divmod(self.batch_sequences, self.micro_batch_sequences)
        return ((self.micro_batch_sequences, whole), *(((rest, 1),) if rest else ()))
