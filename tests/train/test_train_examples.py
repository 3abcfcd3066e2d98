"""Trainings on conversations, tokens of others and objects of the caller's."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flopwise as fw
from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml
from flopwise.engine.batch import Batch
from flopwise.records.measurement import RunRecord, StepRecord
from flopwise.store.runs import read_steps
from flopwise.train.request import TrainRequest
from flopwise.train.resuming import find_resumed, laid_out_as_before
from flopwise.train.running import run
from tests.support.data_files import json_lines
from tests.support.tiny_folders import chat_folder
from tests.support.training_notes import Notes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        chat_folder(place / "chatty")
        words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
        json_lines(
            place / "chats.jsonl",
            [
                {
                    "messages": [
                        {"role": "user", "content": f"after {word}?"},
                        {"role": "assistant", "content": " ".join(words[: 1 + number % 5])},
                    ]
                }
                for number, word in enumerate(words * 3)
            ],
        )
        yield place


def trained(folder: Path, **asked: Any) -> tuple[RunRecord, list[StepRecord]]:
    request: dict[str, Any] = {
        "model": str(folder / "chatty"),
        "data": (str(folder / "chats.jsonl"),),
        "device": "cpu",
        "steps": 3,
        "sequence_tokens": 128,
        "batch_sequences": 2,
        "precision": "fp32",
        "checkpoint": False,
    }
    record = run(**{**request, "store": str(folder / "runs"), **asked})
    return record, read_steps(folder / "runs" / record.id)


def test_conversations_share_sequences_and_only_answers_are_learned(folder: Path) -> None:
    notes = Notes()
    record, steps = trained(folder, callbacks=[notes])
    assert record.data["packed"] is True and record.data["sequences"] < record.data["examples"]
    assert "only answers are learned" in " ".join(notes.told)
    # The head is planned and run for what is learned.
    (told,) = (note for note in notes.told if "only answers" in note)
    assert 0.1 < record.model["loss_share"] < 0.7
    assert record.model["loss_share"] == pytest.approx(float(told.split()[4]) / 100, abs=0.03)
    assert "loss_share" not in trained(folder, train_on="all")[0].model
    # Two sequences hold more than two conversations.
    _, alone = trained(folder, packing=False)
    assert steps[0].tokens > 1.5 * alone[0].tokens


def test_an_epoch_packed_is_an_epoch_unpacked(folder: Path) -> None:
    """One step over everything, with nothing held out: the loss is that of every conversation by itself."""
    held = {"evaluation_data": (str(folder / "chats.jsonl"),), "steps": 1, "learning_rate": 0.0}
    found = {}
    for packing in (True, False):
        record, _ = trained(folder, packing=packing, batch_sequences=2, **held)
        assert record.metrics is not None
        found[packing] = float(record.metrics["eval_loss"]), float(record.metrics["eval_accuracy"])
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-6) and found[True][1] == found[False][1]


def test_chunked_sequences_hold_one_example_each(folder: Path) -> None:
    plan = folder / "chunked.toml"
    fw.plan(folder / "chatty", on="this-cpu", seq=128, batch=2, precision="fp32", write=plan)
    table = tomllib.loads(plan.read_text())
    rounds = table["rounds_per_step"] * table["chunks_per_round"] * table["chunk_tokens"] // 256
    cut = {"chunk_tokens": 64, "chunks_per_round": 2, "rounds_per_step": 2 * rounds, "saves": ["ff", "ff"]}
    plan.write_text(to_toml(table | cut))
    asked = {"model": str(plan), "weights": str(folder / "chatty"), "sequence_tokens": None, "batch_sequences": None}
    record, steps = trained(folder, **asked, precision=None)
    assert record.plan["chunk_tokens"] == 64 and record.data["packed"] is False
    assert steps[0].loss == pytest.approx(trained(folder, packing=False)[1][0].loss, rel=1e-6)


def test_a_plan_for_another_share_of_tokens_with_a_loss_is_told(folder: Path) -> None:
    asked = {"weights": str(folder / "chatty"), "sequence_tokens": None, "batch_sequences": None, "precision": None}
    plan = folder / "shares.toml"
    (folder / "few.txt").write_text("all of this is learned. " * 200)
    fw.plan(folder / "chatty", on="this-cpu", seq=128, batch=2, precision="fp32", loss_share=0.05, write=plan)
    for data, told in (("chats.jsonl", "plan with --loss-share 0."), ("few.txt", "plan without --loss-share")):
        notes = Notes()
        trained(folder, model=str(plan), data=(str(folder / data),), callbacks=[notes], steps=1, **asked)
        assert any("the plan is for 5 % of the tokens with a loss" in note and told in note for note in notes.told)


def test_a_resumed_run_lays_examples_out_as_it_began(folder: Path) -> None:
    """On one device several share a sequence, on several they do not; one that several began goes on on one."""
    for packing in (True, False):
        record, _ = trained(folder, packing=packing, steps=1, checkpoint=True)
        request = TrainRequest(resume=record.id, store=str(folder / "runs"))
        resumed = find_resumed(request, lambda _: None)
        assert laid_out_as_before(request, resumed, 1).packing is packing
        if packing:
            with pytest.raises(FlopwiseError, match="several examples in a sequence"):
                laid_out_as_before(request, resumed, 2)
        else:
            assert not laid_out_as_before(request, resumed, 2).packing


def test_tokens_of_others_are_trained_only_when_they_are_called_so(folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 2000)
    tokens.astype("<u2").tofile(folder / "train.bin")
    np.save(folder / "train.npy", tokens.astype(np.uint32))
    with pytest.raises(FlopwiseError, match="is no text"):
        trained(folder, data=(str(folder / "train.bin"),))
    found = []
    for name in ("train.bin", "train.npy"):
        record, steps = trained(folder, data=(str(folder / name),), data_format="tokens-uint16")
        assert record.data["tokens"] == 2000
        found.append([step.loss for step in steps])
    assert found[0] == found[1]
    (tokens + 250).astype("<u2").tofile(folder / "other.bin")
    with pytest.raises(FlopwiseError, match="is no token of"):
        trained(folder, data=(str(folder / "other.bin"),), data_format="tokens-uint16")


class Counting:
    """The same sequence over and over, and one that is held out."""

    count = 5

    def batch(self, position: int, sequences: int) -> Batch:
        ids = (np.arange(16)[None] + position + np.arange(sequences)[:, None]).astype(np.int32) % 200
        return Batch(ids, ids + 1)

    def evaluation(self, sequences: int) -> Iterator[Batch]:
        yield self.batch(0, min(sequences, 1))


def test_an_object_of_the_callers_is_data(folder: Path) -> None:
    asked: dict[str, Any] = {"device": "cpu", "steps": 2, "seq": 16, "batch": 2, "store": folder / "own"}
    record = fw.train(folder / "chatty", data=Counting(), **asked)
    assert record.data["sources"] == ["Counting"] and "eval_loss" in (record.metrics or {})
    with pytest.raises(FlopwiseError, match="was trained on data of the program"):
        fw.train(resume=record.id, steps=3, store=folder / "own")
    again = fw.train(resume=record.id, steps=3, store=folder / "own", data=Counting())
    assert again.steps_done == 3

    class Short(Counting):
        def batch(self, position: int, sequences: int) -> Batch:
            return super().batch(position, sequences - 1)

    with pytest.raises(FlopwiseError, match="2 were asked for"):
        fw.train(folder / "chatty", data=Short(), **asked)


def test_small_data_is_seen_three_times_unless_it_is_said_otherwise(folder: Path) -> None:
    notes = Notes()
    record, steps = trained(folder, steps=None, callbacks=[notes])
    assert len(steps) == -(-3 * record.data["sequences"] // 2)
    assert "--epochs 3 or --steps says otherwise" in " ".join(notes.told)
    notes = Notes()
    assert len(trained(folder, steps=None, epochs=1.0, callbacks=[notes])[1]) == -(-record.data["sequences"] // 2)
    assert "otherwise" not in " ".join(notes.told)
