"""What Slurm says of jobs: sacct where accounting is kept, squeue for what it does not know, each with a time limit."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.store.cells import CellState

ANSWER_S = 60.0
"""A controller that is busy answers late; one that is down, never."""
LARGEST_RANGE = 100_000
"""Tasks of one line; Slurm itself allows 4 million, and we never ask for more than a thousand."""
LARGEST_SIGNAL = 64
JOB = re.compile(r"([0-9]{1,18})(?:_(?:([0-9]{1,9})|\[([0-9,\-:%]+)\]))?(?:\+[0-9]+)?", re.ASCII)
"""123, 123_4, 123_[5-9,12%2], 123+0 of a heterogeneous job; with a dot follows a step, which is none of ours."""
SUBMITTED = re.compile(r"([0-9]{1,18})(?:;.*)?", re.ASCII)
"""What `sbatch --parsable` prints: the job's number, and the cluster where there are several."""
SACCT_FORMAT = "JobID,State,ExitCode,Elapsed"
SQUEUE_FORMAT = "%i|%T|%r|%M"

WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"})
ENDED_AS: Mapping[str, CellState] = {
    "COMPLETED": "ok",
    "OUT_OF_MEMORY": "oom",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed",
    "CANCELLED": "failed",
    "PREEMPTED": "failed",
    "LAUNCH_FAILED": "failed",
    "RECONFIG_FAIL": "failed",
    "REVOKED": "failed",
    "SPECIAL_EXIT": "failed",
}
"""States in which no process of a job is left. COMPLETED says only that its command ended with 0."""
UNKNOWN = "UNKNOWN"
"""Slurm has forgotten the job: without accounting, some minutes after its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedTask:
    """A job, or one task of an array, as Slurm has it."""

    id: str
    """123, or 123_4."""
    state: str
    """Slurm's word, without what follows it."""
    told: str = ""
    """All that was said of the state: CANCELLED by 1000, FAILED (NonZeroExitCode)."""
    exit_code: int | None = None
    """Negative: the signal that ended it."""
    elapsed_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self.state in ENDED_AS or self.state == UNKNOWN

    @property
    def cell_state(self) -> CellState:
        """A state that no version of Slurm we know has is taken for one in which the job still runs."""
        if self.state == UNKNOWN:
            return "failed"
        if self.state in WAITING:
            return "planned"
        return ENDED_AS.get(self.state, "running")

    @property
    def reason(self) -> str:
        if self.state == UNKNOWN:
            return f"Slurm no longer knows job {self.id}"
        if self.state == "OUT_OF_MEMORY":
            return f"job {self.id} was ended for the host memory that it took: OUT_OF_MEMORY"
        text = f"job {self.id} ended as {self.told or self.state}"
        if not self.exit_code:
            return text
        return f"{text}, exit code {self.exit_code}" if self.exit_code > 0 else f"{text}, signal {-self.exit_code}"


# -- asking ----------------------------------------------------------------------------------------------------------


def sbatch(script: Path) -> str:
    """Submit a script; the job's number."""
    answer = _run(["sbatch", "--parsable", str(script)])
    if answer is None:
        raise FlopwiseError(
            "there is no sbatch on this machine",
            why="it is Slurm's command for submitting jobs",
            hint="run this on a login node of the cluster, or leave out --launcher slurm",
        )
    if answer.returncode:
        raise FlopwiseError(
            f"sbatch refused {script}", why=_last_line(answer.stderr), hint="`sbatch --test-only` on it says more"
        )
    lines = answer.stdout.strip().splitlines()
    match = SUBMITTED.fullmatch(lines[-1].strip()) if lines else None
    if match is None:
        raise FlopwiseError(
            "sbatch gave no number of a job",
            why=f"it said {_last_line(answer.stdout) or 'nothing'!r}",
            hint="`squeue --me` shows whether there is one; scancel ends it",
        )
    return match[1]


def is_installed() -> bool:
    """Whether anything here can tell how jobs are doing."""
    return any(shutil.which(name) is not None for name in ("sacct", "squeue"))


def ask(jobs: Sequence[str]) -> dict[str, QueuedTask]:
    """What is known of these jobs, by the names of their tasks; one that is left out is unknown to Slurm.

    Raises a FlopwiseError where neither sacct nor squeue answers: that says nothing about any job.
    """
    if not jobs:
        return {}
    listed = ",".join(jobs)
    accounts = _run(["sacct", "-n", "-P", "-X", f"--format={SACCT_FORMAT}", "-j", listed])
    known: dict[str, QueuedTask] = {}
    if accounts is not None and accounts.returncode == 0:
        known = parse_sacct(accounts.stdout)
    # Accounting hears of a new job a little later than the controller, or is not kept at all.
    queue = _run(["squeue", "-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT, "-j", listed])
    if queue is not None and (queue.returncode == 0 or "Invalid job id" in queue.stderr):
        ended = {name: task for name, task in known.items() if task.is_over}
        return known | parse_squeue(queue.stdout) | ended
    if accounts is not None and accounts.returncode == 0:
        return known
    raise _no_answer(queue or accounts)


def _no_answer(answer: subprocess.CompletedProcess[str] | None) -> FlopwiseError:
    if answer is None:
        return FlopwiseError(
            "there is neither sacct nor squeue on this machine",
            why="they say how a sweep's jobs are doing",
            hint="run this on a login node of the cluster",
        )
    return FlopwiseError(
        "Slurm does not answer", why=_last_line(answer.stderr), hint="`squeue` tells whether its controller is there"
    )


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """What a command said; None: it is not installed."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        return subprocess.run(  # noqa: S603 - Slurm's own commands, no shell
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FlopwiseError(
            f"{command[0]} did not answer within {ANSWER_S:g} s", hint="try again when Slurm's controller is less busy"
        ) from None
    except OSError as error:
        raise FlopwiseError(f"{program} cannot be run", why=error.strerror, hint="check its permissions") from None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


# -- reading ---------------------------------------------------------------------------------------------------------


def parse_sacct(text: str) -> dict[str, QueuedTask]:
    """Lines of JobID|State|ExitCode|Elapsed; steps and lines of another shape are left out."""
    tasks = {}
    for fields in _fields(text, 4):
        name, state, code, elapsed = fields
        for task in task_ids(name):
            tasks[task] = QueuedTask(
                id=task,
                state=_word(state),
                told=state.strip(),
                exit_code=_exit_code(code),
                elapsed_s=elapsed_seconds(elapsed),
            )
    return tasks


def parse_squeue(text: str) -> dict[str, QueuedTask]:
    """Lines of id|state|reason|time, one for each task."""
    tasks = {}
    for name, state, why, elapsed in _fields(text, 4):
        reason = why.strip()
        told = state.strip() if reason in ("", "None") else f"{state.strip()} ({reason})"
        for task in task_ids(name):
            tasks[task] = QueuedTask(id=task, state=_word(state), told=told, elapsed_s=elapsed_seconds(elapsed))
    return tasks


def task_ids(name: str) -> list[str]:
    """123 → 123; 123_4 → 123_4; 123_[5-7,9%2] → 123_5, 123_6, 123_7, 123_9; nothing for a step."""
    match = JOB.fullmatch(name.strip())
    if match is None:
        return []
    if match[2] is not None:
        return [f"{match[1]}_{int(match[2])}"]
    if match[3] is None:
        return [match[1]]
    return [f"{match[1]}_{number}" for number in _numbers(match[3].partition("%")[0])]


def _numbers(text: str) -> Iterator[int]:
    """5-9, 5-9:2, 3, each between commas; a part of another shape stands for nothing."""
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", part)
        if match is None:
            continue
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if step and last - first < LARGEST_RANGE:
            yield from range(first, last + 1, step)


def elapsed_seconds(text: str) -> float | None:
    """[days-][hours:]minutes:seconds, with or without a fraction; None for anything else."""
    match = re.fullmatch(
        r"(?:([0-9]{1,6})-)?(?:([0-9]{1,6}):)?([0-9]{1,6}):([0-9]{1,6}(?:\.[0-9]{1,9})?)", text.strip()
    )
    if match is None:
        return None
    days, hours, minutes, seconds = match.groups()
    return ((int(days or 0) * 24 + int(hours or 0)) * 60 + int(minutes)) * 60 + float(seconds)


def _fields(text: str, count: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        fields = line.split("|")
        # A trailing bar stands in the output of `sacct -p`.
        if len(fields) == count or (len(fields) == count + 1 and not fields[count]):
            yield fields[:count]


def _word(state: str) -> str:
    """CANCELLED of `CANCELLED by 1000`, and of `CANCELLED+` where a column was too narrow."""
    words = state.split()
    return words[0].rstrip("+").upper() if words else ""


def _exit_code(text: str) -> int | None:
    """Of `code:signal`; out of memory, Slurm says 0:125, which is no signal."""
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", text.strip())
    if match is None:
        return None
    if int(match[2]) > LARGEST_SIGNAL:
        return None
    return -int(match[2]) if int(match[2]) else int(match[1])
