"""Fill in what the user left open: precision, sequence, batch, micro-batch, recompute. Each choice with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.predict.cluster.collectives import check_reach
from flopwise.predict.cluster.costing import evaluate
from flopwise.predict.cluster.strategies import listed
from flopwise.predict.kernels.costs import peak_flops, workload_costs
from flopwise.predict.kernels.memory import device_bytes, memory_line, usable_bytes
from flopwise.records.prediction import NO_STACK
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel
from flopwise.setup.stack import Stack
from flopwise.setup.workload import MOMENTS, Fusion, Optimizer, Workload
from flopwise.work.describe import describe
from flopwise.work.formats import POLICIES, Formats, parse_formats
from flopwise.work.model import Model
from flopwise.work.op import AttentionKernel
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES, Recompute, Work


def auto_policies(kernel: AttentionKernel) -> tuple[Recompute, ...]:
    """Recompute policies worth a look: not `full`, which takes the memory of `input` and more time.

    `selective` only where it is not the same as `none`.
    """
    left_out = {"full"} | ({"selective"} if kernel == "flash" else set())
    return tuple(policy for policy in RECOMPUTE_POLICIES if policy not in left_out)


PLAIN = Stack(name=NO_STACK, title="what the kernels and the network allow", source="no framework in the way")

DEFAULT_SEQUENCE_TOKENS = 8192
DEFAULT_BATCH_TOKENS = 2**19
"""Half a million tokens: enough that the optimizer's share is what it is in real pre-training."""
DEFAULT_CLASSIFIER_SEQUENCES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was asked for; None where flopwise is to choose. `formats` may be a policy's name."""

    sequence_tokens: int | None = None
    batch_sequences: int | None = None
    batch_tokens: int | None = None
    micro_batch_sequences: int | None = None
    formats: Formats | str | None = None
    recompute: Recompute | None = None
    attention: AttentionKernel = "flash"
    fusion: Fusion = "fused"
    optimizer: Optimizer = "adamw"
    device_memory_bytes: int | None = None
    parallel: Parallel = field(default_factory=Parallel)
    stack: Stack | None = None
    """None: what the kernels and the network allow."""

    @property
    def is_plain(self) -> bool:
        """Whether it is one device with everything on it and no framework in the way."""
        return self.stack is None and self.parallel == Parallel()

    def __post_init__(self) -> None:
        counts = ("sequence_tokens", "batch_sequences", "batch_tokens", "micro_batch_sequences", "device_memory_bytes")
        for name in counts:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise FlopwiseError(f"{name} must be a whole number of at least 1, got {value!r}", hint="None: auto")
        words = {
            "recompute": RECOMPUTE_POLICIES,
            "attention": get_args(AttentionKernel),
            "fusion": get_args(Fusion),
            "optimizer": tuple(MOMENTS),
        }
        for name, known in words.items():
            value = getattr(self, name)
            if value not in known and not (name == "recompute" and value is None):
                raise unknown_name(name, str(value), known, hint=f"one of {', '.join(known)}")
        if isinstance(self.formats, str):
            object.__setattr__(self, "formats", parse_formats(self.formats))


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A complete workload, and in words what was chosen for the user and why."""

    workload: Workload
    reasons: dict[str, str]
    """Setting → why it has its value, for those that were left open."""


def choose(model: Model, hardware: Hardware, request: Request) -> Chosen:
    """Complete a request: the usual number format, the fastest recompute and micro-batch that fit."""
    base, reasons = base_workload(model, hardware, request)
    fit = _fit if request.is_plain else _fit_cluster
    return Chosen(workload=fit(model, hardware, base, request, reasons), reasons=reasons)


def base_workload(model: Model, hardware: Hardware, request: Request) -> tuple[Workload, dict[str, str]]:
    """The request with everything but recompute and micro-batch completed, and why."""
    reasons: dict[str, str] = {}
    formats = request.formats or _formats(hardware, reasons)
    assert isinstance(formats, Formats)  # Request has turned a name into its policy
    if request.formats:
        # Before anything else asks, so that an error names what was asked for, not what attention multiplies in.
        peak_flops(hardware, formats.matrix)
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
    return base, reasons


def capacity_bytes(hardware: Hardware, request: Request) -> int:
    """The user's cap, taken as it is, or the device's memory less a reserve."""
    cap, there = request.device_memory_bytes, int(hardware.device.dram.size_bytes.value)
    if cap is None:
        return usable_bytes(hardware)
    if cap > there:
        raise FlopwiseError(
            f"a cap of {cap / 2**30:,.1f} GiB is more than {hardware.name} has",
            why=f"it has {there / 2**30:,.1f} GiB of device memory",
            hint="a smaller --device-mem, or leave it out to use all there is",
        )
    return cap


HOST_SHARE = 0.88
"""Of the host's memory, what may be planned with: the system and the loader of data need the rest."""


def default_host_bytes(hardware: Hardware) -> int:
    """Most of what the description says the host has; none where it does not say."""
    memory = hardware.host.memory_bytes if hardware.host else None
    return int(HOST_SHARE * memory.value) if memory and hardware.link else 0


def _formats(hardware: Hardware, reasons: dict[str, str]) -> Formats:
    peaks = hardware.device.peak_flops
    name = "bf16" if "bf16" in peaks else "fp16-mixed" if "fp16" in peaks else "fp32"
    reasons["precision"] = f"the first of bf16, fp16 and fp32 that {hardware.name} has a peak for"
    return POLICIES[name]


def _sequence(model: Model, reasons: dict[str, str]) -> int:
    own = model.context <= DEFAULT_SEQUENCE_TOKENS
    reasons["sequence_tokens"] = "the model's own" if own else f"the model's own is {model.context:,}"
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
        return max(request.parallel.data, DEFAULT_CLASSIFIER_SEQUENCES)
    reasons["batch_sequences"] = f"about {DEFAULT_BATCH_TOKENS:,} tokens, and one sequence for each data rank"
    if request.parallel.data == 1:
        reasons["batch_sequences"] = f"about {DEFAULT_BATCH_TOKENS:,} tokens"
    return max(request.parallel.data, DEFAULT_BATCH_TOKENS // sequence)


def _fit(model: Model, hardware: Hardware, base: Workload, request: Request, reasons: dict[str, str]) -> Workload:
    """The fastest of the recompute policies, each with the largest micro-batch that fits."""
    capacity = capacity_bytes(hardware, request)
    work = describe(model, base.sequence_tokens, base.attention)
    policies = (request.recompute,) if request.recompute else auto_policies(base.attention)
    found = []
    for policy in policies:
        workload = replace(base, recompute=policy)
        if request.micro_batch_sequences is None:
            workload = replace(workload, micro_batch_sequences=max(1, largest_micro_batch(work, workload, capacity)))
        if device_bytes(work, workload).total <= capacity:
            found.append(workload)
    fits = bool(found)
    chosen = found[0] if fits else workload
    if len(found) > 1:
        # Of equally fast ones the first recomputes the least.
        chosen = min(found, key=lambda one: float(workload_costs(model, hardware, one).seconds.sum()))
    if request.recompute is None:
        reasons["recompute"] = "the fastest that fits" if fits else "nothing fits; this takes the least memory"
    if request.micro_batch_sequences is None:
        whole = chosen.micro_batch_sequences == chosen.batch_sequences
        largest = "the whole batch" if whole else "the largest that fits"
        reasons["micro_batch_sequences"] = largest if fits else "the smallest there is"
    return chosen


def _fit_cluster(
    model: Model, hardware: Hardware, base: Workload, request: Request, reasons: dict[str, str]
) -> Workload:
    """The fastest recompute and micro-batch that fit the fullest device."""
    parallel = request.parallel
    parallel.check(model, base.sequence_tokens)
    check_reach(hardware.name, hardware.networks, parallel.devices)
    if parallel.offload_optimizer or parallel.offload_activations:
        check_link(hardware)
    if base.batch_sequences < parallel.data:
        raise FlopwiseError(
            f"a batch of {base.batch_sequences:,} sequences is less than one for each of {parallel.data:,} data ranks",
            why="a data rank without a sequence has nothing to do",
            hint=f"--batch {parallel.data}, or fewer data ranks",
        )
    policies = (request.recompute,) if request.recompute else auto_policies(base.attention)
    given = request.micro_batch_sequences
    mine = -(-base.batch_sequences // parallel.data)
    sizes = [given] if given else micro_batch_sizes(mine)
    if given is not None and given > mine:
        raise FlopwiseError(
            f"a micro-batch of {given:,} is larger than a data rank's {mine:,} of the batch's sequences",
            why=f"each of {parallel.data:,} data ranks runs its own part in micro-batches",
            hint=f"--micro {mine} or less",
        )
    if parallel.chunks > 1:
        sizes = [size for size in sizes if -(-mine // size) % parallel.pipeline == 0]
        if not sizes:
            raise FlopwiseError(
                f"{mine:,} sequences of a data rank make no whole rounds of {parallel.pipeline} micro-batches",
                why="interleaved stages take turns: their micro-batches are a multiple of the stages",
                hint=f"--batch {parallel.data * parallel.pipeline}, another --micro, or no chunks",
            )
    candidates = [replace(base, recompute=policy, micro_batch_sequences=size) for policy in policies for size in sizes]
    found = evaluate(listed([(model, parallel, one) for one in candidates], hardware), hardware, request.stack or PLAIN)
    fits = found.device_bytes <= capacity_bytes(hardware, request)
    order = np.lexsort((found.step_s, np.where(fits, 0.0, found.device_bytes)))
    some = bool(fits.any())
    if request.recompute is None:
        reasons["recompute"] = "the fastest that fits" if some else "nothing fits; this takes the least memory"
    if given is None:
        reasons["micro_batch_sequences"] = "the fastest that fits" if some else "nothing fits; this takes the least"
    return candidates[int(order[0])]


def check_link(hardware: Hardware) -> None:
    """Refuse to move state over a link that nobody described."""
    if hardware.link is None:
        raise FlopwiseError(
            f"{hardware.name} has no link to host memory in its description",
            why="what is kept on the host goes over that link, and its rate decides the time",
            hint="without what is kept on the host (--offload, --host-mem), or add [link] to a TOML of your own"
            " (`flopwise show NAME -w mine.toml` starts one)",
        )


def micro_batch_sizes(most: int) -> list[int]:
    """Micro-batches worth a look: powers of two, three times such, and all at once."""
    doubled = [2**power for power in range(most.bit_length())]
    return sorted({*doubled, *(size * 3 // 2 for size in doubled if size > 1 and size * 3 // 2 <= most), most})


def largest_micro_batch(work: Work, workload: Workload, capacity: int) -> int:
    """The most sequences that fit at once, 0 if not even one does."""
    one, each = memory_line(work, workload)
    return min(workload.batch_sequences, 1 + (capacity - one) // each) if one <= capacity else 0
