"""What `benchmarks.gpu_program` launches a program on: the GPU, with the rates of its copies, or a clock."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from flopwise.records.program import STREAMS, Program, Stream

if TYPE_CHECKING:
    import torch

GIB, MIB = 2**30, 2**20
BLOCKS_MIB = (4, 64, 416, 1434)
"""Sizes of the copies whose rate is measured."""
COPIED_BYTES = 12 * GIB
"""Each way, for a rate."""
UPDATED_PARAMETERS = 200_000_000
COPIES: tuple[Stream, Stream] = ("copy-in", "copy-out")


Mark: TypeAlias = Any
"""What a card gives back for a place in a stream."""


class Card(Protocol):
    """What a program is launched on: streams that work in order, and marks in them that others can wait for."""

    def begin(self, program: Program) -> None: ...
    def mark(self, stream: Stream) -> Mark: ...
    def wait(self, stream: Stream, mark: Mark) -> None: ...
    def compute(self, seconds: float) -> None: ...
    def copy(self, stream: Stream, source: int, target: int, size: int) -> None: ...
    def finish(self) -> float | None: ...
    def moment(self, mark: Mark) -> float: ...


class DryCard:
    """Streams that are clocks: a copy takes its bytes over a rate whatever the other direction does."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.calls: list[tuple[str, Stream, int]] = []
        """`mark`, `wait`, `compute` or `copy`; the stream; the number of the mark, or bytes."""
        self.marks: list[float] = []
        self.now = dict.fromkeys(STREAMS, 0.0)

    def begin(self, program: Program) -> None:
        self.sizes = [buffer.bytes for buffer in program.buffers]

    def mark(self, stream: Stream) -> int:
        self.marks.append(self.now[stream])
        self.calls.append(("mark", stream, len(self.marks) - 1))
        return len(self.marks) - 1

    def wait(self, stream: Stream, mark: int) -> None:
        self.calls.append(("wait", stream, mark))
        self.now[stream] = max(self.now[stream], self.marks[mark])

    def compute(self, seconds: float) -> None:
        self.calls.append(("compute", "compute", 0))
        self.now["compute"] += seconds

    def copy(self, stream: Stream, source: int, target: int, size: int) -> None:
        assert 0 < size <= min(self.sizes[source], self.sizes[target])
        self.calls.append(("copy", stream, size))
        self.now[stream] += size / self.bytes_per_s

    def finish(self) -> None:
        return None

    def moment(self, mark: int) -> float:
        return self.marks[mark]


Place: TypeAlias = "tuple[torch.Tensor, int]"
"""A piece of memory from an offset on."""


class CudaCard:
    """The GPU: buffers carved from two large pieces of memory, and products whose seconds are measured first."""

    def __init__(self, device_bytes: int, pinned_bytes: int) -> None:
        import torch

        self.torch = torch
        self.device = torch.zeros(device_bytes, dtype=torch.uint8, device="cuda")
        self.host = torch.zeros(pinned_bytes, dtype=torch.uint8, pin_memory=True)
        self.streams: dict[Stream, Any] = {stream: torch.cuda.Stream() for stream in STREAMS}  # type: ignore[no-untyped-call]
        wide, narrow = 8192, 512
        left, right = (torch.randn(wide, wide, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.products = [
            (left, right[:, :columns].contiguous(), torch.empty(wide, columns, device="cuda", dtype=torch.bfloat16))
            for columns in (wide, narrow)
        ]
        self.product_s = [1.7e-3, 1.2e-4]
        torch.cuda.synchronize()

    def mark(self, stream: Stream) -> torch.cuda.Event:
        event: torch.cuda.Event = self.torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.streams[stream])
        return event

    def multiply(self, kind: int, times: int) -> None:
        left, right, out = self.products[kind]
        with self.torch.cuda.stream(self.streams["compute"]):
            for _ in range(times):
                self.torch.mm(left, right, out=out)

    def calibrate(self, warm_s: float = 4.0, timed_s: float = 2.0) -> dict[str, float | None]:
        """Keep the card at work until its clock has settled, then time the products."""
        self.multiply(0, int(warm_s / self.product_s[0]))
        clock = power = None
        for kind, share in ((0, 0.7), (1, 0.3)):
            times = int(share * timed_s / self.product_s[kind])
            before = self.mark("compute")
            self.multiply(kind, times)
            after = self.mark("compute")
            clock, power = (clock, power) if kind else (self.read("clock_rate"), self.read("power_draw"))
            after.synchronize()
            self.product_s[kind] = before.elapsed_time(after) / 1e3 / times
        flops = 2 * 8192**3 / self.product_s[0]
        return {"long_s": self.product_s[0], "short_s": self.product_s[1], "tflops": flops / 1e12,
                "clock_mhz": clock, "power_w": power and power / 1e3}  # fmt: skip

    def read(self, name: str) -> float | None:
        """A sensor of the card, where the driver's library can be asked."""
        try:
            return float(getattr(self.torch.cuda, name)())
        except (ImportError, ModuleNotFoundError, RuntimeError):
            return None

    # -- as a card ------------------------------------------------------------------------------------------------

    def begin(self, program: Program) -> None:
        self.places = self._placed(program)
        self.multiply(0, int(1.0 / self.product_s[0]))
        self.torch.cuda.synchronize()
        self.first = self.mark("compute")
        for stream in COPIES:
            self.streams[stream].wait_event(self.first)

    def _placed(self, program: Program) -> list[Place]:
        """Memory and offset of every buffer; those of the host begin again at its start when it is full."""
        found = []
        used = {"device": 0, "host": 0}
        for buffer in program.buffers:
            memory = self.device if buffer.place == "device" else self.host
            first = used[buffer.place]
            if first + buffer.bytes > len(memory):
                assert buffer.place == "host", "the device's memory is too small for the program"
                first = 0
            found.append((memory, first))
            used[buffer.place] = first + buffer.bytes
        return found

    def wait(self, stream: Stream, mark: torch.cuda.Event) -> None:
        self.streams[stream].wait_event(mark)

    def compute(self, seconds: float) -> None:
        longs = int(seconds / self.product_s[0])
        shorts = round((seconds - longs * self.product_s[0]) / self.product_s[1])
        self.multiply(0, longs)
        self.multiply(1, shorts if longs else max(1, shorts))

    def copy(self, stream: Stream, source: int, target: int, size: int) -> None:
        self._copy(stream, self.places[source], self.places[target], size)

    def _copy(self, stream: Stream, source: Place, target: Place, size: int) -> None:
        (taken, start), (given, place) = source, target
        with self.torch.cuda.stream(self.streams[stream]):
            given[place : place + size].copy_(taken[start : start + size], non_blocking=True)

    def finish(self) -> float | None:
        """Wait for the end, and say at what clock the card ran until then."""
        last, clocks = self.mark("compute"), []
        while not last.query():  # type: ignore[no-untyped-call]
            clocks += [self.read("clock_rate") or 0.0]
            time.sleep(0.1)
        self.torch.cuda.synchronize()
        return statistics.mean(clocks) if clocks else None

    def moment(self, mark: torch.cuda.Event) -> float:
        """Seconds from the start of what runs last."""
        return float(self.first.elapsed_time(mark)) / 1e3

    # -- rates ----------------------------------------------------------------------------------------------------

    def copies(self, directions: Sequence[Stream], block: int, total: int) -> dict[Stream, list[torch.cuda.Event]]:
        """Launch copies of a block each until `total` bytes are on their way, and an event behind each."""
        self.first = self.mark("compute")
        found: dict[Stream, list[torch.cuda.Event]] = {stream: [] for stream in directions}
        half = len(self.host) // 2
        for stream in directions:
            self.streams[stream].wait_event(self.first)
        for number in range(-(-total // block)):
            for stream in directions:
                place = (half if stream == "copy-out" else 0) + number * block % (half - block)
                source, target = (self.host, self.device) if stream == "copy-in" else (self.device, self.host)
                self._copy(stream, (source, place), (target, place), block)
                found[stream].append(self.mark(stream))
        return found

    def rates(self, events: dict[Stream, list[torch.cuda.Event]], block: int) -> dict[str, float]:
        """GB/s of each direction for as long as all of them were busy."""
        self.torch.cuda.synchronize()
        ends = {stream: [self.moment(mark) for mark in some] for stream, some in events.items()}
        window = min(moments[-1] for moments in ends.values())
        found: dict[str, float] = {}
        for stream, moments in ends.items():
            inside = [moment for moment in moments if moment <= window]
            # Without the first copy, whose start the host's launching decides.
            found[stream] = (len(inside) - 1) * block / (inside[-1] - inside[0]) / 1e9
        return found


def shown(row: dict[str, Any]) -> str:
    texts = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in row.items()}
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def measured_copies(card: CudaCard) -> list[dict[str, object]]:
    """Rates by block: each way alone, both at once, and both beside products that slow down or do not."""
    rows: list[dict[str, object]] = []
    for block in BLOCKS_MIB:
        for directions in (("copy-in",), ("copy-out",), COPIES):
            events = card.copies(directions, block * MIB, COPIED_BYTES)
            rows.append({"block_mib": block, "busy": "+".join(directions), **card.rates(events, block * MIB)})
    times = int(0.8 * COPIED_BYTES / 50e9 / card.product_s[0])
    card.multiply(0, int(2.0 / card.product_s[0]))
    before = card.mark("compute")
    card.multiply(0, times)
    events = card.copies(COPIES, 416 * MIB, COPIED_BYTES)
    card.multiply(0, times)
    after = card.mark("compute")
    rates = card.rates(events, 416 * MIB)
    slower = card.first.elapsed_time(after) / before.elapsed_time(card.first)
    rows.append({"block_mib": 416, "busy": "copy-in+copy-out+products", **rates, "products_slower": slower})
    for row in rows:
        print("  copies", shown(row), flush=True)
    return rows


def measured_updates(card: CudaCard) -> list[dict[str, object]]:
    """AdamW on the host's cores, alone and while copies go both ways."""
    torch = card.torch
    torch.set_num_threads(min(16, os.cpu_count() or 1))
    rows: list[dict[str, object]] = []
    for name in ("float32", "bfloat16"):
        parameter = torch.nn.Parameter(torch.randn(UPDATED_PARAMETERS, dtype=getattr(torch, name)))
        parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW([parameter], lr=1e-5, fused=True)
        for _ in range(2):
            optimizer.step()
        for copying in (False, True):
            events = card.copies(COPIES, 416 * MIB, 64 * GIB) if copying else None
            begun, steps = time.perf_counter(), 0
            while time.perf_counter() - begun < 1.2:
                optimizer.step()
                steps += 1
            rate = steps * UPDATED_PARAMETERS / (time.perf_counter() - begun)
            rates = card.rates(events, 416 * MIB) if events else {}
            rows.append({"type": name, "copying": copying, "threads": torch.get_num_threads(),
                         "g_parameters_per_s": rate / 1e9, **rates})  # fmt: skip
            print("  AdamW", shown(rows[-1]), flush=True)
    return rows
