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
from tests.support.encoder_folders import encoder_folder
from tests.support.tiny_folders import chat_folder

PAGE = Path(__file__).parents[2] / "docs" / "fine-tuning.md"
SMALLER = {"rtx-4090": "this-cpu", "2k": "128", "8": "2", "512": "64"}
"""Options of its commands → what a test has of them."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def blocks() -> list[tuple[str, str]]:
    """(language, content) of its blocks, in order."""
    return re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def fetched(home: Path) -> None:
    """What `hf download Qwen/Qwen3-0.6B` leaves."""
    repository = home / ".cache" / "huggingface" / "hub" / "models--Qwen--Qwen3-0.6B"
    chat_folder(repository / "snapshots" / COMMIT, family="Qwen3")
    _name(repository)
    encoder = repository.with_name("models--answerdotai--ModernBERT-base")
    encoder_folder(encoder / "snapshots" / COMMIT, "modernbert")
    _name(encoder)


def _name(repository: Path) -> None:
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


def _file_of(content: str) -> str:
    """What its rows are written to."""
    names = {"rejected": "pairs.jsonl", "messages": "chats.jsonl"}
    return next((name for word, name in names.items() if word in content), "texts.jsonl")


def _saved(matched: re.Match[str]) -> str:
    """The run's checkpoint, whatever its step is."""
    return str(max(Path(matched[1]).iterdir()))


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
                Path(_file_of(content)).write_text(content * 8, encoding="utf-8")
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
                code_of = re.sub(r"(runs/\d+/checkpoints)/step-\d+", _saved, content)
                with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
                    warnings.simplefilter("ignore")
                    exec(code_of, {})  # noqa: S102 - of our page
                assert printed.getvalue().strip()
        assert Path("run.html").stat().st_size > 10_000
    planned, trained, compared, hidden, beside, adapted = *said[:2], *said[-4:]
    assert "+lora16" in beside and "merged into" in adapted
    assert "30 % of all tokens are hidden" in hidden
    assert "the reference has scored" in compared
    assert "clipping needs the norm of all gradients first" in planned
    assert "only answers are learned" in trained and "clipped" in trained
