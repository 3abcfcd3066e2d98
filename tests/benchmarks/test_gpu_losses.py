"""The comparison of losses, with a model that a processor trains in a moment."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
import torch

from benchmarks import gpu_losses
from flopwise.base.files import to_toml
from flopwise.catalog.load import load_hardware, model_table
from flopwise.setup.training import Training
from flopwise.work.transformer import Transformer
from tests.engine.test_fp8_training import sixteens


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
        ["mean", "of", "the", "last", "3", "steps", "2.6667", "2.8333", "2.4667", "+6.250", "-7.500"],
    ]


def test_the_table_says_whose_mean_it_ends_with_and_fits_a_terminal() -> None:
    lines = gpu_losses.told({way: [2.0] * 50 for way in gpu_losses.WAYS})
    assert lines[-1].strip().startswith("mean of the last 10 steps ")
    assert {len(line) for line in lines} == {80}
    assert gpu_losses.told({"bf16": [1.0]})[-1].split()[:5] == ["mean", "of", "the", "last", "step"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        pytest.param("--model nope", "no model is called 'nope'", id="unknown-model"),
        pytest.param("--model {hardware}", "describes hardware, not a model", id="hardware-file"),
        pytest.param("--model {broken}", "is not valid TOML", id="broken-file"),
        pytest.param("--model {small}", "too few", id="vocabulary"),
        pytest.param("--model lstm-lm", "lstm-lm does not foretell", id="lstm"),
        pytest.param("--model bert-base", "bert-base does not foretell", id="classifier"),
        pytest.param("--model gpt2 --seq 4096", "learned positions for 1,024 tokens", id="positions"),
        pytest.param("--steps 0", "--steps cannot be 0", id="steps"),
        pytest.param("--steps -3", "--steps cannot be -3", id="negative-steps"),
        pytest.param("--seq 0", "--seq cannot be 0", id="sequence"),
        pytest.param("--batch 0", "--batch cannot be 0", id="batch"),
        pytest.param("--rate nan", "--rate cannot be nan", id="rate"),
        pytest.param("--device-gib 1e300", "--device-gib cannot be 1e+300", id="memory-beyond-reason"),
        pytest.param("--ways bf16,fp9", "no way is called 'fp9'", id="way"),
        pytest.param("--ways ,", "nothing to train", id="no-way"),
    ],
)
def test_a_mistake_is_told_in_words_before_anything_is_written(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"{name}.toml" for name in ("hardware", "broken", "small")}
    files["hardware"].write_text(to_toml(load_hardware("h200")))
    files["broken"].write_text("x = [")
    files["small"].write_text(to_toml_model(replace(sixteens("llama"), vocab=100)))
    output = tmp_path / "output"
    error = refused(["--output", str(output), *words.format(**files).split()], capsys)
    assert told in error and "hint: " in error
    assert not output.exists()


def test_what_does_not_fit_is_told_before_anything_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(["--output", str(tmp_path), "--device", "cpu", "--device-gib", "0.001"], capsys)
    assert "no plan fits llama-3-1b" in error and "hint: a larger --device-gib" in error
    assert list(tmp_path.iterdir()) == []


def test_losses_of_an_earlier_run_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "losses.csv").write_text("step,reference\n1,2.5\n", encoding="utf-8")
    told = refused(["--output", str(tmp_path), "--device", "cpu", "--steps", "1"], capsys)
    assert "losses.csv is there already" in told and "hint: --output" in told
    assert (tmp_path / "losses.csv").read_text(encoding="utf-8") == "step,reference\n1,2.5\n"


def test_an_output_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    assert "it is a file, not a folder" in refused(["--output", str(path), "--device", "cpu"], capsys)
    assert path.read_text() == "mine"


def test_a_gpu_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "there is no GPU" in refused(["--output", str(tmp_path / "o"), "--device", "cuda"], capsys)
    assert not (tmp_path / "o").exists()


def test_what_is_trained_unless_told() -> None:
    parser = gpu_losses.parser()
    case = gpu_losses.case_of(parser.parse_args(["--output", "x", "--device", "cpu"]))
    assert (case.training.learning_rate, case.training.steps, case.training.warmup_steps) == (1e-4, 50, 10)
    assert case.device.type == "cpu"
    assert gpu_losses.ways_of("fp8, bf16,fp8") == ("fp8", "bf16")
    assert all(action.help for action in parser._actions)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says on stderr when it exits with 2."""
    with pytest.raises(SystemExit) as ended:
        gpu_losses.main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and "Traceback" not in said.err
    return said.err


def to_toml_model(model: Transformer) -> str:
    return tomli_w.dumps(model_table(model))
