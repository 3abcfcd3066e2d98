"""`flopwise profile run -- python train.py`: somebody else's program under the profiler, as it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import parse_count, read_option

if TYPE_CHECKING:
    from flopwise.profile.measure.outside import ProgramOutcome

DEFAULT_FOLDER = "profile"
MOST_FOLDERS = 10_000
PREFIX = "flopwise: "

CommandArgument = Annotated[
    list[str],
    typer.Argument(help="The program and its arguments, behind --", metavar="-- COMMAND…", show_default=False),
]
StepsOption = Annotated[str, typer.Option(help="Steps that are traced.")]
WarmUpOption = Annotated[str, typer.Option(help="Steps before them.")]
FolderOption = Annotated[
    str, typer.Option("--folder", "-w", help="Where trace, counters and profile go. Default: profile, or profile-2, …")
]


def run(
    command: CommandArgument,
    steps: StepsOption = "5",
    warm_up: WarmUpOption = "3",
    folder: FolderOption = "",
) -> None:
    """Run a PyTorch program and profile some of its steps, without changing it.

    A step ends with that of its optimizer; of a program that has none, with a call of its outermost module. Exit code
    and output are the program's own; what flopwise says comes after it, on stderr, with its name before every line.
    """
    from flopwise.base.files import entry_kind
    from flopwise.profile.measure.outside import is_abandoned, run_outside

    traced = read_option(steps, "steps", parse_count(1, "--steps 5")) or 1
    before = read_option(warm_up, "warm-up", parse_count(1, "--warm-up 5")) or 1
    place = Path(folder) if folder else _free_folder()
    is_new = entry_kind(place) == "nothing" or is_abandoned(place)
    outcome = run_outside(command, place, warm_up=before, steps=traced)
    try:
        _tell(outcome, place, traced, is_new=is_new)
    finally:
        _end_as(outcome)


def _end_as(outcome: ProgramOutcome) -> NoReturn:
    """As the program did, whatever became of its profile."""
    from flopwise.profile.measure.passing_on import end_by

    if outcome.signal is not None:
        # On stdout there is nothing of ours.
        sys.stderr.flush()
        end_by(outcome.signal)
    raise typer.Exit(outcome.exit_code)


def _tell(outcome: ProgramOutcome, folder: Path, steps: int, *, is_new: bool) -> None:
    """The profile, or why there is none."""
    try:
        if outcome.traces:
            _say(_page(folder, steps))
            return
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        _say(f"there is no profile: {outcome.why_none}")
    except (FlopwiseError, OSError) as error:
        _say(f"the profile in {folder} cannot be shown: {error}")


def _say(text: str) -> None:
    from flopwise.cli.output import say

    for line in text.splitlines():
        say(f"{PREFIX}{line}".rstrip())


def _free_folder() -> Path:
    from flopwise.profile.measure.outside import is_abandoned

    names = (DEFAULT_FOLDER, *(f"{DEFAULT_FOLDER}-{number}" for number in range(2, MOST_FOLDERS)))
    return next(Path(name) for name in names if not Path(name).exists() or is_abandoned(Path(name)))


def _page(folder: Path, steps: int) -> str:
    """What the profile says, written beside its trace; and what to do next."""
    from flopwise.base.files import write_whole
    from flopwise.cli.output import page_text, progress_bar, width
    from flopwise.cli.profile import judge
    from flopwise.profile.read.reading import read_profiles
    from flopwise.report.document import to_page
    from flopwise.report.profiles import profiles_document
    from flopwise.store.runs import PROFILE, to_text

    with progress_bar("reading") as tell:
        profiles = [profile for read in read_profiles([folder], tell) for profile in read.profiles]
    write_whole(folder / PROFILE, to_text(profiles) + "\n")
    lines = [page_text(to_page(profiles_document(judge(profiles)), width()), in_file=True)]
    if any(profile.steps is not None and profile.steps < steps for profile in profiles):
        lines.append(f"note: the program ended before {steps} steps were traced")
    return "\n".join([*lines, f"wrote {folder}   next: flopwise profile why {folder}"])
