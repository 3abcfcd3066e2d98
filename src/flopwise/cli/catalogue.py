"""`flopwise ls` and `flopwise show`: what the catalogue and the store of runs hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopwise.cli.options import FORMS, hardware_named, one_of
from flopwise.cli.output import say, show_page, width
from flopwise.cli.train_options import StoreOption

if TYPE_CHECKING:
    from pathlib import Path

    from flopwise.records.measurement import StepRecord
    from flopwise.store.rows import RunRow

MOST_STYLED = 1000
"""Rows that are printed in colours; more of them only take longer, and the heading is out of sight."""


def list_catalogue(
    what: Annotated[str, typer.Argument(help="models, hardware, stacks, runs or sweeps.")] = "models",
    store: StoreOption = "",
    output: Annotated[str, typer.Option("--output", "-o", help="table, md, csv or json.")] = "table",
) -> None:
    """List the models, hardware or training frameworks (stacks) of the catalogue, or the runs or sweeps of a store."""
    from flopwise.base.files import to_json, with_schema
    from flopwise.catalog.load import hardware_names, load_hardware, load_model, load_stack, model_names, stack_names
    from flopwise.report import listings
    from flopwise.report.tables import csv_text

    kind = one_of(what, ("models", "hardware", "stacks", "runs", "sweeps"), "flopwise ls")
    form = one_of(output, FORMS, "--output")
    if kind == "runs":
        _list_runs(store, form)
        return
    if kind == "sweeps":
        _list_sweeps(store, form)
        return
    _refuse_store(store, f"flopwise ls {kind}")
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
        typer.echo(to_json(with_schema(records, f"{kind.removesuffix('s')}-entry")))
    elif form == "csv":
        typer.echo(csv_text([listings.flat_record(record) for record in records]), nl=False)
    else:
        _print_rows(columns, rows, form, listings.WORDS, listings.GIVING_WAY)


def _print_rows(
    columns: Sequence[str], rows: Sequence[Sequence[str]], form: str, words: set[str], giving_way: Sequence[str]
) -> None:
    from flopwise.report.tables import fitting_columns, markdown_table, text_table

    if form == "md":
        typer.echo(markdown_table(columns, rows, words), nl=False)
        return
    table = text_table(columns, rows, words, shown=fitting_columns(columns, rows, width(), giving_way))
    if len(rows) > MOST_STYLED:
        typer.echo(table.plain)
    else:
        show_page(table)


def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A model, a device, a stack or a technology: catalogue name or file; or a run: 0142, last."
        ),
    ],
    store: StoreOption = "",
    output: Annotated[
        str, typer.Option("--output", "-o", help="toml or json; of a run, table or json.", show_default=False)
    ] = "auto",
    write: Annotated[str, typer.Option("--write", "-w", help="Write it to this file instead.")] = "",
) -> None:
    """Print a run, or the description of a model or a device with the source of each fact.

    A file of your own starts with a description.
    """
    from pathlib import Path

    from flopwise.base.files import to_json, to_toml, with_schema, write_whole

    run = _run_folder(name, store)
    if run is not None:
        _show_run(run, output, write)
        return
    _refuse_store(store, f"flopwise show {name}")
    form = one_of(output, ("auto", "toml", "json"), "--output")
    what, table, as_written = _described(name)
    text = f"{to_json(with_schema(table, what))}\n" if form == "json" else as_written or to_toml(table)
    if write:
        write_whole(Path(write), text)
        say(f"wrote {write}")
    else:
        typer.echo(text, nl=False)


def _described(name: str) -> tuple[str, dict[str, Any], str | None]:
    """What a name describes, its table, and its text where that holds comments."""
    from flopwise.base.files import plain, read_table, read_text
    from flopwise.catalog.load import (
        THIS_CPU,
        THIS_MACHINE,
        load_description,
        model_table,
        technology_file,
        technology_names,
    )
    from flopwise.setup.hardware import Hardware
    from flopwise.setup.stack import Stack

    if name.lower() in technology_names():
        path = technology_file(name)
        return "technology", read_table(path), read_text(path)
    found = hardware_named(name) if name.lower() in (THIS_CPU, THIS_MACHINE) else load_description(name)
    if isinstance(found, Hardware | Stack):
        return "hardware" if isinstance(found, Hardware) else "stack", plain(found), None
    return "model", model_table(found), None


# -- runs ------------------------------------------------------------------------------------------------------------


def _refuse_store(store: str, command: str) -> None:
    from flopwise.base.errors import FlopwiseError

    if store:
        raise FlopwiseError(f"--store beside `{command}`", why="only runs are in a store", hint="`flopwise ls runs`")


def _list_runs(store: str, form: str) -> None:
    from flopwise.base.files import with_schema
    from flopwise.report import runs
    from flopwise.report.tables import csv_text
    from flopwise.store.rows import run_rows
    from flopwise.store.runs import store_folder, to_text

    folder = store_folder(store)
    entries = [_run_entry(run, folder / run.name) for run in run_rows(folder)]
    if form == "json":
        typer.echo(to_text(with_schema(entries, "run-entry")))
    elif form == "csv":
        typer.echo(csv_text(entries) if entries else f"{','.join(runs.FIELDS)}\n", nl=False)
    elif entries or form == "md":
        _print_rows(runs.COLUMNS, runs.run_rows(entries), form, runs.WORDS, runs.GIVING_WAY)
    if not entries:
        say(f"note: there are no runs in {folder}; `flopwise train` begins one")
    if form in ("table", "md"):
        for entry in entries:
            if entry["problem"]:
                say(f"note: {entry['run']}: {entry['problem']}")


def _list_sweeps(store: str, form: str) -> None:
    from flopwise.base.errors import FlopwiseError
    from flopwise.base.files import with_schema
    from flopwise.report import runs
    from flopwise.report.tables import csv_text
    from flopwise.store.runs import store_folder, to_text
    from flopwise.store.sweeps import read_attempts, read_sweep, sweep_names

    folder = store_folder(store)
    entries = []
    for name in sweep_names(folder):
        try:
            sweep = read_sweep(folder, name)
            attempts = [read_attempts(folder, cell)[0] for cell in sweep.cells]
        except FlopwiseError as error:
            say(f"note: {name}: {error.what}")
            continue
        entries.append(runs.sweep_entry(sweep, attempts))
    if form == "json":
        typer.echo(to_text(with_schema(entries, "sweep-entry")))
    elif form == "csv":
        typer.echo(csv_text(entries) if entries else f"{','.join(runs.SWEEP_FIELDS)}\n", nl=False)
    elif entries or form == "md":
        _print_rows(runs.SWEEP_COLUMNS, runs.sweep_rows(entries), form, runs.SWEEP_WORDS, runs.SWEEP_GIVING_WAY)
    if not entries:
        say(f"note: there are no sweeps in {folder}; `flopwise sweep` begins one")


def _run_entry(run: RunRow, folder: Path) -> dict[str, Any]:
    from flopwise.report.runs import run_entry
    from flopwise.store.runs import process_is_gone

    # Of a run whose record does not tell yet: it goes on, or was killed.
    is_open = run.problem is None and run.result.step_s is None
    last = _last_step(folder) if is_open else None
    return run_entry(run, folder, last, killed=run.state == "running" and process_is_gone(folder))


def _last_step(folder: Path) -> StepRecord | None:
    from flopwise.base.errors import FlopwiseError
    from flopwise.store.runs import last_step

    try:
        return last_step(folder)
    except FlopwiseError as error:
        say(f"note: {error.what}")
        return None


def _steps(folder: Path) -> list[StepRecord]:
    """The steps of a run; none, and a note, where they cannot be read."""
    from flopwise.base.errors import FlopwiseError
    from flopwise.store.runs import read_steps

    try:
        return read_steps(folder)
    except FlopwiseError as error:
        say(f"note: {error.what}")
        return []


def _run_folder(name: str, store: str) -> Path | None:
    """The folder of a run that is meant; None where the catalogue or a file has the name."""
    from pathlib import Path

    from flopwise.base.files import entry_kind
    from flopwise.catalog.load import hardware_names, model_names, stack_names, technology_names
    from flopwise.store.runs import LAST, RECORD, find_run, store_folder

    known = {*model_names(), *hardware_names(), *stack_names(), *technology_names()}
    if name.lower() in known:
        return None
    if "/" in name:
        return Path(name) if entry_kind(Path(name) / RECORD) == "file" else None
    is_number = name.isascii() and name.isdecimal()
    return find_run(store_folder(store), name) if is_number or name == LAST or store else None


def _show_run(folder: Path, output: str, write: str) -> None:
    from flopwise.base.errors import FlopwiseError
    from flopwise.base.files import with_schema
    from flopwise.report.runs import run_page
    from flopwise.store.runs import read_record, to_text

    form = one_of(output, ("auto", "table", "json"), "--output")
    if write:
        raise FlopwiseError(
            f"--write beside the run {folder.name}",
            why="it has a file already",
            hint="`flopwise show RUN -o json > FILE`, or a model's name to write its description",
        )
    record = read_record(folder)
    if form == "json":
        typer.echo(to_text(with_schema(record, "run")))
    else:
        show_page(run_page(record, _steps(folder), width()))
