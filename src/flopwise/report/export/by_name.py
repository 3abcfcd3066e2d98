"""A plan for another trainer, by the trainer's name."""

from __future__ import annotations

from collections.abc import Callable

from flopwise.base.errors import unknown_name
from flopwise.report.export import accelerate as export_accelerate
from flopwise.report.export import deepspeed as export_deepspeed
from flopwise.report.export import megatron as export_megatron
from flopwise.report.export import torchtitan as export_torchtitan
from flopwise.report.export.ledger import AnyPlan, Export, check_plan
from flopwise.work.model import Model

TARGETS: dict[str, Callable[[AnyPlan, Model], Export]] = {
    "torchtitan": export_torchtitan.to_torchtitan,
    "accelerate": export_accelerate.to_accelerate,
    "deepspeed": export_deepspeed.to_deepspeed,
    "megatron": export_megatron.to_megatron,
}

VERSIONS = {
    "torchtitan": export_torchtitan.VERSION,
    "accelerate": export_accelerate.VERSION,
    "deepspeed": export_deepspeed.VERSION,
    "megatron": export_megatron.VERSION,
}
"""The releases whose field names are written."""

FILES = {
    "torchtitan": "train.toml",
    "accelerate": "accelerate.yaml",
    "deepspeed": "ds_config.json",
    "megatron": "megatron.args",
}
"""What such a file is usually called."""


def export_plan(plan: AnyPlan, model: Model, target: str) -> Export:
    """The plan as the target's configuration; an error where the target could not train the same."""
    if target not in TARGETS:
        raise unknown_name("trainer", target, TARGETS, hint=f"--to {' | '.join(TARGETS)}")
    check_plan(plan, model)
    return TARGETS[target](plan, model)
