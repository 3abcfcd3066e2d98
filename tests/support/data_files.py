"""Small data sets and tokenizers for the tests of data."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from flopwise.engine.data import DataRequest

END = 256
"""Of a text in bytes, and the class token of a sample."""

LINES = (
    "a trade wind blows from the east",
    "the east has winds that blow all year",
    "a ship that trades goes where the wind goes",
    "nobody knows where the year goes",
)


@pytest.fixture(scope="module")
def quick_disk() -> Iterator[None]:
    """Hundreds of small caches need not reach the disk; those that matter do so in the tests of the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def request(folder: Path, *sources: Path, **settings: Any) -> DataRequest:
    """With a cache of the test's own."""
    return DataRequest(
        **{
            "sources": tuple(str(source) for source in sources),
            "cache": folder / "cache",
            "sequence_tokens": 8,
            "vocab": 257,
            **settings,
        }
    )


def text_file(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def json_lines(path: Path, records: Iterable[object]) -> Path:
    return text_file(path, "".join(f"{json.dumps(record)}\n" for record in records))


def csv_file(path: Path, header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([header, *rows])
    return path


def byte_pair_tokenizer(path: Path, end: str = "<|endoftext|>") -> Path:
    """A byte-level one, which gives every text back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[end], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    # What a file may hold and must not act: it would cut and fill up every text.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return path


def word_tokenizer(path: Path) -> Path:
    """Words with [CLS] in front and [SEP] behind, [PAD] not being 0."""
    words = sorted({word for line in LINES for word in line.split()})
    names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", *words]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(path))
    return path
