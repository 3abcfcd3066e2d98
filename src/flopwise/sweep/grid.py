"""From words to cells: the axes of a grid, and every combination of them as settings, before anything runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, TypeVar

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.base.files import parse_toml
from flopwise.base.units import (
    AUTO,
    Auto,
    parse_byte_list,
    parse_counts,
    parse_devices,
    parse_sequences,
    parse_tokens,
    present,
    show_bytes,
)
from flopwise.catalog.load import hardware_place, load_model, model_table
from flopwise.predict.choose import usual_formats
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import default_sequence
from flopwise.setup.trained import TrainedWords, task_of
from flopwise.setup.training import Task
from flopwise.setup.written import CellSetup, cell_id
from flopwise.work.formats import parse_formats
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer

MOST_CELLS = 100_000
"""More than this is a mistake: nobody waits for it, and nobody reads it."""
LEAST_MEMORY_BYTES = 2**20
"""A cap below this is a forgotten unit."""
CPU_SEQUENCE_TOKENS = 256
"""On a CPU a sequence is no longer than this unless it is asked for, as with `flopwise train`."""
CPU_BATCH_SEQUENCES = 8

SWEPT_TASKS: tuple[Task | Auto, ...] = (AUTO, "language", "masked", "classification")
AXES = (
    *("model", "set", "task", "on", "gpus", "seq", "batch", "batch_tokens", "micro", "precision"),
    *("device_mem", "host_mem"),
)
"""Names of the axes, as options and as keys of a sweep's file; the last ones vary fastest."""

Words = str | Sequence[str] | Mapping[str, Any]
"""What an axis was given: one text with commas and ranges, or several; `set` may be a table."""
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The values of every axis, in the order in which they were given, each once."""

    model: tuple[str, ...]
    set: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Field of a model → its values."""
    task: tuple[Task | Auto, ...] = (AUTO,)
    """What models are trained for, with the head of that; auto: what they are."""
    on: tuple[str, ...] = ("this-machine",)
    gpus: tuple[int, ...] = (1,)
    seq: tuple[int | Auto, ...] = (AUTO,)
    batch: tuple[int | Auto, ...] = ()
    """None is given: auto, or on a CPU eight sequences for each device, as with `flopwise train`."""
    batch_tokens: tuple[int, ...] = ()
    """Divided by each sequence length on its own; where there are any, `batch` is not looked at."""
    micro: tuple[int | Auto, ...] = (AUTO,)
    precision: tuple[str, ...] = (AUTO,)
    device_mem: tuple[int | None, ...] = (None,)
    host_mem: tuple[int | None, ...] = (None,)

    @property
    def counts(self) -> dict[str, int]:
        """Axis → how many values it has."""
        found = {name: max(1, len(getattr(self, name))) for name in AXES if name != "set"}
        found["set"] = prod(len(values) for _, values in self.set)
        found["batch" if self.batch_tokens else "batch_tokens"] = 1
        return found

    @property
    def cells(self) -> int:
        """Combinations, duplicates counted."""
        return prod(self.counts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """Cells that are left out: those that have one of the values given on every axis that is given."""

    axes: Mapping[str, tuple[Any, ...]]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The cells of a sweep in their order, each once."""

    settings: tuple[CellSetup, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Cell → why it is left out."""


# -- words to axes ---------------------------------------------------------------------------------------------------


def read_axes(words: Mapping[str, Words]) -> Axes:
    """The axes that were named; those that were not have one value each, which flopwise chooses."""
    for name in words:
        if name not in AXES:
            raise unknown_name("axis of a sweep", name, AXES, hint=f"one of {', '.join(AXES)}")
    if not words.get("model"):
        raise FlopwiseError("a sweep needs a model", hint="--model mpt-125m,mpt-350m (`flopwise ls models`)")
    values: dict[str, Any] = {name: values_of(name, given) for name, given in words.items()}
    if values.get("batch_tokens") and values.get("batch", (AUTO,)) != (AUTO,):
        raise FlopwiseError(
            "--batch beside --batch-tokens",
            why="one follows from the other and the sequence length",
            hint="one of them",
        )
    return Axes(**values)


def values_of(axis: str, given: Words) -> tuple[Any, ...]:
    """The values of an axis; a mistake in them is told with the axis's name."""
    try:
        if axis == "set":
            return _changes(given)
        texts = [given] if isinstance(given, str) else [str(text) for text in given]
        found = [value for text in texts for value in _READERS[axis](text)]
        if not found:
            raise FlopwiseError("nothing is given", hint="leave it out, or give it a value")
    except FlopwiseError as error:
        raise error.within(f"--{axis.replace('_', '-')}") from None
    return tuple(dict.fromkeys(found))


def _names(text: str) -> list[str]:
    return [present(part, text).strip() for part in text.split(",")]


def _tasks(text: str) -> list[Task | Auto]:
    found = []
    for part in text.split(","):
        word = present(part, text).strip().lower()
        known = next((task for task in SWEPT_TASKS if task == word), None)
        if known is None:
            raise unknown_name("task of a sweep", word, SWEPT_TASKS, hint="--task masked")
        found.append(known)
    return found


def _precisions(text: str) -> list[str]:
    """Policies; `key=format` changes the one before it: `bf16,gradients=fp32,fp32` are two."""
    found: list[str] = []
    for part in text.split(","):
        if "=" in present(part, text) and found:
            found[-1] += f",{part.strip()}"
        else:
            found.append(part.strip())
    return [AUTO if name.lower() == AUTO else parse_formats(name).name for name in found]


def _caps(text: str, *, host: bool) -> list[int | None]:
    """Sizes in bytes; a unit at the end stands for all that have none. `auto`: no cap; `none`: no host memory."""
    words: dict[str, int | None] = {AUTO: None, "none": 0} if host else {AUTO: None}
    sized = [part.strip() for part in text.split(",") if part.strip().lower() not in words]
    unit = re.search(r"[A-Za-z]+$", sized[-1]) if sized else None
    found: list[int | None] = []
    for part in text.split(","):
        plain = present(part, text).strip()
        if plain.lower() in words:
            found.append(words[plain.lower()])
            continue
        sizes = parse_byte_list(plain if unit is None or plain[-1:].isalpha() else plain + unit[0])
        for size in sizes:
            if size < LEAST_MEMORY_BYTES and not (host and not size):
                raise FlopwiseError(
                    f"{size:,} bytes are no {'host' if host else 'device'}'s memory",
                    why="a number without a unit counts bytes",
                    hint=f"{size or 40}GiB",
                )
        found += sizes
    return found


_READERS: dict[str, Callable[[str], Sequence[Any]]] = {
    "model": _names,
    "task": _tasks,
    "on": _names,
    "gpus": partial(parse_counts, parse=parse_devices, example="1,2,4,8 or 1-8*2"),
    "seq": partial(parse_counts, parse=parse_tokens, example="2k,8k or 512-8k*2", auto=True),
    "batch": partial(parse_counts, parse=parse_sequences, example="64,256 or 8-64*2", auto=True),
    "batch_tokens": partial(parse_counts, parse=parse_tokens, example="512k,2M or 512k-4M*2"),
    "micro": partial(parse_counts, parse=parse_sequences, example="1,2,4 or 1-16+5", auto=True),
    "precision": _precisions,
    "device_mem": partial(_caps, host=False),
    "host_mem": partial(_caps, host=True),
}


def _changes(given: Words) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Fields of a model and the values that each is to have: `layers=2,4`, `layers=2-16*2`, `tied=true`."""
    if isinstance(given, Mapping):
        pairs = [(str(key), value) for key, value in given.items()]
    else:
        texts = [given] if isinstance(given, str) else [str(text) for text in given]
        pairs = [_change(text) for text in texts]
    found: dict[str, tuple[Any, ...]] = {}
    for key, value in pairs:
        if key in found:
            raise FlopwiseError(f"{shown(key)} is given twice", why="one would be lost", hint=f"{key}=2,4")
        several = value if isinstance(value, list) else [value]
        values = [one for item in several for one in (_change_to(item) if isinstance(item, str) else [item])]
        found[key] = tuple({repr(one): one for one in values}.values())
    return tuple(found.items())


def _change(text: str) -> tuple[str, str]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key or not value or not text.isprintable():
        raise FlopwiseError(
            f"cannot read {shown(text)}", why="a field, = and a value are expected", hint="--set layers=2,4"
        )
    return key, value


def _change_to(text: str) -> list[Any]:
    values: list[Any] = []
    for part in text.split(","):
        if re.fullmatch(r"\s*\d+\w?-\d+\w?[+*]\d+\w?\s*", part):
            values += parse_counts(part, parse_tokens, "layers=2-16*2")
            continue
        try:
            plain = present(part, text).strip()
            values.append(parse_toml(f"value = {plain}")["value"] if plain.isprintable() else plain)
        except (ValueError, RecursionError):
            values.append(part.strip())
    return values


# -- axes to cells ---------------------------------------------------------------------------------------------------


def expand(axes: Axes, hardware: Mapping[str, Hardware], skip: Sequence[Skip] = ()) -> Grid:
    """Every combination once, in a fixed order. `hardware`: what the names of `axes.on` stand for."""
    check_count(axes)
    settings: dict[tuple[Any, ...], CellSetup] = {}
    skipped: dict[str, str] = {}
    models = [(model, model_table(model)) for model in models_of(axes)]
    batches: tuple[int | Auto | None, ...] = axes.batch_tokens or axes.batch or (None,)
    tokens = bool(axes.batch_tokens)
    rest = (axes.on, axes.gpus, axes.seq, batches, axes.micro, axes.precision, axes.device_mem, axes.host_mem)
    formats: dict[tuple[int, str, str], str] = {}
    for index, (model, table) in enumerate(models):
        for on, gpus, seq, batch, micro, precision, device_mem, host_mem in itertools.product(*rest):
            machine = hardware[on]
            if (index, on, precision) not in formats:
                formats[index, on, precision] = usual_formats(machine, model).name if precision == AUTO else precision
            length = _default_sequence(model, machine) if seq == AUTO else seq
            sequences = _batch(machine, gpus, batch, length if tokens else None)
            cell = CellSetup(
                model=table,
                hardware=hardware_word(on, machine),
                devices=gpus,
                sequence_tokens=length,
                batch_sequences=sequences,
                micro_batch_sequences=micro,
                precision=formats[index, on, precision],
                task=task_of(model),
                device_memory_bytes=device_mem,
                host_memory_bytes=host_mem,
            )
            key = (index, cell.hardware, gpus, length, sequences, micro, cell.precision, device_mem, host_mem)
            if key in settings:
                continue
            why = why_left_out(cell, skip, on)
            if why is None:
                _check(cell, model, batch if tokens and batch != AUTO else None)
            elif sequences == 0:
                continue
            else:
                skipped[cell_id(cell)] = why
            settings[key] = cell
    return Grid(settings=tuple(settings.values()), skipped=skipped)


def join_grids(grids: Sequence[Grid]) -> Grid:
    """Several grids as one, what they have in common once."""
    found = {cell_id(settings): settings for grid in grids for settings in grid.settings}
    return Grid(
        settings=tuple(found.values()),
        skipped={cell: why for grid in grids for cell, why in grid.skipped.items()},
    )


def check_count(axes: Axes) -> None:
    """Refuse a grid that is too large before any of it is made."""
    if axes.cells > MOST_CELLS:
        counts = sorted(axes.counts.items(), key=lambda item: -item[1])
        words = " × ".join(f"{count:,} {name.replace('_', '-')}" for name, count in counts if count > 1)
        raise FlopwiseError(
            f"{axes.cells:,} cells are too many",
            why=f"{words}, and at most {MOST_CELLS:,} are made",
            hint=f"fewer values of --{counts[0][0].replace('_', '-')}, or several sweeps",
        )


def models_of(axes: Axes) -> list[Model]:
    """The models of a grid with every combination of the changes, equal ones once."""
    check_count(axes)
    keys = [key for key, _ in axes.set]
    combinations = [
        dict(zip(keys, values, strict=True)) for values in itertools.product(*(values for _, values in axes.set))
    ]
    described = [load_model(name, changes) for name in axes.model for changes in combinations]
    words = [TrainedWords(task=None if task == AUTO else task) for task in axes.task]
    return list(dict.fromkeys(each.of(model) for model in described for each in words))


def hardware_word(named: str, hardware: Hardware) -> str:
    """How a cell names its hardware: by the whole path of the file that was named, else by its name in the catalogue.

    A sweep may be resumed from another folder, and the same file is one hardware wherever it is named from.
    """
    is_file = "/" in named or named.endswith((".toml", ".json"))
    return hardware_place(named) if is_file else hardware.name


def _batch(hardware: Hardware, devices: int, given: int | Auto | None, sequence_tokens: int | None) -> int | Auto:
    """Sequences of a step; `sequence_tokens`: what is given counts tokens, of sequences of this length."""
    if given is None:
        return CPU_BATCH_SEQUENCES * devices if hardware.device.kind == "cpu" else AUTO
    return given if sequence_tokens is None or given == AUTO else given // sequence_tokens


def _default_sequence(model: Model, hardware: Hardware) -> int:
    return min(model.context, CPU_SEQUENCE_TOKENS) if hardware.device.kind == "cpu" else default_sequence(model)


def why_left_out(cell: CellSetup, skip: Sequence[Skip], on: str = "") -> str | None:
    """Why a cell is left out, where it is; `on`: what its hardware was called, if otherwise than in the cell."""
    return next((rule.reason for rule in skip if _matches(rule, cell, on)), None)


def _matches(rule: Skip, cell: CellSetup, on: str) -> bool:
    batch = cell.batch_sequences
    mine: dict[str, tuple[Any, ...]] = {
        "model": (cell.model_name, cell.model_name.partition("+")[0]),
        "task": (cell.task,),
        "on": (on, cell.hardware),
        "gpus": (cell.devices,),
        "seq": (cell.sequence_tokens,),
        "batch": (batch,),
        "batch_tokens": () if batch == AUTO else (batch * cell.sequence_tokens,),
        "micro": (cell.micro_batch_sequences,),
        "precision": (cell.precision,),
        "device_mem": (cell.device_memory_bytes,),
        "host_mem": (cell.host_memory_bytes,),
    }
    return all(set(mine[axis]) & set(values) for axis, values in rule.axes.items())


# -- what cannot be meant --------------------------------------------------------------------------------------------


def label(settings: CellSetup) -> str:
    """A cell in a few words."""
    batch = settings.batch_sequences
    parts = [settings.model_name, f"sequence {settings.sequence_tokens:,}"]
    parts.append(f"batch {batch if batch == AUTO else format(batch, ',')}")
    if settings.micro_batch_sequences != AUTO:
        parts.append(f"micro {settings.micro_batch_sequences}")
    parts.append(f"{settings.devices:,} × {settings.hardware_name}")
    parts.append(settings.precision)
    if settings.device_memory_bytes is not None:
        parts.append(f"device {show_bytes(settings.device_memory_bytes)}")
    if settings.host_memory_bytes is not None:
        parts.append(f"host {show_bytes(settings.host_memory_bytes)}")
    return " · ".join(parts)


def _check(cell: CellSetup, model: Model, batch_tokens: int | None) -> None:
    """Refuse a combination that contradicts itself, and say which one it is."""
    seq, batch, micro = cell.sequence_tokens, cell.batch_sequences, cell.micro_batch_sequences
    what = why = hint = ""
    if batch_tokens is not None and batch_tokens % seq:
        what = f"{batch_tokens:,} tokens of a batch are no whole number of sequences of {seq:,}"
        why = "it is less than one" if batch_tokens < seq else "a batch is made of whole sequences"
        hint = f"--batch-tokens {max(1, round(batch_tokens / seq)) * seq}, or other lengths"
    elif batch == AUTO:
        if micro != AUTO:
            what, why = f"--micro {micro} beside --batch auto", "it looks for the largest micro-batch itself"
            hint = f"--batch {micro * cell.devices} --micro {micro}"
    elif batch < cell.devices:
        what, why = (
            f"{cell.devices:,} devices for a batch of {batch:,}",
            "a device without a sequence has nothing to do",
        )
        hint = f"--batch {cell.devices} or more"
    elif micro != AUTO and micro > -(-batch // cell.devices):
        mine = -(-batch // cell.devices)
        what = f"a micro-batch of {micro:,} is larger than a device's {mine:,} sequences of the batch"
        why, hint = "each device runs its part of the batch in micro-batches", f"--micro {mine} or less"
    if not what and cell.host_memory_bytes is not None and cell.devices > 1:
        what = f"--host-mem beside {cell.devices:,} devices"
        why, hint = "several devices keep everything on them", "--gpus 1, or no --host-mem"
    if what:
        raise FlopwiseError(f"{label(cell)}: {what}", why=why, hint=f"{hint}; [[skip]] of a sweep's file leaves it out")
    if isinstance(model, Transformer):
        model.check_sequence(seq)
