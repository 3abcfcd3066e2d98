"""Trainings and plans beside a hardware file of one's own: it moves, it is gone, it is another device's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwise.core.catalog import load_plan, model_table, plan_table
from flopwise.core.errors import FlopwiseError
from flopwise.core.files import to_toml
from flopwise.core.hardware import Fact, Hardware
from flopwise.core.measurement import RunRecord
from flopwise.profile import this_machine
from flopwise.train import Callback, Started
from flopwise.train.running import run

from .test_cli_fuzz import answered
from .test_train_run import TINY


@pytest.fixture(scope="module")
def cpu() -> Iterator[Hardware]:
    """This machine's, measured once."""
    found = this_machine.this_cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(this_machine, "this_cpu", lambda: found)
        yield found


@pytest.fixture
def folder(cpu: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model, a text, and two files that describe this CPU."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(to_toml(model_table(TINY)), encoding="utf-8")
    Path("text.txt").write_text("To be, or not to be, that is the question. " * 200, encoding="utf-8")
    for name in ("mine", "other"):
        Path(f"{name}.toml").write_text(to_toml(replace(cpu, name=name)), encoding="utf-8")
    return tmp_path


def trained(**changes: Any) -> RunRecord:
    plain: dict[str, Any] = {
        "data": ("text.txt",),
        "steps": 1,
        "sequence_tokens": 16,
        "batch_sequences": 2,
        "device": "cpu",
    }
    return run(**{**plain, **changes})


class Notes(Callback):
    def __init__(self) -> None:
        self.notes: tuple[str, ...] = ()

    def on_start(self, started: Started) -> None:
        self.notes = started.notes


def hardware_of(record: RunRecord) -> str:
    assert record.measurement is not None
    return str(record.measurement.hardware)


def test_a_run_goes_on_with_a_file_that_was_moved(folder: Path) -> None:
    first = trained(model="tiny.toml", on="mine.toml")
    assert load_plan(Path("runs") / first.id / "plan.toml")[0].hardware == str(folder / "mine.toml")
    Path("mine.toml").rename("moved.toml")
    with pytest.raises(FlopwiseError, match=f"the hardware of run {first.id} is described in .*mine.toml") as caught:
        run(resume=first.id, steps=2)
    assert caught.value.hint and "--on this-machine" in caught.value.hint
    # In the place of the run's own.
    second = run(resume=first.id, steps=2, on="moved.toml")
    assert (hardware_of(second), second.steps_done) == ("mine", 2)
    assert second.request["on"] == str(folder / "moved.toml")
    # From now on that is where it is looked for, and the plan's place is no longer the old one.
    heard = Notes()
    assert hardware_of(run(resume=first.id, steps=3, callbacks=[heard])) == "mine"
    assert not any("compared" in note for note in heard.notes)
    Path("moved.toml").unlink()
    assert hardware_of(run(resume=first.id, steps=4, on="this-machine")) == "this-cpu"


@pytest.mark.usefixtures("folder")
def test_a_run_goes_on_beside_a_file_of_this_device_alone() -> None:
    first = trained(model="tiny.toml")
    with pytest.raises(FlopwiseError, match="--on h200 describes NVIDIA H200"):
        run(resume=first.id, steps=2, on="h200")
    assert hardware_of(run(resume=first.id, steps=2, on="other.toml")) == "other"


def planned(*words: str) -> str:
    """The hardware in the file of a plan that was asked for."""
    code, _, err = answered(
        ["plan", "tiny.toml", "--seq", "16", "--batch", "2", "--precision", "fp32", *words, "-w", "p.toml"]
    )
    assert code == 0, err
    return load_plan(Path("p.toml"))[0].hardware


def test_a_plan_names_a_file_in_full_and_the_catalogue_by_name(folder: Path) -> None:
    assert planned("--on", "mine.toml") == str(folder / "mine.toml")
    assert planned("--on", "mine.toml", "--recompute", "none") == str(folder / "mine.toml")
    assert planned("--on", "h200") == planned("--on", "h200", "--recompute", "none") == "h200"
    assert planned("--on", "this-cpu") == "this-cpu"


def test_a_plan_beside_on_needs_no_file_of_its_own(folder: Path) -> None:
    planned("--on", "mine.toml")
    Path("mine.toml").unlink()
    settled: dict[str, Any] = {"model": "p.toml", "sequence_tokens": None}
    with pytest.raises(FlopwiseError, match="the plan's hardware: there is no file") as caught:
        trained(**settled)
    assert caught.value.hint and "--on" in caught.value.hint
    heard = Notes()
    assert hardware_of(trained(**settled, on="other.toml", callbacks=[heard])) == "other"
    assert any("is not compared with other: there is no file" in note for note in heard.notes)
    # What it takes is still looked at.
    plan, model = load_plan(Path("p.toml"))
    large = replace(plan, expected=None, device_memory_bytes=2**60)
    (folder / "large.toml").write_text(to_toml(plan_table(large, model)), encoding="utf-8")
    with pytest.raises(FlopwiseError, match=r"the plan takes .* of device memory"):
        trained(model="large.toml", sequence_tokens=None, on="other.toml")


def test_a_plan_for_another_device_of_the_same_name_is_refused(folder: Path, cpu: Hardware) -> None:
    memory = replace(cpu.device.dram, size_bytes=Fact(value=4 * cpu.device.dram.size_bytes.value, source="system"))
    larger = replace(cpu, device=replace(cpu.device, memory=(*cpu.device.memory[:-1], memory)))
    (folder / "larger.toml").write_text(to_toml(larger), encoding="utf-8")
    planned("--on", "larger.toml")
    with pytest.raises(FlopwiseError, match="the plan is for"):
        trained(model="p.toml", sequence_tokens=None)
    assert trained(model="p.toml", sequence_tokens=None, anywhere=True).state == "done"
