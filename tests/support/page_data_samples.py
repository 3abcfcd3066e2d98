"""Pages with made-up runs: a sweep over two caps with predictions, an out-of-memory row, profiles with every panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from random import Random
from typing import Any

from flopwise.records.measurement import Measurement, MemoryRow, RunRecord, StepRecord
from flopwise.records.profile import Clue, KernelClass, Peaks, Profile, Spent, TaskTime, Verdict, known
from flopwise.report.page.data import PageData, RunDetail, run_detail
from flopwise.setup.training import Training
from flopwise.store.results import Result, result_of_run

GIB = 2**30
CREATED = "2026-03-01T12:00:00+00:00"
DEVICE_CAPS, HOST_CAPS = (16, 24, 40, 80), (64, 128, 192)
OWNERS = ("weights", "gradients", "optimizer", "activations", "head", "workspace", "unaccounted")
LAYERS = 16


def memory_rows(device_cap: int) -> tuple[MemoryRow, ...]:
    """Every owner on the device, half of them on the host too; sizes grow with the cap."""
    shares = dict(zip(OWNERS, (0.26, 0.2, 0.1, 0.25, 0.03, 0.05, 0.01), strict=True))
    rows = []
    for owner, share in shares.items():
        planned = 0 if owner == "unaccounted" else int(share * device_cap * GIB)
        measured = int(share * device_cap * GIB * 1.01)
        rows.append(MemoryRow(place="device", owner=owner, planned_bytes=planned, measured_bytes=measured))
        if owner in {"weights", "optimizer", "activations"}:
            size = int(share * 100 * GIB)
            rows.append(MemoryRow(place="host", owner=owner, planned_bytes=size, measured_bytes=size))
    return tuple(rows)


def record(number: int, device_cap: int, host_cap: int, tokens_per_s: float, *, error: float = 0.02) -> RunRecord:
    """A run that ended, measured and predicted."""
    batch, sequence = 24, 8192
    step_s = batch * sequence / tokens_per_s
    measurement = Measurement(
        model="llama-3-8b",
        hardware="h200",
        devices=1,
        sequence_tokens=sequence,
        batch_sequences=batch,
        micro_batch_sequences=2,
        batch_tokens=batch * sequence,
        precision="bf16",
        optimizer="adamw",
        n_params=8_030_261_248,
        steps=18,
        step_s=step_s,
        step_s_p20=step_s * 0.995,
        step_s_p80=step_s * 1.006,
        tokens_per_s=tokens_per_s,
        tokens_per_s_p20=tokens_per_s * 0.994,
        tokens_per_s_p80=tokens_per_s * 1.005,
        model_flops=int(5.2e4 * 1e6 * batch * sequence),
        hardware_flops=int(5.5e4 * 1e6 * batch * sequence),
        convention="causal",
        mfu=tokens_per_s * 5.2e10 / 989e12,
        hfu=tokens_per_s * 5.5e10 / 989e12,
        peak_flops=989e12,
        peak_format="bf16",
        first_loss=3.1,
        last_loss=2.9,
        memory=memory_rows(device_cap),
        predicted_step_s=step_s / (1 + error),
        predicted_tokens_per_s=tokens_per_s * (1 + error),
    )
    return RunRecord(
        id=f"{number:04d}",
        state="done",
        started=f"2026-02-28T{10 + number // 60:02d}:{number % 60:02d}:00+00:00",
        ended="2026-02-28T23:00:00+00:00",
        model={"name": "llama-3-8b"},
        task="language",
        training=Training(steps=20),
        data={},
        steps_done=20,
        measurement=measurement,
        plan={
            "hardware": "h200",
            "sequence_tokens": sequence,
            "batch_sequences": batch,
            "precision": "bf16",
            "optimizer": "adamw",
            "device_memory_bytes": device_cap * GIB,
            "host_memory_bytes": host_cap * GIB,
            "saves": ["F", "F", "I", "I"],
        },
        environment={"flopwise": "0.1.0", "torch": "2.11.0", "gpu": "NVIDIA H200"},
        request={"device_memory_bytes": device_cap * GIB, "host_memory_bytes": host_cap * GIB},
    )


def tasks(layers: int = LAYERS) -> tuple[TaskTime, ...]:
    """A forward and backward pass with copies beside them; measured a little later than predicted."""
    found: list[tuple[str, str, float, float]] = []
    now = 0.0
    for layer in range(layers):
        found += [
            (f"forward {layer}", "compute", now, now + 0.30),
            (f"load weights {layer}", "copy-in", now, now + 0.21),
        ]
        found.append((f"store activations {layer}", "copy-out", now + 0.31, now + 0.48))
        now += 0.31
    found.append(("head", "compute", now, now + 0.2))
    now += 0.21
    for layer in reversed(range(layers)):
        found.append((f"backward {layer}", "compute", now, now + 0.62))
        found.append((f"load activations {layer}", "copy-in", now - 0.2, now + 0.1))
        found.append((f"store gradients {layer}", "copy-out", now + 0.62, now + 0.9))
        found.append((f"optimize {layer}", "host", now + 0.9, now + 1.3))
        now += 0.63
    return tuple(
        TaskTime(
            name=name,
            stream=stream,
            predicted_start_s=start,
            predicted_end_s=end,
            measured_start_s=start * 1.02 + 0.01,
            measured_end_s=end * 1.025 + 0.01,
        )
        for name, stream, start, end in found
    )


CLASSES: tuple[tuple[KernelClass, float], ...] = (
    ("gemm", 8.9),
    ("attention", 3.2),
    ("norm", 0.5),
    ("pointwise", 1.2),
    ("optimizer", 0.3),
    ("copy", 0.5),
)
OPERATORS: tuple[tuple[str, KernelClass, float, float | None, float | None], ...] = (
    ("aten::mm", "gemm", 7.9, 5.2e15, 2.1e12),
    ("flash_attention_backward", "attention", 2.1, 8.9e14, 3.5e11),
    ("flash_attention", "attention", 0.9, 4.2e14, 2.0e11),
    ("aten::rms_norm", "norm", 0.5, 9e11, 1.8e12),
    ("swiglu", "pointwise", 0.7, 1.1e12, 2.6e12),
    ("aten::cross_entropy", "other", 0.4, 4e11, 2e11),
    ("adamw", "optimizer", 0.3, 2.4e11, 1.1e12),
    ("aten::add_", "pointwise", 0.25, None, None),
    ("Memcpy HtoD", "copy", 0.2, None, 1.2e11),
)


def profile(name: str = "run 0001") -> Profile:
    """A profile with classes, engines, operators, tasks and traffic."""
    return Profile(
        name=name,
        format="flopwise",
        device="NVIDIA H200",
        steps=3,
        batch_sequences=24,
        sequence_tokens=8192,
        precision="bf16",
        peaks=Peaks(flops=989e12, bandwidth=4.8e12, number_format="bf16", source="datasheet"),
        values=known(
            "measured",
            (
                ("step_wall_s", 15.6),
                ("device_span_s", 15.4),
                ("device_busy_s", 14.6),
                ("idle_s", 0.8),
                ("idle_host_s", 0.2),
                ("idle_copy_s", 0.6),
                ("matrix_active_s", 11.2),
                ("copy_active_s", 9.1),
                ("copy_bytes", 4.2e11),
                ("copy_exposed_s", 0.35),
                ("hbm_read_bytes", 2.4e13),
                ("hbm_write_bytes", 9e12),
                ("mbu", 0.44),
                ("mfu", 0.588),
                ("hfu", 0.609),
                ("power_w", 640.0),
                ("clock_mean_hz", 1.71e9),
            ),
        ),
        classes=tuple(Spent(name=kind, kind=kind, seconds=seconds, count=100) for kind, seconds in CLASSES),
        operators=tuple(
            Spent(name=name, kind=kind, seconds=seconds, count=100, flops=flops, bytes=size)
            for name, kind, seconds, flops, size in OPERATORS
        ),
        tasks=tasks(),
        notes=("times of tasks are those of steps that were not traced",),
    )


VERDICTS = (
    Verdict(
        kind="compute_bound",
        share=0.27,
        advice="a faster format for products, such as fp8",
        evidence=(Clue(what="the matrix unit's active time", value=0.727, unit="share", bound=0.7, relation=">"),),
    ),
    Verdict(
        kind="data_movement_bound",
        share=0.04,
        advice="more device memory, so that fewer blocks pass",
        evidence=(Clue(what="copies with no computation beside them", value=0.023, unit="share"),),
    ),
)


def steps(count: int = 20, step_s: float = 17.4) -> list[StepRecord]:
    """The first two are slow; the others wobble."""
    return [
        StepRecord(
            step=step,
            loss=3.4 - 0.5 * (1 - 0.9**step),
            learning_rate=1e-4,
            step_s=step_s * (1.6 if step < 3 else 1 + 0.008 * (step % 3)),
            tokens=196_608,
            samples=24,
            tokens_per_s=11_200.0,
            mfu=0.58,
            predicted_s=step_s,
        )
        for step in range(1, count + 1)
    ]


def sweep_rows() -> tuple[list[Result], dict[str, RunDetail]]:
    """Twelve cells of two caps: one is out of memory, one timed out; those with 40 GiB are profiled."""
    rows: list[Result] = []
    details: dict[str, RunDetail] = {}
    number = 0
    for host in HOST_CAPS:
        for device in DEVICE_CAPS:
            number += 1
            speed = 11_900 * (1 - 0.35 * (16 / device) ** 1.4) * (1 - 0.12 * 64 / host)
            error = ((number * 37) % 23 - 9) / 100
            run = record(number, device, host, speed, error=error)
            row = result_of_run(replace(run, bound="compute_bound" if device > 24 else "data_movement_bound"))
            if device == 16 and host == 64:
                reason = "out of memory: 17.3 GiB are needed and 16 GiB are there"
                rows.append(replace(blank(row), state="oom", run=None, reason=reason, predicted_fits=False))
            elif device == 16 and host == 128:
                rows.append(replace(blank(row), state="timeout", reason="no step within 300 s"))
                details[run.id] = run_detail(replace(run, state="interrupted", measurement=None), None, ())
            else:
                rows.append(row)
                is_profiled = device == 40
                found = profile(f"run {run.id}") if is_profiled else None
                details[run.id] = run_detail(run, found, VERDICTS if is_profiled else (), steps())
    return rows, details


def blank(row: Result) -> Result:
    """A row of a run that was not measured."""
    return replace(
        row,
        tokens_per_s=None,
        step_s=None,
        mfu=None,
        hfu=None,
        prediction_error=None,
        device_bytes=None,
        host_bytes=None,
        last_loss=None,
        bound=None,
    )


def sweep_page(title: str = "llama-3-8b under memory caps") -> PageData:
    rows, details = sweep_rows()
    return PageData(title=title, created=CREATED, rows=rows, details=details)


def many_rows(count: int) -> list[Result]:
    """Rows in which every figure is another one."""
    template = result_of_run(replace(record(1, 40, 128, 11_000.0), bound="compute_bound"))
    found = []
    for number in range(1, count + 1):
        speed = 1000.0 + (number * 7919 % 100_003) / 7
        predicted = speed * (1 + ((number * 31) % 41 - 20) / 137)
        found.append(
            replace(
                template,
                run=f"{number:04d}",
                cell=f"{number:012x}",
                model=f"mpt-{125 * (1 + number % 7)}m",
                state=("ok", "ok", "ok", "ok", "oom")[number % 5],
                sequence_tokens=512 * 2 ** (number % 8),
                tokens_per_s=speed,
                tokens_per_s_p20=speed * 0.991,
                tokens_per_s_p80=speed * 1.013,
                step_s=1e5 / speed,
                step_s_p20=0.99e5 / speed,
                step_s_p80=1.01e5 / speed,
                mfu=speed / 31_001,
                hfu=speed / 29_003,
                predicted_tokens_per_s=predicted,
                prediction_error=predicted / speed - 1,
                predicted_step_s=1e5 / predicted,
                samples_per_s=speed / 8191,
                last_loss=2 + speed / 9001,
                tokens_per_s_per_device=speed,
                device_bytes=number * 1_234_567,
            )
        )
    return found


def page_of(rows: Sequence[Result], title: str = "many runs") -> PageData:
    return PageData(title=title, created=CREATED, rows=list(rows))


WORDS = ("", "a|b", "`", "x" * 300, "2026-01-01", "=1+1", "compute_bound", "</script><b>")
NUMBERS = (0.0, -1.0, 1e-12, float("nan"), float("inf"), 0.5, 12_345.6, 9e17)
STATES = ("ok", "oom", "timeout", "failed", "skipped", "planned", "running", "interrupted", "unreadable", "odd")


def holey_rows(count: int, seed: int) -> list[Result]:
    """Rows with anything in any column, and often nothing."""
    chance = Random(seed)  # noqa: S311 - nothing here is secret

    def value(name: str, kind: str) -> Any:
        if name == "state":
            return chance.choice(STATES)
        if name == "run":
            return chance.choice((None, f"{chance.randrange(99):04d}"))
        if chance.random() < 0.4:
            return None
        if "bool" in kind:
            return chance.random() < 0.5
        if "int" in kind:
            return chance.choice((0, 1, 7, chance.randrange(10**12)))
        return chance.choice(NUMBERS if "float" in kind else WORDS)

    found = [{each.name: value(each.name, str(each.type)) for each in fields(Result)} for _ in range(count)]
    return [Result(**{**row, "source": chance.choice(("measured", "predicted", "imported"))}) for row in found]


def holey_details(rows: Sequence[Result], seed: int) -> dict[str, RunDetail]:
    """Details with parts that are missing, empty, negative or not a number."""
    chance = Random(seed)  # noqa: S311 - nothing here is secret
    odd = (None, 0.0, 1e-9, float("nan"), 2.0)
    details = {}
    for name in sorted({row.run for row in rows if row.run}):
        whole = profile(f"run {name}")
        spans = [
            TaskTime(
                name="x 1",
                stream=chance.choice(("compute", "copy-in", "other")),
                predicted_start_s=chance.choice(odd),
                predicted_end_s=chance.choice(odd),
                measured_start_s=chance.choice(odd),
                measured_end_s=chance.choice(odd),
            )
            for _ in range(chance.randrange(5))
        ]
        operators = tuple(
            Spent(
                name="o" * chance.randrange(90),
                kind="gemm",
                seconds=chance.choice((0.0, 1e-9, 3.0)),
                count=1.0,
                flops=chance.choice((*odd, 1e12)),
                bytes=chance.choice((*odd, 1e9)),
            )
            for _ in range(chance.randrange(4))
        )
        part = replace(
            whole,
            tasks=tuple(spans),
            operators=operators,
            classes=chance.choice(((), whole.classes)),
            peaks=chance.choice((None, whole.peaks, Peaks(flops=1e9, bandwidth=None, number_format="", source=""))),
            values={key: found for key, found in whole.values.items() if chance.random() < 0.5},
        )
        run = replace(record(1, 40, 128, 11_000.0), id=name)
        assert run.measurement is not None
        sizes = (0, -5, 10**13)
        memory = tuple(
            replace(row, planned_bytes=chance.choice(sizes), measured_bytes=chance.choice(sizes))
            for row in run.measurement.memory
        )
        measured = chance.choice((None, run.measurement, replace(run.measurement, memory=memory)))
        few = [replace(step, loss=chance.choice((step.loss, float("nan")))) for step in steps(chance.randrange(4))]
        found = chance.choice((None, part))
        details[name] = run_detail(replace(run, measurement=measured), found, chance.choice(((), VERDICTS)), few)
    return details
