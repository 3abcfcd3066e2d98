"""Cuts and residencies that take the least memory, for caps that leave no room for speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import numpy as np

from flopwise.plan.device.cuts import cuts, skeleton
from flopwise.plan.device.estimate import ENDS_STAY, WEIGHTS_SHARE, Choice, Shape, update_places
from flopwise.setup.setup import CappedSetup

LEAST_HEAD_CHUNK_TOKENS = 256


def tight_shapes(setup: CappedSetup) -> Iterator[Shape]:
    """Cuts that take little memory: small chunks, few logits, one sequence a round or the whole batch in few."""
    places = update_places(setup)
    like: dict[int, Shape] = {}
    for cut in cuts(setup, tight=True):
        if cut.groups > 1 and setup.batch_sequences is None:
            continue
        plan = skeleton(setup, cut, min(LEAST_HEAD_CHUNK_TOKENS, cut.chunk_tokens))
        shape = Shape(plan, setup.model, setup.hardware, like.get(cut.chunk_tokens))
        shape.least_slots = 1
        like.setdefault(cut.chunk_tokens, shape)
        # With one round gradients never leave; a batch of several needs room for them.
        rounds = 1 if setup.batch_sequences is None else setup.batch_sequences // plan.sequences_per_round
        for place in places:
            yield shape.variant(rounds, place)


def tight_choices(shape: Shape) -> Choice:
    """A fine grid of what may stay, everything else being kept at its lowest level."""
    steps = np.unique(np.round(np.linspace(0, shape.plan.layers, 13)))
    few = np.unique(np.round(np.linspace(0, shape.plan.layers, 5)))
    axes = {
        "weights": steps,
        "gradients": few,
        "optimizer": steps,
        "ends": np.arange(ENDS_STAY, WEIGHTS_SHARE + 1),
        "passing": np.array([1]),
        "updating": np.array([1]),
        # More of them than one are of use where they lend their room to the state at the end of a step.
        "slots": np.unique(np.round(np.geomspace(1, shape.pairs, 4 if shape.plan.update_when == "end" else 1))),
        "budget": np.array([0.0]),
    }
    arrays = np.meshgrid(*(axes[field.name].astype(np.float64) for field in fields(Choice)), indexing="ij")
    return Choice(*(array.ravel() for array in arrays))
