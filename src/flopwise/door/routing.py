"""How a mixture's experts are taken to be used, from what a caller has: words, shares, a file of them, or a profile."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.files import read_text
from flopwise.door.asking import RoutingGiven
from flopwise.work.model import Model
from flopwise.work.routing import MOST_SKEW, skew_of_busiest
from flopwise.work.transformer import Transformer

WAYS = "balanced, power-law=0.5, busiest=1.7, or a file: shares of experts (CSV, JSON), or a profile of a mixture"
BUSIEST = "busiest_expert"
"""What a profile calls the rows of a block's busiest expert over those of the mean one."""


def with_routing(model: Model, given: RoutingGiven) -> Model:
    """The model, its experts used so."""
    if not isinstance(model, Transformer) or not model.experts:
        raise FlopwiseError(
            f"{model.name} has no routing", why="it has no experts", hint="leave --routing out, or a mixture of experts"
        )
    if not isinstance(given, str | Path):
        return _with_shares(model, given)
    text = str(given).strip()
    word, equals, number = (part.strip() for part in text.partition("="))
    if text.lower() == "balanced":
        return replace(model, routing=replace(model.routing, skew=0.0, shares=()))
    if equals and word in ("power-law", "busiest"):
        found = _number(number, text)
        if word == "power-law":
            return _with_skew(model, found)
        return _with_busiest(model, found, text)
    return _of_file(model, Path(text))


def _number(text: str, given: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FlopwiseError(f"--routing cannot be {shown(given)}", why="a number follows =", hint=WAYS) from None


def _with_skew(model: Transformer, skew: float) -> Transformer:
    return replace(model, routing=replace(model.routing, skew=skew, shares=()))


def _with_busiest(model: Transformer, busiest: float, given: str) -> Transformer:
    """The power law whose most popular expert has so many times the mean's tokens."""
    most = model.experts / model.experts_per_token
    if not 1.0 <= busiest <= most:
        raise FlopwiseError(
            f"--routing {given}: the busiest of {model.experts} experts has {shown(busiest)} times the mean's tokens",
            why=f"each token has {model.experts_per_token} of them: from 1 to {most:g} is possible",
            hint=WAYS,
        )
    if busiest == 1.0:
        return _with_skew(model, 0.0)
    return _with_skew(model, min(MOST_SKEW, skew_of_busiest(busiest, model.experts, model.experts_per_token)))


def _with_shares(model: Transformer, given: Sequence[float] | Sequence[Sequence[float]]) -> Transformer:
    """One row of shares stands for all blocks."""
    try:
        plain = [float(each) for each in given if isinstance(each, Real)]
        rows: list[Sequence[float]] = [row for row in given if not isinstance(row, int | float | Real)]
        if plain and rows:
            raise ValueError("numbers among rows")
        shares = tuple(tuple(float(share) for share in row) for row in ([plain] if plain else rows))
    except (TypeError, ValueError):
        raise FlopwiseError("--routing: these are no shares of experts", why="rows of numbers are", hint=WAYS) from None
    if not shares:
        raise FlopwiseError("--routing without shares of experts", why="there is no row of numbers", hint=WAYS)
    return replace(model, routing=replace(model.routing, skew=0.0, shares=shares))


# -- files -----------------------------------------------------------------------------------------------------------


def _of_file(model: Transformer, path: Path) -> Transformer:
    text = read_text(path)
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip()[:1] in ("{", "["):
            raise FlopwiseError(f"{path} cannot be read as JSON", why=str(error), hint=WAYS) from None
        return _with_shares(model, list(_rows_of(text, path)))
    if isinstance(table, list):
        rows = table if table and isinstance(table[0], list) else [table]
        return _with_shares(model, rows)
    busiest = _busiest_of(table)
    if busiest is None:
        raise FlopwiseError(
            f"{path} does not tell how a mixture's experts are used",
            why=f"a profile of one has {BUSIEST} (`flopwise train … --profile`)",
            hint=WAYS,
        )
    return _with_busiest(model, busiest, str(path))


def _rows_of(text: str, path: Path) -> Iterator[list[float]]:
    """Lines of numbers; a first line of names is left out."""
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        try:
            yield [float(cell) for cell in line.split(",")]
        except ValueError:
            if number == 0 and len(lines) > 1:
                continue
            raise FlopwiseError(
                f"{path}, line {number + 1}: {shown(line)} are no shares of experts",
                why="a line has a number of each expert, with commas",
                hint=WAYS,
            ) from None


def _busiest_of(table: object) -> float | None:
    """Of a profile's JSON, wherever its figures stand."""
    if isinstance(table, dict):
        found = table.get(BUSIEST)
        value = found.get("value") if isinstance(found, dict) else found
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        table = list(table.values())
    if isinstance(table, list):
        return next((found for each in table if (found := _busiest_of(each)) is not None), None)
    return None
