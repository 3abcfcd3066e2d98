"""A prediction with its interval; over several devices without a framework, with the figures that frameworks reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flopwise.predict.interval import Scatter, SupportedInterval, interval, is_bare, scatter
from flopwise.predict.operators import other_part
from flopwise.records.evidence import Evidence
from flopwise.records.outcome import Interval
from flopwise.records.prediction import Prediction
from flopwise.setup.setup import SettledSetup, Setup
from flopwise.work.describe import describe
from flopwise.work.lstm import Lstm
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer

NO_CPU = "no interval: a CPU's step was never held against its prediction"
"""What accelerators measured says nothing of a processor, whose description is estimated beside."""
BEYOND_PEAK = "no interval: faster than the peak of the device, so constants of the stack cannot be right"
UNEVEN = "sequences of uneven length"
"""No step of the published tables has any."""
STREAMED = "dataflow"
"""The trainer whose recorded runs tell how far simulated steps are off, where they are planned by its rule."""
OWN_STREAMED = "flopwise-streaming"
"""The same of flopwise's own executor, and of plans of its own."""
FRAMEWORK = "framework"
"""The part of a step between what kernels and network take and what frameworks reach."""


def expect(prediction: Prediction, setup: Setup, evidence: Sequence[Evidence], *, stack: str) -> Prediction:
    """The prediction with its interval; `stack`: the name that measurements of its framework go by.

    Where no framework is said on several devices, the prediction is of none, which nobody reaches: the step and its
    rates become those of the interval's middle, and the kernels' ceiling stands beside them.
    """
    if setup.hardware.device.kind == "cpu":
        return replace(prediction, notes=(*prediction.notes, NO_CPU))
    bare = is_bare(stack)
    ceiling_s = ceiling_seconds(prediction.step_s, prediction.parts, prediction.devices)
    least = ceiling_s / prediction.step_s if bare else peak_share(prediction)
    if peak_share(prediction) > 1.0:
        return replace(prediction, notes=(*prediction.notes, BEYOND_PEAK))
    found = supported(
        # Of a plan, the strategy that was found.
        replace(setup, parallel=prediction.parallel),
        evidence,
        stack=stack,
        parameters=prediction.n_params,
        sequence_tokens=prediction.sequence_tokens,
        micro_batch_sequences=prediction.micro_batch_sequences,
        least=least,
    )
    if found is None:
        return prediction
    around = bounds(prediction.step_s, found)
    if not bare or prediction.devices == 1:
        return replace(prediction, interval=around)
    return replace(_slower(prediction, found.middle), interval=around, ceiling_s=ceiling_s)


HIDDEN = ("tensor", "expert", "sharding", "stages")
"""Parts of a step that some framework hides behind its kernels."""


def ceiling_seconds(step_s: float, parts: Mapping[str, float], devices: int) -> float:
    """What a step's kernels take where every exchange that can be is hidden behind them; of one device all of it."""
    return step_s - sum(parts.get(name, 0.0) for name in HIDDEN) if devices > 1 else step_s


def supported(
    setup: Setup,
    evidence: Sequence[Evidence],
    *,
    stack: str,
    parameters: int,
    sequence_tokens: int,
    micro_batch_sequences: int,
    least: float,
) -> SupportedInterval | None:
    """What the errors of published tables say of such a set-up, with the sizes that it left open or not."""
    parallel = setup.parallel
    return interval(
        [entry for entry in evidence if entry.stack != STREAMED],
        stack=stack,
        architecture=setup.hardware.device.architecture,
        parameters=parameters,
        sequence_tokens=sequence_tokens,
        devices=parallel.devices,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        zero=parallel.zero,
        features=features(setup),
        micro_tokens=micro_batch_sequences * sequence_tokens,
        least=least,
    )


def scatter_of(setup: SettledSetup, evidence: Sequence[Evidence], stack: str) -> Scatter | None:
    """How rows of such set-ups lie around a stack's predictions, where there are any; `stack`: as for `expect`."""
    parallel, tokens = setup.parallel, setup.sequence_tokens
    return scatter(
        evidence,
        stack=stack,
        architecture=setup.hardware.device.architecture,
        asked={
            "parameters": describe(setup.model, tokens).parameters,
            "sequence_tokens": tokens,
            "devices": parallel.devices,
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "micro_tokens": setup.micro_batch_sequences * tokens,
        },
        zero=parallel.zero,
        features=features(setup),
    )


def features(setup: Setup) -> tuple[str, ...]:
    """What of a set-up not every table has."""
    model = setup.model
    kind = "a recurrent model" if isinstance(model, Lstm) else "a mixture of experts" if model.experts else ""
    others = (kind, carried_words(model), UNEVEN if setup.lengths else "")
    return (*setup.parallel.features, *(words for words in others if words))


def carried_words(model: Model) -> str:
    """What no table has of a model whose blocks carry a state."""
    return "blocks that carry a state" if isinstance(model, Transformer) and model.recurrence else ""


def peak_share(prediction: Prediction) -> float:
    """The share of the predicted seconds that a device at its peak would take for what is executed.

    The convention `palm` also counts what is not executed: there no more than the prediction itself.
    """
    return prediction.hfu if prediction.convention == "causal" else min(1.0, prediction.hfu)


def bounds(step_s: float, found: SupportedInterval) -> Interval:
    """The interval in seconds."""
    return Interval(
        low_s=step_s * found.low, high_s=step_s * found.high, basis=", ".join(found.basis), outside=found.outside
    )


def _slower(prediction: Prediction, factor: float) -> Prediction:
    """The same step so many times as long; what it is longer by is a part and a row of its own."""
    step_s = prediction.step_s * factor
    more = step_s - prediction.step_s
    padded = prediction.padded_tokens_per_s
    ops = tuple(replace(op, share=op.time_s / step_s) for op in prediction.ops)
    return replace(
        prediction,
        step_s=step_s,
        tokens_per_s=prediction.tokens_per_s / factor,
        padded_tokens_per_s=padded / factor if padded else padded,
        mfu=prediction.mfu / factor,
        hfu=prediction.hfu / factor,
        parts={**prediction.parts, FRAMEWORK: more},
        ops=(*ops, other_part(FRAMEWORK, more, step_s)) if ops else (),
    )
