"""Hugging Face's `total_flos`, so that its figure in old logs can be checked and translated.

The Trainer counts 6 FLOPs per token and parameter outside embedding tables: no attention square, and pooler and
classifier as if every token went through them. It prints the count divided by 2^30 and rounded down, with "GF".
"""

from __future__ import annotations

from flopwise.work.op import Streaming
from flopwise.work.work import Work


def non_embedding_parameters(work: Work) -> int:
    """Parameters outside embedding tables; a head that is tied to one counts as embedding too."""
    tables = sum(
        weight.elements
        for op in work.ops
        if isinstance(op, Streaming) and op.kind == "embedding"
        for weight in op.weights
    )
    return work.parameters - tables


def total_flos(work: Work, sequences: int) -> int:
    """The Trainer's count after `sequences` sequences of one process."""
    return 6 * sequences * work.sequence_tokens * non_embedding_parameters(work)
