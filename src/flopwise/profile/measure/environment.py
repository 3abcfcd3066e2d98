"""What an issue report should carry: versions, the machine, its GPU."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata

from flopwise.profile.measure.this_machine import cpu_title, gpu_name, memory_bytes

REPORTED_PACKAGES = ("flopwise", "numpy", "msgspec", "rich", "typer", "torch")


def driver_version() -> str | None:
    """The version of the GPU's driver as nvidia-smi tells it, such as 580.95.05; None where it cannot."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run(  # noqa: S603 - found on PATH, fixed arguments
            [program, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        # `gpu_name` has told already that nvidia-smi does not answer.
        return None
    version = answer.stdout.strip().partition("\n")[0].strip()
    # `[N/A]` and the like are no version.
    return version if version[:1].isdigit() else None


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
