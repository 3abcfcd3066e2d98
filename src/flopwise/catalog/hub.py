"""Names of the Hugging Face hub, such as `Qwen/Qwen3-8B`, in the cache of this machine. Nothing is fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import entry_kind, read_bounded

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
COMMIT = re.compile(r"[0-9a-f]{6,64}")
REPOSITORIES = ("models--", "datasets--")
"""How the folders of what was fetched begin."""
FILE_ENDINGS = (".toml", ".json", ".jsonl", ".txt", ".csv")


def is_hub_name(name: str) -> bool:
    """Whether a name is one of the hub's and no path of this machine."""
    return bool(NAME.fullmatch(name)) and not name.endswith(FILE_ENDINGS) and entry_kind(Path(name)) == "nothing"


def hub_cache() -> Path:
    """Where the hub's own library keeps what it has fetched."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser() / below
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path("~/.cache").expanduser()) / "huggingface" / "hub"


def find_snapshot(name: str, needed: str = "config.json") -> Path:
    """The folder of what was fetched under a hub's name: that of its main branch, with a file that is needed."""
    return _snapshot(name, "models--", needed)


def find_dataset(name: str) -> Path:
    """The same of a data set."""
    return _snapshot(name, "datasets--", None)


def _snapshot(name: str, kind: str, needed: str | None) -> Path:
    repository = hub_cache() / f"{kind}{name.replace('/', '--')}"
    reference = repository / "refs" / "main"
    why = f"{repository} is not there"
    if entry_kind(repository) == "folder":
        why = "its main branch was not fetched"
        if entry_kind(reference) == "file":
            commit = read_bounded(reference, 256).decode("utf-8", "replace").strip()
            folder = repository / "snapshots" / commit
            there = entry_kind(folder) == "folder" if needed is None else entry_kind(folder / needed) == "file"
            if COMMIT.fullmatch(commit) and there:
                return folder
            why = f"{needed or commit} was not fetched"
    raise FlopwiseError(
        f"there is no {name}, neither as a path nor in this machine's cache of the hub",
        why=f"{why}; flopwise fetches nothing itself",
        hint=f"`hf download {name}{'' if needed else ' --repo-type dataset'}`, or the path of a folder with its files",
    )
