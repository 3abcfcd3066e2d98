"""The comparison of losses, with a model that a processor trains in a moment."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_losses
from flopwise.core.training import Training
from tests.test_fp8_training import sixteens


def test_three_trainings_begin_alike_and_stay_near(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = 12
    case = gpu_losses.Case(
        model=replace(sixteens("llama"), context=64),
        sequence_tokens=64,
        batch_sequences=4,
        training=Training(steps=steps, learning_rate=3e-3, warmup_steps=2, stochastic_rounding=True),
        device=torch.device("cpu"),
        device_bytes=1 << 30,
        micro_batch_sequences=2,
    )
    losses = gpu_losses.compared(case, tmp_path)
    assert list(losses) == ["reference", "bf16", "fp8"]
    reference, bf16, fp8 = (losses[way] for way in gpu_losses.WAYS)
    assert reference[-1] < 0.8 * reference[0]
    assert bf16 == pytest.approx(reference, rel=0.01)
    assert fp8 == pytest.approx(reference, rel=0.03)
    assert bf16 != fp8
    with (tmp_path / "losses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, steps + 1))
    assert [float(row["fp8"]) for row in rows] == fp8
    assert capsys.readouterr().out.count("12 steps") == 3


def test_the_table_tells_means_and_differences() -> None:
    lines = gpu_losses.told({"reference": [4.0, 2.0, 2.0], "bf16": [4.0, 2.0, 2.5], "fp8": [4.4, 2.0, 1.0]})
    assert lines[0].split() == ["step", "reference", "bf16", "fp8", "bf16", "%", "fp8", "%"]
    assert [line.split() for line in lines[1:]] == [
        ["1", "4.0000", "4.0000", "4.4000", "+0.000", "+10.000"],
        ["2", "2.0000", "2.0000", "2.0000", "+0.000", "+0.000"],
        ["3", "2.0000", "2.5000", "1.0000", "+25.000", "-50.000"],
        ["last", "3", "2.6667", "2.8333", "2.4667", "+6.250", "-7.500"],
    ]
