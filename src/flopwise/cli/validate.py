"""`flopwise validate`: predictions against a published table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flopwise.base.errors import FlopwiseError, one_of
from flopwise.cli.options import FORMS, OutputOption
from flopwise.cli.output import progress_bar, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from flopwise.references.validate.protocol import Case, Protocol
    from flopwise.references.validate.validation import Validation
    from flopwise.setup.hardware import Hardware

CONFORMANCE = "deepflow"
RECORDED = ("offload", "offload-ampere")
RECORDED_URL = "https://github.com/als244/ml_dataflow"
"""Where these tables are from. Rates that a hardware's description takes from there are not held out."""


def validate(
    table: Annotated[
        str,
        typer.Argument(
            help="mpt, vtrain, nanotron, megatron, megatron-2, torchtitan, megatron-core, korthikanti, uci, dgx-cloud, "
            "nemo, nemo-blackwell, deepspeed, offload, offload-ampere or deepflow; or any CSV whose columns have the "
            "names of docs/validation.md."
        ),
    ],
    file: Annotated[str, typer.Argument(help="Another file with the columns of that table.")] = "",
    stack: Annotated[
        str, typer.Option(help="With a CSV of your own: the framework of rows that name none, by name or TOML.")
    ] = "",
    leave_out: Annotated[
        str, typer.Option(help="model: predict each model size with constants fitted to the others; none.")
    ] = "none",
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Also predict every row from another one, as --anchor of predict does.")
    ] = False,
    all_rows: Annotated[bool, typer.Option("--all-rows", help="Print every row, not only the farthest off.")] = False,
    output: OutputOption = "table",
) -> None:
    """Hold predictions against a published table: errors, order, memory verdicts, and how they came about."""
    from pathlib import Path

    from flopwise.references.published import TABLES
    from flopwise.references.validate.report import validation_document, validation_record

    form = one_of(output, FORMS, "--output")
    apart = one_of(leave_out, ("none", "model"), "--leave-out") == "model"
    path = Path(file) if file else None
    own = table.lower().endswith(".csv") or Path(table).exists()
    name = "" if own else one_of(table, (*TABLES, *RECORDED, CONFORMANCE), "flopwise validate")
    if stack and not own:
        raise FlopwiseError(
            f"--stack beside the table {name}",
            why="its protocol names the framework that it was measured with",
            hint="`flopwise validate FILE.csv --stack NAME`",
        )
    if own:
        found = _validate_own(Path(table), stack, apart=apart, anchor=anchor)
    elif name == CONFORMANCE:
        found = _conformance(path)
    elif name in RECORDED:
        found = _validate_recorded(name, path, apart=apart)
    else:
        found = _validation(name, path, apart=apart, anchor=anchor)
    show(validation_document(found, every_row=all_rows), validation_record(found), form, schema="validation")


def _conformance(path: Path | None) -> Validation:
    from flopwise.catalog.load import ROOT
    from flopwise.references.deepflow.conformance import COLUMNS, FILE, OUTPUT, conformance, predicted_row
    from flopwise.references.published.rows import read_rows, tell_row

    rows = []
    for row in read_rows(path or ROOT / "tables" / FILE, COLUMNS):
        with tell_row(row):
            row.number_of(OUTPUT)
            rows.append(predicted_row(row.number, row.cells))
    return conformance(rows)


def _validate_recorded(table: str, path: Path | None, *, apart: bool) -> Validation:
    from flopwise.catalog.load import load_hardware, load_model
    from flopwise.references.dataflow.recorded import validate_recorded, with_kernels
    from flopwise.references.published.offload import read_offload
    from flopwise.work.transformer import Transformer

    if apart:
        raise FlopwiseError(
            f"--leave-out model has no meaning for the table {table}",
            why="no constant is fitted to its rows, so there is none to fit without some of them",
            hint=f"flopwise validate {table}",
        )
    runs = read_offload(path, table)
    models = {name: load_model(name) for name in dict.fromkeys(run.model for run in runs)}
    shapes = {name: model for name, model in models.items() if isinstance(model, Transformer)}
    hardware = {name: with_kernels(load_hardware(name)) for name in dict.fromkeys(run.hardware for run in runs)}
    words = _recorded_words(table, hardware.values())
    with progress_bar("recorded runs") as progress:
        return validate_recorded(runs, shapes, hardware, table=table, protocol=words, progress=progress)


def _validation(name: str, path: Path | None, *, apart: bool, anchor: bool) -> Validation:
    from flopwise.catalog.load import load_evidence, load_stack
    from flopwise.references.published import protocol_of, read_cases, read_cases_and_skipped, table_of
    from flopwise.references.validate.fitting import fit_of, held_out_predictions, shipped_predictions, validate_table
    from flopwise.references.validate.intervals import with_anchors, with_intervals

    protocol = protocol_of(table_of(name, path))
    read, shipped = read_cases_and_skipped(name, path), read_cases(protocol.fitted_table)
    cases, own = read.cases, protocol.fitted_table == protocol.table
    stack = load_stack(protocol.stack)
    if apart:
        fit = fit_of(protocol, cases if own else shipped, stack)
        with progress_bar("sizes held out") as progress:
            predicted = held_out_predictions(fit, cases, progress)
        words = _held_out_words(protocol, path if own else None)
    else:
        predicted = shipped_predictions(cases, shipped, stack)
        words = _shipped_words(protocol, cases, shipped, path)
    found = validate_table(protocol, cases, predicted, words=words, skipped=read.skipped)
    evidence = load_evidence()
    found = with_intervals(found, cases, evidence, [stack.name] * len(cases))
    # A table that constants are fitted to is known as they are; of another one nothing is, before its anchor.
    known = [entry for entry in evidence if own or entry.table != protocol.table]
    return with_anchors(found, cases, stack, known) if anchor else found


def _validate_own(path: Path, stack: str, *, apart: bool, anchor: bool) -> Validation:
    """Any table with named columns, each row predicted by its own stack."""
    from flopwise.catalog.load import load_evidence, load_stack
    from flopwise.references.published import read_own
    from flopwise.references.validate.intervals import own_predictions, with_anchors, with_intervals
    from flopwise.references.validate.validation import validate

    if apart:
        raise FlopwiseError(
            "--leave-out model with a table of your own",
            why="no constant is fitted to its rows, so there is none to fit without some of them",
            hint=f"flopwise validate {path}",
        )
    read = read_own(path, stack=stack)
    predicted = own_predictions(read.cases, load_evidence())
    stacks = ", ".join(dict.fromkeys(case.stack for case in read.cases))
    found = validate(
        path.name,
        read.cases,
        predicted.step_s,
        predicted.fits.tolist(),
        protocol=f"each row as `predict` has it, by the stack it names ({stacks}); nothing was fitted to this file",
        held_out=predicted.held_out,
        skipped=read.skipped,
    )
    evidence = load_evidence()
    found = with_intervals(found, read.cases, evidence, [case.stack for case in read.cases])
    return with_anchors(found, read.cases, load_stack(stack) if stack else None, evidence) if anchor else found


# -- what was fitted to what, in words -------------------------------------------------------------------------------


def _shipped_words(protocol: Protocol, cases: Sequence[Case], shipped: Sequence[Case], path: Path | None) -> str:
    constants = f"the stack {protocol.stack} as shipped ({', '.join(protocol.constants)})"
    if protocol.fitted_table != protocol.table:
        return f"{constants}; {protocol.rows}"
    if path is None:
        return f"in sample, not held out: {constants}; {protocol.rows}; --leave-out model holds each size out"
    known = [_without_number(case) for case in shipped]
    same = sum(_without_number(case) in known for case in cases)
    if same == len(cases):
        told = (
            "all its rows are rows of the shipped table, to which these constants were fitted: in sample, not held out"
        )
    elif same:
        told = f"nothing was fitted to this file, but {same:,} of its {len(cases):,} rows are in the shipped table"
    else:
        told = "nothing was fitted to this file; rows count as held out where the shipped table lacks their size"
    return f"{constants}, on a file of your own; {told}"


def _without_number(case: Case) -> Case:
    from dataclasses import replace

    return replace(case, row=0)


def _held_out_words(protocol: Protocol, path: Path | None) -> str:
    fitted = "the file's rows" if path else f"the rows of the table {protocol.fitted_table}"
    words = (
        f"held out: each model size is predicted with {', '.join(protocol.constants)} of the stack {protocol.stack}"
        f" fitted anew, from fixed start values, to {fitted} of all other sizes"
    )
    return words if path else f"{words}; {protocol.rows}"


def _recorded_words(table: str, hardware: Iterable[Hardware]) -> str:
    """Where each device's rates come from, by its description: which of them are the trainer's own."""
    fitted = "no constant was fitted to these rows"
    if table != RECORDED[0]:
        fitted = "in sample: the cards' rates of products and attention were fitted to some of these rows"
    parts = [f"each run's plan, as it ran, is compiled and simulated; {fitted}"]
    for device in hardware:
        keys = {
            "matrix products": device.efficiency.gemm.source,
            "attention": device.efficiency.attention.source,
            "pointwise kernels": device.efficiency.source,
            **({"the link": device.link.bandwidth_bytes_per_s.source} if device.link else {}),
        }
        own = [what for what, key in keys.items() if device.sources[key].url == RECORDED_URL]
        others = [
            f"of {what}: {device.sources[key].title} ({device.sources[key].kind})"
            for what, key in keys.items()
            if what not in own
        ]
        if own:
            told = f"but {device.name}'s rates of {' and '.join(own)} are from profiles of this trainer's own runs"
            parts.append(f"{told}: not held out for those")
        parts.append(f"{device.name}'s rates {', '.join(others)}")
    failed = "a failed run counts as out of memory, though the table does not say why it failed"
    parts.append(f"memory verdicts are those of the trainer's own rule; {failed}")
    return "; ".join(parts)
