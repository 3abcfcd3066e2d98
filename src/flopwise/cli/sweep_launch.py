"""A sweep's cells on their way: run here, submitted to Slurm, or written down for SkyPilot."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import parse_count, read_option
from flopwise.cli.output import say, show
from flopwise.cli.sweep_options import SweepOptions
from flopwise.store.cells import Attempt, Cell, SweepRecord
from flopwise.store.results import Result


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The cells of a sweep that are meant."""

    ids: Sequence[str]
    cells: Sequence[Cell]
    """Those of them that can be read."""
    named: Sequence[str] = ()
    """Those of them that --only names, which are tried though the sweep leaves them out."""


def check_here(record: SweepRecord, cells: Sequence[Cell]) -> None:
    """Refuse before anything is written what cannot run on this machine."""
    from flopwise.cli.train import check_packages
    from flopwise.sweep.slots import check_hardware, slots_for

    check_packages()
    settings = [cell.settings for cell in cells]
    check_hardware(settings, record, slots_for(record, settings, None))


def read_slots(options: SweepOptions) -> int | None:
    """What --slots says."""
    return read_option(options.slots or None, "slots", parse_count(1, "--slots 2"))


def run(store: Path, record: SweepRecord, asked: Wanted, options: SweepOptions) -> None:
    """Run what is not finished, show how it goes on, and print the results.

    The exit code is 1 where attempts failed, and where a cell was left to an attempt on another machine.
    """
    from flopwise.cli.sweep_progress import watching
    from flopwise.sweep.jobs.slurm import settle_here
    from flopwise.sweep.running import run_sweep
    from flopwise.sweep.slots import slots_for

    slots, wanted, cells = read_slots(options), asked.ids, asked.cells
    share = slots_for(record, [cell.settings for cell in cells], slots).share
    say(f"sweep {record.name} in {store}")
    try:
        settle_here(store, record)
    except FlopwiseError as error:
        say(f"note: {error.what}")
    attempts: list[Attempt] = []
    try:
        with watching(cells, steps=record.steps, repeats=record.repeats, share=share) as tell:
            # Without any cell left, `only` would stand for all of them.
            if wanted:
                attempts = run_sweep(
                    store,
                    record,
                    force=options.force,
                    retry=options.retry,
                    slots=slots,
                    only=wanted,
                    named=asked.named,
                    tell=tell,
                )
    except (KeyboardInterrupt, SystemExit) as end:
        say(f"interrupted   go on with: flopwise sweep --resume {record.name}{_store_words(options)}")
        code = end.code if isinstance(end, SystemExit) and isinstance(end.code, int) else 130
        raise typer.Exit(code) from None
    _print_results(store, record.name, wanted if options.only else record.cells, options.output.lower())
    elsewhere = [attempt for attempt in attempts if attempt.state == "running"]
    for attempt in elsewhere:
        say(
            f"cell {attempt.cell} was left to attempt {attempt.number}, which may still run on {attempt.host}"
            "   --force tries it all the same"
        )
    bad = [attempt for attempt in attempts if attempt.state in ("failed", "timeout")]
    if bad:
        again = f"flopwise sweep --resume {record.name} --retry{_store_words(options)}"
        say(f"{len({one.cell for one in bad}):,} of {len(wanted):,} cells failed or took too long   next: {again}")
    if bad or elsewhere:
        raise typer.Exit(1)
    say(f"next: flopwise report {record.name} -o html{_store_words(options)}")


def settle_jobs(store: Path, name: str) -> None:
    """Write down how the jobs of a stored sweep ended, and run nothing."""
    from flopwise.store.sweeps import read_sweep
    from flopwise.sweep.jobs.slurm import settle

    written = settle(store, read_sweep(store, name))
    for attempt in written:
        typer.echo(f"{attempt.cell}  attempt {attempt.number}  {attempt.state}  {attempt.reason or ''}".rstrip())
    say(f"ends written down: {len(written):,}   next: flopwise report {name} --store {shlex.quote(str(store))}")


def _store_words(options: SweepOptions) -> str:
    return f" --store {shlex.quote(options.store)}" if options.store else ""


def submit(store: Path, record: SweepRecord, asked: Wanted, options: SweepOptions) -> None:
    """Hand the cells to Slurm, and tell its jobs."""
    from flopwise.sweep.jobs import slurm

    nodes = read_option(options.gpus_per_node or None, "gpus-per-node", parse_count(1, "--gpus-per-node 8"))
    site = slurm.SlurmOptions(
        partition=options.partition or None,
        account=options.account or None,
        gpu_type=options.gpu_type or None,
        gpus_per_node=nodes or slurm.SlurmOptions().gpus_per_node,
        extra=tuple(options.sbatch or ()),
        activate=options.activate or None,
        at_once=read_slots(options),
        flags=(*(("--force",) if options.force else ()), *(("--retry",) if options.retry else ())),
    )
    found = slurm.submit(store, record, site, cells=asked.cells, named=asked.named)
    for job in found.jobs:
        typer.echo(
            f"{job.id}  {found.folder / job.script}  {len(job.cells):,} cell{'' if len(job.cells) == 1 else 's'}"
        )
    left_out = (
        (found.queued, "have a job already"),
        (found.finished, "are finished"),
        (found.failed, "have failed, and --retry tries them again"),
        (found.skipped, "are skipped"),
    )
    for some, why in left_out:
        if some:
            say(f"cells that {why}: {len(some):,}")
    again = f"flopwise sweep --resume {record.name} --settle{_store_words(options)}"
    say(f"next: {again}, then flopwise report {record.name}{_store_words(options)}")


def write_tasks(store: Path, record: SweepRecord, asked: Wanted, options: SweepOptions) -> None:
    """Write a task for SkyPilot beside the sweep, for each hardware and number of devices."""
    from flopwise.base.files import write_whole
    from flopwise.store.sweeps import SWEEPS
    from flopwise.sweep.jobs.skypilot import SkyOptions, render_all

    chosen = SkyOptions(
        store=store,
        accelerator=options.accelerator or None,
        infra=options.infra or None,
        use_spot=options.spot,
        bucket=options.bucket or None,
    )
    for name, text in render_all(record, asked.cells, chosen).items():
        write_whole(store / SWEEPS / name, text)
        typer.echo(f"{store / SWEEPS / name}")
    say("next: sky launch FILE")


def _print_results(store: Path, name: str, cells: Sequence[str], form: str) -> None:
    from flopwise.cli.report import gather_rows
    from flopwise.report.results import results_document

    rows: list[Result] = [row for row in gather_rows((name,), str(store)) if row.cell in cells]
    show(results_document(rows), rows, form, schema="result")
