"""Folders whose files say what they are for: `train.jsonl`, `data/test-00000-of-00001.parquet`, `validation/`.

A folder that has files for training and others is trained on the first alone, as Hugging Face's `datasets` reads it;
what it holds for validation, or else for a test, is what the training is evaluated on where nothing else is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

Split = Literal["train", "validation", "test"]
WORDS: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""What `datasets` takes for the name of a split, between signs that are no letters."""


def split_of(name: str) -> Split | None:
    """What a file is for, by the first word of its path that says so."""
    return next((WORDS[word] for word in re.split("[^a-z]+", name.lower()) if word in WORDS), None)


def splits_among(names: Iterable[str]) -> dict[Split, list[str]]:
    """The files of each split; none where there are not both, one to train on and another."""
    found: dict[Split, list[str]] = {}
    for name in names:
        split = split_of(name)
        if split is not None:
            found.setdefault(split, []).append(name)
    return found if "train" in found and len(found) > 1 else {}


def held_out(found: dict[Split, list[str]]) -> list[str]:
    """Of a folder's splits, what a training is evaluated on."""
    return found.get("validation") or found.get("test") or []
