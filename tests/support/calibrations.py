"""Calibrations that no device made: rows that a known efficiency gives, with chance errors of a known size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flopwise.calibrate.kernel_fit import attention_seconds, product_seconds, stream_seconds
from flopwise.calibrate.shapes import gpu_schedule
from flopwise.records.calibration import AttentionRow, Calibration, CopyRow, ProductRow, Sample, StreamRow
from flopwise.setup.efficiency import Efficiency
from flopwise.setup.hardware import Hardware


def _rows(hardware: Hardware) -> tuple[list[ProductRow], list[AttentionRow], list[StreamRow]]:
    """What a calibration times on a GPU, with no times yet."""
    schedule = gpu_schedule(hardware.device.peak_flops, quick=False)
    products = [
        ProductRow(
            number_format=shape.number_format,
            kind=shape.kind,
            rows=shape.rows,
            depth=shape.depth,
            columns=shape.columns,
            output_bytes=4 if "32" in shape.number_format else 2,
            seconds=1.0,
        )
        for shape in (*schedule.products, *schedule.other_products)
    ]
    attentions = [
        AttentionRow(
            number_format="bf16",
            direction=direction,
            sequences=shape.sequences,
            tokens=shape.tokens,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            seconds=1.0,
        )
        for shape in schedule.attentions
        for direction in ("forward", "backward")
    ]
    streams = [
        StreamRow(kernel=kernel, bytes=tensors * size, seconds=1.0)
        for size in schedule.stream_bytes
        for kernel, tensors in (("copy", 2), ("add", 3))
    ]
    return products, attentions, streams


def known_calibration(hardware: Hardware, efficiency: Efficiency, *, noise: float = 0.0, seed: int = 0) -> Calibration:
    """What a card of this efficiency would be timed at."""
    device, random = hardware.device, np.random.default_rng(seed)
    products, attentions, streams = _rows(hardware)

    def chance(count: int) -> np.ndarray:
        return np.exp(noise * random.standard_normal(count))

    timed_products = product_seconds(device, efficiency, products) * chance(len(products))
    timed_attentions = attention_seconds(device, efficiency, attentions) * chance(len(attentions))
    timed_streams = stream_seconds(device, efficiency, streams) * chance(len(streams))
    return Calibration(
        device="cuda",
        device_name="NVIDIA H200",
        units=132,
        memory_bytes=150109880320,
        host_cores=16,
        host_memory_bytes=134217728000,
        number_format="bf16",
        versions={"torch": "2.11.0", "CUDA": "13.0", "driver": "580.95.05", "attention": "cudnn"},
        products=tuple(replace(row, seconds=float(s)) for row, s in zip(products, timed_products, strict=True)),
        attentions=tuple(replace(row, seconds=float(s)) for row, s in zip(attentions, timed_attentions, strict=True)),
        streams=tuple(replace(row, seconds=float(s)) for row, s in zip(streams, timed_streams, strict=True)),
        copies=(
            CopyRow(way="to_device", bytes=2**28, seconds=2**28 / 55.5e9),
            CopyRow(way="to_host", bytes=2**28, seconds=2**28 / 55.3e9),
            CopyRow(way="to_device_beside", bytes=2**28, seconds=2**28 / 50.4e9),
            CopyRow(way="to_host_beside", bytes=2**28, seconds=2**28 / 50.6e9),
        ),
        samples=(
            Sample(clock_hz=1455e6, power_w=684.0, temperature_c=61.0),
            Sample(clock_hz=1440e6, power_w=690.0, temperature_c=62.0),
            Sample(),
            Sample(clock_hz=1500e6, power_w=600.0, temperature_c=60.0),
        ),
        kept_up_flops_per_s=667e12,
        launch_s=efficiency.launch_s,
        host_launch_s=4.2e-6,
        update_bytes_per_s=75e9,
        power_limit_w=700.0,
        seconds=87.0,
        notes=(),
    )
