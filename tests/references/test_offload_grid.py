"""Our plans beside the reference's on its recorded grid, by simulation: never slower, and where it failed too."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.offload_grid import GridRow, compared_all, slower
from flopwise.references.published.offload import read_offload

EVERY = 53
"""Shares no factor with the grid's 6 and 7 caps a row, so that the sample has caps of all sizes: 15 rows. All rows:
`python -m benchmarks.offload_grid`."""
pytestmark = pytest.mark.slow  # the rows are planned for whichever test is the first


@pytest.fixture(scope="module")
def rows() -> list[GridRow]:
    return compared_all(read_offload()[::EVERY], processes=1)


def test_the_sample_is_spread_over_the_grid(rows: list[GridRow]) -> None:
    assert len(rows) == 15
    assert {row.model for row in rows} == {"dataflow-1b", "llama-3-8b"}
    assert len({row.sequence_tokens for row in rows}) >= 10
    assert len({row.device_gib for row in rows}) >= 6


def test_ours_is_never_slower(rows: list[GridRow]) -> None:
    assert slower(rows) == []
    assert median(row.ratio for row in rows if row.ratio is not None) >= 1.03


def test_both_have_the_same_batch(rows: list[GridRow]) -> None:
    batches = {run.row: run.sequences_per_step for run in read_offload()}
    assert all(row.batch_sequences == batches[row.row] for row in rows if row.succeeded)


def test_plans_stay_within_the_caps(rows: list[GridRow]) -> None:
    for row in rows:
        if row.device_used_gib is not None and row.host_used_gib is not None:
            assert row.device_used_gib <= row.device_gib
            assert row.host_used_gib <= row.host_gib


def test_caps_on_which_the_reference_failed(rows: list[GridRow]) -> None:
    failed = [row for row in rows if not row.succeeded]
    assert failed
    assert sum(row.ours_tokens_per_s is not None for row in failed) > len(failed) / 2
