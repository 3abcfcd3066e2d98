"""`flopwise predict`: one training step, or many of them side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopwise.base.errors import FlopwiseError, one_of
from flopwise.base.units import parse_counts, parse_devices, parse_tokens, read_option
from flopwise.cli.options import (
    FORMS,
    METHODS,
    PAGE_FORMS,
    MethodOption,
    SetupOptions,
    find_hardware,
    parse_changes,
    split_names,
    takes_options,
    trained_words,
)
from flopwise.cli.output import one_or_all, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flopwise.records.prediction import Prediction
    from flopwise.setup.setup import Setup
    from flopwise.work.op import Convention


AUTO_PARALLEL = "auto: everything sharded over all devices, as FSDP does; `flopwise plan` looks for better"
SEVERAL = "several with commas or as 1-8*2."
MOST_SET_UPS = 1000
"""More than that is a sweep, which predicts thousands at once."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(SetupOptions):
    model: Annotated[
        str,
        typer.Argument(help="Catalogue name, config.json or its folder, or a TOML, several with commas; or a plan."),
    ]
    on: Annotated[
        str, typer.Option(help="Hardware: catalogue name or TOML, several with commas; this-machine, this-cpu.")
    ] = "this-machine"
    seq: Annotated[str, typer.Option(help=f"Tokens of a sequence: 8192, 8k; {SEVERAL}")] = "auto"
    batch: Annotated[str, typer.Option(help=f"Sequences of a step, over all micro-batches; {SEVERAL}")] = "auto"
    batch_tokens: Annotated[str, typer.Option(help=f"The same in tokens: 512k, 2M; {SEVERAL}")] = "auto"
    micro: Annotated[str, typer.Option(help=f"Sequences that run at once; {SEVERAL}")] = "auto"
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Steps are captured and replayed: no kernel waits for the host.")
    ] = False
    gpus: Annotated[str, typer.Option(help=f"Devices: 8, 64; {SEVERAL}")] = "auto"
    parallel: Annotated[
        list[str] | None,
        typer.Option(
            help="How several devices share the work, as `flopwise plan` prints it: dp2 tp8 pp4 cp2 ep2 etp1 "
            "once-a-node zero3 shard8 sp kept prefetch2 balanced chunks2 gpipe optimizer-on-host activations-on-host "
            "overlap-tensor. To compare: again, or with commas."
        ),
    ] = None
    method: MethodOption = "physical"
    print_out: Annotated[
        bool, typer.Option("--print-out", help="With --method deepflow: its own print-out, line by line, and stop.")
    ] = False
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print every setting and where it came from, and stop.")
    ] = False


@takes_options
def predict(options: PredictOptions) -> None:
    """Predict a training step: time, tokens per second, MFU, HFU, memory by owner, what binds each operator."""
    from flopwise.catalog.load import is_plan, load_model
    from flopwise.cli.deepflow import predict_deepflow, refuse_print_out
    from flopwise.cli.planner_file import predict_file
    from flopwise.door.intervals import predict_steps
    from flopwise.work.op import CONVENTIONS

    form = one_of(options.output, PAGE_FORMS, "--output")
    if one_of(options.method, METHODS, "--method") == "deepflow":
        predict_deepflow(options, one_of(form, FORMS, "--output"))
        return
    if options.print_out:
        raise refuse_print_out()
    counting = one_of(options.convention, CONVENTIONS, "--convention")
    if is_plan(options.model):
        _show_plan(options, counting, form)
        return
    cases = _expand(options)
    changes = parse_changes(options.change)
    trained = trained_words(options, options.loss_share)
    named = {name: trained.of(load_model(name, changes)) for name in split_names(options.model, "a model")}
    devices = {name: find_hardware(name) for name in split_names(options.on, "a device (--on)")}
    strategies = _split_strategies(options.parallel)
    if form == "html" and not options.show_config:
        _check_page(strategies)
        predict_file(options, named, devices, counting)
        return
    models, machines = list(named.values()), list(devices.values())
    _check_count(len(models) * len(machines) * len(cases) * len(strategies))
    setups = [
        case.setup(
            model,
            machine,
            name=machine.name,
            device_mem=case.device_mem,
            devices=case.gpus,
            parallel=strategy,
            cuda_graphs=case.cuda_graphs,
        )
        for model in models
        for machine in machines
        for case in cases
        for strategy in strategies
    ]
    if options.show_config:
        _print_settings([_settings(options, setup) for setup in setups], form)
        return
    found = predict_steps(setups, counting, options.anchor)
    _print_predictions(found, {machine.name: machine.title for machine in machines}, form)


def _expand(options: PredictOptions) -> list[PredictOptions]:
    """The options of each set-up: every combination of the numbers that are lists or ranges."""
    from itertools import product

    lists = (
        _split_counts(options.gpus, "gpus", "64,256"),
        _split_counts(options.seq, "seq", "2k,8k"),
        _split_counts(options.batch, "batch", "64,256"),
        _split_counts(options.batch_tokens, "batch-tokens", "512k,2M"),
        _split_counts(options.micro, "micro", "1,2,4"),
    )
    _check_count(prod(map(len, lists)))
    return [
        replace(options, gpus=gpus, seq=seq, batch=batch, batch_tokens=tokens, micro=micro)
        for gpus, seq, batch, tokens, micro in product(*lists)
    ]


def _check_page(strategies: Sequence[str]) -> None:
    """Refuse what the page's sliders have no place for."""
    if len(strategies) > 1:
        raise FlopwiseError("-o html of several strategies", why="a page is of one", hint="one --parallel, or -o md")


def _split_strategies(given: list[str] | None) -> list[str]:
    """Every strategy that was named, each once; a comma stands between two of them."""
    named = [part.strip() for text in given or ["auto"] for part in text.split(",")]
    found = list(dict.fromkeys(named))
    if not all(found):
        raise FlopwiseError("--parallel names no strategy", hint='--parallel "dp8 zero3,tp8 sp", or auto')
    return found


def _split_counts(text: str, option: str, example: str) -> list[str]:
    """The values of an option, each as it would be typed alone."""
    if not any(sign in text.strip()[1:] for sign in ",*+-"):
        return [text]
    parse = parse_devices if option == "gpus" else parse_tokens
    found = read_option(text, option, lambda text: parse_counts(text, parse, example, auto=option != "gpus"))
    return list(dict.fromkeys(str(value) for value in found or ()))


def _check_count(count: int) -> None:
    """Refuse more of them than a person reads."""
    if count > MOST_SET_UPS:
        raise FlopwiseError(
            f"{count:,} set-ups", why=f"`predict` shows up to {MOST_SET_UPS:,}", hint="`flopwise sweep --predict`"
        )


def _show_plan(options: PredictOptions, convention: Convention, form: str) -> None:
    from flopwise.cli.device_plan import show_plan_file
    from flopwise.cli.plan import load_plan_alone, predict_cluster_plan
    from flopwise.cli.planner_file import command_line, show_prediction_file
    from flopwise.records.plan import Plan

    plan, model = load_plan_alone(options)
    if isinstance(plan, Plan):
        show_plan_file(plan, model, convention, form, options.model)
        return
    prediction, machine = predict_cluster_plan(plan, model, convention)
    if form == "html":
        show_prediction_file(prediction, command_line("predict", options, {}))
        return
    _print_predictions([prediction], {machine.name: machine.title}, form)


def _print_predictions(predictions: list[Prediction], titles: dict[str, str], form: str) -> None:
    from flopwise.report.predictions import predictions_document

    show(predictions_document(predictions, titles), one_or_all(predictions), form, schema="prediction")


# -- every setting and where it came from ----------------------------------------------------------------------------


def _settings(options: PredictOptions, asked: Setup) -> dict[str, dict[str, Any]]:
    """Setting → its value and its origin: the argument, a flag, a default, or `auto` and the reason."""
    from flopwise.predict.choose import capacity_bytes, choose

    setup, reasons = choose([asked])[0]

    def origin(option: str, setting: str = "") -> str:
        if setting in reasons:
            return f"auto: {reasons[setting]}"
        return "flag" if options.is_given(option) else "default"

    batch = "batch" if options.batch_tokens.lower() == "auto" else "batch_tokens"
    settings: dict[str, tuple[object, str]] = {
        "model": (setup.model.name, "argument"),
        "hardware": (setup.hardware.name, origin("on")),
        "devices": (setup.parallel.devices, origin("gpus")),
        "parallel": (
            setup.parallel.label,
            origin("parallel") if setup.parallel.devices == 1 or options.is_given("parallel") else AUTO_PARALLEL,
        ),
        "stack": (setup.stack.name if setup.stack else options.stack.lower(), origin("stack")),
        "sequence_tokens": (setup.sequence_tokens, origin("seq", "sequence_tokens")),
        **({"lengths": (setup.lengths.brief, origin("lengths"))} if setup.lengths else {}),
        "batch_sequences": (setup.batch_sequences, origin(batch, "batch_sequences")),
        "micro_batch_sequences": (setup.micro_batch_sequences, origin("micro", "micro_batch_sequences")),
        "precision": (setup.formats.name, origin("precision", "precision")),
        "recompute": (setup.recompute, origin("recompute", "recompute")),
        "device_memory_bytes": (
            capacity_bytes(setup),
            "auto: the device's memory less a reserve" if setup.device_cap_bytes is None else "flag",
        ),
        "optimizer": (setup.optimizer, origin("optimizer")),
        "attention": (setup.attention_word, origin("attention")),
        "fusion": (setup.fusion, origin("fusion")),
        "cuda_graphs": (setup.cuda_graphs, origin("cuda_graphs")),
        "convention": (options.convention.lower(), origin("convention")),
        "set": (parse_changes(options.change), origin("change")),
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
