"""A prediction with its interval: the one place where predictions meet the errors of the published tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flopwise.catalog.load import load_evidence, measured_stack
from flopwise.records.plan import OWN_RULE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flopwise.records.plan import Planned
    from flopwise.records.prediction import Prediction
    from flopwise.setup.hardware import Hardware
    from flopwise.setup.setup import Setup
    from flopwise.work.model import Model
    from flopwise.work.op import Convention


def predict_step(setup: Setup, convention: Convention, anchor: str | Path | None = None) -> Prediction:
    """Predict a step and say how far off such predictions are."""
    return predict_steps([setup], convention, anchor)[0]


def predict_steps(
    setups: Sequence[Setup], convention: Convention, anchor: str | Path | None = None
) -> list[Prediction]:
    """The same of many set-ups at once; `anchor`: a measured step that all are predicted from."""
    if anchor is not None:
        from flopwise.door.anchors import predict_anchored, read_anchor

        return predict_anchored(setups, read_anchor(str(anchor), setups[0]), convention)
    from flopwise.predict import steps

    predictions = steps(setups, convention=convention)
    return [expect_setup(one, setup) for one, setup in zip(predictions, setups, strict=True)]


def expect_setup(prediction: Prediction, setup: Setup) -> Prediction:
    """The prediction of a set-up with its interval, by the evidence that ships."""
    from flopwise.predict.expected import expect

    return expect(prediction, setup, load_evidence(), stack=measured_stack(setup.stack))


def add_interval(planned: Planned, model: Model, hardware: Hardware) -> Planned:
    """The plan with how far off the simulator is, by recorded runs of the trainer whose rule it is."""
    from flopwise.predict.expected import NO_CPU, OWN_STREAMED, STREAMED, UNEVEN, bounds, carried_words
    from flopwise.predict.interval import interval
    from flopwise.work.describe import describe

    if hardware.device.kind == "cpu":
        return replace(planned, notes=(*planned.notes, NO_CPU))
    plan = planned.plan
    found = interval(
        load_evidence(),
        stack=OWN_STREAMED if plan.rule == OWN_RULE else STREAMED,
        architecture=hardware.device.architecture,
        parameters=describe(model, plan.sequence_tokens).parameters,
        sequence_tokens=plan.sequence_tokens,
        devices=1,
        tensor=1,
        pipeline=1,
        features=tuple(filter(None, (UNEVEN if plan.lengths else "", carried_words(model)))),
        micro_tokens=plan.tokens_of(0),
        least=planned.forecast.hfu or 0.0,
    )
    return replace(planned, interval=bounds(planned.forecast.step_s, found) if found else None)
