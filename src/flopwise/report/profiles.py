"""A profile for a terminal: its figures by group, time by class and kernel, memory, verdicts. Several as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from flopwise.records.profile import KERNEL_CLASSES, METRIC, METRICS, Peaks, Profile, Spent, ValueSource, Verdict
from flopwise.report.profile_timeline import task_tables
from flopwise.report.profile_words import (
    BEYOND_READING,
    TITLES,
    UNKNOWN,
    about,
    digits,
    evidence_words,
    name_words,
    percent,
    safe,
    scaled,
    seconds,
    shortened,
    stake_words,
    title,
    value_words,
    warning_words,
)
from flopwise.report.tables import GAP, fitting_columns, text_table
from flopwise.report.training import as_text, memory_table, metrics_block, wrapped

Judged = tuple[Profile, Sequence[Verdict]]
"""A profile and what limits it."""

VALUE_COLUMNS = ("Group", "Name", "Value", "of device", "Source", "Meaning")
VALUE_WORDS = {"Group", "Name", "Source", "Meaning"}
SPENT_COLUMNS = ("name", "class", "time", "share", "count", "reached", "of roof", "lost")
SPENT_WORDS = {"name", "class"}
MEMORY_COLUMNS = ("owner", "size", "share")
TABLE_COLUMNS = ("profile", "batch", "seq", "step", "device", "rate", "MFU", "MBU", "memory", "limited by")
TABLE_WORDS = {"profile", "limited by"}
TABLE_GIVING_WAY = ("MBU", "memory", "rate", "seq", "batch")

MOST_SPENT = 10
"""Kernels, or operators, that a page lists."""
FLEXIBLE = {"name": 26, "Meaning": 40, "profile": 18}
"""Columns that are cut where others need the room, down to so many signs."""
LONGEST_LABEL = 24
"""Signs of a name before bars or sizes."""
SOURCES = ("modelled", "counted", "ingested")
MOST_FLOPS = 1e30
"""Of a training; no figure beyond it is one."""
BAR, BAR_WIDTH = "█", 30
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60

# -- rows of words, which other forms share --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words under their columns; `words` are the columns that stand left."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    words: frozenset[str]
    note: str = ""


def heading_parts(profile: Profile) -> list[str]:
    """Name, device, format, steps, batch, sequence: what is known of them."""
    parts = [name_words(profile)]
    parts += [safe(profile.device)] if profile.device else []
    parts.append(profile.format)
    if profile.rank is not None or (profile.world or 1) > 1:
        rank = "" if profile.rank is None else f"rank {profile.rank:,}"
        world = "" if profile.world is None else f"{'of ' if rank else ''}{profile.world:,} devices"
        parts.append(f"{rank} {world}".strip())
    for count, noun in ((profile.steps, "steps"), (profile.batch_sequences, "batch"), (profile.sequence_tokens, "seq")):
        if count is not None:
            parts.append(
                f"{count:,} {noun if count != 1 else 'step'}" if noun == "steps" else f"{_NOUNS[noun]} {count:,}"
            )
    return [*parts, safe(profile.precision, 20)] if profile.precision else parts


_NOUNS = {"batch": "batch", "seq": "sequence"}


def limits_words(verdicts: Sequence[Verdict], most: int = 3) -> str:
    """The first limits with what is at stake: `host-bound 57 %, spills 25 %`."""
    told = [verdict for verdict in verdicts if verdict.kind != "invalid"][:most]
    beside = {verdict.kind: "" if verdict.share is None else f" {about(verdict.share)}" for verdict in told}
    return ", ".join(f"{TITLES[verdict.kind].title}{beside[verdict.kind]}" for verdict in told)


def usual_source(profile: Profile) -> ValueSource:
    """Where figures without a mark come from: a file's say-so where there is any, else a measurement."""
    return "ingested" if any(value.source == "ingested" for value in profile.values.values()) else "measured"


def value_table(profile: Profile) -> Table:
    """Every value under its group, whose name stands on the first row only; a group of nothing but zeros is one row."""
    usual = usual_source(profile)
    rows: list[list[str]] = []
    group = ""
    used = {METRIC[name].group for name, value in profile.values.items() if value.value != 0}
    for metric in METRICS:
        value = profile.values.get(metric.name)
        if value is None or (metric.group not in used and metric.group == group):
            continue
        if metric.group not in used:
            rows.append([metric.group, "", "none", "", "", ""])
            group = metric.group
            continue
        share = profile.share(metric.name) if metric.unit == "s" and metric.name not in _WHOLES else None
        rows.append(
            [
                "" if metric.group == group else metric.group,
                metric.name,
                value_words(metric.name, value),
                "" if share is None or not isfinite(share) else percent(share),
                "" if value.source == usual else value.source,
                metric.meaning,
            ]
        )
        group = metric.group
    note = f"Figures with no source beside them are {'as the file says' if usual == 'ingested' else 'measured'}."
    note = "\n".join(words for words in (note, peaks_words(profile.peaks)) if words)
    return Table("", VALUE_COLUMNS, rows, frozenset(VALUE_WORDS), note if rows else "")


def peaks_words(peaks: Peaks | None) -> str:
    """What shares of the peak were divided by."""
    if peaks is None:
        return ""
    moving = f" and {digits(peaks.bandwidth / 1e9)} GB/s" if peaks.bandwidth else ""
    computing = f"{digits(peaks.flops / 1e12)} TFLOP/s {safe(peaks.number_format, 20)}"
    return f"Peaks: {computing}{moving} ({safe(peaks.source, 40)})."


_WHOLES = ("step_wall_s", "device_span_s", "copy_time_s", "comm_time_s")
"""Times that are no parts of the device's span."""


def class_shares(profile: Profile) -> list[tuple[str, float, float | None]]:
    """(class, seconds, share of the device's span) in the usual order, and at the end what is idle."""
    whole = profile.get("device_span_s") or sum(spent.seconds for spent in profile.classes)
    found = sorted(profile.classes, key=lambda spent: KERNEL_CLASSES.index(spent.kind))
    rows = [(safe(spent.name, LONGEST_LABEL), spent.seconds) for spent in found]
    idle = profile.get("idle_s")
    rows += [("idle", idle)] if rows and idle is not None else []
    return [(name, taken, taken / whole if whole else None) for name, taken in rows]


ENGINES = {
    "matrix unit": "matrix_active_s",
    "vector unit": "vector_active_s",
    "scalar unit": "scalar_active_s",
    "special units": "special_active_s",
    "copies": "copy_active_s",
    "collectives": "comm_active_s",
}


def engine_shares(profile: Profile) -> list[tuple[str, float, float | None]]:
    """(engine, active seconds, share of the device's span) of those that are known; they run beside each other."""
    found = [(name, profile.get(metric), profile.share(metric)) for name, metric in ENGINES.items()]
    return [(name, taken, share) for name, taken, share in found if taken is not None]


def spent_table(title: str, spent: Sequence[Spent], profile: Profile, *, most: int = MOST_SPENT) -> Table:
    """Kernels or operators against their roofs, the longest first."""
    whole = profile.get("device_busy_s") or profile.get("device_span_s")
    rows = [_spent_row(each, profile.peaks, whole) for each in spent[:most]]
    note = f"{len(spent) - most:,} more are shorter." if len(spent) > most else ""
    return Table(title, SPENT_COLUMNS, rows, frozenset(SPENT_WORDS), note)


def called(profile: Profile) -> Iterator[tuple[str, tuple[Spent, ...]]]:
    """Kernels, and operators where they are not the same, as on a processor without kernels."""
    yield "kernels", profile.kernels
    if profile.operators != profile.kernels:
        yield "operators", profile.operators


def _spent_row(spent: Spent, peaks: Peaks | None, whole: float | None) -> list[str]:
    roof, lost = spent.roof_s(peaks), spent.lost_s(peaks)
    return [
        safe(spent.name),
        spent.kind,
        seconds(spent.seconds),
        about(spent.seconds / whole) if whole else UNKNOWN,
        scaled(spent.count, "count"),
        reached_words(spent, peaks),
        UNKNOWN if roof is None or not spent.seconds else about(roof / spent.seconds),
        UNKNOWN if lost is None else seconds(lost),
    ]


def reached_words(spent: Spent, peaks: Peaks | None) -> str:
    """The rate that its lower roof is about: `412 TFLOP/s` of what computes, `2,100 GB/s` of what moves."""
    if not spent.seconds:
        return UNKNOWN
    computing = (spent.flops or 0.0) / peaks.flops if peaks else 0.0
    moving = (spent.bytes or 0.0) / peaks.bandwidth if peaks and peaks.bandwidth else 0.0
    if spent.flops and (computing >= moving or not spent.bytes):
        return _rate(spent.flops / spent.seconds, ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")))
    return _rate(spent.bytes / spent.seconds, ((1e9, "GB/s"), (1e6, "MB/s"))) if spent.bytes else UNKNOWN


def _rate(per_s: float, units: Sequence[tuple[float, str]]) -> str:
    """In the first unit that it has a tenth of, so that what is alike stands in one unit."""
    scale, unit = next((pair for pair in units if abs(per_s) >= 0.1 * pair[0]), units[-1])
    return f"{digits(per_s / scale)} {unit}"


def memory_rows(profile: Profile) -> list[tuple[str, float, float | None]]:
    """(owner, bytes, share of the total), the largest first; then what nobody accounts for, and the total."""
    found: dict[str, float] = {}
    for use in profile.memory:
        found[use.owner] = found.get(use.owner, 0.0) + use.bytes
    total = profile.memory_total_bytes
    rows = sorted(found.items(), key=lambda pair: -pair[1])
    if total is not None:
        rows += [("unaccounted", total - sum(found.values()))] if found else []
        rows.append(("total", total))
    return [(owner, size, size / total if total else None) for owner, size in rows]


def memory_words_table(profile: Profile) -> Table:
    """Device memory by owner."""
    rows = [
        [owner, _size(size), UNKNOWN if share is None else about(share)] for owner, size, share in memory_rows(profile)
    ]
    return Table("device memory", MEMORY_COLUMNS, rows, frozenset({"owner"}), capacity_words(profile))


def _size(size: float) -> str:
    return f"−{scaled(-size, 'B')}" if size < 0 else scaled(size, "B")


def capacity_words(profile: Profile) -> str:
    """The total beside what the device has."""
    total, capacity = profile.memory_total_bytes, profile.memory_capacity_bytes
    if total is None or not capacity:
        return ""
    return f"{about(total / capacity)} of the device's {scaled(capacity, 'B')} is taken."


def curve(points: Sequence[tuple[float, float]], width: int = CURVE_WIDTH) -> str:
    """Bytes over time as bars from 0 to the peak: of every stretch the most."""
    finite = [(when, size) for when, size in points if isfinite(when) and isfinite(size)]
    if len(finite) < 2:
        return ""
    begin, end = finite[0][0], max(when for when, _ in finite)
    most = max(size for _, size in finite)
    if end <= begin or most <= 0:
        return ""
    heights: list[float | None] = [None] * width
    for when, size in finite:
        place = min(width - 1, max(0, int((when - begin) / (end - begin) * width)))
        heights[place] = max(size, heights[place] or 0.0)
    bars, now = "", 0.0
    for height in heights:
        # Nothing changes where nothing is told.
        now = now if height is None else height
        bars += BARS[round(max(0.0, now) / most * (len(BARS) - 1))]
    return bars


def train_words(profile: Profile) -> dict[str, float | str]:
    """The trainer's figures under names that can be printed."""
    return {safe(name, 34): _train_word(name, value) for name, value in profile.train_metrics.items()}


def _train_word(name: str, value: float | str) -> float | str:
    if isinstance(value, str):
        return safe(value, 34)
    if (isfinite(value) and abs(value) >= BEYOND_READING and name != "total_flos") or abs(value) >= MOST_FLOPS:
        return f"{value:.6g}"
    # The block cuts a runtime to hundredths; one that was read may be a hair below those that were printed.
    return value + 1e-7 if name.endswith("_runtime") else value


def system_words(profile: Profile) -> list[tuple[str, str]]:
    """Versions and the like, and the files that it was read from."""
    found = [(safe(name, 40), safe(value)) for name, value in profile.system.items()]
    return [*found, ("read from", ", ".join(safe(name) for name in profile.origin[:3]))] if profile.origin else found


# -- a page ----------------------------------------------------------------------------------------------------------


def profile_page(profile: Profile, verdicts: Sequence[Verdict], width: int) -> RenderableType:
    """All of a profile that is known, `width` columns wide."""
    parts: list[RenderableType] = [Text("\n".join(wrapped(heading_parts(profile), width, indent=2)), style="bold")]
    if limits := limits_words(verdicts):
        parts.append(as_text(textwrap.wrap(f"limited by: {limits}", width)))
    for block in _blocks(profile, verdicts, width):
        parts += ["", *block]
    return Group(*parts)


def _blocks(profile: Profile, verdicts: Sequence[Verdict], width: int) -> Iterator[list[RenderableType]]:
    if profile.values:
        yield list(_shown(value_table(profile), width, ("Meaning", "of device"), dim=True))
    if classes := class_shares(profile):
        yield [_title("busy time by class"), as_text(bar_lines(classes))]
    elif engines := engine_shares(profile):
        yield [_title("activity by engine (they run beside each other)"), as_text(bar_lines(engines))]
    for name, spent in called(profile):
        if spent:
            yield list(_shown(spent_table(name, spent, profile), width, ("class", "count", "share")))
    yield from _memory_blocks(profile, width)
    if profile.tasks:
        yield list(task_tables(profile, width))
    if profile.train_metrics:
        yield [as_text(metrics_block(train_words(profile)))]
    if told := system_words(profile):
        parts = [f"{name} {value}" for name, value in told]
        yield [_title("system"), as_text(wrapped(parts, width, indent=2))]
    if verdicts:
        yield [_title("verdicts"), as_text(verdict_lines(verdicts, width))]
    for name, lines in (("warnings", profile.warnings), ("notes", profile.notes)):
        if lines:
            items = [line for text in lines for line in _item(safe(text, 400), width)]
            yield [_title(name, "yellow" if name == "warnings" else ""), as_text(items)]


def _memory_blocks(profile: Profile, width: int) -> Iterator[list[RenderableType]]:
    if profile.memory or profile.memory_total_bytes is not None:
        yield list(_shown(memory_words_table(profile), width, ("share",)))
    if planned := memory_table([replace(row, owner=safe(row.owner, LONGEST_LABEL)) for row in profile.memory_planned]):
        yield [planned]
    if bars := curve(profile.memory_over_time, min(CURVE_WIDTH, width - 2)):
        peak = max(size for _, size in profile.memory_over_time)
        last = profile.memory_over_time[-1][0] - profile.memory_over_time[0][0]
        heading = f"memory over {seconds(last)}, peak {scaled(peak, 'B')}"
        yield [_title(heading), as_text([bars])]


def _title(text: str, style: str = "") -> Text:
    return Text(text, style=f"bold {style}".strip())


def _shown(table: Table, width: int, giving_way: Sequence[str], *, dim: bool = False) -> Iterator[RenderableType]:
    if table.title:
        yield _title(table.title)
    kept, rows = _fitted(table, width, giving_way)
    text = text_table(table.columns, rows, table.words, shown=kept)
    if dim:
        text.highlight_words(SOURCES, "dim")
    yield text
    if table.note:
        lines = [line for part in table.note.splitlines() for line in textwrap.wrap(part, width)]
        yield Text("\n".join(lines), style="dim")


def _fitted(table: Table, width: int, giving_way: Sequence[str]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Columns that there is room for, and the rows with the one that may be cut as wide as the others leave it."""
    place = next((number for number, column in enumerate(table.columns) if column in FLEXIBLE), None)
    if place is None:
        return fitting_columns(table.columns, table.rows, width, giving_way), table.rows
    flexible = table.columns[place]

    def cut(room: int) -> list[list[str]]:
        short = shortened if flexible == "profile" else safe
        return [
            [short(cell, room) if number == place else cell for number, cell in enumerate(row)] for row in table.rows
        ]

    kept = fitting_columns(table.columns, cut(FLEXIBLE[flexible]), width, giving_way)
    beside = sum(
        GAP + max(cell_len(row[number]) for row in (table.columns, *table.rows))
        for number, column in enumerate(table.columns)
        if column in kept and number != place
    )
    return kept, cut(max(FLEXIBLE[flexible], width - beside))


def bar_lines(rows: Sequence[tuple[str, float, float | None]]) -> list[str]:
    """Name, time, share and a bar as long as the share."""
    cells = [[name, seconds(taken), UNKNOWN if share is None else about(share)] for name, taken, share in rows]
    widths = [max(len(row[place]) for row in cells) for place in range(3)]
    lines = []
    for (name, time, told), (_, _, share) in zip(cells, rows, strict=True):
        known = share is not None and isfinite(share)
        bar = BAR * round(BAR_WIDTH * min(1.0, max(0.0, share or 0.0))) if known else ""
        lines.append(f"{name.ljust(widths[0])}  {time.rjust(widths[1])}  {told.rjust(widths[2])}  {bar}".rstrip())
    return lines


def verdict_lines(verdicts: Sequence[Verdict], width: int) -> list[str]:
    """Each verdict with its evidence and advice, in lines of at most `width`."""
    lines = []
    for number, verdict in enumerate(verdicts, 1):
        at_stake = f", up to {stake_words(verdict)} of the time" if verdict.share is not None else ""
        lines.append(f"{number}. {title(verdict)}{at_stake}")
        for words in (evidence_words(verdict), f"→ {safe(verdict.advice, 400)}"):
            lines += textwrap.wrap(words, width, initial_indent="   ", subsequent_indent="     ")
    return lines


def _item(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="- ", subsequent_indent="  ") or ["-"]


# -- several ---------------------------------------------------------------------------------------------------------


def profiles_table(judged: Sequence[Judged], width: int) -> RenderableType:
    """A row for each profile: its size, its times, what limits it."""
    table = Table("", TABLE_COLUMNS, summary_rows(judged), frozenset(TABLE_WORDS))
    parts = list(_shown(table, width, TABLE_GIVING_WAY))
    if warned := [each for each, _ in judged if each.warnings]:
        told = [line for each in warned for line in _item(f"{name_words(each)}: {warning_words(each.warnings)}", width)]
        parts += ["", _title("warnings", "yellow"), as_text(told)]
    return Group(*parts)


def summary_rows(judged: Sequence[Judged], longest: int = 60) -> list[list[str]]:
    """Rows of words under `TABLE_COLUMNS`."""
    return [_summary(profile, verdicts, longest) for profile, verdicts in judged]


def _summary(profile: Profile, verdicts: Sequence[Verdict], longest: int) -> list[str]:
    def words(name: str) -> str:
        value = profile.values.get(name)
        return UNKNOWN if value is None else value_words(name, value)

    tokens, samples = profile.get("tokens_per_s"), profile.get("samples_per_s")
    rate = f"{digits(tokens)} tok/s" if tokens is not None else UNKNOWN
    if tokens is None and samples is not None:
        rate = f"{digits(samples)} samples/s"
    return [
        safe(name_words(profile), longest),
        UNKNOWN if profile.batch_sequences is None else f"{profile.batch_sequences:,}",
        UNKNOWN if profile.sequence_tokens is None else f"{profile.sequence_tokens:,}",
        words("step_wall_s"),
        words("device_span_s"),
        rate,
        words("mfu"),
        words("mbu"),
        UNKNOWN if profile.memory_total_bytes is None else scaled(profile.memory_total_bytes, "B"),
        limits_words(verdicts, 1) or UNKNOWN,
    ]
