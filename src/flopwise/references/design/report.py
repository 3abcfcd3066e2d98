"""A design search for people and for programs: how the power was divided, what that buys, how fast it trains."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flopwise.base.units import show_bytes, show_count, show_seconds, show_share, significant
from flopwise.references.design.search import DesignedDevice, Search
from flopwise.references.design.technology import DERIVED
from flopwise.report.document import Block, Document, Table, Words, facts, note_rows
from flopwise.report.tables import Styled
from flopwise.report.words import UNKNOWN
from flopwise.setup.hardware import Hardware
from flopwise.setup.written import WrittenBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFigures:
    """What a division of the power buys."""

    peak_flops: dict[str, float]
    units: int
    shared_bytes_per_s: float
    shared_bytes: int
    l2_bytes_per_s: float
    l2_bytes: int
    dram_bytes_per_s: float
    dram_bytes: int
    network_bytes_per_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignRecord(WrittenBatch):
    """A search and its result; seconds are those of one training step."""

    model: str
    technology: str
    method: str
    power_w: float
    precision: str
    peak_format: str
    """What matrix products multiply in."""
    sequence_tokens: int
    batch_sequences: int
    micro_batch_sequences: int | None
    recompute: str | None
    start_shares: dict[str, float]
    shares: dict[str, float]
    start_step_s: float | None
    """None when the start cannot be built."""
    step_s: float
    speedup: float | None
    tokens_per_s: float
    device_bytes: int | None
    """What the step needs, by the physical method."""
    device_capacity_bytes: int | None
    """What the found device has for it, less a reserve."""
    fits: bool | None
    evaluations: int
    starts: int
    iterations: int
    seed: int
    start_device: DeviceFigures | None
    device: DeviceFigures
    chosen: dict[str, str]
    notes: tuple[str, ...]


def design_record(
    designed: DesignedDevice,
    search: Search,
    *,
    model: str,
    technology: str,
    method: str,
    sequence_tokens: int,
    batch_sequences: int,
    notes: tuple[str, ...] = (),
) -> DesignRecord:
    """The record of a search; a prediction of the found device tells the rest of the set-up."""
    design, prediction = designed.design, designed.prediction
    reachable = math.isfinite(design.start_seconds)
    only_format = next(iter(designed.found.device.peak_flops))
    power = designed.found.device.power_w
    assert power is not None  # a designed device has a budget
    return DesignRecord(
        model=model,
        technology=technology,
        method=method,
        power_w=power.value,
        precision=prediction.precision if prediction else only_format,
        peak_format=prediction.peak_format if prediction else only_format,
        sequence_tokens=sequence_tokens,
        batch_sequences=batch_sequences,
        micro_batch_sequences=prediction.micro_batch_sequences if prediction else None,
        recompute=prediction.recompute if prediction else None,
        start_shares=designed.start_shares,
        shares=design.shares,
        start_step_s=design.start_seconds if reachable else None,
        step_s=design.seconds,
        speedup=design.start_seconds / design.seconds if reachable else None,
        tokens_per_s=batch_sequences * sequence_tokens / design.seconds,
        device_bytes=prediction.device_bytes.total if prediction else None,
        device_capacity_bytes=prediction.device_capacity_bytes if prediction else None,
        fits=prediction.fits if prediction else None,
        evaluations=design.evaluations,
        starts=search.starts,
        iterations=search.iterations,
        seed=search.seed,
        start_device=device_figures(designed.start) if designed.start else None,
        device=device_figures(designed.found),
        chosen=dict(prediction.chosen) if prediction else {},
        notes=(*designed.notes, *notes),
    )


def device_figures(hardware: Hardware) -> DeviceFigures:
    """Rates and sizes of a device, out of its facts."""
    device = hardware.device
    levels = {level.name: level for level in device.memory}

    def rate(name: str) -> float:
        fact = levels[name].bandwidth_bytes_per_s
        return fact.value if fact else math.nan

    return DeviceFigures(
        peak_flops={name: fact.value for name, fact in device.peak_flops.items()},
        units=int(device.units.value),
        shared_bytes_per_s=rate("shared"),
        shared_bytes=round(levels["shared"].size_bytes.value),
        l2_bytes_per_s=rate("l2"),
        l2_bytes=round(levels["l2"].size_bytes.value),
        dram_bytes_per_s=rate("dram"),
        dram_bytes=round(levels["dram"].size_bytes.value),
        network_bytes_per_s=hardware.networks[0].bandwidth_bytes_per_s.value if hardware.networks else None,
    )


def found_hardware(designed: DesignedDevice, record: DesignRecord, name: str) -> Hardware:
    """The found device under a name of its own, its source telling how it came about."""
    shares = ", ".join(f"{part} {share:.2%}" for part, share in record.shares.items())
    source = designed.found.sources[DERIVED]
    told = replace(
        source,
        title=f"Design search for {record.model} in {record.technology}, {record.method} method",
        note=f"{record.power_w:,} W: {shares}; {source.note}",
    )
    return replace(
        designed.found,
        name=name,
        title=f"{record.technology}, {show_count(record.power_w, 'W')}, for {record.model}",
        sources={**designed.found.sources, DERIVED: told},
    )


# -- the document ----------------------------------------------------------------------------------------------------


def design_document(record: DesignRecord) -> Document:
    """The division before and after with what it buys, and the step before and after."""
    return Document(blocks=_blocks(record))


def _blocks(record: DesignRecord) -> Iterator[Block]:
    heading = f"{record.model} · {record.technology}, {show_count(record.power_w, 'W')} · method {record.method}"
    asked = f"sequence {record.sequence_tokens:,} · batch {record.batch_sequences:,} · {record.precision}"
    if record.micro_batch_sequences is not None:
        asked += f" · micro-batch {record.micro_batch_sequences:,} · recompute {record.recompute}"
    yield Words(f"{heading}\n{asked}")
    yield Table(
        columns=("part", "start", "found", "rate at start", "rate", "size at start", "size"),
        rows=_part_rows(record),
        left={"part"},
        giving_way=("size at start", "rate at start"),
    )
    yield _answer(record)


def _part_rows(record: DesignRecord) -> list[list[str]]:
    rows = []
    for part, share in record.shares.items():
        before, after = (_bought(device, part, record) for device in (record.start_device, record.device))
        rows.append([part, show_share(record.start_shares[part]), show_share(share), before[0], after[0]])
        rows[-1] += [before[1], after[1]]
    return rows


def _bought(device: DeviceFigures | None, part: str, record: DesignRecord) -> tuple[str, str]:
    """Rate and size of one part, in words."""
    if device is None:
        return UNKNOWN, UNKNOWN
    if part == "core":
        peak = show_count(device.peak_flops[record.peak_format])
        return f"{peak}FLOP/s {record.peak_format}", f"{device.units:,} units"
    if part == "network":
        return f"{show_count(device.network_bytes_per_s or 0)}B/s", UNKNOWN
    return f"{show_count(getattr(device, f'{part}_bytes_per_s'))}B/s", show_bytes(getattr(device, f"{part}_bytes"))


def _answer(record: DesignRecord) -> Table:
    step, memory = f"{show_seconds(record.step_s)}; the start cannot be built", ""
    if record.start_step_s is not None and record.speedup is not None:
        step = f"{show_seconds(record.start_step_s)} → {show_seconds(record.step_s)}, {record.speedup:.2f} × as fast"
    if record.device_bytes is not None and record.device_capacity_bytes is not None:
        verdict, style = ("✓ fits", "green") if record.fits else ("✗ does not fit", "red")
        needed, there = show_bytes(record.device_bytes), show_bytes(record.device_capacity_bytes)
        memory = Styled(f"{verdict}: {needed} of {there}", style)
    starts = "1 start" if record.starts == 1 else f"{record.starts:,} starts, seed {record.seed}"
    chosen = record.chosen.get("precision")
    return facts(
        [
            ("step", Styled(step, "bold")),
            ("speed", f"{significant(record.tokens_per_s)} tok/s"),
            ("memory", memory),
            ("tried", f"{record.evaluations:,} divisions, from {starts}"),
            ("chosen", f"precision {record.precision} ({chosen})" if chosen is not None else ""),
            *note_rows(record.notes),
        ]
    )
