"""A library with NVML's functions and a card that does as it is told, for tests without one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

NOT_SUPPORTED = 3
NOT_FOUND = 6
HANDLE = 0x1000
UUID = "GPU-0d5a1c2e-0000-1111-2222-333344445555"
BUS = "00000000:1B:00.0"


class CMetric(ctypes.Structure):
    """One slot of the request, as NVML's header has it."""

    _fields_ = (
        ("metricId", ctypes.c_uint),
        ("nvmlReturn", ctypes.c_int),
        ("value", ctypes.c_double),
        ("names", ctypes.c_char_p * 3),
    )


class FakeLibrary:
    """A card under a power cap. `refused` functions answer that the device cannot; `missing` ones are not there."""

    def __init__(self, *, refused: Sequence[str] = (), missing: Sequence[str] = ()) -> None:
        self.refused, self.missing = set(refused), set(missing)
        self.calls: list[str] = []
        self.energy_mj: Callable[[], int] = lambda: 5_000_000
        self.power_mw: Callable[[], int] = lambda: 650_000
        self.clock_mhz: Callable[[], int] = lambda: 1485
        self.reason_bits: Callable[[], int] = lambda: 0x4
        self.temperature: Callable[[], int] = lambda: 61
        self.gpm: dict[int, float] = {1: 99.0, 2: 90.0, 3: 25.0, 5: 46.0, 7: 45.0, 10: 13.0, 20: 2.0, 60: 3.0}
        self.gpm_samples: dict[int, int] = {}
        """Samples in the driver's memory: which were taken, and as the how manieth."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("nvml") or name in self.missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.refused:
                return NOT_SUPPORTED
            answer: int = getattr(self, f"do_{name}")(*arguments) or 0
            return answer

        return call

    def do_nvmlInit_v2(self) -> None: ...  # noqa: N802

    def do_nvmlShutdown(self) -> None: ...  # noqa: N802

    def do_nvmlSystemGetDriverVersion(self, buffer: Any, _: Any) -> None:  # noqa: N802
        buffer.value = b"580.95.05"

    def do_nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int | None:  # noqa: N802
        return self._found(index.value < 2, handle, index.value)

    def do_nvmlDeviceGetHandleByUUID(self, name: Any, handle: Any) -> int | None:  # noqa: N802
        return self._found(name.value.decode() == UUID, handle, 1)

    def do_nvmlDeviceGetHandleByPciBusId_v2(self, name: Any, handle: Any) -> int | None:  # noqa: N802
        return self._found(name.value.decode() == BUS, handle, 1)

    def do_nvmlDeviceGetName(self, handle: Any, buffer: Any, _: Any) -> None:  # noqa: N802
        buffer.value = f"Card {handle.value - HANDLE}".encode()

    def do_nvmlDeviceGetTotalEnergyConsumption(self, _: Any, energy: Any) -> None:  # noqa: N802
        energy._obj.value = self.energy_mj()

    def do_nvmlDeviceGetPowerUsage(self, _: Any, power: Any) -> None:  # noqa: N802
        power._obj.value = self.power_mw()

    def do_nvmlDeviceGetEnforcedPowerLimit(self, _: Any, power: Any) -> None:  # noqa: N802
        power._obj.value = 700_000

    def do_nvmlDeviceGetClockInfo(self, _: Any, kind: Any, clock: Any) -> None:  # noqa: N802
        clock._obj.value = {1: self.clock_mhz()}[kind.value]

    def do_nvmlDeviceGetMaxClockInfo(self, _: Any, kind: Any, clock: Any) -> None:  # noqa: N802
        clock._obj.value = {1: 1980}[kind.value]

    def do_nvmlDeviceGetTemperature(self, _: Any, sensor: Any, degrees: Any) -> None:  # noqa: N802
        degrees._obj.value = {0: self.temperature()}[sensor.value]

    def do_nvmlDeviceGetMemoryInfo(self, _: Any, memory: Any) -> None:  # noqa: N802
        # Total, free, used: in this order.
        ctypes.memmove(memory, (ctypes.c_ulonglong * 3)(1000, 400, 600), 24)

    def do_nvmlDeviceGetCurrentClocksEventReasons(self, _: Any, bits: Any) -> None:  # noqa: N802
        bits._obj.value = self.reason_bits()

    def do_nvmlDeviceGetCurrentClocksThrottleReasons(self, _: Any, bits: Any) -> None:  # noqa: N802
        bits._obj.value = self.reason_bits()

    def do_nvmlGpmQueryDeviceSupport(self, _: Any, support: Any) -> None:  # noqa: N802
        version, _supported = (ctypes.c_uint * 2).from_address(ctypes.addressof(support._obj))
        assert version == 1
        ctypes.memmove(support, (ctypes.c_uint * 2)(1, 1), 8)

    def do_nvmlGpmSampleAlloc(self, sample: Any) -> None:  # noqa: N802
        sample._obj.value = 0x2000 + 16 * len(self.calls)
        self.gpm_samples[sample._obj.value] = 0

    def do_nvmlGpmSampleGet(self, _: Any, sample: Any) -> None:  # noqa: N802
        self.gpm_samples[sample.value] = self.calls.count("nvmlGpmSampleGet")

    def do_nvmlGpmSampleFree(self, sample: Any) -> None:  # noqa: N802
        del self.gpm_samples[sample.value]

    def do_nvmlGpmMetricsGet(self, request: Any) -> int | None:  # noqa: N802
        """Reads the request by offsets of the C structure, not by ours."""
        address = ctypes.addressof(request._obj)
        version, count = (ctypes.c_uint * 2).from_address(address)
        first, second = (ctypes.c_uint64 * 2).from_address(address + 8)
        assert version == 1
        assert 0 < self.gpm_samples[first] < self.gpm_samples[second]
        for slot in (CMetric * count).from_address(address + 24):
            slot.nvmlReturn = 0 if slot.metricId in self.gpm else NOT_SUPPORTED
            slot.value = self.gpm.get(slot.metricId, -1.0)
        return None

    @staticmethod
    def _found(found: bool, handle: Any, index: int) -> int | None:
        if not found:
            return NOT_FOUND
        handle._obj.value = HANDLE + index
        return None
