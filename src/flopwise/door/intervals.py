"""A prediction with its interval: the one place where predictions meet the errors of the published tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flopwise.catalog.load import load_evidence, load_stack, stack_names
from flopwise.predict.interval import SupportedInterval, interval
from flopwise.records.outcome import Interval
from flopwise.records.plan import OWN_RULE
from flopwise.setup.stack import NO_STACK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flopwise.records.plan import Planned
    from flopwise.records.prediction import Prediction
    from flopwise.setup.hardware import Hardware
    from flopwise.setup.setup import Setup
    from flopwise.work.model import Model
    from flopwise.work.op import Convention


def predict_step(setup: Setup, convention: Convention) -> Prediction:
    """Predict a step and say how far off such predictions are."""
    return predict_steps([setup], convention)[0]


def predict_steps(setups: Sequence[Setup], convention: Convention) -> list[Prediction]:
    """The same of many set-ups at once."""
    from flopwise.predict import steps

    predictions = steps(setups, convention=convention)
    return [_with_interval(one, setup) for one, setup in zip(predictions, setups, strict=True)]


def _with_interval(prediction: Prediction, setup: Setup) -> Prediction:
    if setup.hardware.device.kind == "cpu":
        return replace(prediction, notes=(*prediction.notes, NO_CPU))
    return replace(prediction, interval=_interval(prediction, setup))


NO_CPU = "no interval: a CPU's step was never held against its prediction"
"""What accelerators measured says nothing of a processor, whose description is estimated beside."""


def _interval(prediction: Prediction, setup: Setup) -> Interval | None:
    from flopwise.work.lstm import Lstm

    model = setup.model
    kind = "a recurrent model" if isinstance(model, Lstm) else "a mixture of experts" if model.experts else ""
    kinds = [words for words in (kind, UNEVEN if prediction.lengths else "") if words]
    found = interval(
        [entry for entry in load_evidence() if entry.stack != STREAMED],
        stack=_measured_stack(setup),
        architecture=setup.hardware.device.architecture,
        parameters=prediction.n_params,
        sequence_tokens=prediction.sequence_tokens,
        devices=prediction.devices,
        tensor=prediction.parallel.tensor,
        pipeline=prediction.parallel.pipeline,
        zero=prediction.parallel.zero,
        features=(*prediction.parallel.features, *kinds),
        micro_tokens=prediction.micro_batch_sequences * prediction.sequence_tokens,
    )
    return _around(prediction.step_s, found)


def _around(step_s: float, found: SupportedInterval | None) -> Interval | None:
    if found is None:
        return None
    return Interval(
        low_s=step_s * found.low, high_s=step_s * found.high, basis=", ".join(found.basis), outside=found.outside
    )


UNEVEN = "sequences of uneven length"
"""No step of the published tables has any."""

STREAMED = "dataflow"
"""The trainer whose recorded runs tell how far simulated steps are off."""


def add_interval(planned: Planned, model: Model, hardware: Hardware) -> Planned:
    """The plan with how far off the simulator is, by recorded runs of that trainer; flopwise's own are yet to come."""
    from flopwise.work.describe import describe

    if hardware.device.kind == "cpu":
        return replace(planned, notes=(*planned.notes, NO_CPU))
    plan = planned.plan
    found = interval(
        [entry for entry in load_evidence() if entry.stack == STREAMED],
        stack=STREAMED,
        architecture=hardware.device.architecture,
        parameters=describe(model, plan.sequence_tokens).parameters,
        sequence_tokens=plan.sequence_tokens,
        devices=1,
        tensor=1,
        pipeline=1,
        features=(
            *(("flopwise's own executor",) if plan.rule == OWN_RULE else ()),
            *((UNEVEN,) if plan.lengths else ()),
        ),
        micro_tokens=plan.tokens_of(0),
    )
    return replace(planned, interval=_around(planned.forecast.step_s, found))


def _measured_stack(setup: Setup) -> str:
    """The name that measurements go by: a file of one's own is another framework, whatever it is called."""
    stack = setup.stack
    if stack is None:
        return NO_STACK
    known = stack.name in stack_names() and load_stack(stack.name) == stack
    return stack.name if known else f"{stack.name} of a file"
