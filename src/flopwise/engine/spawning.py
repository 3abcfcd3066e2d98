"""Starting the ranks of a training on this machine, and watching them to their end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from types import FrameType
from typing import IO, Self

from flopwise.base.processes import python_words, search_path
from flopwise.engine import warden
from flopwise.engine.launch import LISTENER, LOOPBACK, REFUSAL, SPAWNED

LOOPBACK_INTERFACE = "lo"
BACKLOG = 4096
"""Ranks that may knock at once before rank 0 answers."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 15.0
"""Between a rank's failure and the end of the others, which mostly notice it by themselves and say so."""
LEAVING_S = 60.0
"""Between the end of a rank that was asked to end and that of the others, which were asked as well."""
LAST_GRACE_S = 3.0
"""Between being asked to end and being ended."""
LOOK_EVERY_S = 0.03
TOLD_BYTES = 16 * 1024
"""Of what a failed rank wrote, the end that is shown."""


def spawn(argv: Sequence[str], ranks: int, *, module: str = "flopwise", grace_s: float = GRACE_S) -> int:
    """Run `python -m flopwise argv…` as so many ranks on this machine; returns the exit code.

    That is 0; the code of the first rank that failed (128 and its number for a signal, as shells have it); or 128 and
    the number of a signal that was passed on, where the ranks ended in good order because of it. When one has failed,
    the others are ended `grace_s` seconds later. Rank 0 speaks for all; of another one that fails, the end of what it
    wrote to stderr is shown, each line with its rank, unless rank 0 ended with the same error or is the one that
    is missed. Ranks are not of the terminal's foreground group, so that ^C reaches each of them once: from here. They
    listen on the loopback alone, and none of them, with whatever it has started, outlives this process, even if that is
    killed.
    """
    assert ranks > 0
    children: list[_Child] = []
    command = python_words(module, *argv)
    with (
        _receive_signals() as signals,
        tempfile.TemporaryDirectory() as folder,
        _Warden() as keeps_watch,
        _listening() as listener,
    ):
        try:
            for rank in range(ranks):
                children.append(_Child(rank, command, _variables(rank, ranks, listener, folder), folder, listener))
                keeps_watch.watch(children[-1].process.pid)
            # Where rank 0 is gone, nobody should wait at its door.
            listener.close()
            return _wait_for_all(children, signals, grace_s)
        finally:
            for child in children:
                child.end()


class _Warden:
    """While it is entered, a process of its own kills what it is told of as soon as this process is gone."""

    def __enter__(self) -> Self:
        reading, self._line = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and file
                [sys.executable, "-I", "-S", warden.__file__, str(reading)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(reading,),
                process_group=0,
            )
        except BaseException:
            os.close(self._line)
            raise
        finally:
            os.close(reading)
        return self

    def watch(self, group: int) -> None:
        try:
            os.write(self._line, f"{group}\n".encode())
        except BrokenPipeError:
            # It was killed. Ranks have the system end them as well: `end_with_launcher`.
            return

    def __exit__(self, *_: object) -> None:
        # All that it was told of has ended; a number may soon be another process's.
        self._process.kill()
        self._process.wait()
        os.close(self._line)


class _Child:
    """A rank's process, which leads a group of all that it starts."""

    def __init__(
        self, rank: int, command: list[str], environment: dict[str, str], folder: str, listener: socket.socket
    ) -> None:
        self.rank = rank
        self._refusal = Path(environment[REFUSAL])
        self.errors: IO[bytes] | None = None
        if rank:
            self.errors = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if rank else None,
            stderr=self.errors,
            pass_fds=() if rank else (listener.fileno(),),
            process_group=0,
        )

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs. What it has left behind is ended as well."""
        # Until it is waited for, its number is nobody else's.
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self._kill_group()
        return self.process.wait()

    def _kill_group(self) -> None:
        # A group of which only the rank is left, dead and not yet waited for, may not be there any more.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def refusal(self) -> str | None:
        """Of which error it has ended: nothing if it lost the others, None if it did not say."""
        return self._refusal.read_text(encoding="utf-8") if self._refusal.exists() else None

    def tell(self, first: str | None) -> None:
        """Show the end of what a rank that failed has written; rank 0 is seen anyway, and may have refused the same."""
        # Ranks may know more or less of the reason, and of where a checkpoint is, but it is the same one.
        if self.errors is None or (first is not None and self.refusal() in ("", first)):
            return
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - TOLD_BYTES))
        text = self.errors.read().decode(errors="replace").rstrip()
        sys.stderr.write("".join(f"rank {self.rank}: {line}\n" for line in text.splitlines()))
        sys.stderr.flush()

    def end(self) -> None:
        """At once, if it still runs."""
        if self.process.returncode is None:
            self._kill_group()
            self.process.wait()
        if self.errors is not None:
            self.errors.close()


def _variables(rank: int, ranks: int, listener: socket.socket, folder: str) -> dict[str, str]:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(listener.getsockname()[1]),
        LISTENER: str(listener.fileno()),
        SPAWNED: str(os.getpid()),
        REFUSAL: str(Path(folder) / f"refusal-{rank}"),
    }
    # Each rank would otherwise have a thread for every core, and listen where other machines can reach it.
    defaults = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    }
    return defaults | dict(os.environ) | search_path() | own


@contextmanager
def _listening() -> Iterator[socket.socket]:
    """Where ranks meet: bound here, so that nobody else can have the port, and handed down to rank 0."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(BACKLOG)
        yield listener


def _wait_for_all(children: Sequence[_Child], signals: list[int], grace_s: float) -> int:
    """Wait for all; once one has failed or left, for the others no longer than they are given."""
    running = list(children)
    failed: list[_Child] = []
    passed: set[int] = set()
    code = interrupted = 0
    ending_at: float | None = None
    asked = False
    while running:
        while signals:
            number = signals.pop(0)
            passed.add(number)
            for child in running:
                child.process.send_signal(number)
        for child in list(running):
            result = child.poll()
            if result is None:
                continue
            running.remove(child)
            if not result:
                continue
            as_shells_have_it = result if result > 0 else 128 - result
            if as_shells_have_it - 128 in passed:
                interrupted = interrupted or as_shells_have_it
                wait_s = LEAVING_S if result > 0 else grace_s
            else:
                code, wait_s = code or as_shells_have_it, grace_s
                failed += [] if asked else [child]
            ending_at = min(ending_at or inf, time.monotonic() + wait_s)
        late_s = time.monotonic() - (ending_at or inf)
        if late_s > LAST_GRACE_S:
            break
        if late_s > 0 and not asked:
            asked = True
            for child in running:
                child.process.terminate()
        time.sleep(LOOK_EVERY_S)
    for child in failed:
        child.tell(children[0].refusal())
    return code or interrupted


@contextmanager
def _receive_signals() -> Iterator[list[int]]:
    """Signals that came, in order, while it is entered. One that was ignored before stays so, here and in children."""
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before: dict[signal.Signals, object] = {}
    if threading.current_thread() is threading.main_thread():
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, note)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if callable(handler) else signal.SIG_DFL)
