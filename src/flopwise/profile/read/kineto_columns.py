"""A PyTorch trace gathered into columns: what ran on devices, what the host called, steps, memory."""

from __future__ import annotations

import re
import sys
from array import array
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from flopwise.profile.explain.activity import UNKNOWN_BYTES, Activity, ActivityBuilder
from flopwise.profile.explain.kernel_classes import class_of
from flopwise.profile.read.json_events import Arguments, Event, EventStream
from flopwise.profile.read.operator_work import TYPE_BYTES, has_formula, type_name, work_of
from flopwise.records.profile import KERNEL_CLASSES

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
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Runtime": "cuda_runtime",
    "Operator": "cpu_op",
}
"""As PyTorch called them before 1.13."""
_LATEST_US = 9e15
"""Times beyond are no times: in nanoseconds they would not fit 64 bits."""
_LONGEST_US = 1e13
# A trace of 1 GB may have ten times the rows of a usual one; with these it is summed up within 1 GiB all the same.
MOST_OPERATORS = 2_000_000
MOST_DEVICE_ROWS = 2_000_000
"""Over all devices."""
MOST_LAUNCHES = 4_000_000
MOST_MEMORY_ROWS = 2_000_000
"""Over all devices and the host."""
MOST_THREADS = 4096
MOST_STEPS = 100_000
"""Of the host, of the devices, and of optimizers, each."""
_MOST_DEVICES = 64
_LARGEST_DEVICE = 1023
_MOST_NAMES = 20_000
_MOST_NAME_BYTES = 32 * 2**20
_LONGEST_NAME = 1000
_LONGEST_THREAD = 40
_LONGEST_SHAPES = 1000
"""Bytes of JSON; longer ones are no product's and no attention's."""
OTHER_NAMES = "(other names)"
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
        self.reached: dict[str, int] = {}
        """What there is more of than is taken → how many are."""
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
        self._updates = 0

    def __len__(self) -> int:
        return len(self.name)

    def add(self, event: Event, name: str, start_ns: int, end_ns: int) -> None:
        if len(self.name) >= MOST_OPERATORS:
            self.reached["operators"] = MOST_OPERATORS
            return
        thread = self._thread(event)
        if thread is None:
            return
        arguments = event.args or NO_ARGUMENTS
        flops = moved = float("nan")
        if arguments.input_dims and has_formula(name):
            given = [bytes(raw) for raw in (arguments.input_dims, arguments.input_type, arguments.input_values)]
            found = work_of(name, *given) if sum(map(len, given)) <= _LONGEST_SHAPES else None
            if found is not None:
                (flops, moved), number_format = found
                self.formats[number_format] = self.formats.get(number_format, 0.0) + flops
                self.has_work = True
        self.name.append(self.numbers.setdefault(name, len(self.numbers)))
        self.thread.append(thread)
        self.external.append(_external(arguments))
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)
        self.flops.append(flops)
        self.bytes.append(moved)

    def add_update(self, event: Event, start_ns: int, end_ns: int) -> None:
        """An annotation round an optimizer's step."""
        if self._updates >= MOST_STEPS:
            self.reached["steps of optimizers"] = MOST_STEPS
            return
        thread = self._thread(event)
        if thread is not None:
            self._updates += 1
            self.updates.setdefault(thread, []).append((start_ns, end_ns))

    def _thread(self, event: Event) -> int | None:
        """Its number; None: there are too many."""
        place = (str(event.pid)[:_LONGEST_THREAD], str(event.tid)[:_LONGEST_THREAD])
        found = self.threads.get(place)
        if found is None:
            if len(self.threads) >= MOST_THREADS:
                self.reached["threads"] = MOST_THREADS
                return None
            found = self.threads[place] = len(self.threads)
        return found


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
        self._launches: tuple[Numbers, Numbers, Numbers] | None = None
        self._device_rows = self._memory_rows = self._name_bytes = 0
        self._names: dict[str, str] = {}
        self._reached: dict[str, int] = {}

    def gather(self, stream: EventStream) -> None:
        """Take all events of a trace."""
        for events in stream:
            self.events += len(events)
            for event in events:
                if event.ph == "X":
                    self._take(event, stream)
                elif event.name == "[memory]" and event.args is not None:
                    self._take_memory(event, event.args)
            # Before the next ones are decoded.
            events.clear()
        for what, most in (self._reached | self.operators.reached).items():
            stream.only_first(most, what)

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
            self.operators.add(event, self._shorten(event.name), start_ns, end_ns)
        elif category in _DEVICE_CATEGORIES:
            self._take_device(event, category, start_ns, end_ns)
        elif category in _LAUNCH_CATEGORIES:
            arguments = event.args or NO_ARGUMENTS
            correlation = _whole(arguments.correlation)
            if correlation > 0 and self._has_room("launches", len(self._launch_ns), MOST_LAUNCHES):
                self._launch_correlation.append(correlation)
                self._launch_ns.append(start_ns)
                self._launch_external.append(_external(arguments))
        elif (step := _STEP.match(event.name)) is not None:
            steps = self.device_steps if category.startswith("gpu") else self.host_steps
            known = steps.get(int(step[1]))
            if known is not None:
                steps[int(step[1])] = (min(known[0], start_ns), max(known[1], end_ns))
            elif self._has_room("steps", len(steps), MOST_STEPS):
                steps[int(step[1])] = (start_ns, end_ns)
        elif category == "user_annotation" and event.name.startswith(UPDATE_MARK):
            self.operators.add_update(event, start_ns, end_ns)

    def _has_room(self, what: str, taken: int, most: int) -> bool:
        """Whether there is; where there is not, that is told at the end."""
        if taken < most:
            return True
        self._reached[what] = most
        return False

    def _shorten(self, name: str) -> str:
        """The name, kept once and not at any length; a file of nothing but new names must not fill the memory."""
        if len(name) > _LONGEST_NAME:
            name = name[:_LONGEST_NAME] + "…"
        known = self._names.get(name)
        if known is not None:
            return known
        if len(self._names) >= _MOST_NAMES or self._name_bytes >= _MOST_NAME_BYTES:
            return OTHER_NAMES
        self._name_bytes += sys.getsizeof(name)
        self._names[name] = name
        return name

    def _take_device(self, event: Event, category: str, start_ns: int, end_ns: int) -> None:
        if not self._has_room("activities on devices", self._device_rows, MOST_DEVICE_ROWS):
            return
        name = self._shorten(event.name)
        arguments = event.args or NO_ARGUMENTS
        number = _whole(arguments.device)
        if number < 0:
            number = _whole(event.pid)
        number = number if 0 <= number <= _LARGEST_DEVICE else 0
        device = self.devices.get(number)
        if device is None:
            if not self._has_room("devices", len(self.devices), _MOST_DEVICES):
                return
            device = self.devices[number] = DeviceColumns()
        self._device_rows += 1
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
        if key not in self.memory and not self._has_room("devices with memory", len(self.memory), _MOST_DEVICES):
            return
        if not self._has_room("changes of memory", self._memory_rows, MOST_MEMORY_ROWS):
            return
        self._memory_rows += 1
        columns = self.memory.setdefault(key, MemoryColumns())
        columns.time_ns.append(round(event.ts * 1000))
        columns.allocated.append(allocated)
        columns.reserved.append(_whole(arguments.reserved))

    def activity(self, number: int) -> tuple[Activity, Numbers]:
        """What ran on a device, each with the time of its launch; and the external id of what launched it, or -1.

        Once for each device: its columns are given up, there may be no room for them twice.
        """
        device = self.devices.pop(number)
        built = device.builder.build()
        correlation, external = np.asarray(device.correlation), np.asarray(device.external)
        del device
        launched, launch_ns, launch_external = self._sorted_launches()
        if not len(launched):
            return built, external
        place = np.minimum(np.searchsorted(launched, correlation), len(launched) - 1)
        is_known = (launched[place] == correlation) & (correlation > 0)
        built = replace(built, launch_ns=np.where(is_known, launch_ns[place], -1))
        return built, np.where(external > 0, external, np.where(is_known, launch_external[place], -1))

    def _sorted_launches(self) -> tuple[Numbers, Numbers, Numbers]:
        """Correlations, times and external ids, by correlation."""
        if self._launches is None:
            # Stable: where the runtime and the driver below it note the same launch, the first of the file counts.
            order = np.argsort(np.asarray(self._launch_correlation), kind="stable")
            correlation = np.asarray(self._launch_correlation)[order]
            self._launch_correlation = array("q")
            launch_ns = np.asarray(self._launch_ns)[order]
            self._launch_ns = array("q")
            external = np.asarray(self._launch_external)[order]
            self._launch_external = array("q")
            self._launches = (correlation, launch_ns, external)
        return self._launches


def kind_numbers(names: list[str]) -> Numbers:
    """The class of each operator, as a number in `KERNEL_CLASSES`."""
    return np.array([KERNEL_CLASSES.index(class_of(name, category="cpu_op")) for name in names], np.int64)
