"""Cells of small models for tests of sweeps, and a stand-in for `flopwise train` that ends as it is told to."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from flopwise.catalog.load import model_table
from flopwise.setup.written import CellSetup, cell_id
from flopwise.store.cells import Cell, CellOutcome, SweepRecord
from flopwise.store.runs import to_text
from flopwise.store.sweeps import write_cell
from flopwise.sweep.attempts import Trial
from flopwise.work.transformer import Transformer
from tests.store.test_store import a_measurement, a_record

MPT = Transformer(
    name="mpt-small",
    title="As MPT is pre-trained, and small",
    source="test",
    layers=2,
    hidden=64,
    heads=4,
    ffn=256,
    vocab=264,
    context=256,
    positions="learned",
    norm="layer",
    norm_bias=True,
    gated=False,
    activation="gelu",
    qkv_bias=True,
    output_bias=True,
    ffn_bias=True,
    tied=True,
)

Found = TypeVar("Found")

SCRIPT = r"""
import json, os, pathlib, signal, subprocess, sys, time

cell, _, attempt = os.environ["FLOPWISE_ATTEMPT"].partition("/")
how, store, micro = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
kind, _, figure = how.partition(":")


def tell(**told):
    (store / "cells" / cell / f"attempt-{int(attempt):04d}.told.json").write_text(json.dumps(told))


def refuse(failure, what, why):
    tell(failure=failure, reason=f"{what}: {why}")
    sys.exit(f"error: {what}\n\n  {why}\n\nhint: another")


def run(state="done"):
    number = 0
    while True:
        number += 1
        folder = store / f"{number:04d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        break
    print(f"run {number:04d} · mpt-small · a stand-in", file=sys.stderr, flush=True)
    text = (store / "template.json").read_text().replace('"id": "0142"', f'"id": "{number:04d}"')
    text = text.replace('"state": "done"', f'"state": "{state}"')
    text = text.replace('"cell": null', f'"cell": "{cell}"').replace('"attempt": null', f'"attempt": {attempt}')
    (folder / "record.json").write_text(text)
    tell(run=folder.name)
    return text


if kind == "fits" and micro > int(figure):
    refuse("does-not-fit", "no plan fits mpt-small in so little", "the smallest plan needs more")
if kind in ("ok", "fits"):
    time.sleep(0.0 if kind == "fits" else float(figure or 0))
    print(run())
elif kind == "noisy":
    print("a library says hello")
    print(run())
    print("and good-bye")
elif kind == "silent":
    print("nothing")
elif kind == "crash":
    run("running")
    sys.exit("Traceback (most recent call last):\n  File x\nValueError: the matrix is not square\n")
elif kind == "wrong":
    refuse("refused", "--batch cannot be 0", "a step has sequences")
elif kind == "folder":
    print("reading out of memory papers/a.txt", file=sys.stderr)
    refuse("refused", "there is no file out of memory papers/b.txt", "look again")
elif kind == "kernel":
    words = "[rank1]: RuntimeError: CUDA error: out of memory\nCUDA errors may be reported later.\nCompile again."
    sys.exit("Traceback (most recent call last):\n" + words)
elif kind == "memory":
    sys.exit("Traceback:\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\nnote: later words")
elif kind == "signal":
    os.kill(os.getpid(), getattr(signal, figure))
elif kind == "code":
    sys.exit(int(figure))
elif kind == "long":
    sys.stderr.write("x" * 300_000 + "\nValueError: the end\n")
    sys.exit(1)
elif kind in ("sleep", "stubborn", "family"):
    if kind == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind == "family":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    run("running")
    time.sleep(float(figure))
"""


def a_cell(store: Path | None = None, *, foreseen: CellOutcome | None = None, **changes: Any) -> Cell:
    """A cell of the small model on this CPU, written where a store is given."""
    plain = CellSetup(
        model=model_table(MPT),
        hardware="this-cpu",
        devices=1,
        sequence_tokens=64,
        batch_sequences=4,
        micro_batch_sequences=2,
        precision="fp32",
    )
    settings = replace(plain, **changes)
    cell = Cell(id=cell_id(settings), settings=settings, foreseen=foreseen)
    if store is not None:
        write_cell(store, cell)
    return cell


def a_sweep(*cells: Cell, **changes: Any) -> SweepRecord:
    plain = SweepRecord(
        name="small", created="2026-11-15T12:00:00+01:00", cells=tuple(cell.id for cell in cells), steps=3
    )
    return replace(plain, device="cpu", **changes)


def stand_in(store: Path, how: Mapping[str, str] | str = "ok") -> Callable[[Trial, Path, Path], list[str]]:
    """A command that ends as `how` says, for all cells or for each by its id."""
    store.mkdir(exist_ok=True)
    (store / "template.json").write_text(to_text(a_record("0142", state="done", measurement=a_measurement())))

    def command(trial: Trial, at: Path, model: Path) -> list[str]:
        assert model.is_absolute()
        told = how if isinstance(how, str) else how[trial.cell.id]
        micro = trial.micro_batch_sequences or 0
        return [sys.executable, "-I", "-S", "-c", SCRIPT, told, str(at), str(micro)]

    return command


def a_run(store: Path, name: str = "0001") -> str:
    """A run in the store that is done and was measured; its name."""
    (store / name).mkdir(parents=True)
    (store / name / "record.json").write_text(to_text(a_record(name, state="done", measurement=a_measurement())))
    return name


def alive(session: int) -> list[str]:
    """Command lines of the processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == session and b") Z " not in (entry / "stat").read_bytes():
                found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


def until(true: Callable[[], Found], seconds: float = 120.0) -> Found:
    """Wait until something is so; what it then is."""
    limit = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.02)
    return found
