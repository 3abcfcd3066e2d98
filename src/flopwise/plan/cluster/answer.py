"""The answer to "how should this be spread": the best strategy, why the next ones lose, what would change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flopwise.base.errors import DoesNotFit, FlopwiseError
from flopwise.plan.cluster.search import Found, Question, fastest
from flopwise.records.cluster_plan import Answer, Loser, Option, WhatIf
from flopwise.setup.parallel import Parallel

TOLD = 6
"""Other ways of splitting the model that an answer tells of."""


Steps = Callable[[str, int, int], None]
"""Told the name of the search under way, and how many of how many of its layouts are done."""


def answer(question: Question, tell: Steps | None = None) -> Answer:
    """Search, compare and ask what would change; DoesNotFit when nothing does."""
    found = _searched(question, "strategies", tell)
    if not found.options:
        raise nothing_fits(question, found)
    best = found.options[0]
    return Answer(
        best=best,
        losers=tuple(_losers(found)),
        what_if=tuple(_asked(changed, best, tell) for changed in _changes(question)),
        evaluated=found.evaluated,
        fitting=found.fitting,
        timed=found.timed,
    )


def _searched(question: Question, name: str, tell: Steps | None) -> Found:
    return fastest(question, None if tell is None else lambda done, of: tell(name, done, of))


def nothing_fits(question: Question, found: Found) -> DoesNotFit:
    """What to say when no strategy fits: the least that is needed, and what would help."""
    least = found.smallest
    gib = 2**30
    return DoesNotFit(
        f"no strategy fits {question.model.name} on {question.devices:,} × {question.hardware.name}",
        why=(
            f"of {found.evaluated:,} the smallest needs {least.device_bytes / gib:,.1f} GiB on a device that has "
            f"{question.capacity_bytes / gib:,.1f}: {least.parallel.label}, recompute "
            f"{least.workload.recompute}, micro-batch {least.workload.micro_batch_sequences}"
        ),
        hint="more --gpus" + ("" if question.offload else ", `--offload`") + ", or a shorter --seq",
        needed_bytes=int(least.device_bytes),
    )


def shape(parallel: Parallel) -> tuple[int, int, int, int]:
    """What tells ways of splitting a model apart."""
    return parallel.tensor, parallel.context, parallel.expert, parallel.pipeline


def _losers(found: Found) -> list[Loser]:
    """The best of every other shape, from the fastest on."""
    best, seen, losers = found.options[0], {shape(found.options[0].parallel)}, []
    for option in found.options[1:]:
        if shape(option.parallel) not in seen:
            seen.add(shape(option.parallel))
            lost = {name: (option.parts[name] - best.parts[name]) / best.step_s for name in best.parts}
            losers.append(Loser(option=option, slower=option.step_s / best.step_s - 1, lost=lost))
    return losers[:TOLD]


def _changes(question: Question) -> list[Question]:
    """Questions that people ask next: one more node, half the memory."""
    island = question.hardware.networks[0].devices if question.hardware.networks else None
    more = island if island and question.devices % island == 0 else 1
    return [
        replace(question, devices=question.devices + more),
        replace(question, capacity_bytes=question.capacity_bytes // 2),
    ]


def _asked(changed: Question, best: Option, tell: Steps | None) -> WhatIf:
    asked = {"devices": changed.devices, "capacity_bytes": changed.capacity_bytes}
    try:
        found = _searched(changed, "what if", tell)
    except FlopwiseError:
        # The network does not reach that far, or nothing divides that many devices.
        return WhatIf(**asked, option=None, speed=None)
    if not found.options:
        return WhatIf(**asked, option=None, speed=None)
    return WhatIf(**asked, option=found.options[0], speed=best.step_s / found.options[0].step_s)
