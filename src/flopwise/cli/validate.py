"""`flopwise validate`: predictions against a published table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flopwise.cli.options import FORMS, OutputOption, one_of
from flopwise.cli.output import progress_bar, show_page, width

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flopwise.core.case import Case
    from flopwise.core.hardware import Hardware
    from flopwise.core.protocol import Protocol
    from flopwise.predict.validation import Validation

CONFORMANCE = "deepflow"
BAR_AFTER_S = 2.0


def validate(
    table: Annotated[str, typer.Argument(help="mpt, vtrain, nanotron, megatron, megatron-2 or deepflow.")],
    file: Annotated[str, typer.Argument(help="Another file with the columns of that table.")] = "",
    leave_out: Annotated[
        str, typer.Option(help="model: predict each model size with constants fitted to the others; none.")
    ] = "none",
    all_rows: Annotated[bool, typer.Option("--all-rows", help="Print every row, not only the farthest off.")] = False,
    output: OutputOption = "table",
) -> None:
    """Hold predictions against a published table: errors, order, memory verdicts, and how they came about."""
    from pathlib import Path

    from flopwise.core.published import TABLES

    form = one_of(output, FORMS, "--output")
    apart = one_of(leave_out, ("none", "model"), "--leave-out") == "model"
    name = one_of(table, (*TABLES, CONFORMANCE), "flopwise validate")
    path = Path(file) if file else None
    found = _conformance(path) if name == CONFORMANCE else _validation(name, path, apart=apart)
    _print(found, form, all_rows=all_rows)


def _conformance(path: Path | None) -> Validation:
    from flopwise.core.catalog import ROOT
    from flopwise.core.published.rows import placed, read_rows
    from flopwise.predict.deepflow.conformance import COLUMNS, FILE, OUTPUT, conformance, predicted_row

    rows = []
    for row in read_rows(path or ROOT / "tables" / FILE, COLUMNS):
        with placed(row):
            row.number_of(OUTPUT)
            rows.append(predicted_row(row.number, row.cells))
    return conformance(rows)


def _validation(name: str, path: Path | None, *, apart: bool) -> Validation:
    from flopwise.core.catalog import load_stack
    from flopwise.core.published import hardware_of, protocol_of, read_cases, table_of
    from flopwise.predict.held_out import fit_of, held_out_predictions, shipped_predictions, validated

    protocol = protocol_of(table_of(name, path))
    cases, shipped = read_cases(name, path), read_cases(protocol.fitted_table)
    own = protocol.fitted_table == protocol.table
    hardware = hardware_of((*cases, *shipped))
    for case in cases:
        _check(case, hardware[case.hardware])
    stack = load_stack(protocol.stack)
    if not apart:
        predicted = shipped_predictions(cases, shipped, stack, hardware)
        return validated(protocol, cases, predicted, words=_shipped_words(protocol, cases, shipped, path))
    fit = fit_of(protocol, cases if own else shipped, stack, hardware)
    with progress_bar("sizes held out") as progress:
        predicted = held_out_predictions(fit, cases, hardware, progress)
    return validated(protocol, cases, predicted, words=_held_out_words(protocol, path if own else None))


def _check(case: Case, hardware: Hardware) -> None:
    """Refuse a row that cannot be predicted: its model cannot be split so, or no network reaches all its devices."""
    from flopwise.core.errors import FlopwiseError
    from flopwise.predict.collectives import check_reach

    try:
        case.parallel.check(case.model, case.workload.sequence_tokens)
        check_reach(hardware.name, hardware.networks, case.parallel.devices)
    except FlopwiseError as error:
        raise error.within(f"row {case.row}") from None


# -- what was fitted to what, in words -------------------------------------------------------------------------------


def _shipped_words(protocol: Protocol, cases: Sequence[Case], shipped: Sequence[Case], path: Path | None) -> str:
    constants = f"the stack {protocol.stack} as shipped ({', '.join(protocol.constants)})"
    if protocol.fitted_table != protocol.table:
        return f"{constants}; {protocol.rows}"
    if path is None:
        return f"in sample, not held out: {constants}; {protocol.rows}; --leave-out model holds each size out"
    known = {_without_number(case) for case in shipped}
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


# -- to the terminal -------------------------------------------------------------------------------------------------


def _print(found: Validation, form: str, *, all_rows: bool) -> None:
    from flopwise.report import validations as written

    if form == "json":
        typer.echo(written.validation_json(found))
    elif form == "csv":
        typer.echo(written.validation_csv(found), nl=False)
    elif form == "md":
        typer.echo(written.validation_markdown(found), nl=False)
    else:
        show_page(written.validation_page(found, width(), every_row=all_rows))
