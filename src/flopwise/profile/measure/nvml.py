"""NVIDIA's management library through ctypes: energy, power, clocks, limits and Hopper's utilisation counters.

Whatever the driver refuses is None. The library is opened on first use, so importing this costs nothing.

By hand, and not with the package nvidia-ml-py: `profile run` brings this into the environments of other people's
programs, where the standard library and a path to this folder are all that is sure to be there.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
TEXT_BYTES = 96
"""The longest name or version that NVML writes."""
SM_CLOCK = 1
GPU_SENSOR = 0

REASONS: dict[int, str] = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display",
}
"""Why the clock is not the highest."""
THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""Of these, limits of power and temperature: nothing that anybody asked for."""

GPM_VERSION = 1
GPM_SHARES: dict[int, str] = {
    1: "graphics_share",
    2: "unit_share",
    3: "occupancy",
    5: "matrix_share",
    7: "half_matrix_share",
    10: "dram_share",
}
"""Counters that NVML gives in percent; here between 0 and 1. 5: any kind of tensor core, 7: those of fp16 and bf16."""
GPM_RATES: dict[int, str] = {
    20: "pcie_sent_bytes_per_s",
    21: "pcie_received_bytes_per_s",
    60: "nvlink_received_bytes_per_s",
    61: "nvlink_sent_bytes_per_s",
}
"""Counters that NVML gives in MiB/s; here in B/s."""
GPM_LARGEST = 333
"""Slots of the table in the newest header. Older drivers know fewer; all read only as many as they are told."""


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _GpmSupport(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint), ("supported", ctypes.c_uint))


class _GpmMetric(ctypes.Structure):
    # The names are the driver's own memory: pointers that are never followed here.
    _fields_ = (
        ("metric", ctypes.c_uint),
        ("status", ctypes.c_int),
        ("value", ctypes.c_double),
        ("short_name", ctypes.c_void_p),
        ("long_name", ctypes.c_void_p),
        ("unit", ctypes.c_void_p),
    )


class _GpmRequest(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("metrics", _GpmMetric * GPM_LARGEST),
    )


def open_nvml(library: Any = None) -> Nvml | None:  # noqa: ANN401 - a ctypes library has whatever functions it has
    """NVML, ready; None where there is no such library or no driver. `library` stands in for it in tests."""
    if library is None:
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
    nvml = Nvml(library)
    return nvml if nvml.call("nvmlInit_v2") else None


def visible_device(index: int, environment: Mapping[str, str] = os.environ) -> int | str | None:
    """What NVML calls the device that CUDA counts as `index`: a number or a UUID; None: CUDA does not see it.

    CUDA may order unlike cards by speed, where NVML always goes by bus; a UUID has no such doubt.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return index
    seen: list[int | str] = []
    for entry in (part.strip() for part in listed.split(",")):
        if entry.isdecimal():
            seen.append(int(entry))
        elif entry.startswith(("GPU-", "MIG-")):
            seen.append(entry)
        else:
            # CUDA, too, stops at the first entry that names no device.
            break
    return seen[index] if 0 <= index < len(seen) else None


class Nvml:
    """The library between its start and `close`."""

    def __init__(self, library: Any) -> None:  # noqa: ANN401 - see `open_nvml`
        self._library = library

    def call(self, function: str, *arguments: object) -> bool:
        """Whether the function is there and succeeded."""
        try:
            return int(getattr(self._library, function)(*arguments)) == SUCCESS
        except (AttributeError, OSError, ctypes.ArgumentError):
            return False

    def close(self) -> None:
        """Nothing of this library may be used afterwards."""
        self.call("nvmlShutdown")

    def driver_version(self) -> str | None:
        """The driver's version, such as 580.95.05."""
        return self.text("nvmlSystemGetDriverVersion")

    def device(self, which: int | str) -> NvmlDevice | None:
        """By NVML's own number, by UUID (with or without `GPU-`) or by PCI bus id; None: there is none."""
        handle = ctypes.c_void_p()
        if isinstance(which, int):
            found = self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(which), ctypes.byref(handle))
        elif ":" in which:
            found = self._by_name("nvmlDeviceGetHandleByPciBusId_v2", which, handle)
        else:
            name = which if which.startswith(("GPU-", "MIG-")) else f"GPU-{which}"
            found = self._by_name("nvmlDeviceGetHandleByUUID", name, handle)
        return NvmlDevice(self, handle) if found else None

    def _by_name(self, function: str, name: str, handle: ctypes.c_void_p) -> bool:
        return self.call(function, ctypes.c_char_p(name.encode()), ctypes.byref(handle))

    def text(self, function: str, *arguments: object) -> str | None:
        """What a function writes into a buffer that is its last but one argument."""
        buffer = ctypes.create_string_buffer(TEXT_BYTES)
        if not self.call(function, *arguments, buffer, ctypes.c_uint(TEXT_BYTES)):
            return None
        return buffer.value.decode("utf-8", "replace") or None


class NvmlDevice:
    """One device; every value is read when it is asked for and None where the driver refuses."""

    def __init__(self, nvml: Nvml, handle: ctypes.c_void_p) -> None:
        self._nvml = nvml
        self._handle = handle

    def name(self) -> str | None:
        """Such as NVIDIA H200."""
        return self._nvml.text("nvmlDeviceGetName", self._handle)

    def driver_version(self) -> str | None:
        """Of the driver that this device runs under."""
        return self._nvml.driver_version()

    def energy_j(self) -> float | None:
        """Since the driver was loaded; it moves in steps of tens of milliseconds."""
        energy = ctypes.c_ulonglong()
        if not self._nvml.call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(energy)):
            return None
        return energy.value / 1000

    def power_w(self) -> float | None:
        """Now; newer cards give the mean of the last second."""
        return _scale(self._number("nvmlDeviceGetPowerUsage"), 1e-3)

    def power_limit_w(self) -> float | None:
        """The lowest of the limits that are in force."""
        return _scale(self._number("nvmlDeviceGetEnforcedPowerLimit"), 1e-3)

    def clock_hz(self) -> float | None:
        """Of the processors, now."""
        return _scale(self._number("nvmlDeviceGetClockInfo", ctypes.c_uint(SM_CLOCK)), 1e6)

    def clock_boost_hz(self) -> float | None:
        """Of the processors, at most."""
        return _scale(self._number("nvmlDeviceGetMaxClockInfo", ctypes.c_uint(SM_CLOCK)), 1e6)

    def temperature_c(self) -> float | None:
        """Of the chip."""
        return _scale(self._number("nvmlDeviceGetTemperature", ctypes.c_uint(GPU_SENSOR)), 1.0)

    def memory_total_bytes(self) -> int | None:
        """Of the card."""
        memory = _MemoryInfo()
        found = self._nvml.call("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(memory))
        return int(memory.total) if found else None

    def reason_bits(self) -> int | None:
        """Why the clock is not the highest, as bits of `REASONS`."""
        bits = ctypes.c_ulonglong()
        # The second is the name before driver 535.
        for function in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            if self._nvml.call(function, self._handle, ctypes.byref(bits)):
                return bits.value
        return None

    def has_gpm(self) -> bool:
        """Whether it has utilisation counters: Hopper and later."""
        support = _GpmSupport(version=GPM_VERSION)
        asked = self._nvml.call("nvmlGpmQueryDeviceSupport", self._handle, ctypes.byref(support))
        return asked and bool(support.supported)

    def gpm_sample(self) -> GpmSample | None:
        """The counters as they are now; two of them make shares. Free it after use."""
        sample = ctypes.c_void_p()
        if not self._nvml.call("nvmlGpmSampleAlloc", ctypes.byref(sample)):
            return None
        taken = GpmSample(self._nvml, sample)
        if self._nvml.call("nvmlGpmSampleGet", self._handle, sample):
            return taken
        taken.free()
        return None

    def _number(self, function: str, *arguments: object) -> int | None:
        number = ctypes.c_uint()
        return number.value if self._nvml.call(function, self._handle, *arguments, ctypes.byref(number)) else None


class GpmSample:
    """Utilisation counters at one moment, in the driver's memory."""

    def __init__(self, nvml: Nvml, sample: ctypes.c_void_p) -> None:
        self._nvml = nvml
        self._sample = sample

    def until(self, later: GpmSample) -> dict[str, float]:
        """What happened until `later`, by the names of `GPM_SHARES` and `GPM_RATES`; those refused are absent."""
        numbers = (*GPM_SHARES, *GPM_RATES)
        request = _GpmRequest(version=GPM_VERSION, count=len(numbers), first=self._sample, second=later._sample)
        for slot, number in enumerate(numbers):
            request.metrics[slot].metric = number
        if not self._nvml.call("nvmlGpmMetricsGet", ctypes.byref(request)):
            return {}
        values: dict[str, float] = {}
        for slot, number in enumerate(numbers):
            metric = request.metrics[slot]
            if metric.status != SUCCESS or not math.isfinite(metric.value):
                continue
            if number in GPM_SHARES:
                values[GPM_SHARES[number]] = metric.value / 100
            else:
                values[GPM_RATES[number]] = metric.value * 2**20
        return values

    def free(self) -> None:
        """Give the memory back; once."""
        self._nvml.call("nvmlGpmSampleFree", self._sample)


def _scale(number: int | None, factor: float) -> float | None:
    return None if number is None else number * factor
