"""`flopwise train --profile`: a window of steady steps that are traced, then some that are counted as they always run.

Tracing slows the host down, on a CPU by several per cent. So clocks, power, the matrix unit's activity, the times of
tasks and the rates come from steps that are not traced, and what the time was spent on from those that are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from flopwise.core.cluster_plan import ClusterPlan
from flopwise.core.describe import describe
from flopwise.core.errors import FlopwiseError
from flopwise.core.files import write_whole
from flopwise.core.hardware import Hardware
from flopwise.core.measurement import MemoryRow, StepRecord
from flopwise.core.op import Attention
from flopwise.core.plan import Plan
from flopwise.core.profile import MemoryOwner, MemoryUse, Peaks, Profile, Spent, TaskTime, Value, known
from flopwise.core.program import Program, task_name
from flopwise.core.store import PROFILE, to_text
from flopwise.engine.executor import Executor
from flopwise.engine.streaming import StreamingExecutor
from flopwise.engine.streams import Span
from flopwise.plan.forecast import executed_flops
from flopwise.predict.simulator import simulate
from flopwise.predict.tasks import TaskSeconds
from flopwise.profile import kineto
from flopwise.profile.opening import opened
from flopwise.profile.recording import Recorder
from flopwise.profile.sampling import CounterRecord, counters_values, read_counter_record, sampler_for
from flopwise.train.events import Callback
from flopwise.train.preparing import Prepared

WARM_UP_STEPS = 2
TRACED_STEPS = 3
MOST_TASKS = 4000
"""Of a step, how many a profile keeps."""

OWNERS: dict[str, MemoryOwner] = {
    "weights": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "stream": "activations",
    "context": "activations",
    "head": "activations",
    "workspace": "runtime",
}
"""Whose memory a plan's owner is in a profile."""


class RunProfiler(Callback):
    """Watches a training's steps, and leaves `profile.json`, the trace and the counters in its folder."""

    def __init__(
        self, folder: Path, executor: Executor, prepared: Prepared, *, done: int, traced: int | None, world: int
    ) -> None:
        """`done`: steps before the first one, of a run that is resumed. `traced`: how many to trace; None: a few."""
        self.folder, self.executor, self.prepared, self.world = folder, executor, prepared, world
        left = prepared.training.steps - done
        steps = max(1, min(traced or TRACED_STEPS, left - 1))
        warm_up = max(1, min(WARM_UP_STEPS, left - steps))
        self.first = done + warm_up + 1
        self.last = done + warm_up + steps
        self.task_times: dict[int, Span] = {}
        self.records: dict[int, StepRecord] = {}
        self.problem: str | None = None
        self._recorder = Recorder(
            folder, warm_up=warm_up, steps=steps, rank=0, sampler=lambda: sampler_for(prepared.device)
        )

    # -- while it runs --------------------------------------------------------------------------------------------

    def on_step(self, record: StepRecord) -> None:
        if record.step >= self.first:
            self.records[record.step] = record

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        streaming = self.executor if isinstance(self.executor, StreamingExecutor) else None
        if self._recorder.done or self.problem:
            yield
            return
        if streaming:
            streaming.times_tasks = step >= self.first
        yield
        if streaming:
            self.task_times = streaming.task_times()
            streaming.times_tasks = False
        try:
            self._recorder.step()
        except (OSError, RuntimeError) as error:
            # A disk that is full costs the profile and not the training.
            self.problem = f"the trace could not be written: {error}"

    # -- at its end -----------------------------------------------------------------------------------------------

    def close(self) -> str | None:
        """Write the profile; returns why there is none, where there is none."""
        try:
            if self.problem is None:
                self._recorder.close()
            traces = [path for path in self._recorder.written if path.name.startswith("trace")]
            if not traces:
                return self.problem or "the run ended before a step was traced"
            with opened(traces[0]) as source:
                read = kineto.read_source(source, traces[0].name)
            profile = self._assembled(read.profiles[0], self._counters())
            write_whole(self.folder / PROFILE, to_text(profile) + "\n")
        except FlopwiseError as error:
            return error.what if error.why is None else f"{error.what}: {error.why}"
        except (OSError, RuntimeError) as error:
            return str(error)
        return None

    def _counters(self) -> CounterRecord | None:
        files = [path for path in self._recorder.written if path.name.startswith("counters")]
        return read_counter_record(files[0]) if files else None

    def _traced_s(self) -> float:
        """Mean of a traced step."""
        return fmean(record.step_s for step, record in self.records.items() if step <= self.last)

    def _steady(self) -> list[StepRecord]:
        """Steps that were not traced."""
        return [record for step, record in sorted(self.records.items()) if step > self.last]

    def _assembled(self, trace: Profile, counted: CounterRecord | None) -> Profile:
        prepared, plan, memory = self.prepared, self.prepared.plan, self.executor.memory()
        peaks = _peaks(prepared, self.world)
        span_s = trace.get("device_span_s") or self._traced_s()
        measured = {
            name: replace(value, source="measured") if value.source == "ingested" else value
            for name, value in trace.values.items()
        }
        values = {
            **measured,
            **known("measured", [("step_wall_s", self._traced_s())]),
            **self._rates(peaks),
            **(counters_values(counted.counters, span_s, steps=counted.steps) if counted else {}),
        }
        device = [row for row in memory if row.place == "device"]
        return replace(
            trace,
            name=f"run {self.folder.name}",
            format="flopwise",
            origin=(trace.name,),
            device=prepared.hardware.title,
            rank=0 if self.world > 1 else None,
            world=self.world,
            batch_sequences=-(-prepared.promise.batch_sequences // self.world),
            sequence_tokens=plan.sequence_tokens,
            precision=plan.precision,
            peaks=peaks,
            values=values,
            classes=self._with_flops(trace.classes),
            memory=memory_uses(device),
            memory_total_bytes=float(sum(row.measured_bytes for row in device)),
            memory_capacity_bytes=prepared.hardware.device.dram.size_bytes.value,
            memory_planned=memory,
            tasks=self._tasks(),
            system={**trace.system, **_limits(counted)},
            notes=(*trace.notes, *self._notes()),
        )

    def _rates(self, peaks: Peaks | None) -> dict[str, Value]:
        """Of the steps that were counted and not traced: what the training itself reports."""
        promise, model = self.prepared.promise, self.prepared.model
        records = self._steady() or list(self.records.values())
        seconds = fmean(record.step_s for record in records)
        whole = promise.batch_sequences * describe(model, self.prepared.plan.sequence_tokens).model_flops("causal")
        flops = float(whole)
        if peaks and all(record.mfu is not None for record in records):
            # Sequences that are padded to the longest of a batch differ from step to step.
            flops = fmean((record.mfu or 0.0) * record.step_s for record in records) * peaks.flops * self.world
        executed = None if promise.hardware_flops is None else promise.hardware_flops * flops / whole
        counted = [("model_flops", flops / self.world)]
        shares = []
        if executed is not None:
            counted.append(("hardware_flops", executed / self.world))
        if peaks:
            shares = [("mfu", flops / self.world / (seconds * peaks.flops))]
            if executed is not None:
                shares.append(("hfu", executed / self.world / (seconds * peaks.flops)))
            if peaks.bandwidth:
                counted.append(("ridge", peaks.flops / peaks.bandwidth))
        shares.append(("tokens_per_s", fmean(record.tokens for record in records) / seconds))
        shares.append(("samples_per_s", fmean(record.samples for record in records) / seconds))
        return {**known("counted", counted), **known("measured", shares)}

    def _with_flops(self, classes: tuple[Spent, ...]) -> tuple[Spent, ...]:
        """Products and attention with the FLOPs that the plan executes."""
        plan, model = self.prepared.plan, self.prepared.model
        if not isinstance(plan, Plan):
            return classes
        share = self.prepared.promise.batch_sequences / (plan.rounds_per_step * plan.sequences_per_round)
        by_operator = executed_flops(plan, model, "causal")
        attention = {op.name for op in describe(model, plan.sequence_tokens).ops if isinstance(op, Attention)}
        of_attention = sum(float(flops) for name, flops in by_operator.items() if name in attention)
        whole = sum(float(flops) for flops in by_operator.values())
        flops = {"attention": share * of_attention, "gemm": share * (whole - of_attention)}
        return tuple(replace(row, flops=flops.get(row.kind)) for row in classes)

    def _tasks(self) -> tuple[TaskTime, ...]:
        if not isinstance(self.executor, StreamingExecutor) or not self.task_times:
            return ()
        program, plan = self.executor.program, self.prepared.plan
        assert isinstance(plan, Plan)
        predicted = _predicted(program, plan, self.prepared)
        return tuple(
            TaskTime(
                name=task_name(task),
                stream=task.stream,
                predicted_start_s=None if predicted is None else predicted[index][0],
                predicted_end_s=None if predicted is None else predicted[index][1],
                measured_start_s=self.task_times[index][0],
                measured_end_s=self.task_times[index][1],
            )
            for index, task in enumerate(program.tasks[:MOST_TASKS])
            if index in self.task_times
        )

    def _notes(self) -> Iterator[str]:
        steady = self._steady()
        if steady:
            slower = self._traced_s() / fmean(record.step_s for record in steady)
            yield (
                f"rates, clocks and times of tasks are those of steps that were not traced ({len(steady):,}); traced "
                f"ones took {slower:.2f} times as long"
            )
        if isinstance(self.prepared.plan, ClusterPlan):
            yield f"rank 0 of {self.world}"
        if isinstance(self.executor, StreamingExecutor) and len(self.executor.program.tasks) > MOST_TASKS:
            yield f"of the step's {len(self.executor.program.tasks):,} tasks the first {MOST_TASKS:,} are kept"


def _limits(counted: CounterRecord | None) -> dict[str, str]:
    """Why the clock was not the highest."""
    reasons = counted.counters.reasons if counted else {}
    return {f"limited by {word}": f"{share:.0%} of the samples" for word, share in reasons.items()}


def memory_uses(rows: list[MemoryRow]) -> tuple[MemoryUse, ...]:
    """A plan's owners under the names that profiles have."""
    return tuple(
        MemoryUse(owner=OWNERS.get(row.owner, "other"), bytes=float(row.measured_bytes), name=row.owner) for row in rows
    )


def _peaks(prepared: Prepared, world: int) -> Peaks | None:
    """Of one device; a promise has those of all."""
    promise, hardware = prepared.promise, prepared.hardware
    if promise.peak_flops is None or promise.peak_format is None:
        return None
    bandwidth = hardware.device.dram.bandwidth_bytes_per_s
    return Peaks(
        flops=promise.peak_flops / world,
        bandwidth=None if bandwidth is None else bandwidth.value,
        number_format=promise.peak_format,
        source=_source_kind(hardware, promise.peak_format),
    )


def _source_kind(hardware: Hardware, number_format: str) -> str:
    fact = hardware.device.peak_flops.get(number_format)
    source = hardware.sources.get(fact.source) if fact else None
    return source.kind if source else "derived"


def _predicted(program: Program, plan: Plan, prepared: Prepared) -> list[tuple[float, float]] | None:
    """When the simulator has each task run; None where the hardware's speed is not known for these formats."""
    try:
        seconds = TaskSeconds(plan, prepared.model, prepared.hardware).of(program)
        played = simulate(program, seconds, prepared.hardware.link, peaks=False)
    except FlopwiseError:
        return None
    return list(zip(played.starts, played.ends, strict=True))
