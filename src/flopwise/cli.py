"""The command line: parse, call, print. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from flopwise.core.errors import FlopwiseError
    from flopwise.core.hardware import Hardware
    from flopwise.core.prediction import Prediction
    from flopwise.predict.choose import Request

app = typer.Typer(
    name="flopwise",
    help="How fast can this model train on this hardware, will it fit, and where does the time go?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

NARROWEST_TABLE = 80
WIDTH_WITHOUT_TERMINAL = 120
NARROWEST_TITLE = 24


def main() -> None:
    """Run the command line; a user's mistake is told in words and exits with 2."""
    from flopwise.core.errors import FlopwiseError

    try:
        app()
    except FlopwiseError as error:
        _fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader has gone (`flopwise ls models | head`); a second complaint at exit helps nobody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(error: FlopwiseError) -> NoReturn:
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    red, cyan, plain = ("\033[31m", "\033[36m", "\033[0m") if colour else ("", "", "")
    lines = [f"{red}error:{plain} {error.what}"]
    if error.why:
        lines += ["", f"  {error.why}"]
    if error.hint:
        lines += ["", f"{cyan}hint:{plain} {error.hint}"]
    typer.echo("\n".join(lines), err=True)
    sys.exit(error.exit_code)


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


@app.command()
def predict(
    model: Annotated[
        str, typer.Argument(help="Catalogue name, config.json or its folder, or a TOML; several with commas.")
    ],
    on: Annotated[
        str, typer.Option(help="Hardware: catalogue name or TOML, several with commas; this-machine, this-cpu.")
    ] = "this-machine",
    seq: Annotated[str, typer.Option(help="Tokens of a sequence: 8192, 8k.")] = "auto",
    batch: Annotated[str, typer.Option(help="Sequences of a step, over all micro-batches.")] = "auto",
    batch_tokens: Annotated[str, typer.Option(help="The same in tokens: 512k, 2M.")] = "auto",
    micro: Annotated[str, typer.Option(help="Sequences that run at once; need not divide the batch.")] = "auto",
    precision: Annotated[
        str,
        typer.Option(help="bf16, bf16-mixed, bf16-amp, fp16-mixed, fp16-amp, fp32, tf32, fp8; changes as key=format."),
    ] = "auto",
    recompute: Annotated[
        str, typer.Option(help="What backward makes again: none, everything, attention, context, input, full.")
    ] = "auto",
    optimizer: Annotated[str, typer.Option(help="adamw, lion or sgd.")] = "adamw",
    attention: Annotated[str, typer.Option(help="flash or eager.")] = "flash",
    fusion: Annotated[str, typer.Option(help="fused (compiled or hand-written kernels) or eager.")] = "fused",
    convention: Annotated[
        str, typer.Option(help="How model FLOPs are counted: causal (half the square) or palm (6·N + full square).")
    ] = "causal",
    device_mem: Annotated[str, typer.Option(help="Cap on device memory: 40GiB. Default: all of it.")] = "auto",
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field of the model: --set layers=16. Repeatable.")
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="table, md, csv or json.")] = "table",
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print every setting and where it came from, and stop.")
    ] = False,
) -> None:
    """Predict a training step: time, tokens per second, MFU, HFU, memory by owner, what binds each operator."""
    from flopwise.core.catalog import load_model
    from flopwise.predict import step
    from flopwise.predict.choose import choose

    form = _one_of(output, ("table", "md", "csv", "json"), "--output")
    request = _request(locals())
    counting = _one_of(convention, ("causal", "palm"), "--convention")
    changes = _changes(change or [])
    models = [load_model(name, changes) for name in _names(model, "a model")]
    machines = [_hardware(name) for name in _names(on, "a device (--on)")]
    if show_config:
        _show_config(choose(models[0], machines[0], request), request, models[0].name, machines[0].name)
        return
    predictions = [step(one, machine, request, convention=counting) for one in models for machine in machines]
    _print_predictions(predictions, {machine.name: machine.title for machine in machines}, form)


def _print_predictions(predictions: list[Prediction], titles: dict[str, str], form: str) -> None:
    from flopwise.report import predictions as written

    if form == "json":
        typer.echo(written.predictions_json(predictions))
    elif form == "csv":
        typer.echo(written.predictions_csv(predictions), nl=False)
    elif form == "md":
        typer.echo(written.predictions_markdown(predictions), nl=False)
    elif len(predictions) == 1:
        _show(written.prediction_page(predictions[0], titles[predictions[0].hardware]))
    else:
        _show(written.compared_table(predictions))
        for note in dict.fromkeys(note for prediction in predictions for note in prediction.notes):
            typer.echo(f"note: {note}", err=True)


@app.command("ls")
def list_catalogue(
    what: Annotated[str, typer.Argument(help="models or hardware.")] = "models",
    output: Annotated[str, typer.Option("--output", "-o", help="table, md, csv or json.")] = "table",
) -> None:
    """List the models or the hardware of the catalogue."""
    from flopwise.core.catalog import hardware_names, load_hardware, load_model, model_names
    from flopwise.core.files import to_json
    from flopwise.report import listings

    kind = _one_of(what, ("models", "hardware"), "what to list")
    form = _one_of(output, ("table", "md", "csv", "json"), "--output")
    if kind == "models":
        models = [load_model(name) for name in model_names()]
        records = [listings.model_record(model) for model in models]
        columns, rows = listings.MODEL_COLUMNS, listings.model_rows(models)
    else:
        devices = [load_hardware(name) for name in hardware_names()]
        records = [listings.hardware_record(device) for device in devices]
        columns, rows = listings.HARDWARE_COLUMNS, listings.hardware_rows(devices)
    if form == "json":
        typer.echo(to_json(records))
    else:
        _print_rows(columns, rows, listings.WORDS, form)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A model or a device: catalogue name or file.")],
    output: Annotated[str, typer.Option("--output", "-o", help="toml or json.")] = "toml",
) -> None:
    """Print the description of a model or a device, with the source of each fact; a file of your own starts here."""
    from flopwise.core.catalog import hardware_aliases, hardware_names, model_names
    from flopwise.core.errors import unknown_name
    from flopwise.core.files import plain, to_json, to_toml
    from flopwise.profile.this_machine import THIS_CPU, THIS_MACHINE

    form = _one_of(output, ("toml", "json"), "--output")
    lowered = name.lower()
    table: dict[str, Any]
    if lowered in (*hardware_names(), THIS_CPU, THIS_MACHINE):
        table = plain(_hardware(lowered))
    elif lowered in model_names() or "/" in name or "." in name:
        table = _described_file(name)
    elif lowered in hardware_aliases():
        table = plain(_hardware(lowered))
    else:
        known = (*model_names(), *hardware_names(), THIS_CPU, THIS_MACHINE)
        raise unknown_name("model or hardware", name, known, hint="`flopwise ls models` or `flopwise ls hardware`")
    typer.echo(to_json(table) if form == "json" else to_toml(table), nl=form == "json")


def _described_file(name: str) -> dict[str, Any]:
    """A model of the catalogue, or a file that holds either kind of description."""
    from pathlib import Path

    from flopwise.core.catalog import load_hardware, load_model
    from flopwise.core.files import plain, read_table
    from flopwise.core.lstm import Lstm

    path = Path(name)
    if path.is_file() and "device" in read_table(path):
        return plain(load_hardware(name))
    model = load_model(name)
    return {"architecture": "lstm" if isinstance(model, Lstm) else "transformer", **plain(model)}


@app.command()
def env(
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Print what this machine is and which versions are installed: what an issue report should carry."""
    from flopwise.core.files import to_json
    from flopwise.profile.environment import environment

    form = _one_of(output, ("table", "json"), "--output")
    facts = environment()
    if form == "json":
        typer.echo(to_json(facts))
    else:
        width = max(map(len, facts))
        for key, value in facts.items():
            typer.echo(f"{key.ljust(width)}  {'-' if value is None else value}")


# -- from words to values --------------------------------------------------------------------------------------------


def _names(text: str, what: str) -> list[str]:
    from flopwise.core.errors import FlopwiseError

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise FlopwiseError(f"{what} must be named", hint="`flopwise ls models` and `flopwise ls hardware` list them")
    return names


def _one_of(value: str, choices: Iterable[str], what: str) -> Any:  # noqa: ANN401 - one of a Literal's words
    from flopwise.core.errors import unknown_name

    known = tuple(choices)
    if value.lower() not in known:
        raise unknown_name(f"value of {what}", value, known, hint=f"{what} is one of {', '.join(known)}")
    return value.lower()


def _hardware(name: str) -> Hardware:
    from flopwise.core.catalog import load_hardware
    from flopwise.profile import this_machine

    if name.lower() == this_machine.THIS_MACHINE:
        return this_machine.this_machine()
    if name.lower() == this_machine.THIS_CPU:
        return this_machine.this_cpu()
    return load_hardware(name)


def _request(words: dict[str, Any]) -> Request:
    """The options of `predict` as a request; `auto` leaves a choice to flopwise."""
    from flopwise.core.errors import FlopwiseError
    from flopwise.core.formats import parse_formats
    from flopwise.core.units import parse_bytes, parse_sequences, parse_tokens
    from flopwise.core.work import RECOMPUTE_POLICIES
    from flopwise.core.workload import MOMENTS
    from flopwise.predict.choose import Request

    def given(option: str, parse: Any) -> Any:  # noqa: ANN401 - a parser and what it returns
        text = words[option]
        if text == "auto":
            return None
        try:
            return parse(text)
        except FlopwiseError as error:
            raise error.within(f"--{option.replace('_', '-')}") from None

    return Request(
        sequence_tokens=given("seq", parse_tokens),
        batch_sequences=given("batch", parse_sequences),
        batch_tokens=given("batch_tokens", parse_tokens),
        micro_batch_sequences=given("micro", parse_sequences),
        formats=given("precision", parse_formats),
        recompute=given("recompute", lambda text: _one_of(text, RECOMPUTE_POLICIES, "--recompute")),
        attention=_one_of(words["attention"], ("flash", "eager"), "--attention"),
        fusion=_one_of(words["fusion"], ("fused", "eager"), "--fusion"),
        optimizer=_one_of(words["optimizer"], tuple(MOMENTS), "--optimizer"),
        device_memory_bytes=given("device_mem", parse_bytes),
    )


def _changes(texts: list[str]) -> dict[str, Any]:
    """`layers=16` as a TOML value; a bare word is a string."""
    import tomllib

    from flopwise.core.errors import FlopwiseError

    changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise FlopwiseError(
                f"cannot read --set {text!r}", why="a field, = and a value are expected", hint="--set layers=16"
            )
        try:
            changes[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            changes[key.strip()] = value.strip()
    return changes


# -- from values to the terminal -------------------------------------------------------------------------------------


def _width() -> int:
    """Columns to write in: the terminal's, or what COLUMNS says, or enough for every table; never under 80."""
    import shutil

    return max(shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns, NARROWEST_TABLE)


def _show(page: RenderableType) -> None:
    import io

    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False, width=_width()).print(page)
        return
    # Into a file or a pipe: without the blanks that pad a terminal's lines.
    text = io.StringIO()
    Console(highlight=False, width=_width(), file=text).print(page)
    typer.echo("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def _print_rows(columns: tuple[str, ...], rows: list[list[str]], words: set[str], form: str) -> None:
    import csv

    from flopwise.report.predictions import markdown_table

    if form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    elif form == "md":
        typer.echo(markdown_table(columns, rows, words), nl=False)
    else:
        _show_listing(columns, rows, words)


def _show_listing(columns: tuple[str, ...], rows: list[list[str]], words: set[str]) -> None:
    """Rows in columns; the title, which comes last, gives way in a terminal that has no room for it."""
    from rich.table import Table

    widths = [max(len(cells[index]) for cells in (columns, *rows)) + 2 for index in range(len(columns))]
    shown = len(columns) if _width() - sum(widths[:-1]) >= NARROWEST_TITLE else len(columns) - 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns[:shown]:
        table.add_column(name, justify="left" if name in words else "right", no_wrap=name != "title")
    for row in rows:
        table.add_row(*row[:shown])
    _show(table)


def _show_config(chosen: Any, request: Request, model: str, hardware: str) -> None:  # noqa: ANN401
    """Every setting, its value, and whether it was given, chosen (and why) or a default."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("setting", "value", "from"):
        table.add_column(name)
    table.add_row("model", model, "argument")
    table.add_row("hardware", hardware, "--on")
    workload = chosen.workload
    for field in ("sequence_tokens", "batch_sequences", "micro_batch_sequences", "recompute"):
        asked = getattr(request, field) is not None or (field == "batch_sequences" and request.batch_tokens is not None)
        table.add_row(
            field, str(getattr(workload, field)), "flag" if asked else f"auto: {chosen.reasons.get(field, '')}"
        )
    table.add_row(
        "precision", workload.formats.name, "flag" if request.formats else f"auto: {chosen.reasons['precision']}"
    )
    for field in ("attention", "fusion", "optimizer"):
        table.add_row(field, str(getattr(workload, field)), "flag or default")
    _show(table)


if __name__ == "__main__":
    main()
