"""Where a sweep's processes run: each on GPUs of its own, or on its share of the cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import THIS_CPU, THIS_MACHINE, is_cpu, load_hardware
from flopwise.profile.measure.this_machine import NO_ANSWER, query_gpus
from flopwise.setup.hardware import Hardware, same_device
from flopwise.setup.written import CellSetup
from flopwise.store.cells import SweepRecord
from flopwise.sweep.jobs.slurm_scripts import PREFIX_VARIABLE

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


def gpu_ids() -> list[str]:
    """GPUs that may be used, as CUDA_VISIBLE_DEVICES names them; those of nvidia-smi where it says nothing."""
    told = os.environ.get(VISIBLE)
    if told is not None:
        # As CUDA reads it: whatever follows a number below zero is not there.
        ids: list[str] = []
        for word in (word.strip() for word in told.split(",")):
            if not word or word.startswith("-"):
                break
            ids.append(word)
        return ids
    try:
        return [number for number in query_gpus("index") if number.isdigit()]
    except NO_ANSWER:
        return []


class Slots:
    """So many processes at once; whoever wants more GPUs than are free waits, and is not overtaken."""

    def __init__(self, record: SweepRecord, at_once: int | None, *, on_cpu: bool = False) -> None:
        # A cluster's scheduler has given each of its tasks what it may use.
        self.scheduled = PREFIX_VARIABLE in os.environ
        self.gpus = [] if on_cpu or record.device == "cpu" or self.scheduled else gpu_ids()
        self.count = max(1, at_once or len(self.gpus) or 1)
        if self.gpus:
            self.count = min(self.count, len(self.gpus))
        self._cpus: dict[str, bool] = {}
        self._free = list(self.gpus)
        self._changed = threading.Condition()
        self._turn = threading.Lock()

    def on_cpu(self, name: str) -> bool:
        """Whether cells with this name of hardware run on a CPU."""
        if name not in self._cpus:
            self._cpus[name] = is_cpu(name)
        return self._cpus[name]

    def too_few(self, settings: CellSetup) -> str | None:
        """Why a cell cannot run here, if it cannot."""
        if not self.gpus or self.on_cpu(settings.hardware) or settings.devices <= len(self.gpus):
            return None
        return f"{settings.devices} GPUs are wanted, and {len(self.gpus)} are here"

    def share(self, settings: CellSetup) -> float:
        """Of all that can run at once, what a cell takes: of the time of a sweep, so much of its own counts."""
        of_gpus = settings.devices / len(self.gpus) if self.gpus and not self.on_cpu(settings.hardware) else 0.0
        return min(1.0, max(1.0 / self.count, of_gpus))

    @contextmanager
    def take(self, settings: CellSetup) -> Iterator[dict[str, str]]:
        """The environment of a process for a cell, whose devices are its own as long as this is entered."""
        on_cpu = self.on_cpu(settings.hardware)
        if not self.gpus or on_cpu:
            # A process finds no GPU where a file of this CPU is meant; under the CPU's own name it is told so.
            yield self._threads() | ({VISIBLE: ""} if on_cpu and settings.hardware != THIS_CPU else {})
            return
        with self._turn, self._changed:
            self._changed.wait_for(lambda: len(self._free) >= settings.devices)
            ours, self._free = self._free[: settings.devices], self._free[settings.devices :]
        try:
            yield {VISIBLE: ",".join(ours)}
        finally:
            with self._changed:
                self._free = sorted([*self._free, *ours], key=self.gpus.index)
                self._changed.notify_all()

    def _threads(self) -> dict[str, str]:
        if self.count == 1:
            return {}
        cores = len(os.sched_getaffinity(0))
        told = os.environ.get(THREADS, "")
        ours = max(1, cores // self.count)
        return {THREADS: str(min(ours, int(told)) if told.isdecimal() and int(told) else ours)}


def slots_for(record: SweepRecord, cells: Iterable[CellSetup], at_once: int | None) -> Slots:
    """Those of a sweep with these cells."""
    return Slots(record, at_once, on_cpu=all(is_cpu(name) for name in {settings.hardware for settings in cells}))


def check_hardware(cells: Iterable[CellSetup], record: SweepRecord, slots: Slots) -> None:
    """Refuse to measure under the name of hardware that is not here."""
    wanted = {settings.hardware for settings in cells} - {THIS_CPU}
    if slots.scheduled or not wanted:
        return
    of_gpus = {name for name in wanted if not slots.on_cpu(name)}
    if record.device == "cuda":
        if wanted - of_gpus:
            raise _elsewhere(min(wanted - of_gpus), "a GPU, as --device says")
        if not slots.gpus:
            raise FlopwiseError("there is no GPU here", why="--device cuda wants one", hint="--device cpu")
    named = of_gpus - {THIS_MACHINE}
    if named and not slots.gpus:
        # A file that is gone says so; what is there is another device.
        load_hardware(min(named))
        raise _elsewhere(min(named), "this machine's CPU")
    from flopwise.profile.measure import this_machine

    if named:
        _check_same(named, this_machine.this_machine())
    if wanted - of_gpus:
        _check_same(wanted - of_gpus, this_machine.this_cpu())


def _check_same(names: Iterable[str], here: Hardware) -> None:
    for name in sorted(names):
        if not same_device(load_hardware(name).device, here.device):
            raise _elsewhere(name, here.title)


def _elsewhere(name: str, here: str) -> FlopwiseError:
    return FlopwiseError(
        f"the cells are for {name}, and what would run them is {here}",
        why="they would be measured under a wrong name",
        hint="--on this-machine, or --dry-run for what is predicted",
    )
