"""What a card's kernels can do at a model's shapes: products and attention in training's order, kept up for seconds.

The ceiling is tokens ÷ the ideal seconds of a model's matrix products and attention at these rates, nothing made again
and nothing else done. At first products and attention run with every kernel that is installed, in turns; then those
that were the fastest are kept up alone, as a training would keep them up, and that is measured: what a card under its
power cap makes of a kernel depends on what runs beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_attention import Candidate, candidates
from benchmarks.gpu_cells import Settings, model_of, quantile, reasons_text
from benchmarks.gpu_products import Kernel, Part, parts_of
from flopwise.engine.formats import TYPES
from flopwise.profile.measure.sampling import Counters, sampler_for
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats
from flopwise.work.op import Attention, Gemm, Op
from flopwise.work.work import Work

WHOLE = "whole"
"""The row that holds what all kernels come to together."""
COPIED_BYTES = 2**30

Mark = torch.cuda.Event | float
Key = tuple[str, str, str]
"""Operator, pass (forward, to-input, to-weight, backward) and kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A model on a sequence length in a precision."""

    name: str
    model: str
    sequence_tokens: int
    precision: str
    chunk_tokens: int = 16384
    """Tokens of a product."""

    @property
    def attended_tokens(self) -> int:
        """Of a call of attention: whole sequences, one at least."""
        return max(1, self.chunk_tokens // self.sequence_tokens) * self.sequence_tokens

    @property
    def product_tokens(self) -> int:
        return min(self.chunk_tokens, self.attended_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class CeilingRow:
    """A kernel's times, or (`whole`) what all of them come to."""

    ceiling: str
    model: str
    sequence_tokens: int
    precision: str
    op: str
    passed: str
    kernel: str
    counted: bool
    """Whether it is part of the ceiling."""
    call_tokens: int | None = None
    call_flops: int | None = None
    calls: int | None = None
    call_s: float | None = None
    call_s_low: float | None = None
    call_s_high: float | None = None
    tflops_per_s: float | None = None
    gbytes_per_s: float | None = None
    tokens_per_s: float | None = None
    products_us_per_token: float | None = None
    attention_us_per_token: float | None = None
    clock_mhz: float | None = None
    power_w: float | None = None
    throttle_reasons: str = ""


# -- what follows from times ------------------------------------------------------------------------------------------


def ideal_seconds(
    work: Work, call_s: Mapping[tuple[str, str], float], call_tokens: Mapping[str, int]
) -> dict[str, float]:
    """Seconds of one sequence's products and of its attention, from those of a call of each and its tokens."""
    found = {"products": 0.0, "attention": 0.0}
    for op in work.ops:
        if not isinstance(op, Gemm | Attention):
            continue
        if isinstance(op, Attention):
            # Blocks with a narrower window have their FLOPs' share of the widest one's time.
            kind, rows = "attention", op.tokens * op.forward_flops() / widest(op).forward_flops()
        else:
            kind, rows = "products", op.rows
        calls = op.layers * op.calls * rows / call_tokens[op.name]
        found[kind] += calls * sum(seconds for (name, _), seconds in call_s.items() if name == op.name)
    return found


def widest(op: Attention) -> Attention:
    """The attention of the blocks that look back the furthest, as if all were like them."""
    found = max(op.by_kind(), key=lambda kind: kind.twice_pairs("mask"))
    return replace(op, kinds=(), window=found.window, chunk=found.chunk)


def fastest(times: Mapping[Key, Sequence[float]]) -> dict[tuple[str, str], tuple[str, float]]:
    """Of each operator and pass the kernel with the least median, and that median."""
    found: dict[tuple[str, str], tuple[str, float]] = {}
    for (op, passed, kernel), seconds in times.items():
        middle = median(seconds)
        if (op, passed) not in found or middle < found[op, passed][1]:
            found[op, passed] = (kernel, middle)
    return found


# -- keeping the card busy --------------------------------------------------------------------------------------------


class Watch:
    """Marks between calls: events of the device's queue on a GPU, the clock elsewhere."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def mark(self) -> Mark:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def reached(self, mark: Mark) -> None:
        """Wait until the device is there."""
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()

    def seconds(self, first: Mark, last: Mark) -> float:
        if isinstance(first, float) and isinstance(last, float):
            return last - first
        assert isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event)
        return float(first.elapsed_time(last)) * 1e-3


class Load:
    """A layer's work forward and backward, over and over, and the head's once for as many layers as the model has."""

    def __init__(self, shape: Shape, device: str) -> None:
        model = model_of(shape.model)
        self.shape, self.layers, self.watch = shape, model.layers, Watch(device)
        self.repeats = shape.attended_tokens // shape.product_tokens
        self.work = describe(model, shape.sequence_tokens)
        formats = parse_formats(shape.precision)
        dtype = TYPES[formats.compute]
        generator = torch.Generator(device=device).manual_seed(0)
        self.parts: list[Part] = parts_of(self.work, shape.product_tokens, dtype, formats.matrix, generator)
        attention = widest(next(op for op in self.work.ops if isinstance(op, Attention)))
        sequences = shape.attended_tokens // shape.sequence_tokens
        self.attention, self.attention_name = candidates(attention, sequences, dtype, generator), attention.name
        self.runs = 0
        self.chosen: dict[tuple[str, str], str] = {}
        """Operator and pass → the kernel that is kept up; none: they take turns."""

    def choose(self, times: Mapping[Key, Sequence[float]]) -> None:
        """From now on keep up the kernels that were the fastest, from the first run on."""
        self.chosen = {key: kernel for key, (kernel, _) in fastest(times).items()}
        self.runs = 0

    def flops(self) -> dict[tuple[str, str], int]:
        """Of one call, by operator and pass, as the description counts them."""
        found: dict[tuple[str, str], int] = {}
        for op in self.work.ops:
            if isinstance(op, Gemm):
                each = op.forward_flops() * self._rows(op) // (op.layers * op.calls * op.rows)
                found |= {(op.name, passed): each for passed in ("forward", "to-input", "to-weight")}
            elif isinstance(op, Attention):
                scale, whole = self.shape.attended_tokens // op.tokens, widest(op)
                found[op.name, "forward"] = whole.forward_flops() // op.layers * scale
                found[op.name, "backward"] = whole.backward_flops("flash") // op.layers * scale
        return found

    def _rows(self, op: Op) -> int:
        """Of a call: of a mixture's products a row for each token and choice."""
        rows = op.rows if isinstance(op, Gemm) else self.work.sequence_tokens
        return self.shape.product_tokens * rows // self.work.sequence_tokens

    def call_tokens(self) -> dict[str, int]:
        found = {op.name: self._rows(op) for op in self.work.ops}
        return found | {self.attention_name: self.shape.attended_tokens}

    def kept_up(self, seconds: float) -> dict[Key, list[float]]:
        """Run for so long, and until every kernel had its turn; returns the seconds of every call."""
        times: dict[Key, list[float]] = {}
        begun, behind = time.perf_counter(), None
        first, least = self.runs, self._least_runs()
        while self.runs - first < least or time.perf_counter() - begun < seconds:
            marks = self._layer()
            # The queue is two layers deep: never empty, and never so long that the clock runs ahead of the work.
            if behind is not None:
                self._gather(behind, times)
            behind = marks
        if behind is not None:
            self._gather(behind, times)
        return times

    def _least_runs(self) -> int:
        """So many that every kernel of attention meets every one of the blocks' products."""
        if self.chosen:
            return 1
        kernels = max(len(part.kernels) for part in self.parts if part.in_block)
        return len(self.attention) * math.ceil(kernels / self.repeats)

    def _attention(self, passed: str) -> Candidate:
        """The kernel of attention that is kept up, or whose turn it is."""
        name = self.chosen.get((self.attention_name, passed))
        turn = self.attention[self.runs % len(self.attention)]
        return next((each for each in self.attention if each.name == name), turn)

    def _kernels(self, part: Part, passed: str, turn: int) -> Sequence[Kernel]:
        """Those of a product, likewise."""
        name = self.chosen.get((part.name, passed))
        return [each for each in part.kernels if each.name == name] or part.at(turn)

    def _layer(self) -> list[tuple[Key, Mark, Mark]]:
        """Hand over one layer's work. Products' kernels change by chunk, and when all of attention's had their turn."""
        marks: list[tuple[Key, Mark, Mark]] = []
        first_turn = self.runs // len(self.attention) * self.repeats
        turns = range(first_turn, first_turn + self.repeats)
        inside = [part for part in self.parts if part.in_block]
        split = next((number for number, part in enumerate(inside) if part.after_attention), len(inside))

        def run(key: Key, call: Callable[[], object]) -> None:
            before = self.watch.mark()
            call()
            marks.append((key, before, self.watch.mark()))

        def forward(parts: Sequence[Part]) -> None:
            for turn in turns:
                for part in parts:
                    for kernel in self._kernels(part, "forward", turn):
                        run((part.name, "forward", kernel.name), kernel.forward)

        def backward(parts: Sequence[Part]) -> None:
            for turn in turns:
                for part in reversed(parts):
                    for kernel in self._kernels(part, "to-input", turn):
                        run((part.name, "to-input", kernel.name), kernel.to_input)
                    for kernel in self._kernels(part, "to-weight", turn):
                        run((part.name, "to-weight", kernel.name), kernel.to_weight)

        forward(inside[:split])
        attention = self._attention("forward")
        run((self.attention_name, "forward", attention.name), attention.forward)
        forward(inside[split:])
        if self.runs % self.layers == 0:
            ends = [part for part in self.parts if not part.in_block]
            forward(ends)
            backward(ends)
        backward(inside[split:])
        attention = self._attention("backward")
        run((self.attention_name, "backward", attention.name), attention.backward)
        backward(inside[:split])
        self.runs += 1
        return marks

    def _gather(self, marks: Sequence[tuple[Key, Mark, Mark]], times: dict[Key, list[float]]) -> None:
        self.watch.reached(marks[-1][2])
        for key, before, after in marks:
            times.setdefault(key, []).append(self.watch.seconds(before, after))


# -- the ceiling ------------------------------------------------------------------------------------------------------


def run_ceiling(shape: Shape, settings: Settings) -> list[dict[str, Any]]:
    """Rows of every kernel, of all together, and of the copies between host and device."""
    load = Load(shape, settings.device)
    turns = load.kept_up(settings.ceiling_warm_up_s / 2)
    load.choose(turns)
    load.kept_up(settings.ceiling_warm_up_s / 2)
    # The head comes once in so many layers: in the measured part it is among the first again.
    load.runs = 0
    sampler = sampler_for(settings.device)
    sampler.start()
    times = load.kept_up(settings.ceiling_measure_s)
    counters = sampler.stop()
    others = {key: seconds for key, seconds in turns.items() if key not in times}
    rows = [*kernel_rows(load, others, counted=False), *ceiling_rows(load, times, counters)]
    del load
    if settings.device == "cuda":
        torch.cuda.empty_cache()
        rows += copy_rows(shape)
    return [asdict(row) for row in rows]


def kernel_rows(load: Load, times: Mapping[Key, Sequence[float]], *, counted: bool) -> list[CeilingRow]:
    """A row for each kernel."""
    flops, tokens = load.flops(), load.call_tokens()
    rows = []
    for (op, passed, kernel), seconds in times.items():
        call_s = median(seconds)
        rows.append(
            CeilingRow(
                **_named(load.shape),
                op=op,
                passed=passed,
                kernel=kernel,
                counted=counted,
                call_tokens=tokens[op],
                call_flops=flops[op, passed],
                calls=len(seconds),
                call_s=call_s,
                call_s_low=quantile(seconds, 0.05),
                call_s_high=quantile(seconds, 0.95),
                tflops_per_s=flops[op, passed] / call_s / 1e12,
            )
        )
    return rows


def ceiling_rows(load: Load, times: Mapping[Key, Sequence[float]], counters: Counters) -> list[CeilingRow]:
    """A row for each kernel that was kept up, and one for what they come to."""
    best, tokens = fastest(times), load.call_tokens()
    rows = kernel_rows(load, times, counted=True)
    ideal = ideal_seconds(load.work, {key: seconds for key, (_, seconds) in best.items()}, tokens)
    sequence = load.shape.sequence_tokens
    counted = load.work.total_hardware_flops("causal", "none")
    whole = CeilingRow(
        **_named(load.shape),
        op=WHOLE,
        passed="",
        kernel=best[load.attention_name, "forward"][0],
        counted=False,
        tokens_per_s=sequence / sum(ideal.values()),
        tflops_per_s=counted / sum(ideal.values()) / 1e12,
        products_us_per_token=ideal["products"] / sequence * 1e6,
        attention_us_per_token=ideal["attention"] / sequence * 1e6,
        clock_mhz=None if counters.clock_mean_hz is None else counters.clock_mean_hz / 1e6,
        power_w=counters.power_w,
        throttle_reasons=reasons_text(counters),
    )
    return [*rows, whole]


def copy_rows(shape: Shape, size: int = COPIED_BYTES, repeats: int = 12) -> list[CeilingRow]:
    """Copies from pinned memory to the device and back, each alone and both at once."""
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = {
        way: torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for way in ("host to device", "device to host")
    }
    rows = []
    for ways in (("host to device",), ("device to host",), tuple(streams)):
        marks: dict[str, list[torch.cuda.Event]] = {way: [] for way in ways}
        for number in range(repeats + 1):
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    if number:
                        into, source = (device[0], host[0]) if way == "host to device" else (host[1], device[1])
                        into.copy_(source, non_blocking=True)
                    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                    event.record()
                    marks[way].append(event)
        torch.cuda.synchronize()
        for way, events in marks.items():
            # The first of them had to wait for nothing yet.
            pairs = list(pairwise(events[1:]))
            call_s = median(before.elapsed_time(after) * 1e-3 for before, after in pairs)
            rows.append(
                CeilingRow(
                    **_named(shape), op="copy", passed=way, kernel="alone" if len(ways) == 1 else "both ways",
                    counted=False, calls=len(pairs), call_s=call_s, gbytes_per_s=size / call_s / 1e9,
                )
            )  # fmt: skip
    return rows


def _named(shape: Shape) -> dict[str, Any]:
    return {
        "ceiling": shape.name,
        "model": shape.model,
        "sequence_tokens": shape.sequence_tokens,
        "precision": shape.precision,
    }
