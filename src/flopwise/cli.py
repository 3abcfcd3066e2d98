"""The command line: parse, call, print. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

try:
    import typer
except KeyboardInterrupt:
    # Most of a short run goes by here, before `main` could answer.
    sys.exit(130)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import RenderableType

    from flopwise.core.errors import FlopwiseError
    from flopwise.core.hardware import Hardware
    from flopwise.core.model import Model
    from flopwise.core.prediction import Prediction
    from flopwise.predict.choose import Request

app = typer.Typer(
    name="flopwise",
    help="How fast can this model train on this hardware, will it fit, and where does the time go?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

NARROWEST_TABLE = 80
WIDTH_WITHOUT_TERMINAL = 120
LEAST_DEVICE_BYTES = 2**20
"""Less than this is a forgotten unit: no device is that small."""
Found = TypeVar("Found")
FORMS = ("table", "md", "csv", "json")


def main() -> None:
    """Run the command line; a user's mistake is told in words and exits with 2."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> None:
    from flopwise.core.errors import FlopwiseError

    if sys.stderr is None:
        # Closed by the caller (`2>&-`): what would be said there goes nowhere.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - open as long as we run
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that is not UTF-8 shows ? for a sign it lacks; better than no answer.
        sys.stdout.reconfigure(errors="replace")
    try:
        if sys.stdout is None:
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
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    red, cyan, plain = ("\033[31m", "\033[36m", "\033[0m") if colour else ("", "", "")
    lines = [f"{red}error:{plain} {error.what}"]
    if error.why:
        lines += ["", f"  {error.why}"]
    if error.hint:
        lines += ["", f"{cyan}hint:{plain} {error.hint}"]
    typer.echo("\n".join(lines), err=True)
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


@app.command()
def predict(
    context: typer.Context,
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
    from flopwise.core.op import CONVENTIONS
    from flopwise.predict import step

    form = _one_of(output, FORMS, "--output")
    request = _request(locals())
    counting = _one_of(convention, CONVENTIONS, "--convention")
    changes = _changes(change or [])
    models = [load_model(name, changes) for name in _names(model, "a model")]
    machines = [_hardware(name) for name in _names(on, "a device (--on)")]
    if show_config:
        settings = [_settings(context, one, machine, request) for one in models for machine in machines]
        _print_settings(settings, form)
        return
    predictions = [step(one, machine, request, convention=counting) for one in models for machine in machines]
    _print_predictions(predictions, {machine.name: machine.title for machine in machines}, form)


def _print_predictions(predictions: list[Prediction], titles: dict[str, str], form: str) -> None:
    from flopwise.report import predictions as written

    if form == "json":
        typer.echo(written.predictions_json(predictions))
        return
    if form == "csv":
        typer.echo(written.predictions_csv(predictions), nl=False)
    elif form == "md":
        typer.echo(written.predictions_markdown(predictions), nl=False)
    elif len(predictions) == 1:
        _show(written.prediction_page(predictions[0], titles[predictions[0].hardware]))
        return
    else:
        _show(written.compared_table(predictions, _width()))
    # A page and JSON hold their notes; beside rows they are talk.
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
    from flopwise.report.tables import csv_text, fitting_columns, markdown_table, text_table

    kind = _one_of(what, ("models", "hardware"), "flopwise ls")
    form = _one_of(output, FORMS, "--output")
    columns: tuple[str, ...]
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
    elif form == "csv":
        typer.echo(csv_text([listings.flat_record(record) for record in records]), nl=False)
    elif form == "md":
        typer.echo(markdown_table(columns, rows, listings.WORDS), nl=False)
    else:
        shown = fitting_columns(columns, rows, _width(), listings.GIVING_WAY)
        _show(text_table(columns, rows, listings.WORDS, shown=shown))


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A model or a device: catalogue name or file.")],
    output: Annotated[str, typer.Option("--output", "-o", help="toml or json.")] = "toml",
    write: Annotated[str, typer.Option("--write", "-w", help="Write it to this file instead.")] = "",
) -> None:
    """Print the description of a model or a device, with the source of each fact; a file of your own starts here."""
    from pathlib import Path

    from flopwise.core.catalog import THIS_CPU, THIS_MACHINE, load_description, model_table
    from flopwise.core.files import plain, to_json, to_toml, write_whole
    from flopwise.core.hardware import Hardware

    form = _one_of(output, ("toml", "json"), "--output")
    found = _hardware(name) if name.lower() in (THIS_CPU, THIS_MACHINE) else load_description(name)
    table = plain(found) if isinstance(found, Hardware) else model_table(found)
    text = f"{to_json(table)}\n" if form == "json" else to_toml(table)
    if write:
        write_whole(Path(write), text)
        typer.echo(f"wrote {write}", err=True)
    else:
        typer.echo(text, nl=False)


@app.command()
def env(
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Print what this machine is and which versions are installed: what an issue report should carry."""
    from flopwise.core.files import to_json
    from flopwise.profile.environment import environment

    form = _one_of(output, ("table", "json"), "--output")
    facts = _told(environment)
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
    from flopwise.core.errors import FlopwiseError, nearest, shown

    known = tuple(choices)
    if value.lower() not in known:
        close = nearest(value, known)
        raise FlopwiseError(
            f"{what} cannot be {shown(value)}",
            why=f"it is one of {', '.join(known)}",
            hint=f"{what} {close[0] if close else known[0]}",
        )
    return value.lower()


def _hardware(name: str) -> Hardware:
    from flopwise.profile.this_machine import find_hardware

    return _told(lambda: find_hardware(name))


def _told(look: Callable[[], Found]) -> Found:
    """What `look` finds; what was odd about it is told beside the answer."""
    import warnings

    with warnings.catch_warnings(record=True) as odd:
        warnings.simplefilter("always", UserWarning)
        found = look()
    for warning in odd:
        typer.echo(f"note: {warning.message}", err=True)
    return found


def _request(words: dict[str, Any]) -> Request:
    """The options of `predict` as a request; `auto` leaves a choice to flopwise."""
    from typing import get_args

    from flopwise.core.errors import FlopwiseError
    from flopwise.core.formats import parse_formats
    from flopwise.core.op import AttentionKernel
    from flopwise.core.units import parse_sequences, parse_tokens
    from flopwise.core.work import RECOMPUTE_POLICIES
    from flopwise.core.workload import MOMENTS, Fusion
    from flopwise.predict.choose import Request

    def given(option: str, parse: Any) -> Any:  # noqa: ANN401 - a parser and what it returns
        text = words[option]
        if text.lower() == "auto":
            return None
        try:
            return parse(text)
        except FlopwiseError as error:
            raise error.within(f"--{option.replace('_', '-')}") from None

    recompute = _one_of(words["recompute"], ("auto", *RECOMPUTE_POLICIES), "--recompute")
    return Request(
        sequence_tokens=given("seq", parse_tokens),
        batch_sequences=given("batch", parse_sequences),
        batch_tokens=given("batch_tokens", parse_tokens),
        micro_batch_sequences=given("micro", parse_sequences),
        formats=given("precision", parse_formats),
        recompute=None if recompute == "auto" else recompute,
        attention=_one_of(words["attention"], get_args(AttentionKernel), "--attention"),
        fusion=_one_of(words["fusion"], get_args(Fusion), "--fusion"),
        optimizer=_one_of(words["optimizer"], tuple(MOMENTS), "--optimizer"),
        device_memory_bytes=given("device_mem", _device_bytes),
    )


def _device_bytes(text: str) -> int:
    from flopwise.core.errors import FlopwiseError
    from flopwise.core.units import parse_bytes

    size = parse_bytes(text)
    if size < LEAST_DEVICE_BYTES:
        unit_forgotten = text.strip().isdecimal() and size
        raise FlopwiseError(
            f"{size:,} bytes are no device's memory",
            why="a number without a unit counts bytes" if unit_forgotten else f"at least {LEAST_DEVICE_BYTES:,} are",
            hint=f"--device-mem {size if unit_forgotten else 40}GiB",
        )
    return size


def _changes(texts: list[str]) -> dict[str, Any]:
    """`layers=16` as a TOML value; a bare word is a string."""
    import tomllib

    from flopwise.core.errors import FlopwiseError, shown

    changes: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key or not text.isprintable():
            raise FlopwiseError(
                f"cannot read --set {shown(text)}",
                why="a field, = and a value are expected, on one line",
                hint="--set layers=16",
            )
        if key in changes:
            raise FlopwiseError(
                f"--set gives {shown(key)} twice", why="one value would be lost", hint=f"keep one --set {key}=…"
            )
        try:
            changes[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            changes[key] = value
        except (ValueError, RecursionError):
            raise FlopwiseError(
                f"cannot read --set {shown(text)}",
                why="the number has too many digits, or the lists are too deep",
                hint="--set layers=16",
            ) from None
    return changes


# -- from values to the terminal -------------------------------------------------------------------------------------


def _width() -> int:
    """Columns to write in: the terminal's, or what COLUMNS says, or enough for every table; never under 80."""
    import shutil

    return max(shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns, NARROWEST_TABLE)


def _show(page: RenderableType) -> None:
    from rich.console import Console

    # Names may hold [brackets] and :colons:, which are not ours to interpret.
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "width": _width()}
    if sys.stdout.isatty():
        Console(**plain).print(page, crop=False)
        return
    # Into a file or a pipe: without the blanks that pad a terminal's lines.
    text = io.StringIO()
    Console(**plain, file=text).print(page, crop=False)
    typer.echo("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


# -- every setting and where it came from ----------------------------------------------------------------------------


def _settings(context: typer.Context, model: Model, hardware: Hardware, request: Request) -> dict[str, dict[str, Any]]:
    """Setting → its value and its origin: the argument, a flag, a default, or `auto` and the reason."""
    from flopwise.predict.choose import capacity_bytes, choose

    chosen = choose(model, hardware, request)
    workload = chosen.workload

    def origin(option: str, setting: str = "") -> str:
        if setting in chosen.reasons:
            return f"auto: {chosen.reasons[setting]}"
        source = context.get_parameter_source(option)
        return "flag" if source is not None and source.name == "COMMANDLINE" else "default"

    batch = "batch" if request.batch_tokens is None else "batch_tokens"
    settings: dict[str, tuple[object, str]] = {
        "model": (model.name, "argument"),
        "hardware": (hardware.name, origin("on")),
        "sequence_tokens": (workload.sequence_tokens, origin("seq", "sequence_tokens")),
        "batch_sequences": (workload.batch_sequences, origin(batch, "batch_sequences")),
        "micro_batch_sequences": (workload.micro_batch_sequences, origin("micro", "micro_batch_sequences")),
        "precision": (workload.formats.name, origin("precision", "precision")),
        "recompute": (workload.recompute, origin("recompute", "recompute")),
        "device_memory_bytes": (
            capacity_bytes(hardware, request),
            "auto: the device's memory less a reserve" if request.device_memory_bytes is None else "flag",
        ),
        "optimizer": (workload.optimizer, origin("optimizer")),
        "attention": (workload.attention, origin("attention")),
        "fusion": (workload.fusion, origin("fusion")),
        "convention": (context.params["convention"].lower(), origin("convention")),
        "set": (_changes(context.params["change"] or []), origin("change")),
    }
    return {name: {"value": value, "from": where} for name, (value, where) in settings.items()}


def _print_settings(settings: Sequence[dict[str, dict[str, Any]]], form: str) -> None:
    from rich.table import Table

    from flopwise.core.files import to_json
    from flopwise.report.tables import csv_text, markdown_table

    columns = ("model", "hardware", "setting", "value", "from")
    rows = [
        [found["model"]["value"], found["hardware"]["value"], name, _setting_words(item["value"]), item["from"]]
        for found in settings
        for name, item in found.items()
    ]
    if form == "json":
        typer.echo(to_json(settings[0] if len(settings) == 1 else settings))
    elif form == "csv":
        typer.echo(csv_text([dict(zip(columns, row, strict=True)) for row in rows]), nl=False)
    elif form == "md":
        typer.echo(markdown_table(columns, rows, columns), nl=False)
    else:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in columns[2:]:
            table.add_column(name, no_wrap=name == "setting", overflow="fold")
        for row in rows:
            if row[2] == "model" and table.row_count:
                table.add_row()
            table.add_row(*row[2:])
        _show(table)


def _setting_words(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items()) or "-"
    return str(value)


if __name__ == "__main__":
    main()
