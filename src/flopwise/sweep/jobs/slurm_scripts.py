"""Batch scripts for Slurm: one task for each cell of a sweep, cells with as many devices in one array."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.processes import python_words
from flopwise.catalog.load import is_cpu
from flopwise.store.cells import Cell, SweepRecord
from flopwise.store.sweeps import CELL_NAME, SWEEP_NAME, SWEEPS, looks
from flopwise.sweep.auto_batch import MOST_LOOKING_ATTEMPTS

PREFIX_VARIABLE = "FLOPWISE_ATTEMPT_PREFIX"
"""Words before the command of each attempt, quoted as for a shell: how a job on several nodes starts its ranks."""
JOB_VARIABLE = "FLOPWISE_JOB"
"""The task's name as Slurm's accounting has it: 123, or 123_4 in an array."""
LARGEST_ARRAY = 1000
"""Slurm's own limit, unless a site has set another: indices below 1001."""

START_S = 600.0
"""Beside an attempt's foreseen time: importing, reading data, building, compiling kernels on a busy file system."""
FORESEEN_FACTOR = 4.0
"""An attempt may take so many times what was foreseen before its job is ended."""
UNFORESEEN_S = 3600.0
"""For an attempt of which neither a prediction nor a limit tells anything."""
ENDING_S = 120.0
"""Between an attempt's own limit and the job's, so that it is flopwise that ends it and writes down why."""

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,@:+=-]*", re.ASCII)
MEMORY = re.compile(r"[0-9]{1,12}[KMGT]?", re.ASCII)
RANK_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS")
"""With them, `flopwise train` would take the batch script for one of several ranks that srun has started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """What a site wants to be told; None and empty leave it to Slurm's own settings."""

    partition: str | None = None
    account: str | None = None
    time_limit_s: float | None = None
    """Of each job; None: from what is foreseen of its cells."""
    gpus_per_node: int = 8
    """At most: a cell with more devices takes several nodes."""
    gpu_type: str | None = None
    """As the site calls it, where it has several: a100, h200."""
    gpus_as: Literal["gpus", "gres"] = "gpus"
    """gpus: `--gpus-per-node=8`; gres: `--gres=gpu:8`, for sites that know only that."""
    cpus_per_task: int | None = None
    """For each device."""
    memory: str | None = None
    """Of a node: 64G; 0 for all of it."""
    array: bool = True
    """False: a job for each cell."""
    at_once: int | None = None
    """Tasks of an array that run at the same time; None: as many as there is room for."""
    extra: tuple[str, ...] = ()
    """Further options of sbatch, one each: `--qos=high`."""
    python: str | None = None
    """The interpreter that the jobs use; None: this one."""
    activate: str | None = None
    """Shell commands before it: `module load cuda`, `source venv/bin/activate`. They run as they are."""
    workdir: str | None = None
    """Where the jobs run, for paths that a sweep names relative to it; None: the current folder."""
    flags: tuple[Literal["--force", "--retry"], ...] = ()
    """For `flopwise sweep` in the jobs: what is finished, or has failed, is tried again."""

    def __post_init__(self) -> None:
        _check_word(self.partition, "partition", "--partition gpu")
        _check_word(self.account, "account", "--account lab")
        _check_word(self.gpu_type, "type of GPU", "h200")
        if self.memory is not None and not MEMORY.fullmatch(self.memory):
            raise FlopwiseError(f"{shown(self.memory)} is no memory for Slurm", hint="64G, 512000M, or 0 for all of it")
        for value, what in (
            (self.gpus_per_node, "GPUs per node"),
            (self.cpus_per_task, "CPUs"),
            (self.at_once, "jobs"),
        ):
            if value is not None and value < 1:
                raise FlopwiseError(f"{value} {what}", why="at least one is needed", hint="leave it out, or 1")
        if self.time_limit_s is not None and not 0 < self.time_limit_s < math.inf:
            raise FlopwiseError(f"a job cannot have {self.time_limit_s:g} s", hint="a time limit of 2h, or none")
        for line in self.extra:
            if not line.startswith("-") or not line.isprintable():
                raise FlopwiseError(
                    f"{shown(line)} is no option of sbatch",
                    why="one printable line that begins with a dash",
                    hint="--qos=high",
                )


def _check_word(value: str | None, what: str, hint: str) -> None:
    if value is not None and not WORD.fullmatch(value):
        raise FlopwiseError(f"{shown(value)} is no name of a {what}", why="letters, digits and _.,@:+=-", hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A batch script: task number i of its array is cell number i; without an array it has one cell."""

    name: str
    text: str
    cells: tuple[str, ...]
    array: bool
    devices: int
    nodes: int
    time_s: int


def slurm_folder(store: Path, name: str) -> Path:
    """Where a sweep's scripts, the jobs' output and the list of jobs lie."""
    if not SWEEP_NAME.fullmatch(name):
        raise FlopwiseError(f"a sweep cannot be called {shown(name)}", hint="--name mpt-on-h200")
    return store / SWEEPS / f"{name}.slurm"


def render(record: SweepRecord, cells: Sequence[Cell], store: Path, options: SlurmOptions) -> list[Script]:
    """The scripts for these cells, fewest devices first; nothing is written."""
    folder = slurm_folder(store.absolute(), record.name)
    _check_path(folder)
    groups: dict[tuple[int, bool], list[Cell]] = {}
    for cell in cells:
        assert CELL_NAME.fullmatch(cell.id)
        groups.setdefault((cell.settings.devices, wants_gpus(record, cell)), []).append(cell)
    size = LARGEST_ARRAY if options.array else 1
    return [_script(record, part, folder, options) for key in sorted(groups) for part in _parts(groups[key], size)]


def wants_gpus(record: SweepRecord, cell: Cell) -> bool:
    """Whether the cell's devices are GPUs."""
    return record.device != "cpu" and not is_cpu(cell.settings.hardware)


def _parts(cells: Sequence[Cell], size: int) -> Iterable[Sequence[Cell]]:
    return (cells[start : start + size] for start in range(0, len(cells), size))


def _script(record: SweepRecord, cells: Sequence[Cell], folder: Path, options: SlurmOptions) -> Script:
    devices = cells[0].settings.devices
    nodes = nodes_for(devices, options.gpus_per_node)
    time_s = options.time_limit_s or max(job_time_s(record, cell) for cell in cells)
    minutes = max(1, math.ceil(time_s / 60))
    array = options.array
    name = f"devices-{devices}-{cells[0].id}.sh"
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in _directives(record, cells, folder, options, minutes))]
    lines += ["", *_body(record, cells, folder, options), ""]
    return Script(
        name=name,
        text="\n".join(lines),
        cells=tuple(cell.id for cell in cells),
        array=array,
        devices=devices,
        nodes=nodes,
        time_s=minutes * 60,
    )


def nodes_for(devices: int, gpus_per_node: int) -> int:
    """The fewest nodes that take as many devices each."""
    fewest = math.ceil(devices / gpus_per_node)
    return next(nodes for nodes in range(fewest, devices + 1) if devices % nodes == 0)


def job_time_s(record: SweepRecord, cell: Cell) -> float:
    """For all attempts of a cell: each has what was foreseen and some slack, but no more than its own limit."""
    foreseen = cell.foreseen.attempt_s if cell.foreseen is not None else None
    limit = record.time_limit_s
    if foreseen is None:
        attempt_s = UNFORESEEN_S if limit is None else limit
    else:
        attempt_s = min(FORESEEN_FACTOR * foreseen + START_S, math.inf if limit is None else limit)
    attempts = record.repeats
    if looks(cell):
        attempts += MOST_LOOKING_ATTEMPTS
    return attempts * (attempt_s + ENDING_S)


# -- the text --------------------------------------------------------------------------------------------------------


def _directives(
    record: SweepRecord, cells: Sequence[Cell], folder: Path, options: SlurmOptions, minutes: int
) -> list[str]:
    devices = cells[0].settings.devices
    nodes = nodes_for(devices, options.gpus_per_node)
    per_node = devices // nodes
    lines = [f"--job-name=flopwise-{record.name}"]
    if options.array:
        at_once = "" if options.at_once is None else f"%{options.at_once}"
        lines.append(f"--array=0-{len(cells) - 1}{at_once}")
    lines += [f"--nodes={nodes}", f"--ntasks-per-node={1 if nodes == 1 else per_node}"]
    if options.cpus_per_task is not None:
        lines.append(f"--cpus-per-task={options.cpus_per_task * (per_node if nodes == 1 else 1)}")
    if wants_gpus(record, cells[0]):
        kind = "" if options.gpu_type is None else f"{options.gpu_type}:"
        flag = "--gpus-per-node=" if options.gpus_as == "gpus" else "--gres=gpu:"
        lines.append(f"{flag}{kind}{per_node}")
    if options.memory is not None:
        lines.append(f"--mem={options.memory}")
    lines.append(f"--time={show_minutes(minutes)}")
    for flag, value in (("partition", options.partition), ("account", options.account)):
        if value is not None:
            lines.append(f"--{flag}={value}")
    output = "%A_%a.out" if options.array else "%j.out"
    lines.append(f"--output={_quote(str(folder).replace('%', '%%') + '/' + output)}")
    # A requeued job would find its own attempt still marked as running.
    lines += ["--open-mode=append", "--no-requeue", *options.extra]
    return lines


def _body(record: SweepRecord, cells: Sequence[Cell], folder: Path, options: SlurmOptions) -> list[str]:
    devices = cells[0].settings.devices
    nodes = nodes_for(devices, options.gpus_per_node)
    store = folder.parents[1]
    lines = ["set -eu", f"cells=({' '.join(cell.id for cell in cells)})"]
    if options.array:
        lines += [
            "cell=${cells[$SLURM_ARRAY_TASK_ID]}",
            f"export {JOB_VARIABLE}=${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}",
        ]
    else:
        lines += ["cell=${cells[0]}", f"export {JOB_VARIABLE}=$SLURM_JOB_ID"]
    lines += [f"cd {shlex.quote(str(Path(options.workdir or '.').absolute()))}"]
    if options.activate is not None:
        # Activation scripts and modules read variables that are not set.
        lines += ["set +u", options.activate, "set -u"]
    if nodes > 1:
        words = ["srun", f"--nodes={nodes}", f"--ntasks={devices}", f"--ntasks-per-node={devices // nodes}"]
        if options.cpus_per_task is not None:
            # Since Slurm 22.05 a step no longer inherits it.
            words.append(f"--cpus-per-task={options.cpus_per_task}")
        words.append("--kill-on-bad-exit=1")
        lines += [
            "# Each attempt is a step of its own, with a rank for each device.",
            f"export {PREFIX_VARIABLE}={shlex.quote(shlex.join(words))}",
        ]
    lines += ["# This shell is none of the ranks.", f"unset {' '.join(RANK_VARIABLES)}"]
    command = python_words("flopwise", "sweep", "--resume", record.name, *options.flags, python=options.python)
    lines.append(f'exec {shlex.join(command)} --only "$cell" --store {shlex.quote(str(store))}')
    return lines


def show_minutes(minutes: int) -> str:
    """As sbatch reads it: days-hours:minutes:seconds."""
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def _quote(text: str) -> str:
    """For a line of options in a batch script, which sbatch reads itself: quotes and backslashes, but no variables."""
    if re.fullmatch(r"[A-Za-z0-9_./%@:+=-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _check_path(folder: Path) -> None:
    if "\\" in str(folder) or not str(folder).isprintable():
        raise FlopwiseError(
            f"Slurm cannot write to {shown(str(folder))}",
            why="a backslash switches off the names of its output files, and a line break ends an option",
            hint="--store FOLDER without backslashes and line breaks",
        )
