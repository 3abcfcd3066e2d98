"""Which hardware a training is for, and whether that is the one it runs on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import entry_kind
from flopwise.base.units import show_bytes
from flopwise.calibrate.calibrated import LIKE
from flopwise.catalog.load import THIS_CPU, THIS_MACHINE, hardware_place, load_hardware
from flopwise.profile.measure.this_machine import Here, catalogue_name, find_hardware
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.plan import Plan
from flopwise.setup.hardware import SAME_MEMORY, Fact, Hardware, same_device
from flopwise.train.request import TrainRequest


def check_kind(plan: Plan | ClusterPlan, here: Here) -> None:
    """Refuse a plan for a GPU on a CPU and the other way round, before this machine is measured."""
    if plan.hardware.lower() in (THIS_MACHINE, THIS_CPU):
        return
    planned = find_hardware(plan.hardware)
    if (planned.device.kind == "cpu") != (here.device == "cpu"):
        raise _elsewhere(planned.title, here.title)


def _elsewhere(planned: str, here: str) -> FlopwiseError:
    return FlopwiseError(
        f"the plan is for {planned}, and this machine has {here}",
        why="its memory and its schedule are those of another device",
        hint="plan again with `--on this-machine`, or --anywhere to run it as it is",
    )


def find_here(request: TrainRequest, plan: Plan | ClusterPlan | None, here: Here) -> tuple[str, Hardware]:
    """What we run on, by name: as it is asked for, as a plan's own file has it, or as the catalogue does."""
    if request.on is not None and request.on.lower() not in (THIS_MACHINE, THIS_CPU):
        hardware = find_hardware(request.on)
        if not request.anywhere:
            _check_described(hardware, here, request.on)
        return hardware_place(request.on), hardware
    own = plan.hardware if plan is not None and request.on is None else ""
    if own.endswith(".toml") and entry_kind(Path(own)) == "file":
        hardware = find_hardware(own)
        if _is_here(hardware, here):
            return hardware_place(own), hardware
    name = THIS_MACHINE if here.device == "cuda" else THIS_CPU
    return name, find_hardware(name)


def _is_here(hardware: Hardware, here: Here) -> bool:
    """Whether a description can be that of the device we run on: its kind, and its memory within a twentieth.

    Of a card that the catalogue knows, its architecture, units and bandwidth too.
    """
    described, size = hardware.device, here.memory_bytes
    if (described.kind == "cpu") != (here.device == "cpu"):
        return False
    if not size:
        # Some drivers do not tell, where a GPU shares the memory of its host.
        return True
    known = None if here.device == "cpu" else catalogue_name(here.title)
    # `calibrate --like` has all but units and memory from another card.
    borrowed = any(fact.source == LIKE for fact in described.peak_flops.values())
    if known is None or borrowed:
        return abs(described.dram.size_bytes.value / size - 1.0) <= SAME_MEMORY
    listed = load_hardware(known).device
    # A calibrated file has the memory that the driver leaves on this machine, as with error correction switched off.
    dram = replace(listed.dram, size_bytes=Fact(value=float(size), source=listed.dram.size_bytes.source))
    return same_device(described, replace(listed, memory=(*listed.memory[:-1], dram)))


def _check_described(hardware: Hardware, here: Here, name: str) -> None:
    """Refuse a description of another device than the one that we run on."""
    if not _is_here(hardware, here):
        raise FlopwiseError(
            f"--on {name} describes {hardware.title}, not {_this(here)}",
            why="kind and memory, of a known card units and bandwidth too, are not alike: a plan would not be for it",
            hint="leave --on out, `flopwise calibrate` for a file of this machine, or --anywhere",
        )


def _this(here: Here) -> str:
    return "this machine's CPU" if here.device == "cpu" else f"this machine's {here.title}"


def place_of(request: TrainRequest, hardware: Hardware, here: Here) -> str:
    """What we run on, where --on may stand for something else."""
    elsewhere = request.anywhere and request.on is not None and not _is_here(hardware, here)
    return f"{_this(here)}, as planned for {hardware.title}" if elsewhere else hardware.title


def check_planned(plan: Plan | ClusterPlan, hardware: Hardware, request: TrainRequest) -> tuple[str, ...]:
    """Refuse a plan that was made for another device; a note where --on stands for hardware that is gone."""
    if request.anywhere or plan.hardware.lower() in (THIS_MACHINE, THIS_CPU):
        return ()
    try:
        planned = find_hardware(plan.hardware)
    except FlopwiseError as error:
        if request.on is None:
            hint = "--on this-machine, or --on with the place where the file is now"
            raise FlopwiseError(f"the plan's hardware: {error.what}", why=error.why, hint=hint) from None
        _check_room(plan, hardware)
        return (f"the plan's own hardware is not compared with {hardware.name}: {error.what}",)
    if not same_device(planned.device, hardware.device):
        raise _elsewhere(planned.title, hardware.title)
    return ()


def _check_room(plan: Plan | ClusterPlan, hardware: Hardware) -> None:
    """Refuse a plan that takes more memory than a device has."""
    needed = plan.expected.device_total if plan.expected else plan.device_memory_bytes
    there = hardware.device.dram.size_bytes.value
    if needed is not None and needed > there:
        raise FlopwiseError(
            f"the plan takes {show_bytes(needed)} of device memory, and {hardware.title} has {show_bytes(there)}",
            hint="plan again with `--on this-machine`, or --anywhere to run it as it is",
        )
