"""`flopwise design`: technology and power → the device on which a model trains fastest."""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flopwise.base.errors import FlopwiseError, one_of, shown
from flopwise.base.units import read_option
from flopwise.cli.deepflow import (
    PUBLISHED_TECHNOLOGY,
    configuration_of,
    in_range,
    read_batch_and_sequence,
    recurrent_model,
    refuse_options,
)
from flopwise.cli.options import (
    METHODS,
    BatchOption,
    MethodOption,
    ModelArgument,
    Options,
    PrecisionOption,
    SequenceOption,
    SetOption,
    parse_changes,
    takes_options,
)
from flopwise.cli.output import progress_bar, say, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from flopwise.references.design.report import DesignRecord
    from flopwise.references.design.search import Blueprint, DesignedDevice, Objective, Search

LARGEST_POWER_W = 1e6
MOST_ITERATIONS, MOST_STARTS = 10_000, 1_000
_POWER = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(m|k|M|)(?:W|w)?\s*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class DesignOptions(Options):
    model: ModelArgument
    technology: Annotated[
        str, typer.Option(help="What can be built: a TOML as `flopwise show deepflow-2019` prints, or that name.")
    ] = PUBLISHED_TECHNOLOGY
    power: Annotated[str, typer.Option(help="Of the device: 300W. Default: what the technology's file says.")] = "auto"
    method: MethodOption = "physical"
    iterations: Annotated[str, typer.Option(help="Of the search from each start, at most.")] = "100"
    starts: Annotated[str, typer.Option(help="The technology's own shares first, then random ones.")] = "4"
    seed: Annotated[str, typer.Option(help="Of the random starts.")] = "0"
    seq: SequenceOption = "auto"
    batch: BatchOption = "auto"
    precision: PrecisionOption = "auto"
    change: SetOption = None
    write: Annotated[str, typer.Option("--write", "-w", help="Write the device found to this TOML, for --on.")] = ""
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table"


@takes_options
def design(options: DesignOptions) -> None:
    """Search how a device's power is best divided among arithmetic and memories, for the fastest training step."""
    from flopwise.references.design.report import design_document
    from flopwise.references.design.search import Search

    form = one_of(options.output, ("table", "json"), "--output")
    by = one_of(options.method, METHODS, "--method")
    search = Search(
        iterations=_parse_whole("iterations", options.iterations, 1, MOST_ITERATIONS),
        starts=_parse_whole("starts", options.starts, 1, MOST_STARTS),
        seed=_parse_whole("seed", options.seed, 0, 2**63),
    )
    if by == "deepflow":
        refuse_options(option for option in options.given if option == "precision")
    search_by = _search_by_deepflow if by == "deepflow" else _search_by_step
    designed, record = in_range(lambda: search_by(options, search), options.technology)
    if options.write:
        _write(designed, record, Path(options.write), options.model)
    show(design_document(record), record, form, schema="design")


def _search_by_deepflow(options: DesignOptions, search: Search) -> tuple[DesignedDevice, DesignRecord]:
    from flopwise.references.deepflow import for_model
    from flopwise.references.deepflow.report import ODDITIES
    from flopwise.references.design.report import design_record
    from flopwise.references.design.search import design_by_deepflow

    found = recurrent_model(options.model, options.change)
    batch, sequence = read_batch_and_sequence(options.batch, options.seq)
    configuration = configuration_of(options.technology)
    asked = for_model(configuration, found, batch_sequences=batch, sequence_tokens=sequence)
    watts = read_option(options.power, "power", parse_watts)
    if watts is not None:
        asked = replace(asked, power=replace(asked.power, budget_w=watts))
    with _bar(search, 5 if asked.parallel.grid_dimensions else 4) as watch:
        designed = design_by_deepflow(asked, search, watch)
    record = design_record(
        designed,
        search,
        model=found.name,
        technology=options.technology,
        method="deepflow",
        sequence_tokens=asked.model.sequence_tokens,
        batch_sequences=asked.model.batch_sequences,
        notes=(ODDITIES,),
    )
    return designed, record


def _search_by_step(options: DesignOptions, search: Search) -> tuple[DesignedDevice, DesignRecord]:
    from functools import partial

    from flopwise.catalog.load import load_model
    from flopwise.references.design.report import design_record
    from flopwise.references.design.search import PARTS, DesignQuestion, design_by_step
    from flopwise.setup.setup import Setup
    from flopwise.work.formats import parse_formats

    found = load_model(options.model, parse_changes(options.change))
    batch, sequence = read_batch_and_sequence(options.batch, options.seq)
    formats = read_option(options.precision, "precision", parse_formats)
    ask = partial(Setup, model=found, sequence_tokens=sequence, batch_sequences=batch, formats=formats)
    blueprint = _blueprint(options.technology, read_option(options.power, "power", parse_watts))
    if formats is None:
        _check_formats(options.technology, blueprint)
    with _bar(search, len(PARTS)) as watch:
        question = DesignQuestion(blueprint=blueprint, ask=lambda device: ask(hardware=device))
        designed = design_by_step(question, search, watch)
    prediction = designed.prediction
    assert prediction is not None  # the physical method predicts
    record = design_record(
        designed,
        search,
        model=found.name,
        technology=options.technology,
        method="physical",
        sequence_tokens=prediction.sequence_tokens,
        batch_sequences=prediction.batch_sequences,
    )
    return designed, record


def _write(designed: DesignedDevice, record: DesignRecord, path: Path, model: str) -> None:
    from flopwise.base.files import plain, to_toml, write_whole
    from flopwise.references.design.report import found_hardware

    write_whole(path, to_toml(plain(found_hardware(designed, record, path.stem))))
    say(f"wrote {path}   next: flopwise predict {model} --on {path}")


# -- from words to values --------------------------------------------------------------------------------------------


def _blueprint(name: str, power_w: float | None) -> Blueprint:
    """A technology by name or file, in the reference's names or in ours, with the power that was asked for."""
    from flopwise.base.files import decode, read_table
    from flopwise.catalog.load import technology_file
    from flopwise.references.design.search import Blueprint, blueprint_of

    path = technology_file(name)
    table = read_table(path)
    if "technology" in table:
        found = decode(table, Blueprint, str(path))
    else:
        try:
            found = blueprint_of(configuration_of(name))
        except FlopwiseError as error:
            raise error.within(str(path)) from None
    if power_w is None:
        return found
    return replace(found, budget=replace(found.budget, power_w=power_w))


def _check_formats(name: str, blueprint: Blueprint) -> None:
    """Of a technology's number formats one has to be among those that are chosen from."""
    known = ("bf16", "fp16", "fp32")
    there = blueprint.technology.core.energy_per_flop_j
    if not any(number_format in there for number_format in known):
        raise FlopwiseError(
            f"{name} has no number format that training is usually done in",
            why=f"it gives energies for {', '.join(there)}, not for {', '.join(known)}",
            hint="another technology, or --precision by hand; in the reference's files `precision = 4` is fp32, 2 bf16",
        )


def _parse_whole(option: str, text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise FlopwiseError(
            f"--{option} cannot be {shown(text)}",
            why=f"a whole number from {least:,} to {most:,} is expected",
            hint=f"--{option} {max(least, 4)}",
        )
    return number


def parse_watts(text: str) -> float:
    """Watts from `300W`, `0.7 kW` or a plain number."""
    found = _POWER.fullmatch(text)
    watts = float(found[1]) * {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6}[found[2]] if found else 0.0
    if not 0 < watts <= LARGEST_POWER_W:
        raise FlopwiseError(
            f"cannot take {shown(text)} for the power of a device",
            why=f"watts above 0 and up to {LARGEST_POWER_W:,.0f} are expected",
            hint="for instance 300W or 0.7kW",
        )
    return watts


# -- how far it is ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _bar(search: Search, parts: int) -> Iterator[Callable[[Objective], Objective]]:
    """Watches an objective being called, and shows a bar on a terminal's stderr once that takes long."""
    # Each iteration raises every share, takes a step, and at worst lowers every share; most searches end sooner.
    most = search.starts * (1 + search.iterations * (2 * parts + 1))
    tried = itertools.count(1)
    with progress_bar("divisions, at most") as tell:

        def watch(objective: Objective) -> Objective:
            def watched(shares: Mapping[str, float]) -> float:
                if tell is not None:
                    tell("", next(tried), most)
                return objective(shares)

            return watched

        yield watch
