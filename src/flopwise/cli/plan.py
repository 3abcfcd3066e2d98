"""`flopwise plan`: the fastest way to spread a model over devices, why the others lose, what would change it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flopwise.cli.options import (
    FORMS,
    AttentionOption,
    BatchOption,
    BatchTokensOption,
    ConventionOption,
    DeviceMemoryOption,
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
)
from flopwise.cli.output import progress_bar, show_page

if TYPE_CHECKING:
    from flopwise.core.cluster_plan import Answer, Option
    from flopwise.core.hardware import Hardware
    from flopwise.core.model import Model
    from flopwise.core.op import Convention
    from flopwise.core.prediction import Prediction
    from flopwise.plan.search import Question
    from flopwise.predict.choose import Request


def plan(
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
    device_mem: DeviceMemoryOption = "auto",
    stack: StackOption = "kernels",
    offload: Annotated[
        bool, typer.Option("--offload", help="Optimizer state and activations may go to host memory.")
    ] = False,
    change: SetOption = None,
    write: Annotated[str, typer.Option("--write", "-w", help="Write the plan to this TOML file.")] = "",
    output: OutputOption = "table",
) -> None:
    """Find the fastest strategy that fits, among all combinations of the usual degrees; tell why the next ones lose."""
    from flopwise.core.catalog import load_model
    from flopwise.core.op import CONVENTIONS

    form = one_of(output, FORMS, "--output")
    counting = one_of(convention, CONVENTIONS, "--convention")
    request = requested(locals())
    described = load_model(model, changes_of(change or []))
    machine = hardware_named(on)
    if write:
        check_target(write)
    found = _planned(described, machine, request, offload=offload)
    prediction = _predicted(described, machine, request, found.best, counting)
    _print(prediction, found, machine.title, form)
    if write:
        _written(write, described, on, request, prediction)


def _planned(model: Model, hardware: Hardware, request: Request, *, offload: bool) -> Answer:
    import time

    from flopwise.core.units import show_seconds
    from flopwise.plan.answer import answer

    question = _question(model, hardware, request, offload=offload)
    started = time.monotonic()
    with progress_bar("strategies") as tell:
        found = answer(question, tell)
    # Not the same twice, so it is talk and not part of the answer.
    typer.echo(f"searched for {show_seconds(time.monotonic() - started)}", err=True)
    return found


PLAN_LEAVES_OPEN = ("model", "output", "convention")


def predict_plan(context: typer.Context, name: str, convention: Convention) -> tuple[Prediction, Hardware]:
    """`flopwise predict plan.toml`: the plan, predicted once more by the flopwise of today."""
    from pathlib import Path

    from flopwise.cli.evidence import predicted
    from flopwise.core.catalog import load_plan, load_stack
    from flopwise.core.errors import FlopwiseError
    from flopwise.core.formats import parse_formats
    from flopwise.core.prediction import NO_STACK
    from flopwise.predict.choose import Request

    given = [option for option in context.params if option not in PLAN_LEAVES_OPEN and is_given(context, option)]
    if given:
        raise FlopwiseError(
            f"--{given[0].replace('_', '-')} beside {name}",
            why="a plan says all of it",
            hint="the plan alone, or the model's name with options",
        )
    plan, model = load_plan(Path(name))
    request = Request(
        sequence_tokens=plan.sequence_tokens,
        batch_sequences=plan.batch_sequences,
        micro_batch_sequences=plan.micro_batch_sequences,
        formats=parse_formats(plan.precision),
        recompute=plan.recompute,
        attention=plan.attention,
        fusion=plan.fusion,
        optimizer=plan.optimizer,
        device_memory_bytes=plan.device_memory_bytes,
        parallel=plan.parallel,
        stack=None if plan.stack == NO_STACK else load_stack(plan.stack),
    )
    machine = hardware_named(plan.hardware)
    return predicted(model, machine, request, convention), machine


def _question(model: Model, hardware: Hardware, request: Request, *, offload: bool) -> Question:
    from flopwise.plan.search import Question
    from flopwise.predict.choose import PLAIN, base_workload, capacity_bytes

    workload, _ = base_workload(model, hardware, request)
    return Question(
        model=model,
        hardware=hardware,
        devices=request.parallel.devices,
        workload=workload,
        capacity_bytes=capacity_bytes(hardware, request),
        stack=request.stack or PLAIN,
        recompute=request.recompute,
        micro_batch_sequences=request.micro_batch_sequences,
        offload=offload,
    )


def _predicted(model: Model, hardware: Hardware, request: Request, best: Option, convention: Convention) -> Prediction:
    """The best as a full prediction: operators, stages, notes."""
    from dataclasses import replace

    from flopwise.cli.evidence import predicted

    fixed = replace(
        request,
        parallel=best.parallel,
        recompute=best.workload.recompute,
        micro_batch_sequences=best.workload.micro_batch_sequences,
    )
    return predicted(model, hardware, fixed, convention)


def _print(prediction: Prediction, found: Answer, title: str, form: str) -> None:
    from flopwise.report import plans

    if form == "json":
        typer.echo(plans.plan_json(prediction, found))
    elif form == "csv":
        typer.echo(plans.plan_csv(found), nl=False)
    elif form == "md":
        typer.echo(plans.plan_markdown(found), nl=False)
    else:
        show_page(plans.plan_page(prediction, found, title))


def _written(path: str, model: Model, hardware: str, request: Request, prediction: Prediction) -> None:
    from pathlib import Path

    from flopwise.core.catalog import plan_table
    from flopwise.core.cluster_plan import ClusterPlan, Expected
    from flopwise.core.files import to_toml, write_whole

    made = ClusterPlan(
        hardware=hardware,
        devices=prediction.devices,
        sequence_tokens=prediction.sequence_tokens,
        batch_sequences=prediction.batch_sequences,
        micro_batch_sequences=prediction.micro_batch_sequences,
        precision=prediction.precision,
        recompute=prediction.recompute,
        attention=request.attention,
        fusion=prediction.fusion,
        optimizer=prediction.optimizer,
        stack=prediction.stack,
        parallel=prediction.parallel,
        expected=Expected(
            step_s=prediction.step_s,
            tokens_per_s=prediction.tokens_per_s,
            mfu=prediction.mfu,
            device_bytes=prediction.device_bytes.total,
        ),
        device_memory_bytes=request.device_memory_bytes,
    )
    write_whole(Path(path), to_toml(plan_table(made, model)))
    typer.echo(f"wrote {path}", err=True)
