"""`flopwise plan` for one device: a schedule from two memory caps, or a grid of caps."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from flopwise.base.errors import DoesNotFit, FlopwiseError, shown
from flopwise.base.units import check_cap, parse_byte_list, read_option, show_seconds
from flopwise.cli.options import find_hardware
from flopwise.cli.output import progress_bar, say, show

if TYPE_CHECKING:
    from collections.abc import Callable

    from flopwise.cli.plan import PlanOptions
    from flopwise.records.plan import CapCell, Plan, Planned
    from flopwise.setup.hardware import Hardware
    from flopwise.setup.setup import CappedSetup, Setup
    from flopwise.work.model import Model
    from flopwise.work.op import Convention

SAME_STEP = 1e-3
"""A step that differs by less from what the plan expects is the same."""


def plan_one_device(setup: Setup, options: PlanOptions, *, convention: Convention, form: str) -> None:
    """Plan, print, and write what was asked for."""
    from flopwise.door.planning import for_file, write_plan

    setups = _pair_caps(setup, options)
    if form == "html":
        _write_page(setup, setups, options, convention)
        return
    if len(setups) > 1:
        for name, path in (("trace", options.trace), ("write", options.write)):
            if path:
                raise FlopwiseError(
                    f"--{name} beside {len(setups)} pairs of caps",
                    why="a file holds one plan",
                    hint="one --device-mem and one --host-mem",
                )
        _plan_grid(setups, options, convention, form)
        return
    if options.heatmap:
        raise FlopwiseError(
            "--heatmap of one pair of caps", why="a picture needs several", hint="--device-mem 16,24,40,78GiB"
        )
    found = _plan(setups[0], options, convention)
    _print(found, setup.hardware.title, form)
    if options.write:
        write_plan(Path(options.write), for_file(found), setup.model)
        say(f"wrote {options.write}")
    if options.trace:
        _write_trace(options.trace, found.plan, setup.model, setup.hardware)


def _write_page(setup: Setup, setups: list[CappedSetup], options: PlanOptions, convention: Convention) -> None:
    from flopwise.cli.planner_file import plan_file
    from flopwise.door.planning import cap_device

    for name in ("write", "trace", "heatmap"):
        if getattr(options, name):
            raise FlopwiseError(f"--{name} beside -o html", why="a page holds many plans", hint=f"--{name} by itself")

    def capped(device: int, host: int) -> CappedSetup:
        return cap_device(setup, device=device, host=host, host_given=True)

    plan_file(options, setups, lambda one, helps: _plan(one, options, convention, helps=helps), capped)


# -- from words to set-ups -------------------------------------------------------------------------------------------


def _pair_caps(setup: Setup, options: PlanOptions) -> list[CappedSetup]:
    """The set-up with every pair of a device cap and a host cap."""
    from flopwise.door.planning import cap_device
    from flopwise.predict.choose import capacity_bytes, default_host_bytes
    from flopwise.setup.setup import check_device_cap

    devices = read_option(options.device_mem, "device-mem", _parse_caps("device")) or [capacity_bytes(setup)]
    for cap in devices:
        check_device_cap(setup.hardware, cap)
    hosts = read_option(options.host_mem, "host-mem", _parse_caps("host"))
    return [
        cap_device(setup, device=device, host=host, host_given=hosts is not None)
        for host in hosts or [default_host_bytes(setup.hardware)]
        for device in devices
    ]


def _parse_caps(place: Literal["device", "host"]) -> Callable[[str], list[int]]:
    return lambda text: [check_cap(cap, text, place) for cap in parse_byte_list(text)]


def check_one_name(text: str, what: str) -> None:
    """Refuse several names where one is planned."""
    if "," in text:
        raise FlopwiseError(
            f"`flopwise plan` takes one {what}, got {text!r}",
            why="a plan is for one model on one kind of device",
            hint=f"once for each; `flopwise predict` compares several {what}s",
        )


def check_one_cap(text: str) -> None:
    """Refuse several caps where a strategy is planned."""
    try:
        several = text.lower() != "auto" and len(parse_byte_list(text)) > 1
    except FlopwiseError:
        return
    if several:
        raise FlopwiseError(
            f"--device-mem {text} beside several devices or a framework's options",
            why="a grid of caps is for one device that flopwise itself runs",
            hint="one --device-mem; or one device, without --micro, --recompute, --stack, --offload and the like",
        )


def _plan(setup: CappedSetup, options: PlanOptions, convention: Convention, *, helps: bool = True) -> Planned:
    from flopwise.door.planning import plan_device
    from flopwise.references.dataflow.rule import apply_rule

    variant = rule_variant(options.rule)
    rule = None if variant is None else lambda asked: apply_rule(asked, variant, convention=convention)
    host_given = options.host_mem.lower() != "auto"
    return plan_device(setup, convention=convention, host_given=host_given, helps=helps, rule=rule)


def rule_variant(text: str) -> str | None:
    """The name of the reference's variant in `dataflow-jul11`; None: flopwise's own search."""

    from flopwise.base.errors import FlopwiseError
    from flopwise.references.dataflow.variants import RECORDED, VARIANTS

    name, _, variant = re.sub(r"[\s:@_]", "-", text.strip().lower()).partition("-")
    if name == "flopwise" and not variant:
        return None
    dates = {entry.date: entry.name for entry in VARIANTS.values()}
    chosen = dates.get(variant, variant) or RECORDED
    if name != "dataflow" or chosen not in VARIANTS:
        raise FlopwiseError(
            f"--rule cannot be {shown(text)}",
            why=f"it is flopwise, dataflow, or dataflow with one of {', '.join(VARIANTS)}",
            hint=f"--rule dataflow-{RECORDED}",
        )
    return chosen


# -- a grid of caps --------------------------------------------------------------------------------------------------


def _plan_grid(setups: list[CappedSetup], options: PlanOptions, convention: Convention, form: str) -> None:
    from flopwise.report.cap_grids import draw_caps, grid_document, grid_record
    from flopwise.report.plots import check_picture

    if options.heatmap:
        check_picture(Path(options.heatmap))
    cells: list[CapCell] = []
    with progress_bar("caps") as tell:
        for number, setup in enumerate(setups):
            cells.append(_plan_cell(setup, options, convention))
            if tell:
                tell("", number + 1, len(setups))
    first = next((cell.planned.plan for cell in cells if cell.planned), None)
    sequence = f" · sequence {first.sequence_tokens:,}" if first else ""
    title = f"{setups[0].model.name} · 1 × {setups[0].hardware.title}{sequence}"
    show(grid_document(cells, title), grid_record(cells), form, schema="capped-plan")
    if options.heatmap:
        draw_caps(cells, title, Path(options.heatmap))
        say(f"wrote {options.heatmap}")
    if not any(cell.planned for cell in cells):
        raise typer.Exit(1)


def _plan_cell(setup: CappedSetup, options: PlanOptions, convention: Convention) -> CapCell:
    from flopwise.records.plan import CapCell

    cell = CapCell(device_memory_bytes=setup.device_cap_bytes, host_memory_bytes=setup.host_cap_bytes)
    try:
        return replace(cell, planned=_plan(setup, options, convention, helps=False))
    except DoesNotFit as error:
        own = error.place == "device" and rule_variant(options.rule) is None
        return replace(
            cell,
            why_not=error.why or error.what,
            hints=(error.hint,) if error.hint else (),
            smallest_device_bytes=error.needed_bytes if own else None,
        )


# -- to the terminal and to files ------------------------------------------------------------------------------------


def _print(found: Planned, title: str, form: str) -> None:
    from flopwise.report.device_plans import device_plan_document, device_plan_record

    show(device_plan_document(found, title), device_plan_record(found), form, schema="device-plan")


def _write_trace(path: str, plan: Plan, model: Model, hardware: Hardware) -> None:
    from flopwise.base.files import write_whole
    from flopwise.plan.device.forecast import trace_step
    from flopwise.predict.simulate.simulator import memory_points
    from flopwise.report.trace import chrome_trace

    simulation = trace_step(plan, model, hardware)
    title = f"{model.name} on {hardware.title}, {simulation.program.rounds} of {plan.rounds_per_step} rounds"
    write_whole(Path(path), chrome_trace(simulation, memory_points(simulation), title))
    played = simulation.program.rounds
    shorter = (
        f" ({played} of the {plan.rounds_per_step} rounds, and the update)" if plan.rounds_per_step > played else ""
    )
    say(f"wrote {path}{shorter}")


def show_plan_file(plan: Plan, model: Model, convention: Convention, form: str, name: str) -> None:
    """`flopwise predict plan.toml` of one device: played once more by the flopwise of today."""
    from flopwise.cli.planner_file import show_plan_page
    from flopwise.door.intervals import add_interval
    from flopwise.plan.device.explain import notes
    from flopwise.plan.device.forecast import forecast
    from flopwise.records.plan import Planned
    from flopwise.setup.setup import check_device_cap

    hardware = find_hardware(plan.hardware)
    check_device_cap(hardware, plan.device_memory_bytes)
    today = forecast(plan, model, hardware, convention=convention)
    then = (plan.expected and plan.expected.step_s) or today.step_s
    moved = abs(today.step_s / then - 1) > SAME_STEP
    told = (f"the plan was written for a step of {show_seconds(then)}",) if moved else ()
    found = Planned(
        model=model.name,
        plan=plan,
        forecast=today,
        reasons={},
        notes=(*notes(model, hardware, plan.sequence_tokens), *told),
    )
    whole = add_interval(found, model, hardware)
    if form == "html":
        show_plan_page(whole, model, hardware, f"flopwise predict {shlex.quote(name)}")
        return
    _print(whole, hardware.title, form)
