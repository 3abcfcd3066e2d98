"""docs/fine-tuning.md does what it says: its files, commands and Python in order, on a model of the same family."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.cli.test_cli_fuzz import answered
from tests.support.tiny_folders import chat_folder

PAGE = Path(__file__).parents[2] / "docs" / "fine-tuning.md"
SMALLER = {"rtx-4090": "this-cpu", "2k": "128", "8": "2"}
"""Options of its commands → what a test has of them."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def blocks() -> list[tuple[str, str]]:
    """(language, content) of its blocks, in order."""
    return re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def fetched(home: Path) -> None:
    """What `hf download Qwen/Qwen3-0.6B` leaves."""
    repository = home / ".cache" / "huggingface" / "hub" / "models--Qwen--Qwen3-0.6B"
    chat_folder(repository / "snapshots" / COMMIT, family="Qwen3")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


@pytest.mark.slow
def test_the_page_is_one_story_that_happens(tmp_path: Path) -> None:
    fetched(tmp_path)
    kept = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    said: list[str] = []
    with patch.dict(os.environ, kept, clear=True), contextlib.chdir(tmp_path):
        for language, content in blocks():
            if language == "json":
                name = "pairs.jsonl" if "rejected" in content else "chats.jsonl"
                Path(name).write_text(content * 8, encoding="utf-8")
            elif language == "bash":
                for line in content.splitlines():
                    words = [SMALLER.get(word, word) for word in shlex.split(line)]
                    if words[0] == "hf":
                        continue
                    more = ["--device", "cpu"] if words[1] == "train" else []
                    code, out, told = answered([*words[1:], *more])
                    assert code == 0, f"{line}\n{told}"
                    said.append(out + told)
            else:
                printed = io.StringIO()
                saved = max(Path("runs/0001/checkpoints").iterdir())
                with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
                    warnings.simplefilter("ignore")
                    exec(content.replace("runs/0001/checkpoints/step-00000002", str(saved)), {})  # noqa: S102 - of our page
                assert printed.getvalue().strip()
        assert Path("run.html").stat().st_size > 10_000
    planned, trained, compared = said[0], said[1], said[-1]
    assert "the reference has scored" in compared
    assert "clipping needs the norm of all gradients first" in planned
    assert "only answers are learned" in trained and "clipped" in trained
