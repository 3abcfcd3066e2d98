"""Our formulas of the reference model against the outputs that it published: conformance, not measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flopwise.references.deepflow.step import step_s
from flopwise.references.deepflow.table import FIELDS, from_table
from flopwise.references.validate.validation import ERROR_WORDS, ValidatedRow, Validation, rank_correlation, summarize

FILE = "deepflow_lstm.csv"
"""In the catalogue."""
OUTPUT = "time_s"
COLUMNS = (OUTPUT, *(name for name in FIELDS if name not in ("num_gates", "precision", "IB", "dp", "lp", "hlp")))
"""Those that a table must have; what else the reference knows may be there too."""
PROTOCOL = (
    "conformance, nothing is fitted: the formulas of DeepFlow (June 2019) against its own published outputs, which are"
    " predictions and not measurements"
)


def predicted_row(number: int, cells: Mapping[str, str]) -> ValidatedRow:
    """One published output beside what our formulas give; empty cells are those that the reference leaves open."""
    known = {name: cell for name, cell in cells.items() if cell}
    published, configuration = float(known[OUTPUT]), from_table(known)
    seconds, model, power = step_s(configuration), configuration.model, configuration.power
    return ValidatedRow(
        row=number,
        size=f"h{model.hidden}",
        label=f"batch {model.batch_sequences} · {power.budget_w:g} W · core {power.core:.3g} · DRAM {power.dram:.3g}",
        measured_s=published,
        predicted_s=seconds,
        error=abs(seconds / published - 1),
        measured_fits=None,
        predicted_fits=None,
        held_out=True,
        counted=True,
    )


def conformance(rows: Sequence[ValidatedRow]) -> Validation:
    """The figures of all rows; the order is that of steps per second."""
    published = np.array([row.measured_s for row in rows], dtype=np.float64)
    predicted = np.array([row.predicted_s for row in rows], dtype=np.float64)
    return summarize(
        "deepflow",
        tuple(rows),
        protocol=f"{PROTOCOL}; {ERROR_WORDS['time']}",
        rank=rank_correlation(-published, -predicted),
    )
