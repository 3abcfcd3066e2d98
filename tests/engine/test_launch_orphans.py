"""Ranks end with what has started them, whatever becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import children_of, is_running, launch, wait_for

STARTED = """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(f"ready {rank}", json.dumps([os.getpid(), other.pid]))
    time.sleep(600)
"""
"""A rank with a process of its own; neither heeds what can be left unheeded."""


def processes(folder: Path, ranks: int) -> list[int]:
    """All processes of ranks, once they are there."""
    names = [folder / f"ready {rank}" for rank in range(ranks)]
    wait_for(lambda: all(name.exists() for name in names), "the ranks did not start")
    return [int(word) for name in names for word in name.read_text().strip("[]").split(",")]


def test_a_killed_launcher_leaves_no_rank_and_nothing_that_ranks_have_started(tmp_path: Path) -> None:
    with launch(tmp_path, STARTED, 3) as launcher:
        started = processes(tmp_path, 3)
        everyone = {*started, *children_of(launcher.pid)}
        assert len(started) == 6 and all(map(is_running, everyone))
        launcher.kill()
    wait_for(lambda: not any(map(is_running, everyone)), "ranks outlive their launcher")


def test_ranks_that_are_stopped_end_as_well(tmp_path: Path) -> None:
    # No thread of theirs could see that a line is cut.
    with launch(tmp_path, STARTED, 2) as launcher:
        started = processes(tmp_path, 2)
        for process in started:
            os.kill(process, signal.SIGSTOP)
        launcher.kill()
    wait_for(lambda: not any(map(is_running, started)), "ranks outlive their launcher")


def test_a_rank_ends_though_nobody_is_left_to_end_it(tmp_path: Path) -> None:
    body = """
        from flopwise.engine.launch import end_with_launcher
        end_with_launcher()
        note(f"ready {rank}", os.getpid())
        time.sleep(600)
    """
    with launch(tmp_path, body, 2) as launcher:
        ranks = processes(tmp_path, 2)
        others = [process for process in children_of(launcher.pid) if process not in ranks]
        assert len(others) == 1, "one process keeps watch"
        os.kill(others[0], signal.SIGKILL)
        launcher.kill()
    wait_for(lambda: not any(map(is_running, ranks)), "ranks outlive their launcher and its warden")


def test_a_rank_whose_launcher_is_gone_does_not_begin() -> None:
    code = "from flopwise.engine.launch import end_with_launcher; end_with_launcher(); print('begins')"
    for launcher, expected in (("1", (137, "")), (str(os.getpid()), (0, "begins\n"))):
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "FLOPWISE_SPAWNED": launcher},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.returncode, ran.stdout) == expected


def test_what_a_rank_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    body = """
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        note(f"ready {rank}", other.pid)
    """
    with launch(tmp_path, body, 2) as launcher:
        assert launcher.wait(timeout=120) == 0
    others = processes(tmp_path, 2)
    wait_for(lambda: not any(map(is_running, others)), "what ranks have started outlives them")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_orderly_end_is_the_signals_and_no_failure(tmp_path: Path, number: signal.Signals) -> None:
    body = f"""
        asked = []
        signal.signal({int(number)}, lambda number, _: asked.append(number))
        note(f"ready {{rank}}", os.getpid())
        while not asked:
            time.sleep(0.01)
        print("words of", rank, file=sys.stderr, flush=True)
        if rank == 0:
            # The last to end, as the one that saves is.
            while not (folder / "left 1").exists():
                time.sleep(0.01)
        else:
            note("left 1")
        sys.exit(128 + asked[0])
    """
    with launch(tmp_path, body, 2, stderr=subprocess.PIPE) as launcher:
        processes(tmp_path, 2)
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=120)
    assert (launcher.returncode, errors) == (128 + number, "words of 0\n")


def test_a_failure_comes_before_an_interruption(tmp_path: Path) -> None:
    body = """
        asked = []
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
        note(f"ready {rank}", os.getpid())
        while not asked:
            time.sleep(0.01)
        sys.exit("the disk is full" if rank else 143)
    """
    with launch(tmp_path, body, 2, stderr=subprocess.PIPE) as launcher:
        processes(tmp_path, 2)
        launcher.terminate()
        _, errors = launcher.communicate(timeout=120)
    assert (launcher.returncode, errors) == (1, "rank 1: the disk is full\n")


def test_what_all_ranks_refuse_is_said_once(tmp_path: Path) -> None:
    body = """
        from flopwise.base.errors import FlopwiseError
        from flopwise.engine.launch import note_refusal
        print("a warning of", rank, file=sys.stderr)
        what = "no such plan" if rank < 2 else "no such device"
        print("error:", what, file=sys.stderr, flush=True)
        note_refusal(FlopwiseError(what))
        sys.exit(2)
    """
    with launch(tmp_path, body, 3, stderr=subprocess.PIPE) as launcher:
        _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 2
    assert errors.splitlines() == [
        *("a warning of 0", "error: no such plan"),
        *("rank 2: a warning of 2", "rank 2: error: no such device"),
    ]
