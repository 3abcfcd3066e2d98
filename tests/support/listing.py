"""The runs of a store with their whole records, which no command needs at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.records.measurement import RunRecord
from flopwise.store.runs import read_record, run_names


@dataclass(frozen=True, slots=True)
class Listed:
    """A run's folder with its record, or why there is none."""

    folder: Path
    record: RunRecord | None
    problem: str = ""


def list_runs(store: Path) -> list[Listed]:
    """Every run by its number; a damaged one with its problem."""
    return [_listed(store / name) for name in run_names(store)]


def _listed(folder: Path) -> Listed:
    try:
        return Listed(folder, read_record(folder))
    except FlopwiseError as error:
        return Listed(folder, None, error.what if error.why is None else f"{error.what}: {error.why}")
