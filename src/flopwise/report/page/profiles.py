"""Profiles on the page: a row and details made from each, and the comparison of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from flopwise.profile.explain.comparing import ProfileComparison, column_names
from flopwise.records.profile import METRIC, Profile, Verdict
from flopwise.report.document import Table
from flopwise.report.page.data import (
    FittedLine,
    MemoryBar,
    PageData,
    RunDetail,
    cap_of,
    memory_bar,
    now,
    planned_bars,
    roofs_of,
    with_profile,
)
from flopwise.report.profile_comparison import (
    fit_words,
    join_changes,
    length_table,
    same_words,
    sentences,
    warn_of_parts,
)
from flopwise.report.profile_words import name_words, value_words
from flopwise.report.profiles import Judged, detail_tables, heading_parts, memory_rows, summary_table
from flopwise.report.words import safe, scale_figure, seconds
from flopwise.store.results import Result


def profiles_page(judged: Sequence[Judged], comparison: ProfileComparison | None = None) -> PageData:
    """One page for profiles, the comparison first where there is one."""
    profiles = [profile for profile, _ in judged]
    names = [safe(name) for name in column_names(profiles)]
    details = {name: _detail(name, *each) for name, each in zip(names, judged, strict=True)}
    return PageData(
        title=name_words(profiles[0]) if len(profiles) == 1 else f"{len(profiles)} profiles",
        created=now(),
        rows=[_row(name, profile) for name, profile in zip(names, profiles, strict=True)],
        details=details,
        of_profiles=True,
        said=(*sentences(comparison), same_words(comparison), *warn_of_parts(comparison)) if comparison else (),
        tables=_tables(judged, comparison) if comparison else (),
        lines=_lines(profiles, comparison) if comparison else (),
    )


def _lines(profiles: Sequence[Profile], comparison: ProfileComparison) -> tuple[FittedLine, ...]:
    """Each fitted line with all profiles of its length, those that it leaves out too."""
    named = list(zip(comparison.names, profiles, strict=True))
    found = []
    for fit in comparison.fits:
        alike = [(name, one) for name, one in named if one.sequence_tokens == fit.sequence_tokens]
        points = [
            (one.batch_sequences, span, safe(name, 60))
            for name, one in alike
            if one.batch_sequences is not None and (span := one.get("device_span_s")) is not None and isfinite(span)
        ]
        found.append(
            FittedLine(
                words=fit_words(fit),
                fixed_s=fit.fixed_s,
                per_sequence_s=fit.per_sequence_s,
                least_batch=fit.least_batch,
                points=tuple(points),
            )
        )
    return tuple(found)


def _row(name: str, profile: Profile) -> Result:
    """What the page's table says of a profile."""
    tokens, batch = profile.get("tokens_per_s"), profile.batch_sequences
    sequence, total = profile.sequence_tokens, profile.memory_total_bytes
    return Result(
        cell=None,
        run=name,
        state="ok",
        model=name,
        hardware=safe(profile.device) if profile.device else None,
        devices=profile.world,
        sequence_tokens=sequence,
        batch_sequences=batch,
        batch_tokens=batch * sequence if batch and sequence else None,
        precision=safe(profile.precision, 20) if profile.precision else None,
        steps=profile.steps,
        step_s=profile.get("step_wall_s"),
        tokens_per_s=tokens,
        samples_per_s=profile.get("samples_per_s"),
        mfu=profile.get("mfu"),
        hfu=profile.get("hfu"),
        device_bytes=int(total) if total is not None and isfinite(total) else None,
        power_w=profile.get("power_w"),
    )


def _detail(name: str, profile: Profile, verdicts: Sequence[Verdict]) -> RunDetail:
    cap = cap_of(profile)
    known = RunDetail(
        run=name,
        model=name,
        state="ok",
        memory=planned_bars(profile.memory_planned, {"device": cap, "host": None}) or _memory(profile, cap),
        roofs=roofs_of(profile),
    )
    points = [(when, size) for when, size in profile.memory_over_time if isfinite(when) and isfinite(size)]
    most = max((size for _, size in points), default=0.0)
    drawn = len(points) > 1 and most > 0 and points[-1][0] > points[0][0]
    last = points[-1][0] - points[0][0] if drawn else 0.0
    found = with_profile(known, profile, verdicts)
    return replace(
        found,
        traffic=(*_main_figures(profile), *found.traffic),
        tables=(_what(profile), *map(plain_table, detail_tables(profile))),
        memory_over_time=tuple(points) if drawn else (),
        memory_words=f"Over {seconds(last)}: the peak is {scale_figure(most, 'B')}." if drawn else "",
    )


MAIN_FIGURES = {
    "step_wall_s": "step",
    "device_span_s": "device",
    "tokens_per_s": "tokens",
    "samples_per_s": "samples",
    "mfu": "MFU",
    "mbu": "bandwidth used",
    "power_w": "power",
}


def _main_figures(profile: Profile) -> list[tuple[str, str, str]]:
    return [
        (words, value_words(name, profile.values[name]), METRIC[name].meaning)
        for name, words in MAIN_FIGURES.items()
        if name in profile.values
    ]


def _what(profile: Profile) -> Table:
    name, *rest = heading_parts(profile)
    columns = ("profile", "what was run")
    return Table(columns=columns, rows=[[name, " · ".join(rest)]], left=columns)


def plain_table(table: Table) -> Table:
    """Without styles, which JSON has none of."""
    rows = [[str(cell) for cell in row] for row in table.rows]
    return replace(table, title=table.title[:1].upper() + table.title[1:], rows=rows)


def _memory(profile: Profile, cap: int | None) -> tuple[MemoryBar, ...]:
    """As measured alone: only our own runs were planned."""
    rows = [(owner, int(size)) for owner, size, _ in memory_rows(profile) if owner != "total" and isfinite(size)]
    total = profile.memory_total_bytes
    if not rows or total is None or not isfinite(total):
        return ()
    # The rows add up to the total.
    return (memory_bar("device", [owner for owner, _ in rows], None, [size for _, size in rows], cap),)


def _tables(judged: Sequence[Judged], comparison: ProfileComparison) -> tuple[Table, ...]:
    lengths = [replace(length_table(comparison), title="What does a shorter sequence buy?")]
    base = safe(comparison.names[comparison.baseline])
    return (
        replace(summary_table(judged), title="What was profiled?"),
        replace(join_changes(comparison), title=f"Changes relative to {base}"),
        *(lengths if comparison.lengths else []),
    )
