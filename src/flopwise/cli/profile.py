"""`flopwise profile`: what a profiler or a run wrote, shown, compared, and explained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopwise.base.errors import FlopwiseError, nearest, one_of, shown
from flopwise.cli import output as output_of
from flopwise.cli.once import AsGivenGroup
from flopwise.cli.options import FORMS, StoreOption
from flopwise.cli.output import progress_bar, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flopwise.profile.explain.comparing import ProfileComparison
    from flopwise.profile.explain.verdicts import Thresholds
    from flopwise.records.profile import Profile, Read
    from flopwise.report.profiles import Judged

app = typer.Typer(
    name="profile",
    cls=AsGivenGroup,
    help="Where the time and memory of a run went: profiles of flopwise and of other tools.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)

PAGE_FORMS = (*FORMS, "html")
SHOW_FORMS = (*PAGE_FORMS, "native")

FilesArgument = Annotated[
    list[str],
    typer.Argument(help="Profiles: files of flopwise or another profiler, or runs: 0142, last, their folders."),
]
ShowOutputOption = Annotated[
    str, typer.Option("--output", "-o", help="table, md, csv, json, html, or native: the tool's own layout.")
]
CompareOutputOption = Annotated[str, typer.Option("--output", "-o", help="table, md, csv, json or html.")]
WriteOption = Annotated[str, typer.Option("--write", "-w", help="Write it to this file instead.")]
SectionOption = Annotated[list[str] | None, typer.Option(help="Only the profile of this name. Repeatable.")]
ThresholdOption = Annotated[
    list[str] | None, typer.Option(help="Where a verdict begins: --threshold host_device_share=0.6. Repeatable.")
]
TraceOption = Annotated[str, typer.Option(help="Write predicted and measured tasks as a Chrome trace (Perfetto).")]
BaselineOption = Annotated[str, typer.Option(help="Profile that changes are relative to. Default: the first.")]


@app.command()
def show(
    files: FilesArgument,
    section: SectionOption = None,
    threshold: ThresholdOption = None,
    trace: TraceOption = "",
    store: StoreOption = "",
    output: ShowOutputOption = "table",
    write: WriteOption = "",
) -> None:
    """Print profiles: figures by group, time by kernel, memory by owner, and what limits the run."""
    from flopwise.report.page.profiles import profiles_page
    from flopwise.report.profiles import profiles_document, profiles_record, warn_of_parts

    form = one_of(output, SHOW_FORMS, "--output")
    thresholds = _thresholds(threshold)
    output_of.keep_inputs(files, write, trace)
    reads = _read(files, store)
    profiles = _sections(_profiles(reads), section)
    if trace:
        _write_trace(profiles, trace)
    if form == "native":
        output_of.put(_native(reads, section), write)
        for line in warn_of_parts(profiles):
            say(line)
        return
    judged = judge(profiles, thresholds)
    document = replace(profiles_document(judged), page=lambda: profiles_page(judged, _compare(profiles)))
    output_of.show(document, profiles_record(judged), form, schema="profile", write=write)


@app.command()
def compare(
    files: FilesArgument,
    baseline: BaselineOption = "",
    section: SectionOption = None,
    threshold: ThresholdOption = None,
    store: StoreOption = "",
    output: CompareOutputOption = "table",
    write: WriteOption = "",
) -> None:
    """Print profiles side by side, what changes first, and lines through device time over the batch."""
    from flopwise.profile.explain.comparing import compare as compared
    from flopwise.report.page.profiles import profiles_page
    from flopwise.report.profile_comparison import comparison_document, comparison_record

    form = one_of(output, PAGE_FORMS, "--output")
    thresholds = _thresholds(threshold)
    output_of.keep_inputs(files, write)
    profiles = _sections(_profiles(_read(files, store)), section)
    if len(profiles) < 2:
        raise FlopwiseError(
            "one profile cannot be compared",
            why=f"only {profiles[0].name[:60]!r} is there",
            hint="name a second file or run; `flopwise profile show` prints one",
        )
    found = compared(profiles, baseline=baseline or None, thresholds=thresholds)
    document = replace(comparison_document(found), page=lambda: profiles_page(judge(profiles, thresholds), found))
    output_of.show(document, comparison_record(found), form, schema="profile-comparison", write=write)


@app.command()
def why(
    name: Annotated[str, typer.Argument(help="A profile: a file, or a run: 0142, last, its folder.")],
    section: SectionOption = None,
    threshold: ThresholdOption = None,
    store: StoreOption = "",
) -> None:
    """Say in a paragraph what limits a run, what does not although it looks so, and what to try first."""
    from flopwise.report.document import Document, Words, to_page
    from flopwise.report.profile_words import why_paragraph

    profiles = _sections(_profiles(_read([name], store)), section)
    judged = judge(profiles, _thresholds(threshold))
    document = Document(blocks=[Words(why_paragraph(*each)) for each in judged])
    output_of.show_page(to_page(document, output_of.width()))


# -- from words to profiles ------------------------------------------------------------------------------------------


def _path(name: str, store: str) -> Path:
    """A file or a folder of that name, else the folder of the run that is called so."""
    from flopwise.base.files import entry_kind
    from flopwise.store.runs import LAST, find_run, store_folder

    path = Path(name)
    is_run = name == LAST or (name.isascii() and name.isdecimal())
    if not is_run and entry_kind(path) != "nothing":
        return path
    if is_run or store:
        if is_run and entry_kind(path) == "file":
            return path
        return find_run(store_folder(store), name)
    near = _near(path)
    raise FlopwiseError(
        f"there is no file {name[:200]!r}",
        why=f"did you mean {' or '.join(near)}?" if near else None,
        hint="a profile's file, or a run: its number, its folder, or `last`",
    )


def _near(path: Path) -> list[str]:
    """Names beside a path that is not there, which may have been meant."""
    try:
        beside = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        return []
    return [str(path.parent / name) for name in nearest(path.name, beside, 2)]


def _read(names: Sequence[str], store: str) -> tuple[Read, ...]:
    from flopwise.profile.read.reading import read_profiles

    paths = [_path(name, store) for name in names]
    with progress_bar("reading") as tell:
        return read_profiles(paths, tell)


def _profiles(reads: Sequence[Read]) -> list[Profile]:
    found = [profile for read in reads for profile in read.profiles]
    if not found:
        raise FlopwiseError("there is no profile in what was named", hint="look at the file, or name another")
    return found


def _sections(profiles: list[Profile], wanted: Sequence[str] | None) -> list[Profile]:
    """Those that were asked for, in that order; all where none was."""
    from flopwise.profile.explain.comparing import column_names, column_of

    if not wanted:
        return profiles
    names = column_names(profiles)
    return [profiles[column_of(names, name)] for name in wanted]


def _thresholds(words: Sequence[str] | None) -> Thresholds:
    from flopwise.profile.explain.verdicts import thresholds_of

    values: dict[str, float] = {}
    for word in words or ():
        name, separator, number = word.partition("=")
        try:
            values[name.strip()] = float(number)
        except ValueError:
            why = "a number is expected after the sign" if separator else "the sign = is missing"
            raise FlopwiseError(
                f"--threshold cannot be {shown(word)}", why=why, hint="--threshold host_device_share=0.6"
            ) from None
    return thresholds_of(values)


def judge(profiles: Sequence[Profile], thresholds: Thresholds | None = None) -> list[Judged]:
    from flopwise.profile.explain.verdicts import verdicts

    return [(profile, verdicts(profile, thresholds)) for profile in profiles]


def _compare(profiles: Sequence[Profile]) -> ProfileComparison | None:
    from flopwise.profile.explain.comparing import compare as compared

    return compared(profiles) if len(profiles) > 1 else None


# -- to the terminal, or to a file -----------------------------------------------------------------------------------


def _native(reads: Sequence[Read], section: Sequence[str] | None) -> str:
    """Documents in the layout of the tool that wrote them; only Neuron's is kept."""
    from flopwise.report.neuron import neuron_document

    if section:
        raise FlopwiseError(
            "--section beside -o native", why="a document is printed whole", hint="-o table, or no --section"
        )
    without = next((read for read in reads if read.native is None), None)
    if without is not None:
        names = ", ".join(profile.name[:60] for profile in without.profiles[:2])
        raise FlopwiseError(
            f"{names!r} has no layout of its own", why="only Neuron summaries are kept in theirs", hint="-o table"
        )
    text = "\n".join(neuron_document(read.native) for read in reads)
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)


def _write_trace(profiles: Sequence[Profile], trace: str) -> None:
    from flopwise.base.files import write_whole
    from flopwise.report.profile_timeline import profile_trace

    if len(profiles) != 1:
        raise FlopwiseError(
            f"--trace of {len(profiles)} profiles", why="a file holds one step", hint="--section NAME picks one"
        )
    if not profiles[0].tasks:
        raise FlopwiseError(
            f"{profiles[0].name[:60]!r} has no tasks for --trace",
            why="only flopwise's own runs are predicted task by task",
            hint="the trace of another profiler opens in Perfetto as it is",
        )
    write_whole(Path(trace), profile_trace(profiles[0]))
    say(f"wrote {trace}   next: open it in ui.perfetto.dev")
