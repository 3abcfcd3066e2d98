"""Which device torch runs on, and what it is."""

from __future__ import annotations

import torch

from flopwise.core.errors import FlopwiseError


def choose_device(wanted: str) -> str:
    """`cuda` or `cpu`; `auto` takes a GPU where there is one."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise FlopwiseError("there is no GPU that torch can use", hint="--device cpu, or a torch built for the GPU")
    return "cuda" if there and wanted != "cpu" else "cpu"


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
