"""Predictions against a published table, for people and for programs: a page of text, markdown, CSV, JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from flopwise.base.units import show_seconds, show_share
from flopwise.references.validate.validation import ValidatedRow, Validation, errors_by_size
from flopwise.report.document import Block, Document, Table, facts
from flopwise.report.tables import Styled
from flopwise.report.words import UNKNOWN

WORST_ROWS = 10
NARROWEST_LABEL = 12
SMALLEST_SHARE = 1e-4
"""Below it an error is rounding, and its power of ten says more than 0.0 %."""
LARGEST_SHARE = 1e4

SIGNS = {True: "✓", False: "✗"}


def validation_document(validation: Validation, *, every_row: bool = False) -> Document:
    """The figures, the errors by size, and the rows farthest off, or all of them; files have every row."""
    shown = validation.rows if every_row else worst_rows(validation)
    title = f"all {len(shown):,} rows" if every_row else f"the {len(shown)} farthest off"
    figures, sizes = _figures(validation), _sizes(validation)
    values = [(name, str(words)) for name, words in figures]
    summary = Table(columns=("figure", "value"), rows=values, left={"figure", "value"})
    return Document(
        blocks=[facts(figures), *sizes, *([_row_table(shown, title)] if shown else []), *_skipped(validation)],
        tables=[summary, *sizes, _row_table(validation.rows, "", whole=True)],
        rows=map(asdict, validation.rows),
    )


def validation_record(validation: Validation) -> dict[str, object]:
    """One object: the figures as shares, the protocol, every row."""
    record: dict[str, object] = {
        "table": validation.table,
        "n": validation.n,
        "median_error": validation.median_error,
        "mean_error": validation.mean_error,
        "p90_error": validation.p90_error,
        "max_error": validation.max_error,
        "rank_correlation": validation.rank_correlation,
    }
    if validation.oom_accuracy is not None:
        record["oom_accuracy"] = validation.oom_accuracy
    return {
        **record,
        "inside": validation.inside,
        "inside_without": validation.inside_without,
        "peers": validation.peers,
        "anchored": validation.anchored,
        "protocol": validation.protocol,
        "rows": validation.rows,
        "skipped": validation.skipped,
    }


def worst_rows(validation: Validation, limit: int = WORST_ROWS) -> tuple[ValidatedRow, ...]:
    """The rows with the largest errors, the largest first."""
    off = [row for row in validation.rows if row.error is not None and row.counted]
    return tuple(sorted(off, key=lambda row: -(row.error or 0.0))[:limit])


def _figures(validation: Validation) -> list[tuple[str, str]]:
    """The summary as names and words."""
    held_out = sum(row.held_out for row in validation.rows if row.error is not None and row.counted)
    rows = f"{validation.n:,} of {len(validation.rows):,} rows compared, {held_out:,} of them held out"
    if validation.unpredicted:
        rows += f"; {validation.unpredicted:,} measured without a prediction"
    if validation.skipped:
        rows += f"; {len(validation.skipped):,} skipped"
    figures = [("table", validation.table), ("rows", rows)]
    if validation.n:
        errors = (validation.median_error, validation.mean_error, validation.p90_error, validation.max_error)
        median, mean, p90, largest = (_share(error) for error in errors)
        words = f"median {median} · mean {mean} · 90 % below {p90} · largest {largest}"
        figures.append(("error", Styled(words, "bold")))
    if validation.rank_correlation is not None:
        figures.append(("order", f"rank correlation {validation.rank_correlation:.3f} of tokens/s per device"))
    if validation.oom_accuracy is not None:
        judged = [row.measured_fits for row in validation.rows if None not in (row.measured_fits, row.predicted_fits)]
        right, ran_out = show_share(validation.oom_accuracy), judged.count(False) or "none"
        figures.append(
            (
                "memory",
                f"{right} of {len(judged):,} verdicts right, {ran_out} of them on rows that ran out; wrongly said to"
                f" fit: {validation.false_fits:,}, wrongly said not to: {validation.false_ooms:,}",
            )
        )
    aside = sorted(row.error for row in validation.rows if row.error is not None and not row.counted)
    if aside:
        middle = (aside[(len(aside) - 1) // 2] + aside[len(aside) // 2]) / 2
        words = f"{len(aside):,} rows not in these figures: median {_share(middle)} · largest {_share(aside[-1])}"
        figures.append(("aside", words))
    if validation.inside is not None:
        words = f"{show_share(validation.inside)} of the rows lie in theirs"
        if validation.inside_without is not None:
            words += f"; {show_share(validation.inside_without)} in those of all tables but this one"
        figures.append(("intervals", words))
    for title, peers in (("peers", validation.peers), ("anchored", validation.anchored)):
        told = [
            f"{peer.name}: median {_share(peer.median_error)}, 90 % below {_share(peer.p90_error)}" for peer in peers
        ]
        if told:
            figures.append((title, "\n".join(told)))
    return [*figures, ("how", validation.protocol)]


def _skipped(validation: Validation) -> list[Block]:
    rows = [[str(skipped.row), skipped.why] for skipped in validation.skipped]
    title = f"skipped: {len(rows):,} rows that cannot be read or be predicted"
    return [Table(title=title, columns=("row", "why"), rows=rows, left={"why"}, folded={"why": 0})] if rows else []


def _sizes(validation: Validation) -> list[Block]:
    rows = [
        [errors.size, f"{errors.n:,}", _share(errors.median_error), _share(errors.max_error)]
        for errors in errors_by_size(validation)
    ]
    return [Table(columns=("size", "rows", "median", "largest"), rows=rows, left={"size"})] if rows else []


def _verdicts(row: ValidatedRow) -> str:
    """Whether it fitted, and what the prediction said where that was wrong."""
    if row.measured_fits is None:
        return UNKNOWN
    wrong = row.predicted_fits is not None and row.predicted_fits != row.measured_fits
    return SIGNS[row.measured_fits] + (f" (said {SIGNS[not row.measured_fits]})" if wrong else "")


ROW_COLUMNS: dict[str, Callable[[ValidatedRow], str]] = {
    "row": lambda row: str(row.row),
    "size": lambda row: row.size,
    "set-up": lambda row: row.label,
    "measured": lambda row: UNKNOWN if row.measured_s is None else show_seconds(row.measured_s),
    "predicted": lambda row: UNKNOWN if row.predicted_s is None else show_seconds(row.predicted_s),
    "8 in 10 in": lambda row: _range(row),  # noqa: PLW0108 - it stands below
    "error": lambda row: _share(row.error),
    "fits": _verdicts,
}


def _row_table(rows: Sequence[ValidatedRow], title: str, *, whole: bool = False) -> Table:
    """Rows whose set-ups are cut where there is no room for them.

    Whether a row fitted is told where that is news: where one did not, or was said not to.
    """
    news = any(row.measured_fits is False or _verdicts(row) not in (UNKNOWN, SIGNS[True]) for row in rows)
    known = any(row.low_s is not None for row in rows)
    silent = {*(() if news or whole else ("fits",)), *(() if known else ("8 in 10 in",))}
    columns = [name for name in ROW_COLUMNS if name not in silent]
    return Table(
        title=title,
        columns=columns,
        rows=[[ROW_COLUMNS[name](row) for name in columns] for row in rows],
        left={"size", "set-up", "fits"},
        styles=["red" if row.measured_fits is False and row.predicted_fits else "" for row in rows],
        cut={"set-up": NARROWEST_LABEL},
        giving_way=("8 in 10 in",),
    )


def _range(row: ValidatedRow) -> str:
    """The interval, with a sign where the measured step lies outside of it."""
    if row.low_s is None or row.high_s is None:
        return UNKNOWN
    out = row.measured_s is not None and not row.low_s <= row.measured_s <= row.high_s
    return f"{show_seconds(row.low_s)}–{show_seconds(row.high_s)}{' ✗' if out else ''}"


def _share(error: float | None) -> str:
    if error is None:
        return UNKNOWN
    return f"{error:.0e}" if 0 < error < SMALLEST_SHARE or error > LARGEST_SHARE else show_share(error)
