"""Play programs of plans with real copies on this machine's GPU: `python -m benchmarks.gpu_program --output FOLDER`.

Every task is launched in the program's order from one thread: compute, copy-in and copy-out are CUDA streams, `after`
is an event that a stream waits for, copies move the program's bytes between pinned host memory and the device, and
computations are matrix products repeated for as long as they are predicted to take. So it is not the kernels that are
tested here, but the simulator's picture of copies, streams and waiting. Each program is simulated four times: with
predicted seconds; with measured computations; with these and the rates that the copies had; with all as measured.

Rates of copies and of updates on the host are measured first. `--dry` plays the same launches against a clock.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.gpu_card import COPIES, GIB, Card, CudaCard, DryCard, Mark, measured_copies, measured_updates, shown
from flopwise.catalog.load import load_hardware, load_model
from flopwise.plan.device.search import fastest_plan
from flopwise.plan.program.compile import compile_plan
from flopwise.predict.simulate.simulator import LAST_COPIES, WORDS, play, simulate
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.records.program import STREAMS, Program, Stream, Task
from flopwise.setup.hardware import Fact, Link
from flopwise.setup.setup import CappedSetup
from flopwise.work.formats import POLICIES

HOST_GIB = 110
PINNED_BYTES = 16 * GIB
"""Host buffers lie in so much memory again and again: to pin all of a plan's would take a minute."""
SIGNALS = "signals"
"""What a stream waits for when all that its next task needs is there."""


@dataclass(frozen=True, slots=True)
class Case:
    """A plan to play: Llama-3-8B with these caps, so many of its rounds at most."""

    sequence_tokens: int
    device_gib: int
    rounds: int


CASES = (
    Case(8192, 24, 1),
    Case(8192, 24, 3),
    Case(8192, 40, 3),
    Case(8192, 78, 3),
    Case(65536, 24, 1),
    Case(65536, 40, 1),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A case with its program, and the seconds that its tasks are predicted to take."""

    case: Case
    program: Program
    seconds: Sequence[float]


@dataclass(frozen=True, slots=True)
class Spans:
    """When every task started, ended and had been launched by the host, in seconds from the first launch."""

    starts: Sequence[float]
    ends: Sequence[float]
    launched: Sequence[float]
    clock_mhz: float | None


SIMULATED = ("predicted", "measured compute", "measured rates too", "all measured")
"""How a program is simulated. The last one knows how long each task took, and so tests the waiting alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A case played and simulated; seconds by how they were found, `measured` or one of `SIMULATED`."""

    case: Case
    repeat: int
    tasks: int
    clock_mhz: float | None
    step_s: dict[str, float]
    busy_s: dict[str, dict[str, float]]
    """… → stream → seconds."""
    idle_s: dict[str, dict[str, float]]
    """… → what the compute stream waited for → seconds."""
    kinds_s: dict[str, tuple[int, float, float]]
    """Task kind → how many, measured seconds, and simulated with measured computations and rates."""
    rates_gb_per_s: dict[str, float]
    """Of each direction, alone and while the other one was busy, by least squares over the copies."""
    signals_us: dict[str, float]
    """Stream → median time from when a task could start to its start."""
    largest_start_error_ms: float
    """Of all tasks, when each takes as long as measured."""
    least_lead_ms: float
    """How far the host was ahead of the device at least, after the first hundred tasks."""


# -- playing ---------------------------------------------------------------------------------------------------------


def setting_of(case: Case) -> Setting:
    """Plan the case, and compile as many of its rounds as are played."""
    model, hardware = load_model("llama-3-8b"), load_hardware("h200")
    found = fastest_plan(
        CappedSetup(
            model=model, hardware=hardware, hardware_name="h200", sequence_tokens=case.sequence_tokens,
            device_cap_bytes=case.device_gib * GIB, host_cap_bytes=HOST_GIB * GIB, formats=POLICIES["bf16"],
        )
    )  # fmt: skip
    assert found is not None, f"{case} has no plan"
    rounds = min(case.rounds, found.plan.rounds_per_step)
    program = compile_plan(found.plan, model, rounds=rounds)
    return Setting(replace(case, rounds=rounds), program, TaskSeconds(found.plan, model, hardware).of(program))


def played(program: Program, seconds: Sequence[float], card: Card) -> Spans:
    """Launch every task once, in the program's order, behind the ends of what it waits for."""
    assert not any(task.stream == "host" for task in program.tasks), "updates on the host are not played"
    card.begin(program)
    begun = time.perf_counter()
    starts: list[Mark] = []
    ends: list[Mark] = []
    launched = []
    for index, task in enumerate(program.tasks):
        for other in task.after:
            card.wait(task.stream, ends[other])
        starts.append(card.mark(task.stream))
        if task.stream == "compute":
            card.compute(seconds[index])
        elif task.bytes:
            card.copy(task.stream, task.reads[0].buffer, task.writes[0].buffer, task.bytes)
        ends.append(card.mark(task.stream))
        launched.append(time.perf_counter() - begun)
    clock = card.finish()
    return Spans([card.moment(mark) for mark in starts], [card.moment(mark) for mark in ends], launched, clock)


def cuda_card(settings: Sequence[Setting]) -> CudaCard:
    """The GPU, with memory for the largest of the programs."""
    sizes = [[one.bytes for one in setting.program.buffers if one.place == "device"] for setting in settings]
    return CudaCard(max(map(sum, sizes)), PINNED_BYTES)


# -- comparing -------------------------------------------------------------------------------------------------------


def busy_of(program: Program, starts: Sequence[float], ends: Sequence[float]) -> dict[str, float]:
    """Seconds in which each stream ran a task."""
    found: dict[str, float] = {}
    for task, start, end in zip(program.tasks, starts, ends, strict=True):
        found[task.stream] = found.get(task.stream, 0.0) + end - start
    return found


def awaited(copy: Task) -> str:
    """What somebody who waits for a copy is said to wait for."""
    assert copy.what is not None
    what = WORDS.get(copy.what, copy.what)
    return what if copy.stream == "copy-in" else f"room for {what}"


def idle_of(program: Program, starts: Sequence[float], ends: Sequence[float]) -> dict[str, float]:
    """What the compute stream waits for, as the simulator tells it, and for how long it waits for nothing at all."""
    found: dict[str, float] = {}
    free = 0.0
    for index, task in enumerate(program.tasks):
        if task.stream != "compute":
            continue
        ready = free
        if task.after:
            last = max(task.after, key=ends.__getitem__)
            words = awaited(program.tasks[last])
            ready = max(free, ends[last])
            found[words] = found.get(words, 0.0) + ready - free
        found[SIGNALS] = found.get(SIGNALS, 0.0) + starts[index] - ready
        free = ends[index]
    found[LAST_COPIES] = max(ends) - free
    return {words: seconds for words, seconds in found.items() if seconds}


def signals_of(program: Program, spans: Spans) -> dict[str, float]:
    """Median microseconds between the moment a task could start and its start, for each stream."""
    free = dict.fromkeys(STREAMS, 0.0)
    late: dict[Stream, list[float]] = {}
    for index, task in enumerate(program.tasks):
        ready = max([free[task.stream], *(spans.ends[other] for other in task.after)])
        late.setdefault(task.stream, []).append(spans.starts[index] - ready)
        free[task.stream] = spans.ends[index]
    return {stream: 1e6 * statistics.median(some) for stream, some in late.items()}


def rates_of(program: Program, spans: Spans) -> dict[str, float]:
    """GB/s of copies while the other direction rests and while it does not, from how long each was beside others."""
    tasks, both = program.tasks, np.array([spans.starts, spans.ends])
    copies = {name: [i for i, task in enumerate(tasks) if task.stream == name and task.bytes] for name in COPIES}
    found: dict[str, float] = {}
    for stream, other in (COPIES, COPIES[::-1]):
        (starts, ends), others = both[:, copies[stream]], both[:, copies[other]]
        shared = np.minimum(ends[:, None], others[1]) - np.maximum(starts[:, None], others[0])
        beside = np.maximum(shared, 0).sum(axis=1)
        moved = [float(tasks[index].bytes) for index in copies[stream]]
        alone, both_ways = np.linalg.lstsq(np.stack([ends - starts - beside, beside], axis=1), moved, rcond=None)[0]
        found |= {f"{stream} alone": alone / 1e9, f"{stream} beside": both_ways / 1e9}
    return found


def mean_link(link: Link, rates: dict[str, float]) -> Link:
    """The link with the rates of a play's copies, the mean of both directions."""
    alone, beside = (sum(rates[f"{stream} {how}"] for stream in COPIES) / 2e-9 for how in ("alone", "beside"))
    fact = Fact(value=alone, source="here")
    both = Fact(value=beside, source="here") if beside else None
    return replace(link, bandwidth_bytes_per_s=fact, both_ways_bytes_per_s=both)


def result_of(setting: Setting, spans: Spans, link: Link, repeat: int) -> Result:
    """The play beside its simulations."""
    program, tasks = setting.program, setting.program.tasks
    starts, ends = np.array(spans.starts), np.array(spans.ends)
    lasted: list[float] = list(ends - starts)
    rates = rates_of(program, spans)
    inputs = ((setting.seconds, link), (lasted, link), (lasted, mean_link(link, rates)))
    tried = [simulate(program, seconds, one, peaks=False) for seconds, one in inputs]
    queues = [[index for index, task in enumerate(tasks) if task.stream == stream] for stream in STREAMS]
    waiting = play(queues, lasted, [task.after for task in tasks], 1.0)
    timelines: list[tuple[Sequence[float], Sequence[float]]] = [
        (spans.starts, spans.ends), *((one.starts, one.ends) for one in tried), waiting
    ]  # fmt: skip
    times = dict(zip(("measured", *SIMULATED), timelines, strict=True))
    kinds: dict[str, tuple[int, float, float]] = {}
    for index, task in enumerate(tasks):
        kind = f"{task.kind} {task.what}".strip()
        count, measured, other = kinds.get(kind, (0, 0.0, 0.0))
        kinds[kind] = count + 1, measured + lasted[index], other + tried[2].ends[index] - tried[2].starts[index]
    return Result(
        case=setting.case,
        repeat=repeat,
        tasks=len(tasks),
        clock_mhz=spans.clock_mhz,
        step_s={how: max(one[1]) for how, one in times.items()},
        busy_s={how: busy_of(program, *one) for how, one in times.items()},
        idle_s={how: idle_of(program, *one) for how, one in times.items()},
        kinds_s=kinds,
        rates_gb_per_s=rates,
        signals_us=signals_of(program, spans),
        largest_start_error_ms=1e3 * float(np.max(np.abs(np.array(waiting[0]) - starts))),
        least_lead_ms=1e3 * float(np.min((starts - np.array(spans.launched))[100:], initial=np.inf)),
    )


# -- output ----------------------------------------------------------------------------------------------------------


def print_table(results: Sequence[Result]) -> None:
    """A line a play, then what the compute stream waited for and which kinds of tasks differ most."""
    heads = ["tokens", "GiB", "rounds", "tasks", "measured s", *(f"{how} ÷ it" for how in SIMULATED), "MHz"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for one in results:
        measured = one.step_s["measured"]
        ratios = " | ".join(f"{one.step_s[how] / measured:.4f}" for how in SIMULATED)
        case = " | ".join(f"{value}" for value in asdict(one.case).values())
        print(f"| {case} | {one.tasks} | {measured:.3f} | {ratios} | {one.clock_mhz or 0:.0f} |")
    for one in results:
        print(f"{one.case.sequence_tokens} tokens, {one.case.device_gib} GiB, play {one.repeat}")
        for name, table in (("busy", one.busy_s), ("idle", one.idle_s)):
            for how, seconds in table.items():
                print(f"  {name} {how}: {shown(seconds)}")
        print(f"  GB/s: {shown(one.rates_gb_per_s)}; signals µs: {shown(one.signals_us)}")
        print(f"  start error {one.largest_start_error_ms:.1f} ms, least lead of the host {one.least_lead_ms:.1f} ms")
        kinds = sorted(one.kinds_s.items(), key=lambda item: -abs(item[1][1] - item[1][2]))
        print("  kinds:", "; ".join(f"{kind} {count}: {a:.4f} for {b:.4f}" for kind, (count, a, b) in kinds[:4]))


def write(folder: Path, report: dict[str, object], rows: Sequence[dict[str, object]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_program.json").write_text(json.dumps(report, indent=1, default=float), encoding="utf-8")
    with (folder / "gpu_program_tasks.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def task_rows(setting: Setting, spans: Spans, repeat: int) -> list[dict[str, object]]:
    """Every task of a play."""
    case = {**asdict(setting.case), "repeat": repeat}
    names = ("kind", "what", "stream", "round", "layer", "chunk", "bytes", "after")
    return [
        {**case, "task": index, **{name: getattr(task, name) for name in names}, "predicted_s": setting.seconds[index],
         "launched_s": round(spans.launched[index], 6), "start_s": round(spans.starts[index], 6),
         "end_s": round(spans.ends[index], 6)}
        for index, task in enumerate(setting.program.tasks)
    ]  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--dry", action="store_true", help="play against a clock instead of a GPU")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no further play begins")
    options = parser.parse_args(words)
    began = time.perf_counter()
    settings = [setting_of(case) for case in CASES]
    link = load_hardware("h200").link
    assert link is not None
    card = None
    report: dict[str, object] = {}
    if not options.dry:
        card = cuda_card(settings)
        print(f"memory is there after {time.perf_counter() - began:.0f} s", flush=True)
        report = {"products": card.calibrate(), "copies": measured_copies(card), "updates": measured_updates(card)}
        report["products again"] = card.calibrate()
        print(f"products: {report['products']}, {report['products again']}", flush=True)
    results: list[Result] = []
    rows: list[dict[str, object]] = []
    for repeat in range(options.repeats):
        for setting in settings:
            if time.perf_counter() - began > options.budget:
                print(f"{setting.case}: left out, the time is up", flush=True)
                continue
            spans = played(setting.program, setting.seconds, card or DryCard(link.bandwidth_bytes_per_s.value))
            results.append(result_of(setting, spans, link, repeat))
            rows += task_rows(setting, spans, repeat)
            print(f"{setting.case}: {shown(results[-1].step_s)}; {time.perf_counter() - began:.0f} s", flush=True)
            if options.output:
                write(options.output, {**report, "plays": [asdict(one) for one in results]}, rows)
    print_table(results)


if __name__ == "__main__":
    main()
