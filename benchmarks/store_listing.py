"""How long a large store takes to list: `python -m benchmarks.store_listing [--runs 10000] [--record FILE]`.

Every run has a realistic record (that of a training on this machine's CPU, or one that is given) under its own id.
Without the index every record is read; with it, only the times of the files.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from flopwise.core.collecting import collect
from flopwise.core.index import INDEX, indexed_runs
from flopwise.core.store import RECORD


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
        for title, action in _measured(store).items():
            (store / INDEX).unlink(missing_ok=True)
            without, with_index = _timed(action), min(_timed(action) for _ in range(3))
            print(f"{title:24}  without index {without:6.2f} s   with index {with_index:6.2f} s")
        print(f"index: {(store / INDEX).stat().st_size / 2**20:.1f} MiB")


def _measured(store: Path) -> dict[str, Callable[[], object]]:
    def command(*words: str) -> Callable[[], object]:
        line = [sys.executable, "-m", "flopwise", "ls", "runs", "--store", str(store), *words]
        return lambda: subprocess.run(line, stdout=subprocess.DEVNULL, check=True)

    return {
        "indexed_runs": lambda: indexed_runs(store, profiles=False),
        "collect": lambda: collect(store),
        "flopwise ls runs": command(),
        "flopwise ls runs -o csv": command("-o", "csv"),
    }


def _timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def _trained(store: Path) -> Path:
    from flopwise import train

    record = train.run(steps=2, device="cpu", checkpoint=False, store=str(store))
    return store / record.id / RECORD


def _fill(store: Path, text: str, runs: int) -> None:
    first = text.index('"id": "') + len('"id": "')
    last = text.index('"', first)
    for number in range(1, runs + 1):
        run = store / f"{number:04d}"
        run.mkdir(parents=True)
        (run / RECORD).write_text(f"{text[:first]}{run.name}{text[last:]}")


if __name__ == "__main__":
    main()
