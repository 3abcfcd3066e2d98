"""A prediction with its interval: the one place where predictions meet the errors of the published tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flopwise.core.hardware import Hardware
    from flopwise.core.model import Model
    from flopwise.core.op import Convention
    from flopwise.core.prediction import Interval, Prediction
    from flopwise.predict.choose import Request


def predicted(model: Model, hardware: Hardware, request: Request, convention: Convention) -> Prediction:
    """Predict a step and say how far off such predictions are."""
    from dataclasses import replace

    from flopwise.predict import step

    prediction = step(model, hardware, request, convention=convention)
    return replace(prediction, interval=_interval(prediction, hardware))


def _interval(prediction: Prediction, hardware: Hardware) -> Interval | None:
    from flopwise.core.catalog import load_evidence
    from flopwise.core.prediction import Interval
    from flopwise.predict.interval import interval

    found = interval(
        load_evidence(),
        stack=prediction.stack,
        architecture=hardware.device.architecture,
        parameters=prediction.n_params,
        sequence_tokens=prediction.sequence_tokens,
        devices=prediction.devices,
        tensor=prediction.parallel.tensor,
        pipeline=prediction.parallel.pipeline,
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
