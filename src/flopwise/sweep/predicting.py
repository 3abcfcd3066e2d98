"""What a sweep's cells will take, before any of them runs.

Cells that are to run for real on one device are planned as `flopwise train` plans them, and so are those with a cap on
host memory, which only a plan heeds. All others are predicted as `flopwise predict` does it, thousands at a time.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from flopwise.base.errors import DoesNotFit, FlopwiseError
from flopwise.base.files import decode
from flopwise.base.units import AUTO, show_bytes
from flopwise.catalog.load import THIS_CPU, THIS_MACHINE, load_evidence, measured_stack
from flopwise.engine.executable import check_several
from flopwise.plan.device.forecast import forecast
from flopwise.plan.device.memory import plan_bytes
from flopwise.plan.device.smallest import least_device
from flopwise.plan.program.sizes import sizes_of
from flopwise.predict.choose import capacity_bytes, memory_lines
from flopwise.predict.expected import expect
from flopwise.predict.step import steps
from flopwise.records.plan import Plan
from flopwise.records.prediction import Prediction
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import shard_all
from flopwise.setup.setup import Setup
from flopwise.setup.stack import Stack
from flopwise.setup.written import CellSetup, read_setup
from flopwise.store.cells import Cell, CellOutcome
from flopwise.store.sweeps import looks
from flopwise.sweep.auto_batch import LOOKING_ATTEMPTS, LOOKING_STEPS, largest, most_sequences
from flopwise.sweep.grid import label
from flopwise.train.planning import FoundPlan, cap_setup, find_plan
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats
from flopwise.work.model import ARCHITECTURES, Model
from flopwise.work.transformer import Transformer

START_S = {"cpu": 4.2, "gpu": 18.0}
"""Seconds of an attempt beside its steps, by kind of device. cpu: measured, three steps of a model of two layers on two
cores of an EPYC, interpreter, torch, data and the last evaluation included. gpu: measured, MPT 125M to 7B on an H200
with 16 cores (`benchmarks/results/mpt_h200`): 18 s, and for each parameter what follows."""
START_S_PER_PARAMETER = 9e-9
"""First weights, drawn on the host, and the profile."""
NOT_KNOWN = "whether it fits is not known: nothing tells how much memory each device takes"

Found = TypeVar("Found")
Tell = Callable[[str, int, int], None]
"""Told what is being done, how many cells are, of how many."""


def foresee_all(
    cells: Sequence[CellSetup],
    hardware: Mapping[str, Hardware],
    *,
    steps: int,
    to_run: bool,
    stack: Stack | None = None,
    tell: Tell | None = None,
) -> list[CellOutcome]:
    """What each cell will take, in their order; `hardware`: what the cells' names of it stand for.

    `stack`: the framework that cells are predicted with; those that are to run are run by flopwise.
    """
    models = _Models()
    found: dict[int, CellOutcome] = {}
    together: dict[str, list[tuple[int, CellSetup]]] = {}
    for place, settings in enumerate(cells):
        if to_run:
            check_trainable(models.of(settings))
            _check_several(settings)
        if to_run or settings.host_memory_bytes is not None:
            machine = hardware[settings.hardware]
            found[place] = _within_cell(settings, lambda s=settings, m=machine: _plan(s, models.of(s), m))  # type: ignore[misc]
            if tell is not None:
                tell("planning", len(found), len(cells))
        else:
            together.setdefault(settings.hardware, []).append((place, settings))
    for name, some in together.items():
        outcomes = _predict([settings for _, settings in some], models, hardware[name], stack)
        found |= {place: outcome for (place, _), outcome in zip(some, outcomes, strict=True)}
        if tell is not None:
            tell("predicting", len(found), len(cells))
    return [
        _with_time(found[place], hardware[settings.hardware], steps, models.parameters(settings))
        for place, settings in enumerate(cells)
    ]


def check_trainable(model: Model) -> None:
    """Refuse a model that can be predicted and not be trained."""
    if not isinstance(model, Transformer):
        raise FlopwiseError(
            f"{model.name} cannot be trained yet",
            why="its layers run time step by time step, for which there are no operators",
            hint="--predict, or a transformer: `flopwise ls models`",
        )
    if not model.causal and model.head == "language":
        raise FlopwiseError(
            f"{model.name} sees what comes after; it cannot learn to foretell it",
            why="language modelling here is the next token's, and it is no part of this model",
            hint="--task masked, --task classification with --data, --predict, or a decoder such as gpt2",
        )


def _check_several(settings: CellSetup) -> None:
    """Refuse formats that several devices do not train in, before a process finds out."""
    if settings.devices == 1:
        return
    hint = "--gpus 1, --precision bf16, or --predict; [[skip]] of a sweep's file leaves it out"
    try:
        check_several(parse_formats(settings.precision), hint)
    except FlopwiseError as error:
        raise error.within(label(settings)) from None


class _Models:
    """Descriptions of the tables that cells hold, each read once."""

    def __init__(self) -> None:
        self._by_table: dict[int, tuple[dict[str, Any], Model]] = {}

    def of(self, settings: CellSetup) -> Model:
        known = self._by_table.get(id(settings.model))
        if known is None:
            fields = {key: value for key, value in settings.model.items() if key != "architecture"}
            kind = ARCHITECTURES[str(settings.model["architecture"])]
            known = settings.model, decode(fields, kind, settings.model_name)
            # The table is kept beside it, so that its identity stays its own.
            self._by_table[id(settings.model)] = known
        return known[1]

    def parameters(self, settings: CellSetup) -> int:
        return describe(self.of(settings), settings.sequence_tokens).parameters


def _within_cell(settings: CellSetup, look: Callable[[], Found]) -> Found:
    """What `look` finds; a mistake is told with the cell that it is in."""
    try:
        return look()
    except FlopwiseError as error:
        raise error.within(label(settings)) from None


def _with_time(foreseen: CellOutcome, hardware: Hardware, steps: int, parameters: int) -> CellOutcome:
    if foreseen.step_s is None:
        return foreseen
    start_s = START_S["cpu" if hardware.device.kind == "cpu" else "gpu"] + START_S_PER_PARAMETER * parameters
    return replace(foreseen, attempt_s=start_s + steps * foreseen.step_s)


# -- the plan that would run -----------------------------------------------------------------------------------------


def _plan(settings: CellSetup, model: Model, hardware: Hardware) -> CellOutcome:
    assert isinstance(model, Transformer) or settings.host_memory_bytes is not None
    if not isinstance(model, Transformer):
        raise FlopwiseError(f"{model.name} cannot be planned for a host", why="only transformers are", hint="--model")
    setup = _setup(settings, model, hardware)
    if setup.batch_sequences is not None:
        return _foreseen(setup, _try(setup))
    tries: dict[int, FoundPlan | DoesNotFit] = {}

    def of_size(count: int) -> Setup:
        return replace(setup, batch_sequences=count * settings.devices, micro_batch_sequences=count)

    def fits(count: int) -> bool:
        tries[count] = _try(of_size(count))
        return not isinstance(tries[count], DoesNotFit)

    # Plans recompute and stream, so that the largest that is of use mostly fits; else nobody knows where it lies.
    most = most_sequences(settings.sequence_tokens)
    count = max(1, largest(fits, most, most, stride=max(1, most // 4)))
    foreseen = _foreseen(of_size(count), tries[count])
    if isinstance(tries[count], DoesNotFit):
        return replace(foreseen, batch_sequences=None, micro_batch_sequences=None)
    return foreseen


def _setup(settings: CellSetup, model: Model, hardware: Hardware) -> Setup:
    """As `flopwise train` asks it of the machine that it runs on."""
    here = THIS_CPU if hardware.device.kind == "cpu" else THIS_MACHINE
    return read_setup(settings, Setup, model, hardware, hardware_name=here, parallel=shard_all(settings.devices))


def _try(setup: Setup) -> FoundPlan | DoesNotFit:
    """The plan, or why there is none."""
    try:
        return find_plan(setup)
    except DoesNotFit as error:
        return error


def _foreseen(setup: Setup, found: FoundPlan | DoesNotFit) -> CellOutcome:
    if isinstance(found, DoesNotFit):
        return CellOutcome(
            fits=False,
            method="plan",
            batch_sequences=setup.batch_sequences,
            micro_batch_sequences=setup.micro_batch_sequences,
            device_bytes=_memory_needed(setup, found),
            reason=f"{found.what}: {found.why}" if found.why else found.what,
        )
    plan, expected = found
    device_bytes, host_bytes = _memory_taken(setup, found)
    batch = expected.batch_sequences or plan.batch_sequences
    flops = batch * describe(setup.model, plan.sequence_tokens).model_flops("causal")
    spent = expected.step_s * expected.peak_flops if expected.step_s and expected.peak_flops else None
    return CellOutcome(
        fits=True,
        method="plan",
        batch_sequences=batch,
        micro_batch_sequences=plan.micro_batch_sequences,
        step_s=expected.step_s,
        tokens_per_s=expected.tokens_per_s,
        mfu=None if spent is None else flops / spent,
        hfu=None if spent is None or expected.hardware_flops is None else expected.hardware_flops / spent,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        recompute=plan.recompute,
        bound=_limit(setup, found),
        reason=NOT_KNOWN if device_bytes is None else None,
    )


def _memory_taken(setup: Setup, found: FoundPlan) -> tuple[int | None, int | None]:
    """Memory of a device and of the host; that of a plan is known where its speed is not."""
    plan, expected = found
    if expected.device_bytes is not None or not isinstance(plan, Plan):
        return expected.device_total, expected.host_total
    sizes = sizes_of(setup.model, plan.sequence_tokens, parse_formats(plan.precision), plan.optimizer)
    taken = plan_bytes(plan, sizes)
    return sum(taken["device"].values()), sum(taken["host"].values())


def _limit(setup: Setup, found: FoundPlan) -> str | None:
    """What limits the step, where its speed is known."""
    (plan, expected), hardware = found, setup.hardware
    if expected.step_s is None:
        return None
    if isinstance(plan, Plan):
        return forecast(plan, setup.model, hardware).bound
    return steps([plan.setup(setup.model, hardware)], operators=False)[0].bound


def _memory_needed(setup: Setup, error: DoesNotFit) -> int | None:
    """The least device memory with which there would be a plan."""
    if setup.parallel.devices > 1:
        return error.needed_bytes
    least = least_device(cap_setup(setup))
    return least.bytes if least else None


# -- a step with all state on the devices ----------------------------------------------------------------------------


def _predict(cells: Sequence[CellSetup], models: _Models, hardware: Hardware, stack: Stack | None) -> list[CellOutcome]:
    """Cells on one hardware, all at once."""
    setups = {
        place: _within_cell(settings, lambda s=settings: _behind(_setup(s, models.of(s), hardware), stack))  # type: ignore[misc]
        for place, settings in enumerate(cells)
    }
    found: dict[int, CellOutcome] = {}
    auto = [place for place, settings in enumerate(cells) if settings.batch_sequences == AUTO]
    for place, lines in zip(auto, _all_told(cells, setups, auto, memory_lines), strict=True):
        settings, capacity = cells[place], capacity_bytes(setups[place])
        count = max(1 + (capacity - one) // each for one, each in lines)
        if count < 1:
            found[place] = _too_large(min(one for one, _ in lines), capacity)
            continue
        count = min(count, most_sequences(settings.sequence_tokens))
        setups[place] = replace(setups[place], batch_sequences=count * settings.devices, micro_batch_sequences=count)
    places = [place for place in setups if place not in found]
    predictions = _all_told(cells, setups, places, partial(steps, operators=False))
    name, evidence = measured_stack(stack), load_evidence()
    for place, one in zip(places, predictions, strict=True):
        found[place] = _foreseen_step(expect(one, setups[place], evidence, stack=name))
    return [found[place] for place in range(len(cells))]


def _behind(setup: Setup, stack: Stack | None) -> Setup:
    """The set-up as a framework runs it."""
    if stack is None:
        return setup
    return replace(setup, stack=stack, attention=stack.attention_kernel, fusion=stack.fusion)


def _all_told(
    cells: Sequence[CellSetup],
    setups: Mapping[int, Setup],
    places: Sequence[int],
    look: Callable[[list[Setup]], list[Found]],
) -> list[Found]:
    """What `look` finds for all at once; which of them it is that it refuses is for the error to say."""
    try:
        return look([setups[place] for place in places])
    except FlopwiseError:
        for place in places:
            _within_cell(cells[place], lambda s=setups[place]: look([s]))  # type: ignore[misc]
        raise


def _foreseen_step(found: Prediction) -> CellOutcome:
    if not found.fits:
        sizes = found.batch_sequences, found.micro_batch_sequences
        return _too_large(found.device_bytes.total, found.device_capacity_bytes, *sizes)
    return CellOutcome(
        fits=True,
        method="predict",
        batch_sequences=found.batch_sequences,
        micro_batch_sequences=found.micro_batch_sequences,
        step_s=found.step_s,
        tokens_per_s=found.tokens_per_s,
        mfu=found.mfu,
        hfu=found.hfu,
        device_bytes=found.device_bytes.total,
        recompute=found.recompute,
        bound=found.bound,
        ceiling_s=found.ceiling_s,
        interval=found.interval,
    )


def _too_large(needed: int, capacity: int, batch: int | None = None, micro: int | None = None) -> CellOutcome:
    return CellOutcome(
        fits=False,
        method="predict",
        batch_sequences=batch,
        micro_batch_sequences=micro,
        device_bytes=needed,
        reason=f"{show_bytes(needed)} are needed on a device, and there are {show_bytes(capacity)}",
    )


# -- all of it -------------------------------------------------------------------------------------------------------


def attempt_seconds(cell: Cell, *, steps: int, looking: bool = False) -> float | None:
    """What one attempt takes, where that is foreseen; one that looks for a micro-batch has few steps."""
    foreseen = cell.foreseen
    if foreseen is None or foreseen.attempt_s is None:
        return None
    if not looking or foreseen.step_s is None:
        return foreseen.attempt_s
    return max(0.0, foreseen.attempt_s - (steps - LOOKING_STEPS) * foreseen.step_s)


def cell_seconds(cell: Cell, *, steps: int, repeats: int) -> float | None:
    """What all attempts of a cell take one after the other; None where it is not foreseen."""
    if cell.foreseen is not None and not cell.foreseen.fits and cell.settings.devices == 1:
        # No process is needed for it.
        return 0.0
    whole = attempt_seconds(cell, steps=steps)
    short = attempt_seconds(cell, steps=steps, looking=True)
    if whole is None or short is None:
        return None
    return repeats * whole + (LOOKING_ATTEMPTS * short if looks(cell) else 0.0)


Share = Callable[[CellSetup], float]
"""Of all that can run at once, what a cell takes, as `Slots` has it."""


def alone(_settings: CellSetup) -> float:
    """The share of cells that run one after the other."""
    return 1.0


def beside_each_other(times: Sequence[tuple[float, float]]) -> float:
    """Seconds for cells that take so long each, and so large a share of what can run at once."""
    return max(sum(seconds * share for seconds, share in times), max((seconds for seconds, _ in times), default=0.0))


def sweep_seconds(cells: Sequence[Cell], *, steps: int, repeats: int, share: Share = alone) -> float:
    """What a sweep takes, as far as it is foreseen."""
    known = [(cell_seconds(cell, steps=steps, repeats=repeats), share(cell.settings)) for cell in cells]
    return beside_each_other([(seconds, part) for seconds, part in known if seconds is not None])
