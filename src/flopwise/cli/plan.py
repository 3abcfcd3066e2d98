"""`flopwise plan`: the fastest way to spread a model over devices, why the others lose, what would change it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from flopwise.base.errors import FlopwiseError, one_of
from flopwise.base.units import parse_devices, read_option
from flopwise.cli.options import (
    PAGE_FORMS,
    SetupOptions,
    check_target,
    find_hardware,
    parse_changes,
    takes_options,
    trained_words,
)
from flopwise.cli.output import progress_bar, say, show

if TYPE_CHECKING:
    from flopwise.cli.predict import PredictOptions
    from flopwise.records.cluster_plan import Answer, ClusterPlan
    from flopwise.records.plan import Plan
    from flopwise.records.prediction import Prediction
    from flopwise.setup.hardware import Hardware
    from flopwise.setup.setup import Setup
    from flopwise.work.model import Model
    from flopwise.work.op import Convention


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SetupOptions):
    device_mem: Annotated[
        str,
        typer.Option(help="Cap on device memory: 40GiB; several as 16,24,40GiB. Default: all but a reserve of 1 GiB."),
    ] = "auto"
    host_mem: Annotated[
        str, typer.Option(help="Cap on host memory: 110GiB. Default: most of what the hardware file says there is.")
    ] = "auto"
    clip: Annotated[
        bool, typer.Option("--clip", help="Clip gradients by their global norm: the update waits for all of them.")
    ] = False
    rule: Annotated[
        str,
        typer.Option(
            help="flopwise; dataflow: the rule of that offload trainer, also of a date: dataflow-jul11, -jul17, "
            "-jul20, -jul23, -jul31, -sep19, -head (dataflow alone: jul20, its recorded runs)."
        ),
    ] = "flopwise"
    offload: Annotated[
        bool, typer.Option("--offload", help="Optimizer state and activations may go to host memory.")
    ] = False
    write: Annotated[str, typer.Option("--write", "-w", help="Write the plan to this TOML file.")] = ""
    trace: Annotated[str, typer.Option(help="Write the simulated step as a Chrome trace (Perfetto opens it).")] = ""
    heatmap: Annotated[str, typer.Option(help="Write a grid of caps as an SVG picture.")] = ""


@takes_options
def plan(options: PlanOptions) -> None:
    """Find the fastest set-up that fits.

    One device: chunks, residency, save levels and rounds under a device and a host cap, simulated before anything runs.
    Several: the strategy among all combinations of the usual degrees, and why the next ones lose.
    """
    from pathlib import Path

    from flopwise.catalog.load import load_model
    from flopwise.cli.device_plan import check_one_cap, check_one_name, plan_one_device
    from flopwise.cli.planner_file import cluster_file
    from flopwise.door.anchors import read_anchor, with_anchor
    from flopwise.door.planning import plan_cluster, write_plan
    from flopwise.report.plans import plan_document, plan_record
    from flopwise.setup.parallel import shard_all
    from flopwise.work.op import CONVENTIONS

    form = one_of(options.output, PAGE_FORMS, "--output")
    counting = one_of(options.convention, CONVENTIONS, "--convention")
    check_one_name(options.model, "model")
    check_one_name(options.on, "device")
    model = trained_words(options, options.loss_share).of(load_model(options.model, parse_changes(options.change)))
    machine = find_hardware(options.on)
    targets = (("--write", options.write, "plan.toml"), ("--trace", options.trace, "step.json"))
    for option, path, example in (*targets, ("--heatmap", options.heatmap, "caps.svg")):
        if path:
            check_target(path, option, example, inputs=(options.model, options.on))
    devices = read_option(options.gpus, "gpus", parse_devices) or 1

    def setup_under(device_mem: str) -> Setup:
        return options.setup(model, machine, name=options.on, device_mem=device_mem, clip=options.clip)

    if _is_streamed(options, model, devices):
        # Of caps there may be several.
        plan_one_device(setup_under("auto"), options, convention=counting, form=form)
        return
    check_one_cap(options.device_mem)
    # How the devices share the work is what is looked for.
    setup = setup_under(options.device_mem)
    anchor = None
    if options.anchor is not None:
        anchor = read_anchor(options.anchor, replace(setup, parallel=shard_all(devices)))
        setup = with_anchor(setup, anchor)
    answer = _search(setup, devices, offload=options.offload)
    found = plan_cluster(setup, answer, convention=counting, anchor=anchor)
    if form == "html":
        cluster_file(options, found, machine.title)
    else:
        document = plan_document(found.prediction, answer, machine.title)
        show(document, plan_record(found.prediction, answer), form, schema="cluster-plan")
    if options.write:
        write_plan(Path(options.write), found.plan, model)
        say(f"wrote {options.write}")


OF_FRAMEWORKS = ("micro", "recompute", "attention", "fusion", "stack", "anchor", "offload")
"""Options of set-ups that a framework runs."""
OF_ONE_DEVICE = ("host_mem", "clip", "rule", "trace", "heatmap")


def _is_streamed(options: PlanOptions, model: Model, devices: int) -> bool:
    """Whether one device is planned, chunk by chunk; with a framework's options it is a strategy as for several."""
    from flopwise.work.transformer import Transformer

    frameworks = [name for name in OF_FRAMEWORKS if options.is_given(name)]
    own = [name for name in OF_ONE_DEVICE if options.is_given(name)]
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


def _search(setup: Setup, devices: int, *, offload: bool) -> Answer:
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


def load_plan_alone(options: PredictOptions) -> tuple[Plan | ClusterPlan, Model]:
    """The plan of a file, for `flopwise predict plan.toml`, beside which nothing else may be said."""
    from pathlib import Path

    from flopwise.catalog.load import load_plan

    given = [option for option in options.given if option not in PLAN_LEAVES_OPEN]
    if given:
        option = {"change": "set"}.get(given[0], given[0].replace("_", "-"))
        raise FlopwiseError(
            f"--{option} beside {options.model}",
            why="a plan says all of it",
            hint="the plan alone, or the model's name with options",
        )
    return load_plan(Path(options.model))


def predict_cluster_plan(plan: ClusterPlan, model: Model, convention: Convention) -> tuple[Prediction, Hardware]:
    """A plan for several devices, predicted once more by the flopwise of today."""
    from flopwise.catalog.load import load_stack
    from flopwise.door.intervals import predict_step
    from flopwise.setup.stack import NO_STACK

    stack = None if plan.stack == NO_STACK else load_stack(plan.stack)
    machine = find_hardware(plan.hardware)
    return predict_step(plan.setup(model, machine, stack), convention), machine
