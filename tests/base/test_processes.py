"""What flopwise says to the libraries of its own processes, and of nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SPINS, WAITS = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


def environment_after(line: str, **given: str) -> str:
    """What a process has for `GOMP_SPINCOUNT` when it has run a line; torch is not to be there before."""
    clean = {name: value for name, value in os.environ.items() if name not in (SPINS, WAITS)}
    script = f"import os, sys\n{line}\nprint(os.environ.get('{SPINS}'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env=clean | given, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("line", ["import flopwise.engine", "import flopwise.calibrate"])
def test_threads_that_wait_fall_asleep(line: str) -> None:
    assert environment_after(line) == "1000 False"
    assert environment_after(line, **{SPINS: "7"}) == "7 False"
    assert environment_after(line, **{WAITS: "active"}) == "None False"


def test_who_only_imports_flopwise_is_told_nothing() -> None:
    assert environment_after("import flopwise; flopwise.predict, flopwise.train") == "None False"


def test_a_training_has_it_before_torch() -> None:
    pytest.importorskip("torch")
    assert environment_after("import flopwise.train; flopwise.train.run") == "1000 True"
