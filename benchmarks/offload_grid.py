"""Our plans against the reference offload trainer's on its recorded grid: `python -m benchmarks.offload_grid`.

For each recorded row, the planner gets the same model, sequence length, caps and batch. Its plan and the one that the
reference ran with are both simulated on the same H100. Both figures are predictions: nothing of ours was run there.
Rows that failed have no plan to compare with and no batch; there it counts whether ours finds any.

`--every 30` takes each 30th row; `--output FOLDER` writes every row to `FOLDER/offload_grid.csv`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from flopwise.catalog.load import load_hardware, load_model
from flopwise.plan.device.forecast import times_of
from flopwise.plan.device.search import fastest_plan
from flopwise.plan.program.compile import compile_plan
from flopwise.references.dataflow.recorded import plan_of_run
from flopwise.references.published.offload import OffloadRun, read_offload
from flopwise.report.tables import csv_text
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import CappedSetup
from flopwise.work.formats import POLICIES
from flopwise.work.transformer import Transformer

GIB = 2**30
PROCESSES = 2
FILE = "offload_grid.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class GridRow:
    """A recorded row, and what each planner makes of it; None where there is no plan."""

    row: int
    model: str
    sequence_tokens: int
    host_gib: float
    device_gib: float
    succeeded: bool
    measured_tokens_per_s: float | None
    """The reference's, on the machine."""
    reference_tokens_per_s: float | None
    """The same plan simulated."""
    ours_tokens_per_s: float | None
    """Simulated."""
    ratio: float | None
    """Ours ÷ reference."""
    planning_s: float
    """Processor time of our search."""
    batch_sequences: int | None
    chunk_tokens: int | None
    rounds: int | None
    update: str | None
    """Where our plan updates, and when."""
    device_used_gib: float | None
    host_used_gib: float | None


@cache
def shape(name: str) -> Transformer:
    model = load_model(name)
    assert isinstance(model, Transformer)
    return model


@cache
def machine(name: str) -> Hardware:
    return load_hardware(name)


def compared(run: OffloadRun) -> GridRow:
    """The row's caps planned by us and by the reference, both simulated."""
    model, hardware = shape(run.model), machine(run.hardware)
    question = CappedSetup(
        model=model,
        hardware=hardware,
        hardware_name=run.hardware,
        sequence_tokens=run.sequence_tokens,
        device_cap_bytes=run.device_bytes,
        host_cap_bytes=run.host_bytes,
        formats=POLICIES["bf16"],
        batch_sequences=run.sequences_per_step if run.succeeded else None,
    )
    started = time.process_time()
    found = fastest_plan(question)
    planning_s = time.process_time() - started
    reference = None
    if run.succeeded:
        plan = plan_of_run(run, model, hardware)
        reference = plan.tokens_per_step / times_of(plan, model, hardware).step_s
    ours = found.plan.tokens_per_step / found.times.step_s if found else None
    program = compile_plan(found.plan, model, rounds=1) if found else None
    return GridRow(
        row=run.row,
        model=run.model,
        sequence_tokens=run.sequence_tokens,
        host_gib=run.host_bytes / GIB,
        device_gib=run.device_bytes / GIB,
        succeeded=run.succeeded,
        measured_tokens_per_s=run.tokens_per_s if run.succeeded else None,
        reference_tokens_per_s=reference,
        ours_tokens_per_s=ours,
        ratio=ours / reference if ours and reference else None,
        planning_s=planning_s,
        batch_sequences=found.plan.sequences_per_round * found.plan.rounds_per_step if found else None,
        chunk_tokens=found.plan.chunk_tokens if found else None,
        rounds=found.plan.rounds_per_step if found else None,
        update=f"{found.plan.update_place}, {found.plan.update_when}" if found else None,
        device_used_gib=sum(program.bytes_by_owner("device").values()) / GIB if program else None,
        host_used_gib=sum(program.bytes_by_owner("host").values()) / GIB if program else None,
    )


def compared_all(runs: Sequence[OffloadRun], processes: int = PROCESSES) -> list[GridRow]:
    """Every row, so many at a time."""
    if processes == 1:
        return [compared(run) for run in runs]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(compared, runs, chunksize=8))


def slower(rows: Iterable[GridRow]) -> list[GridRow]:
    """Rows that the reference planned and on which ours is slower, or finds nothing."""
    return [row for row in rows if row.succeeded and (row.ratio is None or row.ratio < 1)]


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return f"{'-':>9}" * 3
    return "".join(f"{value:>9{form}}" for value in (min(values), statistics.median(values), max(values)))


def _by_size(rows: Sequence[GridRow]) -> None:
    print(
        f"{'model':<13}{'sequence':>10}{'ran':>5}{'ours ÷ reference: min, median, max':>38}{'failed':>8}{'planned':>9}"
    )
    for name, tokens in dict.fromkeys((row.model, row.sequence_tokens) for row in rows):
        group = [row for row in rows if (row.model, row.sequence_tokens) == (name, tokens)]
        ratios = [row.ratio for row in group if row.ratio is not None]
        failed = [row for row in group if not row.succeeded]
        planned = sum(row.ours_tokens_per_s is not None for row in failed)
        print(
            f"{name:<13}{tokens:>10,}{len(group) - len(failed):>5}{_spread(ratios, '.3f'):>38}"
            f"{len(failed):>8}{planned:>9}"
        )


def summary(rows: Sequence[GridRow]) -> None:
    """To stdout: by model and sequence length, then over all."""
    _by_size(rows)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    failed = [row for row in rows if not row.succeeded]
    times = [row.planning_s for row in rows]
    print()
    print("tokens/s of our plan ÷ tokens/s of the reference's, same caps and batch; both simulated, ours never run")
    print(f"{'all that ran: rows, min, median, max':<55}{len(rows) - len(failed):>6}{_spread(ratios, '.3f')}")
    print(f"{'rows on which ours is slower, or finds no plan':<55}{len(slower(rows)):>6}")
    planned = sum(row.ours_tokens_per_s is not None for row in failed)
    print(f"{'caps on which the reference failed, and ours has a plan':<55}{planned:>6} of {len(failed)}")
    print(f"{'processor seconds of a search: rows, min, median, max':<55}{len(times):>6}{_spread(times, '.2f')}")
    for row in slower(rows)[:10]:
        caps = f"device {row.device_gib:g} GiB, host {row.host_gib:g} GiB"
        told = f"{row.ratio:.4f}" if row.ratio is not None else "no plan"
        print(f"slower: row {row.row}, {row.model}, {row.sequence_tokens:,} tokens, {caps}: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Our plans against the reference's on its recorded grid, by simulation."
    )
    parser.add_argument("--every", type=int, default=1, help="take each so many'th row")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--output", type=Path, help=f"folder for {FILE}, every row at full precision")
    given = parser.parse_args()
    rows = compared_all(read_offload()[:: given.every], given.processes)
    summary(rows)
    if given.output:
        given.output.mkdir(parents=True, exist_ok=True)
        path = given.output / FILE
        path.write_text(csv_text([asdict(row) for row in rows]), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
