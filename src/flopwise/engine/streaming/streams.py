"""The streams of a program on a device: one after another on a CPU, beside each other on a GPU.

On a GPU the calls of a whole step, on all its streams, can be captured as a graph and replayed: the host then hands
over one graph where it would hand over every kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from flopwise.records.program import Stream

Work = Callable[[], None]
Span = tuple[float, float]
"""From when to when something ran, in seconds since the step began."""


class Streams(Protocol):
    """Runs tasks in their order on each stream, each when those it waits for have ended."""

    taken: dict[int, Span]
    """When tasks ran, by their number, since a `begin` that asked for it."""

    def begin(self, *, timed: bool) -> None:
        """A step begins, of whose tasks times are to be taken or not."""

    def run(self, index: int, stream: Stream, after: Sequence[int], work: Work) -> None:
        """Run a task, or hand it to its stream."""

    def finish(self) -> float:
        """Wait for everything; the seconds that computations have waited for others since the last time."""

    def abandon(self) -> None:
        """Nothing of a step that failed is waited for, or taken for one of the next."""

    def close(self) -> None:
        """Give up threads."""


class InOrder:
    """A CPU: every task at once, in the order of the program."""

    def __init__(self) -> None:
        self.taken: dict[int, Span] = {}
        self._origin: float | None = None

    def begin(self, *, timed: bool) -> None:
        self.taken = {}
        self._origin = time.perf_counter() if timed else None

    def run(self, index: int, stream: Stream, after: Sequence[int], work: Work) -> None:
        del stream, after
        if self._origin is None:
            work()
            return
        begun = time.perf_counter() - self._origin
        work()
        self.taken[index] = (begun, time.perf_counter() - self._origin)

    def finish(self) -> float:
        self._origin = None
        return 0.0

    def abandon(self) -> None:
        self._origin = None

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Captured:
    """A step's calls as a graph, and what it marks while it runs."""

    graph: torch.cuda.CUDAGraph
    waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Before and after each wait of the computations."""
    timed: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=dict)
    origin: torch.cuda.Event | None = None


class CudaStreams:
    """A GPU: computations, copies in and copies out on streams of their own, updates on the host in a thread."""

    def __init__(self, device: torch.device, watched: set[int]) -> None:
        self.device = device
        self._streams = {
            "compute": torch.cuda.current_stream(device),
            "copy-in": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            "copy-out": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        }
        self._events = {index: torch.cuda.Event() for index in watched}  # type: ignore[no-untyped-call]
        self._futures: dict[int, Future[None]] = {}
        self._played: set[int] = set()
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-updates")
        self.taken: dict[int, Span] = {}
        self._origin: tuple[torch.cuda.Event, float] | None = None
        self._timed: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._captures = False

    def begin(self, *, timed: bool) -> None:
        self.taken = {}
        # Nothing is under way, so the device's clock and the host's start within a launch of each other.
        self._origin = (self._mark("compute"), time.perf_counter()) if timed else None

    def run(self, index: int, stream: Stream, after: Sequence[int], work: Work) -> None:
        waits = [other for other in after if other in self._played]
        self._played.add(index)
        if stream == "host":
            self._futures[index] = self._thread.submit(self._on_host, index, waits, work)
            return
        chosen = self._streams[stream]
        measured = bool(waits) and stream == "compute"
        begun = self._mark("compute") if measured else None
        for other in waits:
            if other in self._futures:
                self._futures[other].result()
            else:
                chosen.wait_event(self._events[other])
        if begun is not None:
            self._waits.append((begun, self._mark("compute")))
        started = self._mark(stream) if self._origin else None
        with torch.cuda.stream(chosen):
            work()
        if started is not None:
            self._timed[index] = (started, self._mark(stream))
        if index in self._events:
            self._events[index].record(chosen)

    def capture(self, play: Callable[[], None], *, timed: bool) -> Captured:
        """The calls of a step that `play` makes, without running them; all graphs share their temporaries' memory."""
        eager, events = self._streams["compute"], self._events
        graph = torch.cuda.CUDAGraph()
        self._streams["compute"] = compute = self._capture_stream
        self._events = {index: torch.cuda.Event() for index in events}  # type: ignore[no-untyped-call]
        others = [self._streams["copy-in"], self._streams["copy-out"]]
        self._captures = True
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=compute):
                for stream in others:
                    stream.wait_stream(compute)
                self.begin(timed=timed)
                play()
                for stream in others:
                    compute.wait_stream(stream)
            origin = self._origin[0] if self._origin else None
            captured = Captured(graph, list(self._waits), dict(self._timed), origin)
        finally:
            self._captures = False
            self._streams["compute"], self._events = eager, events
            self._forget()
        self._pool = graph.pool()
        return captured

    def replay(self, captured: Captured) -> None:
        """Hand a captured step over; `finish` then waits for it as for one that was handed over call by call."""
        self.taken = {}
        self._waits, self._timed = list(captured.waits), dict(captured.timed)
        self._origin = None if captured.origin is None else (captured.origin, time.perf_counter())
        captured.graph.replay()

    def _mark(self, stream: Stream) -> torch.cuda.Event:
        # In a graph an event with a time has to be a node of its own.
        event = torch.cuda.Event(enable_timing=True, external=self._captures)  # type: ignore[no-untyped-call]
        event.record(self._streams[stream])
        return event

    def _on_host(self, index: int, waits: Sequence[int], work: Work) -> None:
        for other in waits:
            if other not in self._futures:
                self._events[other].synchronize()
        if self._origin is None:
            work()
            return
        origin_s = self._origin[1]
        begun = time.perf_counter() - origin_s
        work()
        self.taken[index] = (begun, time.perf_counter() - origin_s)

    def finish(self) -> float:
        for future in self._futures.values():
            future.result()
        torch.cuda.synchronize(self.device)
        waited: float = sum(begun.elapsed_time(ended) for begun, ended in self._waits) / 1e3
        if self._origin is not None:
            origin = self._origin[0]
            for index, (started, ended) in self._timed.items():
                self.taken[index] = (origin.elapsed_time(started) / 1e3, origin.elapsed_time(ended) / 1e3)
        self._forget()
        return waited

    def abandon(self) -> None:
        wait(self._futures.values())
        with suppress(RuntimeError):
            # A device that has failed says so again.
            torch.cuda.synchronize(self.device)
        self._forget()

    def _forget(self) -> None:
        """Nothing of a step is under way any more."""
        self._origin = None
        for kept in (self._timed, self._futures, self._played, self._waits):
            kept.clear()

    def close(self) -> None:
        self._thread.shutdown()
