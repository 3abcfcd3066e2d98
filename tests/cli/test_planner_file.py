"""The planner as one file: an answer for each position of its sliders, each what the command line prints."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flopwise.base.errors import FlopwiseError
from flopwise.cli import app

MOST_BYTES = 2_000_000
pytestmark = pytest.mark.slow  # some hundred predictions, and the same devices around each


def ask(line: str) -> str:
    found = CliRunner().invoke(app, shlex.split(line))
    assert found.exit_code == 0, found.output
    return found.stdout


def planner_of(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    planner: dict[str, Any] = json.loads(found[1])["planner"]
    return planner


def cells_by_words(planner: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Position of the sliders → cell, by the order that the scripts read them in."""
    axes, cells = planner["grid"]["axes"], planner["grid"]["cells"]
    found = {}
    for place, cell in enumerate(cells):
        words, rest = [], place
        for axis in reversed(axes):
            rest, at = divmod(rest, len(axis["values"]))
            words.append(axis["values"][at])
        found[tuple(reversed(words))] = cell
    return found


def test_each_position_has_what_its_own_command_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ask("predict gpt2 --on rtx-4090 --precision bf16 --set layers=6 -o html") == "predict.html\n"
    planner = planner_of(tmp_path / "predict.html")
    assert [axis["name"] for axis in planner["grid"]["axes"]] == ["gpus", "seq", "batch_tokens"]
    cells = cells_by_words(planner)
    assert len(cells) > 50
    answered = [(words, cell) for words, cell in cells.items() if cell["kind"] == "predicted"]
    # Some of all: each is asked anew by the line that stands beside it.
    for words, cell in answered[:: len(answered) // 6]:
        assert "--set layers=6" in cell["command"] and "--precision bf16" in cell["command"]
        alone = json.loads(ask(f"{cell['command'].removeprefix('flopwise ')} -o json"))
        for name in ("step_s", "tokens_per_s", "mfu", "hfu"):
            assert cell[name] == alone[name], (words, name)
        assert cell["fit"]["total"] == alone["device_bytes"]["total"]
    refused = [cell for cell in cells.values() if cell["kind"] == "refused"]
    assert all(cell["what"] for cell in refused)
    # Several values are those of the slider, and what was left open stays out of the line.
    ask("predict gpt2,bert-base --on h200,rtx-4090 --seq 256,512 --batch 8,16 -o html")
    planner = planner_of(tmp_path / "predict.html")
    axes = {axis["name"]: axis["values"] for axis in planner["grid"]["axes"]}
    assert axes == {
        "model": ["gpt2", "bert-base"],
        "on": ["h200", "rtx-4090"],
        "gpus": ["1", "2", "4", "8"],
        "seq": ["256", "512"],
        "batch": ["8", "16"],
    }
    cell = cells_by_words(planner)[("bert-base", "rtx-4090", "1", "512", "16")]
    assert cell["command"] == "flopwise predict bert-base --on rtx-4090 --seq 512 --batch 16"


def test_a_page_from_a_measured_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step's own set-up left open is of the first position, and stays so beside all others."""
    monkeypatch.chdir(tmp_path)
    ask("predict llama-3-1b --on h200 --gpus 2,4 --seq 4k,8k --batch 16 --anchor mfu=0.3@batch=8 -o html")
    cells = cells_by_words(planner_of(tmp_path / "predict.html"))
    for cell in list(cells.values())[::7]:
        assert "--anchor 'mfu=0.3@batch=8 gpus=2 seq=4096'" in cell["command"]
        alone = json.loads(ask(f"{cell['command'].removeprefix('flopwise ')} -o json"))
        assert (cell["step_s"], cell["mfu"]) == (alone["step_s"], alone["mfu"])
        assert any("measured step" in note for note in alone["notes"])
    asked = "plan llama-3-1b --on h100-sxm --gpus 2 --seq 2k --batch 8 --anchor mfu=0.3@batch=8"
    assert ask(f"{asked} -o html").endswith("plan.html\n")
    (cell,) = planner_of(tmp_path / "plan.html")["grid"]["cells"]
    assert cell["step_s"] == json.loads(ask(f"{asked} -o json"))["prediction"]["step_s"]


def test_plans_under_caps_and_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = "plan gpt2 --on rtx-4090 --seq 1k --batch 8"
    assert ask(f"{asked} --device-mem 1,4GiB --host-mem 8GiB -o html") == "plan.html\n"
    planner = planner_of(tmp_path / "plan.html")
    cells = cells_by_words(planner)
    assert list(cells) == [("1GiB",), ("4GiB",)]
    alone = json.loads(ask(f"{asked} --device-mem 4GiB --host-mem 8GiB -o json"))
    cell = cells[("4GiB",)]
    assert cell["step_s"] == alone["forecast"]["step_s"] and cell["mfu"] == alone["forecast"]["mfu"]
    assert cell["step"]["end_ns"] > 0 and len(cell["around"]["devices"]) > 10

    ask(f"{asked} --device-mem 4GiB --host-mem 8GiB -w plan.toml")
    assert ask("predict plan.toml -o html") == "predict.html\n"
    (cell,) = planner_of(tmp_path / "predict.html")["grid"]["cells"]
    assert cell["step_s"] == alone["forecast"]["step_s"] and cell["command"] == "flopwise predict plan.toml"
    refused = CliRunner().invoke(app, shlex.split(f"{asked} -o html -w plan.toml"))
    assert isinstance(refused.exception, FlopwiseError)

    # What fits nowhere is refused as ever; where other caps would do, they are shown, and it counts as no fit.
    nowhere = CliRunner().invoke(
        app, shlex.split("plan llama-3-8b --on rtx-4090 --device-mem 1,2GiB --host-mem 1GiB -o html")
    )
    assert isinstance(nowhere.exception, FlopwiseError) and "no plan fits" in str(nowhere.exception)
    tight = CliRunner().invoke(app, shlex.split(f"{asked} --device-mem 4GiB,100MiB --host-mem 8GiB -o html"))
    assert tight.exit_code == 1 and "plan.html" in tight.stdout
    kinds = {words: cell["kind"] for words, cell in cells_by_words(planner_of(tmp_path / "plan.html")).items()}
    assert kinds == {("4GiB",): "planned", ("100MiB",): "refused"}
