"""Describe the machine we run on: its GPU by name, or its CPU by detection and a second of measuring.

The CPU's "peak" is measured, not computed: the best of several matrix products through numpy's BLAS, since a
frequency times a vector width says little about a shared or virtual machine. So is its memory bandwidth.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Literal

import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import THIS_CPU, THIS_MACHINE, hardware_aliases, hardware_names, load_hardware
from flopwise.profile.measure.nvml import open_nvml, visible_device
from flopwise.setup.efficiency import AttentionEfficiency, Efficiency, GemmEfficiency, MemoryEfficiency, Tile
from flopwise.setup.hardware import Device, Fact, Hardware, Host, MemoryLevel, Source

_FALLBACK_CACHE_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """The device that would train here."""

    device: Literal["cpu", "cuda"]
    """As torch calls it."""
    count: int
    """Of GPUs, or of the cores that may be used."""
    title: str
    memory_bytes: int
    """Of one of them; a CPU's is the machine's."""


def cpu_here() -> Here:
    """This machine's CPU, unmeasured."""
    cores = len(os.sched_getaffinity(0))
    return Here(device="cpu", count=cores, title=f"{cpu_title()}, {cores} cores", memory_bytes=memory_bytes())


def gpus_here() -> Here | None:
    """The GPUs that CUDA shows to this process, as the driver tells without CUDA; None: there are none."""
    nvml = open_nvml()
    if nvml is None:
        return None
    try:
        named = (visible_device(index) for index in count())
        found = (None if name is None else nvml.device(name) for name in named)
        gpus = list(takewhile(lambda gpu: gpu is not None, found))
        if not gpus or gpus[0] is None:
            return None
        title, size = gpus[0].name(), gpus[0].memory_total_bytes()
    finally:
        nvml.close()
    return Here(device="cuda", count=len(gpus), title=title or "a GPU", memory_bytes=size or 0)


def find_hardware(name: str | Path) -> Hardware:
    """A device by name or file; `this-machine` and `this-cpu` are what we run on."""
    measured = {THIS_MACHINE: this_machine, THIS_CPU: this_cpu}
    if isinstance(name, str) and name.lower() in measured:
        return measured[name.lower()]()
    return load_hardware(name)


def this_machine() -> Hardware:
    """The catalogue's entry for this machine's GPU, or its CPU where there is no GPU."""
    name = gpu_name()
    if name is None:
        return this_cpu()
    known = catalogue_name(name)
    if known is None:
        raise FlopwiseError(
            f"this machine's GPU, {name!r}, is not in the catalogue",
            why="its peak is unknown, and another card's would give a wrong answer",
            hint="`flopwise calibrate --like h100-sxm` measures it; or describe it in a TOML; or `--on this-cpu`",
        )
    return load_hardware(known)


def name_key(title: str) -> str:
    """A device's title as names are written: NVIDIA H200 is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def catalogue_name(title: str) -> str | None:
    """What the catalogue calls the GPU that the driver calls `title`; None: it does not have it."""
    key = name_key(title)
    known = hardware_aliases().get(key, key)
    return known if known in hardware_names() else None


def gpu_name() -> str | None:
    """What nvidia-smi calls the first GPU, or None; a warning where it is there and cannot say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run(  # noqa: S603 - found on PATH, fixed arguments
            [program, "--query-gpu=name", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"nvidia-smi does not name a GPU, so this is taken for a machine without one: {error}", stacklevel=2
        )
        return None
    return answer.stdout.strip().splitlines()[0] if answer.stdout.strip() else None


def this_cpu() -> Hardware:
    """Describe this CPU from the operating system's tables and about a second of measuring."""
    cores = len(os.sched_getaffinity(0))
    cache_bytes = last_level_cache_bytes()
    memory = memory_bytes()
    rates = {"fp32": _gemm_rate(np.float32), "fp64": _gemm_rate(np.float64)}
    bandwidth = _copy_rate(max(4 * cache_bytes, 128 * 2**20))
    measured, system = "measured", "system"

    def fact(value: float, source: str = measured) -> Fact:
        return Fact(value=float(value), source=source)

    device = Device(
        vendor="CPU",
        architecture=cpu_title(),
        kind="cpu",
        units=fact(cores, system),
        peak_flops={name: fact(rate) for name, rate in rates.items()},
        vector_flops=None,
        memory=(
            MemoryLevel(name="l2", size_bytes=fact(cache_bytes, system)),
            MemoryLevel(name="dram", size_bytes=fact(memory, system), bandwidth_bytes_per_s=fact(bandwidth)),
        ),
    )
    return Hardware(
        name=THIS_CPU,
        title=f"{cpu_title()}, {cores} cores",
        device=device,
        efficiency=_cpu_efficiency(),
        sources=_sources(),
        host=Host(memory_bytes=fact(memory, system), cores=fact(cores, system)),
    )


def _cpu_efficiency() -> Efficiency:
    """The peak is itself a measured product, so large products reach it; attention in torch on a CPU does not."""
    return Efficiency(
        source="estimate",
        launch_s=5e-6,
        gemm=GemmEfficiency(
            source="estimate",
            sustained=0.95,
            fill_depth=32,
            tiles=(Tile(rows=64, columns=64, share=1.0), Tile(rows=16, columns=16, share=0.8)),
        ),
        attention=AttentionEfficiency(source="estimate", forward=((128.0, 0.5),), backward=((128.0, 0.4),)),
        memory=MemoryEfficiency(source="estimate", dram=0.9),
    )


def _sources() -> dict[str, Source]:
    return {
        "measured": Source(
            title="Timed on this machine just now",
            kind="measured",
            note="best matrix product through numpy's BLAS; copy of an array larger than the cache, read plus written",
        ),
        "system": Source(title="The operating system's tables", kind="measured"),
        "estimate": Source(title="Estimated", kind="estimated", note="not measured here; typical of PyTorch on a CPU"),
    }


def _best_seconds(run: Callable[[], object], budget_s: float) -> float:
    """The fastest of as many runs as fit the budget, at least three; the first only warms up."""
    run()
    best = float("inf")
    started = time.perf_counter()
    rounds = 0
    while rounds < 3 or time.perf_counter() - started < budget_s:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
        rounds += 1
    return best


def _gemm_rate(number_format: type[np.floating]) -> float:
    side = 1024
    generator = np.random.default_rng(0)
    left = generator.standard_normal((side, side)).astype(number_format)
    right = generator.standard_normal((side, side)).astype(number_format)
    result = np.empty((side, side), number_format)
    return 2 * side**3 / _best_seconds(lambda: np.matmul(left, right, out=result), 0.2)


def _copy_rate(size_bytes: int) -> float:
    source = np.ones(size_bytes // 8)
    target = np.empty_like(source)
    return 2 * source.nbytes / _best_seconds(lambda: np.copyto(target, source), 0.2)


def cpu_title() -> str:
    """The processor's name as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"


def last_level_cache_bytes() -> int:
    """Size of the largest cache that the first core sees."""
    sizes = [_FALLBACK_CACHE_BYTES]
    found = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    for text in found:
        match = re.fullmatch(r"(\d+)([KM])", text)
        if match:
            sizes.append(int(match[1]) * (2**10 if match[2] == "K" else 2**20))
    return max(sizes[1:], default=sizes[0])


def memory_bytes() -> int:
    """Memory of this machine as the kernel reports it."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    raise FlopwiseError(
        "cannot find out how much memory this machine has",
        why="/proc/meminfo does not say",
        hint="name hardware of the catalogue: --on h100-sxm",
    )
