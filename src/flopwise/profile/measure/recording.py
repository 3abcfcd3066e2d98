"""Steps of a running program as a trace and counters; imports torch, and only where it measures.

The order of events, told by the ends of steps: warm-up; within its last step the profiler gets ready, which takes
long on a GPU; the recorded steps; the trace is written; one step to settle; then steps that nothing disturbs, for at
least a second, over which the counters are read. Tracing slows the host and so changes power and clock: counters of the
recorded steps are kept only where the program ends before such a second has passed.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Relative, since these files are also loaded under another name, within programs that may have no flopwise.
from .hushed import FirstFree, hush, hush_start
from .sampling import ENERGY_WINDOW_S, CounterRecord, Counters, Samples, Window, sampler_for

if TYPE_CHECKING:
    from torch.profiler import ProfilerAction, profile

STEP_MARK = "ProfilerStep#"
"""How torch names a step in a trace; the number follows."""
LONGEST_PAUSE_S = 0.01
LONGEST_PAUSE_SHARE = 0.02
"""Between two steps that are counted, of the time so far; behind a longer pause counting begins anew."""
LARGEST_CUT_BYTES = 2**27
"""Of JSON. A trace that ends within a step is read back to cut that step off; a larger one is given up."""


class _RecordingStage(Enum):
    WARMING = auto()
    READY = auto()
    ARMED = auto()
    RECORDING = auto()
    SETTLING = auto()
    SETTLED = auto()
    COUNTING = auto()
    DONE = auto()


PROFILING = (_RecordingStage.READY, _RecordingStage.ARMED, _RecordingStage.RECORDING)
"""Torch's profiler is ready or records."""


class Recorder:
    """Records `steps` steps after `warm_up` of them into `trace-rank0.json.gz` and `counters-rank0.json`.

    Call `step` at the end of every step and `close` at the end of the program, both in the thread that does the work.
    Once it is done, `step` costs nothing. Files appear whole or not at all; OSError where they cannot be written, and
    RuntimeError where torch's profiler runs already.
    """

    def __init__(
        self,
        folder: Path,
        *,
        warm_up: int,
        steps: int,
        rank: int,
        at_most_s: float | None = None,
        with_memory: bool = False,
        replace: bool = True,
        begins: bool = False,
        sampler: Callable[[], Samples] | None = None,
    ) -> None:
        """`at_most_s`: stop recording at the end of the first step after so many seconds. `with_memory`: every
        allocation as well. `replace`: take the place of files of this rank; else, where there are some, write beside
        them under a name with the process's number. `begins`: `begin` is called before every step, so that what lies
        between steps (an evaluation, a checkpoint) is neither recorded before the first one nor counted."""
        assert warm_up >= 1, "the profiler gets ready within the last step of the warm-up"
        assert steps >= 1
        self._folder = folder
        self._warm_up = warm_up
        self._steps = steps
        self._rank = rank
        self._at_most_s = at_most_s
        self._with_memory = with_memory
        self._replace = replace
        self._begins = begins
        self._last_end = 0.0
        self._sampler_of = sampler or (lambda: sampler_for(*_device()))
        self._sampler: Samples | None = None
        self._profiler: profile | None = None
        self._stage = _RecordingStage.WARMING
        self._stage_steps = 0
        self._stage_start = 0.0
        self.recorded = 0
        """Steps that are in the trace."""
        self.trace: Path | None = None
        """The file of the trace, once it is there, whole."""
        self.counters: Path | None = None
        """That of the counters."""
        self._stem: str | None = None
        if warm_up == 1:
            self._prepare()

    @property
    def done(self) -> bool:
        """Whether nothing more will be recorded."""
        return self._stage is _RecordingStage.DONE

    @property
    def profiles(self) -> bool:
        """Whether torch's profiler runs. It must be stopped, by `close` or `discard`, in the thread that started it."""
        return self._stage in PROFILING

    @property
    def written(self) -> tuple[Path, ...]:
        """Files that are there, whole."""
        return tuple(path for path in (self.trace, self.counters) if path is not None)

    def begin(self) -> None:
        """A step begins."""
        if self._stage is _RecordingStage.ARMED:
            self._record()
        elif self._stage is _RecordingStage.RECORDING:
            assert self._profiler is not None
            self._profiler.step()
        elif self._stage is _RecordingStage.SETTLED:
            self._count()
        elif self._stage is _RecordingStage.COUNTING:
            now = time.perf_counter()
            if now - self._last_end > max(LONGEST_PAUSE_S, LONGEST_PAUSE_SHARE * (now - self._stage_start)):
                assert self._sampler is not None
                self._sampler.stop()
                self._count()

    def step(self) -> None:
        """A step has ended."""
        if self._stage is _RecordingStage.DONE:
            return
        self._stage_steps += 1
        self._last_end = time.perf_counter()
        if self._stage is _RecordingStage.WARMING and self._stage_steps >= self._warm_up - 1:
            self._prepare()
        elif self._stage is _RecordingStage.READY:
            self._go_on(_RecordingStage.ARMED, self._record)
        elif self._stage is _RecordingStage.RECORDING:
            assert self._profiler is not None
            if self._stage_steps >= self._steps or self._late():
                self._finish_recording(whole=True)
            elif self._begins:
                _end_step_mark(self._profiler)
            else:
                self._profiler.step()
        elif self._stage is _RecordingStage.SETTLING:
            self._go_on(_RecordingStage.SETTLED, self._count)
        elif self._stage is _RecordingStage.COUNTING and time.perf_counter() - self._stage_start >= ENERGY_WINDOW_S:
            self._finish_counting()

    def close(self) -> None:
        """The program ends: write what there is, in whole steps."""
        stage, self._stage = self._stage, _RecordingStage.DONE
        if stage is _RecordingStage.RECORDING and self._stage_steps > 0:
            assert self._profiler is not None
            # Between two steps there is no mark, and so none to be cut off.
            self._finish_recording(whole=self._profiler.step_rec_fn is None)
            self._stage = _RecordingStage.DONE
        elif stage is _RecordingStage.COUNTING and self._sampler is not None:
            # Less than a second: the counters of the recorded steps, already written, are as good.
            self._sampler.stop()
        elif stage in PROFILING:
            self._drop_profiler(stage)

    def discard(self) -> None:
        """Take back what was written, and record nothing more."""
        stage, self._stage = self._stage, _RecordingStage.DONE
        if stage in PROFILING:
            self._drop_profiler(stage)
        elif stage is _RecordingStage.COUNTING and self._sampler is not None:
            self._sampler.stop()
        for path in self.written:
            path.unlink(missing_ok=True)
        self.trace = self.counters = None

    def _go_on(self, waiting: _RecordingStage, go: Callable[[], None]) -> None:
        """At once, or when the next step begins."""
        if self._begins:
            self._enter(waiting)
        else:
            go()

    def _count(self) -> None:
        self._open_window(_RecordingStage.COUNTING)

    def _enter(self, stage: _RecordingStage) -> None:
        self._stage = stage
        self._stage_steps = 0
        self._stage_start = time.perf_counter()

    def _late(self) -> bool:
        return self._at_most_s is not None and time.perf_counter() - self._stage_start >= self._at_most_s

    def _prepare(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
            # Beside it, this one would end the other's recording.
            raise RuntimeError("torch's profiler runs already")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if uses_cuda() else [])]
        with hush_start():
            self._profiler = profile(
                activities=activities,
                schedule=_schedule,
                record_shapes=True,
                profile_memory=self._with_memory,
            )
            self._profiler.start()
        self._enter(_RecordingStage.READY)

    def _record(self) -> None:
        assert self._profiler is not None
        # What is still queued on the device belongs to the steps before.
        _synchronize()
        self._open_window(_RecordingStage.RECORDING)
        first = FirstFree()
        with hush():
            self._profiler.step()
        if self._with_memory:
            first.let_go()

    def _open_window(self, stage: _RecordingStage) -> None:
        _synchronize()
        if self._sampler is None:
            self._sampler = self._sampler_of()
        self._sampler.start()
        self._enter(stage)

    def _finish_recording(self, *, whole: bool) -> None:
        assert self._profiler is not None
        assert self._sampler is not None
        steps = self.recorded = self._stage_steps
        # Before anything can fail: there is no second try.
        profiler, self._profiler = self._profiler, None
        self._enter(_RecordingStage.DONE)
        _end_step_mark(profiler)
        _synchronize()
        counters = self._sampler.stop()
        temporary = self._folder / f".trace-rank{self._rank}-{os.getpid()}.partial.json.gz"
        try:
            with hush():
                profiler.stop()
                self._folder.mkdir(parents=True, exist_ok=True)
                _export(profiler, temporary)
            if whole or _cut_last_step(temporary):
                self.trace = self._place(temporary)
                self._write_counters(counters, steps, "profiled")
        finally:
            _remove(temporary)
        self._enter(_RecordingStage.SETTLING)

    def _finish_counting(self) -> None:
        assert self._sampler is not None
        steps = self._stage_steps
        self._enter(_RecordingStage.DONE)
        _synchronize()
        self._write_counters(self._sampler.stop(), steps, "steady")

    def _drop_profiler(self, stage: _RecordingStage) -> None:
        profiler, self._profiler = self._profiler, None
        with hush():
            if profiler is not None:
                profiler.stop()
        if stage is _RecordingStage.RECORDING and self._sampler is not None:
            self._sampler.stop()

    def _place(self, temporary: Path) -> Path:
        """The trace under its own name, which decides what the counters are called."""
        self._stem = f"rank{self._rank}"
        target = self._folder / f"trace-{self._stem}.json.gz"
        if not self._replace:
            try:
                # Unlike a rename, a link fails where another process of this rank was first.
                os.link(temporary, target)
                return target
            except FileExistsError:
                self._stem = f"rank{self._rank}-{os.getpid()}"
                target = self._folder / f"trace-{self._stem}.json.gz"
            except OSError:
                # A file system without links: rename.
                pass
        return temporary.replace(target)

    def _write_counters(self, counters: Counters, steps: int, window: Window) -> None:
        assert self._sampler is not None
        record = CounterRecord(
            rank=self._rank,
            steps=steps,
            window=window,
            device=self._sampler.device_name,
            driver=self._sampler.driver_version,
            counters=counters,
        )
        target = self._folder / f"counters-{self._stem}.json"
        temporary = target.with_name(f".{target.name}-{os.getpid()}.partial")
        try:
            temporary.write_text(json.dumps(dataclasses.asdict(record), indent=2), encoding="utf-8")
            temporary.replace(target)
        finally:
            _remove(temporary)
        self.counters = target


def _remove(path: Path) -> None:
    """Without a word: mostly it has its final name already, else there is an error that says more."""
    with suppress(OSError):
        path.unlink()


def _schedule(step: int) -> ProfilerAction:
    from torch.profiler import ProfilerAction

    return ProfilerAction.WARMUP if step == 0 else ProfilerAction.RECORD


def _end_step_mark(profiler: profile) -> None:
    """The last step ends where all others do: before anybody waits for the device or reads counters."""
    mark, profiler.step_rec_fn = profiler.step_rec_fn, None
    if mark is not None:
        mark.__exit__(None, None, None)


def _export(profiler: profile, path: Path) -> None:
    """The trace, gzipped; torch itself packs line by line at the highest level, which takes many times as long."""
    plain = path.with_suffix("")
    try:
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=2) as target:
            shutil.copyfileobj(source, target, 2**20)
    finally:
        _remove(plain)


def _device() -> tuple[str, int | str]:
    """What the program works on: its current GPU by UUID, if it has used one, else the CPU."""
    import torch

    if not uses_cuda():
        return "cpu", 0
    index = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return "cuda", index if uuid is None else str(uuid)


def uses_cuda() -> bool:
    """Whether this process has begun to use a GPU; asking does not begin it."""
    import torch

    # In this order: a GPU that is only asked for can no longer be used by processes that are forked.
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_available()  # type: ignore[no-untyped-call]


def _synchronize() -> None:
    import torch

    if uses_cuda():
        torch.cuda.synchronize()


def _cut_last_step(path: Path) -> bool:
    """Take the step that was cut short out of a trace, with all that began within it; False: that cannot be done."""
    with gzip.open(path, "rb") as stream:
        content = stream.read(LARGEST_CUT_BYTES + 1)
    if len(content) > LARGEST_CUT_BYTES:
        return False
    trace: dict[str, Any] = json.loads(content)
    trace["traceEvents"] = without_last_step(trace["traceEvents"])
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        json.dump(trace, stream)
    return True


def without_last_step(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events of a trace but for its last step; what the device did belongs to the step that handed it over."""
    # A step has a second mark on the device's side.
    marks = [event for event in events if str(event.get("name", "")).startswith(STEP_MARK) and "dur" in event]
    last = max((_step_number(mark) for mark in marks), default=None)
    begin = min((mark["ts"] for mark in marks if _step_number(mark) == last and not _on_device(mark)), default=None)
    if begin is None:
        return events
    launches = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    late = {event.get("args", {}).get("correlation") for event in launches if event["ts"] >= begin} - {None}

    def stays(event: dict[str, Any]) -> bool:
        if event.get("cat") == "ac2g":
            return event.get("id") not in late
        if event.get("cat") == "gpu_user_annotation":
            return not (str(event["name"]).startswith(STEP_MARK) and _step_number(event) == last)
        if _on_device(event):
            return event.get("args", {}).get("correlation") not in late
        # Names of processes and threads have no time of their own.
        return event.get("ph") == "M" or float(event.get("ts", 0)) < begin

    return [event for event in events if stays(event)]


def _step_number(mark: dict[str, Any]) -> int:
    return int(str(mark["name"]).removeprefix(STEP_MARK))


def _on_device(event: dict[str, Any]) -> bool:
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
