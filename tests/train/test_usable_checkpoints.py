"""A checkpoint is a model that others can use: its configuration, tokenizer and labels are those that it began with."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import flopwise as fw
from flopwise.records.measurement import RunRecord, StepRecord
from flopwise.setup.training import Training
from flopwise.store.runs import read_steps
from flopwise.train.running import run
from tests.support.data_files import csv_file, word_tokenizer
from tests.support.tiny_folders import chat_folder
from tests.support.training_notes import Notes

TEXT = "the wind blows where it lists, and nobody hears whence it comes. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("usable")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        (place / "a.txt").write_text(TEXT)
        yield place


def trained(folder: Path, **asked: Any) -> tuple[RunRecord, Path]:
    request = {
        "device": "cpu",
        "steps": 2,
        "sequence_tokens": 32,
        "batch_sequences": 2,
        "data": (str(folder / "a.txt"),),
    }
    record = run(**{**request, "store": str(folder / "runs"), **asked})
    assert record.checkpoint is not None
    return record, folder / "runs" / record.id / record.checkpoint


def table(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def loaded(checkpoint: Path) -> tuple[Any, Any]:
    """What transformers makes of a checkpoint, with nothing else told."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)


def test_what_a_folder_holds_is_handed_on(folder: Path) -> None:
    begun = chat_folder(folder / "chatty")
    record, saved = trained(folder, model=str(begun))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (saved / name).read_bytes() == (begun / name).read_bytes()
    # Dropout, rope, special tokens and keys that nobody knows; the numbers are in fp32, as they came.
    assert table(saved / "config.json") == table(begun / "config.json")

    tokenizer, network = loaded(saved)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt"
    )
    made = network.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert made.shape[1] > prompt["input_ids"].shape[1] and tokenizer.eos_token_id == 258

    # A run that goes on from it has the same tokens, and a resumed one hands on the same files.
    again, after = trained(folder, model=str(saved))
    assert again.data["fingerprint"] == record.data["fingerprint"]
    shutil.rmtree(begun)
    resumed = run(resume=record.id, steps=3, store=str(folder / "runs"))
    assert resumed.checkpoint is not None
    for checkpoint in (after, folder / "runs" / record.id / resumed.checkpoint):
        assert table(checkpoint / "config.json") == table(saved / "config.json")
        assert (checkpoint / "chat_template.jinja").read_bytes() == (saved / "chat_template.jinja").read_bytes()


def test_a_model_over_bytes_is_usable_too(folder: Path) -> None:
    record, saved = trained(folder)
    tokenizer, network = loaded(saved)
    text = "häh \t\n<x>"
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.decode(list(text.encode())) == text
    assert network.config.eos_token_id == tokenizer.eos_token_id == 256
    again, _ = trained(folder, model=str(saved))
    assert again.data["fingerprint"] == record.data["fingerprint"]


def test_the_type_is_that_of_the_numbers_and_no_quantisation_is_left(folder: Path) -> None:
    begun = chat_folder(folder / "half")
    (begun / "config.json").write_text(
        json.dumps(table(begun / "config.json") | {"quantization_config": {"quant_method": "fp8"}})
    )
    _, saved = trained(folder, model=str(begun), precision="bf16")
    config = table(saved / "config.json")
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    assert next(loaded(saved)[1].parameters()).dtype == torch.bfloat16


def test_a_classifier_keeps_its_labels_and_their_order(folder: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    begun = folder / "labels"
    word_tokenizer(begun.with_suffix(".json"))
    names = ("c", "a", "b")
    settings = transformers.BertConfig(
        hidden_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=60,
        max_position_embeddings=16,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )
    torch.manual_seed(0)
    network = transformers.BertForSequenceClassification(settings).eval()
    with torch.no_grad():
        network.classifier.bias.copy_(torch.tensor([3.0, -3.0, 0.0]))
    network.save_pretrained(begun)
    shutil.copy(begun.with_suffix(".json"), begun / "tokenizer.json")
    data = csv_file(folder / "labels.csv", ("text", "label"), [("a trade wind", "c"), ("the year", "a")] * 4)
    asked = {"data": (str(data),), "sequence_tokens": 16}
    record, saved = trained(folder, model=str(begun), steps=1, **asked)
    assert record.data["labels"] == list(names) and record.data["samples_per_label"] == [4, 4, 0]
    assert table(saved / "config.json")["id2label"] == {"0": "c", "1": "a", "2": "b"}

    other = csv_file(folder / "other.csv", ("text", "label"), [("a trade wind", "good"), ("the year", "a")] * 4)
    with pytest.raises(ValueError, match="the weights do not know the label 'good'"):
        trained(folder, model=str(begun), steps=1, **{**asked, "data": (str(other),)})


@pytest.mark.parametrize(
    ("found", "known", "order", "notes"),
    [
        (("a", "b"), (), ("a", "b"), 0),
        (("a", "b"), ("b", "x", "a"), ("b", "x", "a"), 0),
        (("0", "2"), ("LABEL_0", "LABEL_1", "LABEL_2"), ("0", "1", "2"), 0),
        (("neg", "pos"), ("LABEL_0", "LABEL_1"), ("neg", "pos"), 1),
    ],
)
def test_the_order_of_labels(
    found: tuple[str, ...], known: tuple[str, ...], order: tuple[str, ...], notes: int
) -> None:
    from flopwise.engine.data.classification import _order_labels

    chosen, told = _order_labels(found, known)
    assert (chosen, len(told)) == (order, notes)


# -- what fine-tuning begins with unless it is told otherwise ---------------------------------------------------------


def started(folder: Path, **asked: Any) -> tuple[Training, str, list[StepRecord]]:
    notes = Notes()
    record, _ = trained(folder, callbacks=[notes], **asked)
    return record.training, "; ".join(notes.told), read_steps(folder / "runs" / record.id)


@pytest.mark.parametrize(
    ("precision", "asked", "by_chance", "words"),
    [
        ("bf16", None, True, "by chance"),
        ("bf16", False, False, "to nearest"),
        ("bf16-mixed", None, False, ""),
        ("fp32", None, False, ""),
    ],
)
def test_bf16_weights_without_a_master_are_rounded_by_chance(
    folder: Path, precision: str, asked: bool | None, by_chance: bool, words: str
) -> None:
    training, told, _ = started(folder, precision=precision, stochastic_rounding=asked)
    assert training.stochastic_rounding is by_chance
    assert (words in told) if words else ("rounded" not in told)


def test_small_steps_of_fine_tuning_are_not_lost(folder: Path) -> None:
    """What the default learns in bf16 is near to what fp32 learns; rounded to nearest it is mostly lost."""
    begun = chat_folder(folder / "low")
    asked: dict[str, Any] = {
        "model": str(begun),
        "steps": 30,
        "learning_rate": 2e-5,
        "schedule": "constant",
        "warmup_steps": 0,
    }
    learned = {}
    ways: dict[str, dict[str, Any]] = {
        "exact": {"precision": "fp32"},
        "chance": {"precision": "bf16"},
        "nearest": {"precision": "bf16", "stochastic_rounding": False},
    }
    for name, more in ways.items():
        _, saved = trained(folder, **asked, **more)
        with (
            safe_open(saved / "model.safetensors", framework="pt") as opened,
            safe_open(begun / "model.safetensors", framework="pt") as first,
        ):
            name_of_matrix = "model.layers.0.mlp.down_proj.weight"
            learned[name] = opened.get_tensor(name_of_matrix).float() - first.get_tensor(name_of_matrix)
    exact = learned["exact"]
    along = {name: float((found * exact).sum() / (exact * exact).sum()) for name, found in learned.items()}
    assert along["chance"] == pytest.approx(1.0, abs=0.15) and along["nearest"] < 0.7, along


def test_fine_tuning_clips_unless_it_is_told_not_to(folder: Path) -> None:
    begun = str(chat_folder(folder / "clipped"))
    training, told, steps = started(folder, model=begun)
    assert training.clip_norm == 1.0 and "clipped" in told and steps[0].gradient_norm is not None
    assert started(folder, model=begun, clip_norm=0.0)[0].clip_norm is None
    assert started(folder, model=begun, clip_norm=2.0)[0].clip_norm == 2.0
    training, told, _ = started(folder, model=begun, from_scratch=True, tokenizer=begun)
    assert training.clip_norm is None and "clipped" not in told
    # A plan that was made without does not wait for all gradients.
    plan = folder / "plan.toml"
    fw.plan(begun, on="this-cpu", seq=32, batch=2, write=plan)
    training, told, _ = started(folder, model=str(plan), weights=begun, sequence_tokens=None, batch_sequences=None)
    assert training.clip_norm is None and "--clip" in told
