"""The commit that a run's record carries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flopwise.train import measuring


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository that holds the package, as far as it is looked for."""
    module = tmp_path / "src" / "flopwise" / "train" / "measuring.py"
    module.parent.mkdir(parents=True)
    module.write_text("# one\n")
    monkeypatch.setattr(measuring, "__file__", str(module))
    return tmp_path


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    command = ["git", "-C", str(folder), *settings, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_checkout_with_changes_says_so(checkout: Path) -> None:
    git(checkout, "init", "--quiet")
    # Not ours while git does not know the file, such as an environment within another project's checkout.
    assert measuring.commit() == {}
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "-m", "one")
    head = git(checkout, "rev-parse", "HEAD")
    assert measuring.commit() == {"commit": head}
    (checkout / "notes.txt").write_text("not of the package")
    assert measuring.commit() == {"commit": head}
    (checkout / "src" / "flopwise" / "train" / "measuring.py").write_text("# two\n")
    assert measuring.commit() == {"commit": f"{head} with changes"}


@pytest.mark.usefixtures("checkout")
def test_outside_of_a_checkout_there_is_none() -> None:
    assert measuring.commit() == {}
