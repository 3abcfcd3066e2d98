"""Device memory by owner, for one device that holds everything.

What is counted is what the description says is alive at the worst moment of backward: the state, every kept tensor of
the micro-batch, and either the logits or the temporaries of one block, whichever is more, since the logits are gone
when the blocks' backward begins. State and gradients are all there from the start, as a trainer that preallocates them
has it. Left out by owner, and kept free as a reserve: the driver's context, the allocator's fragmentation.
"""

from __future__ import annotations

from functools import lru_cache

from flopwise.records.prediction import DeviceBytes
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import SettledSetup
from flopwise.setup.words import Fusion
from flopwise.work.describe import describe
from flopwise.work.formats import WIDTH_BYTES, Formats
from flopwise.work.held import cast_copy_bytes, logits_bytes, temporary_bytes, with_all_logits
from flopwise.work.model import Model
from flopwise.work.op import AttentionKernel
from flopwise.work.optimizers import Optimizer, update_work
from flopwise.work.traffic import saved_bytes, weights_bytes
from flopwise.work.work import Recompute

LIBRARY_WORKSPACE_BYTES = 32 * 2**20
"""What PyTorch gives cuBLAS on Hopper; other devices take 8 MiB or less."""

RESERVED_BYTES = 2**30
"""Of a device's memory: the driver's context takes about half a GiB, an allocator loses as much to fragments."""


def usable_bytes(hardware: Hardware) -> int:
    """What a program can plan with of the device's memory."""
    return max(0, int(hardware.device.dram.size_bytes.value) - RESERVED_BYTES)


def device_bytes(setup: SettledSetup) -> DeviceBytes:
    """Peak bytes by owner while a step runs."""
    fixed, each = _owners(setup, setup.recompute)
    owners = {name: fixed[name] + setup.micro_batch_sequences * each[name] for name in fixed}
    return DeviceBytes(**owners, total=sum(owners.values()))


def memory_line(setup: SettledSetup, policy: Recompute) -> tuple[int, int]:
    """Total bytes with one sequence at once, and what each further one adds."""
    fixed, each = (sum(owners.values()) for owners in _owners(setup, policy))
    return fixed + each, each


def _owners(setup: SettledSetup, policy: Recompute) -> tuple[dict[str, int], dict[str, int]]:
    return _owner_lines(
        setup.model,
        sequence_tokens=_widest(setup),
        attention=setup.attention,
        formats=setup.formats,
        fusion=setup.fusion,
        optimizer=setup.optimizer,
        policy=policy,
    )


def _widest(setup: SettledSetup) -> int:
    """Tokens of each sequence of the batch that takes the most."""
    uneven = setup.lengths is not None and setup.lengths.layout != "padded"
    return setup.lengths.longest if uneven and setup.lengths else setup.sequence_tokens


@lru_cache(maxsize=4096)
def _owner_lines(
    model: Model,
    *,
    sequence_tokens: int,
    attention: AttentionKernel,
    formats: Formats,
    fusion: Fusion,
    optimizer: Optimizer,
    policy: Recompute,
) -> tuple[dict[str, int], dict[str, int]]:
    """By owner, bytes that are there whatever the micro-batch, and those of each of its sequences."""
    work = describe(model, sequence_tokens, attention)
    widest = describe(with_all_logits(model), sequence_tokens, attention)
    logits = logits_bytes(widest, formats, fused=fusion == "fused")
    fixed = {
        "weights": weights_bytes(work, formats),
        "gradients": work.trained_parameters * WIDTH_BYTES[formats.gradients],
        "optimizer": update_work(work, optimizer, formats).state_bytes,
        "activations": 0,
        "logits": 0,
        "workspace": cast_copy_bytes(work, formats) + LIBRARY_WORKSPACE_BYTES,
    }
    each = {
        **dict.fromkeys(fixed, 0),
        "activations": saved_bytes(work, policy, formats),
        "logits": logits,
        # The blocks' temporaries take the logits' place; only what goes beyond it is memory of its own.
        "workspace": max(0, temporary_bytes(work, policy, formats) - logits),
    }
    return fixed, each
