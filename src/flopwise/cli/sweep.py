"""`flopwise sweep`: a grid of set-ups, every cell of it predicted first, and then run for real."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from flopwise.base.errors import FlopwiseError, one_of, unknown_name
from flopwise.base.units import parse_count, read_option
from flopwise.cli.options import FORMS, find_hardware, split_names, takes_options
from flopwise.cli.output import progress_bar, say, show
from flopwise.cli.sweep_options import LAUNCHERS, SweepOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from flopwise.report.sweeps import Preview
    from flopwise.setup.hardware import Hardware
    from flopwise.setup.stack import Stack
    from flopwise.store.cells import Cell, SweepRecord
    from flopwise.sweep.grid import Axes, Grid
    from flopwise.sweep.sweep_file import SweepFile

DEFAULT_STEPS = 20
OF_SLURM = ("partition", "account", "gpu_type", "gpus_per_node", "sbatch", "activate")
OF_SKYPILOT = ("accelerator", "infra", "spot", "bucket")
RESUME_LEAVES_OPEN = (
    *("resume", "settle", "retry", "force", "only", "slots", "store", "output", "dry_run", "launcher", "time_limit"),
    *OF_SLURM,
    *OF_SKYPILOT,
)


@takes_options
def sweep(options: SweepOptions) -> None:
    """Run a grid of models, sequences, batches, precisions and caps, each cell predicted first.

    Several values with commas, ranges as 512-8k*2 (times 2) and 1-16+5 (5 more). A sweep that was stopped goes on with
    --resume; what is finished is not done again.
    """
    from flopwise.cli.sweep_launch import read_slots, settle_jobs
    from flopwise.report.sweeps import preview_document, preview_results
    from flopwise.store.runs import store_folder

    form = one_of(options.output, FORMS, "--output")
    where = one_of(options.launcher, LAUNCHERS, "--launcher")
    _check(options, where)
    # Before anything is written.
    read_slots(options)
    folder = store_folder(options.store)
    if options.settle:
        settle_jobs(folder, options.resume)
        return
    asked = _Stored(folder, options.resume, options.time_limit) if options.resume else _Asked(options)
    wanted = _pick_cells(options.only, asked.record, asked.skipped)
    if options.predict or options.dry_run:
        where = ""
    unread = _tell_unread(asked, wanted) if where != "local" else False
    if where:
        _launch(asked, folder, wanted, where, options)
    else:
        preview = asked.preview(wanted, options)
        show(preview_document(preview), preview_results(preview), form, schema="result")
    if unread:
        raise typer.Exit(1)


def _tell_unread(asked: _AskedSweep, wanted: Sequence[str]) -> bool:
    """Tell of cells that cannot be read, and whether there are any; a sweep that runs here tells of them itself."""
    unread = [cell for cell in wanted if cell in asked.problems]
    for cell in unread:
        say(f"note: cell {cell}: {asked.problems[cell]}")
    return bool(unread)


def _launch(asked: _AskedSweep, store: Path, wanted: Sequence[str], where: str, options: SweepOptions) -> None:
    from flopwise.cli import sweep_launch

    meant = sweep_launch.Wanted(ids=wanted, cells=asked.pick(wanted), named=wanted if options.only else ())
    if where == "local":
        sweep_launch.check_here(asked.record, meant.cells)
    asked.write(store, force=options.force)
    launch = {"local": sweep_launch.run, "slurm": sweep_launch.submit, "skypilot": sweep_launch.write_tasks}[where]
    launch(store, asked.record, meant, options)


def _check(options: SweepOptions, launcher: str) -> None:
    """Refuse what cannot be meant together."""
    given = options.given
    for kind, names in (("slurm", OF_SLURM), ("skypilot", OF_SKYPILOT)):
        for name in names:
            if name in given and launcher != kind:
                raise FlopwiseError(f"{_option(name)} is for {kind}", hint=f"--launcher {kind}, or without it")
    if "predict" in given and "dry_run" in given:
        raise FlopwiseError("--predict beside --dry-run", why="neither runs anything", hint="one of them")
    if "stack" in given and "predict" not in given:
        raise FlopwiseError(
            "--stack without --predict", why="cells that are run are run by flopwise", hint="--predict, or without it"
        )
    if "settle" in given and {*given} - {"settle", "resume", "store"}:
        raise FlopwiseError("--settle runs nothing", hint="--resume NAME --settle, and --store")
    if "settle" in given and "resume" not in given:
        raise FlopwiseError("--settle is for a stored sweep", hint="--resume NAME --settle")
    beside = [name for name in given if name not in RESUME_LEAVES_OPEN]
    if "resume" in given and beside:
        what = f"the file {options.file}" if beside[0] == "file" else _option(beside[0])
        raise FlopwiseError(
            f"{what} beside --resume",
            why="the sweep that is resumed says it",
            hint=f"--resume {options.resume} alone; --retry, --force, --only and --slots go with it",
        )


def _stack(name: str) -> Stack | None:
    from flopwise.catalog.load import load_stack
    from flopwise.setup.stack import NO_STACK

    return load_stack(name) if name and name.lower() != NO_STACK else None


def _option(name: str) -> str:
    return "--set" if name == "change" else f"--{name.replace('_', '-')}"


# -- what was asked for ----------------------------------------------------------------------------------------------


class _AskedSweep:
    """A sweep's record and its cells, be they new or from the store."""

    record: SweepRecord
    cells: list[Cell]
    skipped: Mapping[str, str]
    titles: Mapping[str, str]
    problems: Mapping[str, str]
    """Cell → why it cannot be read."""

    def pick(self, wanted: Sequence[str]) -> list[Cell]:
        return [cell for cell in self.cells if cell.id in wanted]

    def preview(self, wanted: Sequence[str], options: SweepOptions) -> Preview:
        from dataclasses import replace

        from flopwise.cli.sweep_launch import read_slots
        from flopwise.report.sweeps import Preview
        from flopwise.sweep.predicting import sweep_seconds
        from flopwise.sweep.slots import slots_for

        # What is foreseen of a cell in another sweep is no part of this one, which leaves it out.
        cells = [
            replace(cell, foreseen=None) if cell.id in self.skipped else cell
            for cell in self.cells
            if cell.id in {*wanted, *self.skipped}
        ]
        record, total_s = self.record, None
        if not options.predict:
            share = slots_for(record, [cell.settings for cell in cells], read_slots(options)).share
            total_s = sweep_seconds(cells, steps=record.steps, repeats=record.repeats, share=share)
        return Preview(cells=cells, skipped=self.skipped, titles=self.titles, total_s=total_s)

    def write(self, store: Path, *, force: bool) -> None:
        raise NotImplementedError


class _Asked(_AskedSweep):
    """A new sweep, from words: expanded and predicted, with nothing written yet."""

    def __init__(self, options: SweepOptions) -> None:
        from flopwise.setup.written import cell_id
        from flopwise.store.cells import Cell
        from flopwise.store.sweeps import SKIPPED

        file = _read_file(options.file)
        flags = _read_axes(options)
        run = _read_run(options, file)
        request = {**{axis: _plain(given) for axis, given in {**file.grid, **flags}.items()}, **_further(file)}
        self.hardware: dict[str, Hardware] = {}
        self.stack = _stack(options.stack)
        # First what is wrong with files: it is told before this machine is measured.
        settings = _parse_run(run)
        grid = self._grid(file, flags, run)
        self.skipped, self.problems = grid.skipped, {}
        # The rules' words need not be those of the cells: what they came to is kept.
        request[SKIPPED] = dict(grid.skipped)
        ids = [cell_id(one) for one in grid.settings]
        foreseen = self._foreseen(grid, ids, settings["steps"], to_run=not options.predict)
        self.cells = [
            Cell(id=number, settings=one, foreseen=foreseen.get(number))
            for number, one in zip(ids, grid.settings, strict=True)
        ]
        self.record = _record(run.get("name") or _default_name(ids), ids, settings, request)

    def _grid(self, file: SweepFile, flags: Mapping[str, Any], run: Mapping[str, Any]) -> Grid:
        from flopwise.catalog.load import THIS_CPU, THIS_MACHINE
        from flopwise.sweep.grid import expand, hardware_word, join_grids
        from flopwise.sweep.sweep_file import all_axes

        here = THIS_CPU if run.get("device") == "cpu" else THIS_MACHINE
        every = all_axes(file, flags if "on" in flags or "on" in file.grid else {"on": here, **flags})
        _check_data(every, run)
        named = {name: find_hardware(name) for axes in every for name in axes.on}
        self.hardware = {hardware_word(name, machine): machine for name, machine in named.items()}
        self.titles = {name: machine.title for name, machine in self.hardware.items()}
        return join_grids([expand(axes, named, file.skip) for axes in every])

    def _foreseen(self, grid: Grid, ids: Sequence[str], steps: int, *, to_run: bool) -> dict[str, Any]:
        from flopwise.sweep.predicting import foresee_all

        kept = [(cell, one) for cell, one in zip(ids, grid.settings, strict=True) if cell not in grid.skipped]
        with progress_bar("predicting") as tell:
            settings = [one for _, one in kept]
            found = foresee_all(settings, self.hardware, steps=steps, to_run=to_run, stack=self.stack, tell=tell)
        return {cell: one for (cell, _), one in zip(kept, found, strict=True)}

    def write(self, store: Path, *, force: bool) -> None:
        """The cells and the record; a sweep of that name with other cells is replaced only by force."""
        from dataclasses import replace

        from flopwise.store.sweeps import list_cells, read_sweep, sweep_names, write_cell, write_sweep

        record = self.record
        if record.name in sweep_names(store):
            before = read_sweep(store, record.name)
            if set(before.cells) != set(record.cells) and not force:
                raise FlopwiseError(
                    f"there is a sweep {record.name} with other cells",
                    why=f"it has {len(before.cells):,} of them, since {before.created}",
                    hint=f"--resume {record.name} to go on with it, another --name, or --force to replace it",
                )
            self.record = record = replace(record, created=before.created)
        there = {cell.id for cell in list_cells(store)[0]} if self.skipped else set()
        for cell in self.cells:
            # What was foreseen of a cell in another sweep stays where this one leaves it out.
            if cell.id not in self.skipped or cell.id not in there:
                write_cell(store, cell)
        write_sweep(store, record)
        for skipped, why in self.skipped.items():
            _write_skipped(store, record, skipped, why)


class _Stored(_AskedSweep):
    """A sweep of the store."""

    def __init__(self, store: Path, name: str, time_limit: str) -> None:
        """With the time limit that was typed, if any, instead of its own."""
        from dataclasses import replace

        from flopwise.store.sweeps import read_attempts, read_cell, read_sweep, skipped_cells
        from flopwise.sweep.sweep_file import parse_duration

        self.record = read_sweep(store, name)
        if time_limit:
            limit_s = read_option(time_limit, "time-limit", parse_duration)
            self.record = replace(self.record, time_limit_s=limit_s)
        self.cells, self.problems, self.titles = [], {}, {}
        for cell in self.record.cells:
            try:
                self.cells.append(read_cell(store, cell))
            except FlopwiseError as error:
                self.problems[cell] = error.what if error.why is None else f"{error.what}: {error.why}"
        tried = {cell.id: read_attempts(store, cell.id)[0] for cell in self.cells}
        self.skipped = skipped_cells(self.record, tried)

    def write(self, store: Path, *, force: bool) -> None:  # noqa: ARG002 - it is there, and stays what it is
        """Its time limit may be another one now."""
        from flopwise.store.sweeps import write_sweep

        write_sweep(store, self.record)


def _check_data(every: Sequence[Axes], run: Mapping[str, Any]) -> None:
    """What is wrong with the data for any of the models, as `flopwise train` tells it."""
    from flopwise.base.units import AUTO
    from flopwise.train.data_checks import check_data
    from flopwise.train.request import TrainRequest

    data, tokenizer = tuple(run.get("data") or ()), run.get("tokenizer") or None
    asked = dict.fromkeys((name, task) for axes in every for name in axes.model for task in axes.task)
    for name, task in asked if data else ():
        check_data(TrainRequest(model=name, data=data, tokenizer=tokenizer, task=None if task == AUTO else task))


def _read_file(path: str) -> SweepFile:
    from pathlib import Path

    from flopwise.sweep.sweep_file import SweepFile, read_sweep_file

    return read_sweep_file(Path(path)) if path else SweepFile()


def _plain(given: object) -> object:
    return list(given) if isinstance(given, list | tuple) else given


def _further(file: SweepFile) -> dict[str, Any]:
    """What a file asks for beside its grid."""
    rules = [
        {**{axis: list(values) for axis, values in rule.axes.items()}, "reason": rule.reason} for rule in file.skip
    ]
    found = {"cells": [{axis: _plain(given) for axis, given in cell.items()} for cell in file.cells], "skip": rules}
    return {name: value for name, value in found.items() if value}


def _read_axes(options: SweepOptions) -> dict[str, str | list[str]]:
    """Axis → the values that were typed for it."""
    axes = {
        "model": options.model,
        "set": options.change,
        "task": options.task,
        "on": options.on,
        "gpus": options.gpus,
        "seq": options.seq,
        "batch": options.batch,
        "batch_tokens": options.batch_tokens,
        "micro": options.micro,
        "precision": options.precision,
        "device_mem": options.device_mem,
        "host_mem": options.host_mem,
    }
    return {axis: typed for axis, typed in axes.items() if typed}


def _read_run(options: SweepOptions, file: SweepFile) -> dict[str, Any]:
    """How it is run: what was typed, else what the file says."""
    typed = {
        "steps": options.steps,
        "repeat": options.repeat,
        "time_limit": options.time_limit,
        "data": options.data,
        "tokenizer": options.tokenizer,
        "seed": options.seed,
        "device": options.device,
        "name": options.name,
    }
    found = {**file.run, **{name: value for name, value in typed.items() if value}}
    return {**found, "profile": False} if options.no_profile else found


def _parse_run(run: Mapping[str, Any]) -> dict[str, Any]:
    from pathlib import Path

    from flopwise.sweep.sweep_file import parse_duration

    def read(name: str, parse: Callable[[str], int]) -> int | None:
        return read_option(run.get(name), name, parse)

    missing = [
        source for source in (*run.get("data", ()), run.get("tokenizer")) if source and not Path(source).exists()
    ]
    if missing:
        raise FlopwiseError(f"there is no file {missing[0]}", hint="check the path of --data and --tokenizer")
    return {
        "steps": read("steps", parse_count(1, "--steps 20")) or DEFAULT_STEPS,
        "repeats": read("repeat", parse_count(1, "--repeat 3")) or 1,
        "time_limit_s": read_option(run.get("time_limit"), "time-limit", parse_duration),
        "profile": run.get("profile", True),
        "device": one_of(run.get("device", "auto"), ("auto", "cpu", "cuda"), "--device"),
        # Whole paths: a resumed sweep may be started from another folder.
        "data": tuple(str(Path(source).resolve()) for source in run.get("data", ())),
        "tokenizer": str(Path(run["tokenizer"]).resolve()) if run.get("tokenizer") else None,
        "seed": read("seed", parse_count(0, "--seed 0")) or 0,
    }


def _default_name(ids: Sequence[str]) -> str:
    import hashlib

    return f"sweep-{hashlib.sha256(' '.join(ids).encode()).hexdigest()[:8]}"


def _record(name: str, ids: Sequence[str], settings: Mapping[str, Any], request: dict[str, Any]) -> SweepRecord:
    from flopwise.store.cells import SweepRecord
    from flopwise.store.sweeps import check_sweep_name, now

    check_sweep_name(name)
    return SweepRecord(name=name, created=now(), cells=tuple(ids), request=request, **settings)


def _pick_cells(text: str, record: SweepRecord, skipped: Mapping[str, str]) -> list[str]:
    """The cells that are meant: those that are named, else all that are not skipped."""
    if not text:
        return [cell for cell in record.cells if cell not in skipped]
    named = split_names(text, "a cell (--only)")
    for cell in named:
        if cell not in record.cells:
            raise unknown_name("cell of this sweep", cell, record.cells, hint="--dry-run lists them")
    return [cell for cell in record.cells if cell in named]


def _write_skipped(store: Path, record: SweepRecord, cell: str, why: str) -> None:
    """A cell that is left out says so; what was measured of it before stays."""
    from flopwise.store.cells import Attempt
    from flopwise.store.sweeps import new_attempt, now, read_attempts

    if not read_attempts(store, cell)[0]:
        today = now()
        skipped = Attempt(
            number=0,
            cell=cell,
            repeat=1,
            state="skipped",
            started=today,
            ended=today,
            sweep=record.name,
            steps=record.steps,
            reason=why,
        )
        new_attempt(store, skipped)
