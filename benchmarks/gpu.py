"""How fast flopwise trains on this GPU, against what its kernels can do: `python -m benchmarks.gpu --output FOLDER`.

Ceilings (matrix products and attention at a model's shapes, kept up as training keeps them up), cells (a model under
caps, planned and trained) and peers (transformers, plain compiled modules) each run in a process of their own, so that
none finds another's memory; cells of one shape share it with their ceiling, one after the other. Rows are appended to
`ceilings.csv`, `cells.csv` and `peers.csv` as they are measured. With `--budget-s` what does not fit into the time that
is left is left out and named. It is planned for the card that is there, unless `--hardware` names another description.
`--device cpu` goes the same way with a tiny model, planned as on an H200. Where anything failed the command exits
with 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import gpu_ceiling, gpu_peers
from benchmarks.gpu_cells import CPU_CELLS, GPU_CELLS, Cell, Settings, cell_values, hardware_of, run_cell
from benchmarks.gpu_record import OK, append_rows, earlier_times, make_folder, mistakes_told, provenance, read_rows
from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.base.files import write_whole
from flopwise.engine.devices import choose_device

LIMIT_S = 900.0
"""After so long a cell is ended: it hangs."""
POLL_S = 0.05
START_S = {"cuda": 18.0, "cpu": 3.0}
"""What a second job of a process is spared: imports, and on a GPU the compiling of attention's kernels."""
HARDWARE_HELP = "a file of `flopwise calibrate`, or a catalogue entry; the card that is there unless told (cpu: h200)"
TIMES = ("warm_up_s", "measure_s", "ceiling_warm_up_s", "ceiling_measure_s")


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to measure."""

    kind: str
    """ceiling, cell or peer."""
    name: str
    foreseen_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a job gave."""

    rows: list[dict[str, Any]]
    outcome: str = OK
    why: str = ""


Runner = Callable[[Sequence[Job], Settings], Iterator[Answer]]
"""Answers in the order of the jobs, each as soon as it is there."""


@dataclass(frozen=True, slots=True)
class Ideal:
    """A ceiling: what a model's products and attention alone would come to."""

    tokens_per_s: float
    products_us: float
    """Of a token, as those of attention."""
    attention_us: float


@dataclass(slots=True)
class Progress:
    """What a run has, and what it left out."""

    ceilings: dict[str, Ideal] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    """Ceilings that this run measured; others are from before."""
    cells: list[dict[str, Any]] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


# -- what there is to run ------------------------------------------------------------------------------------------


def cells_of(device: str) -> dict[str, Cell]:
    """Cells by name."""
    return {cell.name: cell for cell in (GPU_CELLS if device == "cuda" else CPU_CELLS)}


def ceilings_of(device: str) -> dict[str, gpu_ceiling.Shape]:
    """Ceilings by name: one for each shape and precision of the cells."""
    found: dict[str, gpu_ceiling.Shape] = {}
    for cell in cells_of(device).values():
        if not cell.ceiling:
            continue
        shape = gpu_ceiling.Shape(
            name=cell.ceiling, model=cell.model, sequence_tokens=cell.sequence_tokens, precision=cell.precision
        )
        found.setdefault(cell.ceiling, shape)
    return found


def peers_of(device: str) -> dict[str, gpu_peers.Peer]:
    """Peers by name."""
    return {peer.name: peer for peer in (gpu_peers.GPU_PEERS if device == "cuda" else gpu_peers.CPU_PEERS)}


def chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    """Names separated by commas; `all`, `none`."""
    if text in ("all", "none"):
        return list(known) if text == "all" else []
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise unknown_name(what, name, known, hint=f"--{what}s {','.join(known)} | all | none")
    return names


def jobs_of(cells: Sequence[str], ceilings: Sequence[str], peers: Sequence[str], settings: Settings) -> list[Job]:
    """In the order in which they run: before a cell its ceiling, then what else was asked for."""
    earlier, jobs, waiting = earlier_times(settings.output), [], list(ceilings)

    def ceiling(name: str) -> None:
        waiting.remove(name)
        # A layer of a quarter of a million tokens takes seconds, and every kernel of attention has to run.
        long_s = 25.0 if ceilings_of(settings.device)[name].sequence_tokens > 100_000 else 0.0
        jobs.append(Job("ceiling", name, 25 + long_s + settings.ceiling_warm_up_s + settings.ceiling_measure_s))

    for name in cells:
        cell = cells_of(settings.device)[name]
        if cell.ceiling in waiting:
            ceiling(cell.ceiling)
        set_up_s, step_s = earlier.get(("cell", name), (cell.set_up_s, cell.step_s))
        traced_s = step_s + 15 if settings.profile else 0.0
        running_s = steps_s(step_s, settings, cell.warm_up_share, cell.least_steps)
        jobs.append(Job("cell", name, set_up_s + traced_s + running_s))
    for name in list(waiting):
        ceiling(name)
    for name in peers:
        peer = peers_of(settings.device)[name]
        set_up_s, step_s = earlier.get(("peer", name), (peer.set_up_s, peer.step_s))
        jobs.append(Job("peer", name, set_up_s + steps_s(step_s, settings, 2, 2)))
    return jobs


def steps_s(step_s: float, settings: Settings, warm: float, measured: int) -> float:
    """How long warm-up and measured steps take together, at least so many of each: the last one runs to its end.

    Less than one of `warm` is that share of a step, again and again.
    """
    warm_up_s = max(settings.warm_up_s + min(1, warm) * step_s / 2, warm * step_s)
    return warm_up_s + max(settings.measure_s + step_s / 2, measured * step_s)


# -- running -------------------------------------------------------------------------------------------------------


def run_jobs(
    jobs: Sequence[Job], settings: Settings, runner: Runner, *, budget_s: float | None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:  # fmt: skip
    """Run what fits into the budget, in order; every row is in its file before the next job begins."""
    origin, begun = provenance(settings.device), clock()
    progress = Progress(ceilings=measured_ceilings(settings.output, origin["card"]))
    waiting = list(jobs)
    while waiting:
        group = next_group(waiting, settings, math.inf if budget_s is None else budget_s - (clock() - begun))
        if not group:
            left = waiting.pop(0)
            progress.left_out.append(f"{left.kind} {left.name} (about {left.foreseen_s:.0f} s)")
            continue
        del waiting[: len(group)]
        names = " and ".join(f"{job.kind} {job.name}" for job in group)
        print(f"# {names}, about {foreseen_s(group, settings):.0f} s", file=sys.stderr, flush=True)
        before, spared_s = clock(), 0.0
        for job, answer in zip(group, runner(group, settings), strict=True):
            wall_s = clock() - before
            if answer.outcome != OK:
                progress.failed.append(f"{job.kind} {job.name}: {answer.outcome}: {answer.why}")
                print(f"  {progress.failed[-1]}", file=sys.stderr, flush=True)
            told = {"outcome": answer.outcome, "why": answer.why, "wall_s": round(wall_s, 3), "spared_s": spared_s}
            rows = [{**row, **told, **origin} for row in answer.rows or [{job.kind: job.name}]]
            _taken_in(job, rows, progress, settings)
            append_rows(settings.output / f"{job.kind}s.csv", rows)
            # After a failure the next one gets a new process.
            before, spared_s = clock(), START_S[settings.device] if answer.outcome == OK else 0.0
    return progress


def next_group(waiting: Sequence[Job], settings: Settings, left_s: float) -> list[Job]:
    """What runs next in one process: a ceiling and its cells, as many as the time is enough for, or one peer."""
    cells = cells_of(settings.device)
    shapes = [cells[job.name].shape if job.kind == "cell" else job.name for job in waiting]
    alike = 1
    while alike < len(waiting) and waiting[alike].kind == "cell" and shapes[alike] == shapes[0]:
        alike += 1
    groups = (list(waiting[:count]) for count in range(alike, 0, -1))
    return next((group for group in groups if foreseen_s(group, settings) <= left_s), [])


def foreseen_s(group: Sequence[Job], settings: Settings) -> float:
    """How long a process takes with these; only the first of them has to start."""
    return sum(job.foreseen_s for job in group) - START_S[settings.device] * (len(group) - 1)


def _taken_in(job: Job, rows: list[dict[str, Any]], progress: Progress, settings: Settings) -> None:
    """Keep what the last table shows; cells and peers get their share of the ceiling."""
    if job.kind == "ceiling":
        for row in rows:
            if row.get("op") == gpu_ceiling.WHOLE:
                progress.ceilings[job.name] = _ideal(row)
                progress.fresh.add(job.name)
        return
    table: Mapping[str, Cell | gpu_peers.Peer] = (
        cells_of(settings.device) if job.kind == "cell" else peers_of(settings.device)
    )
    for number, row in enumerate(rows):
        if row["outcome"] == OK:
            name = table[job.name].ceiling
            ideal = progress.ceilings.get(name)
            rows[number] = {
                **row,
                "ceiling_tokens_per_s": ideal and ideal.tokens_per_s,
                "ceiling_share": ideal and row["tokens_per_s"] / ideal.tokens_per_s,
                "ceiling_of_this_run": name in progress.fresh,
            }
            if job.kind == "cell" and settings.profile and ideal is not None:
                print(against_ideal(job.name, row["batch_tokens"], settings.output, ideal), flush=True)
    (progress.cells if job.kind == "cell" else progress.peers).extend(rows)


def measured_ceilings(folder: Path, card: str) -> dict[str, Ideal]:
    """Those of such a card that the folder has from before, the last of each."""
    rows = [row for row in read_rows(folder / "ceilings.csv") if row.get("op") == gpu_ceiling.WHOLE]
    found: dict[str, Ideal] = {}
    for row in rows:
        with suppress(KeyError, ValueError):
            found |= {row["ceiling"]: _ideal(row)} if row["card"] == card else {}
    return found


def _ideal(row: Mapping[str, Any]) -> Ideal:
    columns = ("tokens_per_s", "products_us_per_token", "attention_us_per_token")
    found = Ideal(*(float(row[column]) for column in columns))
    if not 0 < found.tokens_per_s < math.inf:
        raise ValueError("a ceiling is a rate above 0")
    return found


def against_ideal(cell: str, tokens: int, folder: Path, ideal: Ideal) -> str:
    """Where a traced step is longer than the ceiling's: products, attention, other kernels, and no kernel at all."""
    rows = read_rows(folder / f"kernels_{cell}.csv")
    classes = {row["name"]: float(row["total_s"]) for row in rows if row["level"] == "class"}
    words = []
    for name, ideal_us in (("gemm", ideal.products_us), ("attention", ideal.attention_us)):
        taken_s, ideal_s = classes.pop(name, 0.0), ideal_us * 1e-6 * tokens
        words.append(f"{name} {taken_s:.3f} s (ideal {ideal_s:.3f}, {taken_s - ideal_s:+.3f})")
    classes.pop("copy", None)
    gaps_s = sum(float(row["total_s"]) for row in rows if row["level"] == "gaps")
    return f"{cell}: {', '.join(words)}, other kernels {sum(classes.values()):.3f} s, no kernel {gaps_s:.3f} s"


def run_here(job: Job, settings: Settings) -> Answer:
    """Measure in this process; what fails is told and not raised."""
    import torch

    try:
        if job.kind == "ceiling":
            return Answer(gpu_ceiling.run_ceiling(ceilings_of(settings.device)[job.name], settings))
        if job.kind == "cell":
            return Answer([cell_values(run_cell(cells_of(settings.device)[job.name], settings))])
        return Answer([gpu_peers.run_peer(peers_of(settings.device)[job.name], settings)])
    except FlopwiseError as error:
        return Answer([], "refused", ": ".join(filter(None, (error.what, error.why))))
    except Exception as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return Answer([], "out of memory", told)
        traceback.print_exc()
        return Answer([], "failed", told)


def run_as_child(jobs: Sequence[Job], settings: Settings, into: Path) -> None:
    """Measure one after the other here, each answer in a file of its own; behind one that failed nothing is begun."""
    for job in jobs:
        answer = run_here(job, settings)
        write_whole(into / f"{job.kind}-{job.name}.json", json.dumps(asdict(answer)))
        if answer.outcome != OK:
            return
        _free(settings.device)


def _free(device: str) -> None:
    """Give back what a job held, so that the next one finds the memory of a new process, and its own peak."""
    import torch

    gc.collect()
    if device == "cuda":
        # Workspaces of matrix products, and the pinned memory of copies, which no public call gives back.
        for name in ("_cuda_clearCublasWorkspaces", "_host_emptyCache"):
            getattr(torch._C, name, lambda: None)()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run_child(jobs: Sequence[Job], settings: Settings) -> Iterator[Answer]:
    """Measure in a process of their own, whose talk goes on to ours; what is left after a failure gets a new one."""
    waiting = list(jobs)
    while waiting:
        with tempfile.TemporaryDirectory() as folder, subprocess.Popen(_words(waiting, settings, folder)) as process:
            try:
                for job in list(waiting):
                    waiting.remove(job)
                    answer = _awaited(process, Path(folder) / f"{job.kind}-{job.name}.json", last=not waiting)
                    yield answer
                    if answer.outcome != OK:
                        break
            finally:
                process.kill()


def _awaited(process: subprocess.Popen[bytes], path: Path, *, last: bool) -> Answer:
    """The answer in a file; the end of the process belongs to the last of its jobs."""
    begun = time.monotonic()
    while process.poll() is None and (last or not path.is_file()):
        if time.monotonic() - begun > LIMIT_S:
            break
        time.sleep(POLL_S)
    if path.is_file():
        return Answer(**json.loads(path.read_text(encoding="utf-8")))
    code = process.returncode
    return Answer([], "failed", f"ended after {LIMIT_S:.0f} s" if code is None else f"the process ended with {code}")


def _words(jobs: Sequence[Job], settings: Settings, folder: str) -> list[str]:
    words = [sys.executable, "-m", "benchmarks.gpu", "--into", folder]
    for kind in ("ceiling", "cell", "peer"):
        words += [f"--{kind}s", ",".join(job.name for job in jobs if job.kind == kind) or "none"]
    for name in ("device", "output", *TIMES):
        words += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    words += ["--hardware", settings.hardware] if settings.hardware else []
    return words + (["--profile"] if settings.profile else [])


# -- the command ---------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, required=True, help="the folder of the CSV files")
    made.add_argument("--cells", "--cell", default="all", help="names with commas between them, all or none")
    made.add_argument(
        "--ceilings", "--ceiling", default="auto", help="auto: those of the cells and peers; all, none, names"
    )
    made.add_argument("--peers", "--peer", default="none", help="names with commas between them, all or none")
    made.add_argument("--budget-s", type=float, help="what does not fit into so many seconds is left out")
    made.add_argument("--hardware", default="", help=HARDWARE_HELP)
    made.add_argument("--profile", action="store_true", help="after a cell, the kernels of one more step")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="what is measured")
    for name in TIMES:
        default = getattr(Settings(device="", output=Path()), name)
        what = "before measuring" if "warm" in name else "measured at least"
        told = f"seconds of {'a ceiling' if 'ceiling' in name else 'a cell or peer'} {what}; {default:g} unless told"
        made.add_argument(f"--{name.replace('_', '-')}", type=float, default=default, help=told)
    # For the process that measures: the folder of its answers.
    made.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    with mistakes_told():
        names = asked(given)
        settings = Settings(
            device=given.device,
            output=given.output,
            hardware=given.hardware,
            profile=given.profile,
            **{name: getattr(given, name) for name in TIMES},
        )
        if given.into is None:
            choose_device(settings.device)
            hardware_of(settings)
            make_folder(settings.output)
        jobs = jobs_of(*names, settings)
        if given.into is not None:
            run_as_child(jobs, settings, given.into)
            return
        progress = run_jobs(jobs, settings, run_child, budget_s=given.budget_s)
    print(shown(progress), flush=True)
    if progress.failed:
        failed = ", ".join(text.partition(":")[0] for text in progress.failed)
        print(f"{len(progress.failed)} of {len(jobs)} failed: {failed}", file=sys.stderr)
        sys.exit(1)


def asked(given: argparse.Namespace) -> tuple[list[str], list[str], list[str]]:
    """Cells, ceilings and peers by name; what cannot be meant is refused."""
    for name in (*TIMES, "budget_s"):
        seconds, option = getattr(given, name), f"--{name.replace('_', '-')}"
        if seconds is not None and not 0 <= seconds < math.inf:
            raise FlopwiseError(f"{option} cannot be {seconds:g}", why="it is seconds: 0 or more", hint=f"{option} 30")
    device = given.device
    cells = chosen(given.cells, list(cells_of(device)), "cell")
    peers = chosen(given.peers, list(peers_of(device)), "peer")
    if given.ceilings == "auto":
        wanted = [cells_of(device)[name].ceiling for name in cells] + [peers_of(device)[name].ceiling for name in peers]
        ceilings = list(dict.fromkeys(name for name in wanted if name in ceilings_of(device)))
    else:
        ceilings = chosen(given.ceilings, list(ceilings_of(device)), "ceiling")
    if not (cells or ceilings or peers):
        raise FlopwiseError(
            "nothing to measure", why="no cell, no ceiling and no peer is asked for", hint="--cells all --peers none"
        )
    return cells, ceilings, peers


# -- for people ----------------------------------------------------------------------------------------------------


def shown(progress: Progress) -> str:
    """The tables of a run, at most 120 columns wide."""
    lines = [
        f"ceiling {name}: {ideal.tokens_per_s:,.0f} tok/s (a token's products {ideal.products_us:.2f} us, attention "
        f"{ideal.attention_us:.2f} us{'' if name in progress.fresh else '; from before'})"
        for name, ideal in progress.ceilings.items()
    ]
    if progress.cells:
        lines.append(
            f"{'cell':12} {'tok/s':>8} {'5-95 %':>15} {'of ceil.':>8} {'MFU':>6} {'HFU':>6} {'peak GiB':>8} "
            f"{'/cap':>6} {'pred/meas':>9} {'wait s':>6} {'submit':>6} {'MHz':>5} {'W':>4}"
        )
        lines += [_cell_line(row) for row in progress.cells]
    if progress.peers:
        lines.append(
            f"{'peer':22} {'tok/s':>8} {'5-95 %':>15} {'of ceil.':>8} {'MFU':>6} {'peak GiB':>8} {'MHz':>5} {'W':>4}"
        )
        lines += [_peer_line(row) for row in progress.peers]
    # Cells and peers that failed have their line above.
    lines += [f"failed: {text}"[:120] for text in progress.failed if text.startswith("ceiling")]
    lines += [f"left out, no time: {', '.join(progress.left_out)}"] if progress.left_out else []
    return "\n".join(lines)


def _cell_line(row: Mapping[str, Any]) -> str:
    if row["outcome"] != OK:
        return f"{row['cell']:12} {row['outcome']}: {row['why']}"[:120]
    return (
        f"{row['cell']:12} {_rates(row)} {_share(row['mfu'])} {_share(row['hfu'])} {_gib(row['peak_allocated_bytes'])} "
        f"{_share(row['peak_per_cap'])} {_number(row['predicted_per_measured'], 9, 3)} "
        f"{_number(row['waited_s'], 6, 2)} {row['submit_s']:6.2f} "
        f"{_number(row['clock_mhz'], 5, 0)} {_number(row['power_w'], 4, 0)}"
    )


def _peer_line(row: Mapping[str, Any]) -> str:
    if row["outcome"] != OK:
        return f"{row['peer']:22} {row['outcome']}: {row['why']}"[:120]
    return (
        f"{row['peer']:22} {_rates(row)} {_share(row['mfu'])} {_gib(row['peak_allocated_bytes'])} "
        f"{_number(row['clock_mhz'], 5, 0)} {_number(row['power_w'], 4, 0)}"
    )


def _rates(row: Mapping[str, Any]) -> str:
    spread = f"{row['tokens_per_s_low']:,.0f}-{row['tokens_per_s_high']:,.0f}"
    return f"{row['tokens_per_s']:8,.0f} {spread:>15} {_share(row['ceiling_share'], 8)}"


def _share(value: float | None, width: int = 6) -> str:
    return f"{'':>{width}}" if value is None else f"{value:{width}.1%}"


def _gib(value: float | None) -> str:
    return _number(None if value is None else value / 2**30, 8, 2)


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'':>{width}}" if value is None else f"{value:{width}.{digits}f}"


if __name__ == "__main__":
    main()
