"""`flopwise report` and `flopwise collect`: results of runs, sweeps and files as a table, files, pictures or a page."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopwise.base.errors import FlopwiseError, one_of, shown, unknown_name
from flopwise.cli.options import FORMS, PriceOption, StoreOption, split_names
from flopwise.cli.output import keep_inputs, say, show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flopwise.report.page.data import PageData, RunDetail
    from flopwise.store.results import Result

REPORT_FORMS = (*FORMS, "html")
STATES = (
    "ok",
    "oom",
    "timeout",
    "failed",
    "skipped",
    "planned",
    "running",
    "interrupted",
    "unreadable",
    "error",
)
DEFAULT_FILES = {"html": "report.html"}
"""Forms that are no text for a terminal."""
FILE_SUFFIXES = (".csv", ".json", ".md", ".markdown", ".txt")
"""What is called so is a file, be it there or not, and no run and no sweep."""
CSV_NAME, MARKDOWN_NAME = "results.csv", "results.md"

NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Runs (0142, 3-17, last, a folder), sweeps by name, and files of results. Default: all of the store."
    ),
]


def report(
    what: NamesArgument = None,
    output: Annotated[str, typer.Option("--output", "-o", help="table, md, csv, json or html.")] = "table",
    write: Annotated[str, typer.Option("--write", "-w", help="Write it to this file instead; html: report.html.")] = "",
    state: Annotated[str, typer.Option(help="Only rows in these states: ok,oom.")] = "",
    model: Annotated[str, typer.Option(help="Only these models, several with commas; * stands for anything.")] = "",
    best: Annotated[
        bool, typer.Option("--best", help="Of each model, hardware, devices, sequence and precision the fastest.")
    ] = False,
    sort: Annotated[str, typer.Option(help="By this column, the largest first; +step_s: the smallest first.")] = "",
    columns: Annotated[str, typer.Option(help="Only these columns, as the CSV names them: run,tokens_per_s,mfu.")] = "",
    price: PriceOption = "",
    plot: Annotated[str, typer.Option(help="Draw a picture too: FILE.svg or FILE.png.")] = "",
    x: Annotated[
        str, typer.Option("--x", help="Of the picture: sequence, batch, micro-batch, devices, device-cap, host-cap.")
    ] = "",
    y: Annotated[str, typer.Option("--y", help="The same; with it the picture is a heatmap, without it lines.")] = "",
    value: Annotated[str, typer.Option(help="Of the picture: tokens_per_s or mfu.")] = "",
    store: StoreOption = "",
) -> None:
    """Results of runs and sweeps as a table, markdown, CSV, JSON, a page or a picture."""
    from flopwise.report.results import results_document
    from flopwise.report.results_files import results_rows
    from flopwise.store.results import FIELDS

    form = one_of(output, REPORT_FORMS, "--output")
    named = tuple(what or ())
    chosen = _columns(columns, form)
    _check_picture(plot, x, y, value)
    keep_inputs([name for name in named if _is_file(name)], write, plot)
    rows = _filter_rows(gather_rows(named, store, price), state, model, best=best)
    rows = _sort_rows(rows, sort)
    if plot:
        from flopwise.report.plots import plot as draw

        draw(
            rows,
            "heatmap" if y else "scaling",
            Path(plot),
            x=x or "sequence",
            y=y or "batch",
            value=value or "tokens_per_s",
        )
        say(f"wrote {plot}")
    document = results_document(rows, chosen)
    document = replace(document, page=lambda: _page_data(rows, named, store))
    records, target = list(results_rows(rows, chosen or FIELDS)), write or DEFAULT_FILES.get(form, "")
    show(document, records, form, schema="result", write=target, name_file=form in DEFAULT_FILES)


def collect(
    what: NamesArgument = None,
    into: Annotated[str, typer.Option(help="Folder for results.csv and results.md; made where it is not there.")] = ".",
    price: PriceOption = "",
    store: StoreOption = "",
) -> None:
    """Write results.csv, at full precision, and results.md, for people, into a folder."""
    from flopwise.base.files import WRITABLE_HINT, write_whole
    from flopwise.report.document import to_csv, to_markdown
    from flopwise.report.results import results_document

    folder, named = Path(into), tuple(what or ())
    targets = [str(folder / name) for name in (CSV_NAME, MARKDOWN_NAME)]
    keep_inputs([name for name in named if _is_file(name)], *targets)
    rows = gather_rows(named, store, price)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise FlopwiseError(f"cannot write to {into[:200]!r}", why=why, hint=WRITABLE_HINT) from None
    document = results_document(rows)
    for name, text in ((CSV_NAME, to_csv(document)), (MARKDOWN_NAME, to_markdown(document))):
        write_whole(folder / name, text)
        typer.echo(str(folder / name))
    say(f"{_rows_words(len(rows))}   next: flopwise report {folder / CSV_NAME}")


# -- from words to rows ----------------------------------------------------------------------------------------------


def gather_rows(named: Sequence[str], store: str, price: str = "") -> list[Result]:
    """Rows of the files and of the store's runs and sweeps that were named; of the whole store where none was."""
    from flopwise.references.published.results import read_results
    from flopwise.store.collecting import collect as collected
    from flopwise.store.results import add_price, check_result
    from flopwise.store.runs import VARIABLE, store_folder

    per_hour = read_price(price)
    files = [name for name in named if _is_file(name)]
    others = [name for name in named if name not in files]
    rows = [row for name in files for row in read_results(Path(name))]
    folder = store_folder(store)
    if others or not named:
        tell_unsettled(folder, others)
        found = collected(folder, others)
        for problem in found.problems:
            say(f"note: {problem.path}: {problem.why}")
        rows += found.rows
    if not rows:
        raise FlopwiseError(
            f"there are no results in {', '.join(named) if named else folder}",
            why="no run and no cell of a sweep is there",
            hint=f"`flopwise train` or `flopwise sweep` makes some; --store FOLDER, or {VARIABLE}, names another store",
        )
    sound = [check_result(row) for row in rows]
    return sound if per_hour is None else [add_price(row, per_hour) for row in sound]


def tell_unsettled(store: Path, names: Sequence[str], tell: Callable[[str], None] = say) -> None:
    """Of these sweeps, of all where none is named: say that jobs may have ended of which nobody has written it down."""
    from flopwise.store.sweeps import read_sweep, sweep_names
    from flopwise.sweep.jobs.slurm import find_unsettled

    for name in sweep_names(store):
        if names and name not in names:
            continue
        try:
            cells = len(find_unsettled(store, read_sweep(store, name)))
        except FlopwiseError:
            # Whoever reads the results tells of a file that is damaged.
            continue
        if cells:
            asking = f"flopwise sweep --resume {name} --settle --store {shlex.quote(str(store))}"
            some = "a cell has" if cells == 1 else f"{cells:,} cells have"
            tell(f"note: of {name} {some} a job whose end is not written down   ask Slurm: {asking}")


def _is_file(name: str) -> bool:
    from flopwise.base.files import entry_kind
    from flopwise.store.runs import LAST

    if name == LAST or (name.isascii() and name.isdecimal()):
        return False
    return entry_kind(Path(name)) == "file" or Path(name).suffix.lower() in FILE_SUFFIXES


def read_price(text: str) -> float | None:
    """Dollars that a device costs an hour; None where nothing was said."""
    if not text:
        return None
    try:
        price = float(text.strip().removeprefix("$"))
    except ValueError:
        price = math.nan
    if not (math.isfinite(price) and price > 0):
        raise FlopwiseError(
            f"--price cannot be {shown(text)}", why="dollars for an hour of one device", hint="--price 2.5"
        )
    return price


def _columns(text: str, form: str) -> list[str] | None:
    from flopwise.report.results_files import check_fields

    if not text:
        return None
    if form == "html":
        raise FlopwiseError(
            "--columns beside -o html", why="the page has all of them", hint="leave --columns out, or -o md"
        )
    chosen = split_names(text, "a column")
    check_fields(chosen, "--columns")
    return chosen


def _check_picture(plot: str, *options: str) -> None:
    if not plot and any(options):
        raise FlopwiseError(
            "--x, --y and --value are for a picture", why="no file is named for one", hint="--plot results.svg"
        )


def _filter_rows(rows: list[Result], state: str, model: str, *, best: bool) -> list[Result]:
    """Rows that the options leave; an error where none is."""
    from fnmatch import fnmatchcase

    from flopwise.store.results import fastest

    kept = rows
    if state:
        states = [one_of(word, STATES, "--state") for word in split_names(state, "a state")]
        kept = [row for row in kept if row.state in states]
    if model:
        known = sorted({row.model for row in rows if row.model})
        patterns = [pattern.lower() for pattern in split_names(model, "a model")]
        for pattern in patterns:
            if not any(fnmatchcase(name.lower(), pattern) for name in known):
                raise unknown_name("model among the results", pattern, known, hint="--model 'mpt-*' takes several")
        kept = [row for row in kept if row.model and any(fnmatchcase(row.model.lower(), word) for word in patterns)]
    if best:
        kept = fastest(kept)
    if not kept:
        raise FlopwiseError(
            f"none of {_rows_words(len(rows))} is left",
            why=f"their states: {', '.join(sorted({row.state for row in rows}))}",
            hint="leave out --state, --model or --best",
        )
    return kept


def _sort_rows(rows: list[Result], sort: str) -> list[Result]:
    """Numbers from the largest to the smallest, words from A to Z, a plus sign the other way; unknown ones last."""
    from flopwise.report.results_files import check_fields, kinds

    if not sort:
        return rows
    name = sort.strip().removeprefix("+")
    check_fields([name], "--sort")

    def is_known(row: Result) -> bool:
        found = getattr(row, name)
        return found is not None and not (isinstance(found, float) and math.isnan(found))

    known, unknown = [row for row in rows if is_known(row)], [row for row in rows if not is_known(row)]
    down = (kinds()[name] is not str) != sort.strip().startswith("+")
    return [*sorted(known, key=lambda row: getattr(row, name), reverse=down), *unknown]


# -- the page --------------------------------------------------------------------------------------------------------


def _page_data(rows: list[Result], named: Sequence[str], store: str) -> PageData:
    from flopwise.cli.foreseen import foresee_rows
    from flopwise.report.page.data import PageData, now
    from flopwise.store.runs import store_folder

    # Pages are passed on: where a store lies is nobody else's business.
    title = ", ".join(Path(name).name for name in named) if named else store_folder(store).resolve().name
    details, left_out = _details(rows, named, store_folder(store))
    short = title if len(title) <= 60 else f"{title[:59]}…"
    foreseen = foresee_rows(rows)
    return PageData(title=short, created=now(), rows=rows, details=details, foreseen=foreseen, left_out=left_out)


MOST_DETAILS = 200
"""Runs whose details a page may carry; `flopwise serve` has those of all."""


def _details(rows: Sequence[Result], named: Sequence[str], store: Path) -> tuple[dict[str, RunDetail], int]:
    """What the page shows of each run beside its row, and of how many runs it does not.

    A run that is not at hand, as in a file, has none.
    """
    from flopwise.cli.run_details import detail_of
    from flopwise.store.rows import UNREADABLE
    from flopwise.store.runs import RUN_NAME

    folders = {Path(name).name: Path(name) for name in named if "/" in name}
    details: dict[str, RunDetail] = {}
    runs = [row for row in rows if row.run and row.source == "measured"]
    # Where there are more than a page carries, the newest of those that ran to their end.
    runs.sort(key=lambda row: (row.state == "ok", row.started or ""), reverse=True)
    wanted = list(dict.fromkeys(row.run for row in runs if row.run))
    for run in sorted(wanted[:MOST_DETAILS]):
        folder = folders.get(run) or (store / run if RUN_NAME.fullmatch(run) else None)
        if folder is not None:
            detail = detail_of(folder, say)
            # The row itself says that it is unreadable.
            details |= {run: detail} if detail.state != UNREADABLE else {}
    return details, max(0, len(wanted) - MOST_DETAILS)


def _rows_words(count: int) -> str:
    return f"{count:,} {'row' if count == 1 else 'rows'}"
