"""`flopwise ls` and `flopwise show`: what the catalogue and the store of runs hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopwise.base.errors import FlopwiseError, one_of
from flopwise.cli import output as output_of
from flopwise.cli.options import FORMS, StoreOption, find_hardware
from flopwise.cli.output import say

if TYPE_CHECKING:
    from pathlib import Path

    from flopwise.records.measurement import StepRecord
    from flopwise.store.rows import RunRow


def list_catalogue(
    what: Annotated[str, typer.Argument(help="models, hardware, stacks, runs or sweeps.")] = "models",
    store: StoreOption = "",
    output: Annotated[str, typer.Option("--output", "-o", help="table, md, csv or json.")] = "table",
) -> None:
    """List the models, hardware or training frameworks (stacks) of the catalogue, or the runs or sweeps of a store."""
    from flopwise.catalog.load import hardware_names, load_hardware, load_model, load_stack, model_names, stack_names
    from flopwise.report import listings

    kind = one_of(what, ("models", "hardware", "stacks", "runs", "sweeps"), "flopwise ls")
    form = one_of(output, FORMS, "--output")
    if kind == "runs":
        _list_runs(store, form)
        return
    if kind == "sweeps":
        _list_sweeps(store, form)
        return
    _refuse_store(store, f"flopwise ls {kind}")
    if kind == "models":
        document, records = listings.models_listing([load_model(name) for name in model_names()])
    elif kind == "stacks":
        document, records = listings.stacks_listing([load_stack(name) for name in stack_names()])
    else:
        document, records = listings.hardware_listing([load_hardware(name) for name in hardware_names()])
    output_of.show(document, records, form, schema=f"{kind.removesuffix('s')}-entry")


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
    from flopwise.base.files import to_toml

    run = _run_folder(name, store)
    if run is not None:
        _show_run(run, output, write)
        return
    _refuse_store(store, f"flopwise show {name}")
    form = one_of(output, ("auto", "toml", "json"), "--output")
    what, table, as_written = _describe(name)
    text = output_of.schema_json(table, what) if form == "json" else as_written or to_toml(table)
    output_of.put(text, write)


def _describe(name: str) -> tuple[str, dict[str, Any], str | None]:
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
    found = find_hardware(name) if name.lower() in (THIS_CPU, THIS_MACHINE) else load_description(name)
    if isinstance(found, Hardware | Stack):
        return "hardware" if isinstance(found, Hardware) else "stack", plain(found), None
    return "model", model_table(found), None


# -- runs ------------------------------------------------------------------------------------------------------------


def _refuse_store(store: str, command: str) -> None:
    if store:
        raise FlopwiseError(f"--store beside `{command}`", why="only runs are in a store", hint="`flopwise ls runs`")


def _list_runs(store: str, form: str) -> None:
    from flopwise.report.runs import runs_document
    from flopwise.store.rows import run_rows
    from flopwise.store.runs import store_folder

    folder = store_folder(store)
    entries = [_run_entry(run, folder / run.name) for run in run_rows(folder)]
    output_of.show(runs_document(entries, folder), entries, form, schema="run-entry")


def _list_sweeps(store: str, form: str) -> None:
    from flopwise.report.runs import sweep_entry, sweeps_document
    from flopwise.store.runs import store_folder
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
        entries.append(sweep_entry(sweep, attempts))
    output_of.show(sweeps_document(entries, folder), entries, form, schema="sweep-entry")


def _run_entry(run: RunRow, folder: Path) -> dict[str, Any]:
    from flopwise.report.runs import run_entry
    from flopwise.store.runs import process_is_gone

    # Of a run whose record does not tell yet: it goes on, or was killed.
    is_open = run.problem is None and run.result.step_s is None
    last = _last_step(folder) if is_open else None
    return run_entry(run, folder, last, killed=run.state == "running" and process_is_gone(folder))


def _last_step(folder: Path) -> StepRecord | None:
    from flopwise.store.runs import last_step

    try:
        return last_step(folder)
    except FlopwiseError as error:
        say(f"note: {error.what}")
        return None


def _steps(folder: Path) -> list[StepRecord]:
    """The steps of a run; none, and a note, where they cannot be read."""
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
    from flopwise.report.runs import run_document
    from flopwise.store.runs import read_record

    form = one_of(output, ("auto", "table", "json"), "--output")
    if write:
        raise FlopwiseError(
            f"--write beside the run {folder.name}",
            why="it has a file already",
            hint="`flopwise show RUN -o json > FILE`, or a model's name to write its description",
        )
    record = read_record(folder)
    output_of.show(run_document(record, _steps(folder)), record, "table" if form == "auto" else form, schema="run")
