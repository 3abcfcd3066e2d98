"""Predictions against a published table, for people and for programs: a page of text, markdown, CSV, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.cells import set_cell_size
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flopwise.base.files import to_json, with_schema
from flopwise.base.units import show_seconds, show_share
from flopwise.references.validate.validation import ValidatedRow, Validation, errors_by_size
from flopwise.report.tables import GAP, csv_text, markdown_table, text_table

WORST_ROWS = 10
NARROWEST_LABEL = 12
SMALLEST_SHARE = 1e-4
"""Below it an error is rounding, and its power of ten says more than 0.0 %."""
LARGEST_SHARE = 1e4

SIZE_COLUMNS = ("size", "rows", "median", "largest")
ROW_COLUMNS = ("row", "size", "set-up", "measured", "predicted", "error", "fits")
WORDS = {"size", "set-up", "fits", "figure", "value"}
SIGNS = {True: "✓", False: "✗"}


def validation_page(validation: Validation, width: int, *, every_row: bool = False) -> RenderableType:
    """The figures, the errors by size, and the rows farthest off, or all of them; `width` columns wide at most."""
    parts: list[RenderableType] = [_summary(validation)]
    sizes = _size_rows(validation)
    if sizes:
        parts += ["", text_table(SIZE_COLUMNS, sizes, WORDS)]
    shown = validation.rows if every_row else worst_rows(validation)
    if shown:
        title = f"all {len(shown):,} rows" if every_row else f"the {len(shown)} farthest off"
        parts += ["", Text(title, style="bold"), _row_table(shown, width)]
    return Group(*parts)


def worst_rows(validation: Validation, limit: int = WORST_ROWS) -> tuple[ValidatedRow, ...]:
    """The rows with the largest errors, the largest first."""
    off = [row for row in validation.rows if row.error is not None and row.counted]
    return tuple(sorted(off, key=lambda row: -(row.error or 0.0))[:limit])


def _summary(validation: Validation) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _figures(validation):
        table.add_row(name, value, style="bold" if name == "error" else "")
    return table


def _figures(validation: Validation) -> list[tuple[str, str]]:
    """The summary as names and words."""
    held_out = sum(row.held_out for row in validation.rows if row.error is not None and row.counted)
    rows = f"{validation.n:,} of {len(validation.rows):,} rows compared, {held_out:,} of them held out"
    if validation.unpredicted:
        rows += f"; {validation.unpredicted:,} measured without a prediction"
    figures = [("table", validation.table), ("rows", rows)]
    if validation.n:
        errors = (validation.median_error, validation.mean_error, validation.p90_error, validation.max_error)
        median, mean, p90, largest = (_share(error) for error in errors)
        figures.append(("error", f"median {median} · mean {mean} · 90 % below {p90} · largest {largest}"))
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
    return [*figures, ("how", validation.protocol)]


def _size_rows(validation: Validation) -> list[list[str]]:
    return [
        [errors.size, f"{errors.n:,}", _share(errors.median_error), _share(errors.max_error)]
        for errors in errors_by_size(validation)
    ]


def _cells(row: ValidatedRow) -> list[str]:
    """A row in words, under `ROW_COLUMNS`."""
    return [
        str(row.row),
        row.size,
        row.label,
        "-" if row.measured_s is None else show_seconds(row.measured_s),
        "-" if row.predicted_s is None else show_seconds(row.predicted_s),
        _share(row.error),
        _verdicts(row),
    ]


def _verdicts(row: ValidatedRow) -> str:
    """Whether it fitted, and what the prediction said where that was wrong."""
    if row.measured_fits is None:
        return "-"
    wrong = row.predicted_fits is not None and row.predicted_fits != row.measured_fits
    return SIGNS[row.measured_fits] + (f" (said {SIGNS[not row.measured_fits]})" if wrong else "")


def _row_table(rows: Sequence[ValidatedRow], width: int) -> Text:
    """Rows as a table whose set-ups are cut where they would go beyond `width`.

    Whether a row fitted is told where that is news: where one did not, or was said not to.
    """
    cells = [_cells(row) for row in rows]
    news = any(row.measured_fits is False or _verdicts(row) not in ("-", SIGNS[True]) for row in rows)
    shown = ROW_COLUMNS if news else ROW_COLUMNS[:-1]
    place = ROW_COLUMNS.index("set-up")
    others = sum(
        max(len(line[index]) for line in (ROW_COLUMNS, *cells)) + GAP for index in range(len(shown)) if index != place
    )
    room = max(NARROWEST_LABEL, width - others)
    for line in cells:
        if len(line[place]) > room:
            line[place] = set_cell_size(line[place], room - 1) + "…"
    styles = ["red" if row.measured_fits is False and row.predicted_fits else "" for row in rows]
    return text_table(ROW_COLUMNS, cells, WORDS, shown=shown, styles=styles)


def _share(error: float | None) -> str:
    if error is None:
        return "-"
    return f"{error:.0e}" if 0 < error < SMALLEST_SHARE or error > LARGEST_SHARE else show_share(error)


def validation_markdown(validation: Validation) -> str:
    """The figures, the errors by size and every row, as markdown tables."""
    parts = [markdown_table(("figure", "value"), _figures(validation), WORDS)]
    sizes = _size_rows(validation)
    if sizes:
        parts.append(markdown_table(SIZE_COLUMNS, sizes, WORDS))
    parts.append(markdown_table(ROW_COLUMNS, [_cells(row) for row in validation.rows], WORDS))
    return "\n".join(parts)


def validation_csv(validation: Validation) -> str:
    """One line per row of the table, full precision, the unit in the column's name."""
    return csv_text([asdict(row) for row in validation.rows])


def validation_json(validation: Validation) -> str:
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
    return to_json(with_schema({**record, "protocol": validation.protocol, "rows": validation.rows}, "validation"))
