"""A plan for another trainer, by the trainer's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flopwise.base.errors import unknown_name
from flopwise.report.export import accelerate, deepspeed, megatron, torchtitan
from flopwise.report.export.ledger import AnyPlan, Export, check_plan
from flopwise.work.model import Model


class Target(NamedTuple):
    """Another trainer."""

    export: Callable[[AnyPlan, Model], Export]
    version: str
    """The release whose field names are written."""
    file: str
    """What such a file is usually called."""


TARGETS = {
    "torchtitan": Target(torchtitan.to_torchtitan, torchtitan.VERSION, "train.toml"),
    "accelerate": Target(accelerate.to_accelerate, accelerate.VERSION, "accelerate.yaml"),
    "deepspeed": Target(deepspeed.to_deepspeed, deepspeed.VERSION, "ds_config.json"),
    "megatron": Target(megatron.to_megatron, megatron.VERSION, "megatron.args"),
}


def export_plan(plan: AnyPlan, model: Model, target: str) -> Export:
    """The plan as the target's configuration; an error where the target could not train the same."""
    if target not in TARGETS:
        raise unknown_name("trainer", target, TARGETS, hint=f"--to {' | '.join(TARGETS)}")
    check_plan(plan, model)
    return TARGETS[target].export(plan, model)
