"""`flopwise plan`: the fastest way to spread a model over devices, why the others lose, what would change it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated

import typer

from flopwise.cli.device_plan import (
    ClipOption,
    DeviceWords,
    HeatmapOption,
    HostMemoryOption,
    RuleOption,
    TraceOption,
    check_one_cap,
    check_one_name,
    plan_one_device,
)
from flopwise.cli.options import (
    FORMS,
    AttentionOption,
    BatchOption,
    BatchTokensOption,
    ConventionOption,
    FusionOption,
    GpusOption,
    MicroOption,
    OptimizerOption,
    OutputOption,
    PrecisionOption,
    RecomputeOption,
    SequenceOption,
    SetOption,
    StackOption,
    changes_of,
    check_target,
    hardware_named,
    is_given,
    one_of,
    requested,
    value_of,
)
from flopwise.cli.output import progress_bar, say, show

if TYPE_CHECKING:
    from flopwise.records.cluster_plan import Answer, ClusterPlan
    from flopwise.records.plan import Plan
    from flopwise.records.prediction import Prediction
    from flopwise.setup.hardware import Hardware
    from flopwise.setup.setup import Setup
    from flopwise.work.model import Model
    from flopwise.work.op import Convention


PlanDeviceMemoryOption = Annotated[
    str, typer.Option(help="Cap on device memory: 40GiB; several as 16,24,40GiB. Default: all but a reserve of 1 GiB.")
]


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Catalogue name, config.json or its folder, or a TOML.")],
    on: Annotated[str, typer.Option(help="Hardware: catalogue name or TOML; this-machine.")] = "this-machine",
    gpus: GpusOption = "auto",
    seq: SequenceOption = "auto",
    batch: BatchOption = "auto",
    batch_tokens: BatchTokensOption = "auto",
    micro: MicroOption = "auto",
    precision: PrecisionOption = "auto",
    recompute: RecomputeOption = "auto",
    optimizer: OptimizerOption = "adamw",
    attention: AttentionOption = "auto",
    fusion: FusionOption = "auto",
    convention: ConventionOption = "causal",
    device_mem: PlanDeviceMemoryOption = "auto",
    host_mem: HostMemoryOption = "auto",
    clip: ClipOption = False,
    rule: RuleOption = "flopwise",
    stack: StackOption = "kernels",
    offload: Annotated[
        bool, typer.Option("--offload", help="Optimizer state and activations may go to host memory.")
    ] = False,
    change: SetOption = None,
    write: Annotated[str, typer.Option("--write", "-w", help="Write the plan to this TOML file.")] = "",
    trace: TraceOption = "",
    heatmap: HeatmapOption = "",
    output: OutputOption = "table",
) -> None:
    """Find the fastest set-up that fits.

    One device: chunks, residency, save levels and rounds under a device and a host cap, simulated before anything runs.
    Several: the strategy among all combinations of the usual degrees, and why the next ones lose.
    """
    words = dict(locals())
    from pathlib import Path

    from flopwise.base.units import parse_devices
    from flopwise.catalog.load import load_model
    from flopwise.door.planning import planned_cluster, write_plan
    from flopwise.report.plans import plan_document, plan_record
    from flopwise.work.op import CONVENTIONS

    form = one_of(output, FORMS, "--output")
    counting = one_of(convention, CONVENTIONS, "--convention")
    # Several caps are read later, where one device is planned.
    ask = requested({**words, "device_mem": "auto"})
    check_one_name(model, "model")
    check_one_name(on, "device")
    described = load_model(model, changes_of(change or []))
    machine = hardware_named(on)
    for option, example in TARGETS.items():
        if words[option]:
            check_target(words[option], f"--{option}", example, inputs=(model, on))
    devices = value_of(words, "gpus", parse_devices) or 1
    if _is_streamed(context, described, devices):
        chosen = DeviceWords(**{field.name: words[field.name] for field in fields(DeviceWords)})
        plan_one_device(ask(described, machine), chosen, convention=counting, form=form)
        return
    check_one_cap(device_mem)
    # How the devices share the work is what is looked for.
    setup = replace(requested({**words, "gpus": "auto"})(described, machine), hardware_name=on)
    answer = _planned(setup, devices, offload=offload)
    found = planned_cluster(setup, answer, convention=counting)
    document = plan_document(found.prediction, answer, machine.title)
    show(document, plan_record(found.prediction, answer), form, schema="cluster-plan")
    if write:
        write_plan(Path(write), found.plan, described)
        say(f"wrote {write}")


TARGETS = {"write": "plan.toml", "trace": "step.json", "heatmap": "caps.svg"}
"""Options that name a file to write, and an example of one."""

OF_FRAMEWORKS = ("micro", "recompute", "attention", "fusion", "stack", "offload")
"""Options of set-ups that a framework runs."""
OF_ONE_DEVICE = ("host_mem", "clip", "rule", "trace", "heatmap")


def _is_streamed(context: typer.Context, model: Model, devices: int) -> bool:
    """Whether one device is planned, chunk by chunk; with a framework's options it is a strategy as for several."""
    from flopwise.base.errors import FlopwiseError
    from flopwise.work.transformer import Transformer

    frameworks = [name for name in OF_FRAMEWORKS if is_given(context, name)]
    own = [name for name in OF_ONE_DEVICE if is_given(context, name)]
    several = devices > 1
    if own and (several or frameworks):
        other = "--gpus" if several else f"--{frameworks[0]}"
        option = own[0].replace("_", "-")
        raise FlopwiseError(
            f"--{option} beside {other}",
            why=f"--{option} is for one device that flopwise itself runs",
            hint=f"without {other}, or without --{option}",
        )
    return bool(own) or (isinstance(model, Transformer) and not several and not frameworks)


def _planned(setup: Setup, devices: int, *, offload: bool) -> Answer:
    import time

    from flopwise.base.units import show_seconds
    from flopwise.plan.cluster.answer import answer

    started = time.monotonic()
    with progress_bar("strategies") as tell:
        found = answer(setup, devices, offload=offload, tell=tell)
    # Not the same twice, so it is talk and not part of the answer.
    say(f"searched for {show_seconds(time.monotonic() - started)}")
    return found


PLAN_LEAVES_OPEN = ("model", "output", "convention")


def plan_in(context: typer.Context, name: str) -> tuple[Plan | ClusterPlan, Model]:
    """The plan of a file, for `flopwise predict plan.toml`, beside which nothing else may be said."""
    from pathlib import Path

    from flopwise.base.errors import FlopwiseError
    from flopwise.catalog.load import load_plan

    given = [option for option in context.params if option not in PLAN_LEAVES_OPEN and is_given(context, option)]
    if given:
        option = {"change": "set"}.get(given[0], given[0].replace("_", "-"))
        raise FlopwiseError(
            f"--{option} beside {name}",
            why="a plan says all of it",
            hint="the plan alone, or the model's name with options",
        )
    return load_plan(Path(name))


def predict_cluster_plan(plan: ClusterPlan, model: Model, convention: Convention) -> tuple[Prediction, Hardware]:
    """A plan for several devices, predicted once more by the flopwise of today."""
    from flopwise.catalog.load import load_stack
    from flopwise.door.intervals import predicted
    from flopwise.records.prediction import NO_STACK

    stack = None if plan.stack == NO_STACK else load_stack(plan.stack)
    machine = hardware_named(plan.hardware)
    return predicted(plan.setup(model, machine, stack), convention), machine
