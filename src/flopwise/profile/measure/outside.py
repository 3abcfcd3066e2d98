"""Profile any program that uses PyTorch, as it is: `run_outside(["python", "train.py"], folder, …)`.

Python runs a module called `sitecustomize`, if it finds one, before any program. The folder `start_up` of this package,
at the front of the command's PYTHONPATH, has one: it runs the one it stands in front of, waits for torch and then
counts steps (`hook`). Launchers like torchrun and all processes that the program starts inherit it. That entry and one
variable of its own are all of the environment that changes. Where Python's options -E, -I and -S or an environment of
its own turn it off, the program runs as ever, without a profile.
"""

from __future__ import annotations

import errno
import fcntl
import getopt
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flopwise.base.errors import FlopwiseError, shown
from flopwise.profile.measure.passing_on import run_passing_on
from flopwise.profile.measure.start_up import sitecustomize
from flopwise.profile.measure.start_up.sitecustomize import TOLD

SHELL = "/bin/sh"
_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?(\.exe)?")
_OPTIONS = "bBc:dEhiIm:OPqRsStuvVW:xX:?"
"""Of Python, as its own `getopt` has them."""


class CommandNotFound(FlopwiseError):  # noqa: N818 - as a shell says it
    """There is no such command; the exit code is the one of shells."""

    exit_code = 127


class CommandNotRun(FlopwiseError):  # noqa: N818 - as a shell says it
    """There is one, and the system does not run it; the exit code is the one of shells."""

    exit_code = 126


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOutcome:
    """What a profiled command left."""

    exit_code: int
    """The command's own; 128 and the signal's number where a signal ended it."""
    signal: int | None = None
    """Which ended it."""
    traces: tuple[Path, ...]
    """By rank."""
    counters: tuple[Path, ...]
    """`sampling.read_counter_record` reads them."""
    why_none: str | None = None
    """Why there is no trace, where there is none."""


def run_outside(
    command: Sequence[str],
    folder: Path,
    *,
    warm_up: int,
    steps: int,
    at_most_s: float = 60.0,
) -> ProgramOutcome:
    """Run a command to its end, with our terminal, and record some of its steps into `folder`, which is made before.

    A program that steps no optimizer is recorded by calls of its outermost module. `at_most_s`: recording ends with the
    first step after so long. The command must take at least `warm_up` + `steps` steps; those of the second after that
    give better counters.
    """
    executable = _check_command(command, warm_up, steps)
    folder = _empty(folder)
    with _hold(folder) as told:
        environment = child_environment(executable, f"{warm_up} {steps} {at_most_s} {told}")
        code = _run(command, executable, environment)
        processes = read_told(told)
    if not _at_work(folder):
        _remove_partial(folder)
    traces = _by_rank(folder, "trace-rank*.json.gz")
    return ProgramOutcome(
        exit_code=code if code >= 0 else 128 - code,
        signal=-code if code < 0 else None,
        traces=traces,
        counters=_by_rank(folder, "counters-rank*.json"),
        why_none=None if traces else _explain_option(command, reason(processes, warm_up + steps)),
    )


def child_environment(executable: str, settings: str) -> dict[str, str]:
    """Our environment with the folder of the `sitecustomize` and what it needs to know."""
    environment = dict(os.environ)
    start_up = str(Path(sitecustomize.__file__).resolve().parent)
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{start_up}{os.pathsep}{path}" if path else start_up
    environment[sitecustomize.VARIABLE] = settings
    if "_" in environment:
        # Where shells say which command they started.
        environment["_"] = executable
    return environment


def _explain_option(command: Sequence[str], why: str) -> str:
    """The reason with the option that explains it, where one does."""
    option = option_that_turns_us_off(command) if why == NO_PYTHON else None
    return f"with `{option}` Python runs nothing but the program itself" if option else why


def option_that_turns_us_off(command: Sequence[str]) -> str | None:
    """The option of Python, if that is the command, with which it would not run a `sitecustomize` from PYTHONPATH."""
    if not command or not _PYTHON.fullmatch(Path(command[0]).name):
        return None
    # Word by word, since what follows `-c` and `-m` is the program's own and need not be options of Python.
    for count in range(2, len(command) + 1):
        try:
            options, _ = getopt.getopt(list(command[1:count]), _OPTIONS, ["check-hash-based-pycs="])
        except getopt.GetoptError:
            continue
        for option, _ in options:
            if option in ("-E", "-I", "-S"):
                return option
            if option in ("-c", "-m"):
                return None
    return None


def _check_command(command: Sequence[str], warm_up: int, steps: int) -> str:
    """The command's executable."""
    if not command:
        raise FlopwiseError("there is no command to profile", hint="flopwise profile run -- python train.py")
    if warm_up < 1 or steps < 1:
        raise FlopwiseError(f"cannot record {steps} steps after {warm_up} of warm-up", hint="at least 1 step of each")
    executable = shutil.which(command[0])
    if executable is not None:
        return executable
    if Path(command[0]).name != command[0] and Path(command[0]).exists():
        raise CommandNotRun(
            f"{shown(command[0])} is no program, or may not be executed", hint=f"chmod +x {command[0]}, or name another"
        )
    raise CommandNotFound(
        f"there is no command {shown(command[0])}", hint="check its name, or give its path: ./train.sh"
    )


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
    if not _at_work(folder):
        _remove_partial(folder)
    return folder


def is_abandoned(folder: Path) -> bool:
    """Whether it is what a profiling that was killed has left: no profile in it, and nobody who is at work on one."""
    try:
        names = [path.name for path in folder.iterdir()]
        left = all(name.startswith(TOLD) or ".partial" in name for name in names)
        return bool(names) and left and not folder.is_symlink() and not _at_work(folder)
    except OSError:
        return False


def _at_work(folder: Path) -> bool:
    """Whether somebody profiles into it: one of several ranks, each profiled on its own."""
    return not all(_is_left(place) for place in folder.glob(f"{TOLD}*"))


def _is_left(place: Path, *, remove: bool = False) -> bool:
    """Whether nobody holds a file of TOLD; it is removed while we hold it, so that nobody else can begin to."""
    try:
        handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        handle = None
    try:
        if handle is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        if remove:
            with suppress(OSError):
                place.unlink()
        return True
    finally:
        if handle is not None:
            os.close(handle)


@contextmanager
def _hold(folder: Path) -> Iterator[Path]:
    """A file of this profiling alone, held as long as this process lives, by which others see that it is at work."""
    try:
        handle, name = tempfile.mkstemp(prefix=TOLD, dir=folder)
        fcntl.flock(handle, fcntl.LOCK_EX)
        while not os.fstat(handle).st_nlink:
            # Another rank that began at the same time took it for one that was left, before we held it.
            os.close(handle)
            handle, name = tempfile.mkstemp(prefix=TOLD, dir=folder)
            fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        raise FlopwiseError(
            f"cannot write into {folder}", why=error.strerror, hint="name a folder that can be written"
        ) from None
    try:
        yield Path(name)
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)


def _remove_partial(folder: Path) -> None:
    for left in folder.glob(".*.partial*"):
        with suppress(OSError):
            left.unlink()
    for place in folder.glob(f"{TOLD}*"):
        _is_left(place, remove=True)


def _run(command: Sequence[str], executable: str, environment: dict[str, str]) -> int:
    try:
        return run_passing_on(command, executable, environment)
    except OSError as error:
        if error.errno == errno.ENOEXEC and _is_text(executable):
            # A script that does not say who reads it: shells do.
            return run_passing_on([SHELL, executable, *command[1:]], SHELL, environment)
        raise CommandNotRun(
            f"{shown(command[0])} cannot be run", why=error.strerror, hint="is it a program, and may it be executed?"
        ) from None


def _is_text(path: str) -> bool:
    with Path(path).open("rb") as stream:
        beginning = stream.read(1024)
    return b"\0" not in beginning and not beginning.startswith(b"\x7fELF")


def _by_rank(folder: Path, pattern: str) -> tuple[Path, ...]:
    def order(path: Path) -> tuple[int, int, str]:
        return int(re.findall(r"\d+", path.name)[0]), len(path.name), path.name

    return tuple(sorted(folder.glob(pattern), key=order))


# -- why there is no profile -------------------------------------------------------------------------------------------

NO_PYTHON = (
    "flopwise's start-up file ran in none of its processes: there was no Python among them, or one that was started "
    "with -E, -I or -S or with an environment of its own"
)
CUT_SHORT = "by a signal, os._exit or exec, with which Python runs nothing at the end"


Process = dict[str, str]
"""A Python process, or what took its place by exec: `torch`, `step`, `profiler`, `daemon`, `failed` and `ended`, as far
as it told them, each with what it said of it."""


def read_told(place: Path) -> list[Process]:
    """All processes that told anything, and the file that they did it in removed."""
    try:
        lines = place.read_text(encoding="utf-8", errors="replace").splitlines()
        place.unlink()
    except OSError:
        return []
    found: list[Process] = []
    latest: dict[str, Process] = {}
    for line in lines:
        number, _, words = line.partition(" ")
        what, _, more = words.partition(" ")
        if words == "python" or number not in latest:
            # A copy by fork begins without a word; where a process begins a second time, it was replaced by exec.
            latest[number] = {} if words == "python" else {"torch": ""}
            found.append(latest[number])
        latest[number][what] = more
    return found


def reason(processes: list[Process], needed: int) -> str:
    """Why none of them left a profile; `needed`: steps that must be taken before one is written."""
    failures = [process["failed"] for process in processes if process.get("failed")]
    with_torch = [process for process in processes if "torch" in process]
    if failures:
        return f"profiling failed: {failures[0]}"
    if any("profiler" in process for process in processes):
        return "it uses torch's profiler itself, and there can be only one"
    if any("daemon" in process for process in processes):
        return (
            "a daemon thread takes its steps on the GPU, and nobody could stop the profiler there when the program ends"
        )
    if any("step" in process and "ended" not in process for process in processes):
        return f"a process that had begun to take steps was ended {CUT_SHORT}"
    if with_torch:
        return _too_few(with_torch, needed)
    return "it never imported torch" if processes else NO_PYTHON


def _too_few(processes: list[Process], needed: int) -> str:
    """Of processes that imported torch."""
    furthest = max(processes, key=lambda process: ("step" in process, _steps(process)))
    if "step" in furthest:
        steps, others = _steps(furthest)
        told = f"it took {steps} of the {needed} steps that are needed"
        return f"{told} in one thread, and {others} in others, which are not counted" if others else told
    if any("ended" not in process for process in processes):
        return f"it imported torch, took no step, and was ended {CUT_SHORT}"
    return "it imported torch, but stepped no torch.optim.Optimizer and called no module that has parameters"


def _steps(process: Process) -> tuple[int, int]:
    """That were counted, and those of other threads than the one that was watched."""
    counts = [int(word) for word in process.get("ended", "").split() if word.isdecimal()]
    steps, others, *_ = (*counts, 0, 0)
    return steps, others
