"""Ways to cut a batch into chunks and rounds, as plans in which nothing stays yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from flopwise.records.plan import MOST_PAIRS as MOST_PLANNED
from flopwise.records.plan import Plan, Residency
from flopwise.setup.hardware import Hardware
from flopwise.setup.workload import Optimizer
from flopwise.work.formats import POLICIES, Formats
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer

CHUNK_TOKENS = (2048, 4096, 8192, 16384, 32768, 65536)
"""Sizes of a chunk that are tried, each brought to whole sequences or to equal parts of one."""

SMALL_CHUNK_TOKENS = (1, 512, 1024)
"""For caps that hardly anything fits; 1 stands for one sequence, where it is short."""

LONG_CHUNK_TOKENS = 32768
"""Longer chunks are for sequences of many of them."""

HEAD_CHUNK_TOKENS = (8192, 4096, 1024)
"""With more tokens at once the head's gradient is read and written less often; with fewer the logits are smaller."""

GROUPS = (1, 2, 4, 8)
"""Sequences, or chunks of short ones, of a round; a whole batch in one round is tried too."""

ROUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)

MOST_CHUNKS = 64
MOST_PAIRS = 3072
"""Of a round: beyond so many chunks, or (layer, chunk), only larger chunks are tried."""
LEAST_MOST_CHUNKS = 16

Span = Literal["sequence", "chunk"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceQuestion:
    """What is to be planned for one device."""

    model: Model
    hardware: Hardware
    sequence_tokens: int
    device_bytes: int
    host_bytes: int = 0
    hardware_name: str = ""
    """As the user named it, for the plan; nothing: by its own name."""
    formats: Formats = POLICIES["bf16"]
    optimizer: Optimizer = "adamw"
    batch_sequences: int | None = None
    """None: the fewest rounds that keep the update's share small."""
    round_sequences: int | None = None
    """Sequences of every round, the last of which may have fewer: the micro-batch. None: the fastest."""
    clip: bool = False
    """Gradients are clipped by their global norm, so that no update can come before the last of them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Chunks, and how many of them a round has."""

    chunk_tokens: int
    groups: int
    span: Span


def cuts(question: DeviceQuestion, *, tight: bool = False) -> Iterator[Cut]:
    """Those that are tried, the ones of equal chunks together; `tight` adds those of very small chunks."""
    model, sequence = question.model, question.sequence_tokens
    assert isinstance(model, Transformer)  # sizes_of refuses others
    for chunk_tokens in _chunk_sizes(question, (*SMALL_CHUNK_TOKENS, *CHUNK_TOKENS) if tight else CHUNK_TOKENS):
        parts = -(-sequence // chunk_tokens)
        spans: tuple[Span, ...] = ("chunk",) if parts == 1 else ("sequence", "chunk") if model.causal else ("sequence",)
        for groups in _groups(question, max(1, chunk_tokens // sequence)):
            if groups == 1 or parts * groups <= _most_chunks(model):
                for span in spans:
                    yield Cut(chunk_tokens, groups, span)


def _groups(question: DeviceQuestion, sequences_per_chunk: int) -> list[int]:
    """Chunks, or sequences of several chunks, of a round: such that rounds make up the batch."""
    if question.round_sequences is not None:
        return [question.round_sequences // sequences_per_chunk]
    if question.batch_sequences is None:
        return list(GROUPS)
    whole = question.batch_sequences // sequences_per_chunk
    return sorted({groups for groups in (*GROUPS, whole) if whole % groups == 0})


def _chunk_sizes(question: DeviceQuestion, sizes: Sequence[int]) -> list[int]:
    """Whole sequences that divide the batch, or equal parts of one."""
    sequence, batch = question.sequence_tokens, question.round_sequences or question.batch_sequences
    assert isinstance(question.model, Transformer)
    most = _most_chunks(question.model)
    found = set()
    for tokens in sizes:
        if tokens > LONG_CHUNK_TOKENS and sequence < 8 * tokens:
            continue
        if tokens >= sequence:
            count = max(1, tokens // sequence)
            if batch is not None:
                count = max(number for number in range(1, min(count, batch) + 1) if batch % number == 0)
            found.add(count * sequence)
        else:
            found.add(-(-sequence // min(round(sequence / tokens), most)))
    return sorted(found)


def _most_chunks(model: Transformer) -> int:
    """Chunks of a round beyond which a program would have too many tasks to be searched in a moment."""
    return min(MOST_CHUNKS, max(LEAST_MOST_CHUNKS, MOST_PAIRS // model.layers))


def head_chunks(cut: Cut) -> list[int]:
    """Head chunks that are tried, the largest first."""
    return sorted({min(tokens, cut.chunk_tokens) for tokens in HEAD_CHUNK_TOKENS}, reverse=True)


def rounds_tried(question: DeviceQuestion, skeleton: Plan) -> tuple[int, ...]:
    """Rounds that make up the batch, or all that are tried."""
    if question.batch_sequences is not None:
        return (-(-question.batch_sequences // skeleton.sequences_per_round),)
    return ROUNDS


def skeleton(question: DeviceQuestion, cut: Cut, head_chunk_tokens: int) -> Plan:
    """A plan of one round in which nothing stays."""
    parts = -(-question.sequence_tokens // cut.chunk_tokens)
    round_tokens = cut.groups * max(question.sequence_tokens, cut.chunk_tokens)
    nothing = Residency(blocks=0, passing=1)
    assert isinstance(question.model, Transformer)
    return Plan(
        hardware=question.hardware_name or question.hardware.name,
        device_memory_bytes=question.device_bytes,
        host_memory_bytes=question.host_bytes,
        sequence_tokens=question.sequence_tokens,
        chunk_tokens=cut.chunk_tokens,
        chunks_per_round=parts * cut.groups,
        rounds_per_step=1,
        head_chunk_tokens=max(head_chunk_tokens, -(-round_tokens // MOST_PLANNED)),
        attention=cut.span,
        weights=nothing,
        gradients=nothing,
        optimizer_state=nothing,
        activation_slots=1,
        saves=("f" * parts * cut.groups,) * question.model.layers,
        precision=question.formats.name,
        optimizer=question.optimizer,
        update_when="end" if question.clip else "backward",
    )
