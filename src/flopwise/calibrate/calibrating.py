"""Time a device's kernels: products, attention, streams, copies, launches, the host's update. Rows, no judgement.

Everything is warm, on random numbers, and over buffers that together exceed the last cache where training's would.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from math import ceil
from typing import Literal, TypeVar

import torch
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.calibrate.kernel_clock import Clock, CpuClock, CudaClock, sensors
from flopwise.calibrate.shapes import (
    AttentionShape,
    ProductShape,
    Schedule,
    cpu_schedule,
    first_format,
    gpu_schedule,
)
from flopwise.profile.measure.this_machine import cpu_title, last_level_cache_bytes, memory_bytes
from flopwise.records.calibration import (
    AttentionDirection,
    AttentionMaker,
    AttentionRow,
    Calibration,
    CopyRow,
    CopyWay,
    ProductCall,
    ProductMaker,
    ProductRow,
    StreamRow,
)
from flopwise.work.formats import WIDTH_BYTES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CACHES = 3
"""A row's buffers together are this many times the last cache."""
MOST_SETS = 192
MOST_SETS_CPU = 8
"""Of a CPU's products, whose random numbers take longer to make."""
COPIES = 12
UPDATES = 5
ADAMW_BYTES = 28
"""Read and written a parameter in fp32: weight and two moments both ways, the gradient once."""
SLOWEST_S = 2.0
"""A format whose products take this long each on a CPU is not measured further."""
LEAST_ROWS = 8
Row = TypeVar("Row")
Tell = Callable[[str, int, int], None]


def calibrate_device(
    device: Literal["cuda", "cpu"],
    formats: Collection[str],
    product: ProductMaker,
    attention: AttentionMaker,
    *,
    quick: bool = False,
    tell: Tell | None = None,
) -> Calibration:
    """Time the device's kernels in the formats that it has a peak for; a CPU is tried in fp32 and bf16."""
    began = time.perf_counter()
    schedule = cpu_schedule(quick=quick) if device == "cpu" else gpu_schedule(formats, quick=quick)
    run = _Calibration(device, schedule, first_format(formats) if device == "cuda" else "fp32", product, tell)
    products = run.products(schedule.products)
    streams = run.streams()
    copies, update = run.copies()
    launch_s, host_launch_s = run.launch()
    if device == "cpu":
        products += run.products(schedule.other_products)
        run.notes += _faster_in_bf16(products)
    attentions, kernels = run.attentions(schedule.attentions, attention)
    if device == "cuda":
        products += run.products(schedule.other_products)
    if len([row for row in products if row.number_format == run.first]) < LEAST_ROWS:
        raise FlopwiseError(
            f"too few matrix products could be timed on {run.name}",
            why="; ".join(run.notes[:3]) or "time ran out",
            hint="nothing else should run on the device; try again, without --quick",
        )
    return Calibration(
        device=device,
        device_name=run.name,
        units=run.units,
        memory_bytes=run.memory_bytes,
        host_cores=len(os.sched_getaffinity(0)),
        host_memory_bytes=memory_bytes(),
        number_format=run.first,
        versions=_versions(device, {"products": run.product_kernels, "attention": kernels}),
        products=tuple(products),
        attentions=tuple(attentions),
        streams=tuple(streams),
        copies=tuple(copies),
        samples=tuple(run.clock.samples),
        kept_up_flops_per_s=run.kept_up_flops,
        launch_s=launch_s,
        host_launch_s=host_launch_s,
        update_bytes_per_s=update,
        power_limit_w=None if run.sensors is None else run.sensors.power_limit_w(),
        seconds=time.perf_counter() - began,
        notes=tuple(run.notes),
    )


class _Calibration:
    """One calibration: the device, how far it is, and what could not be had."""

    def __init__(
        self, device: Literal["cuda", "cpu"], schedule: Schedule, first: str, product: ProductMaker, tell: Tell | None
    ) -> None:
        self.device, self.schedule, self.first = device, schedule, first
        self.notes: list[str] = []
        self.product_kernels: set[str] = set()
        """What runs products in the first format."""
        self._make_product = product
        self._tell, self._done = tell, 0
        self._steps = len(schedule.products) + len(schedule.other_products) + 2 * len(schedule.attentions)
        self._steps += 2 * len(schedule.stream_bytes) + 3
        self.sensors = sensors() if device == "cuda" else None
        if device == "cuda":
            found = torch.cuda.get_device_properties(torch.cuda.current_device())
            self.name, self.units = str(found.name), int(found.multi_processor_count)
            self.memory_bytes = int(found.total_memory)
            self._cache_bytes = int(getattr(found, "L2_cache_size", 0) or 64 * 2**20)
            self.clock: Clock = CudaClock(DTYPES[first], self.sensors)
        else:
            self.name, self.units = cpu_title(), len(os.sched_getaffinity(0))
            self.memory_bytes, self._cache_bytes = memory_bytes(), last_level_cache_bytes()
            self.clock = CpuClock()
        self._step("warming up")
        if device == "cuda":
            self._compile(schedule.products)
        self._began = time.perf_counter()
        self.kept_up_flops = self.clock.settle(*schedule.settle_s)

    def _compile(self, shapes: Iterable[ProductShape]) -> None:
        """Call every product once: what is compiled by that takes seconds, in which a warm card would cool."""
        for shape in shapes:
            # What fails is told when it is to be timed.
            with suppress(Exception):
                self._product_call(shape).run()

    # -- rows -----------------------------------------------------------------------------------------------------

    def products(self, shapes: Iterable[ProductShape]) -> list[ProductRow]:
        """Matrix products; a CPU's format that is far too slow is given up."""
        rows: list[ProductRow] = []
        given_up: set[str] = set()
        before = torch.get_float32_matmul_precision()
        for shape in shapes:
            self._step(f"products in {shape.number_format}")
            if shape.number_format in given_up:
                continue
            torch.set_float32_matmul_precision("high" if shape.number_format == "tf32" else "highest")
            try:
                row = self._try(f"{shape.number_format} products", partial(self._product, shape))
            finally:
                torch.set_float32_matmul_precision(before)
            rows += [] if row is None else [row]
            if row is not None and self.device == "cpu" and row.seconds > SLOWEST_S:
                given_up.add(shape.number_format)
                self.notes.append(f"{shape.number_format} products are too slow here to be timed further")
        return rows

    def _product(self, shape: ProductShape) -> ProductRow:
        width = 2 if shape.number_format == "fp8" else WIDTH_BYTES[shape.number_format]
        operands = shape.depth * (shape.rows + shape.columns) * WIDTH_BYTES[shape.number_format]
        outputs = shape.rows * shape.columns * width
        self._check_room(operands + outputs)
        calls = [self._product_call(shape) for _ in range(self._sets(operands + outputs, few=True))]
        seconds = self.clock.seconds([call.run for call in calls], self.schedule.row_s)
        if shape.number_format == self.first:
            self.product_kernels.update(call.kernel for call in calls)
        return ProductRow(**asdict(shape), output_bytes=width, seconds=seconds)

    def _product_call(self, shape: ProductShape) -> ProductCall:
        """A product as the engine makes it, over tensors of its own."""
        if shape.number_format == "fp8":
            return ProductCall(run=_fp8_call(shape.rows, shape.depth, shape.columns), kernel="torch")
        return self._make_product(**asdict(shape), device=self.device)

    def attentions(self, shapes: Iterable[AttentionShape], make: AttentionMaker) -> tuple[list[AttentionRow], set[str]]:
        """Attention, and the kernels that ran it."""
        rows: list[AttentionRow] = []
        kernels: set[str] = set()
        for shape in shapes:
            self._step("attention")
            found = self._try("attention", partial(self._attention, shape, make, kernels))
            self._step("attention")
            rows += found or []
        return rows, kernels

    def _attention(self, shape: AttentionShape, make: AttentionMaker, kernels: set[str]) -> list[AttentionRow]:
        sizes = asdict(shape)
        elements = shape.sequences * shape.tokens * shape.head_dim * (8 * shape.heads + 6 * shape.kv_heads)
        self._check_room(elements * WIDTH_BYTES[self.first])
        calls = make(**sizes, number_format=self.first, device=self.device)
        kernels.add(calls.kernel)
        directions: dict[AttentionDirection, Callable[[], object]] = {
            "forward": calls.forward,
            "backward": calls.backward,
        }
        return [
            AttentionRow(
                **sizes,
                number_format=self.first,
                direction=direction,
                seconds=self.clock.seconds([call], self.schedule.row_s),
            )
            for direction, call in directions.items()
        ]

    def streams(self) -> list[StreamRow]:
        """Copies (one tensor read, one written) and sums (two read, one written) within the device's memory."""
        rows: list[StreamRow] = []
        for size, (kernel, tensors) in itertools.product(self.schedule.stream_bytes, (("copy", 2), ("add", 3))):
            self._step("memory")
            found = self._try("streams", partial(self._stream, size, kernel, tensors))
            rows += [] if found is None else [found]
        return rows

    def _stream(self, size: int, kernel: str, tensors: int) -> StreamRow:
        moved = size * tensors
        self._check_room(moved)
        calls = [stream_call(kernel, size, self.device) for _ in range(self._sets(moved))]
        return StreamRow(kernel=kernel, bytes=moved, seconds=self.clock.seconds(calls, self.schedule.row_s))

    def copies(self) -> tuple[list[CopyRow], float | None]:
        """Copies from and to pinned memory, each way alone and both at once; the host's update beside them."""
        self._step("copies")
        if self.device == "cpu":
            return [], None
        found = self._try("copies", lambda: _copies(self.schedule), always=True)
        return ([], None) if found is None else found

    def launch(self) -> tuple[float, float]:
        """The shortest kernel's time on the device, and the host's to submit it."""
        self._step("launches")
        number = torch.zeros(1, device=self.device)
        on_device = self.clock.seconds([lambda: number.add_(1)], self.schedule.row_s)
        if isinstance(self.clock, CudaClock):
            return on_device, self.clock.submit_seconds(lambda: number.add_(1))
        return on_device, on_device

    # -- the way there --------------------------------------------------------------------------------------------

    def _try(self, what: str, measure: Callable[[], Row], *, always: bool = False) -> Row | None:
        """A row, or None with a note: time ran out, or torch refuses."""
        if not always and time.perf_counter() - self._began > self.schedule.most_s:
            self._note(f"some {what} were left out: the time was up")
            return None
        self.clock.heat()
        try:
            return measure()
        except Exception as error:  # as a package's own compiler may raise anything
            reason = str(error).strip().partition("\n")[0][:120]
            self._note(f"some {what} were left out: {reason}")
            return None
        finally:
            if self.device == "cuda" and torch.cuda.memory_reserved() > self.memory_bytes // 3:
                torch.cuda.empty_cache()

    def _check_room(self, needed_bytes: int) -> None:
        """Buffers and what a kernel takes beside them must fit."""
        if self.device == "cuda":
            free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        else:
            free = self.memory_bytes // 4
        if needed_bytes > 0.8 * free:
            raise RuntimeError(f"{needed_bytes / 2**30:.1f} GiB are not free")

    def _sets(self, bytes_each: int, *, few: bool = False) -> int:
        most = MOST_SETS_CPU if few and self.device == "cpu" else MOST_SETS
        return min(max(1, ceil(CACHES * self._cache_bytes / bytes_each)), most)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _step(self, what: str) -> None:
        if self._tell is not None:
            self._tell(what, self._done, self._steps)
        self._done += 1


# -- calls -----------------------------------------------------------------------------------------------------------


def _fp8_call(rows: int, depth: int, columns: int) -> Callable[[], object]:
    """Both operands with their depth contiguous and a scale for each row and column: the only layout there is.

    Sums are fast ones, as those of forward products; on an H200 exact ones take 0 to 9 % longer.
    """

    def numbers(count: int) -> Tensor:
        return torch.randn(count, depth, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)

    left, right = numbers(rows), numbers(columns).t()
    of_rows = torch.ones(rows, 1, device="cuda", dtype=torch.float32)
    of_columns = torch.ones(1, columns, device="cuda", dtype=torch.float32)
    return lambda: torch._scaled_mm(
        left, right, scale_a=of_rows, scale_b=of_columns, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def stream_call(kernel: str, size: int, device: str) -> Callable[[], object]:
    """A copy or a sum of tensors of `size` bytes."""
    elements = max(1, size // 2)
    out = torch.zeros(elements, device=device, dtype=torch.bfloat16)
    one = torch.randn(elements, device=device, dtype=torch.bfloat16)
    if kernel == "copy":
        return lambda: out.copy_(one)
    other = torch.randn(elements, device=device, dtype=torch.bfloat16)
    return lambda: torch.add(one, other, out=out)


def _copies(schedule: Schedule) -> tuple[list[CopyRow], float | None]:
    """Copies over the link, and AdamW on the host's cores beside them."""
    size = schedule.copy_bytes
    host = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    inwards, outwards = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def queue(stream: torch.cuda.Stream, target: Tensor, source: Tensor, times: int) -> Callable[[], float]:
        """Copies on a stream; what it gives back waits for them and tells the seconds of one."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            start.record(stream)
            for _ in range(times):
                target.copy_(source, non_blocking=True)
            end.record(stream)

        def seconds() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / times

        return seconds

    def to_device(times: int) -> Callable[[], float]:
        return queue(inwards, device[0], host[0], times)

    def to_host(times: int) -> Callable[[], float]:
        return queue(outwards, host[1], device[1], times)

    def row(way: CopyWay, seconds: float) -> CopyRow:
        return CopyRow(way=way, bytes=size, seconds=seconds)

    torch.cuda.synchronize()
    for warm in (to_device, to_host):
        warm(2)()
    rows = [row("to_device", to_device(COPIES)()), row("to_host", to_host(COPIES)())]
    one, other = to_device(COPIES), to_host(COPIES)
    rows += [row("to_device_beside", one()), row("to_host_beside", other())]
    return rows, _update_bytes_per_s(schedule.update_parameters, to_device, to_host, rows)


def _update_bytes_per_s(
    parameters: int,
    to_device: Callable[[int], Callable[[], float]],
    to_host: Callable[[int], Callable[[], float]],
    rows: list[CopyRow],
) -> float | None:
    """What torch's fused AdamW reads and writes a second on the host, in fp32, while copies run both ways."""
    if not parameters or memory_bytes() < 8 * 4 * 4 * parameters:
        return None
    weight = torch.zeros(parameters, requires_grad=True)
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    began = time.perf_counter()
    optimizer.step()
    alone_s = time.perf_counter() - began
    # Enough copies to outlast the updates, which they slow down.
    times = min(ceil(2.0 * UPDATES * alone_s / rows[-1].seconds), 500)
    waits = [to_device(times), to_host(times)]
    found = []
    for _ in range(UPDATES):
        began = time.perf_counter()
        optimizer.step()
        found.append(time.perf_counter() - began)
    for wait in waits:
        wait()
    return ADAMW_BYTES * parameters / sorted(found)[UPDATES // 2]


# -- about the device ------------------------------------------------------------------------------------------------


def _faster_in_bf16(rows: list[ProductRow]) -> list[str]:
    """A CPU trains in fp32 unless it is told otherwise; what bf16 would bring is told, and not planned with."""
    best = {
        name: max((row.flops_per_s for row in rows if row.number_format == name), default=0.0)
        for name in ("fp32", "bf16")
    }
    if best["bf16"] <= best["fp32"]:
        return []
    return [f"products in bf16 are {best['bf16'] / best['fp32']:.1f} times as fast; plans for a CPU keep to fp32"]


def _versions(device: str, kernels: dict[str, set[str]]) -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    if device == "cuda":
        versions["CUDA"] = str(torch.version.cuda)
        versions["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found = sensors()
        driver = None if found is None else found.driver_version()
        if driver:
            versions["driver"] = driver
    else:
        versions["threads"] = str(torch.get_num_threads())
    return versions | {name: ", ".join(sorted(ran)) for name, ran in kernels.items() if ran}
