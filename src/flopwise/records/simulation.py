"""`Simulation`: a program that was played against a hardware description, task by task."""

from __future__ import annotations

from dataclasses import dataclass

from flopwise.records.program import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """When every task of a program ran, and what the device waited for in between."""

    program: Program
    starts: tuple[float, ...]
    """Seconds from the step's start, one for each task."""
    ends: tuple[float, ...]
    step_s: float
    """From the start to the end of the last task of any stream."""
    busy: dict[str, float]
    """Stream → seconds in which it ran a task."""
    idle: dict[str, float]
    """What the compute stream waited for → seconds; they add up with its busy seconds to the step."""
    exposed_copy_s: float
    """Of the idle seconds, those in which a copy was awaited."""
    peak_device_bytes: dict[str, int]
    """Owner → bytes in use when the device's total is largest."""
    peak_host_bytes: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPoint:
    """Bytes in use from a moment on."""

    seconds: float
    device: dict[str, int]
    """Owner → bytes."""
    host: dict[str, int]
