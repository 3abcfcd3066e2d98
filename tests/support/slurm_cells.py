"""Cells and stand-ins for Slurm's commands, for the tests of the cluster launchers."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from flopwise.setup.written import CellSetup, cell_id
from flopwise.store.cells import Attempt, Cell, CellOutcome, SweepRecord
from flopwise.store.sweeps import new_attempt, write_cell, write_sweep

STARTED = "2026-01-02T03:04:05+00:00"


def cell(
    devices: int = 1, sequence_tokens: int = 512, *, attempt_s: float | None = 60.0, fits: bool = True, **changes: Any
) -> Cell:
    values: dict[str, Any] = {
        "model": {"name": "tiny"},
        "hardware": "h200",
        "devices": devices,
        "sequence_tokens": sequence_tokens,
        "batch_sequences": 8,
        "micro_batch_sequences": 4,
        "precision": "bf16",
    }
    settings = CellSetup(**(values | changes))
    foreseen = CellOutcome(fits=fits, method="plan", attempt_s=attempt_s)
    return Cell(id=cell_id(settings), settings=settings, foreseen=foreseen)


def record_of(*cells: Cell, **changes: Any) -> SweepRecord:
    values: dict[str, Any] = {"name": "night", "created": STARTED, "steps": 5}
    return SweepRecord(cells=tuple(one.id for one in cells), **(values | changes))


def stored(store: Path, *cells: Cell, **changes: Any) -> SweepRecord:
    record = record_of(*cells, **changes)
    write_sweep(store, record)
    for one in cells:
        write_cell(store, one)
    return record


def attempt(store: Path, of: Cell, **changes: Any) -> Attempt:
    """An attempt in the store, on a machine that is not this one."""
    values: dict[str, Any] = {
        "number": 0,
        "cell": of.id,
        "repeat": 1,
        "state": "running",
        "started": STARTED,
        "sweep": "night",
        "steps": 5,
        "host": "node01",
        "pid": 1,
    }
    return new_attempt(store, Attempt(**(values | changes)))


class Commands:
    """Stand-ins for sbatch, sacct and squeue: they say what they are given, and keep what they were called with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def say(self, name: str, text: str = "", *, error: str = "", code: int = 0) -> None:
        (self.folder / f"{name}.said").write_text(text)
        (self.folder / f"{name}.errors").write_text(error)
        script = self.folder / name
        here = f'"$(dirname "$0")"/{name}'
        lines = ["#!/bin/sh", f'for word in "$@"; do printf "%s\\n" "$word"; done >> {here}.called']
        lines += [f"cat {here}.said", f"cat {here}.errors >&2", f"exit {code}"]
        script.write_text("\n".join(lines) + "\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def count(self, name: str) -> None:
        """Say 501, 502, … as sbatch with --parsable does."""
        script = self.folder / name
        here = f'"$(dirname "$0")"/{name}'
        lines = ["#!/bin/sh", f'for word in "$@"; do printf "%s\\n" "$word"; done >> {here}.called']
        lines += [f"echo x >> {here}.count", f"echo $((500 + $(wc -l < {here}.count)))"]
        script.write_text("\n".join(lines) + "\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def called(self, name: str) -> list[str]:
        path = self.folder / f"{name}.called"
        return path.read_text().splitlines() if path.exists() else []
