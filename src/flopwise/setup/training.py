"""`Training`: how a model is trained, beside the plan that says how fast. Everything here changes the result."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from typing import Literal, get_args

from flopwise.base.errors import FlopwiseError, unknown_name

Task = Literal["language", "classification"]
TASKS: tuple[Task, ...] = get_args(Task)

Schedule = Literal["cosine", "linear", "constant"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The optimizer's settings, and how long it goes on."""

    steps: int
    task: Task = "language"
    learning_rate: float = 3e-4
    warmup_steps: int = 0
    schedule: Schedule = "cosine"
    final_share: float = 0.1
    """Of the learning rate, what a cosine ends at."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """For matrices and tables; biases and norms have none."""
    clip_norm: float | None = None
    """Largest norm of all gradients together; None: no clipping."""
    stochastic_rounding: bool = False
    """Weights kept in bf16 are rounded up or down by chance, in proportion to what lies between."""
    drops: bool = True
    """Whether what the model's description says is dropped; an evaluation drops nothing."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise FlopwiseError(f"a training cannot have {self.steps:,} steps", hint="--steps 100")
        if self.task not in TASKS:
            raise unknown_name("task", str(self.task), TASKS, hint=f"--task {' | '.join(TASKS)}")
        if self.schedule not in SCHEDULES:
            raise unknown_name("schedule", str(self.schedule), SCHEDULES, hint=f"--schedule {' | '.join(SCHEDULES)}")
        self._check_rates()

    def _check_rates(self) -> None:
        for name, least, most in (
            ("learning_rate", 0.0, 1e3),
            ("final_share", 0.0, 1.0),
            ("beta1", 0.0, 0.9999999),
            ("beta2", 0.0, 0.9999999),
            ("epsilon", 0.0, 1.0),
            ("weight_decay", 0.0, 1e3),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise FlopwiseError(
                    f"{name} of a training cannot be {value}",
                    why=f"it lies between {least:g} and {most:g}",
                    hint=f"--{name.replace('_', '-')} {max(least, most / 2) if most <= 1 else 0.1:g}",
                )
        if self.clip_norm is not None and not 0 < self.clip_norm < float("inf"):
            raise FlopwiseError(f"gradients cannot be clipped to a norm of {self.clip_norm}", hint="--clip 1.0")
        if self.warmup_steps < 0:
            raise FlopwiseError(f"a warm-up cannot have {self.warmup_steps:,} steps", hint="--warmup 10")
        if not 0 <= self.seed < 2**63:
            raise FlopwiseError(f"a seed is a whole number from 0 to 2^63, got {self.seed}", hint="--seed 0")

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: up in a line over the warm-up, then along the schedule."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.schedule == "linear":
            return self.learning_rate * max(0.0, 1.0 - done)
        share = self.final_share + (1 - self.final_share) * 0.5 * (1 + cos(pi * min(1.0, done)))
        return self.learning_rate * share
