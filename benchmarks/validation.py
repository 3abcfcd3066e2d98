"""Write the figures of docs/validation.md: `python -m benchmarks.validation [--check]`.

Every published table, held out by its protocol, beside its intervals, what simple rules say and what one row as the
anchor gives; then every measured table as if nobody had said its framework and without its own rows in the evidence;
then the evidence itself. With --check nothing is written, and a page that is out of date exits with 1.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from typer.testing import CliRunner

from benchmarks.stacks import FITTED_TABLES, NOT_FITTED
from flopwise.base.files import read_text, write_whole
from flopwise.base.units import show_share
from flopwise.catalog.load import load_evidence
from flopwise.cli import app
from flopwise.records.evidence import Evidence
from flopwise.references.published import protocol_of, read_cases
from flopwise.references.validate.intervals import own_predictions, row_interval
from flopwise.references.validate.protocol import Case
from flopwise.report.words import signed_share
from flopwise.setup.stack import NO_STACK

PAGE = Path(__file__).parents[1] / "docs" / "validation.md"
HELD_OUT = (*FITTED_TABLES, *NOT_FITTED)

Record = Mapping[str, Any]


def main() -> int:
    page = read_text(PAGE)
    made = page
    for name, lines in (("results", results()), ("unknown", unknown()), ("evidence", evidence_lines())):
        made = with_section(made, name, lines)
    if "--check" in sys.argv[1:]:
        return int(made != page)
    write_whole(PAGE, made)
    return 0


def with_section(page: str, name: str, lines: Sequence[str]) -> str:
    """The page with what stands between a section's marks made anew."""
    begin, end = f"<!-- {name}: python -m benchmarks.validation -->", f"<!-- {name} end -->"
    pattern = re.compile(rf"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    assert pattern.search(page), f"{PAGE} has no section {name}"
    body = "\n".join(lines)
    return pattern.sub(lambda _: f"{begin}\n\n{body}\n\n{end}", page)


# -- every table, held out by its protocol ---------------------------------------------------------------------------


def results() -> list[str]:
    """A row for each table, and the mean of those that were measured."""
    records = {table: record(table) for table in HELD_OUT}
    columns = ("n", "median", "mean", "90 % below", "rank", "inside", "one MFU", "40 % MFU", "anchored", "from kernels")
    lines = [f"| table | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    figures = {table: _figures(found) for table, found in records.items()}
    for table, (count, rank, shares) in figures.items():
        told = "" if protocol_of(table).measured else " (computed, not measured)"
        lines.append(_row(f"{table}{told}", f"{count:,}", rank, shares))
    counted = [table for table in HELD_OUT if protocol_of(table).measured]
    means = {name: _mean([figures[table][2][name] for table in counted]) for name in figures[counted[0]][2]}
    lines.append(_row("**mean of the measured**", f"{sum(figures[table][0] for table in counted):,}", "", means))
    skipped = [f"{table} {len(found['skipped'])}" for table, found in records.items() if found["skipped"]]
    return [*lines, "", f"Rows that are skipped: {', '.join(skipped) or 'none'}."]


def record(table: str) -> Record:
    """What `flopwise validate TABLE --leave-out model --anchor -o json` prints."""
    found = CliRunner().invoke(app, ["validate", table, "--leave-out", "model", "--anchor", "-o", "json"])
    assert found.exit_code == 0, found.output
    read: Record = json.loads(found.stdout)
    return read


def _figures(found: Record) -> tuple[int, str, dict[str, float | None]]:
    peers = {peer["name"]: peer["median_error"] for peer in found["peers"]}
    anchored = {peer["name"]: peer["median_error"] for peer in found["anchored"]}
    stack = next((name for name in anchored if name != NO_STACK), "")
    shares = {
        "median": found["median_error"],
        "mean": found["mean_error"],
        "p90": found["p90_error"],
        "inside": found["inside"],
        "one": peers.get("one MFU for all"),
        "rule": peers.get("40% MFU"),
        "anchored": anchored.get(stack),
        "bare": anchored.get(NO_STACK),
    }
    rank = found["rank_correlation"]
    return found["n"], "" if rank is None else f"{rank:.3f}", shares


def _mean(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return fmean(known) if known else None


def _row(name: str, count: str, rank: str, shares: Mapping[str, float | None]) -> str:
    cells = ["" if (share := shares.get(key)) is None else show_share(share) for key in (
        "median", "mean", "p90", "inside", "one", "rule", "anchored", "bare"
    )]  # fmt: skip
    return f"| {' | '.join([name, count, *cells[:3], rank, *cells[3:]])} |"


# -- as if nobody had said the framework -----------------------------------------------------------------------------


def unknown() -> list[str]:
    """Measured tables predicted without a stack, by the levels and spreads of all others."""
    lines = ["| table | n | median | measured ÷ predicted | inside |", "|---|---:|---:|---:|---:|"]
    insides = []
    for table in (table for table in HELD_OUT if protocol_of(table).measured and table != "megatron-2"):
        protocol = protocol_of(table)
        cases = [replace(case, stack=NO_STACK) for case in read_cases(table) if case.step_s and protocol.counts(case)]
        others = [entry for entry in load_evidence() if entry.table != table]
        ratios, inside = _without(cases, others)
        insides.append(fmean(inside))
        off = median(abs(ratio - 1) for ratio in ratios)
        lines.append(
            f"| {table} | {len(cases):,} | {show_share(off)} | {median(ratios):.2f} | {show_share(insides[-1])} |"
        )
    return [*lines, f"| **mean** | | | | {show_share(fmean(insides))} |"]


def _without(cases: Sequence[Case], evidence: Sequence[Evidence]) -> tuple[list[float], list[bool]]:
    """Measured ÷ predicted of every row, and whether it lies in its interval."""
    predicted = own_predictions(cases, evidence).step_s.tolist()
    ratios, inside = [], []
    for case, seconds in zip(cases, predicted, strict=True):
        around = row_interval(case, NO_STACK, evidence)
        assert case.step_s is not None and around is not None
        ratio = case.step_s / seconds
        ratios.append(ratio)
        # What is predicted is the middle.
        inside.append(around.low <= ratio * around.middle <= around.high)
    return ratios, inside


# -- the evidence ----------------------------------------------------------------------------------------------------


def evidence_lines() -> list[str]:
    lines = ["| table | stack | ZeRO | rows | from | median | to |", "|---|---|---:|---:|---:|---:|---:|"]
    for entry in load_evidence():
        bounds = " | ".join(signed_share(share) for share in (entry.low, entry.level, entry.high))
        computed = "" if entry.measured else " (computed, not measured)"
        lines.append(f"| {entry.table}{computed} | {entry.stack} | {entry.zero} | {entry.n:,} | {bounds} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
