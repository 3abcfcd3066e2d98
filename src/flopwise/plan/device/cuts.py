"""Ways to cut a batch into chunks and rounds, as plans in which nothing stays yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from flopwise.records.plan import MOST_PAIRS as MOST_PLANNED
from flopwise.records.plan import Plan, Residency
from flopwise.setup.setup import CappedSetup
from flopwise.work.transformer import Transformer

CHUNK_TOKENS = (2048, 4096, 8192, 16384, 32768, 65536)
"""Sizes of a chunk that are tried, each brought to whole sequences or to equal parts of one."""

SMALL_CHUNK_TOKENS = (1, 512, 1024)
"""For caps that hardly anything fits; 1 stands for one sequence, where it is short."""

LONG_CHUNK_TOKENS = 32768
"""Longer chunks are for sequences of many of them, and for narrow models."""
NARROW = 1024
"""So many channels make short kernels of a chunk: MPT-125M takes 1.5 % less time by 65,536 tokens than by half."""

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


@dataclass(frozen=True, slots=True)
class Cut:
    """Chunks, and how many of them a round has."""

    chunk_tokens: int
    groups: int
    span: Span


def cuts(setup: CappedSetup, *, tight: bool = False) -> Iterator[Cut]:
    """Those that are tried, the ones of equal chunks together; `tight` adds those of very small chunks."""
    model, sequence = setup.model, setup.sequence_tokens
    assert isinstance(model, Transformer)  # sizes_of refuses others
    sizes = (*SMALL_CHUNK_TOKENS, *CHUNK_TOKENS) if tight else CHUNK_TOKENS
    for chunk_tokens in _chunk_sizes(setup, sizes) if not model.uncut else _whole_sizes(setup, sizes):
        parts = -(-sequence // chunk_tokens)
        spans: tuple[Span, ...] = ("chunk",) if parts == 1 else ("sequence", "chunk") if model.causal else ("sequence",)
        for groups in _groups(setup, max(1, chunk_tokens // sequence)):
            if groups == 1 or parts * groups <= _most_chunks(model):
                for span in spans:
                    yield Cut(chunk_tokens, groups, span)


def _whole_sizes(setup: CappedSetup, sizes: Sequence[int]) -> list[int]:
    """Of whole sequences alone: `Transformer.uncut`."""
    return sorted(
        {setup.sequence_tokens, *(size for size in _chunk_sizes(setup, sizes) if size >= setup.sequence_tokens)}
    )


def _groups(setup: CappedSetup, sequences_per_chunk: int) -> list[int]:
    """Chunks, or sequences of several chunks, of a round: such that rounds make up the batch."""
    if setup.micro_batch_sequences is not None:
        return [setup.micro_batch_sequences // sequences_per_chunk]
    if setup.batch_sequences is None:
        return list(GROUPS)
    whole = setup.batch_sequences // sequences_per_chunk
    return sorted({groups for groups in (*GROUPS, whole) if whole % groups == 0})


def _chunk_sizes(setup: CappedSetup, sizes: Sequence[int]) -> list[int]:
    """Whole sequences that divide the batch, or equal parts of one."""
    sequence, batch = setup.sequence_tokens, setup.micro_batch_sequences or setup.batch_sequences
    assert isinstance(setup.model, Transformer)
    most = _most_chunks(setup.model)
    found = set()
    for tokens in sizes:
        if tokens > LONG_CHUNK_TOKENS and sequence < 8 * tokens and setup.model.hidden > NARROW:
            continue
        # Both answers of a pair are scored before either goes back.
        if tokens >= sequence or setup.model.objective == "preference":
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


def list_rounds(setup: CappedSetup, skeleton: Plan) -> tuple[int, ...]:
    """Rounds that make up the batch, or all that are tried."""
    if setup.batch_sequences is not None:
        return (-(-setup.batch_sequences // skeleton.sequences_per_round),)
    return ROUNDS


def skeleton(setup: CappedSetup, cut: Cut, head_chunk_tokens: int) -> Plan:
    """A plan of one round in which nothing stays."""
    parts = -(-setup.sequence_tokens // cut.chunk_tokens)
    round_tokens = cut.groups * max(setup.sequence_tokens, cut.chunk_tokens)
    nothing = Residency(blocks=0, passing=1)
    assert isinstance(setup.model, Transformer)
    return Plan(
        model=setup.model.name,
        hardware=setup.hardware_name or setup.hardware.name,
        device_memory_bytes=setup.device_cap_bytes,
        host_memory_bytes=setup.host_cap_bytes,
        sequence_tokens=setup.sequence_tokens,
        lengths=setup.lengths.words if setup.lengths else None,
        chunk_tokens=cut.chunk_tokens,
        chunks_per_round=parts * cut.groups,
        rounds_per_step=1,
        head_chunk_tokens=max(head_chunk_tokens, -(-round_tokens // MOST_PLANNED)),
        attention=cut.span,
        weights=nothing,
        gradients=nothing,
        optimizer_state=nothing,
        activation_slots=1,
        saves=("f" * parts * cut.groups,) * setup.model.layers,
        precision=setup.formats.name,
        optimizer=setup.optimizer,
        update_when="end" if setup.clip else "backward",
    )
