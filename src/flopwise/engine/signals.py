"""`Stop`: a training that is asked to end does so in good order and saves; one that is asked twice ends at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from flopwise.base.processes import is_first_process

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """While it is entered, the first SIGINT or SIGTERM only sets `asked`; the loop looks at it.

    The second one, of either kind, has the system's own effect: the process dies of it at once, without Python, even
    within a long call to a driver. A shell shows that as 130 (SIGINT) or 143 (SIGTERM). Those that come before Python
    has looked at the first count as one. On leaving, the handlers from before are back. A signal that was ignored
    before stays ignored, as `nohup` and shells in the background want it. Only the main thread can have handlers:
    elsewhere nothing is installed, and nothing ever asks.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        """The signal's name: `SIGINT`, `SIGTERM`."""
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before != signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            # A handler that was not installed from Python is None here and cannot be put back.
            signal.signal(number, before if callable(before) else signal.SIG_DFL)
        self._before.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # The next one goes to the system, which does not wait for Python to get a turn.
        for caught in self._before:
            signal.signal(caught, _end_at_once if is_first_process() else signal.SIG_DFL)
        self.asked = signal.Signals(number).name


def _end_at_once(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)
