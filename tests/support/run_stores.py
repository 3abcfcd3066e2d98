"""Small stores of runs that were never run: realistic records, steps and profiles, in sweeps or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from flopwise.base.files import write_whole
from flopwise.base.units import AUTO
from flopwise.catalog.load import load_model, model_table
from flopwise.profile.explain.verdicts import first_verdict
from flopwise.records.measurement import Measurement, MemoryRow, RunRecord, StepRecord
from flopwise.records.profile import Peaks, Profile, Spent, known
from flopwise.setup.training import Training
from flopwise.setup.written import CellSetup, cell_id
from flopwise.store.cells import Attempt, Cell, CellOutcome, CellState, SweepRecord
from flopwise.store.rows import write_row
from flopwise.store.runs import PROFILE, RECORD, StepLog, new_run, read_record, to_text, write_record
from flopwise.store.sweeps import new_attempt, write_attempt, write_cell, write_sweep

GIB = 2**30
STARTED = "2026-11-15T12:00:00+00:00"
ENVIRONMENT = {
    "python": "3.11.7",
    "flopwise": "0.1.0",
    "torch": "2.13.0",
    "cuda": "13.0",
    "driver": "590.44",
    "gpu": "NVIDIA H200",
    "commit": "03baa9ee40adcb5108631f1ea60b4a21473c4b10",
}
PEAK_FLOPS = 989e12
WARM_UP = (1.6, 1.15)
"""How much longer the first steps take."""


def noisy_steps(
    count: int,
    step_s: float = 0.5,
    *,
    noise: float = 0.004,
    correlation: float = 0.5,
    outliers: float = 0.01,
    seed: int = 0,
) -> list[float]:
    """Step times like a GPU's: neighbours alike, a few far longer, the first ones slow."""
    generator = np.random.default_rng(seed)
    draws = generator.normal(0.0, 1.0, count)
    level, times = float(generator.normal()), []
    for number in range(count):
        level = correlation * level + (1 - correlation**2) ** 0.5 * float(draws[number])
        late = 1 + float(generator.exponential(0.3)) if generator.random() < outliers else 1.0
        times.append(step_s * (1 + noise * level) * late * (WARM_UP[number] if number < len(WARM_UP) else 1.0))
    return times


def a_measurement(times: Sequence[float], model: str = "gpt2", **changes: Any) -> Measurement:
    """Of steps that took so long."""
    plain: dict[str, Any] = {
        **{"hardware": "h200", "devices": 1, "sequence_tokens": 1024},
        **{"batch_sequences": 16, "micro_batch_sequences": 8, "precision": "bf16", "optimizer": "adamw"},
    }
    plain |= {name: changes.pop(name) for name in list(changes) if name in plain}
    tokens = plain["batch_sequences"] * plain["sequence_tokens"]
    seconds = sorted(times[2:] if len(times) > 4 else times)
    step_s, fast, slow = median(seconds), seconds[len(seconds) // 5], seconds[(4 * len(seconds)) // 5]
    flops = 6 * 124_439_808 * tokens
    mfu = flops / step_s / PEAK_FLOPS / plain["devices"]
    measurement = Measurement(
        **plain,
        model=model,
        batch_tokens=tokens,
        n_params=124_439_808,
        steps=len(seconds),
        step_s=step_s,
        step_s_p20=fast,
        step_s_p80=slow,
        tokens_per_s=tokens / step_s,
        tokens_per_s_p20=tokens / slow,
        tokens_per_s_p80=tokens / fast,
        model_flops=flops,
        hardware_flops=flops,
        convention="causal",
        mfu=mfu,
        hfu=mfu,
        peak_flops=PEAK_FLOPS * plain["devices"],
        peak_format="bf16",
        first_loss=10.9,
        last_loss=4.2,
        memory=(
            MemoryRow(place="device", owner="weights", planned_bytes=GIB, measured_bytes=GIB),
            MemoryRow(place="device", owner="activations", planned_bytes=9 * GIB, measured_bytes=9 * GIB + 4096),
            MemoryRow(place="host", owner="optimizer", planned_bytes=2 * GIB, measured_bytes=2 * GIB),
        ),
        predicted_step_s=step_s * 0.97,
        predicted_tokens_per_s=tokens / step_s / 0.97,
    )
    return replace(measurement, **changes)


def a_record(
    run: str = "0001", times: Sequence[float] | None = None, *, model: str = "gpt2", **changes: Any
) -> RunRecord:
    """A run that is done; `changes` are fields of its record or of its measurement."""
    seconds = noisy_steps(20) if times is None else times
    of_measurement = {name: changes.pop(name) for name in list(changes) if name in Measurement.__dataclass_fields__}
    measurement = a_measurement(seconds, model, **of_measurement)
    plain: dict[str, Any] = {
        "id": run,
        "state": "done",
        "started": STARTED,
        "ended": STARTED.replace("12:00", "12:10"),
        "model": model_table(load_model(model)),
        "hardware": measurement.hardware,
        "task": "language",
        "training": Training(steps=len(seconds)),
        "plan": {
            "hardware": measurement.hardware,
            "sequence_tokens": measurement.sequence_tokens,
            "precision": measurement.precision,
            "optimizer": measurement.optimizer,
            "saves": ["Fi", "FF"],
            "expected": {"step_s": measurement.predicted_step_s, "device_bytes": 10 * GIB, "host_bytes": 2 * GIB},
        },
        "data": {"sources": ["text"], "tokens": 1_000_000, "fingerprint": "ab" * 32},
        "environment": dict(ENVIRONMENT),
        "steps_done": len(seconds),
        "measurement": measurement,
        "metrics": {"train_loss": 5.0},
        "request": {"batch_sequences": measurement.batch_sequences, "profile": False},
    }
    record = RunRecord(**(plain | changes))
    return replace(record, cell=record.cell or cell_id(settings_of(record, measurement)))


def settings_of(record: RunRecord, measurement: Measurement) -> CellSetup:
    """The set-up that a run of `a_record` is of."""
    return CellSetup(
        model=record.model,
        hardware=measurement.hardware,
        devices=measurement.devices,
        sequence_tokens=measurement.sequence_tokens,
        batch_sequences=measurement.batch_sequences,
        micro_batch_sequences=record.request.get("micro_batch_sequences") or AUTO,
        precision=measurement.precision,
        optimizer=measurement.optimizer,
        task=record.task,
        device_memory_bytes=record.request.get("device_memory_bytes"),
        host_memory_bytes=record.request.get("host_memory_bytes"),
    )


def a_profile(name: str = "run 0001", **values: float) -> Profile:
    """Of one step on one H200."""
    plain = {
        **{"device_span_s": 0.5, "device_busy_s": 0.45, "idle_s": 0.05, "mfu": 0.4},
        **{"clock_mean_hz": 1.7e9, "power_w": 610.0, "power_limit_w": 700.0, "energy_j": 305.0},
    }
    return Profile(
        name=name,
        format="flopwise",
        device="NVIDIA H200",
        steps=3,
        peaks=Peaks(flops=PEAK_FLOPS, bandwidth=4.8e12, number_format="bf16", source="datasheet"),
        values=known("measured", (plain | values).items()),
        classes=(Spent(name="gemm", kind="gemm", seconds=0.3, count=200),),
    )


def write_run(
    store: Path, times: Sequence[float] | None = None, *, profile: Profile | None = None, **changes: Any
) -> RunRecord:
    """A run under the next number, with its steps; fields that change as `a_record` has them."""
    folder = new_run(store)
    seconds = noisy_steps(20, seed=int(folder.name)) if times is None else times
    record = a_record(folder.name, seconds, **changes)
    if profile is not None:
        record = replace(record, profile=PROFILE, bound=first_verdict(profile))
        write_whole(folder / PROFILE, to_text(profile) + "\n")
    keep(folder, record)
    batch = record.measurement.batch_tokens if record.measurement else 16_384
    with StepLog(folder) as log:
        for number, step_s in enumerate(seconds, 1):
            loss, rate = 10.9 - 6.7 * number / len(seconds), batch / step_s
            log.append(
                StepRecord(
                    step=number,
                    loss=loss,
                    learning_rate=3e-4,
                    step_s=step_s,
                    tokens=batch,
                    samples=16,
                    tokens_per_s=rate,
                    mfu=0.4,
                )
            )
    return record


def keep(folder: Path, record: RunRecord) -> None:
    """As a run leaves its record, and when it has ended its row."""
    write_record(folder, record)
    if record.state != "running":
        write_row(folder, record)


def a_cell(record: RunRecord | None = None, **changes: Any) -> Cell:
    """The cell that a run has measured, with a prediction."""
    of = record or a_record()
    measured = of.measurement
    assert measured is not None
    settings: CellSetup = replace(settings_of(of, measured), **changes)
    foreseen = CellOutcome(
        fits=True,
        method="plan",
        step_s=0.49,
        tokens_per_s=33_437.0,
        device_bytes=10 * GIB,
        host_bytes=2 * GIB,
        batch_sequences=16,
        micro_batch_sequences=8,
        bound="compute",
    )
    return Cell(id=cell_id(settings), settings=settings, foreseen=foreseen)


def write_attempted(
    store: Path, cell: Cell, state: CellState = "ok", *, run: str | None = None, repeat: int = 1, **changes: Any
) -> Attempt:
    """An attempt of a cell, with the cell where it is not there yet; its run is told that it is this attempt."""
    write_cell(store, cell)
    plain = Attempt(number=0, cell=cell.id, repeat=repeat, state=state, started=STARTED, steps=20, run=run)
    attempt = replace(new_attempt(store, plain), **changes)
    write_attempt(store, attempt)
    if run is not None and (store / run / RECORD).exists():
        keep(store / run, replace(read_record(store / run), cell=cell.id, attempt=attempt.number))
    return attempt


def make_store(
    folder: Path,
    runs: int | Sequence[Mapping[str, Any]] = 3,
    *,
    step_s: float = 0.5,
    steps: int = 40,
    sweep: str | None = None,
    repeats: int = 1,
    profiled: bool = False,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A store of runs, of sequences 512, 1,024, … tokens long, or with the changes that are given for each.

    With a name for a `sweep` each of them is a cell, measured so many times.
    """
    each = [{"sequence_tokens": 512 * (number + 1)} for number in range(runs)] if isinstance(runs, int) else runs
    cells: list[str] = []
    for number, own in enumerate(each):
        for repeat in range(1, repeats + 1):
            given = {**changes, **own}
            length = given.pop("step_s", step_s * (number + 1))
            times = noisy_steps(steps, length, seed=seed + 100 * number + repeat)
            record = write_run(folder, times, profile=a_profile() if profiled else None, **given)
            if sweep is not None:
                cell = a_cell(record)
                write_attempted(folder, cell, run=record.id, repeat=repeat, sweep=sweep)
                cells.append(cell.id)
    if sweep is not None:
        unique = tuple(dict.fromkeys(cells))
        write_sweep(folder, SweepRecord(name=sweep, created=STARTED, cells=unique, steps=steps, repeats=repeats))
    return folder
