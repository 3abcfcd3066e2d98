"""`flopwise profile run -- python script.py` and `flopwise train --profile`, from the command line to `why`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
print("its own output", *sys.argv[1:])
sys.exit(int(sys.argv[-1]))
"""


def flopwise(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flopwise", *words]
    environment = os.environ | {"COLUMNS": "100"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_program_is_profiled_and_explained(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ("profile", "run", "--steps", "3", "--", sys.executable, "script.py", "--steps", "x", "5")
    ran = flopwise(tmp_path, *words)
    # The program's own words and exit code come through, whatever options it has.
    assert ran.stdout == "its own output --steps x 5\n" and ran.returncode == 5
    assert "aten::addmm" in ran.stderr and "3 steps" in ran.stderr
    assert {line.split()[0] for line in ran.stderr.splitlines()} == {"flopwise:"}
    told = flopwise(tmp_path, "profile", "why", "profile")
    assert told.returncode == 0 and "A step takes" in told.stdout
    shown = flopwise(tmp_path, "profile", "show", "profile", "-o", "csv")
    assert "device_busy_s" in shown.stdout
    again = flopwise(tmp_path, "profile", "run", "--folder", "profile", "--", sys.executable, "script.py", "0")
    assert again.returncode == 2 and "holds a profile already" in again.stderr


def test_a_program_without_steps(tmp_path: Path) -> None:
    ran = flopwise(tmp_path, "profile", "run", "--", sys.executable, "-c", "print('hello')")
    assert ran.stdout == "hello\n" and ran.returncode == 0
    assert ran.stderr == "flopwise: there is no profile: it never imported torch\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (("--", "no-such-program"), 127, "there is no command 'no-such-program'"),
        (("--", "./no-program"), 126, "may not be executed"),
        (("--steps", "none", "--", "python"), 2, "--steps: cannot be 'none'"),
    ],
)
def test_mistakes(tmp_path: Path, words: tuple[str, ...], exit_code: int, said: str) -> None:
    (tmp_path / "no-program").touch()
    ran = flopwise(tmp_path, "profile", "run", *words)
    assert ran.returncode == exit_code and said in ran.stderr and "hint:" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_a_training_is_profiled_and_explained(tmp_path: Path) -> None:
    words = ("--steps", "8", "--seq", "64", "--batch", "2", "--device", "cpu", "--no-checkpoint")
    ran = flopwise(tmp_path, "train", *words, "--profile-steps", "2")
    assert ran.returncode == 0 and "flopwise why 0001" in ran.stdout
    told = flopwise(tmp_path, "why", "last")
    assert told.returncode == 0 and told.stdout.startswith("run 0001 ran on ")
    traced = flopwise(tmp_path, "profile", "show", "last", "--trace", "tasks.json")
    assert traced.returncode == 0 and (tmp_path / "tasks.json").stat().st_size > 1000
    compared = flopwise(tmp_path, "profile", "compare", "1", "runs/0001/trace-rank0.json.gz")
    assert compared.returncode == 0 and "step_wall_s" in compared.stdout
    wrong = flopwise(tmp_path, "train", "--no-checkpoint", "--checkpoint-every", "5")
    assert wrong.returncode == 2 and "--checkpoint-every beside --no-checkpoint" in wrong.stderr
