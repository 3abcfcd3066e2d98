"""A command as a child that gets the signals we get, so that it and we look like one process from outside.

It stays in our process group, with our terminal, as if the shell had started it in our place. What the terminal or
somebody else sends to the whole group reaches it without us; what is sent to us alone we pass on. Which of the two it
was, a third process in the group tells, which does nothing but wait for signals. Who stops the child (Ctrl-Z) stops us;
if we are killed, so is the child. SIGSTOP to us alone cannot be seen, and so not passed on.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PASSED_ON = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGWINCH,
    signal.SIGTSTP,
    signal.SIGCONT,
}
STOPS_OF_A_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
PR_SET_PDEATHSIG = 1
WHOLE_GROUP_S = 0.05
"""A signal to a group reaches its members within microseconds, and they tell of it when it is their turn to run."""
SAME_SIGNAL_S = 0.5
"""Between two who get the same signal, at most; it may have been sent to us again, and to us alone."""
LOOK_EVERY_S = 0.2
"""Another thread of ours, where there is one, may be given the word that the program has ended, and drop it."""
_NOTE = struct.Struct("=id")
"""The number of a signal, and when it came."""


def run_passing_on(command: Sequence[str], executable: str, environment: Mapping[str, str]) -> int:
    """Run it to its end: its exit code, or the number of the signal that ended it, below 0. OSError: it cannot be run.

    Its open files are ours. Outside the main thread nothing is passed on.
    """
    if threading.current_thread() is not threading.main_thread():
        return _start(command, executable, environment, _tie_to_us(None)).wait()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    # Where our caller ignores its children, the system would keep from us how ours ended.
    children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        process = _start(command, executable, environment, _tie_to_us(mask, children))
        witness = _Witness()
        try:
            return _wait(process, witness)
        finally:
            witness.end()
    finally:
        signal.signal(signal.SIGCHLD, children)
        # What comes with its end was meant for the program.
        while signal.sigtimedwait(PASSED_ON, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def end_by(number: int) -> None:
    """End this process by a signal, as the program ended. There is one core file already, if any."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError):
        # SIGKILL has no action that could be set.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


def _start(
    command: Sequence[str], executable: str, environment: Mapping[str, str], prepare: Callable[[], None]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - what the user asked for
        command,
        executable=executable,
        env=environment,
        close_fds=False,
        preexec_fn=prepare,  # noqa: PLW1509 - no other thread runs, and nothing is imported there
    )


def _tie_to_us(mask: set[int] | None, children: object = None) -> Callable[[], None]:
    """For a child before its command: it dies with us, and gets the signals that we got."""
    us = os.getpid()
    control = ctypes.CDLL(None).prctl

    def prepare() -> None:
        control(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != us:
            os.kill(os.getpid(), signal.SIGKILL)
        if children == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def _wait(process: subprocess.Popen[bytes], witness: _Witness) -> int:
    while True:
        came = signal.sigtimedwait({*PASSED_ON, signal.SIGCHLD}, LOOK_EVERY_S)
        if came is not None and came.si_signo != signal.SIGCHLD:
            if not witness.saw(came.si_signo):
                os.kill(process.pid, came.si_signo)
            continue
        pid, status = os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            continue
        if not os.WIFSTOPPED(status):
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode
        if os.WSTOPSIG(status) in STOPS_OF_A_TERMINAL:
            # The shell waits for us to stop, and wakes the whole group.
            os.kill(os.getpid(), signal.SIGSTOP)


class _Witness:
    """A process of our group that does nothing: the signals it gets are those that the whole group got."""

    def __init__(self) -> None:
        self._notes, notes = os.pipe()
        self._seen: list[tuple[int, float]] = []
        prepare = _tie_to_us(None)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                prepare()
                while True:
                    number = signal.sigwait(PASSED_ON)
                    os.write(notes, _NOTE.pack(number, time.monotonic()))
            finally:
                os._exit(0)
        os.close(notes)

    def saw(self, number: int) -> bool:
        """Whether a signal that we just got went to the whole group."""
        now = time.monotonic()
        until = now + WHOLE_GROUP_S
        while not any(seen == number for seen, _ in self._seen):
            # Where it has the signal, but was not its turn to run yet, it will tell.
            rest = None if _pending(self._pid) >> (number - 1) & 1 else max(0.0, until - time.monotonic())
            if not select.select([self._notes], [], [], rest)[0]:
                if _is_ready(self._pid) and time.monotonic() - now < SAME_SIGNAL_S:
                    # It is awake: on a busy machine it may have the signal, and wait for its turn to tell.
                    until = time.monotonic() + WHOLE_GROUP_S
                    continue
                return False
            told = os.read(self._notes, _NOTE.size)
            if len(told) < _NOTE.size:
                return False
            found, moment = _NOTE.unpack(told)
            if now - moment < SAME_SIGNAL_S:
                self._seen.append((found, moment))
        self._seen.remove(next(seen for seen in self._seen if seen[0] == number))
        self._seen = [seen for seen in self._seen if now - seen[1] < SAME_SIGNAL_S]
        return True

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._notes)


def _is_ready(pid: int) -> bool:
    """Whether a process runs, or would if it were its turn."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False


def _pending(pid: int) -> int:
    """A process's pending signals as bits; none where the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:")), 0)
