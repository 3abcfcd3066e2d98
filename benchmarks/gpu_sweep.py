"""MPT models from 125M to 7B at 2k to 16k tokens on this machine's GPU, beside the published H100 rows.

`python -m benchmarks.gpu_sweep --store FOLDER --output FOLDER [--seconds 500]`: runs as much of the sweep as the time
allows, and goes on with the rest when it is called again with the same store; writes `results.csv`, `results.md` and
`beside_h100.md`. `--only-tables`: writes them from what the store has.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.mpt_table import recounted
from flopwise.report.tables import markdown_table
from flopwise.store.collecting import collect
from flopwise.store.results import Result
from flopwise.store.sweeps import sweep_names

SWEEPS = {
    "mpt-small": ["--model", "mpt-125m,mpt-350m,mpt-760m,mpt-1b", "--batch-tokens", "128k"],
    "mpt-large": ["--model", "mpt-3b,mpt-7b", "--batch-tokens", "32k"],
}
COMMON = ["--seq", "2k-16k*2", "--precision", "bf16", "--host-mem", "none", "--steps", "10", "--time-limit", "120s"]
LEAST_S = 30.0
"""Less time than this is not worth a start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--only-tables", action="store_true")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    for name, grid in SWEEPS.items():
        if not given.only_tables:
            _sweep(name, grid, given.store, until)
    given.output.mkdir(parents=True, exist_ok=True)
    begun = sorted(SWEEPS.keys() & set(sweep_names(given.store)), reverse=True)
    interrupted_after(["collect", *begun, "--store", str(given.store), "--into", str(given.output)], None)
    text = beside_h100(collect(given.store, begun).rows)
    (given.output / "beside_h100.md").write_text(text, encoding="utf-8")
    print(text)


def _sweep(name: str, grid: Sequence[str], store: Path, until: float) -> None:
    left = until - time.monotonic()
    if left > LEAST_S:
        interrupted_after(["sweep", *grid, *COMMON, "--name", name, "--store", str(store)], left)


def interrupted_after(words: Sequence[str], seconds: float | None) -> None:
    """Run a command; when its time is over it is interrupted, as a person would."""
    process = subprocess.Popen([sys.executable, "-P", "-m", "flopwise", *words])
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def beside_h100(rows: Sequence[Result]) -> str:
    """Our rows, each beside the published one of its model and sequence that used its H100s best.

    Both MFU are counted again in the causal convention: published ones count the whole square of attention.
    """
    best: dict[tuple[str, int], tuple[float, float, int]] = {}
    for row, counted in recounted():
        if row.device == "h100_80gb" and row.precision == "amp_bf16":
            key = (f"mpt-{row.model}", row.sequence_tokens)
            found = (counted.mfu_causal, row.tokens_per_s / row.devices, row.devices)
            best[key] = max(best.get(key, found), found)
    columns = ("model", "sequence", "state", "tok/s", "MFU", "HFU", "memory GiB", "predicted off", "H100: GPUs",
               "H100: tok/s a GPU", "H100: MFU")  # fmt: skip
    lines = []
    for ours in rows:
        other = best.get((ours.model or "", ours.sequence_tokens or 0))
        lines.append(
            [
                ours.model or "",
                f"{ours.sequence_tokens:,}",
                ours.state,
                _number(ours.tokens_per_s),
                _percent(ours.mfu),
                _percent(ours.hfu),
                _number((ours.device_bytes or 0) / 2**30 or None, 1),
                _percent(ours.prediction_error),
                *(("", "", "") if other is None else (str(other[2]), _number(other[1]), _percent(other[0]))),
            ]
        )
    return markdown_table(columns, lines, ("model", "state"))


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


if __name__ == "__main__":
    main()
