"""`flopwise train --profile`: a window of steady steps that are traced, then some that are counted as they always run.

Tracing slows the host down, on a CPU by several per cent. So clocks, power, the matrix unit's activity, the times of
tasks and the rates come from steps that are not traced, and what the time was spent on from those that are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import write_whole
from flopwise.engine.executor import Executor
from flopwise.engine.streaming.executor import StreamingExecutor
from flopwise.engine.streaming.streams import Span
from flopwise.engine.streaming.watching import MixtureUse
from flopwise.plan.device.forecast import executed_flops
from flopwise.predict.simulate.simulator import memory_points, simulate
from flopwise.predict.simulate.tasks import TaskSeconds
from flopwise.profile.explain.intervals import highest_points
from flopwise.profile.measure.recording import Recorder
from flopwise.profile.measure.sampling import CounterRecord, counters_values, read_counter_record
from flopwise.profile.read import kineto
from flopwise.profile.read.opening import open_trace
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.measurement import Measurement, MemoryRow, StepRecord
from flopwise.records.plan import Plan
from flopwise.records.profile import PLAN_OWNERS, MemoryUse, Peaks, Profile, SourcedValue, Spent, TaskTime, known
from flopwise.records.program import Program, task_name
from flopwise.records.simulation import Simulation
from flopwise.setup.hardware import Hardware
from flopwise.store.runs import PROFILE, to_text
from flopwise.train.events import Callback
from flopwise.train.preparing import Prepared
from flopwise.train.request import TrainRequest
from flopwise.work.describe import describe
from flopwise.work.op import Attention

WARM_UP_STEPS = 2
TRACED_STEPS = 3
LONGEST_TRACE_S = 20.0
"""Behind the step in which it has passed, tracing ends: a trace grows with every kernel, by megabytes a second."""
MOST_TASKS = 4000
"""Of a step, how many a profile keeps."""
MOST_POINTS = 500
"""Of memory over time."""


class RunProfiler(Callback):
    """Watches a training's steps, and leaves `profile.json`, the trace and the counters in its folder."""

    def __init__(
        self, folder: Path, executor: Executor, prepared: Prepared, *, done: int, request: TrainRequest, world: int
    ) -> None:
        """`done`: steps before the first one, of a run that is resumed."""
        self.folder, self.executor, self.prepared, self.world = folder, executor, prepared, world
        left = prepared.training.steps - done
        steps = max(1, min(request.profile_steps or TRACED_STEPS, left - 1))
        warm_up = max(1, min(WARM_UP_STEPS, left - steps))
        self.first = done + warm_up + 1
        for every in (request.evaluate_every, request.checkpoint_every):
            if every is not None:
                # What comes between two traced steps would be in the trace, and taken for a part of them.
                steps = min(steps, -self.first % every + 1)
        self._planned = steps
        self.task_times: dict[int, Span] = {}
        self.mixture_use: MixtureUse | None = None
        self.records: dict[int, StepRecord] = {}
        self.problem: str | None = None
        self._recorder: Recorder | None = None
        self._guard(lambda: self._start(warm_up, steps))

    def _start(self, warm_up: int, steps: int) -> None:
        self._recorder = Recorder(
            self.folder, warm_up=warm_up, steps=steps, rank=0, at_most_s=LONGEST_TRACE_S, begins=True
        )

    @property
    def traced(self) -> range:
        """Steps, counted from 1, that are slowed down; fewer than planned where they are long."""
        recorded = self._recorder.recorded if self._recorder else 0
        return range(self.first, self.first + (recorded or self._planned))

    # -- while it runs --------------------------------------------------------------------------------------------

    def on_step(self, record: StepRecord) -> None:
        if record.step >= self.first:
            self.records[record.step] = record

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        streaming = self.executor if isinstance(self.executor, StreamingExecutor) else None
        recorder = self._recorder
        if recorder is None or recorder.done or self.problem:
            yield
            return
        if streaming:
            # From one step before the first that is recorded: a replayed step with times is captured anew.
            streaming.times_tasks = step >= self.first - 1
        self._guard(recorder.begin)
        yield
        if streaming:
            self.task_times = streaming.task_times()
            self.mixture_use = streaming.mixture_use()
            streaming.times_tasks = False
        self._guard(recorder.step)

    def _guard(self, action: Callable[[], None]) -> None:
        """A full disk, a profiler that does not start: whatever goes wrong costs the profile and not the training."""
        if self.problem is None:
            try:
                action()
            except Exception as error:
                self.problem = f"profiling failed: {error!r}"
                # Nothing may go on recording, step after step.
                with suppress(Exception):
                    self._discard()

    def _discard(self) -> None:
        if self._recorder is not None:
            self._recorder.discard()

    def abandon(self) -> None:
        """The training has failed: nothing is left running, and nothing is written any more."""
        self._guard(self._discard)

    # -- at its end -----------------------------------------------------------------------------------------------

    def close(self, measurement: Measurement) -> str | None:
        """Write the profile of a training that took so long; returns why there is none, where there is none."""
        self._guard(lambda: self._write(measurement))
        return self.problem

    def _write(self, measurement: Measurement) -> None:
        assert self._recorder is not None
        self._recorder.close()
        trace, counters = self._recorder.trace, self._recorder.counters
        if trace is None:
            self.problem = "the run ended before a step was traced"
            return
        with open_trace(trace) as source:
            read = kineto.read_source(source, trace.name)
        counted = None if counters is None else read_counter_record(counters)
        profile = self._assemble(read.profiles[0], counted, measurement)
        write_whole(self.folder / PROFILE, to_text(profile) + "\n", own=True)

    def _traced_s(self) -> float:
        """Mean of a traced step."""
        return fmean(record.step_s for step, record in self.records.items() if step in self.traced)

    def _steady(self) -> list[StepRecord]:
        """Steps that were not traced."""
        return [record for step, record in sorted(self.records.items()) if step not in self.traced]

    def _assemble(self, trace: Profile, counted: CounterRecord | None, measurement: Measurement) -> Profile:
        prepared, plan, memory = self.prepared, self.prepared.plan, self.executor.memory()
        peaks = _peaks(prepared, self.world)
        span_s = trace.get("device_span_s") or self._traced_s()
        measured = {
            name: replace(value, source="measured") if value.source == "ingested" else value
            for name, value in trace.values.items()
        }
        values = {
            **measured,
            **_rates(measurement, peaks),
            **(counters_values(counted.counters, span_s, steps=counted.steps) if counted else {}),
        }
        values |= _intensity(values, peaks, span_s)
        values |= _of_mixture(self.mixture_use)
        device = [row for row in memory if row.place == "device"]
        return replace(
            trace,
            name=f"run {self.folder.name}",
            format="flopwise",
            origin=(trace.name,),
            device=prepared.place,
            rank=0 if self.world > 1 else None,
            world=self.world,
            batch_sequences=-(-prepared.batch_sequences // self.world),
            sequence_tokens=plan.sequence_tokens,
            precision=plan.precision,
            peaks=peaks,
            values=values,
            classes=self._with_flops(trace.classes),
            memory=memory_uses(device),
            memory_total_bytes=float(sum(row.measured_bytes for row in device)),
            memory_capacity_bytes=prepared.hardware.device.dram.size_bytes.value,
            memory_planned=memory,
            memory_over_time=self._memory_over_time(device),
            tasks=self._tasks(),
            system={**trace.system, **_limits(counted)},
            notes=(*trace.notes, *self._notes()),
        )

    def _with_flops(self, classes: tuple[Spent, ...]) -> tuple[Spent, ...]:
        """Products and attention with the FLOPs that the plan executes."""
        plan, model = self.prepared.plan, self.prepared.model
        if not isinstance(plan, Plan):
            return classes
        share = self.prepared.batch_sequences / plan.batch_sequences
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
        predicted = _predict_spans(program, plan, self.prepared)
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

    def _memory_over_time(self, rows: list[MemoryRow]) -> tuple[tuple[float, float], ...]:
        """Bytes of the device's buffers that were in use, by the times of tasks; none for room that was never taken."""
        executor = self.executor
        if not isinstance(executor, StreamingExecutor) or len(self.task_times) < len(executor.program.tasks):
            return ()
        spans = [self.task_times[index] for index in range(len(executor.program.tasks))]
        starts, ends = (tuple(span[side] for span in spans) for side in (0, 1))
        played = Simulation(
            program=executor.program,
            starts=starts,
            ends=ends,
            step_s=max(ends),
            busy={},
            idle={},
            exposed_copy_s=0.0,
            peak_device_bytes={},
            peak_host_bytes={},
        )
        taken = {row.owner: row.measured_bytes for row in rows}
        points = memory_points(played)
        sizes = [sum(min(size, taken.get(owner, size)) for owner, size in point.device.items()) for point in points]
        moments = np.array([round(point.seconds * 1e9) for point in points], np.int64)
        return highest_points(moments, np.array(sizes), MOST_POINTS)

    def _notes(self) -> Iterator[str]:
        steady = self._steady()
        if steady:
            slower = self._traced_s() / fmean(record.step_s for record in steady)
            yield (
                "rates, clocks and times of tasks are those of steps that were not traced; traced ones took "
                f"{slower:.2f} times as long"
            )
        if isinstance(self.prepared.plan, ClusterPlan):
            yield f"rank 0 of {self.world}"
        if isinstance(self.executor, StreamingExecutor) and len(self.executor.program.tasks) > MOST_TASKS:
            yield f"of the step's {len(self.executor.program.tasks):,} tasks the first {MOST_TASKS:,} are kept"


def _rates(measurement: Measurement, peaks: Peaks | None) -> dict[str, SourcedValue]:
    """Those of the training itself, which leave the traced steps out."""
    devices = measurement.devices
    ridge = peaks.flops / peaks.bandwidth if peaks and peaks.bandwidth else None
    counted = known(
        "counted",
        [
            ("model_flops", measurement.model_flops / devices),
            ("hardware_flops", measurement.hardware_flops / devices if measurement.hfu is not None else None),
            ("ridge", ridge),
        ],
    )
    samples_per_s = measurement.batch_sequences / measurement.step_s
    rates = [("mfu", measurement.mfu), ("hfu", measurement.hfu), ("tokens_per_s", measurement.tokens_per_s)]
    return counted | known("measured", [*rates, ("samples_per_s", samples_per_s)])


def _of_mixture(use: MixtureUse | None) -> dict[str, SourcedValue]:
    """Where a mixture's time goes, and how evenly its experts are used."""
    if use is None:
        return {}
    names = {"attention": "mixture_attention_s"}
    seconds = {names.get(part, f"{part}_s"): took for part, took in use.seconds.items()}
    rows = [*seconds.items(), ("busiest_expert", use.busiest), ("unused_experts", use.unused)]
    return known("measured", rows)


def _intensity(values: dict[str, SourcedValue], peaks: Peaks | None, span_s: float) -> dict[str, SourcedValue]:
    """FLOPs a byte, where the use of the bandwidth was counted."""
    use, flops = values.get("mbu"), values.get("hardware_flops")
    if use is None or flops is None or peaks is None or not peaks.bandwidth or use.value <= 0:
        return {}
    return known("modelled", [("intensity", flops.value / (use.value * peaks.bandwidth * span_s))])


def _limits(counted: CounterRecord | None) -> dict[str, str]:
    """Why the clock was not the highest; what the system counted of this process."""
    if counted is None:
        return {}
    counters = counted.counters
    found = {f"limited by {word}": f"{share:.0%} of the samples" for word, share in counters.reasons.items()}
    if counters.context_switches is not None:
        found["context switches a step"] = f"{counters.context_switches / max(1, counted.steps):.1f}"
    if counters.resident_peak_bytes is not None:
        found["the process took at most"] = f"{counters.resident_peak_bytes / 2**20:,.0f} MiB"
    return found


def memory_uses(rows: list[MemoryRow]) -> tuple[MemoryUse, ...]:
    """A plan's owners under the names that profiles have."""
    return tuple(
        MemoryUse(owner=PLAN_OWNERS.get(row.owner, "other"), bytes=float(row.measured_bytes), name=row.owner)
        for row in rows
    )


def _peaks(prepared: Prepared, world: int) -> Peaks | None:
    """Of one device; a plan has those of all."""
    expected, hardware = prepared.expected, prepared.hardware
    if expected.peak_flops is None or expected.peak_format is None:
        return None
    bandwidth = hardware.device.dram.bandwidth_bytes_per_s
    return Peaks(
        flops=expected.peak_flops / world,
        bandwidth=None if bandwidth is None else bandwidth.value,
        number_format=expected.peak_format,
        source=_source_kind(hardware, expected.peak_format),
    )


def _source_kind(hardware: Hardware, number_format: str) -> str:
    fact = hardware.device.peak_flops.get(number_format)
    source = hardware.sources.get(fact.source) if fact else None
    return source.kind if source else "derived"


def _predict_spans(program: Program, plan: Plan, prepared: Prepared) -> list[tuple[float, float]] | None:
    """When the simulator has each task run; None where the hardware's speed is not known for these formats."""
    try:
        seconds = TaskSeconds(plan, prepared.model, prepared.hardware).of(program)
        played = simulate(program, seconds, prepared.hardware.link, peaks=False)
    except FlopwiseError:
        return None
    return list(zip(played.starts, played.ends, strict=True))
