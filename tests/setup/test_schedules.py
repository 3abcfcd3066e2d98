"""The learning rate of every step against torch's own schedulers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from flopwise.setup.training import SCHEDULES, Schedule, Training


def rates_of_torch(training: Training) -> list[float]:
    """A warm-up in a line, then torch's schedule over the steps that are left."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.learning_rate)
    warm, left = training.warmup_steps, max(1, training.steps - training.warmup_steps)
    after: dict[Schedule, LRScheduler] = {
        "constant": LambdaLR(optimizer, lambda _: 1.0),
        "linear": LinearLR(optimizer, start_factor=1.0, end_factor=1e-300, total_iters=left),
        "cosine": CosineAnnealingLR(optimizer, left, eta_min=training.final_share * training.learning_rate),
    }
    scheduler = after[training.schedule]
    for group in optimizer.param_groups:
        group["lr"] = training.learning_rate
    if warm:
        # At its k-th step torch is at (k + 1) / warm: it begins with the first share, not with nothing.
        rise = LinearLR(optimizer, start_factor=1.0 / warm, total_iters=warm - 1) if warm > 1 else after["constant"]
        scheduler = SequentialLR(optimizer, [rise, scheduler], milestones=[warm])
    found = []
    for _ in range(training.steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(
    steps=st.integers(1, 60), warm_share=st.floats(0, 1), rate=st.floats(1e-6, 10.0), final_share=st.floats(0.0, 1.0)
)
def test_rates_are_those_of_torch(
    schedule: Schedule, steps: int, warm_share: float, rate: float, final_share: float
) -> None:
    training = Training(
        steps=steps,
        warmup_steps=int(warm_share * steps),
        schedule=schedule,
        learning_rate=rate,
        final_share=final_share,
    )
    assert [training.rate_at(step) for step in range(steps)] == pytest.approx(
        rates_of_torch(training), rel=1e-6, abs=1e-12
    )


@pytest.mark.parametrize(
    ("schedule", "step", "share"),
    [
        ("constant", 0, 0.1),
        ("constant", 9, 1.0),
        ("constant", 99, 1.0),
        ("linear", 4, 0.5),
        ("linear", 10, 1.0),
        ("linear", 55, 0.5),
        ("linear", 100, 0.0),
        ("cosine", 10, 1.0),
        ("cosine", 55, 0.55),
        ("cosine", 100, 0.1),
    ],
)
def test_rates_by_hand(schedule: Schedule, step: int, share: float) -> None:
    training = Training(steps=100, warmup_steps=10, schedule=schedule, learning_rate=2.0)
    assert training.rate_at(step) == pytest.approx(2.0 * share)
