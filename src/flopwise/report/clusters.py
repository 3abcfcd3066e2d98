"""What a prediction over several devices has more than one over one: memory by stage, time by part."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from flopwise.base.units import show_bytes, show_seconds, show_share
from flopwise.records.prediction import DeviceBytes, Prediction, StagePrediction

PART_WORDS = {
    "products": "matrix products",
    "attention": "attention",
    "streaming": "norms, activations, loss",
    "host": "waiting for the host",
    "interference": "slowed by collectives",
    "tensor": "tensor-parallel collectives",
    "context": "context ring, exposed",
    "expert": "expert all-to-all",
    "sharding": "gathers and reductions, exposed",
    "stages": "from stage to stage",
    "bubble": "pipeline bubble",
    "update": "optimizer, weights sent round",
    "offload": "copies to the host, exposed",
    "step": "once a step",
}
"""Parts of a step in words."""

OWNERS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")


def stage_table(prediction: Prediction) -> Table:
    """Memory of one device of the first, the fullest and the last stage, by owner, and whether it fits."""
    stages = _shown(prediction.stages)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("memory of a device", no_wrap=True)
    for stage in stages:
        table.add_column(_title(stage, len(prediction.stages)), justify="right", no_wrap=True)
    for owner in OWNERS:
        table.add_row(owner, *(show_bytes(getattr(stage.device_bytes, owner)) for stage in stages))
    table.add_row("total", *(_total(stage.device_bytes, prediction.device_capacity_bytes) for stage in stages))
    return table


def _shown(stages: tuple[StagePrediction, ...]) -> list[StagePrediction]:
    fullest = max(stages, key=lambda stage: stage.device_bytes.total)
    return sorted(
        {stage.stage: stage for stage in (stages[0], fullest, stages[-1])}.values(), key=lambda one: one.stage
    )


def _title(stage: StagePrediction, count: int) -> str:
    if count == 1:
        return "every device"
    return f"stage {stage.stage + 1} of {count} ({stage.layers} layers)"


def _total(memory: DeviceBytes, capacity: int) -> Text:
    fits = memory.total <= capacity
    sign, style = ("✓", "green") if fits else ("✗", "red")
    return Text(f"{sign} {show_bytes(memory.total)}", style=style)


def time_table(prediction: Prediction) -> Table:
    """What the step's seconds are made of, the parts that are worth a line."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("time of a step", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for name, seconds in prediction.parts.items():
        if seconds > 0:
            table.add_row(PART_WORDS[name], show_seconds(seconds), show_share(seconds / prediction.step_s))
    table.add_row("total", show_seconds(prediction.step_s), show_share(1.0))
    return table
