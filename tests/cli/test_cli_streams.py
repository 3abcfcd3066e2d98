"""The command line where its streams are not what they should be, and as words that a table could stumble over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import flopwise
from flopwise.catalog.load import load_hardware


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """A line of shell in which $FLOPWISE is the command."""
    environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "120", "FLOPWISE": f"{sys.executable} -m flopwise", **variables}
    return subprocess.run(["/bin/bash", "-c", line], capture_output=True, timeout=300, check=False, env=environment)


@pytest.mark.parametrize("command", ["--help", "ls models", "ls models -o csv", "predict gpt2 --on h200", "env"])
@pytest.mark.parametrize("target", [">/dev/full", ">&-"])
def test_an_answer_that_cannot_be_written_is_a_failure(command: str, target: str) -> None:
    result = shell(f"$FLOPWISE {command} {target}")
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: the answer cannot be written")
    assert b"Traceback" not in result.stderr
    assert b"Exception ignored" not in result.stderr


@pytest.mark.parametrize(
    ("command", "code"), [("predict gpt2 --on h200", 0), ("predict gpt3", 2), ("predict gpt2 --bogus", 2)]
)
def test_closed_error_stream(command: str, code: int) -> None:
    assert shell(f"$FLOPWISE {command} 2>&-").returncode == code


def test_a_reader_that_leaves_is_no_error() -> None:
    result = shell("$FLOPWISE ls models -o json | head -c 1")
    assert (result.stdout, result.stderr) == (b"{", b"")


def test_a_terminal_without_utf_8() -> None:
    result = shell("$FLOPWISE predict gpt2 --on h200", PYTHONIOENCODING="latin-1")
    assert result.returncode == 0, result.stderr
    assert b"? fits" in result.stdout


def test_an_interrupt_while_importing_says_nothing() -> None:
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from flopwise.cli import main\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (130, b"")


def test_brackets_and_colons_survive() -> None:
    for models in ("gpt2", "gpt2,gpt2"):
        result = shell(f"$FLOPWISE predict {models} --on h200 --set 'name=[red]:smile:[/red]'")
        assert b"[red]:smile:[/red]" in result.stdout


def test_words_in_capitals_and_short_help() -> None:
    small = shell("$FLOPWISE predict gpt2 --on h200 --precision bf16 --recompute none -o json")
    large = shell("$FLOPWISE predict GPT2 --on H200 --precision BF16 --recompute NONE --seq AUTO -o JSON")
    assert json.loads(large.stdout) == json.loads(small.stdout)
    for command in ("", "predict", "ls", "show", "env"):
        assert shell(f"$FLOPWISE {command} -h").stdout == shell(f"$FLOPWISE {command} --help").stdout != b""


def test_a_folder_is_shown_as_it_is_predicted(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(config))
    printed = shell(f"cd {tmp_path} && $FLOPWISE show mine")
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "printed.toml").write_bytes(printed.stdout)
    options = "--on h200 --set heads=8 -o json"
    answers = [
        shell(f"cd {tmp_path} && $FLOPWISE predict {name} {options}").stdout for name in ("mine", "printed.toml")
    ]
    assert answers[0] == answers[1] != b""


def test_a_broken_nvidia_smi_is_told(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    result = shell("$FLOPWISE predict gpt2 --seq 64 --batch 1 -o json", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert result.returncode == 0
    assert json.loads(result.stdout)["hardware"] == "this-cpu"
    assert b"note: nvidia-smi" in result.stderr


def test_python_has_the_same_names() -> None:
    code = (
        "import flopwise\n"
        "assert set(flopwise.__all__) <= set(dir(flopwise))\n"
        "assert all(hasattr(flopwise, name) for name in flopwise.__all__)\n"
        "print(flopwise.predict('gpt2', on='h200').model)\n"
        "try:\n    flopwise.load_model('gpt5')\nexcept flopwise.FlopwiseError as error:\n    print(error.hint)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("gpt2\n`flopwise.catalog.load.model_names()`")


def test_hardware_from_python(tmp_path: Path) -> None:
    assert flopwise.load_hardware("This-CPU").name == "this-cpu"
    assert flopwise.load_hardware("h100") == load_hardware("h100-sxm")
    from flopwise.base.files import to_toml

    path = tmp_path / "mine.toml"
    path.write_text(to_toml(load_hardware("h200")))
    assert flopwise.load_hardware(path) == flopwise.load_hardware(str(path)) == load_hardware("h200")
