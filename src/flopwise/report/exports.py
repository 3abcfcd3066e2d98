"""A plan for another trainer, by the trainer's name."""

from __future__ import annotations

from collections.abc import Callable

from flopwise.core.errors import unknown_name
from flopwise.core.model import Model
from flopwise.report import export_accelerate, export_deepspeed, export_megatron, export_torchtitan
from flopwise.report.exporting import AnyPlan, Export, check_plan

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
