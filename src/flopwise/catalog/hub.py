"""Names of the Hugging Face hub, such as `Qwen/Qwen3-8B`, in the cache of this machine. Nothing is fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import entry_kind, read_bounded

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
COMMIT = re.compile(r"[0-9a-f]{6,64}")
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
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / "main"
    why = f"{repository} is not there"
    if entry_kind(repository) == "folder":
        why = "its main branch was not fetched"
        if entry_kind(reference) == "file":
            commit = read_bounded(reference, 256).decode("utf-8", "replace").strip()
            folder = repository / "snapshots" / commit
            if COMMIT.fullmatch(commit) and entry_kind(folder / needed) == "file":
                return folder
            why = f"{needed} was not fetched"
    raise FlopwiseError(
        f"there is no {name}, neither as a path nor in this machine's cache of the hub",
        why=f"{why}; flopwise fetches nothing itself",
        hint=f"`hf download {name}`, or the path of a folder with its files",
    )
