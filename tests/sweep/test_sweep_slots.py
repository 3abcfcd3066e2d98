"""Where a sweep's processes run: GPUs of their own, a share of the cores, and hardware that is not here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml
from flopwise.catalog.load import load_hardware
from flopwise.setup.hardware import Fact, Hardware
from flopwise.store.cells import SweepRecord
from flopwise.sweep.slots import Slots, check_hardware, gpu_ids, slots_for
from tests.support.sweep_stand_in import a_cell, a_sweep


@pytest.mark.parametrize(
    ("told", "expected"), [("", []), ("0,1", ["0", "1"]), ("2, GPU-ab", ["2", "GPU-ab"]), ("1,-1,0", ["1"])]
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, told: str, expected: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    assert gpu_ids() == expected


def test_gpus_are_counted_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_ids() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0\necho 1\n")
    program.chmod(0o755)
    assert gpu_ids() == ["0", "1"]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_ids() == []


def on_gpus(monkeypatch: pytest.MonkeyPatch, ids: str, at_once: int | None = None) -> Slots:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ids)
    return Slots(replace(a_sweep(), device="cuda"), at_once)


def test_each_process_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = on_gpus(monkeypatch, "4,5,6")
    one, two = a_cell(hardware="h200").settings, a_cell(hardware="h200", devices=2).settings
    assert slots.count == 3 and on_gpus(monkeypatch, "4,5,6", 2).count == 2
    with slots.take(one) as first, slots.take(two) as second:
        assert (first, second) == ({"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "5,6"})
    with slots.take(two) as first:
        assert first == {"CUDA_VISIBLE_DEVICES": "4,5"}
        waiting = threading.Thread(target=_enter, args=(lambda: slots.take(two),))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(5)
    assert not waiting.is_alive()
    assert slots.too_few(one) is None
    assert slots.too_few(a_cell(devices=8, hardware="h200").settings) == "8 GPUs are wanted, and 3 are here"


def _enter(make: Callable[[], Any]) -> None:
    with make():
        pass


def test_hardware_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    record: SweepRecord = replace(a_sweep(), device="auto")
    slots = Slots(record, None)
    check_hardware([a_cell().settings, a_cell(hardware="this-machine").settings], record, slots)
    with pytest.raises(FlopwiseError, match="the cells are for h200"):
        check_hardware([a_cell(hardware="h200").settings], record, slots)
    with pytest.raises(FlopwiseError, match="no GPU"):
        check_hardware([a_cell(hardware="h200").settings], replace(record, device="cuda"), slots)


def test_a_file_that_describes_this_device_may_be_measured_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    h200 = load_hardware("h200")
    monkeypatch.setattr("flopwise.profile.measure.this_machine.this_machine", lambda: h200)
    slots = on_gpus(monkeypatch, "0")
    record: SweepRecord = replace(a_sweep(), device="auto")
    mine, other = tmp_path / "mine.toml", tmp_path / "other.toml"
    mine.write_text(to_toml(replace(h200, name="h200-measured", aliases=())), encoding="utf-8")
    other.write_text(to_toml(replace(load_hardware("a100-80gb"), name="other", aliases=())), encoding="utf-8")
    check_hardware([a_cell(hardware=str(mine)).settings], record, slots)
    with pytest.raises(FlopwiseError, match="the cells are for"):
        check_hardware([a_cell(hardware=str(other)).settings], record, slots)


def test_a_name_alone_is_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    h200 = load_hardware("h200")
    monkeypatch.setattr("flopwise.profile.measure.this_machine.this_machine", lambda: h200)
    other = tmp_path / "h200.toml"
    other.write_text(to_toml(replace(load_hardware("a100-80gb"), name="h200", aliases=())), encoding="utf-8")
    with pytest.raises(FlopwiseError, match="the cells are for"):
        check_hardware([a_cell(hardware=str(other)).settings], a_sweep(), on_gpus(monkeypatch, "0"))


# -- files of a CPU ---------------------------------------------------------------------------------------------------


def a_cpu(cores: int) -> Hardware:
    """As `this_cpu` describes one, with nothing measured."""
    some = load_hardware("h200")
    device = replace(some.device, kind="cpu", architecture="a CPU", units=Fact(value=cores, source="datasheet"))
    return replace(some, name="this-cpu", title=f"a CPU, {cores} cores", device=device, aliases=())


@pytest.fixture
def cpu_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, str]:
    """Of this machine's CPU, and of another one which goes by the same name."""
    monkeypatch.setattr("flopwise.profile.measure.this_machine.this_cpu", lambda: a_cpu(2))
    monkeypatch.setattr("flopwise.profile.measure.this_machine.this_machine", lambda: load_hardware("h200"))
    mine, other = tmp_path / "mine.toml", tmp_path / "other.toml"
    mine.write_text(to_toml(replace(a_cpu(2), name="mine")), encoding="utf-8")
    other.write_text(to_toml(a_cpu(64)), encoding="utf-8")
    return str(mine), str(other)


@pytest.mark.parametrize("ids", ["", "0,1"], ids=["no-gpu", "gpus"])
def test_a_file_of_this_cpu_may_be_measured_with(
    monkeypatch: pytest.MonkeyPatch, cpu_files: tuple[str, str], ids: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ids)
    record: SweepRecord = replace(a_sweep(), device="auto")
    mine, other = (a_cell(hardware=name).settings for name in cpu_files)
    slots = slots_for(record, [mine], None)
    assert slots.gpus == []
    check_hardware([mine], record, slots)
    with pytest.raises(FlopwiseError, match=r"the cells are for .*other.toml, and what would run them is a CPU, 2"):
        check_hardware([mine, other], record, slots)
    with pytest.raises(FlopwiseError, match=r"the cells are for .*mine.toml, .* a GPU, as --device says"):
        check_hardware([mine], replace(record, device="cuda"), slots)
    # `flopwise train` takes a GPU where it finds one.
    with slots.take(mine) as environment:
        assert environment == {"CUDA_VISIBLE_DEVICES": ""}


def test_cells_of_a_cpu_take_no_gpu_from_others(monkeypatch: pytest.MonkeyPatch, cpu_files: tuple[str, str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    record: SweepRecord = replace(a_sweep(), device="auto")
    mine, gpu = a_cell(hardware=cpu_files[0], devices=8).settings, a_cell(hardware="h200", devices=2).settings
    slots = slots_for(record, [mine, gpu], None)
    check_hardware([mine, gpu], record, slots)
    assert slots.too_few(mine) is None and slots.share(mine) == 0.5
    with slots.take(gpu), slots.take(mine) as environment:
        assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_the_share_of_a_cell_is_that_of_its_gpus_or_of_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = a_cell(hardware="h200").settings, a_cell(hardware="h200", devices=2).settings
    slots = on_gpus(monkeypatch, "0,1,2,3")
    assert (slots.share(one), slots.share(two)) == (0.25, 0.5)
    assert slots.share(replace(one, devices=8)) == 1.0
    assert on_gpus(monkeypatch, "0,1,2,3", 1).share(one) == 1.0
    on_cpu = a_cell(devices=4).settings
    assert slots_for(a_sweep(), [on_cpu], 2).share(on_cpu) == 0.5
