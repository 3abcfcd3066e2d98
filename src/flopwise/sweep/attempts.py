"""One attempt at a cell: a fresh process that trains, watched to its end, and what its end means."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal, NamedTuple, Protocol

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import append_to, to_toml, write_whole
from flopwise.base.processes import python_words, search_path
from flopwise.base.units import AUTO, show_seconds
from flopwise.catalog.load import THIS_CPU, hardware_place
from flopwise.engine.executable import check_optimizer
from flopwise.records.measurement import RunRecord
from flopwise.store.cells import MEMORY_FAILURES, Attempt, Cell, CellState, SweepRecord, Told
from flopwise.store.sweeps import (
    ATTEMPT_VARIABLE,
    BEAT_S,
    beat,
    cell_folder,
    new_attempt,
    now,
    read_told,
    run_record,
    write_attempt,
)
from flopwise.sweep import keeper
from flopwise.sweep.jobs.slurm_scripts import JOB_VARIABLE, PREFIX_VARIABLE
from flopwise.train.failures import SHORT_OF_MEMORY

MODEL = "model.toml"
"""A cell's model, for the command that trains it."""
GRACE_S = 10.0
"""Between being asked to end and being ended."""
LOOK_EVERY_S = 0.1
LOG_BYTES = 64 * 1024
"""Of what an attempt wrote to stderr, the end that is kept."""
LONGEST_LOG_BYTES = 16 * LOG_BYTES
"""While it runs."""
LONGEST_REASON = 300

OF_ANOTHER_LAUNCH = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "FLOPWISE_SPAWNED",
    "FLOPWISE_LISTENER",
    "FLOPWISE_REFUSAL",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_STEP_ID",
    PREFIX_VARIABLE,
)
"""Variables with which an attempt would take itself for one of several ranks that somebody else has started."""

EXCEPTION_LINE = re.compile(
    r"^(?:\[[^\]]{1,40}\]:?\s*)?(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception)(?::|$)", re.ASCII
)
"""How Python tells what ended it, perhaps behind the name of a rank; what a library adds may follow."""
KILLED = "killed (SIGKILL): by the system for lack of memory, or by somebody"
KILLED_FOR_MEMORY = "killed by the system for lack of memory"

Ending = Literal["itself", "timeout", "interrupted"]


class Asking(Protocol):
    """Tells whether an end is wanted, and by which signal."""

    @property
    def asked(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class NeverAsked:
    asked: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What an attempt is wanted for."""

    cell: Cell
    sweep: SweepRecord
    repeat: int
    steps: int
    profile: bool = False
    batch_sequences: int | None = None
    """None: as the cell has it, which may leave it to the plan."""
    micro_batch_sequences: int | None = None


Command = Callable[[Trial, Path, Path], list[str]]
"""From a trial, the store and the model's file to the words of a command."""


def train_command(trial: Trial, store: Path, model: Path) -> list[str]:
    """`flopwise train` for a trial: every setting that is not open, in figures that are read back exactly."""
    settings, sweep = trial.cell.settings, trial.sweep
    check_optimizer(settings.optimizer, ranks=settings.devices)
    batch = trial.batch_sequences or settings.batch_sequences
    micro = trial.micro_batch_sequences or settings.micro_batch_sequences
    options: dict[str, object] = {
        "task": settings.task,
        "seq": settings.sequence_tokens,
        "batch": batch,
        "micro": micro,
        "precision": settings.precision,
        "optimizer": settings.optimizer,
        "device-mem": AUTO if settings.device_memory_bytes is None else settings.device_memory_bytes,
        "host-mem": AUTO if settings.host_memory_bytes is None else settings.host_memory_bytes,
        "steps": trial.steps,
        "gpus": settings.devices,
        "seed": sweep.seed,
        "on": _described_by(settings.hardware),
        "device": "cpu" if settings.hardware == THIS_CPU else sweep.device,
        "tokenizer": sweep.tokenizer or AUTO,
    }
    words = python_words("flopwise", "train", str(model))
    for name, value in options.items():
        if value != AUTO:
            words += [f"--{name}", str(value)]
    for source in sweep.data:
        words += ["--data", source]
    words += ["--no-checkpoint", *(["--profile"] if trial.profile else []), "--store", str(store)]
    return [*shlex.split(os.environ.get(PREFIX_VARIABLE, "")), *words]


def _described_by(hardware: str) -> str:
    """The file that describes this machine, in full; the catalogue's entries are found by what the machine is."""
    place = hardware_place(hardware)
    return place if Path(place).is_absolute() else AUTO


# -- running ---------------------------------------------------------------------------------------------------------


def run_attempt(
    store: Path,
    trial: Trial,
    *,
    command: Command = train_command,
    environment: Mapping[str, str] | None = None,
    stop: Asking | None = None,
    grace_s: float = GRACE_S,
) -> Attempt:
    """Try a cell in a process of its own; its attempt, written when it starts and again at its end."""
    folder, model = cell_folder(store, trial.cell.id), cell_folder(store.resolve(), trial.cell.id) / MODEL
    try:
        words = command(trial, store.resolve(), model)
    except FlopwiseError as error:
        return without_process(store, trial, "failed", _line_of(error.what))
    attempt = new_attempt(store, _begin(trial))
    log = log_path(folder, attempt)
    limit_s = trial.sweep.time_limit_s
    kills = keeper.memory_kills()
    try:
        write_whole(model, to_toml(trial.cell.settings.model), own=True)
        own = {ATTEMPT_VARIABLE: f"{attempt.cell}/{attempt.number}"}
        # Appended to, so that it can be cut short while the process writes.
        with append_to(log) as errors:
            kept = KeptOutput(words, _environment({**(environment or {}), **own}), errors, grace_s)
            try:
                attempt = replace(attempt, pid=kept.process.pid)
                write_attempt(store, attempt)
                watch = _Watch(store, attempt, log)
                ending = _watch_until_end(kept, limit_s, stop or NeverAsked(), watch)
            finally:
                kept.end()
            attempt = watch.attempt
    except OSError as error:
        failed = f"no process could be started: {error.strerror or error}"
        return _write(store, replace(attempt, state="failed", reason=failed, ended=now()))
    cut(log, LOG_BYTES)
    told = read_told(store, attempt.cell, attempt.number)
    code = kept.process.returncode
    short = any(after > before for before, after in zip(kills, keeper.memory_kills(), strict=False))
    end = judge(code, ending, run_record(store, told.run), told, log_text(log), short=short)
    if end.state == "timeout":
        end = end._replace(reason=f"not done within {show_seconds(limit_s or 0.0)}")
    elif ending == "interrupted" and end.interrupted:
        end = end._replace(reason=f"interrupted by {stop.asked if stop else None}")
    return _write(store, replace(attempt, **end._asdict(), ended=now(), exit_code=code, run=told.run))


def without_process(store: Path, trial: Trial, state: CellState, reason: str) -> Attempt:
    """An attempt that needed no process to be judged."""
    begun = _begin(trial)
    return new_attempt(store, replace(begun, state=state, reason=reason, ended=begun.started, pid=None))


def _begin(trial: Trial) -> Attempt:
    """Until the attempt has a process, ours stands for it."""
    return Attempt(
        number=0,
        cell=trial.cell.id,
        repeat=trial.repeat,
        state="running",
        started=now(),
        sweep=trial.sweep.name,
        steps=trial.steps,
        time_limit_s=trial.sweep.time_limit_s,
        batch_sequences=trial.batch_sequences,
        micro_batch_sequences=trial.micro_batch_sequences,
        host=socket.gethostname(),
        pid=os.getpid(),
        job=os.environ.get(JOB_VARIABLE) or os.environ.get("SLURM_JOB_ID"),
    )


def _write(store: Path, attempt: Attempt) -> Attempt:
    write_attempt(store, attempt)
    return attempt


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name not in OF_ANOTHER_LAUNCH}
    return {**ours, **search_path(), **changes}


class KeptOutput:
    """A command under a keeper, which ends it when the line to us is gone."""

    def __init__(self, command: list[str], environment: dict[str, str], errors: IO[bytes], grace_s: float) -> None:
        reading, self._line = os.pipe()
        self._held = True
        self.grace_s = grace_s
        words = [sys.executable, "-I", "-S", str(Path(keeper.__file__)), str(reading), str(grace_s), *command]
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(reading,),
                start_new_session=True,
            )
        except BaseException:
            self.hang_up()
            raise
        finally:
            os.close(reading)

    def hang_up(self) -> None:
        """Ask for the end: the whole group is told, and after its grace killed."""
        if self._held:
            self._held = False
            os.close(self._line)

    def end(self) -> None:
        """Leave nothing running."""
        self.hang_up()
        try:
            self.process.wait(self.grace_s + 2 * keeper.STUCK_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # Where the keeper itself was killed, nobody else does it.
        keeper.end_session(self.process.pid)


class _Watch:
    """What is written of an attempt while it runs: that it does, and its run as soon as that has a folder."""

    def __init__(self, store: Path, attempt: Attempt, log: Path) -> None:
        self.store, self.attempt, self.log = store, attempt, log
        self._beaten_s = time.monotonic()

    def look(self) -> None:
        run = self.attempt.run or read_told(self.store, self.attempt.cell, self.attempt.number).run
        if run != self.attempt.run:
            # It is written again at its end; that it cannot be now is no reason to end it.
            with suppress(FlopwiseError):
                self.attempt = _write(self.store, replace(self.attempt, run=run))
        if time.monotonic() - self._beaten_s >= BEAT_S:
            self._beaten_s = time.monotonic()
            beat(self.store, self.attempt)
        cut(self.log, LONGEST_LOG_BYTES)


def _watch_until_end(kept: KeptOutput, limit_s: float | None, stop: Asking, watch: _Watch) -> Ending:
    begun = time.monotonic()
    while True:
        try:
            kept.process.wait(LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            return "itself"
        if stop.asked:
            return "interrupted"
        if limit_s is not None and time.monotonic() - begun > limit_s:
            return "timeout"
        watch.look()


# -- what was written ------------------------------------------------------------------------------------------------


def log_path(folder: Path, attempt: Attempt) -> Path:
    """Where the end of an attempt's stderr is kept."""
    return folder / f"attempt-{attempt.number:04d}.log"


def log_text(path: Path) -> str:
    """What an attempt wrote; nothing where that is gone."""
    try:
        with path.open("rb") as stream:
            return _tail(stream, LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""


def cut(path: Path, most: int) -> None:
    """Shorten a log that is longer than that to its last 64 KiB."""
    try:
        if path.stat().st_size <= most:
            return
        with path.open("rb+") as stream:
            tail = _tail(stream, LOG_BYTES)
            stream.truncate(0)
            stream.seek(0)
            stream.write(tail)
    except OSError:
        # A log is no reason to lose an attempt.
        return


def _tail(stream: IO[bytes], most: int) -> bytes:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - most))
    return stream.read(most)


# -- what it means ---------------------------------------------------------------------------------------------------


class End(NamedTuple):
    """How an attempt has ended."""

    state: CellState
    reason: str | None = None
    """Why it is not ok."""
    interrupted: bool = False


def judge(code: int, ending: Ending, record: RunRecord | None, told: Told, errors: str, *, short: bool = False) -> End:
    """What the end of a process means for its cell; `short`: the system has killed for memory since."""
    if code == 0 and record is not None and record.state == "done":
        return End("ok") if record.measurement is not None else End("failed", "it has measured nothing")
    if ending == "timeout":
        return End("timeout")
    if ending == "interrupted":
        return End("failed", "interrupted", interrupted=True)
    if record is not None and record.state == "interrupted":
        return End("failed", f"interrupted by {record.reason}, from outside", interrupted=True)
    return _failure(code, told, errors, short=short)


def _failure(code: int, told: Told, errors: str, *, short: bool) -> End:
    """Of a process that ended by itself, and not well."""
    if code == 0:
        return End("failed", "it ended without a record of its run")
    if told.failure in MEMORY_FAILURES:
        return End("oom", _line_of(told.reason or told.failure))
    words = _short_of_memory(errors) if told.failure is None else None
    if words is not None:
        return End("oom", words)
    # A shell, or the process that has started ranks, tells of a signal by 128 and its number.
    number = -code if code < 0 else code - 128
    if number == signal.SIGKILL:
        return End("oom", KILLED_FOR_MEMORY) if short else End("failed", KILLED)
    if number > 0 and number in signal.valid_signals():
        return End("failed", signal.Signals(number).name)
    return End("failed", _line_of(told.reason or last_words(errors) or f"exit code {code}"))


def _short_of_memory(errors: str) -> str | None:
    """What Python, or a library that ended the process itself, has written of it."""
    raised = [line for line in errors.splitlines() if EXCEPTION_LINE.match(line)]
    for words in (last_words(errors), raised[-1] if raised else None):
        if words and SHORT_OF_MEMORY.search(words):
            return _line_of(words)
    return None


def last_words(errors: str) -> str | None:
    """The last line that says anything, of a process that has told nothing."""
    said = [line for line in errors.splitlines() if line.strip()]
    return _line_of(said[-1]) if said else None


def _line_of(text: str) -> str:
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}…"


def settle_attempt(store: Path, attempt: Attempt) -> Attempt:
    """An attempt whose process went without a word, written as what became of it: its run may have been done."""
    record = run_record(store, attempt.run or read_told(store, attempt.cell, attempt.number).run)
    if record is not None and record.state == "done" and record.measurement is not None:
        return _write(store, replace(attempt, state="ok", reason=None, run=record.id, ended=record.ended or now()))
    return _write(store, replace(attempt, run=record.id if record else attempt.run))
