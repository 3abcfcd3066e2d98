"""A training that is killed at a call of the file system goes on as if nothing had been; nobody is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kill_points import Trial

ROOT = Path(__file__).parents[2]
KILLS = os.environ.get("FLOPWISE_KILLS", "12")
"""Of a training by one process: `all`, or so many."""


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_call() -> None:
    # In an interpreter of its own, which forks: it has no threads.
    kills = "1000000" if KILLS == "all" else KILLS
    command = [sys.executable, "-m", "tests.support.kill_points", "--ranks", "1", "--kills", kills]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_two_ranks_and_their_launcher_are_killed_in_turn(tmp_path: Path) -> None:
    """Each kill is of the training that went on after the one before; the last one to go on ends as the undisturbed."""
    trial = Trial(tmp_path / "trial", 2)
    kills = [
        (victim, int(share * trial.calls)) for victim, share in (("rank 1", 0.3), ("launcher", 0.4), ("rank 0", 0.3))
    ]
    for outcome in trial.kill_in_turn(kills):
        assert outcome.hit, "the training was done before"
        assert outcome.problems == ()
