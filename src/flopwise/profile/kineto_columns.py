"""A PyTorch trace gathered into columns: what ran on devices, what the host called, steps, memory."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from flopwise.core.profile import KERNEL_CLASSES
from flopwise.profile.activity import UNKNOWN_BYTES, Activity, ActivityBuilder
from flopwise.profile.json_events import Arguments, Event, EventStream
from flopwise.profile.kernel_classes import class_of
from flopwise.profile.operator_work import TYPE_BYTES, has_formula, type_name, work_of

Numbers = NDArray[np.int64]
Window = tuple[int, int]

_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")
UPDATE_MARK = "Optimizer.step"
"""How torch begins the name of an optimizer's step in a trace."""
_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH_CATEGORIES = frozenset(
    {"cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "mtia_runtime", "privateuse1_runtime"}
)
_OLD_CATEGORIES = {
    "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime", "Operator": "cpu_op",
}  # fmt: skip
"""As PyTorch called them before 1.13."""
_LATEST_US = 9e15
"""Times beyond are no times: in nanoseconds they would not fit 64 bits."""
_LONGEST_US = 1e13
_MOST_DEVICES = 1024
_MOST_MARKS = 2**20
_MOST_NAMES = 100_000
_LONGEST_NAME = 1000
_LONGEST_THREAD = 40
OTHER_NAMES = f"(names beyond the first {_MOST_NAMES})"
_WHOLE = 2**62
NO_ARGUMENTS = Arguments()


def _whole(value: object) -> int:
    """A number of `args` as one that fits a column; -1 for anything else."""
    return value if type(value) is int and -_WHOLE < value < _WHOLE else -1


def _external(arguments: Arguments) -> int:
    """The number that joins an operator with what it launched."""
    found = _whole(arguments.external_id)
    return found if found >= 0 else _whole(arguments.old_external_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryColumns:
    """What the allocator of one device said, in the order of the file."""

    time_ns: array[int] = field(default_factory=lambda: array("q"))
    allocated: array[int] = field(default_factory=lambda: array("q"))
    reserved: array[int] = field(default_factory=lambda: array("q"))


class DeviceColumns:
    """What ran on one device."""

    def __init__(self) -> None:
        self.builder = ActivityBuilder()
        self.correlation = array("q")
        self.external = array("q")


class OperatorColumns:
    """What the host called."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.threads: dict[tuple[object, object], int] = {}
        self.formats: dict[str, float] = {}
        """FLOPs by number format."""
        self.name, self.thread, self.external = array("q"), array("q"), array("q")
        self.start_ns, self.end_ns = array("q"), array("q")
        self.flops, self.bytes = array("d"), array("d")
        """NaN where they are not known."""
        self.has_work = False
        self.updates: dict[int, list[Window]] = {}
        """Thread → when it was in an optimizer's step, as annotations say."""

    def __len__(self) -> int:
        return len(self.name)

    def add(self, event: Event, name: str, start_ns: int, end_ns: int) -> None:
        arguments = event.args or NO_ARGUMENTS
        flops = moved = float("nan")
        if arguments.input_dims and has_formula(name):
            found = work_of(name, bytes(arguments.input_dims), bytes(arguments.input_type))
            if found is not None:
                (flops, moved), number_format = found
                self.formats[number_format] = self.formats.get(number_format, 0.0) + flops
                self.has_work = True
        self.name.append(self.numbers.setdefault(name, len(self.numbers)))
        self.thread.append(self._thread(event))
        self.external.append(_external(arguments))
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)
        self.flops.append(flops)
        self.bytes.append(moved)

    def add_update(self, event: Event, start_ns: int, end_ns: int) -> None:
        """An annotation round an optimizer's step."""
        windows = self.updates.setdefault(self._thread(event), [])
        if len(windows) < _MOST_MARKS:
            windows.append((start_ns, end_ns))

    def _thread(self, event: Event) -> int:
        place = (str(event.pid)[:_LONGEST_THREAD], str(event.tid)[:_LONGEST_THREAD])
        return self.threads.setdefault(place, len(self.threads))


class Columns:
    """Everything of a trace that a profile is made of."""

    def __init__(self) -> None:
        self.devices: dict[int, DeviceColumns] = {}
        self.operators = OperatorColumns()
        self.memory: dict[tuple[bool, int], MemoryColumns] = {}
        """By (on a device, not on the host) and the device's number."""
        self.host_steps: dict[int, Window] = {}
        self.device_steps: dict[int, Window] = {}
        self.events = 0
        self._launch_correlation, self._launch_ns, self._launch_external = array("q"), array("q"), array("q")
        self._names: dict[str, str] = {}

    def gather(self, stream: EventStream) -> None:
        """Take all events of a trace."""
        for events in stream:
            self.events += len(events)
            for event in events:
                if event.ph == "X":
                    self._take(event, stream)
                elif event.name == "[memory]" and event.args is not None:
                    self._take_memory(event, event.args)

    def _take(self, event: Event, stream: EventStream) -> None:
        category = _OLD_CATEGORIES.get(event.cat, event.cat)
        is_known = category == "cpu_op" or category in _DEVICE_CATEGORIES or category in _LAUNCH_CATEGORIES
        if not is_known and not category.endswith("user_annotation"):
            return
        # Comparisons with NaN are false, so a time that is missing is refused too.
        if not (-_LATEST_US < event.ts < _LATEST_US and event.dur < _LONGEST_US):
            stream.wrong("have no time or no duration, or an impossible one")
            return
        if event.dur < 0:
            stream.wrong("have a negative duration")
            return
        start_ns = round(event.ts * 1000)
        end_ns = start_ns + round(event.dur * 1000)
        if category == "cpu_op" and not event.name.startswith("ProfilerStep#"):
            self.operators.add(event, self._named(event.name), start_ns, end_ns)
        elif category in _DEVICE_CATEGORIES:
            self._take_device(event, category, start_ns, end_ns)
        elif category in _LAUNCH_CATEGORIES:
            arguments = event.args or NO_ARGUMENTS
            correlation = _whole(arguments.correlation)
            if correlation > 0:
                self._launch_correlation.append(correlation)
                self._launch_ns.append(start_ns)
                self._launch_external.append(_external(arguments))
        elif (step := _STEP.match(event.name)) is not None:
            steps = self.device_steps if category.startswith("gpu") else self.host_steps
            known = steps.get(int(step[1]), (start_ns, end_ns))
            steps[int(step[1])] = (min(known[0], start_ns), max(known[1], end_ns))
        elif category == "user_annotation" and event.name.startswith(UPDATE_MARK):
            self.operators.add_update(event, start_ns, end_ns)

    def _named(self, name: str) -> str:
        """The name, kept once and not at any length; a file of nothing but new names must not fill the memory."""
        if len(name) > _LONGEST_NAME:
            name = name[:_LONGEST_NAME] + "…"
        if name not in self._names and len(self._names) >= _MOST_NAMES:
            return OTHER_NAMES
        return self._names.setdefault(name, name)

    def _take_device(self, event: Event, category: str, start_ns: int, end_ns: int) -> None:
        name = self._named(event.name)
        arguments = event.args or NO_ARGUMENTS
        number = _whole(arguments.device)
        if number < 0:
            number = _whole(event.pid)
        number = number if 0 <= number < _MOST_DEVICES else 0
        device = self.devices.setdefault(number, DeviceColumns())
        kind = class_of(name, category=category)
        moved = _whole(arguments.bytes)
        if kind == "communication" and moved < 0:
            elements = _whole(arguments.message_elements)
            size = TYPE_BYTES.get(type_name(arguments.message_type))
            moved = elements * size if elements >= 0 and size is not None else UNKNOWN_BYTES
        device.builder.add(
            name,
            kind,
            start_ns,
            end_ns,
            stream=_whole(arguments.stream),
            moved_bytes=moved if 0 <= moved < _WHOLE else UNKNOWN_BYTES,
        )
        device.correlation.append(_whole(arguments.correlation))
        device.external.append(_external(arguments))

    def _take_memory(self, event: Event, arguments: Arguments) -> None:
        allocated = _whole(arguments.allocated)
        if allocated < 0 or not -_LATEST_US < event.ts < _LATEST_US:
            return
        key = (arguments.device_type != 0, _whole(arguments.device_id))
        if key not in self.memory and len(self.memory) >= _MOST_DEVICES:
            return
        columns = self.memory.setdefault(key, MemoryColumns())
        columns.time_ns.append(round(event.ts * 1000))
        columns.allocated.append(allocated)
        columns.reserved.append(_whole(arguments.reserved))

    def activity(self, number: int) -> tuple[Activity, Numbers]:
        """What ran on a device, each with the time of its launch; and the external id of what launched it, or -1."""
        device = self.devices[number]
        correlation = np.array(device.correlation, np.int64)
        external = np.array(device.external, np.int64)
        built = device.builder.built()
        launched = np.array(self._launch_correlation, np.int64)
        if not len(launched):
            return built, external
        # Stable: where the runtime and the driver below it note the same launch, the first of the file counts.
        order = np.argsort(launched, kind="stable")
        launched = launched[order]
        place = np.minimum(np.searchsorted(launched, correlation), len(launched) - 1)
        is_known = (launched[place] == correlation) & (correlation > 0)
        row = order[place]
        launch_ns = np.where(is_known, np.array(self._launch_ns, np.int64)[row], -1)
        launch_external = np.where(is_known, np.array(self._launch_external, np.int64)[row], -1)
        return replace(built, launch_ns=launch_ns), np.where(external > 0, external, launch_external)


def kind_numbers(names: list[str]) -> Numbers:
    """The class of each operator, as a number in `KERNEL_CLASSES`."""
    return np.array([KERNEL_CLASSES.index(class_of(name, category="cpu_op")) for name in names], np.int64)
