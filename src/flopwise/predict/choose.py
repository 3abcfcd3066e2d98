"""Fill in what the user left open: precision, sequence, batch, micro-batch, recompute. Each choice with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flopwise.core.describe import describe
from flopwise.core.errors import FlopwiseError
from flopwise.core.formats import POLICIES, Formats
from flopwise.core.hardware import Hardware
from flopwise.core.model import Model
from flopwise.core.op import AttentionKernel
from flopwise.core.transformer import Transformer
from flopwise.core.work import RECOMPUTE_POLICIES, Recompute, Work
from flopwise.core.workload import Fusion, Optimizer, Workload
from flopwise.predict.memory import device_bytes, usable_bytes

DEFAULT_SEQUENCE_TOKENS = 8192
DEFAULT_BATCH_TOKENS = 2**19
"""Half a million tokens: enough that the optimizer's share is what it is in real pre-training."""
DEFAULT_CLASSIFIER_SEQUENCES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was asked for; None where flopwise is to choose."""

    sequence_tokens: int | None = None
    batch_sequences: int | None = None
    batch_tokens: int | None = None
    micro_batch_sequences: int | None = None
    formats: Formats | None = None
    recompute: Recompute | None = None
    attention: AttentionKernel = "flash"
    fusion: Fusion = "fused"
    optimizer: Optimizer = "adamw"
    device_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A complete workload, and in words what was chosen for the user and why."""

    workload: Workload
    reasons: dict[str, str]
    """Setting → why it has its value, for those that were left open."""


def choose(model: Model, hardware: Hardware, request: Request) -> Chosen:
    """Complete a request: the usual number format, the least recompute that fits, the largest micro-batch that fits."""
    reasons: dict[str, str] = {}
    formats = request.formats or _formats(hardware, reasons)
    sequence = request.sequence_tokens or _sequence(model, reasons)
    batch = _batch(model, request, sequence, reasons)
    base = Workload(
        sequence_tokens=sequence,
        batch_sequences=batch,
        micro_batch_sequences=request.micro_batch_sequences or 1,
        formats=formats,
        recompute=request.recompute or "none",
        attention=request.attention,
        fusion=request.fusion,
        optimizer=request.optimizer,
    )
    work = describe(model, sequence, request.attention)
    capacity = capacity_bytes(hardware, request)
    return Chosen(workload=_fit(work, base, request, capacity, reasons), reasons=reasons)


def capacity_bytes(hardware: Hardware, request: Request) -> int:
    """The user's cap, taken as it is, or the device's memory less a reserve."""
    return usable_bytes(hardware) if request.device_memory_bytes is None else request.device_memory_bytes


def _formats(hardware: Hardware, reasons: dict[str, str]) -> Formats:
    peaks = hardware.device.peak_flops
    name = "bf16" if "bf16" in peaks else "fp16-mixed" if "fp16" in peaks else "fp32"
    reasons["precision"] = f"the first of bf16, fp16 and fp32 that {hardware.name} has a peak for"
    return POLICIES[name]


def _sequence(model: Model, reasons: dict[str, str]) -> int:
    reasons["sequence_tokens"] = f"the model's {model.context:,}, at most {DEFAULT_SEQUENCE_TOKENS:,}"
    return min(model.context, DEFAULT_SEQUENCE_TOKENS)


def _batch(model: Model, request: Request, sequence: int, reasons: dict[str, str]) -> int:
    if request.batch_sequences is not None and request.batch_tokens is not None:
        raise FlopwiseError(
            "both a batch in sequences and one in tokens were given",
            why="one follows from the other and the sequence length",
            hint="keep --batch or --batch-tokens",
        )
    if request.batch_sequences is not None:
        return request.batch_sequences
    if request.batch_tokens is not None:
        if request.batch_tokens % sequence:
            whole = max(1, round(request.batch_tokens / sequence))
            raise FlopwiseError(
                f"{request.batch_tokens:,} tokens are not a whole number of sequences of {sequence:,}",
                hint=f"--batch-tokens {whole * sequence}, or --batch {whole}",
            )
        return request.batch_tokens // sequence
    if isinstance(model, Transformer) and model.head == "classifier":
        reasons["batch_sequences"] = "as fine-tuning a classifier is commonly done"
        return DEFAULT_CLASSIFIER_SEQUENCES
    reasons["batch_sequences"] = f"about {DEFAULT_BATCH_TOKENS:,} tokens"
    return max(1, DEFAULT_BATCH_TOKENS // sequence)


def _fit(work: Work, base: Workload, request: Request, capacity: int, reasons: dict[str, str]) -> Workload:
    policies = (request.recompute,) if request.recompute else RECOMPUTE_POLICIES
    for policy in policies:
        workload = replace(base, recompute=policy)
        if request.micro_batch_sequences is None:
            workload = replace(workload, micro_batch_sequences=max(1, largest_micro_batch(work, workload, capacity)))
        if device_bytes(work, workload).total <= capacity:
            break
    else:
        if request.recompute is None:
            reasons["recompute"] = "nothing fits; this takes the least memory"
        return workload
    if request.recompute is None:
        reasons["recompute"] = "the least that fits"
    if request.micro_batch_sequences is None:
        reasons["micro_batch_sequences"] = "the largest that fits"
    return workload


def largest_micro_batch(work: Work, workload: Workload, capacity: int) -> int:
    """The most sequences that fit at once, 0 if not even one does; memory is a constant plus a part for each."""
    single = replace(workload, micro_batch_sequences=1)
    one = device_bytes(work, single).total
    two = device_bytes(work, replace(single, batch_sequences=max(2, single.batch_sequences), micro_batch_sequences=2))
    each = two.total - one
    if one > capacity:
        return 0
    return min(workload.batch_sequences, 1 + (capacity - one) // each)
