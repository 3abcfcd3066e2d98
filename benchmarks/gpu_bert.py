"""BERT-base as a classifier of six labels over batch sizes and padding, profiled: the job of the two seed documents.

`python -m benchmarks.gpu_bert --store FOLDER --output FOLDER [--seconds 500]`: runs as much of both sweeps as the time
allows, and goes on with the rest when it is called again with the same store. Writes `results.csv` and `results.md`,
and `batches.md` and `paddings.md`, which put the profiles side by side. `--small`: a tiny model, to try it on
a CPU.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.gpu_sweep import interrupted_after
from flopwise.store.collecting import collect

SWEEPS = {
    "batches": ["--seq", "128", "--batch", "2-64*2"],
    "paddings": ["--seq", "16-128*2", "--batch", "32"],
}
"""What the first document changes, and what the second does; the cell of both is run once."""
COMMON = ["--model", "bert-base", "--steps", "12", "--time-limit", "120s"]
SMALL = ["--set", "layers=1", "--set", "hidden=32", "--set", "heads=2", "--set", "ffn=64", "--set", "vocab=512"]
LABELS = ("sadness", "joy", "love", "anger", "fear", "surprise")
ROWS = 4096
MEAN_WORDS, LEAST_WORDS, MOST_WORDS = 19.0, 2, 66
"""Of the rows of dair-ai/emotion."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    given.output.mkdir(parents=True, exist_ok=True)
    data = write_rows(given.output / "emotion.csv", seed=0)
    for name, grid in SWEEPS.items():
        words = ["sweep", *COMMON, *grid, *(SMALL if given.small else []), "--data", str(data), "--name", name]
        interrupted_after([*words, "--store", str(given.store)], until - time.monotonic())
    interrupted_after(["collect", *SWEEPS, "--store", str(given.store), "--into", str(given.output)], None)
    for name in SWEEPS:
        rows = [row for row in collect(given.store, [name]).rows if row.run]
        rows.sort(key=lambda row: (row.sequence_tokens or 0, row.batch_sequences or 0))
        _compare([row.run for row in rows], given.store, given.output / f"{name}.md")


def write_rows(path: Path, *, seed: int) -> Path:
    """Texts of made-up words, as many of them as people wrote, each with one of six labels."""
    random = np.random.default_rng(seed)
    counts = np.clip(random.gamma(3.0, MEAN_WORDS / 3.0, ROWS), LEAST_WORDS, MOST_WORDS).astype(int)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("text", "label"))
        for count in counts:
            # A byte is a token where there is no tokenizer: words of one sign, so that a word is about a token.
            rows.writerow(("".join(random.choice(list("abcdefgh"), count)), str(random.choice(LABELS))))
    return path


def _compare(runs: Sequence[str | None], store: Path, path: Path) -> None:
    """Profiles side by side as markdown, with what changes along them."""
    if len(runs) < 2:
        return
    words = ["profile", "compare", *(str(run) for run in runs), "--store", str(store), "-o", "md"]
    shown = subprocess.run([sys.executable, "-P", "-m", "flopwise", *words], capture_output=True, text=True, check=True)
    path.write_text(shown.stdout, encoding="utf-8")
    print(shown.stdout)


if __name__ == "__main__":
    main()
