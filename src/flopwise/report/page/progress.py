"""How far a training has come that goes on, from its record and the last lines of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from flopwise.records.measurement import RunRecord, StepRecord
from flopwise.store.statistics import LEAST_WARM_UP, traced_steps

RECENT_STEPS = 24
"""Whose median tells the speed now: an evaluation or a checkpoint between two does not shake it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """A training that goes on, as its last steps tell of it; None: not known yet."""

    step: int
    steps: int
    """That were asked for."""
    loss: float | None = None
    evaluation: tuple[int, float] | None = None
    """The step after which it was last evaluated, and the loss that it had."""
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    step_s: float | None = None
    predicted_s: float | None = None
    exposed_share: float | None = None
    """Of the time of the recent steps, that in which a copy was awaited."""
    left_s: float | None = None
    """At the pace of the recent steps; evaluations and checkpoints come on top."""
    device_bytes: int | None = None
    host_bytes: int | None = None


def progress_of(record: RunRecord, last: Sequence[StepRecord]) -> RunProgress:
    """What the last steps say, the first ones and those that are traced left out of the pace where there are others."""
    done = [step for step in last if step.step > record.resumed_after]
    if not done:
        return RunProgress(step=record.resumed_after, steps=record.training.steps)
    newest, paced = done[-1], _paced(record, done)
    pace_s = median(step.step_s for step in paced)
    taken_s = sum(step.step_s for step in paced)
    waits = [step.exposed_copy_s for step in paced if step.exposed_copy_s is not None]
    rates = [step.mfu for step in paced if step.mfu is not None]
    evaluated = next((step for step in reversed(done) if step.evaluation and "eval_loss" in step.evaluation), None)
    return RunProgress(
        step=newest.step,
        steps=record.training.steps,
        loss=newest.loss,
        evaluation=(evaluated.step, evaluated.evaluation["eval_loss"]) if evaluated and evaluated.evaluation else None,
        learning_rate=newest.learning_rate,
        tokens_per_s=median(step.tokens_per_s for step in paced),
        mfu=median(rates) if rates else None,
        step_s=pace_s,
        predicted_s=newest.predicted_s,
        exposed_share=sum(waits) / taken_s if len(waits) == len(paced) and taken_s > 0 else None,
        left_s=max(0, record.training.steps - newest.step) * pace_s,
        device_bytes=newest.device_bytes,
        host_bytes=newest.host_bytes,
    )


def _paced(record: RunRecord, done: Sequence[StepRecord]) -> Sequence[StepRecord]:
    traced, begun = traced_steps(record), record.resumed_after + LEAST_WARM_UP
    steady = [step for step in done if step.step > begun and step.step not in traced]
    return (steady or done)[-RECENT_STEPS:]
