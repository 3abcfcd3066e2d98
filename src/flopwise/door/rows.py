"""Rows of results as a caller holds them: a list that prints as a table, and is written as the files are."""

from __future__ import annotations

from collections.abc import Iterable

from flopwise.store.results import Result

SHOWN = ("run", "state", "model", "hardware", "devices", "sequence_tokens", "batch_sequences", "tokens_per_s", "mfu")
"""Columns of the short table; the files have all."""


class Results(list[Result]):
    """Rows of runs and sweeps, and what of the store could not be read."""

    def __init__(self, rows: Iterable[Result] = (), *, problems: tuple[str, ...] = ()) -> None:
        super().__init__(rows)
        self.problems = problems

    def __str__(self) -> str:
        from flopwise.report.document import to_markdown
        from flopwise.report.results import results_document

        return to_markdown(results_document(self, SHOWN))

    def __repr__(self) -> str:
        return f"<Results: {len(self):,} {'row' if len(self) == 1 else 'rows'}>"

    def to_markdown(self) -> str:
        """A table for each hardware and number format with all that people read, as `flopwise report -o md` prints."""
        from flopwise.report.document import to_markdown
        from flopwise.report.results import results_document

        return to_markdown(results_document(self))

    def to_csv(self) -> str:
        """Every column, at full precision, as `flopwise report -o csv` writes them."""
        from flopwise.report.results_files import results_csv

        return results_csv(list(self))

    def _repr_html_(self) -> str:
        from flopwise.report.document import to_html
        from flopwise.report.results import results_document

        return to_html(results_document(self, SHOWN))
