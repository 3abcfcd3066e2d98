"""Fill in what the user left open: precision, sequence, batch, micro-batch, recompute. Each choice with its reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.predict.cluster.collectives import check_reach
from flopwise.predict.cluster.costing import evaluate
from flopwise.predict.cluster.strategies import listed
from flopwise.predict.kernels.costs import peak_flops, setup_costs
from flopwise.predict.kernels.memory import device_bytes, memory_line, usable_bytes
from flopwise.records.prediction import NO_STACK
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import DEFAULT_SEQUENCE_TOKENS, SettledSetup, Setup, default_sequence
from flopwise.setup.stack import Stack
from flopwise.work.formats import POLICIES, Formats
from flopwise.work.model import Model
from flopwise.work.op import AttentionKernel
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES, Recompute


def auto_policies(kernel: AttentionKernel) -> tuple[Recompute, ...]:
    """Recompute policies worth a look: not `full`, which takes the memory of `input` and more time.

    `selective` only where it is not the same as `none`.
    """
    left_out = {"full"} | ({"selective"} if kernel == "flash" else set())
    return tuple(policy for policy in RECOMPUTE_POLICIES if policy not in left_out)


PLAIN = Stack(name=NO_STACK, title="what the kernels and the network allow", source="no framework in the way")

DEFAULT_BATCH_TOKENS = 2**19
"""Half a million tokens: enough that the optimizer's share is what it is in real pre-training."""
DEFAULT_CLASSIFIER_SEQUENCES = 32


def choose(setup: Setup) -> tuple[SettledSetup, dict[str, str]]:
    """Settle what is open: the usual number format, the fastest recompute and micro-batch that fit.

    Beside it: setting → why it has its value, for those that were left open.
    """
    base, reasons = settle_sizes(setup)
    fit = _fit if setup.is_plain else _fit_cluster
    return fit(base, setup, reasons), reasons


def settle_sizes(setup: Setup) -> tuple[SettledSetup, dict[str, str]]:
    """Settle everything but recompute and micro-batch, which stand for the least there is; and why."""
    reasons: dict[str, str] = {}
    if setup.formats:
        # Before anything else asks, so that an error names what was asked for, not what attention multiplies in.
        peak_flops(setup.hardware, setup.formats.matrix)
    else:
        reasons["precision"] = f"the first of bf16, fp16 and fp32 that {setup.hardware.name} has a peak for"
    sequence, batch = setup.sequence_tokens or _sequence(setup.model, reasons), setup.batch_sequences
    if batch is None:
        batch, reasons["batch_sequences"] = default_batch(setup.model, sequence, setup.parallel.data)
    base = setup.settle(
        sequence_tokens=sequence,
        batch_sequences=batch,
        micro=setup.micro_batch_sequences or 1,
        formats=setup.formats or usual_formats(setup.hardware),
        recompute=setup.recompute or "none",
    )
    return base, reasons


def capacity_bytes(setup: Setup) -> int:
    """The user's cap, taken as it is, or the device's memory less a reserve."""
    return usable_bytes(setup.hardware) if setup.device_cap_bytes is None else setup.device_cap_bytes


HOST_SHARE = 0.88
"""Of the host's memory, what may be planned with: the system and the loader of data need the rest."""


def default_host_bytes(hardware: Hardware) -> int:
    """Most of what the description says the host has; none where it does not say."""
    memory = hardware.host.memory_bytes if hardware.host else None
    return int(HOST_SHARE * memory.value) if memory and hardware.link else 0


def usual_formats(hardware: Hardware) -> Formats:
    """The number formats that training on a device is usually done in."""
    peaks = hardware.device.peak_flops
    return POLICIES["bf16" if "bf16" in peaks else "fp16-mixed" if "fp16" in peaks else "fp32"]


def _sequence(model: Model, reasons: dict[str, str]) -> int:
    own = model.context <= DEFAULT_SEQUENCE_TOKENS
    reasons["sequence_tokens"] = "the model's own" if own else f"the model's own is {model.context:,}"
    return default_sequence(model)


def default_batch(model: Model, sequence: int, ranks: int) -> tuple[int, str]:
    """Sequences of a step where nobody says, and why."""
    if isinstance(model, Transformer) and model.head == "classifier":
        return max(ranks, DEFAULT_CLASSIFIER_SEQUENCES), "as fine-tuning a classifier is commonly done"
    each = ", and one sequence for each data rank" if ranks > 1 else ""
    return max(ranks, DEFAULT_BATCH_TOKENS // sequence), f"about {DEFAULT_BATCH_TOKENS:,} tokens{each}"


def recompute_policies(setup: Setup) -> tuple[Recompute, ...]:
    """The one that was asked for, or those worth a look."""
    return (setup.recompute,) if setup.recompute else auto_policies(setup.attention)


def _fit(base: SettledSetup, setup: Setup, reasons: dict[str, str]) -> SettledSetup:
    """The fastest of the recompute policies, each with the largest micro-batch that fits."""
    capacity = capacity_bytes(setup)
    found = []
    for policy in recompute_policies(setup):
        tried = replace(base, recompute=policy)
        if setup.micro_batch_sequences is None:
            tried = replace(tried, micro_batch_sequences=max(1, largest_micro_batch(tried, capacity)))
        if device_bytes(tried).total <= capacity:
            found.append(tried)
    fits = bool(found)
    chosen = found[0] if fits else tried
    if len(found) > 1:
        # Of equally fast ones the first recomputes the least.
        chosen = min(found, key=lambda one: float(setup_costs(one).seconds.sum()))
    if setup.recompute is None:
        reasons["recompute"] = "the fastest that fits" if fits else "nothing fits; this takes the least memory"
    if setup.micro_batch_sequences is None:
        whole = chosen.micro_batch_sequences == chosen.batch_sequences
        largest = "the whole batch" if whole else "the largest that fits"
        reasons["micro_batch_sequences"] = largest if fits else "the smallest there is"
    return chosen


def _fit_cluster(base: SettledSetup, setup: Setup, reasons: dict[str, str]) -> SettledSetup:
    """The fastest recompute and micro-batch that fit the fullest device."""
    candidates = spread_candidates(base, setup)
    found = evaluate(listed(candidates), setup.hardware, setup.stack or PLAIN)
    fits = found.device_bytes <= capacity_bytes(setup)
    order = np.lexsort((found.step_s, np.where(fits, 0.0, found.device_bytes)))
    some = bool(fits.any())
    if setup.recompute is None:
        reasons["recompute"] = "the fastest that fits" if some else "nothing fits; this takes the least memory"
    if setup.micro_batch_sequences is None:
        reasons["micro_batch_sequences"] = "the fastest that fits" if some else "nothing fits; this takes the least"
    return candidates[int(order[0])]


def spread_candidates(base: SettledSetup, setup: Setup) -> list[SettledSetup]:
    """Every recompute policy with every micro-batch worth a look, where the model and the networks allow the split."""
    parallel, mine = base.parallel, base.rank_sequences
    parallel.check(base.model, base.sequence_tokens)
    check_reach(base.hardware.name, base.hardware.networks, parallel.devices)
    if parallel.offload_optimizer or parallel.offload_activations:
        check_link(base.hardware)
    sizes = [base.micro_batch_sequences] if setup.micro_batch_sequences else micro_batch_sizes(mine)
    if parallel.chunks > 1:
        sizes = [size for size in sizes if -(-mine // size) % parallel.pipeline == 0]
        if not sizes:
            raise FlopwiseError(
                f"{mine:,} sequences of a data rank make no whole rounds of {parallel.pipeline} micro-batches",
                why="interleaved stages take turns: their micro-batches are a multiple of the stages",
                hint=f"--batch {parallel.data * parallel.pipeline}, another --micro, or no chunks",
            )
    policies = recompute_policies(setup)
    return [replace(base, recompute=policy, micro_batch_sequences=size) for policy in policies for size in sizes]


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


def largest_micro_batch(setup: SettledSetup, capacity: int) -> int:
    """The most sequences that fit at once, 0 if not even one does."""
    one, each = memory_line(setup)
    return min(setup.batch_sequences, 1 + (capacity - one) // each) if one <= capacity else 0
