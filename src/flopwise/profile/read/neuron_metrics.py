"""The Neuron profiler's metrics, and what they are called under our names.

A section is what the profiler and the trainer say of one run, in the profiler's own words and base units; a percentage
has the unit `%` where it was read as one and `share` where it was read as a fraction.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flopwise.base.files import decode, read_table
from flopwise.profile.read.trainer_metrics import RATES_NOTE, TrainMetric, trainer_values
from flopwise.records.profile import MemoryOwner, MemoryUse, Peaks, Profile, ProfileFormat, SourcedValue

# One NeuronCore-v2, half of a Trainium1: a matrix unit of 128 x 128 at 2.8 GHz, other engines at 1.4 GHz, half of the
# chip's 820 GB/s and 32 GiB. The row peak_flops_bandwidth_ratio (223.78 FLOP/B) is the ratio of the first two.
CORE_V2_PEAKS = Peaks(flops=91.7504e12, bandwidth=410e9, number_format="bf16", source="ingested")
CORE_V2_CLOCK_HZ = 1.4e9
CORE_V2_MEMORY_BYTES = 16 * 2.0**30
CORE_V2_INSTANCES = "trn1"
"""How the names of instances with this core begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    """What `neuron.toml` holds; it says what each of its tables is."""

    groups: dict[str, tuple[str, ...]]
    units: dict[str, tuple[str, ...]]
    values: dict[str, tuple[str, ...]]
    owners: dict[MemoryOwner, tuple[str, ...]]


_NAMES = decode(read_table(Path(__file__).with_name("neuron.toml")), _Names, "neuron.toml")
GROUP_OF: dict[str, str] = {name: group for group, names in _NAMES.groups.items() for name in names}
_OWNERS: dict[str, MemoryOwner] = {kind: owner for owner, kinds in _NAMES.owners.items() for kind in kinds}
METRIC_NAME = re.compile(r"[A-Za-z][\w./ -]{0,199}\Z")
_CORE_NUMBER = re.compile(r"_nc\d{1,3}(?=_|$)")


def unit_of(name: str) -> str | None:
    """The base unit that a metric's name tells, also of metrics of newer profilers; None: it tells none."""
    return next((unit for unit, endings in _NAMES.units.items() if name.endswith(endings)), None)


def group_of(name: str) -> str | None:
    """The group of a known metric, on whichever core; None: not one of those that every summary has."""
    core = _CORE_NUMBER.search(name)
    if core is None:
        return GROUP_OF.get(name)
    group = GROUP_OF.get(_CORE_NUMBER.sub("_nc0", name))
    return None if group is None else group.replace("_nc0", core[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuronRow:
    """One metric of a summary."""

    group: str
    value: float | str
    unit: str
    """`s`, `B`, `FLOP`, `FLOP/B`, `count`, `1`, `%`, `share` or `text`."""
    raw: str
    half_ulp: float | None
    """How far the value may be off for its rounding; None of words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuronMemory:
    """Device memory of one kind on one core."""

    nd_idx: int
    nc_idx: int
    usage_type: str
    """As printed; `Tensor` (instructions) and `tensor` (data) are two."""
    bytes: float
    half_ulp_bytes: float
    raw: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuronSection:
    """What stands below one heading."""

    heading: str
    level: int
    """0: the document began without a heading."""
    parent: str | None = None
    line: int = 1
    notes: tuple[str, ...] = ()
    train_metrics: dict[str, TrainMetric] = field(default_factory=dict)
    summary: dict[str, NeuronRow] = field(default_factory=dict)
    memory: tuple[NeuronMemory, ...] = ()
    irregularities: tuple[str, ...] = ()
    """Where its layout is not the usual one; everything was read."""
    damage: tuple[str, ...] = ()
    """What could not be read."""
    logical_neuroncore_config: int | None = None

    @property
    def has_data(self) -> bool:
        return bool(self.train_metrics or self.summary or self.memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuronDocument:
    """Profiles of several runs in one text."""

    sections: tuple[NeuronSection, ...]


_ENGINES = ("tensor", "vector", "scalar", "sync", "gpsimd")
_PACKETS = ("static_dma", "software_dynamic_dma", "hardware_dynamic_dma")
_THROTTLED = re.compile(r"throttle_active(_nc\d+)?_time(_ns)?$")
_LIMIT = re.compile(r"(throttle_avg_util_limit|max_achievable_util_with_throttling)(_nc\d+)?_percent$")
_ACTIVITY = re.compile(r"throttle_(\w+)_active_time((?:_nc\d+)?)_percent$")

TOTAL = "Total"

_BATCH = re.compile(r"\bbatch(?:[ _-]?size)?\s*[=:]?\s*(\d{1,6})\b", re.IGNORECASE)
_SEQUENCE = re.compile(r"\b(?:padding|seq(?:uence)?(?:[ _-]?len(?:gth)?)?)\s*[=:]?\s*(\d{1,7})\b", re.IGNORECASE)
NEAR_WHOLE = 1e-3
"""How far from a whole number of samples FLOPs may be, and FLOPs per sample from each other."""


def stated_batch(section: NeuronSection) -> int | None:
    """Sequences of a step on one core, as the heading or the one above it says."""
    return _stated(section, _BATCH)


def stated_sequence(section: NeuronSection) -> int | None:
    """Tokens of a sequence, as the heading or the one above it says."""
    return _stated(section, _SEQUENCE)


def _stated(section: NeuronSection, pattern: re.Pattern[str]) -> int | None:
    found = pattern.search(section.heading) or pattern.search(section.parent or "")
    return int(found[1]) or None if found else None


def document_profiles(document: NeuronDocument, *, origin: tuple[str, ...] = ()) -> tuple[Profile, ...]:
    """A profile of each section that has data. A section that does not state its batch is given the one that its FLOPs
    tell, where other sections of the same sequence length agree on FLOPs per sample."""
    with_data = [section for section in document.sections if section.has_data]
    headings = Counter(section.heading for section in with_data)
    notes_of_parents = {section.heading: section.notes for section in document.sections if not section.has_data}
    per_sample = _flops_per_sample(with_data)
    profiles = []
    for section in with_data:
        notes = notes_of_parents.get(section.parent or "", ())
        batch = stated_batch(section)
        if batch is None and (batch := _batch_from_flops(section, per_sample)) is not None:
            notes = (*notes, f"batch {batch} told from its FLOPs and those of the sections that state theirs")
        name = section.heading or (origin[0] if origin else "profile")
        name = name if headings[section.heading] == 1 else f"{name} (line {section.line})"
        profiles.append(section_profile(section, name=name, origin=origin, batch_sequences=batch, notes=notes))
    return tuple(profiles)


def _flops_per_sample(sections: Iterable[NeuronSection]) -> dict[int | None, float]:
    """By sequence length, of the sections that state their batch; none where they do not agree."""
    found: defaultdict[int | None, list[float]] = defaultdict(list)
    for section in sections:
        batch, flops = stated_batch(section), _number(section.summary, "model_flops")
        if batch is not None and flops:
            found[stated_sequence(section)].append(flops / batch)
    return {
        sequence: sum(flops) / len(flops)
        for sequence, flops in found.items()
        if max(flops) <= min(flops) * (1 + NEAR_WHOLE)
    }


def _batch_from_flops(section: NeuronSection, per_sample: Mapping[int | None, float]) -> int | None:
    flops, of_one = _number(section.summary, "model_flops"), per_sample.get(stated_sequence(section))
    if not flops or of_one is None:
        return None
    samples = flops / of_one
    batch = round(samples)
    return batch if batch >= 1 and abs(samples - batch) <= NEAR_WHOLE * batch else None


def section_profile(
    section: NeuronSection,
    *,
    name: str | None = None,
    origin: tuple[str, ...] = (),
    written_as: ProfileFormat = "neuron-text",
    batch_sequences: int | None = None,
    notes: tuple[str, ...] = (),
) -> Profile:
    """A section under our names; the times are those of one execution of what was compiled, taken for one step.

    `batch_sequences` where the heading does not say it; `notes` stand before the section's own.
    """
    summary = section.summary
    instance = summary.get("instance_type")
    is_core_v2 = instance is not None and str(instance.value).startswith(CORE_V2_INSTANCES)
    warnings = list(section.damage)
    batch = stated_batch(section) or batch_sequences
    figures = {metric: found.value for metric, found in section.train_metrics.items()}
    values = trainer_values(figures)
    notes = (*notes, *section.notes)
    if rate := values.get("samples_per_s"):
        notes = (*notes, RATES_NOTE)
        steps_rate = figures.get("train_steps_per_second")
        # As many samples a step as one core takes: a rate of one process, and how many there are is not said.
        if batch and isinstance(steps_rate, int | float) and abs(rate.value / steps_rate / batch - 1) < 0.01:
            del values["samples_per_s"]
    values |= _values(summary, is_core_v2=is_core_v2, warnings=warnings)
    system = {metric: str(row.value) for metric, row in summary.items() if row.group == "system"}
    if section.logical_neuroncore_config is not None:
        system["logical_neuroncore_config"] = str(section.logical_neuroncore_config)
    memory = _memory_of_core(section)
    totals = [row.bytes for row in memory if row.usage_type == TOTAL]
    return Profile(
        name=name or section.heading or "profile",
        format=written_as,
        origin=origin,
        device=None if instance is None else str(instance.value),
        batch_sequences=batch,
        sequence_tokens=stated_sequence(section),
        steps=1 if summary else None,
        peaks=CORE_V2_PEAKS if is_core_v2 else None,
        values=values,
        memory=tuple(_memory_use(row) for row in memory if row.usage_type != TOTAL),
        memory_total_bytes=sum(totals) if totals else None,
        memory_capacity_bytes=CORE_V2_MEMORY_BYTES if is_core_v2 else None,
        train_metrics=figures,
        system=system,
        notes=notes,
        warnings=tuple(warnings),
    )


def _memory_of_core(section: NeuronSection) -> list[NeuronMemory]:
    """Rows of the core that the summary is of; all where it does not say, or the table does not have it."""
    device, core = (_number(section.summary, name) for name in ("nd_idx", "nc_idx"))
    of_core = [row for row in section.memory if row.nd_idx == device and row.nc_idx == core]
    return of_core or list(section.memory)


def _memory_use(row: NeuronMemory) -> MemoryUse:
    owner = _OWNERS.get(row.usage_type, "other")
    return MemoryUse(owner=owner, bytes=row.bytes, name=row.usage_type, half_ulp=row.half_ulp_bytes)


def _number(summary: Mapping[str, NeuronRow], name: str) -> float | None:
    row = summary.get(name)
    return row.value if row is not None and not isinstance(row.value, str) else None


def _ingest(row: NeuronRow) -> SourcedValue | None:
    if isinstance(row.value, str):
        return None
    scale = 0.01 if row.unit == "%" else 1.0
    return SourcedValue(row.value * scale, "ingested", (row.half_ulp or 0.0) * scale)


def _values(summary: Mapping[str, NeuronRow], *, is_core_v2: bool, warnings: list[str]) -> dict[str, SourcedValue]:
    values: dict[str, SourcedValue] = {}
    if (span := _span(summary, is_core_v2=is_core_v2)) is not None:
        values["device_span_s"] = span
    for ours, theirs in _NAMES.values.items():
        row = next((summary[name] for name in theirs if name in summary), None)
        if row is not None and (value := _ingest(row)) is not None:
            values[ours] = value
    counts = [_number(summary, f"{engine}_engine_instruction_count") for engine in _ENGINES]
    if None not in counts:
        values["kernel_count"] = SourcedValue(float(sum(count or 0 for count in counts)), "counted")
    busy = values.get("device_busy_s")
    if span is not None and busy is not None and busy.value <= span.value:
        values["idle_s"] = SourcedValue(span.value - busy.value, "counted", span.half_ulp + busy.half_ulp)
    packets = list(_packet_sizes(summary))
    if sent := sum(count for count, _, _ in packets):
        moved, uncertain = sum(size for _, size, _ in packets), sum(half for _, _, half in packets)
        values["copy_packet_bytes"] = SourcedValue(moved / sent, "counted", uncertain / sent)
    return values | _throttling(summary, warnings)


def _span(summary: Mapping[str, NeuronRow], *, is_core_v2: bool) -> SourcedValue | None:
    """Cycles over the clock where that agrees with the time that is printed: it has more digits."""
    total = summary.get("total_time")
    printed = None if total is None else _ingest(total)
    cycles = _number(summary, "neuroncore_cycle_count")
    if not is_core_v2 or not cycles:
        return printed
    counted = SourcedValue(cycles / CORE_V2_CLOCK_HZ, "counted", 0.5 / CORE_V2_CLOCK_HZ)
    if printed is None:
        return counted
    near = abs(counted.value - printed.value) <= printed.half_ulp * 1.001 + counted.half_ulp
    return counted if near and printed.half_ulp > counted.half_ulp else printed


def _packet_sizes(summary: Mapping[str, NeuronRow]) -> Iterator[tuple[float, float, float]]:
    """Packets, their bytes and how far these may be off, for each way of making them that has both."""
    for kind in _PACKETS:
        count, size = _number(summary, f"{kind}_packet_count"), summary.get(f"{kind}_size")
        if count is not None and size is not None and not isinstance(size.value, str):
            yield count, size.value, size.half_ulp or 0.0


def _throttling(summary: Mapping[str, NeuronRow], warnings: list[str]) -> dict[str, SourcedValue]:
    values: dict[str, SourcedValue] = {}
    limited = next((_ingest(row) for name, row in summary.items() if _THROTTLED.match(name)), None)
    total = _number(summary, "total_time")
    if limited is not None and total:
        values["throttle_share"] = SourcedValue(limited.value / total, "counted", limited.half_ulp / total)
    limit = next((_ingest(row) for name, row in summary.items() if _LIMIT.match(name)), None)
    if limit is not None:
        values["util_limit"] = limit
    losses: list[SourcedValue] = []
    for name, row in summary.items():
        if (found := _ACTIVITY.match(name)) is None or (share := _ingest(row)) is None:
            continue
        limit_name = f"throttle_{found[1]}_avg_util_limit{found[2]}_percent"
        of_activity = _ingest(summary[limit_name]) if limit_name in summary else None
        if of_activity is None:
            continue
        if of_activity.value > 1:
            warnings.append(f"{limit_name} is {of_activity.value * 100:g} %, which no limit can be: not counted")
            continue
        cut = 1 - of_activity.value
        losses.append(
            SourcedValue(share.value * cut, "counted", share.half_ulp * cut + share.value * of_activity.half_ulp)
        )
    if losses:
        lost = sum(loss.value for loss in losses)
        values["throttle_loss"] = SourcedValue(lost, "counted", sum(loss.half_ulp for loss in losses))
    return values
