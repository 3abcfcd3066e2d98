"""Programs with odd habits do not notice `flopwise profile run`, and it says why where there is no profile."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flopwise.profile.measure.outside import is_abandoned, read_told, reason, run_outside
from flopwise.profile.measure.start_up.sitecustomize import TOLD, tell
from tests.support.odd_programs import PROGRAMS, differences, prepare, run

NAMES = [
    pytest.param(name, marks=pytest.mark.slow if "import torch" in program.text else ())
    for name, program in PROGRAMS.items()
    if not program.rare
]


@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_the_same_with_and_without(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    place = tmp_path / "program"
    place.mkdir()
    prepare(program, place)
    before = sorted(place.rglob("*"))
    profiled = run(program, place, tmp_path / "profile")
    assert differences(program, run(program, place), profiled) == []
    # Nothing is left but the profile, nor does it say anything about flopwise's own mistakes.
    assert sorted(path for path in place.rglob("*") if "__pycache__" not in path.parts) == before
    assert "Traceback" not in profiled.said
    left = {path.name for path in (tmp_path / "profile").glob("*")}
    assert not left or {"profile.json", "trace-rank0.json.gz"} <= left
    assert not any(path.startswith(".") for path in left)


WAITING = "import os, time\nprint(os.getpid(), flush=True)\nwhile True:\n    time.sleep(0.05)"


def test_who_kills_the_profiler_kills_the_program_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-m", "flopwise", "profile", "run", "--"]
    with subprocess.Popen([*words, sys.executable, "-c", WAITING], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        program = int(process.stdout.readline())
        assert not is_abandoned(tmp_path / "profile")
        process.kill()
        # Its end: nobody is left who could write into the pipe.
        assert process.stdout.read() == b""
    with pytest.raises(ProcessLookupError):
        for _ in range(1000):
            os.kill(program, 0)
            if Path(f"/proc/{program}/stat").read_text().split()[2] == "Z":
                raise ProcessLookupError
            time.sleep(0.01)
    assert is_abandoned(tmp_path / "profile")
    again = subprocess.run([*words, "true"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "flopwise: there is no profile" in again.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_signal_to_the_whole_group_is_one_signal_and_each_alone_is_passed_on(tmp_path: Path) -> None:
    counts = (
        "import os, signal, sys\n"
        "got = []\n"
        "wanted = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM}\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, wanted)\n"
        "print('ready', flush=True)\n"
        "while signal.SIGTERM not in got:\n"
        "    got.append(signal.sigwait(wanted))\n"
        "    print(got[-1].name, flush=True)\n"
    )
    words = [sys.executable, "-P", "-m", "flopwise", "profile", "run", "--", sys.executable, "-c", counts]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number, send in (
            # The same one twice in a row may be one to a process that had no turn in between.
            (signal.SIGUSR1, os.killpg),
            (signal.SIGUSR2, os.kill),
            (signal.SIGHUP, os.kill),
            (signal.SIGUSR1, os.killpg),
            (signal.SIGTERM, os.kill),
        ):
            send(process.pid, number)
            assert process.stdout.readline() == f"{number.name}\n"
        assert process.stdout.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((), "start-up file ran in none of its processes"),
        (("python",), "it never imported torch"),
        (("python", "torch"), "it imported torch, took no step, and was ended by a signal"),
        (("python", "torch", "ended 0 0"), "stepped no torch.optim.Optimizer"),
        (("python", "torch", "step", "ended 3 0"), "it took 3 of the 8 steps that are needed"),
        (("python", "torch", "step", "ended 3 9"), "in one thread, and 9 in others"),
        (("python", "torch", "step"), "had begun to take steps was ended by a signal, os._exit or exec"),
        (("python", "torch", "step", "python"), "had begun to take steps was ended by a signal, os._exit or exec"),
        (("python", "torch", "step", "profiler", "ended 1 0"), "it uses torch's profiler itself"),
        (("python", "torch", "failed OSError: full\ndisk"), "profiling failed: OSError: full disk"),
    ],
)
def test_why_there_is_no_profile(tmp_path: Path, lines: tuple[str, ...], why: str) -> None:
    (tmp_path / TOLD).touch()
    for line in lines:
        tell(str(tmp_path / TOLD), line)
    assert why in reason(read_told(tmp_path / TOLD), 8)
    assert not (tmp_path / TOLD).exists()


def test_what_nobody_can_be_told_is_not_the_programs_problem(tmp_path: Path) -> None:
    tell(str(tmp_path / "gone"), "python")
    (tmp_path / TOLD).write_bytes(b"\xff\nno number\n7 ended x\n")
    assert "it imported torch" in reason(read_told(tmp_path / TOLD), 8)


MEETS = """
import os, pathlib, time
pathlib.Path(f"here-{os.environ['RANK']}").touch()
other = pathlib.Path(f"here-{1 - int(os.environ['RANK'])}")
while not other.exists():
    time.sleep(0.01)
"""


def test_ranks_that_are_profiled_each_on_its_own_meet_in_one_folder(tmp_path: Path) -> None:
    """As `srun -n 2 flopwise profile run --folder prof -- python train.py` starts them."""
    words = [sys.executable, "-P", "-m", "flopwise", "profile", "run", "--folder", "prof", "--"]
    ranks = [
        subprocess.Popen(
            [*words, sys.executable, "-c", MEETS],
            cwd=tmp_path,
            env={**os.environ, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said = rank.communicate(timeout=300)[1]
        assert rank.returncode == 0, said
        assert "it never imported torch" in said


def test_ranks_that_begin_at_the_same_time_leave_each_other_what_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, others = fcntl.flock, iter([True])

    def lock_late(handle: int, operation: int) -> None:
        # Between the making of a rank's file and its lock another rank looks for what was left.
        if next(others, False):
            run_outside(["true"], tmp_path, warm_up=1, steps=1)
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    outcome = run_outside([sys.executable, "-c", "pass"], tmp_path, warm_up=1, steps=1)
    assert "it never imported torch" in (outcome.why_none or "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_lies_where_processes_tell_is_neither_followed_nor_waited_for(tmp_path: Path, kind: str) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "profile").mkdir()
    place = tmp_path / "profile" / f"{TOLD}x"
    if kind == "link":
        place.symlink_to(tmp_path / "precious")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    words = [sys.executable, "-P", "-m", "flopwise", "profile", "run", "--folder", "profile", "--", "true"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "precious").read_text() == "kept"
