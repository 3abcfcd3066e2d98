"""Runs by every optimizer: saved, gone on with, planned and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flopwise.base.errors import FlopwiseError
from flopwise.records.measurement import RunRecord
from flopwise.store.runs import read_steps
from flopwise.train.running import AVERAGED, run
from flopwise.work.optimizers import OPTIMIZERS, Optimizer
from tests.support.tiny_folders import chat_folder

TEXT = "the wind blows where it lists, and nobody hears whence it comes. " * 40
STATE_FILES = ("model.safetensors", "optimizer.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("optimizers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        (place / "a.txt").write_text(TEXT)
        chat_folder(place / "base")
        yield place


def trained(folder: Path, **asked: Any) -> tuple[RunRecord, Path]:
    request = {
        "model": str(folder / "base"),
        "device": "cpu",
        "steps": 4,
        "sequence_tokens": 32,
        "batch_sequences": 2,
        "learning_rate": 1e-3,
        "schedule": "constant",
        "warmup_steps": 0,
        "data": (str(folder / "a.txt"),),
    }
    record = run(**{**request, "store": str(folder / "runs"), **asked})
    return record, folder / "runs" / record.id


# AdamW's two are held so elsewhere.
@pytest.mark.parametrize("optimizer", [each for each in OPTIMIZERS if not each.startswith("adamw")])
def test_a_run_goes_on_as_if_it_had_not_ended(folder: Path, optimizer: Optimizer) -> None:
    """Rounded by chance, with a master copy or not, and clipped."""
    asked = {"optimizer": optimizer, "precision": "bf16" if optimizer in ("lion", "muon") else "bf16-mixed"}
    whole, place = trained(folder, **asked, clip_norm=1.0)
    first, other = trained(folder, **asked, clip_norm=1.0, steps=2)
    again = run(resume=first.id, steps=4, store=str(folder / "runs"))
    assert [step.loss for step in read_steps(other)] == [step.loss for step in read_steps(place)]
    for file in STATE_FILES:
        one, two = (load_file(folder / "runs" / each.id / str(each.checkpoint) / file) for each in (whole, again))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert whole.training.optimizer == optimizer


def test_what_was_left_open_is_the_optimizers_own(folder: Path) -> None:
    settings = [trained(folder, optimizer=name, learning_rate=None, steps=1)[0].training for name in ("adamw", "lion")]
    adamw, lion = settings
    assert lion.learning_rate == pytest.approx(adamw.learning_rate / 5)
    assert lion.weight_decay == pytest.approx(adamw.weight_decay * 5)
    assert lion.beta2 == 0.99


def test_sgd_needs_a_rate(folder: Path) -> None:
    with pytest.raises(FlopwiseError, match="SGD without a learning rate"):
        trained(folder, optimizer="sgd", learning_rate=None)


def test_a_field_of_the_model_and_terms_of_the_loss(folder: Path) -> None:
    plain, _ = trained(folder, steps=1, changes={"layers": 1}, from_scratch=True)
    more, place = trained(folder, steps=1, changes={"layers": 1}, from_scratch=True, label_smoothing=0.2, z_loss=1e-2)
    assert plain.measurement is not None and more.measurement is not None
    assert float(plain.metrics["train_loss"]) < float(more.metrics["train_loss"])
    assert json.loads((place / str(more.checkpoint) / "config.json").read_text())["num_hidden_layers"] == 1
    with pytest.raises(FlopwiseError, match="--set without a model"):
        run(changes={"layers": 1}, store=str(folder / "runs"), device="cpu")


@pytest.mark.parametrize("lora", [None, 4])
def test_a_mean_of_the_weights_is_a_model(folder: Path, lora: int | None) -> None:
    from transformers import AutoModelForCausalLM

    asked = {"ema": 0.5, "precision": "fp32", "lora": lora}
    whole, place = trained(folder, **asked)
    first, _ = trained(folder, **asked, steps=2)
    run(resume=first.id, steps=4, store=str(folder / "runs"))
    one, two = (load_file(folder / "runs" / each.id / AVERAGED / "model.safetensors") for each in (whole, first))
    assert all(torch.equal(one[name], two[name]) for name in one)
    network = AutoModelForCausalLM.from_pretrained(place / AVERAGED)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    name = "model.layers.0.mlp.up_proj.weight"
    mean, begun = network.get_parameter(name).detach(), base.get_parameter(name).detach()
    assert not torch.equal(mean, begun)
    if lora is None:
        last = load_file(place / str(whole.checkpoint) / "model.safetensors")[name]
        assert float((mean - begun).norm()) < float((last - begun).norm())
    assert (place / AVERAGED / "tokenizer.json").is_file()
