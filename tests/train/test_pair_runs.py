"""Classifiers of pairs of texts are trained as `transformers` trains them: marks, types, losses and weights."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flopwise.engine.data import open_classification_data
from flopwise.store.runs import read_steps
from flopwise.train.running import run
from tests.support.data_files import csv_file, json_lines, request
from tests.support.encoder_folders import LETTERS, VOCAB, encoder_folder

torch = pytest.importorskip("torch")

SEQUENCE, BATCH, STEPS, RATE = 24, 4, 3, 0.1
FAMILIES = ("bert", "roberta", "modernbert")
CUT: dict[str, Any] = {"truncation": True, "max_length": SEQUENCE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        draw = np.random.default_rng(4)
        rows = [
            {
                "premise": " ".join(draw.choice(LETTERS, draw.integers(1, 16))),
                "hypothesis": " ".join(draw.choice(LETTERS, draw.integers(1, 16))),
                "label": int(draw.integers(3)),
            }
            for _ in range(30)
        ]
        json_lines(place / "nli.jsonl", rows)
        csv_file(place / "nli.csv", ("premise", "hypothesis", "label"), [tuple(row.values()) for row in rows])
        for family in FAMILIES:
            encoder_folder(place / family, family, "ForSequenceClassification", num_labels=3)
        yield place


@pytest.mark.parametrize(
    ("family", "form"), [("bert", "jsonl"), ("bert", "csv"), ("roberta", "jsonl"), ("modernbert", "csv")]
)
def test_losses_and_weights_of_pairs_are_those_of_transformers(folder: Path, family: str, form: str) -> None:
    source = folder / f"nli.{form}"
    record = run(
        model=str(folder / family),
        data=(str(source),),
        device="cpu",
        steps=STEPS,
        sequence_tokens=SEQUENCE,
        batch_sequences=BATCH,
        optimizer="sgd",
        learning_rate=RATE,
        schedule="constant",
        warmup_steps=0,
        clip_norm=0.0,
        precision="fp32,compute=fp64,weights=fp64,gradients=fp64,matrix=fp64",
        store=str(folder / "runs"),
    )
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = AutoModelForSequenceClassification.from_pretrained(folder / family, attn_implementation="eager")
        theirs = network.double().eval()
        tokenizer = AutoTokenizer.from_pretrained(folder / family)
    begun = {name: value.clone() for name, value in theirs.state_dict().items()}
    types = 1 if family == "roberta" else 2 if family == "bert" else 0
    data = open_classification_data(
        request(
            folder,
            source,
            tokenizer=str(folder / family),
            vocab=VOCAB,
            sequence_tokens=SEQUENCE,
            token_types=types,
            labels=tuple(network.config.id2label[number] for number in range(3)),
        )
    )
    texts = texts_by_tokens(source, tokenizer)
    losses = []
    for step in range(STEPS):
        batch = data.batch(step * BATCH, BATCH)
        # The texts again, tokenized as transformers does it.
        assert batch.lengths is not None
        rows = zip(batch.ids.tolist(), batch.lengths.tolist(), strict=True)
        pairs = [texts[tuple(ids[:length])] for ids, length in rows]
        assert (batch.types is not None) == (types > 1)
        # One by one: rows of padding alone in a window are NaN in transformers' gradients.
        loss = sum(
            theirs(
                **tokenizer(*pair, return_token_type_ids=types > 1, **CUT, return_tensors="pt"),
                labels=torch.tensor([label]),
            ).loss
            for pair, label in zip(pairs, batch.labels.tolist(), strict=True)
        )
        loss = loss / BATCH
        theirs.zero_grad()
        loss.backward()
        with torch.no_grad():
            for value in theirs.parameters():
                value.sub_(RATE * (0 if value.grad is None else value.grad))
        losses.append(float(loss.detach()))
    assert [step.loss for step in read_steps(folder / "runs" / record.id)] == pytest.approx(losses, rel=1e-9)
    assert record.checkpoint is not None and record.data["text_columns"] == ["premise", "hypothesis"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = AutoModelForSequenceClassification.from_pretrained(folder / "runs" / record.id / record.checkpoint)
    for name, value in saved.double().state_dict().items():
        ours, expected = value - begun[name], theirs.state_dict()[name] - begun[name]
        assert float((ours - expected).norm()) <= 1e-6 * float(expected.norm()) + 1e-7, name


def texts_by_tokens(source: Path, tokenizer: Any) -> dict[tuple[int, ...], tuple[str, str]]:
    """Which pair has these tokens, cut to the length of a sequence."""
    lines = source.read_text().splitlines()
    rows = list(csv.DictReader(lines)) if source.suffix == ".csv" else [json.loads(line) for line in lines]
    pairs = [(row["premise"], row["hypothesis"]) for row in rows]
    return {tuple(tokenizer(*pair, **CUT).input_ids): pair for pair in pairs}
