"""Train on this machine's GPU as planned: `python -m benchmarks.gpu_train --output FOLDER [--cases 0,2]`.

For every case a plan is found under its caps, compiled and played by the streaming executor for a few steps with random
weights and tokens. The table puts what was measured beside what was planned: time, memory, waiting. It is no benchmark
of what the card can do (a few steps are not a sustained load) but a check that plans run as promised.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_cells import draw_weights
from flopwise.catalog.load import load_hardware, load_model
from flopwise.engine.batch import Batch
from flopwise.engine.streaming.executor import StreamingExecutor
from flopwise.plan.device.explain import make_plan
from flopwise.plan.program.compile import compile_plan
from flopwise.records.program import Stream
from flopwise.setup.setup import CappedSetup
from flopwise.setup.training import Training
from flopwise.work.formats import parse_formats
from flopwise.work.transformer import Transformer

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """A model under caps."""

    model: str
    sequence_tokens: int
    batch_sequences: int
    device_gib: float
    host_gib: float
    precision: str = "bf16"
    steps: int = 4


CASES = (
    Case("llama-3-1b", 8192, 8, 130, 0),
    Case("llama-3-1b", 8192, 8, 10, 40),
    Case("llama-3-8b", 8192, 8, 132, 0),
    Case("llama-3-8b", 8192, 8, 40, 72),
    Case("llama-3-8b", 65536, 1, 78, 72, steps=3),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A case as it ran."""

    model: str
    sequence_tokens: int
    batch_tokens: int
    device_cap_bytes: int
    planned_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    predicted_step_s: float
    step_s: float
    waited_s: float
    tokens_per_s: float
    mfu: float
    first_loss: float
    last_loss: float
    tasks: int
    submit_s: float
    """Time until the host had handed over all tasks of a step."""
    fullest: str
    """The task at which the most memory was allocated, and how much of it was beside the slab, in MiB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cases", default="")
    given = parser.parse_args()
    chosen = [CASES[int(number)] for number in given.cases.split(",")] if given.cases else list(CASES)
    given.output.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for case in chosen:
        begun = time.perf_counter()
        rows.append(_run(case))
        gc.collect()
        print(f"{rows[-1]}\n  after {time.perf_counter() - begun:.0f} s", flush=True)
        with (given.output / "gpu_train.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    print(f"{'model':12} {'seq':>6} {'cap':>6} {'plan':>7} {'peak':>7} {'pred s':>7} {'meas s':>7} {'wait s':>7} "
          f"{'tok/s':>8} {'MFU':>6} {'submit':>7} loss")  # fmt: skip
    for row in rows:
        print(
            f"{row.model:12} {row.sequence_tokens:6} {row.device_cap_bytes / GIB:6.1f} {row.planned_bytes / GIB:7.2f} "
            f"{row.peak_allocated_bytes / GIB:7.2f} {row.predicted_step_s:7.3f} {row.step_s:7.3f} {row.waited_s:7.3f} "
            f"{row.tokens_per_s:8.0f} {row.mfu:6.3f} {row.submit_s:7.3f} {row.first_loss:.3f} → {row.last_loss:.3f}"
        )


def _run(case: Case) -> Row:
    model, hardware = load_model(case.model), load_hardware("h200")
    assert isinstance(model, Transformer)
    question = CappedSetup(
        model=model,
        hardware=hardware,
        sequence_tokens=case.sequence_tokens,
        device_cap_bytes=int(case.device_gib * GIB),
        host_cap_bytes=int(case.host_gib * GIB),
        formats=parse_formats(case.precision),
        batch_sequences=case.batch_sequences,
    )
    found = make_plan(question, helps=False)
    program = compile_plan(found.plan, model)
    training = Training(steps=case.steps, learning_rate=1e-4)
    torch.cuda.empty_cache()
    executor = StreamingExecutor(found.plan, program, model, training, device=torch.device("cuda"))
    draw_weights(executor, "cuda")
    batch = _batch(model, case)
    peaks = _watched(executor)
    seconds, waits, losses, submits = [], [], [], []
    for step in range(case.steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        result = executor.step(batch, step)
        seconds.append(time.perf_counter() - begun)
        submits.append(executor.submit_s)
        waits.append(result.waited_s or 0.0)
        losses.append(result.loss)
    print({kind: f"{size / 2**20:.0f} MiB" for kind, size in peaks.items()}, executor.slabs.left_to_libraries)
    executor.close()
    step_s = float(np.median(seconds[1:]))
    tokens = case.batch_sequences * case.sequence_tokens
    return Row(
        model=case.model,
        sequence_tokens=case.sequence_tokens,
        batch_tokens=tokens,
        device_cap_bytes=question.device_cap_bytes,
        planned_bytes=found.forecast.device_total,
        peak_allocated_bytes=executor.slabs.device_slab.numel() + max(peaks.values()),
        peak_reserved_bytes=int(torch.cuda.max_memory_reserved()),
        predicted_step_s=found.forecast.step_s,
        step_s=step_s,
        waited_s=float(np.median(waits[1:])),
        tokens_per_s=tokens / step_s,
        mfu=found.forecast.model_flops / (step_s * found.forecast.peak_flops),
        first_loss=losses[0],
        last_loss=losses[-1],
        tasks=len(program.tasks),
        submit_s=float(np.median(submits[1:])),
        fullest=max(peaks, key=lambda kind: peaks[kind]) + f" {max(peaks.values()) / 2**20:.0f}",
    )


def _watched(executor: StreamingExecutor) -> dict[str, int]:
    """By kind of task the most bytes that were allocated beside the slab while one was handed over."""
    peaks: dict[str, int] = {}
    run, slab = executor._streams.run, executor.slabs.device_slab.numel()

    def watch(index: int, stream: Stream, after: Sequence[int], work: Callable[[], None]) -> None:
        torch.cuda.reset_peak_memory_stats()
        run(index, stream, after, work)
        kind = executor.program.tasks[index].kind
        peaks[kind] = max(peaks.get(kind, 0), int(torch.cuda.max_memory_allocated()) - slab)

    executor._streams.run = watch  # type: ignore[method-assign]
    return peaks


def _batch(model: Transformer, case: Case) -> Batch:
    """The same tokens every step, so that the loss must fall."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, model.vocab, (case.batch_sequences, case.sequence_tokens + 1), dtype=np.int32)
    return Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]))


if __name__ == "__main__":
    main()
