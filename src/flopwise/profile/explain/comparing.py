"""Profiles side by side: their figures as rows, what changes from one to the next, and lines through the changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.base.units import LARGEST_COUNT
from flopwise.profile.explain.invariants import without_impossible
from flopwise.profile.explain.verdicts import Thresholds, device_share, matrix_fill, spill_share
from flopwise.records.profile import KERNEL_CLASSES, METRICS, Profile, Unit, ValueSource

FIRST = ("step_wall_s", "device_span_s", "tokens_per_s", "samples_per_s", "mfu")
"""What is asked first."""
LARGEST_RESIDUAL = 0.01
"""A line that is further off than this at some point does not hold there."""
WORST_RESIDUAL = 0.05
"""A line through the fewest points that is further off than this is none."""
_ROUNDING = 1e-9
FEWEST_POINTS = 3
"""A line through two points always fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureCell:
    """A figure of one profile."""

    value: float | None
    change: float | None = None
    """Relative to the baseline's; None in its own column, and where either is not known or the baseline has 0."""
    source: ValueSource | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureRow:
    """One figure of every profile."""

    name: str
    unit: Unit
    group: str
    cells: tuple[FigureCell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LineFit:
    """Device time as a line over the batch: fixed_s + per_sequence_s × sequences."""

    fixed_s: float
    per_sequence_s: float
    least_batch: int
    """The line holds from this batch on."""
    is_partial: bool
    """Smaller batches are there, and off the line."""
    points: int
    largest_residual: float
    """Relative."""
    sequence_tokens: int | None
    profiles: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WallFit:
    """Wall time of whole trainings that the device does not work: once_s + per_step_s × steps."""

    once_s: float
    per_step_s: float
    points: int
    largest_residual_s: float
    profiles: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRow:
    """One sequence length of profiles that share all else."""

    sequence_tokens: int
    batch_sequences: int | None
    wall_s: float | None
    device_s: float | None
    profile: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HostWait:
    """The runs wait for their host: in most of those whose wall time is known."""

    waiting: int
    known: int
    least_share: float
    """Of the wall time, what the device works: the least and the most among those that wait."""
    most_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileComparison:
    """Profiles as columns."""

    names: tuple[str, ...]
    """No two alike."""
    baseline: int
    """The column that changes are relative to."""
    rows: tuple[FigureRow, ...]
    """What matters most first."""
    fits: tuple[LineFit, ...] = ()
    wall_fit: WallFit | None = None
    lengths: tuple[LengthRow, ...] = ()
    host_wait: HostWait | None = None
    warnings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By the names of those profiles that are damaged, or only a part."""


def compare(
    profiles: Sequence[Profile], *, baseline: str | None = None, thresholds: Thresholds | None = None
) -> ProfileComparison:
    """Profiles side by side; changes are relative to the first one, or to the one that is called `baseline`."""
    if not profiles:
        raise FlopwiseError("there is nothing to compare", hint="name two profiles, or a file with several")
    names = column_names(profiles)
    base = 0 if baseline is None else column_of(names, baseline)
    named = list(zip(names, profiles, strict=True))
    return ProfileComparison(
        names=names,
        baseline=base,
        rows=tuple(_order(list(_rows(profiles, base)), base)),
        fits=tuple(_fits(named)),
        wall_fit=_wall_fit(named),
        lengths=tuple(_lengths(named)),
        host_wait=_host_wait(profiles, thresholds),
        warnings={name: profile.warnings for name, profile in named if profile.warnings},
    )


def column_names(profiles: Sequence[Profile]) -> tuple[str, ...]:
    """The profiles' names; of several alike the second is called `name (2)`."""
    names: list[str] = []
    taken: set[str] = set()
    counts: Counter[str] = Counter()
    for profile in profiles:
        name = profile.name
        while name in taken:
            counts[profile.name] += 1
            name = f"{profile.name} ({counts[profile.name] + 1})"
        taken.add(name)
        names.append(name)
    return tuple(names)


def column_of(names: Sequence[str], wanted: str) -> int:
    """A column by its name, capitals or not; an error with the nearest names where there is none."""
    if wanted in names:
        return names.index(wanted)
    alike = [number for number, name in enumerate(names) if name.lower() == wanted.lower()]
    if len(alike) == 1:
        return alike[0]
    raise unknown_name("profile", wanted, names, hint="the name that stands above its column")


# -- rows ------------------------------------------------------------------------------------------------------------


def _rows(profiles: Sequence[Profile], base: int) -> Iterator[FigureRow]:
    for metric in METRICS:
        found = [profile.values.get(metric.name) for profile in profiles]
        if any(value is not None for value in found):
            values = [None if value is None else value.value for value in found]
            sources = [None if value is None else value.source for value in found]
            cells = _cells(values, sources, base)
            yield FigureRow(name=metric.name, unit=metric.unit, group=metric.group, cells=cells)
    shares: list[dict[str, float]] = [dict(shares_of(profile)) for profile in profiles]
    for name in dict.fromkeys(name for found in shares for name in found):
        yield FigureRow(
            name=name, unit="share", group="shares", cells=_cells([each.get(name) for each in shares], None, base)
        )
    yield from _class_rows(profiles, base)
    memory = [profile.memory_total_bytes for profile in profiles]
    if any(size is not None for size in memory):
        yield FigureRow(name="memory_total_bytes", unit="B", group="memory", cells=_cells(memory, None, base))
    metrics = [train_numbers(profile) for profile in profiles]
    for name in dict.fromkeys(name for found in metrics for name in found):
        cells = _cells([each.get(name) for each in metrics], None, base)
        yield FigureRow(name=name, unit=train_unit(name), group="train_metrics", cells=cells)


def shares_of(profile: Profile) -> Iterator[tuple[str, float]]:
    """Shares that follow from a profile's values, those that are known."""
    reads, writes = profile.get("hbm_read_bytes"), profile.get("hbm_write_bytes")
    spills = [profile.get("spill_read_bytes"), profile.get("spill_write_bytes")]
    traffic = None if reads is None or writes is None else reads + writes
    spilled = None if None in spills or not traffic else sum(size or 0.0 for size in spills) / traffic
    found: dict[str, float | None] = {
        "device_of_wall": device_share(profile),
        "busy_of_wall": profile.share("device_busy_s", "step_wall_s"),
        "busy_of_device": profile.share("device_busy_s"),
        "matrix_active_share": profile.share("matrix_active_s"),
        "matrix_fill": matrix_fill(profile),
        "vector_active_share": profile.share("vector_active_s"),
        "scalar_active_share": profile.share("scalar_active_s"),
        "special_active_share": profile.share("special_active_s"),
        "copy_active_share": profile.share("copy_active_s"),
        "copy_exposed_share": profile.share("copy_exposed_s"),
        "comm_active_share": profile.share("comm_active_s"),
        "comm_exposed_share": profile.share("comm_exposed_s"),
        "spill_of_reads": spill_share(profile),
        "spill_of_traffic": spilled,
        "layout_of_executed": profile.share("layout_flops", "hardware_flops"),
    }
    yield from ((name, share) for name, share in found.items() if share is not None)


def _class_rows(profiles: Sequence[Profile], base: int) -> Iterator[FigureRow]:
    """Time and share of each class; a profile that has classes has none of what is not among them."""
    times = [_class_seconds(profile) for profile in profiles]
    for kind in KERNEL_CLASSES:
        if any(kind in found for found in times):
            taken = [found.get(kind, 0.0) if found else None for found in times]
            sums = [sum(found.values()) for found in times]
            shares = [
                seconds / whole if seconds is not None and whole else None
                for seconds, whole in zip(taken, sums, strict=True)
            ]
            yield FigureRow(name=f"{kind}_s", unit="s", group="classes", cells=_cells(taken, None, base))
            yield FigureRow(name=f"{kind}_share", unit="share", group="classes", cells=_cells(shares, None, base))


def _class_seconds(profile: Profile) -> dict[str, float]:
    found: dict[str, float] = {}
    for spent in profile.classes:
        found[spent.kind] = found.get(spent.kind, 0.0) + spent.seconds
    return found


def train_numbers(profile: Profile) -> dict[str, float]:
    """The trainer's figures that are numbers."""
    metrics = profile.train_metrics
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, str)}


def train_unit(name: str) -> Unit:
    """Of a trainer's figure, by its name."""
    ends: tuple[tuple[str, Unit], ...] = (
        ("_runtime", "s"),
        ("_per_second", "1/s"),
        ("_accuracy", "share"),
        ("total_flos", "FLOP"),
        ("_samples", "count"),
    )
    return next((unit for end, unit in ends if name.endswith(end)), "1")


def _cells(
    values: Sequence[float | None], sources: Sequence[ValueSource | None] | None, base: int
) -> tuple[FigureCell, ...]:
    reference = values[base]
    cells = []
    for number, value in enumerate(values):
        change = None
        if number != base and value is not None and reference and isfinite(value) and isfinite(reference):
            change = (value - reference) / abs(reference)
        cells.append(FigureCell(value=value, change=change, source=sources[number] if sources else None))
    return tuple(cells)


def _order(rows: Sequence[FigureRow], base: int) -> Iterator[FigureRow]:
    """What is asked first, then times by how much they change, then the rest as it came, group by group."""
    first = {row.name: row for row in rows if row.name in FIRST}
    yield from (first[name] for name in FIRST if name in first)
    rest = [row for row in rows if row.name not in first]
    at_stake = [(_seconds_at_stake(row, base), row) for row in rest]
    yield from (row for seconds, row in sorted(at_stake, key=lambda pair: -pair[0]) if seconds > 0)
    yield from (row for seconds, row in at_stake if seconds <= 0)


def _seconds_at_stake(row: FigureRow, base: int) -> float:
    """The largest change of a time of a step; a trainer's times are those of the whole training."""
    reference = row.cells[base].value
    if row.unit != "s" or row.group == "train_metrics" or reference is None:
        return 0.0
    changes = [abs(cell.value - reference) for cell in row.cells if cell.value is not None]
    return max((change for change in changes if isfinite(change)), default=0.0)


# -- lines -----------------------------------------------------------------------------------------------------------


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: (at 0, slope); no numbers where the points have none for it."""
    across = sum(point[0] for point in points) / len(points)
    up = sum(point[1] for point in points) / len(points)
    spread = sum((point[0] - across) * (point[0] - across) for point in points)
    if not spread:
        return nan, nan
    slope = sum((point[0] - across) * (point[1] - up) for point in points) / spread
    return up - slope * across, slope


Setting = tuple[str | int | None, ...]
Named = tuple[str, Profile]


def _setting(profile: Profile) -> Setting:
    """What profiles over batches or lengths must share, as far as both know it."""
    return (profile.device, profile.world, profile.rank, profile.precision)


def _groups(named: Sequence[Named], key: Callable[[Profile], int | None]) -> list[list[Named]]:
    """Profiles that share `key` and all of their setting that is known."""
    groups: list[tuple[int | None, Setting, list[Named]]] = []
    for name, profile in named:
        own = _setting(profile)
        for place, (shared, setting, members) in enumerate(groups):
            pairs = list(zip(setting, own, strict=True))
            if shared == key(profile) and all(None in pair or pair[0] == pair[1] for pair in pairs):
                known = tuple(first if first is not None else second for first, second in pairs)
                groups[place] = (shared, known, [*members, (name, profile)])
                break
        else:
            groups.append((key(profile), own, [(name, profile)]))
    return [members for *_, members in groups]


def _fits(named: Sequence[Named]) -> Iterator[LineFit]:
    for group in _groups(named, lambda profile: profile.sequence_tokens):
        points = []
        for name, profile in group:
            span, batch = profile.get("device_span_s"), profile.batch_sequences
            if span is not None and isfinite(span) and span > 0 and batch is not None and batch <= LARGEST_COUNT:
                points.append((batch, span, name))
        fit = _fit(points, group[0][1].sequence_tokens)
        if fit is not None:
            yield fit


def _fit(found: Sequence[tuple[int, float, str]], sequence_tokens: int | None) -> LineFit | None:
    """The line through device times, small batches left out as long as some time is more than 1 % off it.

    None where that leaves a line that is far off, or one that no device can have: less than no time at some batch.
    """
    points = sorted(found)
    smallest = points[0][0] if points else 0
    while len(points) >= FEWEST_POINTS and len({batch for batch, *_ in points}) >= FEWEST_POINTS:
        fixed, slope = _line([(batch, span) for batch, span, *_ in points])
        residual = max(abs(fixed + slope * batch - span) / span for batch, span, *_ in points)
        if not isfinite(residual):
            return None
        least = points[0][0]
        fewer = [point for point in points if point[0] > least]
        if residual <= LARGEST_RESIDUAL or len(points) <= FEWEST_POINTS or len(fewer) < FEWEST_POINTS:
            # A line through 0, or a level one, may miss it by rounding.
            largest, longest, _ = points[-1]
            if residual > WORST_RESIDUAL or min(fixed, slope * largest) < -_ROUNDING * longest:
                return None
            return LineFit(
                fixed_s=max(0.0, fixed),
                per_sequence_s=max(0.0, slope),
                least_batch=least,
                is_partial=least > smallest,
                points=len(points),
                largest_residual=residual,
                sequence_tokens=sequence_tokens,
                profiles=tuple(name for *_, name in points),
            )
        points = fewer
    return None


def _wall_fit(named: Sequence[Named]) -> WallFit | None:
    """Runtime less the device's time, over the number of steps, of the most trainings that share all but the batch."""
    found = [_wall_points(group) for group in _groups(named, lambda profile: profile.sequence_tokens)]
    points = max(found, key=len, default=[])
    if len({steps for steps, *_ in points}) < FEWEST_POINTS:
        return None
    once, per_step = _line([(steps, wall) for steps, wall, _ in points])
    if not isfinite(once) or not isfinite(per_step):
        return None
    return WallFit(
        once_s=once,
        per_step_s=per_step,
        points=len(points),
        largest_residual_s=max(abs(once + per_step * steps - wall) for steps, wall, _ in points),
        profiles=tuple(name for *_, name in points),
    )


def _wall_points(group: Sequence[Named]) -> list[tuple[float, float, str]]:
    """(steps, seconds that the device does not work, name) of trainings that know them."""
    points = []
    for name, profile in group:
        numbers, span = train_numbers(profile), profile.get("device_span_s")
        runtime, rate = numbers.get("train_runtime"), numbers.get("train_steps_per_second")
        if span is not None and runtime and rate and all(map(isfinite, (span, runtime, runtime * rate))):
            steps = round(runtime * rate)
            points.append((float(steps), runtime - steps * span, name))
    return points


def _lengths(named: Sequence[Named]) -> Iterator[LengthRow]:
    """Wall and device time by sequence length, of profiles that share batch and setting."""
    timed = [
        (name, profile)
        for name, profile in named
        if profile.get("step_wall_s") is not None or profile.get("device_span_s") is not None
    ]
    for group in _groups(timed, lambda profile: profile.batch_sequences):
        rows = [
            LengthRow(
                sequence_tokens=profile.sequence_tokens,
                batch_sequences=profile.batch_sequences,
                wall_s=profile.get("step_wall_s"),
                device_s=profile.get("device_span_s"),
                profile=name,
            )
            for name, profile in group
            if profile.sequence_tokens is not None
        ]
        if len({row.sequence_tokens for row in rows}) > 1:
            yield from sorted(rows, key=lambda row: row.sequence_tokens)


def _host_wait(profiles: Sequence[Profile], thresholds: Thresholds | None) -> HostWait | None:
    limit = (thresholds or Thresholds()).host_device_share
    shares = []
    known = 0
    for profile in profiles:
        share = device_share(without_impossible(profile))
        if share is None:
            continue
        known += 1
        if share < limit:
            shares.append(share)
    if 2 * len(shares) <= known:
        return None
    return HostWait(waiting=len(shares), known=known, least_share=min(shares), most_share=max(shares))
