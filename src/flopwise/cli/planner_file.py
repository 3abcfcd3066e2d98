"""`predict … -o html` and `plan … -o html`: the planner as one file, with the answer to every position of its sliders.

Several values of an option are those of its slider. Where one was given, or none, there are some to both sides of it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import typer

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import AUTO, exact_bytes
from flopwise.cli.output import progress_bar, put, say

if TYPE_CHECKING:
    from flopwise.cli.options import SetupOptions
    from flopwise.cli.plan import PlanOptions
    from flopwise.cli.predict import PredictOptions
    from flopwise.predict.anchor import Anchor
    from flopwise.records.cluster_plan import PlannedCluster
    from flopwise.records.plan import Planned
    from flopwise.records.prediction import Prediction
    from flopwise.setup.hardware import Hardware
    from flopwise.setup.setup import CappedSetup, Setup
    from flopwise.work.model import Model
    from flopwise.work.op import Convention

View = dict[str, Any]
MOST_CELLS = 240
"""Of one file: a prediction has some 3 KB, so that page and answers stay under two megabytes."""
MOST_BYTES = 1_200_000
"""Of all answers together; beyond it steps are left out, those of the middle last. The page itself has some 0.7 MB."""
FEW_ROUNDS = 2
"""That are drawn of a step beside the one that was asked for."""
AROUND = (0.25, 0.5, 1, 2, 4)
DEVICES_AROUND = (1, 2, 4, 8)
CAPS_BELOW = (0.5, 0.75)
"""Of the cap that was asked for."""
CAPS_OF_ALL = (0.4, 0.6, 0.8, 1)
"""Of all that the device has, where it is more than was asked for."""
HOSTS_AROUND = (0.25, 0.5, 1)
SAME_CAP = 1.15
"""Caps nearer than this are one."""


@dataclass(frozen=True, kw_only=True)
class Slider:
    """A slider: values in words as they would be typed."""

    name: str
    values: tuple[str, ...]
    at: int
    """Of the one that was asked for."""
    said: bool = True
    """Whether somebody gave these values; those that stand around them may be thinned."""
    left_open: str = ""
    """The value that stands for what was left open: no command line says it."""


def write_page(name: str, title: str, planner: View) -> None:
    """The file, whose name is the answer."""
    from flopwise.report.page.data import PageData, now
    from flopwise.report.page.page import page_html

    page = PageData(title=title, created=now(), rows=[], planner=_within(planner, MOST_BYTES))
    put(page_html(page), name, name_file=True)


def _within(planner: View, room: int) -> View:
    """Without the steps that there is no room for, those furthest from what was asked first."""
    from flopwise.cli.planning import view_text

    cells: list[View] = list(planner["grid"]["cells"])
    middle = _place(planner["grid"]["axes"])
    sizes = [len(view_text(cell)) for cell in cells]
    for at in sorted(range(len(cells)), key=lambda at: -abs(at - middle)):
        if sum(sizes) <= room:
            break
        if "step" in cells[at]:
            cells[at] = {name: part for name, part in cells[at].items() if name != "step"}
            sizes[at] = len(view_text(cells[at]))
    return {**planner, "grid": {**planner["grid"], "cells": cells}}


def _place(axes: Sequence[Mapping[str, Any]]) -> int:
    place = 0
    for axis in axes:
        place = place * len(axis["values"]) + axis["at"]
    return place


def _planner(axes: Sequence[Slider], fixed: Mapping[str, str], cells: Sequence[View], around: View | None) -> View:
    """What the page's scripts begin with."""
    known = [axis for axis in axes if len(axis.values) > 1]
    at = {axis.name: axis.values[axis.at] for axis in known}
    grid = {
        "axes": [{"name": axis.name, "values": axis.values, "at": axis.at} for axis in known],
        "cells": list(cells),
    }
    if around is not None:
        grid["cells"][_place(grid["axes"])] = {**grid["cells"][_place(grid["axes"])], "around": around}
    question = {**fixed, **at}
    return {"question": question, "usual": question, "prices": {}, "options": {}, "grid": grid}


def command_line(verb: str, options: SetupOptions, changes: Mapping[str, str], *more: str) -> str:
    """The line that asks the same in a terminal: what was typed, with these changes."""
    words: list[str] = []
    for field in fields(options):
        name, value = field.name, changes.get(field.name, getattr(options, field.name))
        if name in NO_WORDS or not (options.is_given(name) or name in changes):
            continue
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        if isinstance(value, bool):
            words += [flag] if value else []
        else:
            words += [word for each in (value if isinstance(value, list) else [value]) for word in (flag, str(each))]
    return f"flopwise {verb} {shlex.join([changes.get('model', options.model), *words, *more])}"


NO_WORDS = ("given", "model", "output", "write", "trace", "heatmap")
FLAGS = {"change": "--set"}


def _around(options: SetupOptions, base: Mapping[str, str]) -> View | None:
    """Every device and what would help, where the catalogue and a question's words can say what was asked."""
    from flopwise.cli.planning import around
    from flopwise.door.questions import DEFAULTS, read_question

    asked = {name: str(getattr(options, name)) for name in options.given if name not in (*NO_WORDS, "on")}
    if not asked.keys() <= DEFAULTS.keys():
        return None
    try:
        return around(read_question([("model", options.model), ("on", options.on), *{**asked, **base}.items()]))
    except FlopwiseError:
        # A file, this machine, an optimizer: nothing that a page may ask for.
        return None


# -- predictions -----------------------------------------------------------------------------------------------------


def predict_file(
    options: PredictOptions, models: Mapping[str, Model], machines: Mapping[str, Hardware], convention: Convention
) -> None:
    """A grid of predictions around, or over, what was asked."""
    from flopwise.cli.predict import _split_counts

    name, machine = next(iter(models)), next(iter(machines))
    listed = {
        option: _split_counts(getattr(options, option), option.replace("_", "-"), example)
        for option, example in (("gpus", "1,2"), ("seq", "2k,8k"), ("batch", "8,16"), ("batch_tokens", "512k,1M"))
    }
    micros = _split_counts(options.micro, "micro", "1,2,4")
    first = {option: values[0] for option, values in listed.items()} | {"micro": micros[0]}
    setup = _setup(options, first, models[name], machines[machine])
    anchor = None if options.anchor is None else _read_anchor(options.anchor, setup)
    if anchor is not None:
        options = replace(options, anchor=_closed(str(options.anchor), anchor))
    predict = partial(_predicted, convention=convention, anchor=anchor)
    asked = predict(setup)
    axes = [
        Slider(name="model", values=tuple(models), at=0),
        Slider(name="on", values=tuple(machines), at=0),
        *_size_axes(listed, asked),
        Slider(name="micro", values=tuple(micros), at=0),
    ]
    axes = _thinned(axes)
    names = [axis.name for axis in axes]
    cells = []
    with progress_bar("predictions") as tell:
        for values in product(*(axis.values for axis in axes)):
            words = dict(zip(names, values, strict=True))
            line = command_line("predict", options, _said(axes, words, options))
            words_of = partial(_setup, options, words, models[words["model"]], machines[words["on"]])
            cells.append(_cell(predict, words_of, line))
            if tell:
                tell("", len(cells), prod(len(axis.values) for axis in axes))
    base = {axis.name: axis.values[axis.at] for axis in axes if axis.name not in ("model", "on")}
    single = replace(options, model=name, on=machine)
    title = f"{name} on {machine}" if len(models) == len(machines) == 1 else "Plan"
    planner = _planner(axes, {"model": name, "on": machine}, cells, _around(single, base))
    write_page("predict.html", title, planner)


def _said(axes: Sequence[Slider], words: Mapping[str, str], options: SetupOptions) -> dict[str, str]:
    """Of an axis what a command line says: not what is left open."""
    said = {axis.name: words[axis.name] for axis in axes if words[axis.name] not in (AUTO, axis.left_open)}
    return said if options.is_given("on") else {name: word for name, word in said.items() if name != "on"}


def _setup(options: PredictOptions, words: Mapping[str, str], model: Model, machine: Hardware) -> Setup:
    changes: dict[str, Any] = {name: value for name, value in words.items() if name not in ("model", "on")}
    case = replace(options, **changes)
    return case.setup(
        model,
        machine,
        name=machine.name,
        device_mem=case.device_mem,
        devices=case.gpus,
        parallel=(case.parallel or [AUTO])[0],
        cuda_graphs=case.cuda_graphs,
    )


def _predicted(setup: Setup, convention: Convention, anchor: Anchor | None) -> Prediction:
    from flopwise.door.anchors import predict_anchored
    from flopwise.door.intervals import predict_step

    return predict_anchored([setup], anchor, convention)[0] if anchor else predict_step(setup, convention)


def _read_anchor(text: str, asked: Setup) -> Anchor:
    from flopwise.door.anchors import read_anchor

    return read_anchor(text, asked)


def _closed(text: str, anchor: Anchor) -> str:
    """The anchor with what its set-up left open: beside another position of the sliders it would be that one's."""
    said, setup = text.partition("@")[2].lower(), anchor.setup
    sizes = {"gpus": setup.parallel.devices, "seq": setup.sequence_tokens, "batch": setup.batch_sequences}
    added = [
        f"{name}={size}" for name, size in sizes.items() if f"{name}=" not in said and f"{name}_tokens=" not in said
    ]
    return f"{text}{'' if '@' in text else '@'}{''.join(f' {word}' for word in added)}"


def _cell(predict: Callable[[Setup], Prediction], setup: Callable[[], Setup], line: str) -> View:
    from flopwise.report.page.planner import prediction_view, refusal_view

    try:
        return prediction_view(predict(setup()), line)
    except FlopwiseError as error:
        return refusal_view(error, line)


def _size_axes(listed: Mapping[str, Sequence[str]], asked: Prediction) -> list[Slider]:
    """Devices, sequence and batch: as they were listed, else around what was asked."""
    batch = "batch" if listed["batch"] != [AUTO] else "batch_tokens"
    around: dict[str, Callable[[], Slider]] = {
        "gpus": lambda: _count_axis("gpus", asked.devices, DEVICES_AROUND if asked.devices == 1 else (0.5, 1, 2)),
        "seq": lambda: _count_axis("seq", asked.sequence_tokens, AROUND, listed["seq"][0] == AUTO),
        "batch": lambda: _count_axis("batch", asked.batch_sequences, AROUND),
        "batch_tokens": lambda: _batch_axis(listed["batch_tokens"][0], asked.batch_tokens),
    }
    return [
        Slider(name=name, values=tuple(listed[name]), at=0) if len(listed[name]) > 1 else around[name]()
        for name in ("gpus", "seq", batch)
    ]


def _count_axis(name: str, base: int, shares: Sequence[float], is_open: bool = False) -> Slider:
    counts = sorted({max(1, int(base * share)) for share in shares} | {base})
    words = tuple(_count_word(count) for count in counts)
    middle = _count_word(base)
    return Slider(
        name=name, values=words, at=words.index(middle), said=False, left_open=middle if is_open or base == 1 else ""
    )


def _batch_axis(given: str, tokens: int) -> Slider:
    """Tokens of a step; `auto` leaves them to flopwise, for each sequence anew."""
    counts = [_count_word(max(1, int(tokens * share))) for share in AROUND if given == AUTO or share != 1]
    values = (AUTO, *counts) if given == AUTO else tuple(sorted((given, *counts), key=_count_of))
    return Slider(name="batch_tokens", values=values, at=values.index(given), said=False)


def _count_of(word: str) -> int:
    from flopwise.base.units import parse_tokens

    return parse_tokens(word)


def _count_word(count: int) -> str:
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def _thinned(axes: Sequence[Slider]) -> list[Slider]:
    """What stands around the asked is left out where there would be too many cells."""
    kept = list(axes)
    for place in sorted(range(len(kept)), key=lambda place: len(kept[place].values)):
        if prod(len(axis.values) for axis in kept) <= MOST_CELLS:
            break
        if not kept[place].said:
            kept[place] = replace(kept[place], values=(kept[place].values[kept[place].at],), at=0)
    count = prod(len(axis.values) for axis in kept)
    if count > MOST_CELLS:
        raise FlopwiseError(
            f"{count:,} set-ups in one file",
            why=f"a page holds up to {MOST_CELLS}",
            hint="`flopwise serve` asks as one goes",
        )
    return kept


# -- plans -----------------------------------------------------------------------------------------------------------


def plan_file(
    options: PlanOptions,
    setups: Sequence[CappedSetup],
    plan: Callable[[CappedSetup, bool], Planned],
    capped: Callable[[int, int], CappedSetup],
) -> None:
    """A grid of caps: those that were given, else some around one pair; `plan(setup, helps)` searches."""
    from flopwise.cli.planning import simulated_step
    from flopwise.plan.device.forecast import TRACED_ROUNDS
    from flopwise.report.page.planner import plan_view, refusal_view

    first = setups[0]
    axes = [_cap_axis("device_mem", setups, options), _cap_axis("host_mem", setups, options)]
    known = {_pair(setup): setup for setup in setups}
    cells: list[View] = []
    pairs = list(product(*(axis.values for axis in axes)))
    middle = _place([{"values": axis.values, "at": axis.at} for axis in axes])
    refused: FlopwiseError | None = None
    with progress_bar("plans") as tell:
        for device, host in pairs:
            is_asked = len(cells) == middle
            words = {"device_mem": device, "host_mem": host}
            line = command_line("plan", options, _said(axes, words, options), "-w", "plan.toml")
            try:
                setup = known.get((device, host)) or capped(_bytes(device), _bytes(host))
                found = plan(setup, is_asked)
                rounds = TRACED_ROUNDS if is_asked else FEW_ROUNDS
                cells.append(plan_view(found, line, simulated_step(found, first.model, first.hardware, rounds)))
            except FlopwiseError as error:
                cells.append(refusal_view(error, line))
                refused = error if is_asked else refused
            if tell:
                tell("", len(cells), len(pairs))
    if refused is not None and all(cell["kind"] == "refused" for cell in cells):
        raise refused
    base = {axis.name: axis.values[axis.at] for axis in axes if axis.values[axis.at] != axis.left_open}
    planner = _planner(axes, {"model": first.model.name, "on": options.on}, cells, _around(options, base))
    write_page("plan.html", f"{first.model.name} on {first.hardware.name}", planner)
    if refused is not None:
        # The page shows what fits; what was asked for does not, and that is exit code 1 in every form.
        say(f"note: {refused.what}; other caps of the page fit")
        raise typer.Exit(1)


def _pair(setup: CappedSetup) -> tuple[str, str]:
    return exact_bytes(setup.device_cap_bytes), exact_bytes(setup.host_cap_bytes)


def _bytes(word: str) -> int:
    from flopwise.base.units import parse_bytes

    return parse_bytes(word)


def _cap_axis(name: str, setups: Sequence[CappedSetup], options: PlanOptions) -> Slider:
    place = 0 if name == "device_mem" else 1
    given = list(dict.fromkeys(_pair(setup)[place] for setup in setups))
    open_one = "" if options.is_given(name) else given[0]
    if len(given) > 1 or len(setups) > 1:
        return Slider(name=name, values=tuple(given), at=len(given) - 1, left_open=open_one)
    base = _bytes(given[0])
    sizes = [base * share for share in (HOSTS_AROUND if place else CAPS_BELOW)]
    if place == 0:
        sizes += [size for size in (_whole(setups[0]) * share for share in CAPS_OF_ALL) if size > SAME_CAP * base]
    whole = {round(size / 2**30) * 2**30 for size in sizes if size >= 2**30}
    around = sorted({base, *(size for size in whole if not base / SAME_CAP < size < SAME_CAP * base)})
    values = tuple(map(exact_bytes, around))
    return Slider(name=name, values=values, at=values.index(given[0]), said=False, left_open=open_one)


def _whole(setup: CappedSetup) -> int:
    """What the device has where nobody sets a cap."""
    from flopwise.predict.kernels.memory import usable_bytes

    return usable_bytes(setup.hardware)


def cluster_file(options: PlanOptions, found: PlannedCluster, title: str) -> None:
    """A strategy for several devices, and what it was chosen from."""
    from flopwise.report.page.planner import cluster_view

    line = command_line("plan", options, {}, "-w", "plan.toml")
    cell = cluster_view(found, title, line)
    planner = _planner((), {"model": options.model, "on": options.on}, [cell], _around(options, {}))
    write_page("plan.html", f"{found.prediction.model} on {options.on}", planner)


def show_prediction_file(prediction: Prediction, line: str) -> None:
    """What a plan of several devices takes."""
    from flopwise.report.page.planner import prediction_view

    fixed = {"model": prediction.model, "on": prediction.hardware}
    write_page("predict.html", prediction.model, _planner((), fixed, [prediction_view(prediction, line)], None))


def show_plan_page(found: Planned, model: Model, hardware: Hardware, line: str) -> None:
    """A plan of a file, played by the flopwise of today."""
    from flopwise.cli.planning import simulated_step
    from flopwise.report.page.planner import plan_view

    cell = plan_view(found, line, simulated_step(found, model, hardware))
    write_page("predict.html", model.name, _planner((), {"model": model.name, "on": hardware.name}, [cell], None))
