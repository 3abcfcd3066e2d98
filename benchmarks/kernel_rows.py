"""Measured kernels, as arrays, and what flopwise predicts for them. `benchmarks/data/kernels/README.md` names sources.

Two kinds of sources. Kernels timed back to back (`simumax`, `flopwise`) are compared as they are. Kernels timed one by
one carry a constant of the method: the host's synchronisation (`llmcompass`), caches flushed before each kernel
(`nsight`). It is taken from the shortest row of the set, as measured less predicted, and added to all of them.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from flopwise.predict.kernels.attention import attention_times
from flopwise.predict.kernels.bandwidth import streaming_times
from flopwise.predict.kernels.gemm import gemm_times
from flopwise.setup.efficiency import Efficiency
from flopwise.setup.hardware import Hardware

Floats = NDArray[np.float64]
Table = Literal["gemm", "attention", "streaming"]

FOLDER = Path(__file__).parent / "data" / "kernels"
ONE_BY_ONE = ("llmcompass", "nsight")
LOCKED_CLOCK_SHARE = 0.987
"""Share of the peak at the clock in force that large products reach when the clock is locked below what the power
cap would allow; fitted to the `nsight` rows. It stands in for `sustained`, which includes the power cap."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one source and device; every array has one entry a row."""

    source: str
    device: str
    seconds: Floats

    def where(self, mask: NDArray[np.bool_]) -> Self:
        """The rows of the mask."""
        arrays: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[mask] for name, value in arrays.items() if not isinstance(value, str)})


@dataclass(frozen=True, slots=True)
class GemmRows(Rows):
    """Matrix products; `clock_hz` is NaN where the device chose it."""

    groups: Floats
    m: Floats
    k: Floats
    n: Floats
    accumulate: Floats
    output_bytes: Floats
    clock_hz: Floats

    @property
    def large(self) -> NDArray[np.bool_]:
        """Every side at least 1024."""
        return np.minimum(np.minimum(self.m, self.k), self.n) >= 1024


@dataclass(frozen=True, slots=True)
class AttentionRows(Rows):
    """Flash attention; `backward` is 1 for that direction and 0 for the other."""

    backward: Floats
    sequences: Floats
    tokens: Floats
    heads: Floats
    kv_heads: Floats
    query_dim: Floats
    value_dim: Floats
    area_share: Floats


@dataclass(frozen=True, slots=True)
class StreamingRows(Rows):
    """One kind of kernel bound by bytes."""

    kernel: str
    bytes: Floats


def load_gemms() -> list[GemmRows]:
    """Every set of matrix products."""
    names = ("groups", "m", "k", "n", "accumulate", "output_bytes", "clock_hz")
    return [
        GemmRows(source, device, _column(rows, "seconds"), *(_column(rows, name) for name in names))
        for (source, device), rows in _sets("gemm", "source", "device").items()
    ]


def load_attentions() -> list[AttentionRows]:
    """Every set of attention calls."""
    names = ("sequences", "tokens", "heads", "kv_heads", "query_dim", "value_dim", "area_share")
    return [
        AttentionRows(
            source,
            device,
            _column(rows, "seconds"),
            np.array([float(row["direction"] == "backward") for row in rows]),
            *(_column(rows, name) for name in names),
        )
        for (source, device), rows in _sets("attention", "source", "device").items()
    ]


def load_streams() -> list[StreamingRows]:
    """Every set of kernels bound by bytes, one kind of kernel each."""
    return [
        StreamingRows(source, device, _column(rows, "seconds"), kernel, _column(rows, "bytes"))
        for (source, device, kernel), rows in _sets("streaming", "source", "device", "kernel").items()
    ]


def efficiency_for(rows: GemmRows, hardware: Hardware) -> Efficiency:
    """The catalogue's constants, as timed one by one; where the clock was locked, without the power cap in them."""
    gemm = hardware.efficiency.gemm
    if np.isnan(rows.clock_hz).any():
        return replace(hardware.efficiency, gemm=replace(gemm, sustained=gemm.timed or gemm.sustained))
    unthrottled = replace(gemm, sustained=LOCKED_CLOCK_SHARE)
    return replace(hardware.efficiency, gemm=unthrottled)


def predict_gemms(rows: GemmRows, hardware: Hardware, efficiency: Efficiency) -> Floats:
    """Seconds of each row, at its clock where that was locked."""
    assert hardware.device.clock_hz is not None
    clock_share = np.where(np.isnan(rows.clock_hz), 1.0, rows.clock_hz / hardware.device.clock_hz.value)
    times = gemm_times(
        hardware.device,
        efficiency,
        rows.m,
        rows.k,
        rows.n,
        peak_flops=hardware.device.peak_flops["bf16"].value * clock_share,
        groups=rows.groups,
        output_bytes=rows.output_bytes,
        accumulate=rows.accumulate,
    )
    return _with_overhead(rows, times.seconds)


def predict_attentions(rows: AttentionRows, hardware: Hardware, efficiency: Efficiency) -> Floats:
    """Seconds of each row. A pair of scores and values takes 2 · (query + value width) FLOPs forward, 2.5 times
    that backward; queries, keys, values and output are moved once forward and twice and a bit backward."""
    wide = rows.query_dim + rows.value_dim
    flops = 2.0 * rows.sequences * rows.heads * rows.tokens**2 * rows.area_share * wide
    elements = rows.sequences * rows.tokens * wide * (rows.heads + rows.kv_heads)

    def seconds(direction: Literal["forward", "backward"], work: float, moved: float) -> Floats:
        return attention_times(
            hardware.device,
            efficiency,
            direction,
            flops=work * flops,
            moved_bytes=moved * elements,
            heads=rows.sequences * rows.heads,
            tokens=rows.tokens,
            head_dim=rows.value_dim,
            area_share=rows.area_share,
            peak_flops=hardware.device.peak_flops["bf16"].value,
        ).seconds

    both = np.where(rows.backward > 0, seconds("backward", 2.5, 5.0), seconds("forward", 1.0, 2.0))
    return _with_overhead(rows, both)


def predict_streams(rows: StreamingRows, hardware: Hardware, efficiency: Efficiency) -> Floats:
    """Seconds of each row."""
    return _with_overhead(rows, streaming_times(hardware.device, efficiency, rows.bytes).seconds)


def errors(predicted: Floats, measured: Floats) -> Floats:
    """|predicted / measured − 1|"""
    return np.abs(predicted / measured - 1.0)


def _with_overhead(rows: Rows, seconds: Floats) -> Floats:
    if rows.source not in ONE_BY_ONE:
        return seconds
    shortest = int(np.argmin(rows.seconds))
    return seconds + max(0.0, float(rows.seconds[shortest] - seconds[shortest]))


def _sets(table: Table, *keys: str) -> dict[tuple[str, ...], list[dict[str, str]]]:
    sets: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with (FOLDER / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            sets.setdefault(tuple(row[key] for key in keys), []).append(row)
    return sets


def _column(rows: list[dict[str, str]], name: str) -> Floats:
    return np.array([float(row[name] or "nan") for row in rows])
