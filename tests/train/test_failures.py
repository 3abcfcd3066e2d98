"""What a training that a sweep began tells it: its run, and by what kind of failure it ends, whoever raised it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flopwise.base.errors import FlopwiseError, OutOfMemory
from flopwise.store.cells import Failure, Told
from flopwise.store.sweeps import ATTEMPT_VARIABLE, own_attempt, read_told, tell_sweep
from flopwise.train.failures import tell_failure

CELL = "0123456789ab"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT_VARIABLE, f"{CELL}/3")


def does_not_fit() -> FlopwiseError:
    error = FlopwiseError("no plan fits", why="it is too large", hint="less")
    error.exit_code = 1
    return error


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("error", "failure", "reason"),
    [
        (does_not_fit(), "does-not-fit", "no plan fits: it is too large"),
        (OutOfMemory("2 GiB cannot be had"), "out-of-memory", "2 GiB cannot be had"),
        (MemoryError(), "out-of-memory", "MemoryError"),
        (RuntimeError("CUDA error: out of memory"), "out-of-memory", "RuntimeError: CUDA error: out of memory"),
        (FlopwiseError("there is no file out of memory.txt"), "refused", "there is no file out of memory.txt"),
        (KeyError("x"), "crashed", "KeyError: 'x'"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
def test_a_failure_has_its_kind(tmp_path: Path, error: Exception, failure: Failure, reason: str) -> None:
    (tmp_path / "cells" / CELL).mkdir(parents=True)
    tell_failure(tmp_path, error)
    assert read_told(tmp_path, CELL, 3) == Told(failure=failure, reason=reason)


@pytest.mark.usefixtures("own")
def test_of_several_ranks_the_first_failure_counts_but_memory_comes_before_all(tmp_path: Path) -> None:
    (tmp_path / "cells" / CELL).mkdir(parents=True)
    tell_sweep(tmp_path, Told(run="0007"))
    tell_failure(tmp_path, KeyError("first"))
    tell_failure(tmp_path, KeyError("second"))
    assert read_told(tmp_path, CELL, 3) == Told(run="0007", failure="crashed", reason="KeyError: 'first'")
    tell_failure(tmp_path, MemoryError())
    tell_failure(tmp_path, KeyError("third"))
    assert read_told(tmp_path, CELL, 3) == Told(run="0007", failure="out-of-memory", reason="MemoryError")


@pytest.mark.parametrize("value", ["", "x", f"{CELL}/", f"{CELL}/x", "../../../../ab/1", f"{CELL}/-1"])
def test_a_process_that_no_sweep_began_tells_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(ATTEMPT_VARIABLE, value)
    assert own_attempt() is None
    tell_failure(tmp_path, KeyError("x"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("words", "failure"),
    [
        (["--batch", "0"], "refused"),
        (["--steps", "1", "--device", "cpu", "--device-mem", "1MiB", "--host-mem", "0"], "does-not-fit"),
    ],
    ids=["refused", "does-not-fit"],
)
def test_flopwise_train_tells_its_sweep(tmp_path: Path, words: list[str], failure: Failure) -> None:
    (tmp_path / "cells" / CELL).mkdir(parents=True)
    line = [sys.executable, "-P", "-m", "flopwise", "train", *words, "--store", str(tmp_path)]
    ended = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
    told = read_told(tmp_path, CELL, 3)
    assert (told.run, told.failure) == (None, failure)
    assert told.reason is not None and told.reason.partition(": ")[0] in ended.stderr


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT_VARIABLE, f"{CELL}/3")
    tell_failure(tmp_path / "nowhere", KeyError("x"))
    assert not (tmp_path / "nowhere").exists()
