"""How long a large store takes to list: `python -m benchmarks.store_listing [--runs 10000] [--record FILE]`.

Every run has a realistic record (that of a training on this machine's CPU, or one that is given) under its own id, and
the row that such a run leaves. CPU seconds, each action first in a new process and so with nothing in its memory: with
the rows, and without them, when every record is read. The same is timed twice: of runs by themselves, and of as many
runs that each are the attempt of a cell of a sweep.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flopwise.records.measurement import RunRecord
from flopwise.setup.written import CellSetup, cell_id
from flopwise.store.cells import Attempt, Cell, SweepRecord
from flopwise.store.collecting import collect
from flopwise.store.rows import row_of, run_rows
from flopwise.store.runs import RECORD, ROW, read_record, run_names, to_text
from flopwise.store.sweeps import CELL, CELLS, write_sweep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--record", help="A record.json to copy. Default: that of two steps that are trained for it.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(given.record) if given.record else _trained(Path(folder) / "trained")
        store = Path(folder) / "runs"
        _fill(store, record.parent, given.runs)
        size, row = record.stat().st_size, (store / "0001" / ROW).stat().st_size
        print(f"{given.runs:,} runs, each a record of {size:,} bytes and a row of {row:,}")
        _time_all(store)
        _add_cells(store)
        print(f"\nthe same runs in {given.runs:,} cells of a sweep")
        _time_all(store)


def _time_all(store: Path) -> None:
    with_rows = {title: min(_cpu_s(action) for _ in range(3)) for title, action in _measured(store).items()}
    rows = {name: (store / name / ROW).rename(store / name / "kept") for name in run_names(store)}
    without = {title: _cpu_s(action) for title, action in _measured(store).items()}
    for path in rows.values():
        path.rename(path.with_name(ROW))
    for title, seconds in with_rows.items():
        print(f"{title:24}  with rows {seconds:6.2f} s   from records {without[title]:6.2f} s")
    print(f"{'flopwise --version':24}  {min(_cpu_s(_command('--version')) for _ in range(3)):6.2f} s")


def _measured(store: Path) -> dict[str, Callable[[], object]]:
    return {
        "run_rows": lambda: run_rows(store),
        "collect": lambda: collect(store),
        "flopwise ls runs": _command("ls", "runs", "--store", str(store)),
        "flopwise report": _command("report", "--store", str(store)),
        "flopwise report -o csv": _command("report", "--store", str(store), "-o", "csv"),
    }


def _command(*words: str) -> Callable[[], object]:
    line = [sys.executable, "-P", "-m", "flopwise", *words]
    return lambda: subprocess.run(line, stdout=subprocess.DEVNULL, check=True)


def _cpu_s(action: Callable[[], object]) -> float:
    """Of this process and of those that it starts: the wall clock of a busy machine says nothing."""
    before = os.times()
    action()
    after = os.times()
    return sum(after[:4]) - sum(before[:4])


def _trained(store: Path) -> Path:
    from flopwise.train import run as train_run

    record = train_run(steps=2, device="cpu", checkpoint=False, store=str(store))
    return store / record.id / RECORD


def _fill(store: Path, of: Path, runs: int) -> None:
    record = read_record(of)
    for number in range(1, runs + 1):
        folder = store / f"{number:04d}"
        folder.mkdir(parents=True)
        _keep(folder, replace(record, id=folder.name))


def _keep(folder: Path, record: RunRecord) -> None:
    """As a run leaves them, but without waiting for the disk 40,000 times."""
    (folder / RECORD).write_text(to_text(record))
    (folder / ROW).write_text(to_text(row_of(record), indent=0))


def _add_cells(store: Path) -> None:
    """A cell for each run: its device's memory is capped at another number of bytes."""
    cells = []
    for number, name in enumerate(run_names(store), 1):
        record = read_record(store / name)
        settings = CellSetup(
            model=record.model,
            hardware=record.hardware or "this-cpu",
            devices=1,
            sequence_tokens=record.plan["sequence_tokens"],
            batch_sequences=record.request["batch_sequences"],
            micro_batch_sequences="auto",
            precision=record.plan["precision"],
            device_memory_bytes=2**40 + number,
        )
        cells.append(cell := cell_id(settings))
        attempt = Attempt(
            number=1,
            cell=cell,
            repeat=1,
            state="ok",
            started=record.started,
            ended=record.ended,
            steps=2,
            run=name,
        )
        folder = store / CELLS / cell
        folder.mkdir(parents=True)
        (folder / CELL).write_text(to_text(Cell(id=cell, settings=settings)))
        (folder / "attempt-0001.json").write_text(to_text(attempt))
        _keep(store / name, replace(record, cell=cell, attempt=1))
    write_sweep(store, SweepRecord(name="grid", created=record.started, cells=tuple(cells), steps=2))


if __name__ == "__main__":
    main()
