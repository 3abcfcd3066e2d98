"""What an issue report should carry: versions, the machine, its GPU."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

from flopwise.profile.this_machine import cpu_title, gpu_name, memory_bytes

REPORTED_PACKAGES = ("flopwise", "numpy", "msgspec", "rich", "typer", "torch")


def environment() -> dict[str, str | int | None]:
    """Facts of this machine and installation; None for what is not there. Imports none of the packages it names."""
    facts: dict[str, str | int | None] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "cpu": cpu_title(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "gpu": gpu_name(),
    }
    for package in REPORTED_PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    return facts
