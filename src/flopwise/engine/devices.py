"""Which device torch runs on, and what it is."""

from __future__ import annotations

import torch

from flopwise.engine.executable import no_gpu
from flopwise.profile.measure.this_machine import Here, cpu_here


def choose_device(wanted: str) -> str:
    """`cuda` or `cpu`; `auto` takes a GPU where there is one."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise no_gpu()
    return "cuda" if there and wanted != "cpu" else "cpu"


def device_here(wanted: str) -> Here:
    """The device that torch runs on."""
    if choose_device(wanted) == "cpu":
        return cpu_here()
    facts = device_facts("cuda")
    return Here(
        device="cuda",
        count=torch.cuda.device_count(),
        title=facts["device_name"],
        memory_bytes=int(facts["device_memory_bytes"]),
    )


def device_facts(device: str) -> dict[str, str]:
    """What a record should carry of the device and of torch's way to use it."""
    facts = {"torch": str(torch.__version__), "threads": str(torch.get_num_threads()), "device": device}
    if device == "cuda":
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts |= {
            "device_name": found.name,
            "device_memory_bytes": str(found.total_memory),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }
    return facts
