"""`flopwise profile run -- python train.py`: somebody else's program under the profiler, as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopwise.cli.options import counted, value_of

if TYPE_CHECKING:
    from flopwise.profile.outside import Outcome

DEFAULT_FOLDER = "profile"
MOST_FOLDERS = 10_000

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

    A step ends with that of its optimizer; of a program that has none, with a call of its outermost module.
    """
    from flopwise.profile.outside import run_outside

    words = {"steps": steps, "warm_up": warm_up}
    traced, before = (value_of(words, name, counted(1, f"--{name.replace('_', '-')} 5")) or 1 for name in words)
    place = Path(folder) if folder else _free_folder()
    is_new = not place.exists()
    outcome = run_outside(command, place, warm_up=before, steps=traced)
    if not outcome.traces:
        _nothing(outcome, before + traced, place, is_new=is_new)
    _print(place, traced)
    if outcome.exit_code:
        typer.echo(f"note: the program ended with exit code {outcome.exit_code}", err=True)
        raise typer.Exit(outcome.exit_code)


def _free_folder() -> Path:
    names = (DEFAULT_FOLDER, *(f"{DEFAULT_FOLDER}-{number}" for number in range(2, MOST_FOLDERS)))
    return next(Path(name) for name in names if not Path(name).exists())


def _nothing(outcome: Outcome, steps: int, folder: Path, *, is_new: bool) -> None:
    """The program ran, and there is no profile of it."""
    from flopwise.core.errors import FlopwiseError

    if is_new and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if outcome.exit_code:
        typer.echo("flopwise: the program failed before its steps could be profiled", err=True)
        raise typer.Exit(outcome.exit_code)
    raise FlopwiseError(
        "there is nothing to profile in what ran",
        why=f"it took fewer than {steps} steps of a torch optimizer or module, or no torch, or profiled itself",
        hint="let it run longer, or --steps 1 --warm-up 1",
    )


def _print(folder: Path, steps: int) -> None:
    from flopwise.cli.output import progress_bar, show_page
    from flopwise.cli.profile import judged_by, judged_page
    from flopwise.core.files import write_whole
    from flopwise.core.store import PROFILE, to_text
    from flopwise.profile.reading import read_profiles

    with progress_bar("reading") as tell:
        profiles = [profile for read in read_profiles([folder], tell) for profile in read.profiles]
    write_whole(folder / PROFILE, to_text(profiles) + "\n")
    show_page(judged_page(judged_by(profiles)))
    if any(profile.steps is not None and profile.steps < steps for profile in profiles):
        typer.echo(f"note: the program ended before {steps} steps were traced", err=True)
    typer.echo(f"wrote {folder}   next: flopwise profile why {folder}", err=True)
