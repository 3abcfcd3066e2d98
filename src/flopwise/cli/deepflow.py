"""`--method deepflow`: the reference analytical model, whose hardware is made of technology and power."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import parse_sequences, parse_tokens, read_option
from flopwise.cli.options import Found, parse_changes, split_names
from flopwise.cli.output import one_or_all, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flopwise.cli.predict import PredictOptions
    from flopwise.references.deepflow import Configuration, DeepflowResult
    from flopwise.work.lstm import Lstm

PUBLISHED_TECHNOLOGY = "deepflow-2019"
"""The technology of the catalogue that the reference's searches were published with."""
APPLYING = ("model", "on", "seq", "batch", "change", "method", "print_out", "output")
"""Options of `predict` that the reference has a notion of."""


def predict_deepflow(options: PredictOptions, form: str) -> None:
    """`flopwise predict --method deepflow`, with the options of the command that apply to it."""
    from flopwise.references.deepflow import for_model, printout
    from flopwise.references.deepflow.report import deepflow_document, deepflow_record

    refuse_options(option for option in options.given if option not in APPLYING)
    if options.print_out and options.is_given("output"):
        raise _two_forms()
    batch, sequence = read_batch_and_sequence(options.batch, options.seq)
    models = [recurrent_model(name, options.change) for name in split_names(options.model, "a model")]
    places = split_names(options.on, "a technology (--on)") if options.is_given("on") else [PUBLISHED_TECHNOLOGY]
    results = []
    for place in places:
        configuration = configuration_of(place)
        for model in models:
            asked = for_model(configuration, model, batch_sequences=batch, sequence_tokens=sequence)
            results.append((in_range(partial(run_finite, asked), place), model.name, place))
    if options.print_out:
        if len(results) > 1:
            raise _one_print_out()
        typer.echo(printout(results[0][0]), nl=False)
        return
    records = [deepflow_record(result, model=model, hardware=place) for result, model, place in results]
    show(deepflow_document(records), one_or_all(records), form, schema="deepflow-prediction")


def read_batch_and_sequence(batch: str, seq: str) -> tuple[int | None, int | None]:
    """`--batch` and `--seq`; None where they are left open."""
    return read_option(batch, "batch", parse_sequences), read_option(seq, "seq", parse_tokens)


def recurrent_model(name: str, changes: list[str] | None) -> Lstm:
    """The model of that name, which has to be a recurrent one."""
    from flopwise.catalog.load import load_model
    from flopwise.work.lstm import Lstm

    model = load_model(name, parse_changes(changes))
    if not isinstance(model, Lstm):
        raise FlopwiseError(
            f"--method deepflow cannot predict {model.name}",
            why="its formulas are those of a recurrent language model, and this is a transformer",
            hint="--method physical, or another model: lstm-lm",
        )
    return model


def configuration_of(name: str) -> Configuration:
    """The configuration of a file, or of a technology of the catalogue; what it lacks is the published one's."""
    from flopwise.base.files import read_table
    from flopwise.catalog.load import technology_file
    from flopwise.references.deepflow import PUBLISHED, from_table

    if _is_device(name):
        raise _no_technology(name)
    path = technology_file(name)
    table = read_table(path)
    if "device" in table:
        raise _no_technology(name)
    if "technology" in table:
        raise FlopwiseError(
            f"{path} is a technology of ours, not a configuration of the reference",
            why="its names and units are others",
            hint=f"--method physical, or the reference's names: `flopwise show {PUBLISHED_TECHNOLOGY}`",
        )
    try:
        return from_table(table, base=PUBLISHED)
    except FlopwiseError as error:
        raise error.within(str(path), hint=f"`flopwise show {PUBLISHED_TECHNOLOGY}` prints one") from None


def run_finite(configuration: Configuration) -> DeepflowResult:
    """The reference's answer, unless its machine is infinitely fast or large."""
    from dataclasses import astuple
    from math import isfinite

    from flopwise.references.deepflow import run

    result = run(configuration)
    if not all(map(isfinite, (result.time_s, *astuple(result.machine)))):
        raise OverflowError
    return result


def in_range(compute: Callable[[], Found], where: str) -> Found:
    """What is computed; numbers that no float holds are the file's mistake."""
    try:
        return compute()
    except ArithmeticError as error:
        raise FlopwiseError(
            f"{where}: its numbers lead out of range",
            why=str(error) or "no number is as large or as small as the result",
            hint=f"energies in J, sizes in bytes, rates in bytes/s: `flopwise show {PUBLISHED_TECHNOLOGY}` prints some",
        ) from None


def refuse_options(given: Iterable[str]) -> None:
    """An option that would be passed over is a mistake."""
    for option in given:
        flag = f"--{option.replace('_', '-')}"
        raise FlopwiseError(
            f"{flag} means nothing to --method deepflow",
            why="the reference's formulas have no such setting: its file gives all but --batch, --seq and --set",
            hint=f"leave {flag} out, or --method physical",
        )


def refuse_print_out() -> FlopwiseError:
    """The answer to `--print-out` by the physical method."""
    return FlopwiseError(
        "--print-out belongs to --method deepflow",
        why="it is the print-out of that analytical model",
        hint="--method deepflow --print-out, or -o json for every figure of a prediction",
    )


def _two_forms() -> FlopwiseError:
    return FlopwiseError(
        "--print-out and --output were both given", why="the print-out is a form of its own", hint="keep one of them"
    )


def _one_print_out() -> FlopwiseError:
    return FlopwiseError(
        "--print-out prints one prediction",
        why="the reference's text does not say which model it is about",
        hint="run it once for each",
    )


def _is_device(name: str) -> bool:
    from flopwise.catalog.load import THIS_CPU, THIS_MACHINE, hardware_aliases, hardware_names

    lowered = name.lower()
    return lowered in (*hardware_names(), THIS_CPU, THIS_MACHINE) or lowered in hardware_aliases()


def _no_technology(name: str) -> FlopwiseError:
    return FlopwiseError(
        f"--method deepflow cannot predict on {name}",
        why="it makes its hardware of technology and shares of power, and this is a finished device",
        hint=f"--method physical, or a technology for it: a TOML as `flopwise show {PUBLISHED_TECHNOLOGY}` prints",
    )
