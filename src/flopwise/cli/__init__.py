"""The command line: parse, call, print. A module per command; what is heavy is imported where a command needs it."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

try:
    import typer

    from flopwise.base.processes import end_first_process_on_request
    from flopwise.cli import (
        calibrate,
        catalogue,
        compare,
        design,
        env,
        export,
        once,
        plan,
        predict,
        profile,
        profile_run,
        report,
        schema,
        serve,
        sweep,
        train,
        validate,
    )
except KeyboardInterrupt:
    # Most of a short run goes by here, before `main` could answer.
    sys.exit(130)

if TYPE_CHECKING:
    from flopwise.base.errors import FlopwiseError

app = typer.Typer(
    name="flopwise",
    cls=once.AsGivenGroup,
    help="How fast can this model train on this hardware, will it fit, and where does the time go?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

# The help page lists groups of commands (`profile`) after all others, else in this order.
app.command()(predict.predict)
app.command()(plan.plan)
app.command()(train.train)
profile.app.command(context_settings={"allow_interspersed_args": False})(profile_run.run)
app.add_typer(profile.app)
app.command()(profile.why)
app.command()(sweep.sweep)
app.command()(report.report)
app.command()(report.collect)
app.command()(compare.compare)
app.command()(serve.serve)
app.command()(export.export)
app.command()(design.design)
app.command()(validate.validate)
app.command()(calibrate.calibrate)
app.command("ls")(catalogue.list_catalogue)
app.command()(catalogue.show)
app.command()(env.env)
app.command()(schema.schema)
for command in (*app.registered_commands, *profile.app.registered_commands):
    command.cls = once.OnceCommand


def main() -> None:
    """Run the command line; a user's mistake is told in words and exits with 2."""
    end_first_process_on_request()
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> None:
    from flopwise.base.errors import FlopwiseError

    if sys.stderr is None:
        # Closed by the caller (`2>&-`): what would be said there goes nowhere.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - open as long as we run
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that is not UTF-8 shows ? for a sign it lacks; better than no answer.
        sys.stdout.reconfigure(errors="replace")
    try:
        if sys.stdout is None and sys.argv[1:3] != ["profile", "run"]:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        app()
    except FlopwiseError as error:
        _fail(error)
    except OSError as error:
        # Files are read with answers of their own, so it is the output that failed. What is still in its buffer
        # must go somewhere, or the interpreter complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        why = error.strerror or str(error)
        _fail(FlopwiseError("the answer cannot be written", why=why, hint="check where the output goes"), exit_code=1)


def _fail(error: FlopwiseError, exit_code: int | None = None) -> NoReturn:
    from flopwise.report.words import visible

    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    red, cyan, plain = ("\033[31m", "\033[36m", "\033[0m") if colour else ("", "", "")
    # Names and paths of others are in it.
    lines = [f"{red}error:{plain} {visible(error.what)}"]
    if error.why:
        lines += ["", f"  {visible(error.why)}"]
    if error.hint:
        lines += ["", f"{cyan}hint:{plain} {visible(error.hint)}"]
    typer.echo("\n".join(lines), err=True)
    if "RANK" in os.environ:
        from flopwise.engine.launch import note_refusal

        note_refusal(error)
    sys.exit(error.exit_code if exit_code is None else exit_code)


def _version(wanted: bool) -> None:
    if wanted:
        from flopwise import __version__

        typer.echo(f"flopwise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version
