"""`flopwise ls` and `flopwise show`: what the catalogue holds."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flopwise.cli.options import FORMS, hardware_named, one_of
from flopwise.cli.output import show_page, width


def list_catalogue(
    what: Annotated[str, typer.Argument(help="models, hardware or stacks.")] = "models",
    output: Annotated[str, typer.Option("--output", "-o", help="table, md, csv or json.")] = "table",
) -> None:
    """List the models, the hardware or the training frameworks (stacks) of the catalogue."""
    from flopwise.core.catalog import hardware_names, load_hardware, load_model, load_stack, model_names, stack_names
    from flopwise.core.files import to_json
    from flopwise.report import listings
    from flopwise.report.tables import csv_text, fitting_columns, markdown_table, text_table

    kind = one_of(what, ("models", "hardware", "stacks"), "flopwise ls")
    form = one_of(output, FORMS, "--output")
    columns: tuple[str, ...]
    if kind == "models":
        models = [load_model(name) for name in model_names()]
        records = [listings.model_record(model) for model in models]
        columns, rows = listings.MODEL_COLUMNS, listings.model_rows(models)
    elif kind == "stacks":
        stacks = [load_stack(name) for name in stack_names()]
        records = [listings.stack_record(stack) for stack in stacks]
        columns, rows = listings.STACK_COLUMNS, listings.stack_rows(stacks)
    else:
        devices = [load_hardware(name) for name in hardware_names()]
        records = [listings.hardware_record(device) for device in devices]
        columns, rows = listings.HARDWARE_COLUMNS, listings.hardware_rows(devices)
    if form == "json":
        typer.echo(to_json(records))
    elif form == "csv":
        typer.echo(csv_text([listings.flat_record(record) for record in records]), nl=False)
    elif form == "md":
        typer.echo(markdown_table(columns, rows, listings.WORDS), nl=False)
    else:
        shown = fitting_columns(columns, rows, width(), listings.GIVING_WAY)
        show_page(text_table(columns, rows, listings.WORDS, shown=shown))


def show(
    name: Annotated[str, typer.Argument(help="A model, a device, a stack or a technology: catalogue name or file.")],
    output: Annotated[str, typer.Option("--output", "-o", help="toml or json.")] = "toml",
    write: Annotated[str, typer.Option("--write", "-w", help="Write it to this file instead.")] = "",
) -> None:
    """Print the description of a model or a device, with the source of each fact; a file of your own starts here."""
    from pathlib import Path

    from flopwise.core.files import to_json, to_toml, write_whole

    form = one_of(output, ("toml", "json"), "--output")
    table, as_written = _described(name)
    text = f"{to_json(table)}\n" if form == "json" else as_written or to_toml(table)
    if write:
        write_whole(Path(write), text)
        typer.echo(f"wrote {write}", err=True)
    else:
        typer.echo(text, nl=False)


def _described(name: str) -> tuple[dict[str, Any], str | None]:
    """The table of a description, and its text where that holds comments."""
    from flopwise.core.catalog import (
        THIS_CPU,
        THIS_MACHINE,
        load_description,
        model_table,
        technology_file,
        technology_names,
    )
    from flopwise.core.files import plain, read_table, read_text
    from flopwise.core.hardware import Hardware
    from flopwise.core.stack import Stack

    if name.lower() in technology_names():
        path = technology_file(name)
        return read_table(path), read_text(path)
    found = hardware_named(name) if name.lower() in (THIS_CPU, THIS_MACHINE) else load_description(name)
    return plain(found) if isinstance(found, Hardware | Stack) else model_table(found), None
