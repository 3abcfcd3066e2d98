"""Profiles as files: markdown in the layout of the page, CSV with one row a figure, JSON with the whole records."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from flopwise.base.files import with_schema
from flopwise.profile.explain.comparing import column_names, shares_of, train_unit
from flopwise.records.profile import METRICS, Profile, Spent, Verdict
from flopwise.report.profile_timeline import SUM_COLUMNS, TASK_COLUMNS, durations, furthest, sum_rows, task_rows
from flopwise.report.profile_words import UNKNOWN, about, evidence_words, safe, scaled, seconds, stake_words, title
from flopwise.report.profiles import (
    Judged,
    Table,
    called,
    capacity_words,
    class_shares,
    engine_shares,
    heading_parts,
    limits_words,
    memory_rows,
    spent_table,
    system_words,
    train_words,
    value_table,
)
from flopwise.report.tables import csv_text, markdown_cell, markdown_table
from flopwise.report.training import metric_words, printable
from flopwise.store.runs import to_text

MOST_SPENT = 30
"""Kernels, or operators, that a file lists; JSON has them all."""

# -- markdown --------------------------------------------------------------------------------------------------------


def markdown_words(text: str, longest: int = 400) -> str:
    """A name within markdown, cut where it is beyond reading; at the beginning of a line it is no heading or list."""
    return re.sub(r"^([#+-])(?=\s)", r"\\\1", markdown_cell(safe(text, longest)))


def profiles_markdown(judged: Sequence[Judged]) -> str:
    """Profiles one after the other, each with its tables."""
    return "\n".join("\n".join(_markdown(profile, verdicts)) for profile, verdicts in judged)


def _markdown(profile: Profile, verdicts: Sequence[Verdict]) -> Iterator[str]:
    name, *rest = [markdown_words(part) for part in heading_parts(profile)]
    yield f"# {name}\n\n{' · '.join(rest)}\n"
    if limits := limits_words(verdicts):
        yield f"Limited by: {limits}.\n"
    for table in page_tables(profile, verdicts):
        heading = f"## {table.title}\n\n" if table.title else ""
        note = f"\n{markdown_words(table.note, 4000)}\n" if table.note else ""
        yield f"{heading}{markdown_table(table.columns, table.rows, table.words)}{note}"
    for heading, lines in (("Warnings", profile.warnings), ("Notes", profile.notes)):
        if lines:
            yield f"## {heading}\n\n" + "".join(f"- {markdown_words(line)}\n" for line in lines)


def page_tables(profile: Profile, verdicts: Sequence[Verdict]) -> Iterator[Table]:
    """All tables that a profile has, in the order of the page."""
    left = frozenset({"name", "owner", "of", "task", "stream", "verdict", "evidence", "advice", "what", "value"})
    if profile.values:
        values = value_table(profile)
        yield Table("Figures", values.columns, values.rows, values.words, values.note)
    for heading, shares in (
        ("Busy time by class", class_shares(profile)),
        ("Activity by engine", engine_shares(profile)),
    ):
        if shares:
            rows = [[name, seconds(taken), UNKNOWN if share is None else about(share)] for name, taken, share in shares]
            yield Table(heading, ("name", "time", "share"), rows, left)
    for heading, spent in called(profile):
        if spent:
            yield spent_table(heading.capitalize(), spent, profile, most=MOST_SPENT)
    yield from _memory_tables(profile, left)
    if profile.tasks and (sums := sum_rows(profile)):
        yield Table("Tasks, predicted and measured", SUM_COLUMNS, sums, left)
        yield Table("Tasks that differ most", TASK_COLUMNS, task_rows(furthest(profile.tasks)), left)
    if profile.train_metrics:
        rows = [[name, metric_words(name, value)] for name, value in sorted(train_words(profile).items())]
        yield Table("Train metrics", ("name", "result"), rows, left)
    if told := system_words(profile):
        rows = [[name, value] for name, value in told]
        yield Table("System", ("what", "value"), rows, left)
    if verdicts:
        rows = [[title(each), stake_words(each), evidence_words(each), safe(each.advice, 400)] for each in verdicts]
        yield Table("Verdicts", ("verdict", "at stake", "evidence", "advice"), rows, left)


def _memory_tables(profile: Profile, left: frozenset[str]) -> Iterator[Table]:
    rows = [
        [owner, scaled(size, "B"), UNKNOWN if share is None else about(share)]
        for owner, size, share in memory_rows(profile)
    ]
    if rows:
        yield Table("Device memory", ("owner", "size", "share"), rows, left, capacity_words(profile))
    if any(use.name for use in profile.memory):
        rows = [[use.owner, safe(use.name), scaled(use.bytes, "B")] for use in profile.memory]
        yield Table("Device memory as the tool names it", ("owner", "name", "size"), rows, left)
    if profile.memory_planned:
        rows = [
            [row.place, safe(row.owner), scaled(row.planned_bytes, "B"), scaled(row.measured_bytes, "B")]
            for row in profile.memory_planned
        ]
        columns = ("what", "owner", "planned", "measured")
        yield Table("Memory as planned and as it was", columns, rows, left)


# -- CSV -------------------------------------------------------------------------------------------------------------

CSV_FIELDS = ("profile", "group", "name", "value", "unit", "source")


def profiles_csv(judged: Sequence[Judged]) -> str:
    """One row for each figure of each profile, at full precision; an empty source: it follows from other figures."""
    names = column_names([profile for profile, _ in judged])
    records = [
        dict(zip(CSV_FIELDS, (printable(name), *row), strict=True))
        for name, (profile, verdicts) in zip(names, judged, strict=True)
        for row in _csv_rows(profile, verdicts)
    ]
    return csv_text(records) if records else f"{','.join(CSV_FIELDS)}\n"


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
            yield from _spent_rows(group, each)
    for use in profile.memory:
        label = f"{use.owner}: {printable(use.name)}" if use.name else use.owner
        yield "memory", label, use.bytes, "B", ""
    for name, size in (("total", profile.memory_total_bytes), ("capacity", profile.memory_capacity_bytes)):
        if size is not None:
            yield "memory", name, size, "B", ""
    yield from _rest_of_csv(profile, verdicts)


def _setting_rows(profile: Profile) -> Iterator[CsvRow]:
    """What was run, and the peaks that shares were divided by."""
    settings = {
        "device": profile.device,
        "format": profile.format,
        "rank": profile.rank,
        "world": profile.world,
        "steps": profile.steps,
        "batch_sequences": profile.batch_sequences,
        "sequence_tokens": profile.sequence_tokens,
        "precision": profile.precision,
    }
    for name, setting in settings.items():
        if setting is not None:
            yield "setting", name, printable(setting) if isinstance(setting, str) else setting, "", ""
    if profile.peaks:
        yield "peaks", "flops_per_s", profile.peaks.flops, "FLOP/s", printable(profile.peaks.source)
        if profile.peaks.bandwidth is not None:
            yield "peaks", "bandwidth", profile.peaks.bandwidth, "B/s", printable(profile.peaks.source)


def _spent_rows(group: str, spent: Spent) -> Iterator[CsvRow]:
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


# -- JSON ------------------------------------------------------------------------------------------------------------


def profiles_json(judged: Sequence[Judged]) -> str:
    """The whole records, each with its `verdicts`: an object of one profile, `rows` of several.

    `core.store.from_text` decodes an object as a `Profile`, which leaves the verdicts aside.
    """
    records: list[dict[str, Any]] = [
        msgspec.to_builtins(profile) | {"verdicts": msgspec.to_builtins(tuple(verdicts))}
        for profile, verdicts in judged
    ]
    return to_text(with_schema(records[0] if len(records) == 1 else records, "profile"))
