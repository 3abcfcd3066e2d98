"""`flopwise predict`: one training step, or many of them side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopwise.cli.options import (
    FORMS,
    METHODS,
    MOST_SET_UPS,
    AttentionOption,
    BatchListOption,
    BatchTokensListOption,
    ConventionOption,
    DeviceMemoryOption,
    FusionOption,
    GpusListOption,
    MethodOption,
    MicroListOption,
    ModelArgument,
    OnOption,
    OptimizerOption,
    OutputOption,
    ParallelOption,
    PrecisionOption,
    RecomputeOption,
    SequenceListOption,
    SetOption,
    StackOption,
    changes_of,
    hardware_named,
    is_given,
    names,
    one_of,
    set_ups,
    too_many_set_ups,
)
from flopwise.cli.output import one_or_all, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flopwise.records.prediction import Prediction
    from flopwise.setup.setup import Setup
    from flopwise.work.op import Convention


AUTO_PARALLEL = "auto: everything sharded over all devices, as FSDP does; `flopwise plan` looks for better"


def predict(
    context: typer.Context,
    model: ModelArgument,
    on: OnOption = "this-machine",
    seq: SequenceListOption = "auto",
    batch: BatchListOption = "auto",
    batch_tokens: BatchTokensListOption = "auto",
    micro: MicroListOption = "auto",
    precision: PrecisionOption = "auto",
    recompute: RecomputeOption = "auto",
    optimizer: OptimizerOption = "adamw",
    attention: AttentionOption = "auto",
    fusion: FusionOption = "auto",
    convention: ConventionOption = "causal",
    device_mem: DeviceMemoryOption = "auto",
    gpus: GpusListOption = "auto",
    parallel: ParallelOption = "auto",
    stack: StackOption = "kernels",
    change: SetOption = None,
    method: MethodOption = "physical",
    print_out: Annotated[
        bool, typer.Option("--print-out", help="With --method deepflow: its own print-out, line by line, and stop.")
    ] = False,
    output: OutputOption = "table",
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print every setting and where it came from, and stop.")
    ] = False,
) -> None:
    """Predict a training step: time, tokens per second, MFU, HFU, memory by owner, what binds each operator."""
    from flopwise.catalog.load import is_plan, load_model
    from flopwise.cli.deepflow import predict_deepflow, refuse_print_out
    from flopwise.door.intervals import predicted
    from flopwise.work.op import CONVENTIONS

    form = one_of(output, FORMS, "--output")
    if one_of(method, METHODS, "--method") == "deepflow":
        predict_deepflow(context, form)
        return
    if print_out:
        raise refuse_print_out()
    counting = one_of(convention, CONVENTIONS, "--convention")
    if is_plan(model):
        _show_plan(context, model, counting, form)
        return
    asks = set_ups(locals())
    changes = changes_of(change or [])
    models = [load_model(name, changes) for name in names(model, "a model")]
    machines = [hardware_named(name) for name in names(on, "a device (--on)")]
    count = len(models) * len(machines) * len(asks)
    if count > MOST_SET_UPS:
        raise too_many_set_ups(count)
    setups = [ask(one, machine) for one in models for machine in machines for ask in asks]
    if show_config:
        _print_settings([_settings(context, setup) for setup in setups], form)
        return
    predictions = [predicted(setup, counting) for setup in setups]
    _print_predictions(predictions, {machine.name: machine.title for machine in machines}, form)


def _show_plan(context: typer.Context, name: str, convention: Convention, form: str) -> None:
    from flopwise.cli.device_plan import show_plan_file
    from flopwise.cli.plan import plan_in, predict_cluster_plan
    from flopwise.records.plan import Plan

    plan, model = plan_in(context, name)
    if isinstance(plan, Plan):
        show_plan_file(plan, model, convention, form)
        return
    prediction, machine = predict_cluster_plan(plan, model, convention)
    _print_predictions([prediction], {machine.name: machine.title}, form)


def _print_predictions(predictions: list[Prediction], titles: dict[str, str], form: str) -> None:
    from flopwise.report.predictions import predictions_document

    show(predictions_document(predictions, titles), one_or_all(predictions), form, schema="prediction")


# -- every setting and where it came from ----------------------------------------------------------------------------


def _settings(context: typer.Context, asked: Setup) -> dict[str, dict[str, Any]]:
    """Setting → its value and its origin: the argument, a flag, a default, or `auto` and the reason."""
    from flopwise.predict.choose import capacity_bytes, choose

    setup, reasons = choose(asked)

    def origin(option: str, setting: str = "") -> str:
        if setting in reasons:
            return f"auto: {reasons[setting]}"
        return "flag" if is_given(context, option) else "default"

    batch = "batch" if context.params["batch_tokens"].lower() == "auto" else "batch_tokens"
    settings: dict[str, tuple[object, str]] = {
        "model": (setup.model.name, "argument"),
        "hardware": (setup.hardware.name, origin("on")),
        "devices": (setup.parallel.devices, origin("gpus")),
        "parallel": (
            setup.parallel.label,
            origin("parallel") if setup.parallel.devices == 1 or is_given(context, "parallel") else AUTO_PARALLEL,
        ),
        "stack": (setup.stack.name if setup.stack else context.params["stack"].lower(), origin("stack")),
        "sequence_tokens": (setup.sequence_tokens, origin("seq", "sequence_tokens")),
        "batch_sequences": (setup.batch_sequences, origin(batch, "batch_sequences")),
        "micro_batch_sequences": (setup.micro_batch_sequences, origin("micro", "micro_batch_sequences")),
        "precision": (setup.formats.name, origin("precision", "precision")),
        "recompute": (setup.recompute, origin("recompute", "recompute")),
        "device_memory_bytes": (
            capacity_bytes(setup),
            "auto: the device's memory less a reserve" if setup.device_cap_bytes is None else "flag",
        ),
        "optimizer": (setup.optimizer, origin("optimizer")),
        "attention": (setup.attention, origin("attention")),
        "fusion": (setup.fusion, origin("fusion")),
        "convention": (context.params["convention"].lower(), origin("convention")),
        "set": (changes_of(context.params["change"] or []), origin("change")),
    }
    return {name: {"value": value, "from": where} for name, (value, where) in settings.items()}


def _print_settings(settings: Sequence[dict[str, dict[str, Any]]], form: str) -> None:
    from flopwise.report.document import Document, Table

    columns = ("model", "hardware", "setting", "value", "from")
    rows = [
        [found["model"]["value"], found["hardware"]["value"], name, _setting_words(item["value"]), item["from"]]
        for found in settings
        for name, item in found.items()
    ]
    each = len(rows) // len(settings)
    folded = {"value": 0, "from": 0}
    document = Document(
        blocks=[
            Table(
                columns=columns[2:], rows=[row[2:] for row in rows[start : start + each]], left=columns, folded=folded
            )
            for start in range(0, len(rows), each)
        ],
        tables=[Table(columns=columns, rows=rows, left=columns)],
        rows=[dict(zip(columns, row, strict=True)) for row in rows],
    )
    show(document, one_or_all(settings), form, schema="settings")


def _setting_words(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items()) or "-"
    return str(value)
