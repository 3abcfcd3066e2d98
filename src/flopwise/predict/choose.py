"""Fill in what the user left open: precision, sequence, batch, micro-batch, recompute. Each choice with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.predict.cluster.collectives import check_reach
from flopwise.predict.cluster.costing import cost_laid_out, evaluate, peak_bytes
from flopwise.predict.kernels.calls import Floats
from flopwise.predict.kernels.costs import cost_together, peak_flops
from flopwise.predict.kernels.memory import device_bytes, memory_line, usable_bytes
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import DEFAULT_SEQUENCE_TOKENS, SettledSetup, Setup, default_sequence
from flopwise.work.formats import POLICIES, Formats, parse_formats
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


DEFAULT_BATCH_TOKENS = 2**19
"""Half a million tokens: enough that the optimizer's share is what it is in real pre-training."""
DEFAULT_CLASSIFIER_SEQUENCES = 32


class ChosenSetup(NamedTuple):
    """A set-up with nothing left open, and why: setting → why it has its value, for those that were."""

    setup: SettledSetup
    reasons: dict[str, str]


def choose(asked: Sequence[Setup]) -> list[ChosenSetup]:
    """Settle what set-ups leave open: the usual number format, the fastest recompute and micro-batch that fit."""
    settled = [settle_sizes(setup) for setup in asked]
    tried = [_candidates(base, setup) for (base, _), setup in zip(settled, asked, strict=True)]
    is_open = [setup.recompute is None or setup.micro_batch_sequences is None for setup in asked]
    seconds, taken = _cost([one for some, so in zip(tried, is_open, strict=True) if so for one in some])
    found, begin = [], 0
    for setup, (_, reasons), some, so in zip(asked, settled, tried, is_open, strict=True):
        best = 0
        if so:
            rows = slice(begin, begin := begin + len(some))
            fits = taken[rows] <= capacity_bytes(setup)
            # Of equally fast ones the first recomputes the least.
            best = int(np.lexsort((seconds[rows], np.where(fits, 0.0, taken[rows])))[0])
            reasons.update(_reasons(setup, some[best], fits=bool(fits[best])))
        found.append(ChosenSetup(some[best], reasons))
    return found


def _cost(setups: Sequence[SettledSetup]) -> tuple[Floats, Floats]:
    """Seconds of a step and bytes of the fullest device, of each set-up."""
    seconds, taken = np.zeros(len(setups)), np.zeros(len(setups))
    plain = [place for place, setup in enumerate(setups) if setup.is_plain]
    for rows, costs in cost_together([setups[place] for place in plain], SettledSetup.micro_batches):
        seconds[np.array(plain)[rows]] = costs.seconds.sum(axis=(1, 2))
    taken[plain] = [device_bytes(setups[place]).total for place in plain]
    others = [place for place, setup in enumerate(setups) if not setup.is_plain]
    for rows, _, costed in cost_laid_out([setups[place] for place in others], evaluate):
        mine = np.array(others)[rows]
        seconds[mine], taken[mine] = costed.step_s, costed.device_bytes
    return seconds, taken


def _reasons(setup: Setup, chosen: SettledSetup, *, fits: bool) -> dict[str, str]:
    """Why recompute and micro-batch are what they are, where they were left open."""
    found = {}
    if setup.recompute is None:
        found["recompute"] = "the fastest that fits" if fits else "nothing fits; this takes the least memory"
    if setup.micro_batch_sequences is None:
        if not setup.is_plain:
            words = "the fastest that fits" if fits else "nothing fits; this takes the least"
        elif not fits:
            words = "the smallest there is"
        else:
            whole = chosen.micro_batch_sequences == chosen.batch_sequences
            words = "the whole batch" if whole else "the largest that fits"
        found["micro_batch_sequences"] = words
    return found


def settle_sizes(setup: Setup) -> tuple[SettledSetup, dict[str, str]]:
    """Settle everything but recompute and micro-batch, which stand for the least there is; and why."""
    reasons: dict[str, str] = {}
    if setup.formats:
        # Before anything else asks, so that an error names what was asked for, not what attention multiplies in.
        peak_flops(setup.hardware, setup.formats.matrix)
    else:
        reasons["precision"] = f"the first of bf16, fp16-mixed and fp32 that {setup.hardware.name} has a peak for"
    sequence, batch = setup.sequence_tokens or _sequence(setup, reasons), setup.batch_sequences
    if batch is None:
        batch, reasons["batch_sequences"] = default_batch(setup.model, sequence, setup.parallel.data)
    base = setup.settle(
        sequence_tokens=sequence,
        batch_sequences=batch,
        micro=setup.micro_batch_sequences or 1,
        formats=setup.formats or usual_formats(setup.hardware, setup.model),
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


def usual_formats(hardware: Hardware, model: Model) -> Formats:
    """The number formats that training on a device is usually done in.

    Adapters are few: they and their state are in fp32 beside a frozen model in 16 bits, as PEFT has them.
    """
    peaks = hardware.device.peak_flops
    if getattr(model, "adapters", None):
        narrow = next((name for name in ("bf16", "fp16") if name in peaks), None)
        return parse_formats(f"{narrow}-amp,base={narrow}" if narrow else "fp32")
    return POLICIES["bf16" if "bf16" in peaks else "fp16-mixed" if "fp16" in peaks else "fp32"]


def _sequence(setup: Setup, reasons: dict[str, str]) -> int:
    if setup.lengths is not None:
        reasons["sequence_tokens"] = "the longest of the lengths"
        return setup.lengths.longest
    model = setup.model
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


def memory_lines(asked: Sequence[Setup]) -> list[list[tuple[int, int]]]:
    """Bytes of the fullest device with one sequence at once, and of each further one, by policy of each set-up."""
    found, tried = [], []
    for setup in asked:
        base, _ = settle_sizes(replace(setup, batch_sequences=2 * setup.parallel.data, micro_batch_sequences=None))
        policies = recompute_policies(setup)
        found.append([memory_line(base, policy) for policy in policies] if setup.is_plain else [])
        if not setup.is_plain:
            tried += [replace(base, recompute=policy, micro_batch_sequences=n) for policy in policies for n in (1, 2)]
    taken = np.zeros(len(tried))
    for rows, _, some in cost_laid_out(tried, peak_bytes):
        taken[rows] = some
    pairs = iter([(ceil(one), ceil(two) - ceil(one)) for one, two in taken.reshape(-1, 2).tolist()])
    return [
        lines or [next(pairs) for _ in recompute_policies(setup)] for lines, setup in zip(found, asked, strict=True)
    ]


def _candidates(base: SettledSetup, setup: Setup) -> list[SettledSetup]:
    """What to choose from."""
    if not setup.is_plain:
        return _spread_candidates(base, setup)
    capacity, found = capacity_bytes(setup), []
    for policy in recompute_policies(setup):
        one, each = memory_line(base, policy)
        micro = base.micro_batch_sequences
        if setup.micro_batch_sequences is None:
            # The largest that fits is the fastest, or nearly.
            micro = max(1, min(base.batch_sequences, 1 + (capacity - one) // each))
        last = policy, micro
        if one + (micro - 1) * each <= capacity:
            found.append(last)
    return [replace(base, recompute=policy, micro_batch_sequences=micro) for policy, micro in found or [last]]


def _spread_candidates(base: SettledSetup, setup: Setup) -> list[SettledSetup]:
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
