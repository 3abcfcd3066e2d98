"""Which device a PyTorch trace is of, in which number format it multiplied, and what its peaks are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from flopwise.catalog.load import load_hardware
from flopwise.profile.explain.activity import Activity
from flopwise.profile.measure.this_machine import catalogue_name
from flopwise.records.profile import KERNEL_CLASSES, KernelClass, Peaks

# The maker's kernels name the formats of what they multiply; nvjet's by letters.
_FORMAT_RULES = (
    ("fp8", r"e4m3|e5m2|fp8|nvjet_(sm\d+_)?qq"),
    ("bf16", r"bf16|bfloat16|nvjet_(sm\d+_)?ts[ts]"),
    ("tf32", r"tf32|s1688gemm_f32|nvjet_(sm\d+_)?sss"),
    ("fp16", r"(?<!b)f16(?!f32_f32)|half|hgemm|nvjet_(sm\d+_)?hs[hs]|h16816|s16816gemm_fp16"),
    ("fp32", r"sgemm|f32f32_f32f32|gemm_fp?32"),
    ("fp64", r"dgemm|f64f64|nvjet_(sm\d+_)?ddd"),
)
_FORMATS = tuple((name, re.compile(rule, re.IGNORECASE)) for name, rule in _FORMAT_RULES)
_LONGEST_NAME = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedDevice:
    """What the trace says of a device."""

    name: str | None = None
    memory_bytes: float | None = None


def named_device(metadata: dict[str, Any], number: int) -> NamedDevice:
    """The device of that number as `deviceProperties` has it."""
    properties = metadata.get("deviceProperties")
    entries = [entry for entry in properties if isinstance(entry, dict)] if isinstance(properties, list) else []
    found: dict[str, Any] = next((entry for entry in entries if entry.get("id") == number), {})
    name, memory = found.get("name"), found.get("totalGlobalMem")
    is_size = isinstance(memory, int | float) and 0 < memory < 2**60
    return NamedDevice(
        name=name[:_LONGEST_NAME] if isinstance(name, str) and name.strip() else None,
        memory_bytes=float(memory) if is_size and memory is not None else None,
    )


def number_format_of(activity: Activity, operator_formats: dict[str, float]) -> str | None:
    """In which format was multiplied most: by names of products' kernels, by operators' inputs, by attention's kernels.

    Names of products count where they tell it of most of their time. Attention comes last, since cuDNN calls its
    kernels f16 for either format of 16 bits.
    """
    operators = {name: flops for name, flops in operator_formats.items() if name}
    products, whole = _seconds(activity, "gemm")
    attention, _ = _seconds(activity, "attention")
    ways = (products if 2 * sum(products.values()) >= whole else {}, operators, products, attention)
    return next((max(counted, key=counted.__getitem__) for counted in ways if counted), None)


def _seconds(activity: Activity, kind: KernelClass) -> tuple[dict[str, float], float]:
    """Time of a class by the number format in kernels' names, of those that tell it; and of all."""
    chosen = activity.kind == KERNEL_CLASSES.index(kind)
    lengths = (activity.end_ns - activity.start_ns)[chosen] * 1e-9
    by_name = np.bincount(activity.name[chosen], weights=lengths, minlength=len(activity.names))
    seconds: dict[str, float] = {}
    for number in np.flatnonzero(by_name):
        found = next((name for name, rule in _FORMATS if rule.search(activity.names[number])), None)
        if found is not None:
            seconds[found] = seconds.get(found, 0.0) + float(by_name[number])
    return seconds, float(by_name.sum())


def peaks_of(device: str | None, number_format: str | None) -> tuple[Peaks | None, str]:
    """The catalogue's peaks of a device; or None and why. Another device's are never taken instead."""
    if device is None:
        return None, "the trace does not name its device, so no peaks are known"
    names = (device, re.sub(r"^\W*(amd|nvidia)\W+", "", device, flags=re.IGNORECASE))
    entry = next((entry for name in names if (entry := catalogue_name(name)) is not None), None)
    if entry is None:
        return None, f"{device} is not in the catalogue, so no peaks are known"
    if number_format is None:
        return None, "nothing tells in which number format the device multiplied, so no peaks are known"
    hardware = load_hardware(entry).device
    flops = hardware.peak_flops.get(number_format)
    if flops is None:
        return None, f"the catalogue has no {number_format} peak of {entry}"
    bandwidth = hardware.dram.bandwidth_bytes_per_s
    return (
        Peaks(
            flops=flops.value,
            bandwidth=None if bandwidth is None else bandwidth.value,
            number_format=number_format,
            source=f"catalogue: {entry}",
        ),
        "",
    )
