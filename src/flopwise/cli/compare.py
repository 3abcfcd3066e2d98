"""`flopwise compare`: two sets of runs, joined by cell; exit code 1 where the second is slower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopwise.base.errors import FlopwiseError, one_of, shown
from flopwise.cli.options import PAGE_FORMS, StoreOption
from flopwise.cli.output import say, show

if TYPE_CHECKING:
    from flopwise.report.page.data import RunDetail
    from flopwise.report.run_comparison import Measured
    from flopwise.store.results import Result
    from flopwise.store.statistics import Sample

SideArgument = typer.Argument(
    help="A sweep, runs (142, 3-17, last), a cell, a folder of runs, STORE/SWEEP, or a results.csv.", show_default=False
)
ThresholdOption = Annotated[str, typer.Option(help="Slow-down that counts: 3% or 0.03.")]
THRESHOLD_HINT = "--threshold 3%, or 0.03"


def compare(
    before: Annotated[str, SideArgument],
    after: Annotated[str, SideArgument],
    threshold: ThresholdOption = "3%",
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Cells that ran before and were not measured again are no failure.")
    ] = False,
    store: StoreOption = "",
    output: Annotated[str, typer.Option("--output", "-o", help="table, md, csv, json or html.")] = "table",
    write: Annotated[
        str, typer.Option("--write", "-w", help="Write it to this file instead; html: compared.html.")
    ] = "",
) -> None:
    """Two sets of runs, joined by cell: what became faster or slower, by how much, and how sure that is.

    Exit code 1 when a cell is slower: the change is at least the threshold and its whole 95 % interval above 0; or
    when one that ran fails now, fails more often, or was not measured again.
    """
    from flopwise.report import run_comparison as report
    from flopwise.report.page.comparisons import comparison_page

    form = one_of(output, PAGE_FORMS, "--output")
    limit = _share(threshold)
    sides = [_side(word, store) for word in (before, after)]
    for word, side in zip((before, after), sides, strict=True):
        if not side:
            raise FlopwiseError(f"there is nothing to compare in {word}", hint="`flopwise ls runs`, `flopwise sweep`")
    found = report.compare_runs(sides[0], sides[1], names=(before, after), threshold=limit, allow_missing=allow_missing)
    if all(None in (cell.before_state, cell.after_state) for cell in found.cells):
        raise FlopwiseError(
            f"{before} and {after} have no cell in common",
            why="a cell is a model, its hardware, lengths, batch, precision and caps, all the same",
            hint="name two single runs to compare them whatever they are",
        )
    document = replace(
        report.comparison_document(found),
        page=lambda: comparison_page(found, (sides[0], sides[1]), (_details(before, store), _details(after, store))),
    )
    target = write or ("compared.html" if form == "html" else "")
    show(document, report.comparison_record(found), form, schema="run-comparison", write=target, name_file=bool(target))
    if found.is_worse:
        raise typer.Exit(1)


def _share(text: str) -> float:
    plain = text.strip().replace(" ", "")
    try:
        value = float(plain.removesuffix("%")) / (100 if plain.endswith("%") else 1)
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1:
        raise FlopwiseError(
            f"--threshold cannot be {shown(text)}", why="a share between 0 and 1, or per cent", hint=THRESHOLD_HINT
        )
    return value


# -- from words to rows ----------------------------------------------------------------------------------------------


def _side(word: str, store: str) -> list[Measured]:
    """The rows that a word stands for, each with the steps of its run; several words with commas."""
    from flopwise.base.files import entry_kind
    from flopwise.references.published.results import read_results
    from flopwise.report.run_comparison import Measured, quantiles_of
    from flopwise.store.results import check_result

    found: list[Measured] = []
    for name in filter(None, (part.strip() for part in word.split(","))):
        if entry_kind(Path(name)) == "file":
            found += [Measured(row=check_result(row), sample=quantiles_of(row)) for row in read_results(Path(name))]
            continue
        folder, names = _place(name, store)
        found += [Measured(row=check_result(row), sample=_sample(folder, row)) for row in _rows(folder, names)]
    return found


def _place(name: str, store: str) -> tuple[Path, list[str]]:
    """The store that a name belongs to, and what is meant of it; nothing: all."""
    from flopwise.base.files import entry_kind
    from flopwise.store.runs import LAST, RECORD, store_folder
    from flopwise.store.sweeps import sweep_names

    given, path = store_folder(store), Path(name)
    if "/" not in name and (name == LAST or name.isdecimal() or name in sweep_names(given)):
        return given, [name]
    if entry_kind(path / RECORD) == "file":
        return path.resolve().parent, [path.resolve().name]
    if entry_kind(path) == "folder":
        return path, []
    if "/" in name and entry_kind(path.parent) == "folder" and path.name in sweep_names(path.parent):
        return path.parent, [path.name]
    return given, [name]


def _rows(store: Path, names: list[str]) -> list[Result]:
    from flopwise.cli.report import tell_unsettled
    from flopwise.store.collecting import collect

    tell_unsettled(store, names)
    collected = collect(store, names)
    for problem in collected.problems:
        say(f"note: {problem.path}: {problem.why}")
    return collected.rows


def _sample(store: Path, row: Result) -> Sample | None:
    """The times of a run's steps that count; what its row knows where they cannot be read."""
    from flopwise.report.run_comparison import quantiles_of
    from flopwise.store.runs import RUN_NAME, read_record, read_steps
    from flopwise.store.statistics import steady_seconds

    summary = quantiles_of(row)
    if summary is None or row.run is None or not RUN_NAME.fullmatch(row.run):
        return summary
    folder = store / row.run
    try:
        seconds = steady_seconds(read_record(folder), read_steps(folder))
    except FlopwiseError:
        return summary
    return seconds if len(seconds) else summary


# -- the page --------------------------------------------------------------------------------------------------------


def _details(word: str, store: str) -> dict[str, RunDetail]:
    """What the page shows of each run of a side; of a file's rows there is none."""
    from flopwise.base.files import entry_kind
    from flopwise.cli.run_details import detail_of
    from flopwise.store.runs import RUN_NAME

    found: dict[str, RunDetail] = {}
    for name in filter(None, (part.strip() for part in word.split(","))):
        if entry_kind(Path(name)) == "file":
            continue
        folder, names = _place(name, store)
        runs = [row.run for row in _rows(folder, names) if row.run and RUN_NAME.fullmatch(row.run)]
        found |= {run: detail_of(folder / run, say) for run in runs[:MOST_DETAILS]}
    return found


MOST_DETAILS = 100
"""Runs of a side whose details a page carries."""
