"""Masked language models are trained as `transformers` trains them: the same hidden tokens, losses and weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flopwise as fw
from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import NO_LABEL, Batch
from flopwise.engine.data import MaskedData, open_masked_data
from flopwise.records.measurement import RunRecord
from flopwise.store.runs import read_steps
from flopwise.train.running import run
from tests.support.data_files import json_lines, request
from tests.support.encoder_folders import FAMILIES, LETTERS, VOCAB, encoder_folder
from tests.support.training_notes import Notes

torch = pytest.importorskip("torch")

SEQUENCE, BATCH, STEPS, RATE = 24, 3, 3, 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("masked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        draw = np.random.default_rng(4)
        sizes = (60, 5, 9, 14, 3, 22, 40, 7, 1, 30, 11, 18)
        json_lines(place / "texts.jsonl", [{"text": " ".join(draw.choice(LETTERS, size))} for size in sizes])
        for family in FAMILIES:
            encoder_folder(place / family, family)
        yield place


def trained(folder: Path, family: str, **asked: Any) -> tuple[RunRecord, Path]:
    settings = {
        "model": str(folder / family),
        "data": (str(folder / "texts.jsonl"),),
        "device": "cpu",
        "steps": STEPS,
        "sequence_tokens": SEQUENCE,
        "batch_sequences": BATCH,
        "optimizer": "sgd",
        "learning_rate": RATE,
        "schedule": "constant",
        "warmup_steps": 0,
        "clip_norm": 0.0,
        "weight_decay": 0.0,
        "precision": "fp32,compute=fp64,weights=fp64,gradients=fp64,matrix=fp64",
    }
    record = run(**{**settings, "store": str(folder / "runs"), **asked})
    assert record.checkpoint is not None
    return record, folder / "runs" / record.id / record.checkpoint


def data_of(folder: Path, family: str, *, packed: bool, **changes: Any) -> MaskedData:
    """The same data, opened anew."""
    asked = {"tokenizer": str(folder / family / "tokenizer.json"), "vocab": VOCAB, "sequence_tokens": SEQUENCE}
    asked |= {"mask_share": 0.3 if family == "modernbert" else 0.15}
    data = open_masked_data(request(folder, folder / "texts.jsonl", **{**asked, **changes}))
    data.lay_out(packed=packed)
    return data


def network(folder: Path) -> Any:
    from transformers import AutoModelForMaskedLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").double().eval()


def hidden_loss(model: Any, batch: Batch) -> Any:
    """The mean cross-entropy of what is hidden, one document after the other: none sees another, nothing is padding."""
    assert batch.lengths is not None
    total = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(batch.lengths.tolist()):
        counts = [length] if batch.documents is None else batch.documents[row].tolist()
        ends = np.cumsum(counts).tolist()
        for end, count in zip(ends, counts, strict=True):
            place = slice(end - count, end)
            ids, labels = (torch.from_numpy(each[row, place]).long() for each in (batch.ids, batch.labels))
            logits = model(input_ids=ids[None]).logits[0]
            chosen = labels != NO_LABEL
            total = total - logits.log_softmax(-1)[chosen, labels[chosen]].sum()
    return total / (batch.labels != NO_LABEL).sum()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_weights_are_those_of_transformers(folder: Path, family: str, packed: bool) -> None:
    record, saved = trained(folder, family, packing=packed)
    data, theirs = data_of(folder, family, packed=packed), network(folder / family)
    begun = {name: value.clone() for name, value in theirs.state_dict().items()}
    losses = []
    for step in range(STEPS):
        loss = hidden_loss(theirs, data.batch(step * BATCH, BATCH))
        theirs.zero_grad()
        loss.backward()
        with torch.no_grad():
            for value in theirs.parameters():
                value.sub_(RATE * (0 if value.grad is None else value.grad))
        losses.append(float(loss.detach()))
    found = [step.loss for step in read_steps(folder / "runs" / record.id)]
    assert found == pytest.approx(losses, rel=1e-9)
    # What was taken from each weight in all is the sum of its gradients.
    for name, value in network(saved).state_dict().items():
        ours, expected = value - begun[name], theirs.state_dict()[name] - begun[name]
        assert float((ours - expected).norm()) <= 1e-6 * float(expected.norm()) + 1e-7, name
    with torch.no_grad():
        evaluated = hidden_loss(theirs, next(data.evaluation(100)))
    last = read_steps(folder / "runs" / record.id)[-1].evaluation
    # Our own evaluation is after the last step too, of the same hidden tokens.
    assert last is not None and last["eval_loss"] == pytest.approx(float(evaluated), rel=2e-6)
    assert last["eval_perplexity"] == pytest.approx(np.exp(last["eval_loss"]))


def test_a_resumed_run_has_the_bits_of_one_that_was_never_ended(folder: Path) -> None:
    _, whole = trained(folder, "bert", steps=7)
    record, _ = trained(folder, "bert", steps=4, checkpoint_every=2)
    resumed = run(resume=record.id, steps=7, store=str(folder / "runs"))
    assert resumed.checkpoint is not None
    saved = folder / "runs" / record.id / resumed.checkpoint
    assert (saved / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert resumed.data["fingerprint"] == record.data["fingerprint"] and resumed.task == "masked"


def test_a_model_over_bytes_fills_masks(folder: Path) -> None:
    words = {"layers": 2, "hidden": 32, "heads": 2, "ffn": 48, "vocab": 264}
    (folder / "plain.txt").write_text("the wind blows where it lists. " * 90)
    record, saved = trained(
        folder, "", model="bert-base", changes=words, task="masked", data=(str(folder / "plain.txt"),)
    )
    assert str(record.model["name"]).endswith("+masked") and record.model["head"] == "masked"
    from transformers import AutoTokenizer, pipeline

    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.mask_token_id == 257 and tokenizer("ab").input_ids == [256, 97, 98]
    found = pipeline("fill-mask", model=str(saved), tokenizer=tokenizer)(f"the w{tokenizer.mask_token}nd")
    assert len(found) == 5
    # What goes on from it has the same tokens, and needs no word of the task.
    again, _ = trained(folder, "", model=str(saved), data=(str(folder / "plain.txt"),))
    assert again.task == "masked" and again.data["fingerprint"] == record.data["fingerprint"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_classifier_gets_a_masked_head_and_keeps_its_configuration(folder: Path, family: str) -> None:
    begun = encoder_folder(folder / f"{family}-labels", family, "ForSequenceClassification")
    config = json.loads((begun / "config.json").read_text())
    (begun / "config.json").write_text(json.dumps(config | {"nobody": "knows"}))
    _, saved = trained(folder, "", model=str(begun), task="masked", steps=1)
    written = json.loads((saved / "config.json").read_text())
    assert written["nobody"] == "knows" and written["architectures"][0].endswith("ForMaskedLM")
    from transformers import AutoModelForMaskedLM

    _, told = AutoModelForMaskedLM.from_pretrained(saved, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]


def test_shares_of_a_family_are_told_and_others_are_taken(folder: Path) -> None:
    notes = Notes()
    record, _ = trained(folder, "modernbert", callbacks=[notes])
    assert record.data["mask_share"] == 0.3 and any("30 % of all tokens" in note for note in notes.told)
    # In floating point a hundred times this is more than 56.
    record, _ = trained(folder, "bert", mask_share=0.56)
    assert record.data["mask_share"] == 0.56 and record.data["task"] == "masked"
    assert record.model["loss_share"] == 0.56


def test_what_is_planned_for_it_is_trained(folder: Path) -> None:
    changes = {"layers": 2, "hidden": 32, "heads": 2, "ffn": 48, "vocab": 264}
    asked: dict[str, Any] = {"changes": changes, "on": "this-cpu", "seq": 32, "batch": 4, "precision": "fp32"}
    fw.plan("bert-base", task="masked", write=folder / "plan.toml", **asked)
    data = (str(folder / "texts.jsonl"),)
    record = run(model=str(folder / "plan.toml"), data=data, device="cpu", steps=1, store=str(folder / "runs"))
    assert record.task == "masked" and record.data["task"] == "masked"
    fw.plan("bert-base", write=folder / "other.toml", **asked)
    with pytest.raises(FlopwiseError, match="the plan is not for --task masked"):
        run(model=str(folder / "other.toml"), data=data, task="masked", device="cpu", steps=1)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "gpt2", "task": "masked"}, "reads from left to right"),
        ({"task": "language"}, "--task masked"),
        ({"task": "classification", "mask_share": 0.2}, "the task is classification"),
        ({"mask_share": 1.5}, "cannot be hidden"),
        ({"whole_words": True}, "only WordPiece"),
        ({"task": "classification", "whole_words": True}, "--whole-words, and the task"),
        ({"task": "guessing"}, "no task is called 'guessing'"),
        ({"data_format": "tokens-uint16"}, "--data-format tokens-uint16"),
    ],
)
def test_what_is_not_trained_is_refused(folder: Path, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopwiseError) as caught:
        trained(folder, "bert", **asked)
    assert words in str(caught.value) + str(caught.value.hint) and caught.value.hint


def test_a_description_has_the_head_of_its_task() -> None:
    kinds: Any = pytest.importorskip("transformers")
    config: dict[str, Any] = {
        "vocab_size": 50265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "num_labels": 2,
    }
    with torch.device("meta"):
        theirs = {
            "masked": kinds.RobertaForMaskedLM(kinds.RobertaConfig(**config)),
            "classification": kinds.RobertaForSequenceClassification(kinds.RobertaConfig(**config)),
        }
    for task, network in theirs.items():
        found = fw.predict("roberta-base", task=task, on="h200", seq=128, batch=8)  # type: ignore[arg-type]
        assert found.n_params == network.num_parameters(), task
        changed = "" if task == "masked" else "+classifier"
        assert found.model == f"roberta-base{changed}"
    with pytest.raises(FlopwiseError, match="reads from left to right"):
        fw.predict("gpt2", task="classification", on="h200")
