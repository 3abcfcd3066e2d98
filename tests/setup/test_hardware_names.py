"""What is said of hardware that is no hardware, of formats that it lacks, and in which unit its peak is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml
from flopwise.catalog.load import hardware_place, load_hardware, load_model
from flopwise.predict.choose import settle_sizes
from flopwise.report.device_plans import device_plan_document
from flopwise.setup.hardware import Fact, Hardware
from flopwise.setup.setup import Setup
from flopwise.work.formats import POLICIES
from tests.cli.test_cli_fuzz import answered
from tests.report.test_device_plan_report import folded, some_planned
from tests.support.printing import shown


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_is_no_hardware(folder: Path) -> None:
    (folder / "things").mkdir()
    with pytest.raises(FlopwiseError, match="things is a folder, not hardware") as caught:
        load_hardware("things")
    assert caught.value.why == "hardware is a name of the catalogue or a TOML file"
    assert "config.json" not in str(caught.value)
    # A model's folder is told from it.
    (folder / "things/config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    with pytest.raises(FlopwiseError, match="describes a model, not hardware"):
        load_hardware("things")


@pytest.mark.parametrize("name", ["mine", "./mine", "both"])
def test_a_file_without_its_ending_is_guessed(folder: Path, name: str) -> None:
    (folder / "mine.toml").write_text(to_toml(load_hardware("h200")), encoding="utf-8")
    (folder / "both.toml").write_text(to_toml(load_hardware("h200")), encoding="utf-8")
    (folder / "both").mkdir()
    with pytest.raises(FlopwiseError) as caught:
        load_hardware(name)
    assert f"did you mean {Path(name)}.toml?" in str(caught.value.why).replace("./", "")


def test_names_stay_and_paths_are_told_in_full(folder: Path) -> None:
    (folder / "h200").mkdir()
    assert [hardware_place(name) for name in ("h200", "H200", "this-cpu", "nvidia-h200")] == [
        *("h200", "h200", "this-cpu", "h200")
    ]
    assert hardware_place("mine.toml") == hardware_place("./mine.toml") == str(folder / "mine.toml")


def without_bf16() -> Hardware:
    h200 = load_hardware("h200")
    return replace(h200, device=replace(h200.device, peak_flops={"fp32": Fact(value=1e11, source="datasheet")}))


@pytest.mark.parametrize("precision", ["fp8", "bf16", "tf32"])
def test_the_format_that_was_asked_for_is_named(precision: str) -> None:
    with pytest.raises(FlopwiseError, match=f"no peak for {precision} matrix products"):
        settle_sizes(Setup(model=load_model("gpt2"), hardware=without_bf16(), formats=POLICIES[precision]))


def test_a_plan_in_a_format_that_a_cpu_lacks(folder: Path) -> None:
    source = to_toml(without_bf16()).replace('kind = "gpu"', 'kind = "cpu"')
    (folder / "cpu.toml").write_text(source, encoding="utf-8")
    code, _, err = answered(["plan", "gpt2", "--precision", "fp8", "--seq", "64", "--on", "cpu.toml"])
    assert code == 2 and "has no peak for fp8 matrix products" in err


@pytest.mark.parametrize(("peak", "words"), [(100.8e9, "101 GFLOP/s"), (989e12, "989 TFLOP/s")], ids=["a-cpu", "a-gpu"])
def test_a_peak_is_told_in_a_unit_of_its_size(peak: float, words: str) -> None:
    found = some_planned()
    found = replace(found, forecast=replace(found.forecast, peak_flops=peak))
    assert f"against {words} dense bf16" in folded(shown(device_plan_document(found, "A device"), 120))
