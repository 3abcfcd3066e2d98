"""Profile any program that uses PyTorch, as it is: `run_outside(["python", "train.py"], folder, …)`.

Python runs a module called `sitecustomize`, if it finds one, before any program. The command gets one in a folder of
its own at the front of PYTHONPATH; it waits for torch and then counts steps (`hook`). Launchers like torchrun and all
processes that the program starts inherit it. Python's options -E, -I and -S turn it off, so they are refused.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flopwise.core.errors import FlopwiseError, shown
from flopwise.profile import start_up

PATIENCE_S = 10.0
"""For a program that is told to end before it is killed."""
_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?(\.exe)?")
_WITH_VALUE = "WX"
_LAST = "cm"
_TURNS_US_OFF = "EIS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a profiled command left."""

    exit_code: int
    """The command's own; 128 and the signal's number where a signal ended it."""
    traces: tuple[Path, ...]
    """By rank; none where it never imported torch or took too few steps."""
    counters: tuple[Path, ...]
    """`sampling.read_counter_record` reads them."""


def run_outside(
    command: Sequence[str],
    folder: Path,
    *,
    warm_up: int,
    steps: int,
    at_most_s: float = 60.0,
) -> Outcome:
    """Run a command to its end, with our terminal, and record some of its steps into `folder`.

    A program that steps no optimizer is recorded by calls of its outermost module. `at_most_s`: recording ends with the
    first step after so long. The command must take at least `warm_up` + `steps` steps; those of the second after that
    give better counters.
    """
    executable = _checked(command, warm_up, steps)
    folder = _empty(folder)
    settings = {
        "package": str(Path(start_up.__file__).resolve().parent.parent),
        "folder": str(folder),
        "warm_up": warm_up,
        "steps": steps,
        "at_most_s": at_most_s,
    }
    with tempfile.TemporaryDirectory(prefix="flopwise-profile-", ignore_cleanup_errors=True) as private:
        shutil.copyfile(start_up.__file__, Path(private) / "sitecustomize.py")
        environment = child_environment(Path(private), settings)
        exit_code = _run([executable, *command[1:]], environment)
    for partial in folder.glob(".*.partial*"):
        partial.unlink(missing_ok=True)
    return Outcome(
        exit_code=exit_code,
        traces=_by_rank(folder, "trace-rank*.json.gz"),
        counters=_by_rank(folder, "counters-rank*.json"),
    )


def child_environment(private: Path, settings: dict[str, object]) -> dict[str, str]:
    """Our environment with the folder of the `sitecustomize` and what it needs to know."""
    environment = dict(os.environ)
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{private}{os.pathsep}{path}" if path else str(private)
    environment[start_up.VARIABLE] = json.dumps(settings)
    return environment


def option_that_turns_us_off(command: Sequence[str]) -> str | None:
    """The option of Python, if that is the command, with which it would not run a `sitecustomize` from PYTHONPATH."""
    if not command or not _PYTHON.fullmatch(Path(command[0]).name):
        return None
    words = iter(command[1:])
    for word in words:
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, None)
            continue
        if not word.startswith("-") or word == "-":
            return None
        for place, letter in enumerate(word[1:], start=1):
            if letter in _TURNS_US_OFF:
                return f"-{letter}"
            if letter in _LAST:
                return None
            if letter in _WITH_VALUE:
                if place == len(word) - 1:
                    next(words, None)
                break
    return None


def _checked(command: Sequence[str], warm_up: int, steps: int) -> str:
    """The command's executable."""
    if not command:
        raise FlopwiseError("there is no command to profile", hint="flopwise profile run -- python train.py")
    if warm_up < 1 or steps < 1:
        raise FlopwiseError(f"cannot record {steps} steps after {warm_up} of warm-up", hint="at least 1 step of each")
    option = option_that_turns_us_off(command)
    if option is not None:
        raise FlopwiseError(
            f"a program that is started with `{option}` cannot be profiled from outside",
            why="with it Python runs nothing but the program itself",
            hint=f"leave `{option}` out",
        )
    executable = shutil.which(command[0])
    if executable is None:
        raise FlopwiseError(
            f"there is no command {shown(command[0])}", hint="check its name, or give its path: ./train.sh"
        )
    return executable


def _empty(folder: Path) -> Path:
    """The folder, made where it is missing, without traces of an earlier run."""
    try:
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlopwiseError(
            f"cannot write into {folder}", why=error.strerror, hint="name a folder that can be written"
        ) from None
    if any(folder.glob("trace-rank*.json.gz")):
        raise FlopwiseError(f"{folder} holds a profile already", hint="name another folder, or remove that one")
    return folder


def _run(command: list[str], environment: dict[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env=environment)  # noqa: S603 - what the user asked for
    except OSError as error:
        raise FlopwiseError(
            f"{shown(command[0])} cannot be run", why=error.strerror, hint="is it a program, and may it be executed?"
        ) from None
    with _passed_on(process):
        code = _wait(process)
    return code if code >= 0 else 128 - code


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:
        pass
    # Ctrl-C reached the program as well: it decides whether and how it ends. A second one is meant for us.
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Who ends us means the program."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _by_rank(folder: Path, pattern: str) -> tuple[Path, ...]:
    def order(path: Path) -> tuple[int, int, str]:
        return int(re.findall(r"\d+", path.name)[0]), len(path.name), path.name

    return tuple(sorted(folder.glob(pattern), key=order))
