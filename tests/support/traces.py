"""Traces in the PyTorch profiler's layout, made by hand, and what must hold of their profiles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from flopwise.profile.read.kineto import read_source
from flopwise.profile.read.opening import TraceFile
from flopwise.records.profile import Profile

Json = dict[str, Any]
BASE = 3_913_618_802_000.0
"""Microseconds, as large as in real traces."""


def an_event(category: str, name: str, start: float, end: float, **arguments: Any) -> Json:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": BASE + start,
        "dur": end - start,
        "args": arguments,
    }


def ran(name: str, start: float, end: float, *, launch: float, number: int, **arguments: Any) -> list[Json]:
    """Something on the device, and the host's call that launched it."""
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    given = {"device": 0, "stream": 7, "correlation": number, "External id": number} | arguments
    return [
        an_event("cuda_runtime", "cudaLaunchKernel", launch, launch + 1, correlation=number),
        an_event(category, name, start, end, **given),
    ]


def shapes(number: int, *dims: Sequence[int], kind: str = "c10::BFloat16") -> Json:
    return {"External id": number, "Input Dims": [list(shape) for shape in dims], "Input type": [kind] * len(dims)}


def memory(at: float, allocated: int, reserved: int, device: int = 0) -> Json:
    arguments = {"Total Allocated": allocated, "Total Reserved": reserved, "Device Type": 1, "Device Id": device}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": BASE + at, "args": arguments}


def gpu_trace() -> Json:
    """Two steps of 100 µs.

    device     10 gemm 30 pointwise 40 …      70 norm 80 …       100 gemm 130 adam 140
    beside it        35 all-reduce        60      75 copy     95
    """
    events = [
        an_event("user_annotation", "ProfilerStep#1", 0, 100),
        an_event("user_annotation", "ProfilerStep#2", 100, 200),
        an_event("cpu_op", "aten::mm", 1, 5, **shapes(1, (4, 8), (8, 16))),
        an_event("cpu_op", "aten::linear", 80, 95, **shapes(60, (4, 8), (16, 8), (16,))),
        an_event("cpu_op", "aten::addmm", 82, 93, **shapes(6, (16,), (4, 8), (8, 16))),
        *ran("spin_kernel", -90, -80, launch=-95, number=99),
        *ran("nvjet_tst_128x64", 10, 30, launch=2, number=1),
        *ran("void vectorized_elementwise_kernel<4>", 30, 40, launch=12, number=2),
        *ran(
            "ncclDevKernel_AllReduce_Sum_bf16",
            35,
            60,
            launch=13,
            number=3,
            stream=9,
            **{
                "Collective name": "allreduce",
                "In msg nelems": 1000,
                "dtype": "BFloat16",
            },
        ),
        *ran("layer_norm_kernel", 70, 80, launch=66, number=4),
        *ran("Memcpy HtoD (Pinned -> Device)", 75, 95, launch=20, number=5, stream=11, bytes=4096),
        *ran("nvjet_tst_128x64", 100, 130, launch=90, number=6),
        *ran("multi_tensor_apply_kernel<FusedAdam>", 130, 140, launch=120, number=7),
        *ran("spin_kernel", 210, 300, launch=205, number=98),
        memory(1, 1000, 4000),
        memory(50, 3000, 4000),
        memory(60, 2000, 4000),
    ]
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_015_855_104}],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        "traceEvents": events,
        "traceName": "x.json",
    }


def profiles_of(trace: object, name: str = "x") -> tuple[Profile, ...]:
    content = trace if isinstance(trace, bytes) else json.dumps(trace).encode()
    blocks: Iterator[bytes] = iter([content])
    return read_source(TraceFile("x.json", blocks), name).profiles


def only(trace: object) -> Profile:
    (found,) = profiles_of(trace)
    return found


def microseconds(found: Profile, name: str) -> float:
    value = found.get(name)
    assert value is not None, name
    return round(value * 1e6, 3)


def assert_sound(found: Profile) -> None:
    span, busy, idle = (found.get(name) for name in ("device_span_s", "device_busy_s", "idle_s"))
    assert span is not None
    assert busy is not None
    assert idle is not None
    assert idle >= -1e-9
    assert busy + idle == pytest.approx(span)
    assert sum(spent.seconds for spent in found.classes) == pytest.approx(busy)
