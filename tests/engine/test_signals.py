"""Signals: the first asks, the second ends, and the handlers from before come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from types import FrameType

import pytest

from flopwise.engine.signals import Stop

START = """
    import signal, sys, time
    # A runner in the background may have left these ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    from flopwise.engine.signals import Stop
"""

LOOP = """
    with Stop() as stop:
        print("ready", flush=True)
        while not stop.asked:
            time.sleep(0.01)
        print(stop.asked, flush=True)
        {after}
    print("saved", flush=True)
"""


def child(body: str) -> subprocess.Popen[str]:
    script = textwrap.dedent(START) + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_loop_ends_well(number: signal.Signals) -> None:
    with child(LOOP.format(after="")) as process:
        assert line(process) == "ready"
        process.send_signal(number)
        output, errors = process.communicate(timeout=120)
    assert output.split() == [number.name, "saved"]
    assert process.returncode == 0 and errors == ""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once(first: signal.Signals, second: signal.Signals) -> None:
    with child(LOOP.format(after="time.sleep(60)")) as process:
        assert line(process) == "ready"
        process.send_signal(first)
        assert line(process) == first.name
        process.send_signal(second)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == -second and output == "" and errors == ""


def test_the_second_signal_does_not_wait_for_python() -> None:
    # A long call outside Python: no handler of Python's would run before it has ended.
    body = LOOP.format(after="import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)")
    with child(body) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "SIGTERM"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == -signal.SIGINT


def test_signals_that_come_together_ask_once() -> None:
    body = """
        with Stop() as stop:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
        print(stop.asked)
    """
    with child(body) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and output.strip() in ("SIGINT", "SIGTERM")


def test_the_handlers_from_before_come_back() -> None:
    heard: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        del frame
        heard.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.asked == "SIGTERM" and heard == []
        assert signal.getsignal(signal.SIGTERM) is handler
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        with pytest.raises(RuntimeError, match="broken"), Stop():
            raise RuntimeError("broken")
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.asked is None
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_elsewhere_than_in_the_main_thread_nothing_happens() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seen: list[object] = []

    def work() -> None:
        with Stop() as stop:
            seen.extend([signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), stop.asked])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [*before, None]


@pytest.mark.parametrize("first", [True, False])
def test_the_first_process_of_a_container_ends_as_well(first: bool) -> None:
    """The system lets it go on unless it has handlers of its own."""
    body = f"""
        from flopwise.base import processes
        from flopwise.engine import signals
        processes.is_first_process = signals.is_first_process = lambda: {first}
        processes.end_first_process_on_request()
        print(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, flush=True)
        try:
            if {first}:
                signal.raise_signal(signal.SIGTERM)
        except SystemExit as end:
            print(end.code, flush=True)
        with Stop() as stop:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
    """
    with child(body) as process:
        output, _ = process.communicate(timeout=120)
    assert output.split() == (["True", "143"] if first else ["False"])
    assert process.returncode == (143 if first else -signal.SIGTERM)
