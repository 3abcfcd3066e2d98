"""How long a large store takes to list: `python -m benchmarks.store_listing [--runs 10000] [--record FILE]`.

Every run has a realistic record (that of a training on this machine's CPU, or one that is given) under its own id.
Without the indexes every record is read; with them, only the times of the files. The same is timed twice: of runs by
themselves, and of as many runs that each are the attempt of a cell of a sweep.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flopwise.cli.serving import Live
from flopwise.profile.explain.verdicts import first_verdict
from flopwise.store.cell_index import CELLS_INDEX
from flopwise.store.cells import Attempt, Cell, SweepRecord, cell_id
from flopwise.store.collecting import collect
from flopwise.store.index import INDEX, indexed_runs
from flopwise.store.results import settings_of
from flopwise.store.runs import RECORD, read_record
from flopwise.store.sweeps import new_attempt, write_cell, write_sweep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--record", help="A record.json to copy. Default: that of two steps that are trained for it.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(given.record) if given.record else _trained(Path(folder) / "trained")
        store = Path(folder) / "runs"
        _fill(store, record.read_text(), given.runs)
        size = record.stat().st_size
        print(f"{given.runs:,} runs, a record of {size:,} bytes each")
        _time_all(store)
        _add_cells(store, given.runs)
        # What was written just now is not kept yet.
        time.sleep(3)
        print(f"\nthe same runs in {given.runs:,} cells of a sweep")
        _time_all(store)


def _time_all(store: Path) -> None:
    for title, action in _measured(store).items():
        for name in (INDEX, CELLS_INDEX):
            (store / name).unlink(missing_ok=True)
        without, with_index = _timed(action), min(_timed(action) for _ in range(3))
        print(f"{title:24}  without index {without:6.2f} s   with index {with_index:6.2f} s")
    print(f"{'flopwise --version':24}  {min(_timed(_command('--version')) for _ in range(3)):6.2f} s")
    for name in (INDEX, CELLS_INDEX):
        if (store / name).exists():
            print(f"{name}: {(store / name).stat().st_size / 2**20:.1f} MiB")


def _command(*words: str) -> Callable[[], object]:
    line = [sys.executable, "-P", "-m", "flopwise", *words]
    return lambda: subprocess.run(line, stdout=subprocess.DEVNULL, check=True)


def _measured(store: Path) -> dict[str, Callable[[], object]]:
    # A clock by which every request is a new poll.
    live = Live(store, clock=itertools.count(0, 10).__next__)
    return {
        "indexed_runs": lambda: indexed_runs(store, profiles=False),
        "collect": lambda: collect(store, judge=first_verdict),
        "a poll of serve": lambda: live.answer("/data.json"),
        "flopwise ls runs": _command("ls", "runs", "--store", str(store)),
        "flopwise report": _command("report", "--store", str(store)),
        "flopwise report -o csv": _command("report", "--store", str(store), "-o", "csv"),
    }


def _timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def _trained(store: Path) -> Path:
    from flopwise.train import run as train_run

    record = train_run(steps=2, device="cpu", checkpoint=False, store=str(store))
    return store / record.id / RECORD


def _fill(store: Path, text: str, runs: int) -> None:
    first = text.index('"id": "') + len('"id": "')
    last = text.index('"', first)
    for number in range(1, runs + 1):
        run = store / f"{number:04d}"
        run.mkdir(parents=True)
        (run / RECORD).write_text(f"{text[:first]}{run.name}{text[last:]}")


def _add_cells(store: Path, runs: int) -> None:
    """A cell for each run: its device's memory is capped at another number of bytes."""
    record = read_record(store / "0001")
    plain, cells = settings_of(record), []
    for number in range(1, runs + 1):
        settings = replace(plain, device_memory_bytes=2**40 + number)
        cells.append(cell := cell_id(settings))
        write_cell(store, Cell(id=cell, settings=settings))
        attempt = Attempt(
            number=0, cell=cell, repeat=1, state="ok", started=record.started, ended=record.ended, steps=2,
            run=f"{number:04d}",
        )  # fmt: skip
        new_attempt(store, attempt)
    write_sweep(store, SweepRecord(name="grid", created=record.started, cells=tuple(cells), steps=2))


if __name__ == "__main__":
    main()
