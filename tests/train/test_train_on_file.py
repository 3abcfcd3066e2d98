"""Trainings and plans beside a hardware file of one's own: it moves, it is gone, it is another device's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml
from flopwise.calibrate.calibrated import calibrate_hardware
from flopwise.catalog.load import load_hardware, load_plan, model_table, plan_table
from flopwise.profile.measure import this_machine
from flopwise.records.measurement import RunRecord
from flopwise.records.plan import Plan
from flopwise.setup.hardware import Fact, Hardware
from flopwise.train import Callback, Started, preparing
from flopwise.train.planning import given_plan
from flopwise.train.request import TrainRequest
from flopwise.train.running import run
from tests.cli.test_cli_fuzz import answered
from tests.support.calibrations import known_calibration
from tests.train.test_train_run import TINY


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
        self.hardware = ""
        self.checks: tuple[str, ...] = ()

    def on_start(self, started: Started) -> None:
        self.notes, self.hardware, self.checks = started.notes, started.hardware, started.checks


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
    heard = Notes()
    run(resume=first.id, steps=2, on="h200", anywhere=True, callbacks=[heard])
    assert heard.hardware.startswith("this machine's CPU, as planned for NVIDIA H200")
    assert hardware_of(run(resume=first.id, steps=3, on="other.toml")) == "other"


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


def test_a_plan_that_holds_more_than_it_may_is_refused(folder: Path) -> None:
    planned("--on", "mine.toml")
    plan, model = load_plan(Path("p.toml"))
    small = replace(plan, device_memory_bytes=1000)
    (folder / "small.toml").write_text(to_toml(plan_table(small, model)), encoding="utf-8")
    with pytest.raises(
        FlopwiseError, match=r"the plan holds .* of device memory, and its own cap is 1,?000 B"
    ) as caught:
        trained(model="small.toml", sequence_tokens=None)
    assert caught.value.hint and "device_memory_bytes" in caught.value.hint
    assert isinstance(plan, Plan)
    here = load_hardware("mine.toml")
    held, expected = given_plan(replace(plan, host_memory_bytes=10), TINY, here, None)
    preparing._within_caps((held, replace(expected, host_bytes=10)), TINY, here, anywhere=False)
    with pytest.raises(FlopwiseError, match=r"of host memory, and its own cap is 10\.0 B"):
        preparing._within_caps((held, replace(expected, host_bytes=11)), TINY, here, anywhere=False)
    assert trained(model="p.toml", sequence_tokens=None).state == "done"


def test_a_plan_for_another_device_of_the_same_name_is_refused(folder: Path, cpu: Hardware) -> None:
    memory = replace(cpu.device.dram, size_bytes=Fact(value=4 * cpu.device.dram.size_bytes.value, source="system"))
    larger = replace(cpu, device=replace(cpu.device, memory=(*cpu.device.memory[:-1], memory)))
    (folder / "larger.toml").write_text(to_toml(larger), encoding="utf-8")
    planned("--on", "larger.toml")
    with pytest.raises(FlopwiseError, match="the plan is for"):
        trained(model="p.toml", sequence_tokens=None)
    assert trained(model="p.toml", sequence_tokens=None, anywhere=True).state == "done"


@pytest.mark.usefixtures("folder")
def test_what_runs_elsewhere_than_it_is_planned_for_says_so() -> None:
    heard = Notes()
    trained(model="tiny.toml", on="h200", anywhere=True, callbacks=[heard])
    h200 = load_hardware("h200").title
    assert heard.hardware == f"this machine's CPU, as planned for {h200}"
    assert not any(h200 in check for check in heard.checks), "no H200 was checked"
    trained(model="tiny.toml", on="mine.toml", anywhere=True, callbacks=[heard])
    assert heard.hardware == load_hardware("mine.toml").title
    assert any(heard.hardware in check for check in heard.checks)


# -- a GPU, which is not here ------------------------------------------------------------------------------------------

H100, L40S = "NVIDIA H100 80GB HBM3", "NVIDIA L40S"
UNKNOWN = "NVIDIA Z9000"


def write_calibrated(base: str, device_name: str, memory_bytes: int, *, like: bool = False) -> None:
    """A file of `flopwise calibrate` on a card of that name, `measured.toml`."""
    hardware = load_hardware(base)
    timed = known_calibration(hardware, hardware.efficiency)
    # Few rows are fitted fast.
    timed = replace(timed, products=timed.products[:12], attentions=(), streams=timed.streams[:4])
    units = 100 if like else int(hardware.device.units.value)
    timed = replace(timed, device_name=device_name, units=units, memory_bytes=memory_bytes)
    found, _ = calibrate_hardware(hardware, timed, name="measured", date="2026-01-01", like=like)
    Path("measured.toml").write_text(to_toml(found), encoding="utf-8")


def accepted(monkeypatch: pytest.MonkeyPatch, card: str, memory_bytes: int, on: str) -> bool:
    """Whether a training on that card goes on with a description; the card is asked for nothing else."""
    here = this_machine.Here(device="cuda", count=1, title=card, memory_bytes=memory_bytes)
    monkeypatch.setattr(preparing, "_here", lambda _wanted: here)
    for name in ("gpu_name", "this_cpu"):
        monkeypatch.setattr(this_machine, name, lambda: pytest.fail("the machine was measured"))
    request = TrainRequest(model="tiny.toml", data=("text.txt",), steps=1, sequence_tokens=16, batch_sequences=2, on=on)
    try:
        prepared = preparing.prepare(request, ranks=1)
    except FlopwiseError as error:
        assert f"--on {on} describes " in error.what and error.what.endswith(f"not this machine's {card}")
        assert error.hint and "--anywhere" in error.hint
        assert preparing.prepare(replace(request, anywhere=True), ranks=1).device == "cuda"
        return False
    assert prepared.hardware == load_hardware(on)
    return True


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("card", "memory_bytes", "on", "expected"),
    [
        pytest.param(H100, 85_017_493_504, "h100-sxm", True, id="its-own"),
        pytest.param(H100, 85_017_493_504, "h100", True, id="its-alias"),
        pytest.param(H100, 85_017_493_504, "h100-pcie", False, id="another-form"),
        pytest.param(H100, 85_017_493_504, "a100-80gb", False, id="as-much-memory"),
        pytest.param(H100, 85_017_493_504, "h200", False, id="more-memory"),
        # Of a card that nobody knows, nothing but its memory can be compared.
        pytest.param(UNKNOWN, 85_017_493_504, "a100-80gb", True, id="unknown-as-much-memory"),
        pytest.param(UNKNOWN, 85_017_493_504, "h200", False, id="unknown-more-memory"),
    ],
)
def test_a_training_on_a_gpu_goes_on_with_a_description_of_it_alone(
    monkeypatch: pytest.MonkeyPatch, card: str, memory_bytes: int, on: str, *, expected: bool
) -> None:
    assert accepted(monkeypatch, card, memory_bytes, on) == expected


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("card", "memory_bytes", "base", "like", "expected"),
    [
        pytest.param(H100, 85_017_493_504, "h100-sxm", False, True, id="its-own"),
        pytest.param(H100, 85_017_493_504, "a100-80gb", False, False, id="of-another-card"),
        pytest.param(H100, 85_017_493_504, "a100-80gb", True, True, id="like-another-card"),
        pytest.param(UNKNOWN, 60 * 2**30, "h100-sxm", True, True, id="unknown"),
        # Without error correction it has 8 % more than the catalogue says.
        pytest.param(L40S, 51_527_024_640, "l40s", False, True, id="memory-unlike-the-catalogue"),
    ],
)
def test_a_training_on_a_gpu_goes_on_with_what_was_measured_there(
    monkeypatch: pytest.MonkeyPatch, card: str, memory_bytes: int, base: str, *, like: bool, expected: bool
) -> None:
    write_calibrated(base, card, memory_bytes, like=like)
    assert accepted(monkeypatch, card, memory_bytes, "measured.toml") == expected
    assert not accepted(monkeypatch, card, memory_bytes // 2, "measured.toml")
