"""The answer to "how should this be spread": the best strategy, why the next ones lose, what would change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flopwise.base.errors import DoesNotFit, FlopwiseError
from flopwise.plan.cluster.search import FoundStrategies, fastest
from flopwise.predict.choose import capacity_bytes, default_batch
from flopwise.records.cluster_plan import Answer, Loser, WhatIf
from flopwise.setup.parallel import Parallel
from flopwise.setup.setup import Setup, default_sequence

TOLD = 6
"""Other ways of splitting the model that an answer tells of."""


Steps = Callable[[str, int, int], None]
"""Told the name of the search under way, and how many of how many of its layouts are done."""


def answer(setup: Setup, devices: int, *, offload: bool = False, tell: Steps | None = None) -> Answer:
    """Search, compare and ask what would change; FlopwiseError (exit code 1) when nothing fits."""

    def search(name: str, setup: Setup, devices: int) -> FoundStrategies:
        progress = None if tell is None else lambda done, of: tell(name, done, of)
        return fastest(setup, devices, offload=offload, progress=progress)

    def ask(changed: Setup, devices: int) -> WhatIf:
        asked = {"devices": devices, "capacity_bytes": capacity_bytes(changed)}
        try:
            found = search("what if", changed, devices)
        except FlopwiseError:
            # The network does not reach that far, or nothing divides that many devices.
            return WhatIf(**asked, option=None, speed=None)
        if not found.options:
            return WhatIf(**asked, option=None, speed=None)
        return WhatIf(**asked, option=found.options[0], speed=best.step_s / found.options[0].step_s)

    if setup.batch_sequences is None:
        tokens = setup.sequence_tokens or default_sequence(setup.model)
        setup = replace(setup, batch_sequences=default_batch(setup.model, tokens, devices)[0])
    found = search("strategies", setup, devices)
    if not found.options:
        raise nothing_fits(setup, devices, found, offload=offload)
    best = found.options[0]
    # What people ask next: one more node, half the memory.
    half = replace(setup, device_cap_bytes=max(1, capacity_bytes(setup) // 2))
    return Answer(
        best=best,
        losers=tuple(_losers(found)),
        what_if=(ask(setup, devices + _one_more(setup, devices)), ask(half, devices)),
        evaluated=found.evaluated,
        fitting=found.fitting,
        timed=found.timed,
    )


def nothing_fits(setup: Setup, devices: int, found: FoundStrategies, *, offload: bool) -> DoesNotFit:
    """What to say when no strategy fits: the least that is needed, and what would help."""
    least = found.smallest
    gib = 2**30
    return DoesNotFit(
        f"no strategy fits {setup.model.name} on {devices:,} × {setup.hardware.name}",
        why=(
            f"of {found.evaluated:,} the smallest needs {least.device_bytes / gib:,.1f} GiB on a device that has "
            f"{capacity_bytes(setup) / gib:,.1f}: {least.parallel.label}, recompute "
            f"{least.recompute}, micro-batch {least.micro_batch_sequences}"
        ),
        hint="more --gpus" + ("" if offload else ", `--offload`") + ", or a shorter --seq",
        needed_bytes=int(least.device_bytes),
    )


def shape(parallel: Parallel) -> tuple[int, int, int, int, int]:
    """What tells ways of splitting a model apart."""
    return parallel.tensor, parallel.context, parallel.expert, parallel.sharing_experts, parallel.pipeline


def _losers(found: FoundStrategies) -> list[Loser]:
    """The best of every other shape, from the fastest on."""
    best, seen, losers = found.options[0], {shape(found.options[0].parallel)}, []
    for option in found.options[1:]:
        if shape(option.parallel) not in seen:
            seen.add(shape(option.parallel))
            lost = {name: (option.parts[name] - best.parts[name]) / best.step_s for name in best.parts}
            losers.append(Loser(option=option, slower=option.step_s / best.step_s - 1, lost=lost))
    return losers[:TOLD]


def _one_more(setup: Setup, devices: int) -> int:
    """The devices of one more node, or one more device."""
    island = setup.hardware.networks[0].devices if setup.hardware.networks else None
    return island if island and devices % island == 0 else 1
