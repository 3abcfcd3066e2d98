"""A run with dropout: told, turned off, the same bits after a stop, its numbers in the checkpoint's configuration."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml
from flopwise.catalog.load import model_table
from flopwise.records.measurement import RunRecord
from flopwise.store.runs import find_run, read_steps
from flopwise.train.running import run
from flopwise.work.transformer import Dropout
from tests.support.tiny_models import TINY
from tests.train.test_train_run import Recorder, final_files

MODEL = replace(
    TINY["gpt2"],
    vocab=264,
    context=64,
    position_rows=64,
    dropout=Dropout(embedding=0.1, hidden=0.1, attention=0.2),
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "gpt.toml").write_text(to_toml(model_table(MODEL)), encoding="utf-8")
    (tmp_path / "text.txt").write_text("the wind blows where it lists. " * 60, encoding="utf-8")
    return tmp_path


def trained(place: Path, told: Recorder | None = None, **changes: Any) -> tuple[RunRecord, Path]:
    asked = {
        "model": str(place / "gpt.toml"),
        "data": (str(place / "text.txt"),),
        "sequence_tokens": 16,
        "batch_sequences": 3,
        "steps": 6,
        "device": "cpu",
        "store": str(place / "runs"),
    }
    record = run(callbacks=[told or Recorder()], **{**asked, **changes})
    return record, find_run(place / "runs", record.id)


def losses(folder: Path) -> list[float]:
    return [step.loss for step in read_steps(folder)]


def config_of_run(record: RunRecord, folder: Path) -> dict[str, Any]:
    assert record.checkpoint is not None
    found: dict[str, Any] = json.loads((folder / record.checkpoint / "config.json").read_text("utf-8"))
    return {key: value for key, value in found.items() if key.endswith("pdrop")}


def test_what_the_model_drops_is_dropped_told_and_saved(place: Path) -> None:
    told, without = Recorder(), Recorder()
    record, folder = trained(place, told)
    none, other = trained(place, without, dropout=0.0)
    assert "dropout 0.2 (attention), 0.1 (hidden, embedding)" in told.started[0].checks
    assert "no dropout" in without.started[0].checks
    assert (record.training.drops, none.training.drops) == (True, False)
    assert losses(folder)[0] != losses(other)[0]
    kept = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.2}
    # What is turned off for one training is still the model's.
    assert config_of_run(record, folder) == config_of_run(none, other) == kept


def test_another_share_is_trained_with_and_saved(place: Path) -> None:
    told = Recorder()
    record, folder = trained(place, told, dropout=0.5)
    assert "dropout 0.5 (attention, hidden, embedding)" in told.started[0].checks
    assert config_of_run(record, folder) == {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    again, same = trained(place, dropout=0.5)
    assert losses(same) == losses(folder)
    assert again.metrics["eval_loss"] == record.metrics["eval_loss"]


@pytest.mark.parametrize("dropout", [None, 0.0, 0.3])
def test_a_stopped_run_goes_on_bit_for_bit(place: Path, dropout: float | None) -> None:
    _, one = trained(place, dropout=dropout)
    stopped, other = trained(place, Recorder(stop_after=2, by=signal.SIGTERM), dropout=dropout)
    assert stopped.state == "interrupted"
    run(resume=stopped.id, store=str(place / "runs"))
    assert losses(one) == losses(other)
    assert final_files(one) == final_files(other)


@pytest.mark.parametrize("share", [1.0, -0.1])
def test_a_share_that_is_none_is_refused(place: Path, share: float) -> None:
    with pytest.raises(FlopwiseError, match="dropout"):
        trained(place, dropout=share)
