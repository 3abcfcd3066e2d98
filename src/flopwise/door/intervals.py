"""A prediction with its interval: the one place where predictions meet the errors of the published tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flopwise.records.plan import Planned
    from flopwise.records.prediction import Interval, Prediction
    from flopwise.setup.hardware import Hardware
    from flopwise.setup.setup import Setup
    from flopwise.work.model import Model
    from flopwise.work.op import Convention


def predicted(setup: Setup, convention: Convention) -> Prediction:
    """Predict a step and say how far off such predictions are."""
    from dataclasses import replace

    from flopwise.predict import step

    prediction = step(setup, convention=convention)
    return replace(prediction, interval=_interval(prediction, setup))


def _interval(prediction: Prediction, setup: Setup) -> Interval | None:
    from flopwise.catalog.load import load_evidence
    from flopwise.predict.interval import interval
    from flopwise.records.prediction import Interval
    from flopwise.work.lstm import Lstm

    model = setup.model
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
        features=(
            *prediction.parallel.features,
            *(
                ("a recurrent model",)
                if isinstance(model, Lstm)
                else ("a mixture of experts",)
                if model.experts
                else ()
            ),
        ),
        micro_tokens=prediction.micro_batch_sequences * prediction.sequence_tokens,
    )
    if found is None:
        return None
    return Interval(
        low_s=prediction.step_s * found.low,
        high_s=prediction.step_s * found.high,
        basis=", ".join(found.basis),
        outside=found.outside,
    )


STREAMED = "dataflow"
"""The trainer whose recorded runs tell how far simulated steps are off."""


def streamed_interval(planned: Planned, model: Model, hardware: Hardware) -> Interval | None:
    """How far off the simulator is, by the runs of the trainer that were recorded; flopwise's own are yet to come."""
    from flopwise.catalog.load import load_evidence
    from flopwise.predict.interval import interval
    from flopwise.records.prediction import Interval
    from flopwise.work.describe import describe

    plan, step_s = planned.plan, planned.forecast.step_s
    found = interval(
        [entry for entry in load_evidence() if entry.stack == STREAMED],
        stack=STREAMED,
        architecture=hardware.device.architecture,
        parameters=describe(model, plan.sequence_tokens).parameters,
        sequence_tokens=plan.sequence_tokens,
        devices=1,
        tensor=1,
        pipeline=1,
        features=() if plan.rule.startswith(STREAMED) else ("flopwise's own executor",),
        micro_tokens=plan.tokens_of(0),
    )
    if found is None:
        return None
    return Interval(
        low_s=step_s * found.low, high_s=step_s * found.high, basis=", ".join(found.basis), outside=found.outside
    )


def _measured_stack(setup: Setup) -> str:
    """The name that measurements go by: a file of one's own is another framework, whatever it is called."""
    from flopwise.catalog.load import load_stack, stack_names
    from flopwise.records.prediction import NO_STACK

    stack = setup.stack
    if stack is None:
        return NO_STACK
    known = stack.name in stack_names() and load_stack(stack.name) == stack
    return stack.name if known else f"{stack.name} of a file"
