"""The learning rate of every step against torch's own schedulers, and transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from flopwise.base.errors import FlopwiseError
from flopwise.setup.trained import TrainedWords
from flopwise.setup.training import Schedule, Training

OF_TORCH: tuple[Schedule, ...] = ("cosine", "linear", "constant")


def rates_of_torch(training: Training) -> list[float]:
    """A warm-up in a line, then torch's schedule over the steps that are left."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.learning_rate)
    warm, left = training.warmup_steps, max(1, training.steps - training.warmup_steps)
    after: dict[Schedule, LRScheduler] = {
        "constant": LambdaLR(optimizer, lambda _: 1.0),
        "linear": LinearLR(optimizer, start_factor=1.0, end_factor=training.floor_share or 1e-300, total_iters=left),
        "cosine": CosineAnnealingLR(optimizer, left, eta_min=training.floor_share * training.learning_rate),
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


@pytest.mark.parametrize("schedule", OF_TORCH)
@given(
    steps=st.integers(1, 60),
    warm_share=st.floats(0, 1),
    rate=st.floats(1e-6, 10.0),
    final_share=st.none() | st.floats(1e-3, 1.0),
)
def test_rates_are_those_of_torch(
    schedule: Schedule, steps: int, warm_share: float, rate: float, final_share: float | None
) -> None:
    training = Training(
        steps=steps,
        warmup_steps=int(warm_share * steps),
        schedule=schedule,
        learning_rate=rate,
        min_learning_rate=None if final_share is None or schedule == "constant" else final_share * rate,
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
        ("wsd", 4, 0.5),
        ("wsd", 89, 1.0),
        ("wsd", 95, 0.5),
        ("wsd", 100, 0.0),
        ("inverse-sqrt", 4, 0.5),
        ("inverse-sqrt", 10, 1.0),
        ("inverse-sqrt", 40, 0.5),
    ],
)
def test_rates_by_hand(schedule: Schedule, step: int, share: float) -> None:
    training = Training(steps=100, warmup_steps=10, schedule=schedule, learning_rate=2.0)
    assert training.rate_at(step) == pytest.approx(2.0 * share)


@pytest.mark.parametrize(
    ("changes", "of_transformers"),
    [
        (
            {"schedule": "wsd", "decay_share": 0.4, "min_learning_rate": 0.02},
            lambda module, optimizer: module.get_wsd_schedule(
                optimizer, 10, 20, num_stable_steps=20, decay_type="linear", min_lr_ratio=0.01
            ),
        ),
        (
            {"schedule": "wsd", "decay_share": 0.4, "decay_shape": "sqrt"},
            lambda module, optimizer: module.get_wsd_schedule(
                optimizer, 10, 20, num_stable_steps=20, decay_type="1-sqrt"
            ),
        ),
        ({"schedule": "inverse-sqrt"}, lambda module, optimizer: module.get_inverse_sqrt_schedule(optimizer, 10)),
        (
            {"schedule": "inverse-sqrt", "warmup_steps": 0},
            lambda module, optimizer: module.get_inverse_sqrt_schedule(optimizer, 0),
        ),
        (
            {"min_learning_rate": 0.5},
            lambda module, optimizer: module.get_cosine_with_min_lr_schedule_with_warmup(
                optimizer, 10, 50, min_lr_rate=0.25
            ),
        ),
    ],
)
def test_rates_are_those_of_transformers(
    changes: dict[str, object], of_transformers: Callable[[object, object], LRScheduler]
) -> None:
    module = pytest.importorskip("transformers.optimization")
    training = Training(**{"steps": 50, "warmup_steps": 10, "learning_rate": 2.0, **changes})  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = of_transformers(module, optimizer)
    theirs = []
    for _ in range(50):
        theirs.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    # They begin at nothing: in the warm-up they are a step behind.
    warm = training.warmup_steps
    ours = [training.rate_at(step) for step in range(50)]
    if "min_learning_rate" not in changes:
        # And their floor lifts it as well.
        assert ours[: max(0, warm - 1)] == pytest.approx(theirs[1 : max(1, warm)])
    assert ours[warm:] == pytest.approx(theirs[warm:])


def test_a_decay_begins_behind_the_warm_up_and_may_be_nothing() -> None:
    longer = Training(steps=10, warmup_steps=8, schedule="wsd", decay_share=0.5, learning_rate=1.0)
    assert [longer.rate_at(step) for step in (7, 8, 9)] == [1.0, 1.0, 0.5]
    never = Training(steps=10, schedule="wsd", decay_share=0.0, learning_rate=1.0)
    assert {never.rate_at(step) for step in range(10)} == {1.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"schedule": "constant", "min_learning_rate": 1e-5},
        {"min_learning_rate": 1.0},
        {"decay_share": 1.5},
        {"decay_shape": "steep"},
    ],
)
def test_schedules_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(FlopwiseError) as caught:
        Training(steps=10, **wrong)  # type: ignore[arg-type]
    assert caught.value.hint


@pytest.mark.parametrize("name", ["steps", "learning_rate", "ema", "label_smoothing", "clip_norm", "seed"])
@pytest.mark.parametrize("wrong", ["0.5", True])
def test_what_is_no_number_is_refused(name: str, wrong: object) -> None:
    given: dict[str, Any] = {"steps": 1, name: wrong}
    with pytest.raises(FlopwiseError, match=f"{name} of a training cannot be") as caught:
        Training(**given)
    assert f"--{name.replace('_', '-')}" in str(caught.value.hint)


@pytest.mark.parametrize("wrong", [{"lora": "16"}, {"lora": 8.5}, {"lora": True}, {"lora": 8, "lora_alpha": "x"}])
def test_adapters_of_what_is_no_number_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(FlopwiseError, match="is expected"):
        TrainedWords(**wrong)
