"""Describe the machine we run on: its GPU by name, or its CPU by detection and a second of measuring.

The CPU's "peak" is measured, not computed: the best of several matrix products, since a frequency times a vector width
says little about a shared or virtual machine. So is everything else that its kernels reach (`cpu_rates`).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from itertools import count, takewhile
from pathlib import Path
from typing import Literal

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import decode, read_table
from flopwise.catalog.load import THIS_CPU, THIS_MACHINE, hardware_aliases, hardware_names, load_hardware, split_power
from flopwise.profile.measure.cpu_rates import attention_efficiency, measure_cpu
from flopwise.profile.measure.nvml import open_nvml, visible_device
from flopwise.setup.efficiency import Efficiency
from flopwise.setup.hardware import Device, Fact, Hardware, Host, MemoryLevel, Source
from flopwise.setup.power import at_power

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
    measured: dict[str, Callable[[], Hardware]] = {THIS_MACHINE: this_machine, THIS_CPU: this_cpu}
    card, watts = split_power(name) if isinstance(name, str) else (str(name), None)
    if card.lower() in measured:
        found = measured[card.lower()]()
        return found if watts is None else at_power(found, watts)
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
    return with_installed(load_hardware(known))


FLASH_4 = "flash-attn-4"
"""FlashAttention-4 as packages name it; FlashAttention-2 has its module's name."""


def with_installed(hardware: Hardware) -> Hardware:
    """With the rates of the attention that a training calls here: FlashAttention-4, where a Hopper GPU has it."""
    if hardware.device.architecture != "Hopper":
        return hardware
    try:
        metadata.distribution(FLASH_4)
    except metadata.PackageNotFoundError:
        return hardware
    efficiency = hardware.efficiency
    attention = efficiency.attention.preferring(("flash-4",))
    return replace(hardware, efficiency=replace(efficiency, attention=attention))


def name_key(title: str) -> str:
    """A device's title as names are written: NVIDIA H200 is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def catalogue_name(title: str) -> str | None:
    """What the catalogue calls the GPU that the driver calls `title`; None: it does not have it."""
    key = name_key(title)
    known = hardware_aliases().get(key, key)
    return known if known in hardware_names() else None


def query_gpus(field: str, *choice: str) -> list[str]:
    """What nvidia-smi says of each GPU; nothing where there is no such program. Its failures are raised."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={field}", "--format=csv,noheader", *choice]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 - fixed words
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


NO_ANSWER = (OSError, subprocess.SubprocessError)
"""What `query_gpus` raises where nvidia-smi cannot say."""


def gpu_name() -> str | None:
    """What nvidia-smi calls the first GPU, or None; a warning where it is there and cannot say."""
    try:
        return next(iter(query_gpus("name", "--id=0")), None)
    except NO_ANSWER as error:
        warnings.warn(
            f"nvidia-smi does not name a GPU, so this is taken for a machine without one: {error}", stacklevel=2
        )
        return None


@cache
def this_cpu() -> Hardware:
    """Describe this CPU from the operating system's tables and about a second of measuring, once a process."""
    cores = len(os.sched_getaffinity(0))
    cache_bytes = last_level_cache_bytes()
    memory = memory_bytes()
    rates = measure_cpu(cache_bytes)
    measured, system = "measured", "system"
    told = read_table(Path(__file__).with_name("this_cpu.toml"))

    def fact(value: float, source: str = measured) -> Fact:
        return Fact(value=float(value), source=source)

    device = Device(
        vendor="CPU",
        architecture=cpu_title(),
        kind="cpu",
        units=fact(cores, system),
        peak_flops={name: fact(rate) for name, rate in rates.product_flops.items()},
        vector_flops=None,
        memory=(
            MemoryLevel(name="l2", size_bytes=fact(cache_bytes, system)),
            MemoryLevel(
                name="dram", size_bytes=fact(memory, system), bandwidth_bytes_per_s=fact(rates.copy_bytes_per_s)
            ),
        ),
    )
    efficiency = decode(told["efficiency"], Efficiency, THIS_CPU)
    return Hardware(
        name=THIS_CPU,
        title=f"{cpu_title()}, {cores} cores",
        device=device,
        efficiency=replace(
            efficiency,
            launch_s=efficiency.launch_s if rates.plain is None else rates.plain.call_s,
            attention=attention_efficiency(rates, efficiency.attention),
            plain=rates.plain or efficiency.plain,
        ),
        sources={key: Source(**source) for key, source in told["sources"].items()},
        host=Host(memory_bytes=fact(memory, system), cores=fact(cores, system)),
    )


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


REPORTED_PACKAGES = ("flopwise", "numpy", "msgspec", "rich", "typer", "torch")


def driver_version() -> str | None:
    """The version of the GPU's driver as nvidia-smi tells it, such as 580.95.05; None where it cannot."""
    try:
        versions = query_gpus("driver_version", "--id=0")
    except NO_ANSWER:
        # `gpu_name` has told already that nvidia-smi does not answer.
        return None
    # `[N/A]` and the like are no version.
    return next((version for version in versions[:1] if version[0].isdigit()), None)


def environment() -> dict[str, str | int | None]:
    """Facts of this machine and installation; None for what is not there. Imports none of the packages it names."""
    gpu = gpu_name()
    facts: dict[str, str | int | None] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "cpu": cpu_title(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "gpu": gpu,
        "driver": None if gpu is None else driver_version(),
    }
    for package in REPORTED_PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    return facts
