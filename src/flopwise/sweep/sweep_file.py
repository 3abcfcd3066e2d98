"""`sweep.toml`: a grid and how it is run, written down.

[grid]
model = ["mpt-125m", "mpt-350m"]
seq = "512-8k*2"

[run]
steps = 20

[[cells]]
model = "mpt-1b"
seq = 2048

[[skip]]
model = "mpt-350m"
seq = "8k"
reason = "measured last week"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.base.files import read_table
from flopwise.sweep.grid import AXES, Axes, Skip, Words, read_axes, values_of

TABLES = ("grid", "run", "cells", "skip")
RUN_KEYS = ("steps", "repeat", "time_limit", "profile", "data", "tokenizer", "seed", "device", "name")
EXAMPLE = "[grid] model = 'mpt-125m', seq = '512-8k*2'; [run] steps = 20"
DEFAULT_REASON = "left out by the sweep's file"
SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepFile:
    """What a file says; its words are read when the flags are known that override them."""

    grid: dict[str, Words] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    cells: tuple[dict[str, Words], ...] = ()
    skip: tuple[Skip, ...] = ()


def read_sweep_file(path: Path) -> SweepFile:
    """A sweep's file, its keys checked."""
    where, table = str(path), read_table(path)
    if "architecture" in table or "model_type" in table or "device" in table:
        raise FlopwiseError(
            f"{path} is the description of a model or of hardware, not a sweep",
            why="a sweep's file has [grid] or [[cells]]",
            hint=f"--model {path}, or {EXAMPLE}",
        )
    _check_keys(table, TABLES, where, "table")
    if not table.get("grid") and not table.get("cells"):
        raise FlopwiseError(f"{path} has no cells", why="neither [grid] nor [[cells]] is there", hint=EXAMPLE)
    try:
        return SweepFile(
            grid=_words(_table(table.get("grid", {}), "[grid]"), AXES, "[grid]"),
            run=_run(_table(table.get("run", {}), "[run]")),
            cells=tuple(_words(cell, AXES, "[[cells]]") for cell in _tables(table, "cells")),
            skip=tuple(_skip(rule) for rule in _tables(table, "skip")),
        )
    except FlopwiseError as error:
        raise error.within(where) from None


def merged_words(file: SweepFile, flags: Mapping[str, Words]) -> dict[str, Words]:
    """The grid's words: what the flags say, else what the file says. A batch in one unit replaces one in the other."""
    kept = dict(file.grid)
    for given, other in (("batch", "batch_tokens"), ("batch_tokens", "batch")):
        if given in flags:
            kept.pop(other, None)
    return {**kept, **flags}


def all_axes(file: SweepFile, flags: Mapping[str, Words]) -> list[Axes]:
    """The grid's axes, and those of each further cell, which takes what it does not say from the grid."""
    words = merged_words(file, flags)
    found = [read_axes(words)] if words.get("model") or not file.cells else []
    for number, cell in enumerate(file.cells, start=1):
        shared = merged_words(SweepFile(grid=words), cell)
        try:
            axes = read_axes(shared)
            for name in AXES:
                if name not in cell and axes.counts[name] > 1:
                    raise FlopwiseError(
                        f"it does not say which {name.replace('_', '-')}",
                        why="the grid has several",
                        hint=f"{name} = …",
                    )
        except FlopwiseError as error:
            raise error.within(f"[[cells]] {number}") from None
        found.append(axes)
    return found


def parse_duration(text: str) -> float:
    """Seconds from `90s`, `10m`, `1.5h` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is None or match[2].lower() not in SECONDS:
        raise FlopwiseError(
            f"cannot read {shown(text)} as a time", why="a number with s, m or h is expected", hint="90s, 10m or 1.5h"
        )
    seconds = float(match[1]) * SECONDS[match[2].lower()]
    if not 0 < seconds <= 10**9 or not isfinite(seconds):
        raise FlopwiseError(f"nothing is done in {shown(text)}", why="a time limit is above 0", hint="90s, 10m or 1.5h")
    return seconds


# -- tables ----------------------------------------------------------------------------------------------------------


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str, kind: str) -> None:
    for key in table:
        if key.replace("-", "_") not in known:
            raise unknown_name(f"{kind} of {where}", key, known, hint=EXAMPLE)


def _table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FlopwiseError(f"{where} is {shown(value)}, not a table", hint=EXAMPLE)
    return value


def _tables(table: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = table.get(name, [])
    if not isinstance(value, list):
        raise FlopwiseError(f"[[{name}]] is written with two brackets", why="there may be several", hint=f"[[{name}]]")
    return [_table(item, f"[[{name}]]") for item in value]


def _words(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> dict[str, Words]:
    _check_keys(table, known, where, "key")
    found: dict[str, Words] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name == "set" and isinstance(value, dict):
            found[name] = value
            continue
        several = value if isinstance(value, list) else [value]
        if not several or not all(isinstance(item, str | int) and not isinstance(item, bool) for item in several):
            raise FlopwiseError(
                f"{where}: {key} cannot be {shown(value)}", why="a text, a whole number or a list of them", hint=EXAMPLE
            )
        found[name] = [str(item) for item in several]
    return found


def _skip(table: Mapping[str, Any]) -> Skip:
    reason = table.get("reason", DEFAULT_REASON)
    words = _words({key: value for key, value in table.items() if key != "reason"}, AXES, "[[skip]]")
    if not words or "set" in words or not isinstance(reason, str) or not reason.strip():
        why = "what it leaves out is not said" if not words else "its reason is a text, and it goes by what cells have"
        raise FlopwiseError("[[skip]] cannot be read", why=why, hint='[[skip]] model = "mpt-30b", seq = "64k"')
    return Skip(axes={name: values_of(name, given) for name, given in words.items()}, reason=reason)


def _run(table: dict[str, Any]) -> dict[str, Any]:
    """The options of a run under the names of the flags; numbers as words, which are read as the flags' are."""
    _check_keys(table, RUN_KEYS, "[run]", "key")
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        several = name == "data" and isinstance(value, list) and all(isinstance(item, str) for item in value)
        flag = name == "profile" and isinstance(value, bool)
        word = name != "profile" and isinstance(value, str | int) and not isinstance(value, bool)
        if not (several or flag or word):
            raise FlopwiseError(f"[run]: {key} cannot be {shown(value)}", hint=EXAMPLE)
        found[name] = value if flag else list(value) if several else [value] if name == "data" else str(value)
    return found
