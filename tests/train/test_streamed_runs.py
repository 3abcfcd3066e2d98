"""Trainings on text that is tokenized meanwhile: resumed bit for bit, refused where nobody says how many steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.engine.data import streamed
from flopwise.records.measurement import RunRecord
from flopwise.train import Callback, Started
from flopwise.train.running import run
from tests.support.data_files import csv_file, json_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("streamed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setattr(streamed, "PIECE_BYTES", 600)
        patch.setattr(streamed, "PART_BYTES", 1200)
        patch.setattr(streamed, "AHEAD_PARTS", 2)
        json_lines(place / "a.jsonl", [{"text": f"number {number} " * (number % 9)} for number in range(200)])
        yield place


class Notes(Callback):
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_start(self, started: Started) -> None:
        self.told += [*started.notes, *started.checks]


def trained(folder: Path, **asked: Any) -> tuple[RunRecord, Path]:
    settings: dict[str, Any] = {
        "data": (str(folder / "a.jsonl"),),
        "stream_data": True,
        "device": "cpu",
        "sequence_tokens": 32,
        "batch_sequences": 8,
        "schedule": "constant",
        "warmup_steps": 0,
        "store": str(folder / "runs"),
    }
    record = run(**settings | asked)
    assert record.checkpoint is not None
    return record, folder / "runs" / record.id / record.checkpoint / "model.safetensors"


def test_a_resumed_run_has_the_bits_of_one_that_was_never_ended(folder: Path) -> None:
    notes = Notes()
    whole, weights = trained(folder, steps=9, callbacks=[notes])
    assert any("steps begin before all text is tokenized" in note for note in notes.told)
    assert any(note.startswith("about ") and note.endswith(" sequences") for note in notes.told)
    assert "sequences" not in whole.data and whole.data["pieces"] > 12
    begun, _ = trained(folder, steps=4)
    # On a machine without any of its caches.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "another"))
        resumed = run(resume=begun.id, steps=9, store=str(folder / "runs"))
    assert resumed.checkpoint is not None and resumed.data["fingerprint"] == whole.data["fingerprint"]
    saved = folder / "runs" / begun.id / resumed.checkpoint / "model.safetensors"
    assert saved.read_bytes() == weights.read_bytes()
    with pytest.raises(FlopwiseError, match="--stream-data without --steps"):
        run(resume=begun.id, epochs=2.0, store=str(folder / "runs"))


def test_it_is_chosen_for_large_texts_where_steps_are_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "STREAMED_FROM_BYTES", 1)
    assert "pieces" in trained(folder, stream_data=None, steps=1)[0].data
    assert "pieces" not in trained(folder, stream_data=None, epochs=0.1)[0].data
    assert "pieces" not in trained(folder, stream_data=False, steps=1)[0].data


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "without --steps"),
        ({"epochs": 1.0}, "without --steps"),
        ({"task": "masked", "model": "roberta-base", "steps": 1}, "--stream-data is for text of a language model"),
        ({"steps": 1, "data": ("{}/rows.csv",)}, "--stream-data is for text of a language model"),
        ({"steps": 1, "data": ()}, "read once an epoch"),
    ],
)
def test_what_is_not_streamed_is_refused(folder: Path, asked: dict[str, Any], words: str) -> None:
    csv_file(folder / "rows.csv", ("prompt", "completion"), [("a", "b")] * 9)
    data = [name.format(folder) for name in asked.get("data", (str(folder / "a.jsonl"),))]
    with pytest.raises(FlopwiseError) as caught:
        trained(folder, **{**asked, "data": tuple(data)})
    assert words in str(caught.value) and caught.value.hint
