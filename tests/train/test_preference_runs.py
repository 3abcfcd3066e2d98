"""DPO from the command's request to a checkpoint: what is told, recorded, resumed and predicted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flopwise.base.errors import FlopwiseError
from flopwise.records.measurement import RunRecord
from flopwise.store.runs import read_steps
from flopwise.train.request import TrainRequest, check_request
from flopwise.train.running import run
from tests.support.data_files import json_lines
from tests.support.tiny_folders import chat_folder

BETA, RATE = 0.4, 5e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        rows = [
            {"prompt": f"{number} + 1 = ", "chosen": f"{number + 1}", "rejected": "?" * (1 + number % 5)}
            for number in range(12)
        ]
        json_lines(place / "pairs.jsonl", rows)
        json_lines(place / "held.jsonl", rows[:3])
        chat_folder(place / "base")
        yield place


def trained(folder: Path, **asked: Any) -> tuple[RunRecord, Path]:
    request = {
        "model": str(folder / "base"),
        "task": "dpo",
        "device": "cpu",
        "steps": 4,
        "sequence_tokens": 64,
        "batch_sequences": 2,
        "learning_rate": RATE,
        "schedule": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "clip_norm": 0.0,
        "precision": "fp32",
        "dpo_beta": BETA,
        "data": (str(folder / "pairs.jsonl"),),
        "evaluation_data": (str(folder / "held.jsonl"),),
        "packing": False,
    }
    record = run(**{**request, "store": str(folder / "runs"), **asked})
    return record, folder / "runs" / record.id


def weights_of(record: RunRecord, place: Path, name: str = "model") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(place / str(record.checkpoint) / f"{name}.safetensors")
    return found


def trl_step(network: Any, reference: Any, batch: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """TRL's sigmoid loss: every answer in a forward pass of its own."""
    deltas, rewards = [], []
    for row, counts in enumerate(batch.documents):
        ends = counts.cumsum()
        gains = []
        for first, last in zip(ends - counts, ends, strict=True):
            ids = torch.from_numpy(batch.ids[row, first:last]).long()[None]
            labels = torch.from_numpy(batch.labels[row, first:last]).long()
            there = labels >= 0

            def score(model: Any, ids: Any = ids, labels: Any = labels, there: Any = there) -> torch.Tensor:
                found: torch.Tensor = (
                    model(ids).logits[0, there].log_softmax(-1).gather(1, labels[there][:, None]).sum()
                )
                return found

            with torch.no_grad():
                known = score(reference)
            gains.append(BETA * (score(network) - known))
        deltas.append(gains[0] - gains[1])
        rewards.append([float(each.detach()) for each in gains])
    means = torch.tensor(rewards).mean(0).tolist()
    accuracy = sum(float(each.detach()) > 0 for each in deltas) / len(deltas)
    return -torch.nn.functional.logsigmoid(torch.stack(deltas)).mean(), {
        "chosen": means[0],
        "rejected": means[1],
        "margin": means[0] - means[1],
        "accuracy": accuracy,
    }


def test_a_run_is_trl_s_step_by_step(folder: Path) -> None:
    """Losses, rewards and weights, on transformers' network with torch's AdamW."""
    from transformers import AutoModelForCausalLM

    from flopwise.engine.data.preferences import open_preference_data
    from flopwise.engine.data.request import DataRequest

    record, place = trained(folder)
    data = open_preference_data(
        DataRequest(
            sources=(str(folder / "pairs.jsonl"),),
            evaluation=(str(folder / "held.jsonl"),),
            tokenizer=str(folder / "base"),
            sequence_tokens=64,
            vocab=400,
            pairs=True,
        )
    )
    data.lay_out(packed=False)
    network, reference = (AutoModelForCausalLM.from_pretrained(folder / "base") for _ in range(2))
    network.eval()  # type: ignore[no-untyped-call]
    reference.eval()  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in read_steps(place):
        loss, rewards = trl_step(network, reference, data.batch(2 * (step.step - 1), 2))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert step.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert step.rewards == pytest.approx(rewards, rel=1e-3, abs=1e-5)
    first = read_steps(place)[0]
    # The model begins as its own reference.
    assert first.loss == pytest.approx(math.log(2), rel=1e-6)
    for name, values in weights_of(record, place).items():
        assert torch.allclose(values, network.state_dict()[name], rtol=1e-3, atol=2e-5), name
    assert record.task == "dpo"
    assert record.data["pairs"] == 12
    assert {"eval_loss", "eval_accuracy", "eval_rewards_margin"} <= record.metrics.keys()
    assert "eval_perplexity" not in record.metrics


@pytest.mark.parametrize("lora", [None, 4])
def test_a_run_that_is_resumed_has_the_same_reference(folder: Path, lora: int | None) -> None:
    name = "model" if lora is None else "adapter_model"
    straight, straight_place = trained(folder, lora=lora, packing=True)
    half, place = trained(folder, lora=lora, packing=True, steps=2)
    resumed = run(resume=half.id, steps=4, store=str(folder / "runs"))
    expected = weights_of(straight, straight_place, name)
    assert all(torch.equal(values, expected[key]) for key, values in weights_of(resumed, place, name).items())
    if lora is not None:
        # What is trained lies beside the model that the answers are compared with.
        assert json.loads((place / str(resumed.checkpoint) / "adapter_config.json").read_text())["r"] == lora


def test_what_is_no_comparison_is_refused(folder: Path) -> None:
    for asked, words in (
        ({"task": "language", "dpo_beta": 0.2}, "--beta, and the task is language"),
        ({"dpo_beta": 0.0}, "beta of DPO"),
        ({"dpo_label_smoothing": 0.5}, "the wrong way round"),
        ({"model": "bert-base"}, "cannot be trained on preferences"),
    ):
        with pytest.raises(FlopwiseError, match=words):
            trained(folder, **asked)
    with pytest.raises(FlopwiseError, match="several devices"):
        check_request(TrainRequest(task="dpo", devices=2))
