"""An attempt: the command it runs, how its end is judged, and that nothing of it is left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.units import AUTO, parse_bytes
from flopwise.catalog.load import load_model, model_table
from flopwise.store.cells import Attempt, says_nothing
from flopwise.store.sweeps import cell_folder, read_attempts
from flopwise.sweep import attempts, keeper
from flopwise.sweep.attempts import (
    KILLED,
    LOG_BYTES,
    LONGEST_REASON,
    MODEL,
    Command,
    Trial,
    last_words,
    log_path,
    run_attempt,
    settle_attempt,
    train_command,
)
from tests.support.sweep_stand_in import MPT, a_cell, a_sweep, alive, stand_in, until


@dataclass
class Asked:
    asked: str | None = None


def a_trial(store: Path, **changes: object) -> Trial:
    cell = a_cell(store)
    plain = Trial(cell=cell, sweep=a_sweep(cell), repeat=1, steps=3)
    return replace(plain, **changes)  # type: ignore[arg-type]


def tried(store: Path, command: Command, **changes: object) -> Attempt:
    attempt = run_attempt(store, a_trial(store, **changes), command=command, grace_s=0.5)
    assert read_attempts(store, attempt.cell) == ([attempt], [])
    assert attempt.pid is not None and alive(attempt.pid) == []
    return attempt


# -- the command -----------------------------------------------------------------------------------------------------


def options(words: list[str]) -> dict[str, str]:
    return {
        word: words[index + 1] for index, word in enumerate(words) if word.startswith("-") and index + 1 < len(words)
    }


def test_a_command_says_all_that_is_settled(tmp_path: Path) -> None:
    trial = a_trial(tmp_path, profile=True)
    settings = replace(trial.cell.settings, device_memory_bytes=2**40 + 1, host_memory_bytes=0, devices=2)
    sweep = replace(trial.sweep, data=("a b", "c"), tokenizer="t.json", seed=7, device="cuda")
    words = train_command(
        replace(trial, cell=replace(trial.cell, settings=settings), sweep=sweep), Path("/s"), Path("/m")
    )
    said = options(words)
    assert words[:6] == [sys.executable, "-P", "-m", "flopwise", "train", "/m"]
    assert {"--no-checkpoint", "--profile"} <= set(words)
    assert parse_bytes(said["--device-mem"]) == 2**40 + 1
    assert (said["--host-mem"], said["--gpus"], said["--seed"], said["--tokenizer"]) == ("0", "2", "7", "t.json")
    assert (said["--seq"], said["--batch"], said["--micro"], said["--precision"]) == ("64", "4", "2", "fp32")
    assert [words[index + 1] for index, word in enumerate(words) if word == "--data"] == ["a b", "c"]
    assert said["--device"] == "cpu", "a cell of this CPU is not measured on a GPU"


def test_a_command_leaves_open_what_is_open(tmp_path: Path) -> None:
    cell = a_cell(tmp_path, batch_sequences=AUTO, micro_batch_sequences=AUTO)
    words = train_command(Trial(cell=cell, sweep=a_sweep(cell), repeat=1, steps=3), Path("/s"), Path("/m"))
    assert not {"--batch", "--micro", "--device-mem", "--host-mem", "--tokenizer", "--profile"} & set(words)
    words = train_command(
        Trial(cell=cell, sweep=a_sweep(cell), repeat=0, steps=2, batch_sequences=22, micro_batch_sequences=11),
        Path("/s"),
        Path("/m"),
    )
    assert (options(words)["--batch"], options(words)["--micro"]) == ("22", "11")


def test_a_file_of_this_machine_is_what_it_trains_with(tmp_path: Path) -> None:
    for hardware, told in (("mine.toml", str(Path("mine.toml").resolve())), ("h200", None), ("this-cpu", None)):
        cell = a_cell(tmp_path, hardware=hardware)
        words = train_command(Trial(cell=cell, sweep=a_sweep(cell), repeat=1, steps=3), Path("/s"), Path("/m"))
        assert options(words).get("--on") == told


def test_words_of_a_scheduler_stand_before_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPWISE_ATTEMPT_PREFIX", "srun --export='ALL,A=b c'")
    words = train_command(a_trial(tmp_path), Path("/s"), Path("/m"))
    assert words[:3] == ["srun", "--export=ALL,A=b c", sys.executable]


def test_the_model_is_written_so_that_it_is_read_back_equal(tmp_path: Path) -> None:
    attempt = tried(tmp_path, stand_in(tmp_path))
    written = load_model(str(cell_folder(tmp_path, attempt.cell) / MODEL))
    assert model_table(written) == model_table(MPT)


# -- how it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "state", "code", "reason"),
    [
        ("ok", "ok", 0, None),
        ("noisy", "ok", 0, None),
        ("silent", "failed", 0, "it ended without a record of its run"),
        ("crash", "failed", 1, "ValueError: the matrix is not square"),
        ("wrong", "failed", 1, "--batch cannot be 0: a step has sequences"),
        ("memory", "oom", 1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        ("fits:-1", "oom", 1, "no plan fits mpt-small in so little: the smallest plan needs more"),
        ("signal:SIGSEGV", "failed", -signal.SIGSEGV, "SIGSEGV"),
        ("signal:SIGABRT", "failed", -signal.SIGABRT, "SIGABRT"),
        ("folder", "failed", 1, "there is no file out of memory papers/b.txt: look again"),
        ("kernel", "oom", 1, "[rank1]: RuntimeError: CUDA error: out of memory"),
        ("signal:SIGKILL", "failed", -signal.SIGKILL, KILLED),
        ("code:139", "failed", 139, "SIGSEGV"),
        ("code:137", "failed", 137, KILLED),
        ("code:3", "failed", 3, "exit code 3"),
    ],
)
def test_an_end_has_its_state(tmp_path: Path, how: str, state: str, code: int, reason: str | None) -> None:
    attempt = tried(tmp_path, stand_in(tmp_path, how))
    assert (attempt.state, attempt.exit_code, attempt.reason) == (state, code, reason)
    assert attempt.ended is not None
    assert attempt.run == ("0001" if how in ("ok", "noisy", "crash") else None)


def test_a_command_that_is_not_there_has_failed(tmp_path: Path) -> None:
    attempt = tried(tmp_path, lambda *_: ["/nowhere/python"])
    assert attempt.state == "failed"
    assert "/nowhere/python" in (attempt.reason or "")


def test_a_command_that_cannot_be_made_has_failed(tmp_path: Path) -> None:
    cell = a_cell(tmp_path, optimizer="muon", devices=2)
    attempt = run_attempt(tmp_path, Trial(cell=cell, sweep=a_sweep(cell), repeat=1, steps=3))
    assert (attempt.state, attempt.reason) == ("failed", "muon cannot be trained with on several devices yet")
    assert read_attempts(tmp_path, cell.id)[0] == [attempt]


@pytest.mark.parametrize("how", ["sleep:600", "stubborn:600", "family:600"])
def test_what_takes_too_long_is_ended_with_all_it_started(tmp_path: Path, how: str) -> None:
    sweep = replace(a_trial(tmp_path).sweep, time_limit_s=1.5)
    begun = time.monotonic()
    attempt = tried(tmp_path, stand_in(tmp_path, how), sweep=sweep)
    assert (attempt.state, attempt.reason) == ("timeout", "not done within 1.50 s")
    assert attempt.run == "0001"
    assert time.monotonic() - begun < 300
    if how == "stubborn:600":
        assert attempt.exit_code == -signal.SIGKILL


def test_only_the_end_of_a_long_log_is_kept(tmp_path: Path) -> None:
    attempt = tried(tmp_path, stand_in(tmp_path, "long"))
    log = log_path(cell_folder(tmp_path, attempt.cell), attempt).read_bytes()
    assert len(log) == LOG_BYTES
    assert log.endswith(b"ValueError: the end\n")
    assert attempt.reason == "ValueError: the end"


@pytest.mark.parametrize("how", ["sleep:600", "stubborn:600", "family:600"])
def test_an_interrupt_leaves_nothing_running(tmp_path: Path, how: str) -> None:
    stop, ended = Asked(), list[Attempt]()
    trial = a_trial(tmp_path)

    def work() -> None:
        ended.append(run_attempt(tmp_path, trial, command=stand_in(tmp_path, how), stop=stop, grace_s=0.5))

    thread = threading.Thread(target=work)
    thread.start()
    until((tmp_path / "0001" / "record.json").exists)
    stop.asked = "SIGINT"
    thread.join(20)
    assert (ended[0].state, ended[0].reason) == ("failed", "interrupted by SIGINT")
    assert says_nothing(ended[0])
    assert ended[0].pid is not None and alive(ended[0].pid) == []


def test_a_sweep_that_is_killed_takes_its_processes_along(tmp_path: Path) -> None:
    trial = a_trial(tmp_path)
    stand_in(tmp_path)
    code = f"""
        from pathlib import Path
        from tests.support.sweep_stand_in import stand_in
        from tests.sweep.test_sweep_attempts import a_trial
        from flopwise.sweep.attempts import run_attempt
        store = Path({str(tmp_path)!r})
        run_attempt(store, a_trial(store), command=stand_in(store, "family:600"), grace_s=0.5)
    """
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=root) as sweep:
        until((tmp_path / "0001" / "record.json").exists)
        (attempt,), _ = read_attempts(tmp_path, trial.cell.id)
        assert attempt.state == "running" and attempt.pid is not None
        assert len(alive(attempt.pid)) == 3
        sweep.kill()
    until(lambda: not alive(attempt.pid or 0))
    (gone,), _ = read_attempts(tmp_path, trial.cell.id)
    assert gone.state == "failed" and says_nothing(gone)
    # What its run came to is written down, and its number kept.
    after = settle_attempt(tmp_path, gone)
    assert (after.state, after.run) == ("failed", "0001")


def test_where_the_keeper_is_killed_nothing_is_left_either(tmp_path: Path) -> None:
    trial = a_trial(tmp_path)

    def kill() -> None:
        until((tmp_path / "0001" / "record.json").exists)
        (attempt,), _ = read_attempts(tmp_path, trial.cell.id)
        os.kill(attempt.pid or 0, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    attempt = tried(tmp_path, stand_in(tmp_path, "family:600"))
    thread.join()
    assert (attempt.state, attempt.reason) == ("failed", KILLED)


@pytest.mark.parametrize(("after", "state"), [((0, 3), "failed"), ((1, 3), "oom"), ((0, 4), "oom")])
def test_who_is_killed_while_the_system_kills_for_memory_is_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: tuple[int, ...], state: str
) -> None:
    answers = iter([(0, 3), after])
    monkeypatch.setattr(keeper, "memory_kills", lambda: next(answers))
    assert tried(tmp_path, stand_in(tmp_path, "signal:SIGKILL")).state == state


def test_the_systems_count_of_what_it_killed_is_read() -> None:
    told = re.search(r"^oom_kill ([0-9]+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    assert told is not None and int(told[1]) in keeper.memory_kills()


def test_the_run_is_known_while_it_goes_on_and_the_file_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "BEAT_S", 0.2)
    trial, stop = a_trial(tmp_path), Asked()
    command = stand_in(tmp_path, "sleep:600")
    thread = threading.Thread(
        target=run_attempt, args=(tmp_path, trial), kwargs={"command": command, "stop": stop, "grace_s": 0.5}
    )
    thread.start()
    try:
        until(lambda: any(attempt.run == "0001" for attempt in read_attempts(tmp_path, trial.cell.id)[0]))
        (attempt,), _ = read_attempts(tmp_path, trial.cell.id)
        assert attempt.state == "running"
        path = cell_folder(tmp_path, trial.cell.id) / "attempt-0001.json"
        os.utime(path, (1e9, 1e9))
        until(lambda: path.stat().st_mtime > time.time() - 60)
    finally:
        stop.asked = "SIGINT"
        thread.join(20)
    assert read_attempts(tmp_path, trial.cell.id)[0][0].run == "0001"


def test_a_run_that_was_done_when_its_sweep_died_counts(tmp_path: Path) -> None:
    attempt = tried(tmp_path, stand_in(tmp_path))
    lost = replace(attempt, state="failed", reason="gone", ended=None, run=None)
    assert (settle_attempt(tmp_path, lost).state, settle_attempt(tmp_path, lost).run) == ("ok", "0001")
    (tmp_path / "0001" / "record.json").unlink()
    assert (settle_attempt(tmp_path, lost).state, settle_attempt(tmp_path, lost).run) == ("failed", None)


def test_ranks_of_another_launch_are_not_handed_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("FLOPWISE_JOB", "12_3")
    script = (
        "import os; raise SystemExit('saw ' + ' '.join(k for k in os.environ if k in ('RANK', 'SLURM_PROCID', 'X')))"
    )
    attempt = run_attempt(
        tmp_path,
        a_trial(tmp_path),
        command=lambda *_: [sys.executable, "-c", script],
        environment={"X": "1"},
    )
    assert (attempt.reason, attempt.job) == ("saw X", "12_3")


# -- words -----------------------------------------------------------------------------------------------------------


@given(st.text(max_size=2000))
def test_last_words_are_one_short_line(text: str) -> None:
    words = last_words(text)
    assert words is None or (words.isprintable() and len(words) <= LONGEST_REASON + 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("\n\n", None),
        ("step 1\nKeyError:  'x'\n\n", "KeyError: 'x'"),
    ],
)
def test_last_words(text: str, expected: str | None) -> None:
    assert last_words(text) == expected
