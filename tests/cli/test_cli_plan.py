"""`flopwise plan` and `flopwise predict` for several devices, as a user types them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_plan
from flopwise.cli import app
from flopwise.records.cluster_plan import ClusterPlan

RUN = CliRunner()
SMALL = ("plan", "llama-3-1b", "--on", "h100-sxm", "--gpus", "8", "--seq", "2k", "--batch", "32")


def _out(*words: str) -> str:
    result = RUN.invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_plan_has_the_answer_and_the_reasons() -> None:
    page = _out(*SMALL)
    for words in ("8 × NVIDIA H100", "memory of a device", "time of a step", "what if", "one more node", "slower"):
        assert words in page
    assert "strategies, " in page
    assert "of them timed" in page


@pytest.mark.parametrize("columns", ["80", "120"])
def test_a_page_keeps_to_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for line in _out(*SMALL).splitlines():
        if not line.startswith(("dp", "tp", "pp", "cp", "strategy", "llama")):
            assert len(line) <= int(columns)


def test_json_is_the_same_twice_and_whole() -> None:
    first, second = (_out(*SMALL, "-o", "json") for _ in range(2))
    assert first == second
    record = json.loads(first)
    assert record["evaluated"] >= record["fitting"] >= record["timed"] > 0
    best = record["strategies"][0]
    assert best["slower"] == 0
    assert record["prediction"]["parallel"] == best["parallel"]
    # Strategies are ranked by what kernels and network allow; a framework takes longer.
    assert record["prediction"]["ceiling_s"] == pytest.approx(best["step_s"])
    assert record["prediction"]["step_s"] > best["step_s"]


def test_one_device_and_host_memory() -> None:
    page = _out("plan", "llama-3-1b", "--on", "h100-sxm", "--seq", "2k", "--batch", "8")
    assert "1 × NVIDIA H100" in page
    assert "fits" in page
    words = ("plan", "llama-3-3b", "--on", "rtx-4090", "--gpus", "1", "--seq", "2k", "--batch", "4", "--offload")
    record = json.loads(_out(*words, "-o", "json"))
    best, prediction = record["strategies"][0], record["prediction"]
    assert best["parallel"]["offload_optimizer"]
    assert prediction["fits"]
    assert prediction["device_bytes"]["optimizer"] == 0
    # Two moments of 2 bytes for each of 3.2 billion parameters.
    assert prediction["host_bytes"] >= 4 * prediction["n_params"]
    assert prediction["device_bytes"]["total"] == pytest.approx(best["device_bytes"], abs=1)
    assert "of host memory" in _out(*words)


def test_a_target_that_cannot_be_written_is_told_before_the_search(tmp_path: Path) -> None:
    for target in (tmp_path, tmp_path / "nowhere" / "plan.toml"):
        result = RUN.invoke(app, [*SMALL, "-w", str(target)])
        assert isinstance(result.exception, FlopwiseError)
        assert result.stdout == ""


def test_csv_and_markdown() -> None:
    lines = _out(*SMALL, "-o", "csv").splitlines()
    assert lines[0].startswith("strategy,data,tensor,")
    assert len(lines) > 2
    assert _out(*SMALL, "-o", "md").startswith("| strategy")


def test_a_plan_is_written_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    result = RUN.invoke(app, [*SMALL, "-o", "json", "-w", str(file)])
    assert result.exit_code == 0
    plan, model = load_plan(file)
    assert tomllib.loads(file.read_text())["model"]["name"] == model.name == "llama-3-1b"
    assert isinstance(plan, ClusterPlan)
    assert plan.devices == plan.parallel.devices == 8
    assert plan.expected is not None
    assert plan.expected.step_s == json.loads(result.stdout)["prediction"]["step_s"]
    again = json.loads(_out("predict", str(file), "-o", "json"))
    planned = json.loads(result.stdout)["prediction"]
    # What the plan chose is given now.
    assert again | {"chosen": planned["chosen"]} == {"schema": "flopwise.prediction/1", **planned}
    refused = RUN.invoke(app, ["predict", str(file), "--gpus", "16"])
    assert isinstance(refused.exception, FlopwiseError)
    assert "a plan says all of it" in str(refused.exception)
    text = file.read_text()
    file.write_text(text.replace("devices = 8", "devices = 16"))
    with pytest.raises(FlopwiseError, match="the plan is for 16 devices"):
        load_plan(file)
    asked = RUN.invoke(app, ["plan", str(file)])
    assert "is a plan, not a model" in str(asked.exception)
    file.write_text(text.replace("[parallel]", "[other]"))
    with pytest.raises(FlopwiseError, match="is not a plan"):
        load_plan(file)


def test_what_a_plan_prints_is_what_predict_takes() -> None:
    record = json.loads(_out(*SMALL, "-o", "json"))
    best, prediction = record["strategies"][0], record["prediction"]
    label = _out(*SMALL, "-o", "csv").splitlines()[1].split(",")[0]
    words = ["predict", *SMALL[1:], "--parallel", label, "--micro", str(best["micro_batch_sequences"])]
    again = json.loads(_out(*words, "--recompute", best["recompute"], "-o", "json"))
    assert again["step_s"] == prediction["step_s"]


def test_predict_for_several_devices_shards_by_default() -> None:
    record = json.loads(_out("predict", "llama-3-8b", "--on", "h100-sxm", "--gpus", "8", "-o", "json"))
    assert record["parallel"]["data"] == 8
    assert record["parallel"]["zero"] == 3
    page = _out("predict", "llama-3-8b", "--on", "h100-sxm", "--gpus", "16", "--parallel", "tp8 pp2 zero1")
    for words in ("16 × NVIDIA H100", "stage 1 of 2", "pipeline bubble", "✓ fits"):
        assert words in page
    both = _out("predict", "llama-3-8b", "--on", "h100-sxm,a100-80gb", "--gpus", "8")
    assert "8 devices · dp8 zero3" in both


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "many"], "--gpus"),
        (["--gpus", "5000000"], "from 1 to 1,000,000"),
        (["--gpus", "8", "--stack", "nothing-like-it"], "nothing-like-it"),
        (["--gpus", "8", "--parallel", "tp16"], "--parallel"),
        (["--gpus", "8", "--parallel", "wide"], "cannot read 'wide'"),
        (["--gpus", "8", "--batch", "4"], "less than one for each of 8"),
        (["--gpus", "8", "--batch", "16", "--micro", "3"], "larger than a data rank's 2"),
        (["--gpus", "8", "--set", "layers=1000000"], "layer by layer"),
    ],
)
def test_mistakes_are_told(words: list[str], said: str) -> None:
    result = RUN.invoke(app, ["predict", "llama-3-1b", "--on", "h100-sxm", "--seq", "2k", *words])
    assert isinstance(result.exception, FlopwiseError)
    assert said in str(result.exception)
    assert result.exception.hint


def test_nothing_fits_exits_with_one() -> None:
    result = RUN.invoke(app, ["plan", "gpt-3-175b", "--on", "h100-sxm", "--gpus", "8", "--seq", "2k"])
    assert isinstance(result.exception, FlopwiseError)
    assert result.exception.exit_code == 1


def test_a_stack_of_ones_own_has_no_measurements(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    _out("show", "llm-foundry", "-w", str(file))
    words = ["predict", "mpt-7b", "--on", "h100-sxm", "--gpus", "8", "--seq", "2k", "--batch", "64", "-o", "json"]
    shipped, same = (json.loads(_out(*words, "--stack", stack)) for stack in ("llm-foundry", str(file)))
    assert shipped["interval"]["outside"] == same["interval"]["outside"] == []
    file.write_text(re.sub(r"(\[constants\.products\]\nvalue = )[\d.]+", r"\g<1>5.0", file.read_text()))
    changed = json.loads(_out(*words, "--stack", str(file)))
    assert changed["interval"]["outside"] == ["stack llm-foundry of a file"]
    assert changed["step_s"] > shipped["step_s"]


def test_no_network_is_told() -> None:
    result = RUN.invoke(app, ["plan", "llama-3-1b", "--on", "this-cpu", "--gpus", "4", "--seq", "2k"])
    assert isinstance(result.exception, FlopwiseError)
    assert result.exception.hint


@pytest.mark.parametrize("option", ["--write", "--trace", "--heatmap"])
def test_what_is_read_is_not_written_over(option: str, tmp_path: Path) -> None:
    hardware, model = tmp_path / "mine.toml", tmp_path / "tiny.toml"
    hardware.write_text(RUN.invoke(app, ["show", "h200"]).stdout, encoding="utf-8")
    model.write_text(RUN.invoke(app, ["show", "llama-3-1b"]).stdout, encoding="utf-8")
    (tmp_path / "link.toml").symlink_to(hardware)
    before = hardware.read_text(encoding="utf-8"), model.read_text(encoding="utf-8")
    for target in (hardware, model, tmp_path / "link.toml"):
        words = ["plan", str(model), "--on", str(hardware), "--seq", "2k", "--device-mem", "80GiB", option, str(target)]
        result = RUN.invoke(app, words)
        assert isinstance(result.exception, FlopwiseError)
        assert "would overwrite" in result.exception.what and option in str(result.exception.hint)
    assert (hardware.read_text(encoding="utf-8"), model.read_text(encoding="utf-8")) == before
