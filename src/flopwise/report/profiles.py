"""Profiles as documents: figures by group, time by class and kernel, memory, verdicts; several with a row each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import msgspec

from flopwise.profile.explain.comparing import column_names, shares_of, train_unit
from flopwise.profile.explain.verdicts import LIMITS
from flopwise.records.profile import KERNEL_CLASSES, METRIC, METRICS, Peaks, Profile, Spent, ValueSource, Verdict
from flopwise.report.document import Block, Document, Figure, Heading, Items, Table, Words
from flopwise.report.profile_timeline import durations, task_tables
from flopwise.report.profile_words import (
    evidence_words,
    name_words,
    stake_words,
    title,
    value_words,
    warning_words,
)
from flopwise.report.tables import Styled
from flopwise.report.training import memory_table, metric_words, metrics_block
from flopwise.report.words import (
    BEYOND_READING,
    UNKNOWN,
    about,
    count_nouns,
    count_words,
    digits,
    percent,
    printable,
    safe,
    scale_figure,
    seconds,
)

Judged = tuple[Profile, Sequence[Verdict]]
"""A profile and what limits it."""

MOST_SPENT, MOST_SPENT_IN_FILES = 10, 30
"""Kernels, or operators, that are listed; JSON has them all."""
LONGEST_LABEL = 24
"""Signs of a name before bars or sizes."""
MOST_FLOPS = 1e30
"""Of a training; no figure beyond it is one."""
BAR, BAR_WIDTH = "█", 30
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60


def profiles_document(judged: Sequence[Judged]) -> Document:
    """One profile whole, of several a row each; in markdown all of them whole."""
    one = judged[0] if len(judged) == 1 else None
    blocks = _blocks(*one) if one else _summaries(judged)
    return Document(
        blocks=blocks,
        tables=(_capital(block) for each in judged for block in whole_tables(*each)),
        rows=_rows(judged),
        fields=FIELDS,
        told={
            "csv": warn_of_parts([profile for profile, _ in judged]),
            "table": [] if one else ["note: --section NAME shows one of them whole"],
        },
    )


def _capital(block: Block) -> Block:
    """Headings of a file begin with a capital letter."""
    return block if isinstance(block, Heading) else replace(block, title=block.title[:1].upper() + block.title[1:])


def profiles_record(judged: Sequence[Judged]) -> object:
    """The whole records, each with its `verdicts`; `store.runs.from_text` leaves those aside."""
    records: list[dict[str, Any]] = [
        msgspec.to_builtins(profile) | {"verdicts": msgspec.to_builtins(tuple(verdicts))}
        for profile, verdicts in judged
    ]
    return records[0] if len(records) == 1 else records


def warn_of_parts(profiles: Sequence[Profile]) -> list[str]:
    """Talk beside a form that has no room for it: which figures are those of a part."""
    return [
        f"warning: {name_words(profile)}: {warning_words(profile.warnings)}" for profile in profiles if profile.warnings
    ]


# -- one profile -----------------------------------------------------------------------------------------------------


def _blocks(profile: Profile, verdicts: Sequence[Verdict]) -> Iterator[Block]:
    yield Heading(" · ".join(heading_parts(profile)))
    if limits := limits_words(verdicts):
        yield Words(f"limited by: {limits}")
    if profile.values:
        yield value_table(profile)
    if classes := class_shares(profile):
        yield _bars("busy time by class", classes)
    elif engines := engine_shares(profile):
        yield _bars("activity by engine (they run beside each other)", engines)
    yield from _time_tables(profile, MOST_SPENT)
    yield from _memory_blocks(profile)
    if profile.tasks:
        tables = task_tables(profile)
        yield from tables
        if not tables:
            yield Words("tasks: none is both predicted and measured")
    if profile.train_metrics:
        yield Figure(metrics_block(train_words(profile)))
    if told := system_words(profile):
        yield Words(" · ".join(f"{name} {value}" for name, value in told), indent=2, title="system")
    if verdicts:
        yield Items("verdicts", [_verdict_words(number, verdict) for number, verdict in enumerate(verdicts, 1)])
    yield from _list_remarks(profile)


def whole_tables(profile: Profile, verdicts: Sequence[Verdict]) -> Iterator[Block]:
    """All tables that a profile has, for markdown and for a page."""
    name, *rest = heading_parts(profile)
    yield Heading(name)
    yield Words(" · ".join(rest))
    if limits := limits_words(verdicts):
        yield Words(f"Limited by: {limits}.")
    yield from detail_tables(profile)
    if verdicts:
        rows = [[title(each), stake_words(each), evidence_words(each), safe(each.advice, 400)] for each in verdicts]
        columns = ("verdict", "at stake", "evidence", "advice")
        yield Table(title="verdicts", columns=columns, rows=rows, left={"verdict", "evidence", "advice"})
    yield from _list_remarks(profile)


def detail_tables(profile: Profile) -> Iterator[Table]:
    """Figures, time, memory, tasks and system, whatever is known of them."""
    if profile.values:
        yield replace(value_table(profile), title="figures")
    for heading, shares in (
        ("busy time by class", class_shares(profile)),
        ("activity by engine", engine_shares(profile)),
    ):
        if shares:
            rows = [[name, seconds(taken), about(share)] for name, taken, share in shares]
            yield Table(title=heading, columns=("name", "time", "share"), rows=rows, left={"name"})
    yield from _time_tables(profile, MOST_SPENT_IN_FILES)
    yield from _memory_tables(profile)
    yield from task_tables(profile)
    if profile.train_metrics:
        rows = [[name, metric_words(name, value)] for name, value in sorted(train_words(profile).items())]
        yield Table(title="train metrics", columns=("name", "result"), rows=rows, left={"name"})
    if told := system_words(profile):
        yield Table(title="system", columns=("what", "value"), rows=told, left={"what", "value"})


def _list_remarks(profile: Profile) -> Iterator[Items]:
    for name, lines, style in (("warnings", profile.warnings, "yellow"), ("notes", profile.notes, "")):
        if lines:
            yield Items(name, [safe(line, 400) for line in lines], style)


def _verdict_words(number: int, verdict: Verdict) -> str:
    at_stake = f", up to {stake_words(verdict)} of the time" if verdict.share is not None else ""
    return f"{number}. {title(verdict)}{at_stake}\n{evidence_words(verdict)}\n→ {safe(verdict.advice, 400)}"


def heading_parts(profile: Profile) -> list[str]:
    """Name, device, format, steps, batch, sequence: what is known of them."""
    parts = [name_words(profile)]
    parts += [safe(profile.device)] if profile.device else []
    parts.append(profile.format)
    if profile.rank is not None or (profile.world or 1) > 1:
        rank = "" if profile.rank is None else f"rank {profile.rank:,}"
        world = "" if profile.world is None else f"{'of ' if rank else ''}{profile.world:,} devices"
        parts.append(f"{rank} {world}".strip())
    if profile.steps is not None:
        parts.append(count_nouns(profile.steps, "step"))
    for noun, count in (("batch", profile.batch_sequences), ("sequence", profile.sequence_tokens)):
        parts += [f"{noun} {count:,}"] if count is not None else []
    return [*parts, safe(profile.precision, 20)] if profile.precision else parts


def limits_words(verdicts: Sequence[Verdict], most: int = 3) -> str:
    """The first limits with what is at stake: `host-bound 57 %, spills 25 %`."""
    told = [verdict for verdict in verdicts if verdict.kind != "invalid"][:most]
    beside = {verdict.kind: "" if verdict.share is None else f" {about(verdict.share)}" for verdict in told}
    return ", ".join(f"{LIMITS[verdict.kind].title}{beside[verdict.kind]}" for verdict in told)


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
                "" if value.source == usual else Styled(value.source, "dim"),
                metric.meaning,
            ]
        )
        group = metric.group
    note = f"Figures with no source beside them are {'as the file says' if usual == 'ingested' else 'measured'}."
    note = "\n".join(words for words in (note, peaks_words(profile.peaks)) if words)
    return Table(
        columns=("Group", "Name", "Value", "of device", "Source", "Meaning"),
        rows=rows,
        left={"Group", "Name", "Source", "Meaning"},
        note=note if rows else "",
        giving_way=("Meaning", "of device"),
        cut={"Meaning": 40},
    )


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


def _bars(heading: str, shares: Sequence[tuple[str, float, float | None]]) -> Table:
    """Name, time, share and a bar as long as the share."""
    rows = []
    for name, taken, share in shares:
        known = share is not None and isfinite(share)
        bar = BAR * round(BAR_WIDTH * min(1.0, max(0.0, share or 0.0))) if known else ""
        rows.append([name, seconds(taken), about(share), bar])
    return Table(title=heading, columns=("name", "time", "share", ""), rows=rows, left={"name", ""}, headed=False)


def _time_tables(profile: Profile, most: int) -> Iterator[Table]:
    """Kernels against their roofs, the longest first; operators where they are not the same, as on a processor."""
    whole = profile.get("device_busy_s") or profile.get("device_span_s")
    apart = profile.operators if profile.operators != profile.kernels else ()
    for heading, spent in (("kernels", profile.kernels), ("operators", apart)):
        if spent:
            yield Table(
                title=heading,
                columns=("name", "class", "time", "share", "count", "reached", "of roof", "lost"),
                rows=[_time_row(each, profile.peaks, whole) for each in spent[:most]],
                left={"name", "class"},
                note=f"{len(spent) - most:,} more are shorter." if len(spent) > most else "",
                giving_way=("class", "count", "share"),
                cut={"name": 26},
            )


def _time_row(spent: Spent, peaks: Peaks | None, whole: float | None) -> list[str]:
    roof, lost = spent.roof_s(peaks), spent.lost_s(peaks)
    return [
        safe(spent.name),
        spent.kind,
        seconds(spent.seconds),
        about(spent.seconds / whole) if whole else UNKNOWN,
        scale_figure(spent.count, "count"),
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


def _memory_blocks(profile: Profile) -> Iterator[Block]:
    if profile.memory or profile.memory_total_bytes is not None:
        yield _owner_table(profile)
    if planned := memory_table([replace(row, owner=safe(row.owner, LONGEST_LABEL)) for row in profile.memory_planned]):
        yield planned
    if bars := curve(profile.memory_over_time):
        peak = max(size for _, size in profile.memory_over_time)
        last = profile.memory_over_time[-1][0] - profile.memory_over_time[0][0]
        yield Figure([bars], title=f"memory over {seconds(last)}, peak {scale_figure(peak, 'B')}")


def _memory_tables(profile: Profile) -> Iterator[Table]:
    if profile.memory or profile.memory_total_bytes is not None:
        yield _owner_table(profile)
    if any(use.name for use in profile.memory):
        rows = [[use.owner, safe(use.name), scale_figure(use.bytes, "B")] for use in profile.memory]
        heading = "device memory as the tool names it"
        yield Table(title=heading, columns=("owner", "name", "size"), rows=rows, left={"owner", "name"})
    if profile.memory_planned:
        rows = [
            [row.place, safe(row.owner), scale_figure(row.planned_bytes, "B"), scale_figure(row.measured_bytes, "B")]
            for row in profile.memory_planned
        ]
        columns = ("what", "owner", "planned", "measured")
        yield Table(title="memory as planned and as it was", columns=columns, rows=rows, left={"what", "owner"})


def _owner_table(profile: Profile) -> Table:
    """Device memory by owner; its note holds the total beside what the device has."""
    total, capacity = profile.memory_total_bytes, profile.memory_capacity_bytes
    taken = ""
    if total is not None and capacity:
        taken = f"{about(total / capacity)} of the device's {scale_figure(capacity, 'B')} is taken."
    return Table(
        title="device memory",
        columns=("owner", "size", "share"),
        rows=[
            [owner, f"−{scale_figure(-size, 'B')}" if size < 0 else scale_figure(size, "B"), about(share)]
            for owner, size, share in memory_rows(profile)
        ],
        left={"owner"},
        note=taken,
    )


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


# -- several, a row each ---------------------------------------------------------------------------------------------


def _summaries(judged: Sequence[Judged]) -> Iterator[Block]:
    yield summary_table(judged)
    if some := [each for each, _ in judged if each.warnings]:
        yield Items("warnings", [f"{name_words(each)}: {warning_words(each.warnings)}" for each in some], "yellow")


def summary_table(judged: Sequence[Judged]) -> Table:
    """A row for each profile: its size, its times, what limits it."""
    return Table(
        columns=("profile", "batch", "seq", "step", "device", "rate", "MFU", "MBU", "memory", "limited by"),
        rows=[_summary(profile, verdicts) for profile, verdicts in judged],
        left={"profile", "limited by"},
        giving_way=("MBU", "memory", "rate", "seq", "batch"),
        cut={"profile": 18},
        cut_within=True,
    )


def _summary(profile: Profile, verdicts: Sequence[Verdict]) -> list[str]:
    def words(name: str) -> str:
        value = profile.values.get(name)
        return UNKNOWN if value is None else value_words(name, value)

    tokens, samples = profile.get("tokens_per_s"), profile.get("samples_per_s")
    rate = f"{digits(tokens)} tok/s" if tokens is not None else UNKNOWN
    if tokens is None and samples is not None:
        rate = f"{digits(samples)} samples/s"
    return [
        name_words(profile),
        count_words(profile.batch_sequences),
        count_words(profile.sequence_tokens),
        words("step_wall_s"),
        words("device_span_s"),
        rate,
        words("mfu"),
        words("mbu"),
        UNKNOWN if profile.memory_total_bytes is None else scale_figure(profile.memory_total_bytes, "B"),
        limits_words(verdicts, 1) or UNKNOWN,
    ]


# -- rows for CSV ----------------------------------------------------------------------------------------------------

FIELDS = ("profile", "group", "name", "value", "unit", "source")


def _rows(judged: Sequence[Judged]) -> Iterator[Mapping[str, object]]:
    """One row for each figure of each profile, at full precision; an empty source: it follows from other figures."""
    names = column_names([profile for profile, _ in judged])
    for name, (profile, verdicts) in zip(names, judged, strict=True):
        for row in _csv_rows(profile, verdicts):
            yield dict(zip(FIELDS, (printable(name), *row), strict=True))


CsvRow = tuple[str, str, float | str, str, str]


def _csv_rows(profile: Profile, verdicts: Sequence[Verdict]) -> Iterator[CsvRow]:
    yield from _setting_rows(profile)
    for metric in METRICS:
        if value := profile.values.get(metric.name):
            yield metric.group, metric.name, value.value, metric.unit, value.source
    for name, share in shares_of(profile):
        yield "shares", name, share, "share", ""
    for group, spent in (("classes", profile.classes), ("kernels", profile.kernels), ("operators", profile.operators)):
        for each in spent:
            yield from _time_rows(group, each)
    for use in profile.memory:
        label = f"{use.owner}: {printable(use.name)}" if use.name else use.owner
        yield "memory", label, use.bytes, "B", ""
    for name, size in (("total", profile.memory_total_bytes), ("capacity", profile.memory_capacity_bytes)):
        if size is not None:
            yield "memory", name, size, "B", ""
    yield from _rest_of_csv(profile, verdicts)


def _setting_rows(profile: Profile) -> Iterator[CsvRow]:
    """What was run, and the peaks that shares were divided by."""
    names = ("device", "format", "rank", "world", "steps", "batch_sequences", "sequence_tokens", "precision")
    for name in names:
        if (setting := getattr(profile, name)) is not None:
            yield "setting", name, printable(setting) if isinstance(setting, str) else setting, "", ""
    if profile.peaks:
        yield "peaks", "flops_per_s", profile.peaks.flops, "FLOP/s", printable(profile.peaks.source)
        if profile.peaks.bandwidth is not None:
            yield "peaks", "bandwidth", profile.peaks.bandwidth, "B/s", printable(profile.peaks.source)


def _time_rows(group: str, spent: Spent) -> Iterator[CsvRow]:
    name = printable(spent.name)
    yield group, name, spent.seconds, "s", ""
    yield group, name, spent.count, "count", ""
    if spent.flops is not None:
        yield group, name, spent.flops, "FLOP", ""
    if spent.bytes is not None:
        yield group, name, spent.bytes, "B", ""


def _rest_of_csv(profile: Profile, verdicts: Sequence[Verdict]) -> Iterator[CsvRow]:
    for row in profile.memory_planned:
        for kind, size in (("planned", row.planned_bytes), ("measured", row.measured_bytes)):
            yield "memory_planned", f"{row.place}: {printable(row.owner)}: {kind}", size, "B", kind
    for task in profile.tasks:
        both = durations(task)
        for kind, taken in (("modelled", both.predicted_s), ("measured", both.measured_s)):
            if taken is not None:
                yield "tasks", f"{printable(task.stream)}: {printable(task.name)}", taken, "s", kind
    for metric_name, value in profile.train_metrics.items():
        unit = "" if isinstance(value, str) else train_unit(metric_name)
        yield "train_metrics", printable(metric_name), printable(value) if isinstance(value, str) else value, unit, ""
    for name, words in profile.system.items():
        yield "system", printable(name), printable(words), "", ""
    for verdict in verdicts:
        at_stake = "" if verdict.share is None else verdict.share
        yield "verdicts", title(verdict), at_stake, "share", ""
    for number, warning in enumerate(profile.warnings, 1):
        yield "warnings", str(number), printable(warning), "", ""
