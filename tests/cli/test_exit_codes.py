"""Exit codes: documented for every command, and kept to."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from flopwise.base.files import to_toml
from flopwise.catalog.load import model_table
from flopwise.cli import app
from flopwise.sweep import running
from tests.cli.test_cli_fuzz import answered
from tests.support.launched import described_cpu, wait_for
from tests.train.test_launch_checks import TINY

DOCUMENT = Path(__file__).parents[2] / "docs" / "exit-codes.md"
ROW = re.compile(r"^\| `([a-z ]+)` \|(.*)\|$", re.MULTILINE)


def documented() -> dict[str, list[str]]:
    """Command → what is said of 0, 1, signals and others."""
    return {
        match[1]: [cell.strip() for cell in match[2].split("|")]
        for match in ROW.finditer(DOCUMENT.read_text(encoding="utf-8"))
    }


def commands(group: TyperGroup, before: str = "") -> list[str]:
    found = []
    for name, command in group.commands.items():
        found += commands(command, f"{name} ") if isinstance(command, TyperGroup) else [before + name]
    return found


def test_every_command_is_documented() -> None:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    rows = documented()
    assert sorted(rows) == sorted(commands(root))
    for name, cells in rows.items():
        assert len(cells) == 4 and cells[0] and cells[2], f"{name}: 0 and signals are said of every command"


def test_the_layout_leads_to_them() -> None:
    assert "exit-codes.md" in (DOCUMENT.parent / "layout.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("ls models", 0),
        ("predict llama-3-70b --on rtx-4090 --seq 2k --batch 1", 0),
        ("plan llama-3-70b --on rtx-4090 --seq 2k --batch 1 --device-mem 1GiB --host-mem 1GiB", 1),
        ("plan llama-3-70b --on h100-sxm --gpus 2 --seq 2k --batch 2", 1),
        ("train tiny.toml --gpus 1 --device cpu --device-mem 1MiB --steps 1 --precision fp32", 1),
        ("predict no-such-model", 2),
        ("train --steps 0", 2),
        ("show 17", 2),
        ("compare nothing.csv nothing.csv", 2),
        ("no-such-command", 2),
    ],
)
def test_codes_of_answers_and_of_mistakes(
    line: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(to_toml(model_table(TINY)))
    assert answered(line.split())[0] == code


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_a_sweep_that_is_ended_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "run_sweep", interrupted)
    words = "--model gpt2 --seq 64 --batch 2 --on this-cpu --steps 1 --name grid"
    found, _, err = answered(["sweep", *words.split()])
    assert found == code, err
    assert err.splitlines()[-1] == "interrupted   go on with: flopwise sweep --resume grid"


def _has_lines(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_training_that_is_interrupted_is_no_success(tmp_path: Path, number: signal.Signals, ranks: int) -> None:
    """Either signal with either number of ranks: tests/engine/test_signals.py and test_launch_orphans.py."""
    (tmp_path / "tiny.toml").write_text(to_toml(model_table(TINY)))
    (tmp_path / "text.txt").write_text("some text to be learned " * 400)
    (tmp_path / "mine.toml").write_text(described_cpu())
    words = ["tiny.toml", "--data", "text.txt", "--seq", "16", "--batch", "2", "--precision", "fp32", "--device", "cpu"]
    words += ["--on", "mine.toml"]
    words += ["--steps", "1000000", "--gpus", str(ranks), "--anywhere", "--store", "my runs"]
    script = (
        "import signal, sys\n"
        # A runner in the background may have left it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from flopwise.cli import main\n"
        f"sys.argv = ['flopwise', 'train', *{words!r}]\n"
        "main()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        steps = tmp_path / "my runs" / "0001" / "steps.jsonl"
        wait_for(lambda: process.poll() is not None or _has_lines(steps), "no step was done")
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number, err
    assert out.splitlines()[-1] == "go on with: flopwise train --resume 0001 --store 'my runs'"
    assert "rank" not in err and "error" not in err
    assert list((tmp_path / "my runs" / "0001" / "checkpoints").glob("step-*"))
