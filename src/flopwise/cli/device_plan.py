"""`flopwise plan` for one device: a schedule from two memory caps, or a grid of caps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flopwise.cli.output import progress_bar, say, show

if TYPE_CHECKING:
    from flopwise.records.plan import CapCell, Plan, Planned
    from flopwise.setup.hardware import Hardware
    from flopwise.setup.setup import CappedSetup, Setup
    from flopwise.work.model import Model
    from flopwise.work.op import Convention

HostMemoryOption = Annotated[
    str, typer.Option(help="Cap on host memory: 110GiB. Default: most of what the hardware file says there is.")
]
ClipOption = Annotated[
    bool, typer.Option("--clip", help="Clip gradients by their global norm: the update waits for all of them.")
]
RuleOption = Annotated[
    str,
    typer.Option(
        help="flopwise; dataflow: the rule of that offload trainer, also of a date: dataflow-jul11, -jul17, -jul20, "
        "-jul23, -jul31, -sep19, -head (dataflow alone: jul20, its recorded runs)."
    ),
]
TraceOption = Annotated[str, typer.Option(help="Write the simulated step as a Chrome trace (Perfetto opens it).")]
HeatmapOption = Annotated[str, typer.Option(help="Write a grid of caps as an SVG picture.")]

SAME_STEP = 1e-3
"""A step that differs by less from what the plan expects is the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceWords:
    """What was typed for one device beside what every plan has."""

    on: str
    device_mem: str
    host_mem: str
    clip: bool
    rule: str
    trace: str
    heatmap: str
    write: str


def plan_one_device(setup: Setup, words: DeviceWords, *, convention: Convention, form: str) -> None:
    """Plan, print, and write what was asked for."""
    from pathlib import Path

    from flopwise.base.errors import FlopwiseError
    from flopwise.door.planning import for_file, write_plan

    setups = _setups(setup, words)
    if len(setups) > 1:
        for name in ("trace", "write"):
            if getattr(words, name):
                raise FlopwiseError(
                    f"--{name} beside {len(setups)} pairs of caps",
                    why="a file holds one plan",
                    hint="one --device-mem and one --host-mem",
                )
        _grid(setups, words, convention, form)
        return
    if words.heatmap:
        raise FlopwiseError(
            "--heatmap of one pair of caps", why="a picture needs several", hint="--device-mem 16,24,40,78GiB"
        )
    found = _planned(setups[0], words, convention)
    _print(found, setup.hardware.title, form)
    if words.write:
        write_plan(Path(words.write), for_file(found), setup.model)
        say(f"wrote {words.write}")
    if words.trace:
        _write_trace(words.trace, found.plan, setup.model, setup.hardware)


# -- from words to set-ups -------------------------------------------------------------------------------------------


def _setups(setup: Setup, words: DeviceWords) -> list[CappedSetup]:
    """The set-up with every pair of a device cap and a host cap."""
    from flopwise.base.errors import FlopwiseError
    from flopwise.base.units import parse_byte_list
    from flopwise.predict.choose import capacity_bytes, default_host_bytes
    from flopwise.setup.setup import check_device_cap

    def listed(option: str, text: str, default: int) -> list[int]:
        if text.lower() == "auto":
            return [default]
        try:
            return parse_byte_list(text)
        except FlopwiseError as error:
            raise error.within(f"--{option}") from None

    devices = listed("device-mem", words.device_mem, capacity_bytes(setup))
    for cap in devices:
        _check_cap("device", cap, words.device_mem)
        check_device_cap(setup.hardware, cap)
    hosts = listed("host-mem", words.host_mem, default_host_bytes(setup.hardware))
    for cap in hosts:
        _check_cap("host", cap, words.host_mem)
    return [_capped(setup, words, device, host) for host in hosts for device in devices]


def _check_cap(place: Literal["device", "host"], cap: int, text: str) -> None:
    from flopwise.base.errors import FlopwiseError
    from flopwise.base.units import check_cap

    try:
        check_cap(cap, text, place)
    except FlopwiseError as error:
        raise error.within(f"--{place}-mem") from None


def check_one_name(text: str, what: str) -> None:
    """Refuse several names where one is planned."""
    from flopwise.base.errors import FlopwiseError

    if "," in text:
        raise FlopwiseError(
            f"`flopwise plan` takes one {what}, got {text!r}",
            why="a plan is for one model on one kind of device",
            hint=f"once for each; `flopwise predict` compares several {what}s",
        )


def check_one_cap(text: str) -> None:
    """Refuse several caps where a strategy is planned."""
    from flopwise.base.errors import FlopwiseError
    from flopwise.base.units import parse_byte_list

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


def _capped(setup: Setup, words: DeviceWords, device: int, host: int) -> CappedSetup:
    from dataclasses import replace

    from flopwise.door.planning import cap_device

    named = replace(setup, hardware_name=words.on, clip=words.clip)
    return cap_device(named, device=device, host=host, host_given=words.host_mem.lower() != "auto")


def _planned(setup: CappedSetup, words: DeviceWords, convention: Convention, *, helps: bool = True) -> Planned:
    from flopwise.door.planning import plan_device
    from flopwise.references.dataflow.planned import ruled

    variant = rule_variant(words.rule)
    rule = None if variant is None else lambda asked: ruled(asked, variant, convention=convention)
    host_given = words.host_mem.lower() != "auto"
    return plan_device(setup, convention=convention, host_given=host_given, helps=helps, rule=rule)


def rule_variant(text: str) -> str | None:
    """The name of the reference's variant in `dataflow-jul11`; None: flopwise's own search."""
    import re

    from flopwise.base.errors import FlopwiseError, shown
    from flopwise.references.dataflow.rule import RECORDED, VARIANTS

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


def _grid(setups: list[CappedSetup], words: DeviceWords, convention: Convention, form: str) -> None:
    from pathlib import Path

    from flopwise.report.cap_grids import draw_caps, grid_document, grid_record
    from flopwise.report.plots import check_picture

    if words.heatmap:
        check_picture(Path(words.heatmap))
    cells: list[CapCell] = []
    with progress_bar("caps") as tell:
        for number, setup in enumerate(setups):
            cells.append(_cell(setup, words, convention))
            if tell:
                tell("", number + 1, len(setups))
    first = next((cell.planned.plan for cell in cells if cell.planned), None)
    sequence = f" · sequence {first.sequence_tokens:,}" if first else ""
    title = f"{setups[0].model.name} · 1 × {setups[0].hardware.title}{sequence}"
    show(grid_document(cells, title), grid_record(cells), form, schema="capped-plan")
    if words.heatmap:
        draw_caps(cells, title, Path(words.heatmap))
        say(f"wrote {words.heatmap}")
    if not any(cell.planned for cell in cells):
        raise typer.Exit(1)


def _cell(setup: CappedSetup, words: DeviceWords, convention: Convention) -> CapCell:
    from dataclasses import replace

    from flopwise.base.errors import DoesNotFit
    from flopwise.records.plan import CapCell

    cell = CapCell(device_memory_bytes=setup.device_cap_bytes, host_memory_bytes=setup.host_cap_bytes)
    try:
        return replace(cell, planned=_planned(setup, words, convention, helps=False))
    except DoesNotFit as error:
        own = error.place == "device" and rule_variant(words.rule) is None
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
    from pathlib import Path

    from flopwise.base.files import write_whole
    from flopwise.plan.device.forecast import traced
    from flopwise.predict.simulate.simulator import memory_points
    from flopwise.report.trace import chrome_trace

    simulation = traced(plan, model, hardware)
    title = f"{model.name} on {hardware.title}, {simulation.program.rounds} of {plan.rounds_per_step} rounds"
    write_whole(Path(path), chrome_trace(simulation, memory_points(simulation), title))
    played = simulation.program.rounds
    shorter = (
        f" ({played} of the {plan.rounds_per_step} rounds, and the update)" if plan.rounds_per_step > played else ""
    )
    say(f"wrote {path}{shorter}")


def show_plan_file(plan: Plan, model: Model, convention: Convention, form: str) -> None:
    """`flopwise predict plan.toml` of one device: played once more by the flopwise of today."""
    from dataclasses import replace

    from flopwise.base.units import show_seconds
    from flopwise.cli.options import hardware_named
    from flopwise.door.intervals import streamed_interval
    from flopwise.plan.device.explain import notes
    from flopwise.plan.device.forecast import forecast
    from flopwise.records.plan import Planned
    from flopwise.setup.setup import check_device_cap

    hardware = hardware_named(plan.hardware)
    check_device_cap(hardware, plan.device_memory_bytes)
    today = forecast(plan, model, hardware, convention=convention)
    then = plan.expected.step_s if plan.expected else today.step_s
    moved = abs(today.step_s / then - 1) > SAME_STEP
    told = (f"the plan was written for a step of {show_seconds(then)}",) if moved else ()
    found = Planned(
        model=model.name,
        plan=plan,
        forecast=today,
        reasons={},
        notes=(*notes(model, hardware, plan.sequence_tokens), *told),
    )
    found = replace(found, interval=streamed_interval(found, model, hardware))
    _print(found, hardware.title, form)
