"""The GPU's half of a calibration on a stand-in that does its work at once, and on a GPU where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopwise.calibrate import calibrating, kernel_clock
from flopwise.calibrate.calibrated import calibrate_hardware
from flopwise.calibrate.calibrating import calibrate_device
from flopwise.calibrate.kernel_calls import attention_calls, product_calls
from flopwise.calibrate.kernel_clock import CudaClock
from flopwise.calibrate.shapes import AttentionShape, ProductShape, Schedule, gpu_schedule
from flopwise.catalog.load import load_hardware
from flopwise.profile.measure.nvml import open_nvml
from flopwise.records.calibration import AttentionCalls, Calibration, CopyRow, ProductCall
from tests.support.fake_nvml import FakeLibrary

FORMATS = ("fp32", "tf32", "bf16", "fp8")


class HostEvent:
    """An event of a device that does its work at once."""

    def __init__(self, *, enable_timing: bool = True) -> None:
        assert enable_timing

    def record(self, stream: object = None) -> None:
        del stream
        self.moment = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: HostEvent) -> float:
        return 1e3 * (later.moment - self.moment)


def on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A maker of tensors that are asked for on the GPU and made here."""

    def made(*sides: Any, **settings: Any) -> torch.Tensor:
        settings.pop("pin_memory", None)
        return make(*sides, **{**settings, "device": "cpu"})

    return made


def small_schedule(formats: Any, *, quick: bool) -> Schedule:
    """The shapes of a GPU's, none larger than 96."""
    whole = gpu_schedule(formats, quick=quick)

    def small(shape: ProductShape) -> ProductShape:
        return replace(shape, rows=96, depth=16 + shape.depth % 32, columns=64)

    others = {shape.number_format: small(shape) for shape in whole.other_products}
    return replace(
        whole,
        products=tuple(small(shape) for shape in whole.products[:12]),
        other_products=tuple(others.values()),
        attentions=(AttentionShape(sequences=1, tokens=32, heads=4, kv_heads=2, head_dim=16),),
        stream_bytes=(2**12, 2**16),
        copy_bytes=2**16,
        update_parameters=10_000,
        row_s=0.001,
        settle_s=(0.005, 0.01),
    )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is this machine's CPU, with the sensors of a card under its power cap."""
    facts = SimpleNamespace(
        name="NVIDIA H200", multi_processor_count=132, total_memory=150109880320, L2_cache_size=2**18
    )
    nvml = open_nvml(FakeLibrary())
    assert nvml is not None
    answers: dict[str, Any] = {
        "get_device_properties": facts,
        "current_device": 0,
        "synchronize": None,
        "mem_get_info": (2**36, 2**37),
        "memory_reserved": 2**36,
        "memory_allocated": 0,
        "empty_cache": None,
        "stream": nullcontext(),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    for name in ("randn", "zeros", "ones", "empty"):
        monkeypatch.setattr(torch, name, on_host(getattr(torch, name)))
    monkeypatch.setattr(calibrating, "sensors", lambda: nvml.device(0))
    monkeypatch.setattr(calibrating, "gpu_schedule", small_schedule)
    short = {"HEAT_S": 0.0005, "LEAST_LOAD_S": 0.0005, "LONGEST_LEAD_S": 0.001, "KEPT_UP_S": 0.001}
    for name, value in {**short, "LOAD_SIDE": 32}.items():
        monkeypatch.setattr(kernel_clock, name, value)


def no_fp8(*_: object, **__: object) -> None:
    raise RuntimeError("scaled_mm is only supported on newer cards\nand so on")


@pytest.mark.usefixtures("card")
def test_everything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled: list[tuple[Any, ...]] = []

    def scaled_product(left: torch.Tensor, right: torch.Tensor, **settings: Any) -> None:
        scaled.append((left.dtype, right.stride(0), settings["scale_a"].shape, settings["scale_b"].shape))

    monkeypatch.setattr(torch, "_scaled_mm", scaled_product)
    precision = torch.get_float32_matmul_precision()
    told: list[tuple[str, int, int]] = []
    found = calibrate_device("cuda", FORMATS, product_calls, attention_calls, tell=lambda *step: told.append(step))
    assert [row.number_format for row in found.products] == ["bf16"] * 12 + ["fp8", "tf32", "fp32"]
    assert scaled[0] == (torch.float8_e4m3fn, 1, (96, 1), (1, 64))
    assert [row.direction for row in found.attentions] == ["forward", "backward"]
    assert len(found.streams) == 4
    assert [row.way for row in found.copies] == ["to_device", "to_host", "to_device_beside", "to_host_beside"]
    assert found.update_bytes_per_s is not None and found.kept_up_flops_per_s is not None
    assert 0 < found.host_launch_s < 1e-3
    assert (found.device_name, found.units, found.number_format) == ("NVIDIA H200", 132, "bf16")
    assert (found.samples[-1].clock_hz, found.samples[-1].power_w) == (1485e6, 650.0)
    assert torch.get_float32_matmul_precision() == precision
    assert found.notes == () and len(told) == told[0][2]
    load_device(found)


@pytest.mark.usefixtures("card")
def test_what_a_card_refuses_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(**_: object) -> AttentionCalls:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(torch, "_scaled_mm", no_fp8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**37))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**17)
    found = calibrate_device("cuda", FORMATS, product_calls, no_kernel)
    assert "fp8" not in {row.number_format for row in found.products}
    assert "some fp8 products were left out: scaled_mm is only supported on newer cards" in found.notes
    # Of the streams, those of the larger size do not fit what is free.
    assert {row.bytes for row in found.streams} == {2 * 2**12, 3 * 2**12}
    assert any(note.startswith("some streams were left out: 0.0 GiB") for note in found.notes)
    hardware = load_device(found)
    assert hardware.efficiency.gemm.by_format is not None and "fp8" not in hardware.efficiency.gemm.by_format
    assert hardware.efficiency.attention == load_hardware("h200").efficiency.attention


@pytest.mark.usefixtures("card")
def test_kernels_are_compiled_before_the_card_is_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a first call of every product in the first format; what it fails with is told of the rows."""
    order: list[str] = []
    settle = CudaClock.settle

    def settled(clock: CudaClock, least_s: float, most_s: float) -> float | None:
        order.append("settled")
        return settle(clock, least_s, most_s)

    def compiled(**shape: Any) -> ProductCall:
        if shape["kind"] == "to_matrix":
            raise RuntimeError("it cannot be compiled")
        name = shape["number_format"]
        return ProductCall(run=lambda: order.append(name), kernel="quack" if name == "bf16" else "cublas")

    monkeypatch.setattr(CudaClock, "settle", settled)
    monkeypatch.setattr(torch, "_scaled_mm", no_fp8)
    found = calibrate_device("cuda", FORMATS, compiled, attention_calls)
    timed = [row for row in found.products if row.number_format == "bf16"]
    assert len(timed) == 8 and order[:9] == ["bf16"] * 8 + ["settled"]
    assert "some bf16 products were left out: it cannot be compiled" in found.notes
    # What runs products in training's format, and not in those that it can do without.
    assert found.versions["products"] == "quack" and "fp32" in order


def load_device(found: Calibration) -> Any:
    """The file of a card that was measured; each format's rate is what a CPU's is, far below the peak."""
    slow = replace(found, products=tuple(replace(row, seconds=1e-6) for row in found.products))
    hardware, _ = calibrate_hardware(load_hardware("h200"), slow, name="card", date="2026-01-02")
    note = str(hardware.sources["measured-products"].note)
    assert "12 in bf16" in note and "1485 MHz and 650 W" in note
    assert all(f"; {left_out}" in note for left_out in found.notes)
    return hardware


def test_buffers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_clock, "_event", HostEvent)
    short = {"HEAT_S": 0.001, "LEAST_LOAD_S": 0.001, "LONGEST_LEAD_S": 0.002, "KEPT_UP_S": 0.001}
    for name, value in {**short, "LOAD_SIDE": 32}.items():
        monkeypatch.setattr(kernel_clock, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = CudaClock(torch.float32, None, device="cpu")
    assert clock.settle(0.01, 0.02) is not None
    turns: list[int] = []

    def buffer(number: int) -> None:
        turns.append(number)
        time.sleep(0.001)

    calls = [partial(buffer, number) for number in range(3)]
    assert 0.001 <= clock.seconds(calls, 0.03) < 0.05
    # Each once to warm up, each once for a rough time, then in turns from round to round.
    assert turns[:9] == [0, 1, 2] * 3
    later = turns[6:]
    assert later == [index % 3 for index in range(len(later))] and len(later) >= 5
    assert 0.001 <= clock.submit_seconds(lambda: time.sleep(0.001), count=5) < 0.05
    assert clock.samples == []


def test_the_hosts_update_is_timed_beside_copies() -> None:
    queued: list[int] = []

    def copies(times: int) -> Callable[[], float]:
        queued.append(times)
        return lambda: 1e-3

    row = CopyRow(way="to_host_beside", bytes=2**20, seconds=1e-3)
    rate = calibrating._update_bytes_per_s(100_000, copies, copies, [row])
    assert rate is not None and 1e7 < rate < 1e13
    assert len(queued) == 2 and queued[0] == queued[1] >= 1
    assert calibrating._update_bytes_per_s(0, copies, copies, [row]) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured() -> None:
    capable = torch.cuda.get_device_capability()[0]
    formats = FORMATS if capable >= 9 else FORMATS[:3]
    found = calibrate_device("cuda", formats, product_calls, attention_calls, quick=True)
    assert {row.number_format for row in found.products} == set(formats)
    assert {row.way for row in found.copies} == {"to_device", "to_host", "to_device_beside", "to_host_beside"}
    assert found.attentions and found.streams
    assert found.versions["products"] in ("quack", "cublas")
    assert found.launch_s < 1e-4
    assert found.seconds < 120
