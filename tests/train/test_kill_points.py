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


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return Trial(tmp_path_factory.mktemp("kills") / "trial", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "share"), [("launcher", 0.5), ("rank 0", 0.7), ("rank 1", 0.3)])
def test_one_of_two_ranks_or_their_launcher_is_killed(two_ranks: Trial, victim: str, share: float) -> None:
    outcome = two_ranks.kill(victim, int(share * two_ranks.calls))
    assert outcome.hit, "the training was done before"
    assert outcome.problems == ()
