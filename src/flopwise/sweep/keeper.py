"""A program of its own: runs a command, and ends it with all that it has started once nobody holds the line any more.

    python keeper.py LINE GRACE COMMAND …

LINE is the number of a pipe's reading end, whose writing end the sweep holds. It is closed when the sweep wants an end,
and by the system when the sweep dies, however that comes about; nothing has to be set up in the child between fork and
exec, which is no place for Python in a process with threads. The keeper leads a session, in which all that the command
starts stays even where it makes process groups, as ranks do. It ends as the command has ended: with its exit code, or
of its signal. It imports nothing but the standard library, and starts in 20 ms.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

LOOK_EVERY_S = 0.02
STUCK_S = 30.0
"""After which a process that was killed and stays, as one that waits for a driver does, is waited for no longer."""


def members(session: int) -> list[int]:
    """Processes of a session that have not ended; without /proc none can be told."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The command's name is in parentheses, and may hold any sign, blanks and parentheses too.
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in (b"Z", b"X"):
            found.append(int(entry.name))
    return found


def end_session(session: int) -> None:
    """Kill whoever is left in a session; this process, where it is one of them, excepted."""
    begun = time.monotonic()
    while time.monotonic() - begun < STUCK_S:
        left = [pid for pid in members(session) if pid != os.getpid()]
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:
                return
        if not left:
            return
        time.sleep(LOOK_EVERY_S)


def keep(line: int, grace_s: float, command: list[str]) -> int:
    """Run the command to its end or to that of the line; its exit code, negative for a signal."""
    # A handler of our own, since a signal that is ignored would be ignored by the command as well.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stays)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - given by the sweep
    try:
        while process.poll() is None:
            if select.select([line], [], [], LOOK_EVERY_S)[0]:
                return _end(process, grace_s)
    finally:
        end_session(os.getpid())
    return process.returncode


def _end(process: subprocess.Popen[bytes], grace_s: float) -> int:
    os.killpg(os.getpgrp(), signal.SIGTERM)
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        end_session(os.getpid())
        return -signal.SIGKILL if process.poll() is None else process.returncode


def memory_kills() -> tuple[int, ...]:
    """How often the system has killed for lack of memory: in this process's control group, and on this machine.

    A count that cannot be read is 0, so that two answers of one process can be compared.
    """
    groups = Path("/sys/fs/cgroup")
    files = [groups / "memory.events", groups / "memory" / "memory.oom_control", Path("/proc/vmstat")]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds:
            files.append(groups / path.lstrip("/") / "memory.events")
        elif "memory" in kinds.split(","):
            files.append(groups / "memory" / path.lstrip("/") / "memory.oom_control")
    return tuple(_count(path, "oom_kill") for path in files)


def _count(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    found = [line.split() for line in lines]
    return next((int(fields[1]) for fields in found if len(fields) == 2 and fields[0] == name), 0)


def _stays(_number: int, _frame: FrameType | None) -> None:
    return


def _leave(code: int) -> None:
    if code < 0:
        # Die as it did, without a second image of memory on the disk.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    _leave(keep(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
