"""`flopwise design`: technology and power become the device that trains a model fastest, and predict takes it."""

from __future__ import annotations

import json
import math
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import ROOT, load_model
from flopwise.cli.design import parse_watts
from flopwise.predict import Setup
from flopwise.references.deepflow import PUBLISHED
from flopwise.references.design.search import PARTS, DesignQuestion, Search, blueprint_of, design_by_step
from tests.cli.test_cli_deepflow import told
from tests.cli.test_cli_fuzz import answered

OWN = """
source = "made up for the tests"
[technology]
name = "paper-3nm"
[technology.core]
energy_per_flop_j = { bf16 = 0.4e-12, fp32 = 3e-12, fp8 = 0.2e-12 }
unit_flops = 1e12
[technology.shared]
energy_per_bit_j = 1e-14
bank_bytes = 32768
bank_bytes_per_s = 1e11
[technology.l2]
energy_per_bit_j = 1e-13
bank_bytes = 524288
bank_bytes_per_s = 1e11
[technology.dram]
energy_per_bit_j = 4e-12
bank_bytes = 17179869184
bank_bytes_per_s = 0.8e12
[budget]
power_w = 700
"""
FEW = ["--starts", "1", "--iterations", "4"]


def designed(*words: str) -> dict[str, Any]:
    code, out, err = answered(["design", *words, "-o", "json"])
    assert code == 0, err
    answer = json.loads(out)
    assert isinstance(answer, dict)
    return answer


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return str(path)


def test_the_reference_s_search_is_repeated_and_outdone() -> None:
    answer = designed("lstm-lm", "--method", "deepflow")
    assert answer == designed("lstm-lm", "--method", "deepflow"), "the same every time"
    assert answer["step_s"] < 0.4 * answer["start_step_s"]
    assert answer["speedup"] == pytest.approx(answer["start_step_s"] / answer["step_s"])
    assert (answer["batch_sequences"], answer["sequence_tokens"], answer["precision"]) == (512, 20, "fp32")
    assert sum(answer["shares"].values()) == pytest.approx(1)
    assert sum(answer["start_shares"].values()) == pytest.approx(1)
    assert set(answer["shares"]) == set(PARTS)
    assert answer["evaluations"] > 100
    assert any("takes no notice" in note for note in answer["notes"])
    other = designed("lstm-lm", "--method", "deepflow", "--seed", "1")
    assert other["start_step_s"] == answer["start_step_s"]


@pytest.mark.parametrize("model", ["gpt2", "bert-base"])
def test_the_written_device_predicts_as_designed(model: str, tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    code, out, err = answered(["design", model, *FEW, "--batch", "16", "-w", str(path), "-o", "json"])
    assert code == 0
    assert f"wrote {path}" in err
    answer = json.loads(out)
    code, out, err = answered(["predict", model, "--on", str(path), "--batch", "16", "-o", "json"])
    assert code == 0, err
    prediction = json.loads(out)
    assert prediction["step_s"] == answer["step_s"]
    assert prediction["fits"] is answer["fits"] is True
    assert prediction["precision"] == answer["precision"] == "fp32"
    assert prediction["device_bytes"]["total"] == answer["device_bytes"]
    assert prediction["hardware"] == "device"
    assert answer["step_s"] < answer["start_step_s"]
    shown = answered(["show", str(path)])[1]
    assert f"Design search for {model} in deepflow-2019" in shown


def test_a_model_too_large_is_timed_as_if_it_fitted(tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    answer = designed("lstm-lm", *FEW, "--batch", "512", "-w", str(path))
    assert answer["fits"] is False
    assert (answer["micro_batch_sequences"], answer["recompute"]) == (512, "none")
    (note,) = [note for note in answer["notes"] if "as if it fitted" in note]
    assert "--micro 512 --recompute none" in note
    options = ["--batch", "512", "--micro", "512", "--recompute", "none", "-o", "json"]
    code, out, _ = answered(["predict", "lstm-lm", "--on", str(path), *options])
    assert code == 0
    assert json.loads(out)["step_s"] == answer["step_s"]


def test_a_technology_of_ours_chooses_bf16(own: str) -> None:
    answer = designed("llama-3-8b", "--technology", own, *FEW)
    assert (answer["precision"], answer["peak_format"]) == ("bf16", "bf16")
    assert "bf16" in answer["chosen"]["precision"]
    assert answer["power_w"] == 700
    assert answer["start_shares"] == dict.fromkeys(PARTS, 0.25)
    assert answer["fits"]
    assert answer["device"]["peak_flops"]["fp8"] == pytest.approx(2 * answer["device"]["peak_flops"]["bf16"])
    eight = designed("llama-3-8b", "--technology", own, *FEW, "--precision", "fp8", "--power", "1.4kW")
    assert eight["peak_format"] == "fp8"
    assert eight["power_w"] == 1400
    assert eight["step_s"] < answer["step_s"]


def test_the_width_of_a_number_decides_the_precision(tmp_path: Path) -> None:
    path = tmp_path / "narrow.toml"
    path.write_text("precision = 2\n")
    assert designed("gpt2", "--technology", str(path), *FEW)["precision"] == "bf16"
    path.write_text("precision = 1\n")
    assert "no number format" in told(["design", "gpt2", "--technology", str(path)])
    path.write_text("precision = 3\n")
    assert "number format of 3 bytes" in told(["design", "gpt2", "--technology", str(path)])


def test_several_devices_give_the_network_a_share(tmp_path: Path) -> None:
    path = tmp_path / "several.toml"
    path.write_text("dp = 4\n")
    answer = designed("lstm-lm", "--method", "deepflow", "--technology", str(path), *FEW)
    assert set(answer["shares"]) == {*PARTS, "network"}
    assert answer["device"]["network_bytes_per_s"] > 0


def test_a_start_without_memory_is_moved() -> None:
    blueprint = blueprint_of(PUBLISHED)
    assert blueprint.shares is not None
    starved = replace(blueprint.shares, core=0.9, shared=0.04, l2=0.04, dram=0.02)
    model = load_model("gpt2")
    question = DesignQuestion(
        blueprint=replace(blueprint, shares=starved),
        ask=lambda device: Setup(model=model, hardware=device, batch_sequences=8),
    )
    found = design_by_step(question, Search(starts=1, iterations=3))
    assert found.start_shares["dram"] > 0.02
    assert math.isfinite(found.design.start_seconds)
    assert found.prediction is not None
    assert found.prediction.fits
    assert any("too little memory" in note for note in found.notes)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_page_fits(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (["lstm-lm", "--method", "deepflow"], ["lstm-lm"], ["gpt2", "--power", "12.5kW"]):
        code, out, err = answered(["design", *words, *FEW])
        assert (code, err) == (0, "")
        assert max(map(len, out.splitlines())) <= columns
        assert "×" in out
        assert "…" not in out
        for name in ("core", "shared", "l2", "dram", "step", "tried"):
            assert any(line.startswith(name) for line in out.splitlines()), name


def test_no_file_is_left_where_it_cannot_be_written(tmp_path: Path) -> None:
    words = ["design", "lstm-lm", "--method", "deepflow", *FEW, "-w", str(tmp_path / "nowhere" / "device.toml")]
    assert "cannot write" in told(words)


MISTAKES = [
    (["gpt2", "--method", "deepflow"], "cannot predict gpt2"),
    (["lstm-lm", "--method", "deepflow", "--precision", "bf16"], "--precision means nothing"),
    (["gpt2", "--precision", "bf16"], "--precision fp32"),
    (["gpt2", "--seq", "4k"], "--seq 1024"),
    (["gpt2", "--seq", "x"], "--seq"),
    (["gpt2,bert-base"], "no model"),
    (["h100-sxm"], "is hardware"),
    (["gpt2", "--technology", "h100-sxm"], "no technology"),
    (["gpt2", "--technology", str(ROOT / "hardware" / "h200.toml")], "finished device"),
    (["gpt2", "--technology", str(ROOT)], "folder"),
    (["gpt2", "--technology", ""], "--technology is empty"),
    (["gpt2", "--power", "0"], "--power"),
    (["gpt2", "--power", "1e400"], "--power"),
    (["gpt2", "--power", "300V"], "300W"),
    (["gpt2", "--power", "1mW"], "buy no device"),
    (["gpt2", "--starts", "0"], "--starts"),
    (["gpt2", "--starts", "1e9"], "--starts"),
    (["gpt2", "--iterations", "9" * 5000], "--iterations"),
    (["gpt2", "--seed", "-1"], "--seed"),
    (["gpt2", "--set", "layers=0"], "layers"),
    (["gpt2", "-o", "csv"], "table, json"),
    (["gpt2", "--method", "magic"], "--method"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[" ".join(words)[:60] for words, _ in MISTAKES])
def test_mistakes_are_answered(words: list[str], expected: str) -> None:
    assert expected in told(["design", *words])


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("name = ", "nme = ", "did you mean name"),
        ("power_w = 700", "power_w = -1", "power_w"),
        ("[budget]\npower_w = 700", "", "budget"),
        ("bf16 = 0.4e-12", "bf17 = 0.4e-12", "bf17"),
        ("0.8e12", "'fast'", "bank_bytes_per_s"),
        ("power_w = 700", "power_w = 700\n[shares]\ncore = 0.9\nshared = 0.1\nl2 = 0.1\ndram = 0.1", "add up to"),
        ("0.8e12", "0.8e300", "buy no device"),
    ],
)
def test_mistakes_of_a_technology_are_answered(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in OWN
    path = tmp_path / "own.toml"
    path.write_text(OWN.replace(old, new))
    assert expected in told(["design", "gpt2", "--technology", str(path)])


def test_the_reference_s_formulas_need_its_file(own: str) -> None:
    assert "technology of ours" in told(["design", "lstm-lm", "--method", "deepflow", "--technology", own])


def test_power_is_read_with_its_unit() -> None:
    for text, watts in (("300", 300), ("300W", 300), (" 0.7 kW ", 700), ("5e2w", 500), (".5W", 0.5)):
        assert parse_watts(text) == watts


@given(st.text(max_size=8) | st.floats().map(str))
@settings(max_examples=200)
def test_any_power_is_read_or_refused(text: str) -> None:
    try:
        assert 0 < parse_watts(text) <= 1e6
    except FlopwiseError as error:
        assert error.hint


def test_a_bar_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a terminal of our own; the wait is set to nothing, so that no test has to take two seconds."""
    code = (
        "import sys, flopwise.cli.output as output\n"
        "output.BAR_AFTER_S = 0.0\n"
        "from flopwise.cli import main\n"
        "sys.argv = ['flopwise', 'design', 'lstm-lm', '--method', 'deepflow', '-o', 'json']\n"
        "main()\n"
    )
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    result = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, timeout=300, check=False
    )
    os.close(theirs)
    shown = os.read(ours, 2**16)
    os.close(ours)
    assert result.returncode == 0
    assert b"divisions" in shown
    assert json.loads(result.stdout) == designed("lstm-lm", "--method", "deepflow")
    assert answered(["design", "lstm-lm", "--method", "deepflow", *FEW])[2] == ""
