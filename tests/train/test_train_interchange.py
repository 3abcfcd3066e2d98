"""Checkpoints go elsewhere: to transformers and back, and to another number of devices."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flopwise.base.files import to_toml
from flopwise.catalog.load import model_table
from flopwise.engine.weights import checkpoint
from flopwise.engine.weights.huggingface import from_huggingface
from flopwise.store.runs import find_run, read_steps
from flopwise.train.running import run
from tests.cli.test_cli_fuzz import answered
from tests.support.launched import described_cpu
from tests.support.tiny_models import parameters, random_ids, transformers_class
from tests.train.test_train_run import ENCODER, TINY, asked, hardware, place

__all__ = ["hardware", "place"]  # fixtures


@pytest.mark.parametrize("name", ["tiny", "encoder"])
def test_transformers_reads_a_checkpoint_and_we_read_it_back(place: Path, name: str) -> None:
    model = {"tiny": TINY, "encoder": ENCODER}[name]
    request = asked(place, model=str(place / f"{name}.toml"), steps=2)
    if name == "encoder":
        request |= {"data": ()}
    record = run(**request)
    saved = checkpoint.latest(find_run(place / "runs", record.id))
    assert saved is not None
    described = model if name == "tiny" else replace(model, labels=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers_class(described).from_pretrained(saved).eval()
        ids = random_ids(model, 2, 16)
        with torch.no_grad():
            expected = theirs(ids).logits
    loaded = checkpoint.load(saved)
    from flopwise.engine.modules import build

    ours = build(described, 32, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for key, value in from_huggingface(described, loaded.weights, 32).tensors.items():
            dict(ours.named_parameters())[key].copy_(value)
        assert torch.allclose(ours(ids), expected, atol=1e-5)
    assert parameters(ours)

    # As first weights of another training: its first loss is that of the trained model, not of a fresh one.
    again = run(**{**request, "weights": str(saved), "steps": 1, "learning_rate": 0.0})
    assert again.measurement is not None
    assert again.measurement.first_loss < read_steps(find_run(place / "runs", record.id))[0].loss


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--lora", "4", "--freeze", "blocks.0", "--merge")])
def test_two_ranks_follow_one_and_their_checkpoint_goes_on_with_one(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.toml").write_text(to_toml(model_table(TINY)), encoding="utf-8")
    (tmp_path / "mine.toml").write_text(described_cpu(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    store = ("--store", str(tmp_path / "runs"))

    def trained(*words: str) -> None:
        code, _, told = answered(["train", *words, *store])
        assert code == 0, told

    common = (
        *words,
        "--on",
        "mine.toml",
        "--device",
        "cpu",
        "--seq",
        "32",
        "--batch",
        "5",
        "--schedule",
        "constant",
        "--warmup",
        "0",
    )
    ranks = [sys.executable, "-m", "flopwise", "train", "tiny.toml", "--gpus", "2", "--steps", "4", *common, *store]
    subprocess.run(ranks, check=True, timeout=600, capture_output=True)
    trained("--resume", "last", "--gpus", "1", "--steps", "7")
    trained("tiny.toml", "--steps", "7", *common)
    two, one = (read_steps(find_run(tmp_path / "runs", name)) for name in ("1", "2"))
    assert [step.step for step in two] == list(range(1, 8))
    assert [step.samples for step in two] == [step.samples for step in one]
    assert [step.loss for step in two] == pytest.approx([step.loss for step in one], rel=1e-4)
