"""A sweep as jobs of Slurm: submitting its cells, how they are doing, and closing what a job left open."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import WRITABLE_HINT, entry_kind, read_bounded, write_whole
from flopwise.store.cells import (
    ENDED,
    FINISHED,
    Attempt,
    Cell,
    CellState,
    SweepRecord,
    says_nothing,
    standing_attempts,
)
from flopwise.store.runs import MOST_RECORD_BYTES, from_text, to_text
from flopwise.store.sweeps import (
    claimed,
    missing_repeats,
    moment,
    new_attempt,
    now,
    read_attempts,
    read_cell,
    verdict,
    write_attempt,
)
from flopwise.sweep.attempts import settle_attempt
from flopwise.sweep.jobs.slurm_queue import UNKNOWN, QueuedTask, ask, is_installed, sbatch
from flopwise.sweep.jobs.slurm_scripts import (
    JOB_VARIABLE,
    PREFIX_VARIABLE,
    Script,
    SlurmOptions,
    render,
    slurm_folder,
)

__all__ = [
    "JOB_VARIABLE",
    "PREFIX_VARIABLE",
    "Job",
    "Script",
    "SlurmOptions",
    "Submission",
    "find_unsettled",
    "reasons",
    "render",
    "settle",
    "settle_here",
    "slurm_folder",
    "states",
    "submit",
]

JOBS = "jobs.json"
FROM_OUTSIDE = frozenset({"CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED", UNKNOWN})
"""Ends of a job that say nothing of its cell."""
SKEW_S = 5.0
"""By which the clocks of two machines of a cluster may differ."""
FORGOTTEN_AFTER_S = 120.0
"""A job that Slurm does not know so long after it was submitted is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A script that was submitted."""

    id: str
    script: str
    submitted: str
    """Local time with its offset, ISO 8601."""
    array: bool
    cells: tuple[str, ...]

    def task(self, cell: str) -> str:
        """The name that Slurm has for a cell's part of it."""
        return f"{self.id}_{self.cells.index(cell)}" if self.array else self.id


@dataclass(frozen=True, kw_only=True, slots=True)
class JobList:
    """`jobs.json`: every job that was submitted for a sweep, in their order."""

    jobs: tuple[Job, ...] = ()

    def newest(self, cell: str) -> Job | None:
        return next((job for job in reversed(self.jobs) if cell in job.cells), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What one call of `submit` came to."""

    folder: Path
    jobs: tuple[Job, ...]
    queued: tuple[str, ...] = ()
    """Cells that were left out, since a job of an earlier submission is still to run or running them."""
    finished: tuple[str, ...] = ()
    """Cells that were left out, since trying them again would change nothing."""
    failed: tuple[str, ...] = ()
    """Cells that were left out, since they have failed or took too long, and are not to be tried again."""
    skipped: tuple[str, ...] = ()
    """Cells that the sweep itself leaves out."""


# -- submitting ------------------------------------------------------------------------------------------------------


def submit(
    store: Path,
    record: SweepRecord,
    options: SlurmOptions,
    *,
    cells: Sequence[Cell] | None = None,
    named: Sequence[str] = (),
) -> Submission:
    """Submit the sweep's cells, or those given, that have no job in the queue and that a job would try.

    What earlier jobs left open is settled first: a job would otherwise take it for still running. `jobs.json` is
    written after each script, so that a later refusal loses no job. `named`: cells that are submitted though the sweep
    leaves them out. Of two submissions of a sweep the second waits for the first.
    """
    with _alone(slurm_folder(store, record.name)):
        return _submit(store, record, options, cells, named)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process has the folder's list of jobs for itself; the folder is made where it is not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise FlopwiseError(f"cannot write {folder}", why=error.strerror, hint=WRITABLE_HINT) from None
    try:
        # Where the file system has no locks, nobody waits.
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _submit(
    store: Path, record: SweepRecord, options: SlurmOptions, cells: Sequence[Cell] | None, named: Sequence[str]
) -> Submission:
    folder = slurm_folder(store, record.name)
    wanted = [read_cell(store, name) for name in record.cells] if cells is None else list(cells)
    listed = read_jobs(store, record.name)
    tasks = _tasks(listed, [cell.id for cell in wanted])
    _settle(store, record, listed, tasks)
    left_out: dict[str, list[str]] = {"queued": [], "finished": [], "failed": [], "skipped": []}
    chosen = []
    for cell in wanted:
        queued = cell.id in tasks and not tasks[cell.id].is_over
        why = "queued" if queued else _why_not(store, record, cell, options, named=cell.id in named)
        if why is None:
            chosen.append(cell)
        else:
            left_out[why].append(cell.id)
    scripts = render(record, chosen, store.absolute(), options)
    jobs: list[Job] = []
    for script in scripts:
        path = folder / script.name
        write_whole(path, script.text, own=True)
        submitted = now()
        number = sbatch(path)
        jobs.append(Job(id=number, script=script.name, submitted=submitted, array=script.array, cells=script.cells))
        write_whole(folder / JOBS, to_text(JobList(jobs=(*listed.jobs, *jobs))) + "\n", own=True)
    return Submission(folder=folder, jobs=tuple(jobs), **{why: tuple(names) for why, names in left_out.items()})


def _why_not(store: Path, record: SweepRecord, cell: Cell, options: SlurmOptions, *, named: bool) -> str | None:
    """Why a job would have nothing to do for a cell, if so."""
    found = verdict(store, record, cell, read_attempts(store, cell.id)[0], named=named)
    if found == "skipped":
        return found
    if "--force" in options.flags or found == "open" or (found == "failed" and "--retry" in options.flags):
        return None
    return found


def read_jobs(store: Path, name: str) -> JobList:
    """The jobs of a sweep; none where it was never submitted."""
    path = slurm_folder(store, name) / JOBS
    if entry_kind(path) == "nothing":
        return JobList()
    try:
        return from_text(read_bounded(path, MOST_RECORD_BYTES), JobList)
    except FlopwiseError as error:
        raise FlopwiseError(
            f"{path} is damaged", why=error.why or error.what, hint="remove it once no job runs"
        ) from None
    except OSError as error:
        raise FlopwiseError(f"{path} cannot be read", why=error.strerror, hint="check its permissions") from None


# -- how they are doing ----------------------------------------------------------------------------------------------


def states(store: Path, record: SweepRecord) -> dict[str, CellState]:
    """Each cell's state: what its job says while that waits or runs, then what its own attempts say, else the job."""
    listed = read_jobs(store, record.name)
    tasks = _tasks(listed, record.cells)
    found: dict[str, CellState] = {}
    for cell in record.cells:
        attempts = read_attempts(store, cell)[0]
        own = _own_state(store, record, read_cell(store, cell), attempts)
        task, job = tasks.get(cell), listed.newest(cell)
        if task is None or job is None or own in FINISHED:
            found[cell] = own
        elif not task.is_over:
            found[cell] = task.cell_state
        else:
            made = [attempt for attempt in attempts if _is_of(attempt, task.id, job, record)]
            found[cell] = _ended_state(task, made, own)
    return found


def reasons(store: Path, record: SweepRecord) -> dict[str, str]:
    """Of the cells whose newest job is over and was not COMPLETED: what Slurm says of it."""
    tasks = _tasks(read_jobs(store, record.name), record.cells)
    return {cell: task.reason for cell, task in tasks.items() if task.is_over and task.state != "COMPLETED"}


def _ended_state(task: QueuedTask, made: Sequence[Attempt], own: CellState) -> CellState:
    """Of a cell whose job is over: its attempts' word where the job made some and each of them has one."""
    if made and all(attempt.ended is not None for attempt in made) and not says_nothing(made[-1]):
        return own
    if task.state == "COMPLETED":
        # Without an attempt, the command had nothing to do; with an open one, it was left behind.
        return "failed" if made else own
    return task.cell_state


def _own_state(store: Path, record: SweepRecord, cell: Cell, attempts: Sequence[Attempt]) -> CellState:
    """What the attempts say: the state in which a sweep is done with the cell, else how far it has come."""
    if any(attempt.state not in ENDED for attempt in attempts):
        return "running"
    found = verdict(store, record, cell, attempts)
    if found == "finished":
        return "oom" if missing_repeats(store, record, attempts) else "ok"
    if found == "skipped":
        return "skipped"
    told = [attempt for attempt in attempts if not says_nothing(attempt)]
    if found == "failed":
        return told[-1].state
    others = [attempt for attempt in standing_attempts(attempts) if attempt.state != "ok"]
    return "failed" if others and says_nothing(others[-1]) else "planned"


def _tasks(listed: JobList, cells: Iterable[str]) -> dict[str, QueuedTask]:
    """The newest task of each cell that was submitted, as Slurm has it now."""
    newest = {cell: job for cell in cells if (job := listed.newest(cell)) is not None}
    if not newest:
        return {}
    known = ask(sorted({job.id for job in newest.values()}, key=int))
    tasks = {}
    for cell, job in newest.items():
        name = job.task(cell)
        tasks[cell] = known.get(name) or _task_unlisted(name, job)
    return tasks


def _task_unlisted(name: str, job: Job) -> QueuedTask:
    submitted = moment(job.submitted)
    is_new = submitted is not None and (_now() - submitted).total_seconds() < FORGOTTEN_AFTER_S
    return QueuedTask(id=name, state="PENDING" if is_new else UNKNOWN)


# -- closing what is left open ---------------------------------------------------------------------------------------


def settle(store: Path, record: SweepRecord) -> list[Attempt]:
    """Write the end of attempts whose jobs are over, and an attempt for a job that died before it had one.

    What was written is returned. A cell that a process has for itself is left alone.
    """
    listed = read_jobs(store, record.name)
    return _settle(store, record, listed, _tasks(listed, record.cells))


def settle_here(store: Path, record: SweepRecord) -> list[Attempt]:
    """As `settle`, before a sweep runs here: nothing without jobs or without Slurm, and nothing within a job."""
    return settle(store, record) if _can_settle() and read_jobs(store, record.name).jobs else []


def _can_settle() -> bool:
    # A thousand tasks that each ask for all of them would be a burden to the controller.
    return JOB_VARIABLE not in os.environ and is_installed()


def find_unsettled(store: Path, record: SweepRecord) -> list[str]:
    """Cells whose newest job has no end in the store yet, where `settle` could ask for it here: nobody is asked now."""
    listed = read_jobs(store, record.name) if _can_settle() else JobList()
    found = []
    for cell in record.cells:
        job = listed.newest(cell)
        if job is None:
            continue
        attempts = read_attempts(store, cell)[0]
        made = [attempt for attempt in attempts if _is_of(attempt, job.task(cell), job, record)]
        is_over = made and all(attempt.ended is not None for attempt in made)
        if not is_over and verdict(store, record, read_cell(store, cell), attempts) != "finished":
            found.append(cell)
    return found


def _settle(store: Path, record: SweepRecord, listed: JobList, tasks: Mapping[str, QueuedTask]) -> list[Attempt]:
    written: list[Attempt] = []
    for cell, task in tasks.items():
        job = listed.newest(cell)
        assert job is not None
        if not task.is_over:
            continue
        with claimed(store, cell) as alone:
            if alone:
                written += _settle_cell(store, record, cell, task, job)
    return written


def _settle_cell(store: Path, record: SweepRecord, cell: str, task: QueuedTask, job: Job) -> list[Attempt]:
    made = [attempt for attempt in read_attempts(store, cell)[0] if _is_of(attempt, task.id, job, record)]
    state: CellState = "failed" if task.state == "COMPLETED" else task.cell_state
    output = slurm_folder(Path(), record.name) / f"{task.id}.out"
    reason = f"{task.reason}; its output is {output}"
    # Then the cell is tried again without being asked for.
    interrupted = task.state in FROM_OUTSIDE or (state == "failed" and not made)
    if interrupted:
        reason = f"interrupted: {reason}"
    written = []
    for attempt in made:
        # The run of one that has no end may have been done all the same.
        found = settle_attempt(store, attempt) if attempt.ended is None else attempt
        if found.state == "ok" and attempt.ended is None:
            written.append(found)
        elif _is_open(found, task):
            closed = replace(
                found,
                state=state,
                ended=found.ended or now(),
                reason=reason,
                interrupted=interrupted,
                exit_code=task.exit_code,
                job=task.id,
                ended_by_job=True,
            )
            write_attempt(store, closed)
            written.append(closed)
    if made or task.state == "COMPLETED":
        return written
    begun = _now() - timedelta(seconds=task.elapsed_s or 0.0)
    dead = Attempt(
        number=1,
        cell=cell,
        repeat=1,
        state=state,
        started=begun.isoformat(timespec="seconds"),
        ended=now(),
        sweep=record.name,
        steps=record.steps,
        time_limit_s=record.time_limit_s,
        reason=reason,
        interrupted=interrupted,
        exit_code=task.exit_code,
        job=task.id,
        ended_by_job=True,
    )
    return [new_attempt(store, dead)]


def _is_open(attempt: Attempt, task: QueuedTask) -> bool:
    """Whether an attempt's file lacks an end, or has only that of a signal, of which Slurm can tell the reason."""
    if attempt.ended is None:
        return True
    return says_nothing(attempt) and not attempt.ended_by_job and task.state not in ("COMPLETED", UNKNOWN)


def _is_of(attempt: Attempt, task: str, job: Job, record: SweepRecord) -> bool:
    """Whether a job made an attempt: by its name, else by the sweep and the time."""
    if attempt.job == task:
        return True
    begun, submitted = moment(attempt.started), moment(job.submitted)
    if begun is None or submitted is None or attempt.job is not None or attempt.sweep != record.name:
        return False
    return (begun - submitted).total_seconds() >= -SKEW_S


def _now() -> datetime:
    return datetime.now().astimezone()
